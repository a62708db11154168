// A policy names the accumulator type and the *word* of a product: one element, or a pair of bf16
// that one instruction multiplies and adds. Reductions run over words. Its `Source` points to
// elements of a tensor.
#pragma once
#include "../simd/math.h"
#include "../simd/simd.h"
#include "elements.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Whether kernels have variants for small shapes: panels of one vector, more rows at a time in
// decoding. Each variant takes compile time, so float64 and x86 without AVX2, which is rare, have
// none.
#if defined(__x86_64__) && !defined(__AVX2__)
constexpr bool kVariants = false;
#else
constexpr bool kVariants = true;
#endif

// fp32 arithmetic; storage is float, or bf16 / fp16 converted while a block is staged.
struct Single {
  typedef Elements Source;
  // A pointer to the elements of a tensor, whose dtype is known at run time.
  static Source elements(void* data, DType dtype) { return {data, dtype}; }
  typedef float Acc;
  typedef float Word;
  static constexpr int kPerWord = 1;
  static constexpr bool kCoarseExp = false;
  static constexpr bool kHasVariants = kVariants;
  typedef Single OnVectors;  // the policy of parts that have no kernel on tiles
  // Register tiles: rows x vectors of scores (K rows by queries) and of outputs (channels by
  // queries). The accumulators, the vectors of one step and a broadcast must fit the register file.
  static constexpr int kScoreRows = kRegisters == 32 ? 12 : 6;
  static constexpr int kOutputRows = kRegisters == 32 ? 8 : 6;
  static FASTATTN_INLINE VecF multiply_add(VecF a, VecF b, VecF c) { return a * b + c; }
  // Whether up to half a vector of queries are multiplied as half a vector.
  static constexpr bool kHalves = kVectorBytes == 64;
  static FASTATTN_INLINE HalfF multiply_add(HalfF a, HalfF b, HalfF c) { return a * b + c; }
};

// Single with a storage type that is known when the kernel is compiled.
template <class StorageT>
struct SingleOf : Single {
  typedef StorageT Storage;
  typedef Storage* Source;
  static Source elements(void* data, DType) { return static_cast<Source>(data); }
};

struct Double {
  typedef double Storage;
  typedef Storage* Source;
  static Source elements(void* data, DType) { return static_cast<Source>(data); }
  typedef double Acc;
  typedef double Word;
  typedef Double OnVectors;
  static constexpr int kPerWord = 1;
  static constexpr bool kHasVariants = false;
  static constexpr bool kCoarseExp = false;
  static constexpr bool kHalves = false;
  static constexpr int kScoreRows = kRegisters == 32 ? 12 : 6;
  static constexpr int kOutputRows = kRegisters == 32 ? 8 : 6;
  static FASTATTN_INLINE VecD multiply_add(VecD a, VecD b, VecD c) { return a * b + c; }
};

#if FASTATTN_AVX512_BF16 || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FASTATTN_HAS_PAIRS 1
// Products of bf16 pairs, accumulated in fp32. A word is the 32 bits of a pair, carried as a float
// and never used as one.
struct PairBf16 {
  typedef Bf16 Storage;
  typedef Storage* Source;
  static Source elements(void* data, DType) { return static_cast<Source>(data); }
  typedef float Acc;
  typedef float Word;
  typedef PairBf16 OnVectors;
  static constexpr int kPerWord = 2;
  static constexpr bool kHasVariants = true;
  static constexpr bool kCoarseExp = true;
  static constexpr int kScoreRows = 8;
  static constexpr int kOutputRows = 8;
  // a b + c for pairs of bf16.
  static FASTATTN_INLINE VecF multiply_add(VecF a, VecF b, VecF c) {
#if FASTATTN_AVX512_BF16
    return (VecF)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    return (VecF)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
  }

#if FASTATTN_AVX512_BF16 && !FASTATTN_EMULATED_AVX512
  static constexpr bool kHalves = true;
  static FASTATTN_INLINE HalfF multiply_add(HalfF a, HalfF b, HalfF c) {
    return (HalfF)_mm256_dpbf16_ps((__m256)c, (__m256bh)a, (__m256bh)b);
  }
#else
  static constexpr bool kHalves = false;
#endif

  // (a0, a1, ..., b0, b1, ...), rounded to bf16.
  static FASTATTN_INLINE VecF as_bf16(VecF a, VecF b) {
#if FASTATTN_AVX512_BF16
    return (VecF)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)a);
    return (VecF)vcvtq_high_bf16_f32(low, (float32x4_t)b);
#endif
  }

  // (a0 b0, a1 b1, ...), rounded to bf16.
  static FASTATTN_INLINE VecF as_pairs(VecF a, VecF b) {
#if FASTATTN_AVX512_BF16
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (VecF)_mm512_permutexvar_epi16(order, (__m512i)as_bf16(a, b));
#else
    const uint16x8_t both = (uint16x8_t)as_bf16(a, b);
    return (VecF)vzip1q_u16(both, vextq_u16(both, both, 4));
#endif
  }
};
typedef PairBf16 PolicyBf16;
#else
typedef Single PolicyBf16;
#endif

// Two vectors of non-negative numbers as bf16 pairs (even, odd), rounded to nearest.
FASTATTN_INLINE VecI pack_pair(VecF even, VecF odd) {
  const VecI low = ((VecI)even + 0x8000) >> 16, high = (VecI)odd + 0x8000;
#if FASTATTN_AVX512
  return (VecI)_mm512_mask_blend_epi16(0xAAAAAAAA, (__m512i)low, (__m512i)high);
#else
  return low | (high & static_cast<int32_t>(0xffff0000));
#endif
}

// The number of words that hold `count` elements.
template <class P>
FASTATTN_INLINE constexpr int64_t words(int64_t count) {
  return (count + P::kPerWord - 1) / P::kPerWord;
}

// Calls f(Policy()) with the policy for a dtype on this instruction set.
template <class F>
FASTATTN_INLINE void with_policy(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      if constexpr (has_kernels(DType::f32)) f(Single());
      return;
    case DType::f64:
      if constexpr (has_kernels(DType::f64)) f(Double());
      return;
    case DType::bf16:
      if constexpr (has_kernels(DType::bf16)) f(PolicyBf16());
      return;
    case DType::f16:
      if constexpr (has_kernels(DType::f16)) f(Single());
      return;
    case DType::boolean:
      return;
  }
}

// with_policy() without pairs, for kernels without matrix products.
template <class F>
FASTATTN_INLINE void with_arithmetic(DType dtype, F f) {
  if constexpr (has_kernels(DType::f64))
    if (dtype == DType::f64) return f(Double());
  if constexpr (has_kernels(DType::f32) || has_kernels(DType::bf16) || has_kernels(DType::f16))
    if (dtype != DType::f64) f(Single());
}

// Calls f with an element of the type in which tensors of this dtype are stored.
template <class P, class F>
FASTATTN_INLINE void with_stored(DType dtype, F f) {
  if constexpr (kSame<P, Single>) {
    with_elements(Elements(nullptr, dtype), [&](auto* none) __attribute__((always_inline)) {
      f(typename ElementOf<decltype(none)>::type());
    });
  } else {
    f(typename P::Storage());
  }
}

// with_storage() for any policy.
template <class F>
FASTATTN_INLINE void with_stored(DType dtype, F f) {
  with_arithmetic(dtype, [&](auto policy) { with_stored<decltype(policy)>(dtype, f); });
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
