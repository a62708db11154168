// Additive scores,  e_ij = sum_a v_a tanh(q_ia + k_ja),  and their derivatives.
//
// tanh(q + k) = 1 - 2 r  with  r = 1 / (1 + e^2q e^2k)
// The exponentials depend on one row each and are computed once per row. A pair of rows then costs
// a few multiplications and half a reciprocal for each a: two reciprocals come from one division,
// 1/x = y / (x y) and 1/y = x / (x y).
//
// The hidden dimension runs across the lanes. So queries, keys and their gradients are read and
// written in their own order, and a single query keeps all lanes busy. A block of rows is stored in
// panels, [ceil(A / lanes)][rows + 1][lanes]. The extra row makes the panels start in different
// cache sets.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// The factored form is used where max|q| + max|k| of two blocks is at most this: then the product
// of two factors 1 + e^2q e^2k is finite and its reciprocal is not subnormal. Larger values go
// through tanh itself, and so does a v beyond kLargestVector.
template <class T>
constexpr T kFactoredLimit = T(21);
template <>
constexpr double kFactoredLimit<double> = 150;
template <class T>
constexpr T kLargestVector = T(1e12);

// ln(2) / 2 in two parts. The high part times an integer up to kFactoredLimit * 3 is exact.
template <class T>
constexpr T kHalfLn2High = 0.346572875976562500f;
template <class T>
constexpr T kHalfLn2Low = 7.143034101547086e-07f;
template <>
constexpr double kHalfLn2High<double> = 0x1.62e42fefa3000p-2;
template <>
constexpr double kHalfLn2Low<double> = 1.4117645281515789e-13;

// Integers of a vector's bits; their sums may overflow.
template <class T>
struct WordsOf {
  typedef VecU type;
};
template <>
struct WordsOf<double> {
  typedef uint64_t type __attribute__((vector_size(kVectorBytes), may_alias));
};

// e^(2 x) for |x| <= kFactoredLimit; other lanes are undefined, and the caller replaces them. The
// argument is reduced before the multiplication by log2(e), because rounding the product first
// would cost |x| units in the last place.
template <class T>
FASTATTN_INLINE Vec<T> exp_twice(Vec<T> x) {
  constexpr T kRound = sizeof(T) == 4 ? T(12582912) : T(6755399441055744);  // 1.5 * 2^23, 2^52
  constexpr T kTwoLog2E = T(2) * kLog2E<T>;
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  const Vec<T> shifted = x * kTwoLog2E + kRound, n = shifted - kRound;
  const Vec<T> remainder = (x - n * kHalfLn2High<T>)-n * kHalfLn2Low<T>;
  const Vec<T> y = exp2_fraction<false>(remainder * kTwoLog2E);
  typedef typename WordsOf<T>::type Words;
  return (Vec<T>)((Words)y + ((Words)shifted << kMantissa));
}

// 1 / x. kCoarse has a relative error of 2^-14, for results that are rounded to 16 bits.
template <class T>
constexpr bool kHasCoarse = kSame<T, float> && kVectorBytes == 64;
template <bool kCoarse>
FASTATTN_INLINE VecF reciprocal(VecF x) {
#if FASTATTN_AVX512
  const VecF y = (VecF)_mm512_rcp14_ps((__m512)x);
  return kCoarse ? y : y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}
template <bool kCoarse>
FASTATTN_INLINE VecD reciprocal(VecD x) {
  return 1.0 / x;
}

// Returns x and stops the compiler from fusing this product with the addition that follows. A
// separate addition and multiplication run on different units than two multiply-adds, and the
// multipliers are the bottleneck.
template <class V>
FASTATTN_INLINE V product(V x) {
#if defined(__x86_64__)
  asm("" : FASTATTN_OPERAND(x));
#endif
  return x;
}

// The scores of kQ queries and lanes / kQ keys, in lane r * (lanes / kQ) + c, from
//   -tanh = n / d  with  n = 1 - e^2q e^2k,  d = 1 + e^2q e^2k.
// 1 - 2 / d needs no n, but near d = 1 one unit in its last place is four units of tanh.
template <class T, bool kCoarse, int kQ>
FASTATTN_INLINE Vec<T> score_tile(const T* eq, int64_t q_panel, const T* ek, int64_t k_panel,
                                  const T* v, int64_t panels) {
  constexpr int W = kLanes<T>, kK = W / kQ;
  Vec<T> acc[W] = {};
  for (int64_t a = 0; a < panels; ++a) {
    Vec<T> q[kQ];
    FASTATTN_UNROLL for (int r = 0; r < kQ; ++r) q[r] = load(eq + r * W);
    const Vec<T> va = load(v + a * W);
    FASTATTN_UNROLL for (int c = 0; c < kK; c += 2) {
      const Vec<T> k0 = load(ek + c * W), k1 = load(ek + (c + 1) * W);
      FASTATTN_UNROLL for (int r = 0; r < kQ; ++r) {
        const Vec<T> e0 = product(q[r] * k0), e1 = product(q[r] * k1);
        const Vec<T> d0 = T(1) + e0, d1 = T(1) + e1, n0 = T(1) - e0, n1 = T(1) - e1;
        const Vec<T> x = va * reciprocal<kCoarse>(d0 * d1);
        acc[r * kK + c] -= (n0 * d1) * x;
        acc[r * kK + c + 1] -= (n1 * d0) * x;
      }
    }
    eq += q_panel;
    ek += k_panel;
  }
  return sum_each<T>(acc);
}

