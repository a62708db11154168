// The matrix product that all kernels are built from: a few rows, broadcast word by word, times a
// panel of vectors.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Calls step(k) for k < K; a number that is known when the kernel is compiled is Width<K>().
template <class Step>
FASTATTN_INLINE void each_step(int64_t K, Step step) {
  _Pragma("GCC unroll 2") for (int64_t k = 0; k < K; ++k) step(k);
}
template <int K, class Step>
FASTATTN_INLINE void each_step(Width<K>, Step step) {
  FASTATTN_UNROLL for (int k = 0; k < K; ++k) step(k);
}

// acc[r][n] = start(r, n) + sum_k A(r, k) * B[k * ldb + n * lanes]; then finish(r, n, acc[r][n]).
// A(r, k) is A[r * lda + k], or A[k * lda + r] with kColumns. A is read in place, by broadcast.
template <class P, int kRows, int kVectors, bool kColumns, class Count, class Start, class Finish>
FASTATTN_INLINE void tile(const typename P::Word* __restrict A, int64_t lda,
                          const typename P::Word* __restrict B, int64_t ldb, Count K, Start start,
                          Finish finish) {
  typedef typename P::Acc T;
  constexpr int W = kLanes<T>;
  Vec<T> acc[kRows][kVectors];
  FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n)
      acc[r][n] = start(r, n);

  // x86 addresses base + {1, 2} * stride, so one base register serves three rows.
  constexpr int kBases = (kRows + 2) / 3;
  const typename P::Word* base[kBases];
  FASTATTN_UNROLL for (int g = 0; g < kBases; ++g) base[g] = A + 3 * g * lda;

  each_step(K, [&](int64_t k) __attribute__((always_inline)) {
    Vec<T> b[kVectors];
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) b[n] = load(B + k * ldb + n * W);
    FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec<T> a = splat<T>(kColumns ? A[k * lda + r] : base[r / 3][(r % 3) * lda + k]);
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) acc[r][n] =
          P::multiply_add(a, b[n], acc[r][n]);
    }
  });
  FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n)
      finish(r, n, acc[r][n]);
}

// The same for the first half of one vector, from zero; finish(r, x) gets it padded with zeros.
template <class P, int kRows, class Count, class Finish>
FASTATTN_INLINE void half_tile(const float* __restrict A, int64_t lda, const float* __restrict B,
                               int64_t ldb, Count K, Finish finish) {
  typedef typename CountTo<kLanes<float> / 2>::type Lanes;
  HalfF acc[kRows] = {};
  constexpr int kBases = (kRows + 2) / 3;
  const float* base[kBases];
  FASTATTN_UNROLL for (int g = 0; g < kBases; ++g) base[g] = A + 3 * g * lda;
  each_step(K, [&](int64_t k) __attribute__((always_inline)) {
    const HalfF b = load_half(B + k * ldb);
    FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) acc[r] =
        P::multiply_add(splat_half(base[r / 3][(r % 3) * lda + k], Lanes()), b, acc[r]);
  });
  FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) finish(r, padded_half(acc[r]));
}

// Calls f(Width<n>(), r0) for tiles of n rows from r0 on: full tiles, then eight, four and single
// rows. Every row is the same chain of additions over k, so results do not depend on the tiling.
//
// A single row waits for each addition of its chain, so eight or nine rows are two tiles of four
// rather than one of six.
template <int kRows, class F>
FASTATTN_INLINE void each_tile(int64_t rows, F f) {
  int64_t r0 = 0;
  const int64_t fours = kRows == 6 && rows >= 8 && (rows % 6 == 2 || rows % 6 == 3) ? 8 : 0;
  for (; r0 + kRows <= rows - fours; r0 += kRows) f(Width<kRows>(), r0);
  if constexpr (kRows > 8) {
    if (r0 + 8 <= rows) {
      f(Width<8>(), r0);
      r0 += 8;
    }
  }
  if constexpr (kRows > 4) {
    for (; r0 + 4 <= rows; r0 += 4) f(Width<4>(), r0);
  }
  for (; r0 < rows; ++r0) f(Width<1>(), r0);
}

