// Storage types (the element types of tensors) and their conversion from and to the compute type.
#pragma once
#include "simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};
struct Int8 {
  int8_t value;
};
struct E4m3 {  // fp8: a sign, 4 bits of exponent, 3 of mantissa; up to 448
  uint8_t bits;
};

FASTATTN_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
FASTATTN_INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// Lane-wise half precision by integer arithmetic, for processors without the instructions.
// f16 -> f32: move exponent and mantissa into place and let one multiplication by 2^112 rebias
// them, subnormals too.
FASTATTN_INLINE float widen(F16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h.bits & 0x7fff) << 13;
  const float x = magnitude >= 0x0f800000u ? float_of(magnitude + 0x70000000u)  // inf, NaN
                                           : float_of(magnitude) * 0x1p112f;
  return float_of(bits_of(x) | sign);
}
// The number that is stored, as a float or double.
FASTATTN_INLINE float widen(Bf16 b) { return float_of(static_cast<uint32_t>(b.bits) << 16); }
FASTATTN_INLINE float widen(float x) { return x; }
FASTATTN_INLINE double widen(double x) { return x; }
FASTATTN_INLINE float widen(Int8 x) { return x.value; }
// The bits of an e4m3, moved to their places in an f16, are a number 2^8 times smaller, subnormals
// too. The caller multiplies by kE4m3Unit, once for many. The two codes of NaN become +-480.
constexpr float kE4m3Unit = 256.0f;
FASTATTN_INLINE float widen(E4m3 x) {
  return widen(F16{static_cast<uint16_t>((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}
// A boolean mask as a bias: true adds 0, false excludes.
FASTATTN_INLINE float widen(Bool b) { return b.bits ? 0.0f : -kInf<float>; }

// Round to nearest, ties to even; NaN stays NaN.
FASTATTN_INLINE void narrow(float x, Bf16* out) {
  const uint32_t u = bits_of(x);
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Rounds to float16, to nearest even.
FASTATTN_INLINE void narrow(float x, F16* out) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t h;
  if (magnitude > 0x7f800000u) {
    h = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    h = 0x7c00;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the rounded subnormal in the low bits.
    h = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    h = (magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(h | sign);
}
// Of |x| <= 448.
FASTATTN_INLINE void narrow(float x, E4m3* out) {
  const uint32_t u = bits_of(x), sign = (u >> 24) & 0x80, magnitude = u & 0x7fffffff;
  // Below 2^-6, adding 2^14 leaves the rounded subnormal in the low bits.
  const uint32_t rounded =
      magnitude < 0x3c800000u ? bits_of(float_of(magnitude) + 0x1p14f) - 0x46800000u
                              : (magnitude - 0x3c000000u + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  out->bits = static_cast<uint8_t>(rounded | sign);
}
// Rounds a number to the type of `out`.
FASTATTN_INLINE void narrow(float x, float* out) { *out = x; }
FASTATTN_INLINE void narrow(double x, double* out) { *out = x; }
FASTATTN_INLINE void narrow(double x, float* out) { *out = static_cast<float>(x); }

// 16-bit words, as many as a vector has floats.
typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

// Each lane's bf16 in its low word, rounded as by narrow(). Integer arithmetic rather than
// vcvtneps2bf16, which flushes subnormals.
FASTATTN_INLINE VecU bf16_bits(VecF v) {
  const VecI u = (VecI)v;
  const VecI rounded = (VecI)((VecU)(u + 0x7fff + ((u >> 16) & 1)) >> 16);
  return (VecU)(v != v ? VecI{} + 0x7fc0 : rounded);
}

// A vector of T from the first n elements at p, n <= lanes; the other lanes are zero.
template <class T, class S>
FASTATTN_INLINE Vec<T> load_as(const S* p, int n) {
  if constexpr (kSame<T, S>) return load_first(p, n);
#if FASTATTN_AVX512
  if constexpr (sizeof(T) == 4 && sizeof(S) == 2) {
    const __m256i raw = n >= 16
                            ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                            : _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
    if constexpr (kSame<S, F16>) return (VecF)_mm512_cvtph_ps(raw);
    return (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
  }
  if constexpr (sizeof(T) == 4 && (kSame<S, Int8> || kSame<S, E4m3>)) {
    const __m128i raw = n >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                : _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n) - 1), p);
    if constexpr (kSame<S, Int8>) return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
    // The conversion duplicated the sign bit; the second copy is not part of an f16.
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
    return (VecF)_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16(~0x4000)));
  }
  if constexpr (sizeof(T) == 4 && kSame<S, Bool>) {
    const __mmask16 first = static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1);
    const __m128i raw = _mm_maskz_loadu_epi8(first, p);
    const __mmask16 excluded = _mm_mask_testn_epi8_mask(first, raw, raw);
    return (VecF)_mm512_maskz_mov_ps(excluded, _mm512_set1_ps(-kInf<float>));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4 && kSame<S, Int8>) {
    if (n >= 8) {
      const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      return (VecF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
    }
  }
  if constexpr (sizeof(T) == 4 && kSame<S, E4m3>) {
    if (n >= 8) {
      const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      const __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(raw), 7);
      return (VecF)_mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16(~0x4000)));
    }
  }
  if constexpr (sizeof(T) == 4 && sizeof(S) == 2) {
    if (n >= 8) {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      if constexpr (kSame<S, F16>) return (VecF)_mm256_cvtph_ps(raw);
      return (VecF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
    }
  }
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 4 && kSame<S, F16>) {
    if (n >= 4) return (VecF)vcvt_f32_f16(vld1_f16(reinterpret_cast<const __fp16*>(p)));
  }
#endif
#if !defined(__AVX2__)
  if constexpr (sizeof(T) == 4 && (kSame<S, Int8> || kSame<S, E4m3>)) {
    typedef int8_t Bytes __attribute__((vector_size(kVectorBytes / 4), aligned(1), may_alias));
    if (n >= kLanes<T>) {
      const VecI raw = __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), VecI);
      if constexpr (kSame<S, Int8>) return __builtin_convertvector(raw, VecF);
      // As in widen(F16): one multiplication rebiases the exponent.
      return (VecF)((raw << 20) & static_cast<int32_t>(0x87f00000)) * 0x1p112f;
    }
  }
