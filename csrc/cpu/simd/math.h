// Elementary functions on vectors. Polynomials are minimax (Remez, relative error) on the stated
// interval.
#pragma once
#include "simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T>
constexpr T kLog2E = static_cast<T>(1.4426950408889634073599);
template <class T>
constexpr T kLn2 = static_cast<T>(0.69314718055994530941723);

template <class T>
FASTATTN_INLINE Vec<T> horner(Vec<T>, T last) {
  return splat<T>(last);
}
template <class T, class... Rest>
FASTATTN_INLINE Vec<T> horner(Vec<T> x, T first, Rest... rest) {
  return horner<T>(x, rest...) * x + first;
}

// 2^f on [-1/2, 1/2], exactly 1 at 0 so that a lone key has weight 1. Relative error 2.8e-6
// (coarse, for weights that are rounded to bf16, whose sum is not), 2.0e-9 (fp32), 3e-18 (fp64).
template <bool Coarse>
FASTATTN_INLINE VecF exp2_slope(VecF f) {  // (2^f - 1) / f
  if constexpr (Coarse)
    return horner<float>(f, 0.693124211f, 0.240240991f, 0.0559064262f, 0.00958285201f);
  return horner<float>(f, 0.693147203f, 0.240226479f, 0.0555033247f, 0.00961843736f, 0.00133988745f,
                       0.000153533622f);
}

// (2^f - 1) / f, in float64.
template <bool Coarse>
FASTATTN_INLINE VecD exp2_slope(VecD f) {
  return horner<double>(f, 0.69314718055994533045, 0.24022650695910156194, 0.055504108664819921999,
                        0.0096181291075883388805, 0.001333355814678983701,
                        0.00015403530462509966101, 1.5252733490062370866e-5,
                        1.3215433091849151785e-6, 1.0178197993382467131e-7,
                        7.0741052512368323548e-9, 4.4352866745874167032e-10);
}
// 2^f for a fraction f.
template <bool Coarse, class V>
FASTATTN_INLINE V exp2_fraction(V f) {
  return exp2_slope<Coarse>(f) * f + 1;
}

// 2^x for x <= 0, the softmax's case. 2^-inf is exactly 0; below the normal range the result is 0
// or subnormal; NaN stays NaN (the constant comes first in max_of for that reason).
template <bool Coarse = false>
FASTATTN_INLINE VecF exp2_neg(VecF x) {
#if FASTATTN_AVX512
  // f = x - round(x), 0 for -inf
  const VecF f = (VecF)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (VecF)_mm512_scalef_ps((__m512)exp2_fraction<Coarse>(f), (__m512)(x - f));
#else
  // Adding 1.5 * 2^23 + 127 leaves round(x) + 127, the exponent field of 2^round(x), in the low
  // mantissa bits. At -127 that field is 0, and so is the power.
  constexpr float kShift = 12582912.0f + 127;
  const VecF clamped = max_of(splat(-127.0f), x);
  const VecF shifted = clamped + kShift;
  const VecF power = (VecF)((VecI)shifted << 23);
  return exp2_fraction<Coarse>(clamped - (shifted - kShift)) * power;
#endif
}
// 2^(x + rest) in double, where |rest| is below a rounding of x.
template <bool Coarse = false>
FASTATTN_INLINE VecD exp2_neg(VecD x, VecD rest = VecD{}) {
#if FASTATTN_AVX512
  x = max_of(splat(-2000.0), x);
  const __m512d n = _mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (VecD)_mm512_scalef_pd((__m512d)exp2_fraction<Coarse>(x - (VecD)n + rest), n);
#else
  const VecD clamped = max_of(splat(-1022.0), x);
  const VecD shifted = clamped + 6755399441055744.0;  // 1.5 * 2^52
  const VecD p = exp2_fraction<Coarse>(clamped - (shifted - 6755399441055744.0) + rest);
  const VecD y = (VecD)((VecL)p + ((VecL)shifted << 52));
  // clamped - clamped is 0, or NaN where x is: the integer addition above would lose it.
  return select<double>(x < -1022.0, VecD{}, y + (clamped - clamped));
#endif
}

// e^x = 2^(x c) for x <= 0 in double, c = log2 e. The rounding error of x c would appear in the
// result multiplied by |x|, so it is added to the fraction.
FASTATTN_INLINE VecD exp_neg(VecD x) {
  x = max_of(splat(-2000.0), x);  // the error of an infinite product is NaN
  const VecD product = x * kLog2E<double>;
#if FASTATTN_AVX512
  const VecD error =
      (VecD)_mm512_fmsub_pd((__m512d)x, _mm512_set1_pd(kLog2E<double>), (__m512d)product);
#elif defined(__FMA__)
  const VecD error =
      (VecD)_mm256_fmsub_pd((__m256d)x, _mm256_set1_pd(kLog2E<double>), (__m256d)product);
#else  // split both factors into halves, whose products are exact
  constexpr double kHigh = 0x1.7154760000000p+0, kLow = kLog2E<double> - kHigh;
  const VecD high = (VecD)((VecL)x & -(1LL << 27)), low = x - high;
  const VecD error = ((high * kHigh - product) + high * kLow + low * kHigh) + low * kLow;
#endif
  constexpr double kRest = 2.0355273740931033e-17;  // log2 e - kLog2E
  return exp2_neg(product, error + x * kRest);
}

