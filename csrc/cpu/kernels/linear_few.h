// A linear layer of few rows, as for the next token of a language model.
//
// Few rows of x would fill few lanes of a panel, so the roles are exchanged: rows of the weight are
// transposed into a small panel, with the rows across the lanes, and x is broadcast. Each thread
// reads its part of the weight once, in order, which takes most of the time of one row. The sums
// have the order of the tiled kernel, and products commute, so the bits of a row do not depend on
// the number of rows.
//
// There are two panels: the next one is packed before or while this one is multiplied. So no vector
// is loaded from narrower stores that have not reached the cache, which would wait for them.
#pragma once
#include "../threads.h"
#include "activation.h"
#include "blocks.h"
#include "lines.h"
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Both kernels split the reduction into blocks of this many words, and add the blocks in order.
constexpr int64_t kReducedWords = 256;

// Each row of a panel is a separate stream. The prefetcher of Intel's cores follows 32 streams, and
// Intel's cores run the instruction set without BF16. There sums of few rows wait for each other
// longer than packing takes, so packing is placed between them.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
template <class T>
constexpr int64_t kPanelRows = 32;
constexpr int64_t kPanelLines = 2;  // of each row
constexpr int64_t kLinesAhead = 8;
constexpr int kLocality = 3;  // of the prefetch: L1
constexpr bool kPacksBetweenSums = true;
#else
template <class T>
constexpr int64_t kPanelRows = kSame<T, double> ? 32 : 64;
constexpr int64_t kPanelLines = 1;
constexpr int64_t kLinesAhead = 4;
constexpr int kLocality = 2;  // L2
constexpr bool kPacksBetweenSums = false;
#endif

// The contents of a lane in a panel of the weight: a word, or elements of 16 bits that are widened
// at each use, because writing a panel of floats, twice as large, takes longer than widening. A
// lane of 32 bits holds two bf16 elements.
template <class P, class S>
struct Packed {
  typedef typename P::Word type;
  static constexpr int kWords = 1;
  template <int word>
  static FASTATTN_INLINE Vec<typename P::Acc> vector(const type* at) {
    return load(at);
  }
};
template <>
struct Packed<Single, Bf16> {
  typedef float type;
  static constexpr int kWords = 2;
  template <int word>
  static FASTATTN_INLINE VecF vector(const float* at) {
    const VecI both = (VecI)load(at);
    return (VecF)(word == 0 ? both << 16 : both & static_cast<int32_t>(0xffff0000));
  }
};
template <>
struct Packed<Single, F16> {
  typedef uint16_t type;
  static constexpr int kWords = 1;
  template <int word>
  static FASTATTN_INLINE VecF vector(const uint16_t* at) {
    return load_as<float>(reinterpret_cast<const F16*>(at), kLanes<float>);
  }
};

// The weight is [N, K] with dense rows of S.
template <class P, class S>
class FewRows {
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  typedef Packed<P, S> Panel;
  typedef typename Panel::type E;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t L = kPanelRows<T>;  // rows of the weight in a panel
  static constexpr int kVectors = static_cast<int>(L) / W;
  static constexpr int64_t kLine = 64 / sizeof(S);               // elements
  static constexpr int64_t kLineWords = kLine / P::kPerWord;     // words
  static constexpr int64_t kChunk = kPanelLines * kLineWords;    // words of a row in a panel
  static constexpr int64_t kPanel = kChunk / Panel::kWords * L;  // elements of E
  static constexpr int64_t kAhead = kLinesAhead * kLine;         // elements
  static constexpr int kRows = kSquareRows<E>;
  // As many sums as the registers hold. Three rows also have room for four vectors.
  static constexpr int kSums = kRegisters == 32 ? 16 : 8;

 public:
  // With more rows, the tiled kernel is as fast with AVX2.
  static constexpr int64_t kMostRows = 32;

  explicit FewRows(const LinearParams& params) : p(params) {}

  // Whether there are few rows, and enough of the weight for a panel.
  static bool serves(const LinearParams& p) {
    return p.M <= kMostRows && p.N >= L && !p.w_transposed;
  }