#endif
  if constexpr (sizeof(T) == 4 && kSame<S, Bf16>) {
    if (n >= kLanes<T>) {
      const HalfVec raw = *reinterpret_cast<const HalfVec*>(p);
      return (VecF)(__builtin_convertvector(raw, VecU) << 16);
    }
  }
  if constexpr (kSame<T, double> && kSame<S, float>) {
    typedef float Floats __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));
    if (n >= kLanes<T>) return __builtin_convertvector(*reinterpret_cast<const Floats*>(p), VecD);
  }
  alignas(kVectorBytes) T lanes[kLanes<T>] = {};
  const int count = min_of(n, kLanes<T>);
  for (int i = 0; i < count; ++i) lanes[i] = static_cast<T>(widen(p[i]));
  return load(lanes);
}

// Stores the first n lanes of v to p, rounded to the storage type.
template <class T, class S>
FASTATTN_INLINE void store_as(S* p, Vec<T> v, int n) {
  if constexpr (kSame<T, S>) return store_first(p, v, n);
#if FASTATTN_AVX512
  if constexpr (sizeof(T) == 4 && sizeof(S) == 2) {
    __m256i raw;
    if constexpr (kSame<S, F16>) {
      raw = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      raw = _mm512_cvtepi32_epi16((__m512i)bf16_bits(v));
    }
    if (n >= 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), raw);
    else
      _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), raw);
    return;
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4 && kSame<S, F16>) {
    if (n >= 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                       _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      return;
    }
  }
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 4 && kSame<S, F16>) {
    if (n >= 4) return vst1_f16(reinterpret_cast<__fp16*>(p), vcvt_f16_f32((float32x4_t)v));
  }
#endif
  if constexpr (sizeof(T) == 4 && kSame<S, Bf16>) {
    if (n >= kLanes<T>) {
      *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector(bf16_bits(v), HalfVec);
      return;
    }
  }
  alignas(kVectorBytes) T lanes[kLanes<T>];
  store(lanes, v);
  const int count = min_of(n, kLanes<T>);
  for (int i = 0; i < count; ++i) narrow(lanes[i], p + i);
}

// Stores a power of two of lanes, known to the compiler: no mask, and fewer bytes. Where lanes are
// rounded, all of them are stored.
template <int kWidth, class T, class S>
FASTATTN_INLINE void store_part(S* p, Vec<T> v) {
  if constexpr (!kSame<T, S> || kWidth == kLanes<T>) {
    store_as<T>(p, v, kLanes<T>);
  } else {
    typedef T Part __attribute__((vector_size(kWidth * sizeof(T)), may_alias));
    typedef T Unaligned __attribute__((vector_size(kWidth * sizeof(T)), aligned(1), may_alias));
    Part first;
    __builtin_memcpy(&first, &v, sizeof(first));
    *reinterpret_cast<Unaligned*>(p) = first;
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
