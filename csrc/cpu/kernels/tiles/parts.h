// The operands of products on tiles. A tile has elements of bf16, numbers of 8 significant bits. So
// a float is split into parts of 8 bits, and a product of floats is a sum of products of parts:
//
//   x = x1 + x2 + x3            exact: 24 bits
//   x y = x1 y1 + (x1 y2 + x2 y1) + (x1 y3 + x2 y2 + x3 y1)
//
// The three products that are missing are below a rounding of x y. Two parts and three products have
// 16 bits, which PyTorch's matmul precision "high" allows.
#pragma once
#include "../policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Which part of the left side meets which one of the right side. Small products come first, so that
// their sum is rounded less, and each shares a side with the one before.
template <int kParts>
struct PartProducts;
template <>
struct PartProducts<1> {
  static constexpr int count = 1, left[] = {0}, right[] = {0};
};
template <>
struct PartProducts<2> {
  static constexpr int count = 3, left[] = {0, 1, 0}, right[] = {1, 0, 0};
};
template <>
struct PartProducts<3> {
  static constexpr int count = 6, left[] = {0, 0, 1, 1, 2, 0}, right[] = {2, 1, 1, 0, 0, 0};
};

// `OnVectors` runs what has no kernel on tiles.
struct TileBf16 : Single<Bf16> {
  typedef PolicyBf16 OnVectors;
  static constexpr int kParts = 1;
  static constexpr bool kCoarseExp = true;
};
template <int kPartsT>
struct TileFloat : Single<float> {
  typedef Single<float> OnVectors;
  static constexpr int kParts = kPartsT;
};

// The words (a[i], b[i]) of upper halves.
FASTATTN_INLINE __m512i pair_upper(VecF a, VecF b) {
  // Bytes 2 and 3 of each word of a, to bytes 0 and 1.
  const __m512i order = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8((__m512i)b, 0x3333333333333333ull, (__m512i)a, order);
}
// The upper halves of a, then those of b.
FASTATTN_INLINE __m512i join_upper(VecF a, VecF b) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(kUpper), (__m512i)b);
}

// The upper half of the result is x rounded to nearest, ties away from zero. Integer instructions,
// because beside a product of tiles only one port adds floats. A NaN must have the low half 0, as
// those of bf16 do, or the addition carries into its sign.
FASTATTN_INLINE VecF rounded_above(VecF x) { return (VecF)((VecI)x + 0x8000); }
FASTATTN_INLINE VecF without_upper(VecF x) {
  return x - (VecF)((VecI)x & static_cast<int32_t>(0xffff0000));
}

// The parts of two vectors, joined by join(a, b). All parts but the last are cut off, so that the
// rest is exact. Of three parts the last one is the rest itself; else it is rounded.
template <int kParts, class Join>
FASTATTN_INLINE void split(VecF a, VecF b, __m512i (&parts)[kParts], Join join) {
  FASTATTN_UNROLL for (int part = 0; part + 1 < kParts; ++part) {
    parts[part] = join(a, b);
    a = without_upper(a), b = without_upper(b);
  }
  parts[kParts - 1] = kParts == 3 ? join(a, b) : join(rounded_above(a), rounded_above(b));
}
template <int kParts>
FASTATTN_INLINE void split_pairs(VecF a, VecF b, __m512i (&parts)[kParts]) {
  split(a, b, parts,
        [](VecF x, VecF y) __attribute__((always_inline)) { return pair_upper(x, y); });
}
template <int kParts>
FASTATTN_INLINE void split_joined(VecF a, VecF b, __m512i (&parts)[kParts]) {
  split(a, b, parts,
        [](VecF x, VecF y) __attribute__((always_inline)) { return join_upper(x, y); });
}

// The number of which the halves of words at `step` are the parts.
template <int kParts>
FASTATTN_INLINE float sum_of_parts(const Bf16* at, int64_t step) {
  float sum = widen(at[(kParts - 1) * step]);
  FASTATTN_UNROLL for (int part = kParts - 2; part >= 0; --part) sum += widen(at[part * step]);
  return sum;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