// One panel of kQ queries and an even number of keys. With e = e^2q e^2k, w = g r and h = w e r,
// which is g (1 - t^2) / 4:
//   dq_i += sum_j h_ij     dk_j += sum_i h_ij     dv += sum_ij w_ij (e_ij - 1) = sum_ij g_ij t_ij
// e r is 1 - r, and keeps its relative accuracy where r is near 1.
template <class T, bool kCoarse, int kQ>
FASTATTN_INLINE void gradient_tile(const T* eq, const T* ek, const T* g, int64_t ldg, int64_t keys,
                                   T* dq, T* dk, T* dv) {
  constexpr int W = kLanes<T>;
  Vec<T> q[kQ], to_q[kQ], to_v[kQ];
  FASTATTN_UNROLL for (int r = 0; r < kQ; ++r) {
    q[r] = load(eq + r * W);
    to_q[r] = to_v[r] = Vec<T>{};
  }
  for (int64_t j = 0; j < keys; j += 2) {
    const Vec<T> k0 = load(ek + j * W), k1 = load(ek + (j + 1) * W);
    Vec<T> to_k[2] = {};
    FASTATTN_UNROLL for (int r = 0; r < kQ; ++r) {
      const Vec<T> e0 = q[r] * k0, e1 = q[r] * k1;
      const Vec<T> d0 = e0 + T(1), d1 = e1 + T(1);
      const Vec<T> x = reciprocal<kCoarse>(d0 * d1);
      const Vec<T> r0 = d1 * x, r1 = d0 * x;
      const Vec<T> w0 = splat<T>(g[r * ldg + j]) * r0, w1 = splat<T>(g[r * ldg + j + 1]) * r1;
      const Vec<T> h0 = product(w0 * (e0 * r0)), h1 = product(w1 * (e1 * r1));
      to_v[r] += w0 * (e0 - T(1)) + w1 * (e1 - T(1));
      to_q[r] += h0 + h1;
      to_k[0] += h0;
      to_k[1] += h1;
    }
    store(dk + j * W, load(dk + j * W) + to_k[0]);
    store(dk + (j + 1) * W, load(dk + (j + 1) * W) + to_k[1]);
  }
  Vec<T> sum = to_v[0];
  FASTATTN_UNROLL for (int r = 1; r < kQ; ++r) sum += to_v[r];
  FASTATTN_UNROLL for (int r = 0; r < kQ; ++r) store(dq + r * W, load(dq + r * W) + to_q[r]);
  store(dv, load(dv) + sum);
}

// The gradients of one panel from q, k and the bias through tanh, for large, infinite and NaN
// values. q and k are added first: where they cancel, the sum is exact. An excluded key has g = 0
// and is skipped.
template <class T>
__attribute__((noinline)) T score_exactly(const T* q, int64_t q_panel, const T* k, int64_t k_panel,
                                          const T* bias, const T* v, int64_t panels) {
  Vec<T> acc{};
  for (int64_t a = 0; a < panels; ++a)
    acc += load(v + a * kLanes<T>) *
           tanh_of<T>(load(q + a * q_panel) + load(k + a * k_panel) + load(bias + a * kLanes<T>));
  return sum_lanes<T>(acc);
}
// The same for the gradients of one query and one vector of A: adds to dq [W], dk [keys][W] and dv
// [W]. g [keys] are the gradients of the scores.
template <class T>
__attribute__((noinline)) void gradient_exactly(const T* q, const T* k, const T* bias, const T* g,
                                                int64_t keys, T* dq, T* dk, T* dv) {
  constexpr int W = kLanes<T>;
  Vec<T> to_q{}, to_v{};
  for (int64_t j = 0; j < keys; ++j) {
    if (g[j] == T(0)) continue;
    // 1 / (1 + e^-2|x|) and 1 / (1 + e^2|x|): their product is (1 - t^2) / 4, their difference |t|.
    const Vec<T> x = load(q) + load(k + j * W) + load(bias), a = select<T>(x < T(0), -x, x);
    const Vec<T> e = exp_twice<T>(max_of(splat<T>(-kFactoredLimit<T>), -a));
    const Vec<T> upper = T(1) / (T(1) + e), lower = e * upper;
    const Vec<T> gj = splat<T>(g[j]), h = gj * upper * lower, t = upper - lower;
    to_v += gj * select<T>(x < T(0), -t, t);
    to_q += h;
    store(dk + j * W, load(dk + j * W) + h);
  }
  store(dq, load(dq) + to_q);
  store(dv, load(dv) + to_v);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
