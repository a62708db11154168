// The functions of score programs, of any number: infinities, NaN and subnormals included.
#pragma once
#include "scores.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

FASTATTN_INLINE VecF converted(VecI x) { return __builtin_convertvector(x, VecF); }
FASTATTN_INLINE VecD converted(VecL x) { return __builtin_convertvector(x, VecD); }
FASTATTN_INLINE VecI converted(VecF x) { return __builtin_convertvector(x, VecI); }
FASTATTN_INLINE VecL converted(VecD x) { return __builtin_convertvector(x, VecL); }

template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  typedef int32_t type;
  typedef VecU Unsigned;
};
template <>
struct IntOf<double> {
  typedef int64_t type;
  typedef uint64_t Unsigned __attribute__((vector_size(kVectorBytes), may_alias));
};

template <class T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int kFraction = 23, kBias = 127;
  // ln 2 in two parts; the product of the first with an exponent is exact.
  static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;
  static constexpr float kLeast = -104, kMost = 89, kShift = 12582912.0f;  // 1.5 * 2^23
  static constexpr int32_t kRootHalf = 0x3f3504f3;                         // sqrt(1/2)
};
template <>
struct FloatFormat<double> {
  static constexpr int kFraction = 52, kBias = 1023;
  static constexpr double kHigh = 0x1.62e42fee00000p-1, kLow = 0x1.a39ef35793c76p-33;
  static constexpr double kLeast = -746, kMost = 710, kShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int64_t kRootHalf = 0x3fe6a09e667f3bcd;
};

// e^x = 2^n 2^f. 2^n is two factors, because n may be beyond the exponents of either.
template <class T>
FASTATTN_INLINE Vec<T> exp_of(Vec<T> x) {
  typedef FloatFormat<T> F;
  x = max_of(splat<T>(F::kLeast), x);
  x = select<T>(x > F::kMost, splat<T>(F::kMost), x);
  const Vec<T> shifted = x * kLog2E<T> + F::kShift, n = shifted - F::kShift;
  const Vec<T> f = ((x - n * F::kHigh) - n * F::kLow) * kLog2E<T>;
  const Mask<T> whole = (Mask<T>)shifted - (Mask<T>)splat<T>(F::kShift), half = whole >> 1;
  const auto power = [](Mask<T> e) __attribute__((always_inline)) {
    return (Vec<T>)((e + F::kBias) << F::kFraction);
  };
  return exp2_fraction<false>(f) * power(half) * power(whole - half);
}

// log x = n log 2 + log m,  sqrt(1/2) <= m < sqrt(2)
template <class T>
FASTATTN_INLINE Vec<T> log_of_any(Vec<T> x) {
  typedef FloatFormat<T> F;
  constexpr T kScale = static_cast<T>(int64_t{1} << F::kFraction);
  const T least = kSame<T, float> ? static_cast<T>(0x1p-126) : static_cast<T>(0x1p-1022);
  const Mask<T> small = x < least;  // subnormal
  const Vec<T> y = select<T>(small, x * kScale, x);
  const Mask<T> n = ((Mask<T>)y - F::kRootHalf) >> F::kFraction;
  const Vec<T> m = (Vec<T>)((Mask<T>)y - (n << F::kFraction));
  const Vec<T> e = converted(n) - select<T>(small, splat<T>(F::kFraction), Vec<T>{});
  Vec<T> r = e * F::kHigh + (e * F::kLow + log1p_of(m - T(1)));
  r = select<T>(x == kInf<T>, x, r);
  r = select<T>(x == T(0), splat<T>(-kInf<T>), r);
  return select<T>(x >= T(0), r, splat<T>(static_cast<T>(__builtin_nan(""))));
}

template <class T>
FASTATTN_INLINE Vec<T> floor_of(Vec<T> x) {
  constexpr T kShift = FloatFormat<T>::kShift,
              kWhole = kShift / 3;  // 2^22: no fraction from here on
  const Vec<T> near = (x + kShift) - kShift;
  const Vec<T> down = near - select<T>(near > x, splat<T>(T(1)), Vec<T>{});
  return select<T>((x < kWhole) & (x > -kWhole), down, x);
}

template <class T>
FASTATTN_INLINE Vec<T> sqrt_of(Vec<T> x) {
#if defined(__AVX512BW__) && !FASTATTN_EMULATED_AVX512
  if constexpr (kSame<T, float>) return (Vec<T>)_mm512_sqrt_ps((__m512)x);
  if constexpr (kSame<T, double>) return (Vec<T>)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__) && !FASTATTN_EMULATED_AVX512
  if constexpr (kSame<T, float>) return (Vec<T>)_mm256_sqrt_ps((__m256)x);
  if constexpr (kSame<T, double>) return (Vec<T>)_mm256_sqrt_pd((__m256d)x);
#endif
  FASTATTN_UNROLL for (int l = 0; l < kLanes<T>; ++l) x[l] =
      static_cast<T>(__builtin_sqrt(static_cast<double>(x[l])));
  return x;
}

// Rounded towards 0, and clamped to int32 also in double; 0 for NaN.
template <class T>
FASTATTN_INLINE Mask<T> truncated(Vec<T> x) {
  constexpr T kMost = kSame<T, float> ? T(2147483520.0) : T(2147483647.0);
  x = select<T>(x == x, x, Vec<T>{});
  x = select<T>(x > kMost, splat<T>(kMost), x);
  return converted(select<T>(x < T(-2147483648.0), splat<T>(T(-2147483648.0)), x));
}

// a / b rounded down, lane by lane; 0 for b = 0.
template <class T>
FASTATTN_INLINE Mask<T> quotients(Mask<T> a, Mask<T> b, int lanes) {
  Mask<T> q{};
  for (int l = 0; l < lanes; ++l) {
    const int64_t x = a[l], y = b[l];
    if (y == 0) continue;
    if (y == -1) {  // the quotient of the least integer has no representation
      q[l] = static_cast<typename IntOf<T>::type>(uint64_t{0} - static_cast<uint64_t>(x));
      continue;
    }
    const int64_t whole = x / y;
    q[l] = static_cast<typename IntOf<T>::type>(whole - (x % y != 0 && (x < 0) != (y < 0)));
  }
  return q;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
