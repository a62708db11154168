// A policy names the accumulator type and the *word* of a product: one element, or a pair of bf16
// that one instruction multiplies and adds. Reductions run over words.
#pragma once
#include "../../params.h"
#include "../simd/convert.h"
#include "../simd/math.h"
#include "../simd/simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// fp32 arithmetic; storage is float, or bf16 / fp16 converted while a block is staged.
template <class StorageT>
struct Single {
  typedef StorageT Storage;
  typedef float Acc;
  typedef float Word;
  static constexpr int kPerWord = 1;
  static constexpr bool kCoarseExp = false;
  // Register tiles: rows x vectors of scores (K rows by queries) and of outputs (channels by
  // queries). The accumulators, the vectors of one step and a broadcast must fit the register file.
  static constexpr int kScoreRows = kRegisters == 32 ? 12 : 6;
  static constexpr int kOutputRows = kRegisters == 32 ? 8 : 6;
  static FASTATTN_INLINE VecF multiply_add(VecF a, VecF b, VecF c) { return a * b + c; }
};

struct Double {
  typedef double Storage;
  typedef double Acc;
  typedef double Word;
  static constexpr int kPerWord = 1;
  static constexpr bool kCoarseExp = false;
  static constexpr int kScoreRows = kRegisters == 32 ? 12 : 6;
  static constexpr int kOutputRows = kRegisters == 32 ? 8 : 6;
  static FASTATTN_INLINE VecD multiply_add(VecD a, VecD b, VecD c) { return a * b + c; }
};

#if defined(__AVX512BF16__)
// Products of bf16 pairs, accumulated in fp32. A word is the 32 bits of a pair, carried as a float
// and never used as one.
struct PairBf16 {
  typedef Bf16 Storage;
  typedef float Acc;
  typedef float Word;
  static constexpr int kPerWord = 2;
  static constexpr bool kCoarseExp = true;
  static constexpr int kScoreRows = 8;
  static constexpr int kOutputRows = 8;
  static FASTATTN_INLINE VecF multiply_add(VecF a, VecF b, VecF c) {
    return (VecF)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
};
typedef PairBf16 PolicyBf16;
#else
typedef Single<Bf16> PolicyBf16;
#endif

#if defined(__AVX512BW__)
// Two vectors of non-negative numbers as bf16 pairs (even, odd), rounded to nearest.
FASTATTN_INLINE VecI pack_pair(VecF even, VecF odd) {
  const VecI low = ((VecI)even + 0x8000) >> 16, high = (VecI)odd + 0x8000;
  return (VecI)_mm512_mask_blend_epi16(0xAAAAAAAA, (__m512i)low, (__m512i)high);
}
#endif

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
      return f(Single<float>());
    case DType::f64:
      return f(Double());
    case DType::bf16:
      return f(PolicyBf16());
    case DType::f16:
      return f(Single<F16>());
    case DType::boolean:
      return;
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