// e^x for x <= 0 in float32. Subtracting n ln 2 from x first avoids the rounding error of x log2 e.
FASTATTN_INLINE VecF exp_neg(VecF x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23 leaves round(x) in the low mantissa bits
  constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;  // ln 2; n kHigh is exact
  const VecF clamped = max_of(splat(-87.0f), x);
  const VecF shifted = clamped * kLog2E<float> + kShift, n = shifted - kShift;
  const VecF f = ((clamped - n * kHigh) - n * kLow) * kLog2E<float>;
  const VecF power = (VecF)(((VecI)shifted << 23) + (127 << 23));  // 2^n
  return select<float>(x < -87.0f, VecF{}, exp2_fraction<false>(f) * power);
}

// round(x) and 2^round(x) for |x| < 126.
FASTATTN_INLINE VecF round_of(VecF x, VecF* power) {
  const VecF shifted = x + 12582912.0f;  // 1.5 * 2^23
  *power = (VecF)(((VecI)shifted << 23) + (127 << 23));
  return shifted - 12582912.0f;
}
FASTATTN_INLINE VecD round_of(VecD x, VecD* power) {
  const VecD shifted = x + 6755399441055744.0;  // 1.5 * 2^52
  *power = (VecD)(((VecL)shifted << 52) + (1023LL << 52));
  return shifted - 6755399441055744.0;
}

// 1 / d for a d that is neither huge nor tiny, accurate to 2^-23, cheaper than a division.
FASTATTN_INLINE VecF reciprocal(VecF d) {
#if FASTATTN_AVX512
  const VecF r = (VecF)_mm512_rcp14_ps((__m512)d);
  return r + r * (1.0f - d * r);
#else
  return 1.0f / d;
#endif
}
FASTATTN_INLINE VecD reciprocal(VecD d) { return 1.0 / d; }

// tanh(x) from y = 2 log2(e) x:  sign(y) m / (2 - m)  with  m = 1 - 2^-|y|
// m = (1 - 2^n) - 2^n (2^f - 1), n + f = -|y|. For small |y| the first part is 0, so m keeps its
// relative accuracy.
template <class T>
constexpr T kTanhUnit = 2 * kLog2E<T>;
// tanh(x) from y = 2 log2(e) x.
template <class T>
FASTATTN_INLINE Vec<T> tanh_of_scaled(Vec<T> y) {
  Vec<T> power;
  const Vec<T> x = max_of(splat<T>(-100), select<T>(y < T(0), y, -y));
  const Vec<T> f = x - round_of(x, &power);
  const Vec<T> m = (T(1) - power) - power * (f * exp2_slope<false>(f));
  const Vec<T> t = m * reciprocal(T(2) - m);
  return select<T>(y < T(0), -t, t);
}
// tanh(x).
template <class T>
FASTATTN_INLINE Vec<T> tanh_of(Vec<T> x) {
  return tanh_of_scaled<T>(x * kTanhUnit<T>);
}

// log(1 + x) of 0 <= x <= 1:  2 atanh(z) = 2 z P(z^2)  with  z = x / (2 + x) <= 1/3. Relative error
// 4e-9 and 9e-22.
FASTATTN_INLINE VecF log1p_of(VecF x) {
  const VecF z = x / (2.0f + x), zz = z * z;
  const VecF p = horner<float>(zz, 1.0f, 0.333331573f, 0.200124551f, 0.139803016f, 0.140891662f);
  return 2.0f * z * p;
}

// log(1 + x) for 0 <= x <= 1, in float64.
FASTATTN_INLINE VecD log1p_of(VecD x) {
  const VecD z = x / (2.0 + x), zz = z * z;
  const VecD p = horner<double>(
      zz, 1.0, 0.33333333333333333059, 0.20000000000000137577, 0.14285714285687225244,
      0.11111111113873168531, 0.090909089234052838217, 0.076923141979802477744,
      0.06666497890664219047, 0.058853359621748235678, 0.052272222452930369491,
      0.050505958104134271467, 0.028875450681566566243, 0.080440304506411289943);
  return 2.0 * z * p;
}