// A tile over any number of rows. start and finish get the row within `rows`.
template <class P, int kRows, int kVectors, bool kColumns, class Start, class Finish>
FASTATTN_INLINE void tile_rows(int64_t rows, const typename P::Word* A, int64_t lda,
                               const typename P::Word* B, int64_t ldb, int64_t K, Start start,
                               Finish finish) {
  typedef Vec<typename P::Acc> V;
  const int64_t step = kColumns ? 1 : lda;
  each_tile<kRows>(rows, [&](auto width, int64_t r0) __attribute__((always_inline)) {
    tile<P, decltype(width)::value, kVectors, kColumns>(
        A + r0 * step, lda, B, ldb, K,
        [&](int r, int n) __attribute__((always_inline)) { return start(r0 + r, n); },
        [&](int r, int n, V v) __attribute__((always_inline)) { finish(r0 + r, n, v); });
  });
}

// C = A B with rows of B across the lanes, `vectors` vectors of each, as many at a time as the
// registers hold. A is read by broadcast, as in tile(); finish(r, v, x) gets vector v of row r.
template <class P, bool kColumns, class Finish>
FASTATTN_INLINE void product_rows(int64_t rows, const typename P::Word* A, int64_t lda,
                                  const typename P::Word* B, int64_t ldb, int64_t K,
                                  int64_t vectors, Finish finish) {
  typedef Vec<typename P::Acc> V;
  constexpr int kRows = 6;
  int64_t v = 0;
  const auto block = [&](auto width) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(width)::value;
    for (; v + kVectors <= vectors; v += kVectors)
      tile_rows<P, kRows, kVectors, kColumns>(
          rows, A, lda, B + v * kLanes<typename P::Acc>, ldb, K, [](int64_t, int) { return V{}; },
          [&](int64_t r, int n, V x) __attribute__((always_inline)) { finish(r, v + n, x); });
  };
  if constexpr (kRegisters == 32) block(Width<4>());
  block(Width<2>());
  block(Width<1>());
}

// The chain of a few queries in float32, and the words of several that are computed at a time.
constexpr int kShortChain = 4, kShortChains = 16;

// The longest chain of additions in a dot product, in words. For a few queries PyTorch uses a
// matrix-vector product with short chains, whose error this must match; short chains are free
// there, because reading keys is the bound. Doubles favour accuracy. Without FMA, products are
// rounded before they are added, and a long chain has twice PyTorch's rounding error.
template <class T>
FASTATTN_INLINE int64_t longest_chain(const AttentionParams& p) {
#if defined(__FMA__) || defined(__aarch64__)
  constexpr bool kFused = true;
#else
  constexpr bool kFused = false;
#endif
  constexpr bool kDouble = kSame<T, double>;
  if (p.Lq <= 8) return kDouble ? 2 : kShortChain;
  return p.Lq <= 32 || kDouble || !kFused ? 16 : 256;
}

// How often score_products() calls meanwhile(), at least.
template <class P, int kVectors>
FASTATTN_INLINE int64_t score_calls(int64_t rows, int64_t K, int64_t chain) {
  const int64_t kRows = K <= chain ? P::kScoreRows : P::kScoreRows / kVectors;
  const int64_t step = max_of<int64_t>(chain, kShortChains);
  return (rows + kRows - 1) / kRows * ((K + step - 1) / step);
}

