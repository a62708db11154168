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

// 2^n 2^f, where n is a whole number plus kShift. 2^n is two factors, because n may be beyond the
// exponents of either.
template <class T>
FASTATTN_INLINE Vec<T> exp2_of_parts(Vec<T> shifted, Vec<T> f) {
  typedef FloatFormat<T> F;
  const Mask<T> whole = (Mask<T>)shifted - (Mask<T>)splat<T>(F::kShift), half = whole >> 1;
  const auto power = [](Mask<T> e) __attribute__((always_inline)) {
    return (Vec<T>)((e + F::kBias) << F::kFraction);
  };
  return exp2_fraction<false>(f) * power(half) * power(whole - half);
}

// e^x. Outside [kLeast, kMost] the result is 0 or inf, so x is clamped.
template <class T>
FASTATTN_INLINE Vec<T> exp_of(Vec<T> x) {
  typedef FloatFormat<T> F;
  x = max_of(splat<T>(F::kLeast), x);
  x = select<T>(x > F::kMost, splat<T>(F::kMost), x);
  const Vec<T> shifted = x * kLog2E<T> + F::kShift, n = shifted - F::kShift;
  return exp2_of_parts<T>(shifted, ((x - n * F::kHigh) - n * F::kLow) * kLog2E<T>);
}

// 2^x, clamped to the same range.
template <class T>
FASTATTN_INLINE Vec<T> exp2_of(Vec<T> x) {
  typedef FloatFormat<T> F;
  constexpr T kLeast = F::kLeast * kLog2E<T>, kMost = F::kMost * kLog2E<T>;
  x = max_of(splat<T>(kLeast), x);
  x = select<T>(x > kMost, splat<T>(kMost), x);
  const Vec<T> shifted = x + F::kShift;
  return exp2_of_parts<T>(shifted, x - (shifted - F::kShift));
}

// e^x - 1. For |x| < 1 it is (2^n - 1) + 2^n (2^f - 1), which keeps the relative accuracy of small
// x.
template <class T>
FASTATTN_INLINE Vec<T> expm1_of(Vec<T> x) {
  typedef FloatFormat<T> F;
  Vec<T> power;
  const Vec<T> n = round_of(x * kLog2E<T>, &power);
  const Vec<T> f = ((x - n * F::kHigh) - n * F::kLow) * kLog2E<T>;
  const Vec<T> near = (power - T(1)) + power * (f * exp2_slope<false>(f));
  return select<T>((x < T(1)) & (x > T(-1)), near, exp_of<T>(x) - T(1));
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

// log(1 + x). The rounding error of y = 1 + x is added as its first-order term, error / y.
template <class T>
FASTATTN_INLINE Vec<T> log1p_of_any(Vec<T> x) {
  const Vec<T> y = T(1) + x, r = log_of_any<T>(y);
  return select<T>((x < T(1)) & (x > T(-1)), r + (x - (y - T(1))) / y, r);
}

// Sine and cosine of radians up to kFarthest: x = n pi / 2 + r. In double, pi / 2 has three parts,
// and the products of the first two with n are exact.
constexpr double kFarthest = 0x1p20;
// sin(x) and cos(x). x - n pi/2 is computed in float64 with pi/2 in three parts.
template <class T>
FASTATTN_INLINE Waves<T> waves_of_radians(Vec<T> x) {
  typedef double Wide __attribute__((vector_size(kLanes<T> * 8), may_alias));
  constexpr double kQuarters = 0.63661977236758134308, kTurns = 0.15915494309189533577;
  constexpr double kPi2[] = {0x1.921fb544p+0, 0x1.0b4611a6p-34, 0x1.3198a2e037073p-69};
  const Wide y = __builtin_convertvector(x, Wide);
  const Wide n = (y * kQuarters + FloatFormat<double>::kShift) - FloatFormat<double>::kShift;
  const Wide r = ((y - n * kPi2[0]) - n * kPi2[1]) - n * kPi2[2];
  const Mask<T> quadrant = __builtin_convertvector(n, Mask<T>) << (8 * sizeof(T) - 2);
  return waves<T>(quadrant, __builtin_convertvector(r * kTurns, Vec<T>));
}

// Where |x| is beyond kFarthest, and of no other lane, the C library's function.
template <class T>
FASTATTN_INLINE Vec<T> far_lanes(Vec<T> x, Vec<T> near, double (*exact)(double)) {
  const Mask<T> far = (x > static_cast<T>(kFarthest)) | (x < static_cast<T>(-kFarthest));
  Mask<T> any = far;
  FASTATTN_UNROLL for (int l = 1; l < kLanes<T>; ++l) any[0] |= far[l];
  if (any[0] != 0)
    for (int l = 0; l < kLanes<T>; ++l)
      if (far[l] != 0) near[l] = static_cast<T>(exact(static_cast<double>(x[l])));
  return near;
}

// The largest integer that is not above x; adding kShift rounds to an integer.
template <class T>
FASTATTN_INLINE Vec<T> floor_of(Vec<T> x) {
  constexpr T kShift = FloatFormat<T>::kShift,
              kWhole = kShift / 3;  // 2^22: no fraction from here on
  const Vec<T> near = (x + kShift) - kShift;
  const Vec<T> down = near - select<T>(near > x, splat<T>(T(1)), Vec<T>{});
  return select<T>((x < kWhole) & (x > -kWhole), down, x);
}

// The square root, correctly rounded.
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