  // Each thread computes its share of the outputs, for all rows.
  void run() {
    const int64_t groups = (p.N + L - 1) / L;
    const int team = team_size(p.threads, groups, 2.0 * p.M * p.N * p.K);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Buffers buf = allocate(thread_scratch(allocate(nullptr).bytes));
      const Word* x = stage_keys<P>(P::elements(const_cast<void*>(p.x), p.dtype), p.x_stride[0],
                                    p.x_stride[1], p.M, p.K, buf.x);
      // Each thread reads one part of the weight.
#pragma omp for schedule(static)
      for (int64_t thread = 0; thread < team; ++thread) {
        const int64_t g0 = groups * thread / team, g1 = groups * (thread + 1) / team;
        for (int64_t g = g0; g < g1; ++g) group(buf, x, g * L);
      }
    }
  }

 private:
  const LinearParams& p;

  struct Buffers {
    Word* x;           // [M][words of K]
    E *panel, *other;  // [kChunk / kWords][L]
    T* sums;           // [M][L], of one block of the reduction
    T* y;              // [M][L]
    size_t bytes;
  };

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers buf;
    buf.x = a.take<Word>(p.M * words<P>(p.K));
    buf.panel = a.take<E>(kPanel), buf.other = a.take<E>(kPanel);
    buf.sums = a.take<T>(p.M * L);
    buf.y = a.take<T>(p.M * L);
    buf.bytes = a.used();
    return buf;
  }

  // Columns [n, n + L) of y. The last group begins earlier, and writes only the columns that no
  // other group writes.
  void group(Buffers& buf, const Word* x, int64_t n) const {
    const int64_t n0 = min_of(n, p.N - L), reduced = words<P>(p.K);
    const S* w = static_cast<const S*>(p.w) + n0 * p.w_stride;
    pack(w, 0, buf.panel);
    for (int64_t k0 = 0; k0 < reduced; k0 += kReducedWords) {
      const int64_t k1 = min_of(reduced, k0 + kReducedWords);
      for (int64_t k = k0; k < k1; k += kChunk) {
        const int64_t next = (k + kChunk) * P::kPerWord;
        if (k + kChunk > k1 || next + kPanelLines * kLine > p.K ||
            !multiply_and_pack(x + k, reduced, k == k0, w, next, buf)) {
          if (next < p.K) pack(w, next, buf.other);
          multiply(x + k, reduced, min_of(kChunk, k1 - k), k == k0, buf);
        }
        E* const packed = buf.other;
        buf.other = buf.panel, buf.panel = packed;
      }
      add(k0 == 0, n0, buf);
    }
    activate(p.activation, buf.y, p.M * L);
    for (int64_t m = 0; m < p.M; ++m)
      store_columns(buf.y + m * L, n - n0, static_cast<S*>(p.y) + m * p.y_stride + n0);
  }

  // y = sums + bias of the first block, y += sums of the others.
  void add(bool first, int64_t n0, Buffers& buf) const {
    for (int64_t i = 0; i < p.M * L; i += W) {
      Vec<T> sum = load(buf.sums + i);
      if (!first)
        sum = load(buf.y + i) + sum;
      else if (p.bias != nullptr)
        sum += load_as<T>(static_cast<const S*>(p.bias) + n0 + i % L, W);
      store(buf.y + i, sum);
    }
  }

  // Columns [skipped, L) of a row.
  static void store_columns(const T* from, int64_t skipped, S* to) {
    for (; skipped % W != 0; ++skipped) narrow(from[skipped], to + skipped);
    for (int64_t i = skipped; i < L; i += W) store_as<T>(to + i, load(from + i), W);
  }

  // How far to prefetch from a panel that begins at this column; at the end of the rows, to the
  // beginning of the next group's rows.
  int64_t ahead_of(int64_t column) const {
    return column + kAhead < p.K ? kAhead : L * p.w_stride + kAhead - p.K;
  }
  static FASTATTN_INLINE void prefetch(const S* w, int64_t ld) {
    for (int i = 0; i < kRows; ++i)
      FASTATTN_UNROLL for (int64_t l = 0; l < kPanelLines; ++l)
          __builtin_prefetch(w + i * ld + l * kLine, 0, kLocality);
  }

  // Packs the lines of L rows from this column on to panel[column][lane].
  __attribute__((noinline)) void pack(const S* w, int64_t column, E* panel) const {
    const int64_t ld = p.w_stride, end = min_of(p.K, column + kPanelLines * kLine);
    const int64_t ahead = column + ahead_of(column);
    for (int64_t n = 0; n < L; n += kRows, w += kRows * ld) {
      prefetch(w + ahead, ld);
      E* to = panel + n;
      for (int64_t c = column; c < end; c += kLine, to += kLineWords / Panel::kWords * L) {
        if (end - c >= kLine) {
          transpose_lines<E>(w + c, ld, to, L);
          continue;
        }
        S line[kRows * kLine] = {};
        for (int i = 0; i < kRows; ++i)
          __builtin_memcpy(line + i * kLine, w + i * ld + c,
                           static_cast<size_t>(end - c) * sizeof(S));
        transpose_lines<E>(line, kLine, to, L);
      }
    }
  }

  // Multiplies a whole panel by up to four rows while it packs the next one, which is whole too;
  // false if it does not serve this call.
  bool multiply_and_pack(const Word* x, int64_t ldx, bool first, const S* w, int64_t column,
                         Buffers& buf) const {
    if constexpr (kPacksBetweenSums && !kSame<T, double>) {
      const auto run = [&](auto width) __attribute__((always_inline)) {
        multiply_and_pack_rows<decltype(width)::value>(x, ldx, first, w, column, buf);
        return true;
      };
      if (p.M == 1) return run(Width<1>());
      if (p.M == 2) return run(Width<2>());
      if (p.M == 3) return run(Width<3>());
      if (p.M == 4) return run(Width<4>());
    }
    return false;
  }
  template <int kRowsOfX>
  __attribute__((noinline)) void multiply_and_pack_rows(const Word* x, int64_t ldx, bool first,
                                                        const S* w, int64_t column,
                                                        Buffers& buf) const {
    constexpr int64_t kWords = kChunk / (L / kRows * kPanelLines);  // multiplied after each square
    static_assert(kWords % Panel::kWords == 0 && kChunk % kWords == 0);
    const int64_t ld = p.w_stride, ahead = ahead_of(column);
    const E* panel = buf.panel;
    E* next = buf.other;
    Vec<T> acc[kRowsOfX][kVectors];
    load_sums(buf.sums, first, acc);
    w += column;
    for (int64_t n = 0; n < L; n += kRows, w += kRows * ld, next += kRows) {
      prefetch(w + ahead, ld);
      FASTATTN_UNROLL for (int64_t l = 0; l < kPanelLines; ++l) {
        transpose_lines<E>(w + l * kLine, ld, next + l * (kLineWords / Panel::kWords) * L, L);
        FASTATTN_UNROLL for (int64_t k = 0; k < kWords; k += Panel::kWords, panel += L)
            multiply_words(x + k, ldx, panel, acc);
        x += kWords;
      }
    }
    store_sums(acc, buf.sums);
  }

  // sums[row][lane] += x panel
  void multiply(const Word* x, int64_t ldx, int64_t count, bool first, Buffers& buf) const {
    T* sums = buf.sums;
    int64_t left = p.M;
    const auto take = [&](auto width) __attribute__((always_inline)) {
      constexpr int kTaken = decltype(width)::value;
      for (; left >= kTaken; left -= kTaken, x += kTaken * ldx, sums += kTaken * L)
        tiles<kTaken>(x, ldx, count, first, buf.panel, sums);
    };
    if constexpr (kSums / kVectors > 4) take(Width<kSums / kVectors>());
    take(Width<4>());
    if (p.M % 4 == 1) tiles<1>(x, ldx, count, first, buf.panel, sums);
    if (p.M % 4 == 2) tiles<2>(x, ldx, count, first, buf.panel, sums);
    if (p.M % 4 == 3) tiles<3>(x, ldx, count, first, buf.panel, sums);
  }

  // sums[r][L] = x_r W^T, or += without `first`, for kRowsOfX rows of x and a panel of L outputs
  // over `count` words.
  template <int kRowsOfX>
  static __attribute__((noinline)) void tiles(const Word* x, int64_t ldx, int64_t count, bool first,
                                              const E* panel, T* sums) {
    constexpr int NV = min_of(kVectors, kSums / (kRowsOfX == 3 ? 4 : kRowsOfX));
    for (int64_t n = 0; n < L; n += NV * W, sums += NV * W, panel += NV * W) {
      Vec<T> acc[kRowsOfX][NV];
      load_sums(sums, first, acc);
      int64_t k = 0;
      for (; k + Panel::kWords <= count; k += Panel::kWords)
        multiply_words(x + k, ldx, panel + k / Panel::kWords * L, acc);
      if (k < count) multiply_word<0>(x + k, ldx, panel + k / Panel::kWords * L, acc);
      store_sums(acc, sums);
    }
  }

  // acc = sums[r][L], or 0 with `first`, and back.
  template <int kRowsOfX, int NV>
  static FASTATTN_INLINE void load_sums(const T* sums, bool first, Vec<T> (&acc)[kRowsOfX][NV]) {
    FASTATTN_UNROLL for (int r = 0; r < kRowsOfX; ++r) FASTATTN_UNROLL for (int v = 0; v < NV; ++v)
        acc[r][v] = first ? Vec<T>{} : load(sums + r * L + v * W);
  }
  template <int kRowsOfX, int NV>
  static FASTATTN_INLINE void store_sums(const Vec<T> (&acc)[kRowsOfX][NV], T* sums) {
    FASTATTN_UNROLL for (int r = 0; r < kRowsOfX; ++r) FASTATTN_UNROLL for (int v = 0; v < NV; ++v)
        store(sums + r * L + v * W, acc[r][v]);
  }

  // acc[r][v] += x[r * ldx] times the words of a column of the panel.
  template <int kRowsOfX, int NV>
  static FASTATTN_INLINE void multiply_words(const Word* x, int64_t ldx, const E* at,
                                             Vec<T> (&acc)[kRowsOfX][NV]) {
    multiply_word<0>(x, ldx, at, acc);
    if constexpr (Panel::kWords == 2) multiply_word<1>(x + 1, ldx, at, acc);
  }

  // acc[r][v] += x[r * ldx] times one word of every lane, in the order of tile().
  template <int word, int kRowsOfX, int NV>
  static FASTATTN_INLINE void multiply_word(const Word* x, int64_t ldx, const E* at,
                                            Vec<T> (&acc)[kRowsOfX][NV]) {
    Vec<T> a[kRowsOfX];
    FASTATTN_UNROLL for (int r = 0; r < kRowsOfX; ++r) a[r] = splat<T>(x[r * ldx]);
    FASTATTN_UNROLL for (int v = 0; v < NV; ++v) {
      const Vec<T> b = Panel::template vector<word>(at + v * W);
      FASTATTN_UNROLL for (int r = 0; r < kRowsOfX; ++r) acc[r][v] =
          P::multiply_add(a[r], b, acc[r][v]);
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
