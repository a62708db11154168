// The operands of products on tiles. A tile has elements of bf16, numbers of 8 significant bits, or
// of fp16. A number with more bits is split into parts of bf16, and a product of numbers is a sum
// of products of parts:
//
//   x = x1 + x2 + x3            exact for a float: 24 bits
//   x y = x1 y1 + (x1 y2 + x2 y1) + (x1 y3 + x2 y2 + x3 y1)
//
// The three products that are missing are below a rounding of x y. Two parts and three products
// have 16 bits, which PyTorch's matmul precision "high" allows.
#pragma once
#include "../../simd/tiles.h"
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

// The words (a[i], b[i]) of upper halves.
FASTATTN_INLINE __m512i pair_upper(VecF a, VecF b) {
  // Bytes 2 and 3 of each word of a, to bytes 0 and 1.
  const __m512i order = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8((__m512i)b, 0x3333333333333333ull, (__m512i)a, order);
}
// The upper halves of a, then the upper halves of b.
FASTATTN_INLINE __m512i join_upper(VecF a, VecF b) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(kUpper), (__m512i)b);
}

// The upper half of the result is x rounded to nearest, ties away from zero. Integer instructions,
// because beside a product of tiles only one port adds floats. A NaN must have the low half 0, as
// in a bf16, or the addition carries into its sign.
FASTATTN_INLINE VecF rounded_above(VecF x) { return (VecF)((VecI)x + 0x8000); }
// x without its upper half: the remainder of the part that the upper half is.
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

typedef uint16_t Element;  // of a tile: the bits of a bf16 or of an fp16

// The formats of operands: the parts of two vectors a and b as words (a[i], b[i]), or all of a
// and then all of b; the number whose parts are `step` elements from each other; and the product.
template <int kPartsT>
struct AsBf16 {
  typedef Bf16 Number;
  static constexpr int kParts = kPartsT;
  static constexpr bool kNarrow = false;
  // The parts of two vectors, element n of a beside element n of b.
  static FASTATTN_INLINE void split_pairs(VecF a, VecF b, __m512i (&parts)[kParts]) {
    split(a, b, parts,
          [](VecF x, VecF y) __attribute__((always_inline)) { return pair_upper(x, y); });
  }
  // The parts of two vectors, first all of a, then all of b.
  static FASTATTN_INLINE void split_joined(VecF a, VecF b, __m512i (&parts)[kParts]) {
    split(a, b, parts,
          [](VecF x, VecF y) __attribute__((always_inline)) { return join_upper(x, y); });
  }
  // The sum of all parts of an element, the smallest first.
  static FASTATTN_INLINE float sum(const Element* at, int64_t step) {
    float sum = widen(Bf16{at[(kParts - 1) * step]});
    FASTATTN_UNROLL for (int part = kParts - 2; part >= 0; --part) sum +=
        widen(Bf16{at[part * step]});
    return sum;
  }
  // Tile C += tile A x tile B.
  template <int C, int A, int B>
  static FASTATTN_INLINE void multiply() {
    Tiles::multiply_bf16<C, A, B>();
  }
};
struct AsF16 {
  typedef F16 Number;
  static constexpr int kParts = 1;
  static constexpr bool kNarrow = true;  // from 2^16 on there is inf, and below 2^-14 fewer bits
  // The even and odd elements as pairs of fp16: fp16 has a single part.
  static FASTATTN_INLINE void split_pairs(VecF a, VecF b, __m512i (&parts)[1]) {
    parts[0] = _mm512_or_si512(_mm512_cvtepu16_epi32(halves(a)),
                               _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(b)), 16));
  }
  static FASTATTN_INLINE float sum(const Element* at, int64_t) { return widen(F16{*at}); }
  // Tile C += tile A x tile B.
  template <int C, int A, int B>
  static FASTATTN_INLINE void multiply() {
    Tiles::multiply_f16<C, A, B>();
  }

 private:
  static FASTATTN_INLINE __m256i halves(VecF x) {
    return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

// What runs on tiles. `Format` holds Q, K, V, dO and the weights. The gradients of the scores
// may be as large as a product of dO and V, too large for fp16. They, and Q and K where they meet
// them, have `GradFormat`: two parts of bf16 have the bits of an fp16 and the range of a float.
// `OnVectors` runs what has no kernel on tiles.
struct TileBf16 : SingleOf<Bf16> {
  typedef PolicyBf16 OnVectors;
  typedef AsBf16<1> Format, GradFormat;
  static constexpr bool kCoarseExp = true;
};
struct TileF16 : SingleOf<F16> {
  typedef Single OnVectors;
  typedef AsF16 Format;
  typedef AsBf16<2> GradFormat;
};
template <int kParts>
struct TileFloat : SingleOf<float> {
  typedef Single OnVectors;
  typedef AsBf16<kParts> Format, GradFormat;
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