// log(x) of x >= 1, or NaN. x = 2^n (1 + f) with 0 <= f < 1, so both terms are >= 0 and nothing
// cancels. Relative error 5e-16.
FASTATTN_INLINE VecD log_of(VecD x) {
  constexpr int64_t kFraction = (1LL << 52) - 1, kOne = 1023LL << 52, kTwoTo52 = 1075LL << 52;
  const VecD n = (VecD)((VecL)x >> 52 | kTwoTo52) - (0x1p52 + 1023);
  const VecD f = (VecD)(((VecL)x & kFraction) | kOne) - 1.0;
  return select<double>(x - x == 0.0, n * kLn2<double> + log1p_of(f), x);  // inf and NaN stay
}

template <class T>
constexpr auto kSignBit = static_cast<int64_t>(uint64_t{1} << 63);
template <>
constexpr auto kSignBit<float> = INT32_MIN;

// sin(2 pi t) = t P(t^2) for |t| <= 1/8, the leading coefficient in two parts. Relative error 3e-9
// and 3e-18.
FASTATTN_INLINE VecF sin_turns(VecF t, VecF tt) {
  const VecF rest = horner<float>(tt, -41.3416615f, 81.5923536f, -75.3935628f);
  return t * 6.28318548f + t * (rest * tt - 1.95191750e-7f);
}
// sin(2 pi t), from t and tt = t^2.
FASTATTN_INLINE VecD sin_turns(VecD t, VecD tt) {
  const VecD rest =
      horner<double>(tt, -41.341702240399631464, 81.605249275944509706, -76.705859703315063442,
                     42.058684902041629787, -15.093797504376454335, 3.7807261516868835485);
  return t * 6.2831853071795862320 + t * (rest * tt + 2.2410e-16);
}

// cos(2 pi t) = 1 + t^2 Q(t^2) for |t| <= 1/8. Error 2e-10 and 2e-19.
FASTATTN_INLINE VecF cos_turns(VecF tt) {
  return horner<float>(tt, 1.0f, -19.7392088f, 64.9393687f, -85.4487638f, 59.4217088f);
}
// cos(2 pi t), from tt = t^2.
FASTATTN_INLINE VecD cos_turns(VecD tt) {
  return horner<double>(tt, 1.0, -19.739208802178717230, 64.939394022668241848,
                        -85.456817206643137462, 60.244641352520257615, -26.426253253452795356,
                        7.9032056385801089484, -1.6990072619667402197);
}

template <class T>
struct Waves {
  Vec<T> sine, cosine;
};

// Sine and cosine of an angle that is t of a turn, |t| <= 1/8, plus the quadrant in the two top
// bits. Per quadrant, the sines are sin t, cos t, -sin t, -cos t; the cosines are one quadrant
// ahead.
template <class T>
FASTATTN_INLINE Waves<T> waves(Mask<T> quadrant, Vec<T> t) {
  constexpr int kSign = 8 * sizeof(T) - 1;
  const Vec<T> tt = t * t, s = sin_turns(t, tt), c = cos_turns(tt);
  const Mask<T> odd = (quadrant << 1) >> kSign, second_bit = (quadrant << 1) & kSignBit<T>;
  const Mask<T> sign = quadrant & kSignBit<T>;
  return {(Vec<T>)((Mask<T>)select<T>(odd, c, s) ^ sign),
          (Vec<T>)((Mask<T>)select<T>(odd, s, c) ^ sign ^ second_bit)};
}

// 32 x 32 -> 64 bit products of all lanes, as their high and low words.
FASTATTN_INLINE void multiply_wide(VecU a, uint32_t m, VecU* high, VecU* low) {
#if FASTATTN_AVX512
  const __m512i mm = _mm512_set1_epi32(static_cast<int>(m));
  const __m512i even = _mm512_mul_epu32((__m512i)a, mm);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), mm);
  *high = (VecU)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  *low = (VecU)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
  const __m256i mm = _mm256_set1_epi32(static_cast<int>(m));
  const __m256i even = _mm256_mul_epu32((__m256i)a, mm);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), mm);
  *high = (VecU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  *low = (VecU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#else
  for (int i = 0; i < kLanes<float>; ++i) {
    const uint64_t product = static_cast<uint64_t>(a[i]) * m;
    (*high)[i] = static_cast<uint32_t>(product >> 32);
    (*low)[i] = static_cast<uint32_t>(product);
  }
#endif
}

// All ones in each 16-bit half that is below the limit (<= 2^16) as unsigned; else 0.
FASTATTN_INLINE VecI smaller_halves(VecU x, uint32_t limit) {
#if FASTATTN_AVX512
  if (limit == 0) return VecI{};
  const __m512i last = _mm512_set1_epi16(static_cast<int16_t>(limit - 1));
  return (VecI)_mm512_movm_epi16(_mm512_cmple_epu16_mask((__m512i)x, last));
#else
  const VecI low = (VecI)(x & 0xffffu) < static_cast<int32_t>(limit);
  const VecI high = (VecI)(x >> 16) < static_cast<int32_t>(limit);
  return (low & 0xffff) | (high << 16);
#endif
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