// S[row][lane] = sum_k A[row * lda + k] * panel[k][lane], and the maximum over the rows.
//
// Chains longer than `chain` are split and their parts added, so that the error does not grow with
// the head dim. meanwhile() is called before each tile of a part. kHalf: all queries are in the
// first half of the panel.
template <class P, int kVectors, bool kHalf, class Meanwhile>
FASTATTN_INLINE void score_tiles(int64_t rows, const typename P::Word* A, int64_t lda,
                                 const typename P::Word* panel, int64_t K, int64_t chain,
                                 typename P::Acc* S, Vec<typename P::Acc>* top,
                                 Meanwhile meanwhile) {
  typedef typename P::Acc T;
  constexpr int W = kLanes<T>;
  constexpr int64_t lanes = kVectors * W;
  FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) top[n] = splat<T>(-kInf<T>);
  const auto zero = [](int64_t, int) { return Vec<T>{}; };
  const auto keep = [&](int64_t row, int n, Vec<T> s) __attribute__((always_inline)) {
    store(S + row * lanes + n * W, s);
    top[n] = max_of(top[n], s);
  };
  // Parts of the products of a tile of rows.
  const auto products = [&](auto width, int64_t r0, int64_t k, auto count,
                            auto finish) __attribute__((always_inline)) {
    constexpr int kTile = decltype(width)::value;
    if constexpr (kHalf)
      half_tile<P, kTile>(A + r0 * lda + k, lda, panel + k * lanes, lanes, count,
                          [&](int r, VecF s) __attribute__((always_inline)) { finish(r, 0, s); });
    else
      tile<P, kTile, kVectors, false>(A + r0 * lda + k, lda, panel + k * lanes, lanes, count, zero,
                                      finish);
  };
  if (K <= chain)
    return each_tile<P::kScoreRows>(
        rows, [&](auto width, int64_t r0) __attribute__((always_inline)) {
          meanwhile();
          products(width, r0, 0, K, [&](int r, int n, Vec<T> s) __attribute__((always_inline)) {
            keep(r0 + r, n, s);
          });
        });
  // Twice the registers of a tile: the sum of a part, and the sum of the parts before.
  constexpr int kRows = P::kScoreRows / kVectors;
  each_tile<kRows>(rows, [&](auto width, int64_t r0) __attribute__((always_inline)) {
    constexpr int kTile = decltype(width)::value;
    Vec<T> sum[kTile][kVectors] = {};
    const auto add = [&](int r, int n, Vec<T> s) __attribute__((always_inline)) { sum[r][n] += s; };
    int64_t k = 0;
    if constexpr (kVectors == 1 && P::kPerWord == 1)
      for (; chain == kShortChain && k + kShortChains <= K; k += kShortChains) {
        meanwhile();
        FASTATTN_UNROLL for (int from = 0; from < kShortChains; from += kShortChain)
            products(width, r0, k + from, Width<kShortChain>(), add);
      }
    for (; k < K; k += chain) {
      meanwhile();
      products(width, r0, k, min_of(K - k, chain), add);
    }
    FASTATTN_UNROLL for (int r = 0; r < kTile; ++r)
        FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) keep(r0 + r, n, sum[r][n]);
  });
}
template <class P, int kVectors, class Meanwhile>
FASTATTN_INLINE void score_products(int64_t rows, const typename P::Word* A, int64_t lda,
                                    const typename P::Word* panel, int64_t K, int64_t chain,
                                    typename P::Acc* S, Vec<typename P::Acc>* top, int64_t queries,
                                    Meanwhile meanwhile) {
  if constexpr (P::kHalves && kVectors == 1)
    if (queries <= kLanes<float> / 2)
      return score_tiles<P, 1, true>(rows, A, lda, panel, K, chain, S, top, meanwhile);
  score_tiles<P, kVectors, false>(rows, A, lda, panel, K, chain, S, top, meanwhile);
}
// The same without work that is done meanwhile.
template <class P, int kVectors>
FASTATTN_INLINE void score_products(int64_t rows, const typename P::Word* A, int64_t lda,
                                    const typename P::Word* panel, int64_t K, int64_t chain,
                                    typename P::Acc* S, Vec<typename P::Acc>* top) {
  score_tiles<P, kVectors, false>(rows, A, lda, panel, K, chain, S, top, [] {});
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
