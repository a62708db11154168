// Squares of 32 rows of a tensor as operands of products of tiles, in every role that the backward
// pass has for them: left or right (pack.h), reduced over the channels or over the rows.
//
// A product pairs neighbours of the reduced index. Channels are reduced in their own order. Where the
// 32 rows are reduced, row r is beside row r + 16, the order in which narrow_pair joins two vectors
// of weights.
#pragma once
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// At most 32 rows of a tensor.
struct RowsOfTile {
  const Bf16* data;
  int64_t row_stride, col_stride, channels;
  uint32_t taken;  // bit r: row r exists and is not left out

  // Channels 32 d to 32 d + 31 of row r.
  FASTATTN_INLINE __m512i at(int64_t r, int64_t d) const {
    if (!(taken >> r & 1)) return _mm512_setzero_si512();
    return (__m512i)load_channels(data + r * row_stride, col_stride, d * kStep, channels);
  }
};

// 16 x 16 words, in place.
FASTATTN_INLINE void transpose_words(__m512i* x) {
  VecF v[16];
  FASTATTN_UNROLL for (int i = 0; i < 16; ++i) v[i] = (VecF)x[i];
  transpose<float>(v);
  FASTATTN_UNROLL for (int i = 0; i < 16; ++i) x[i] = (__m512i)v[i];
}

// dst[d][2]: left tiles of 16 rows, reduced over channels.
FASTATTN_INLINE void pack_left(const RowsOfTile& from, int64_t steps, Bf16* dst) {
  for (int64_t d = 0; d < steps; ++d)
    for (int64_t r = 0; r < 32; ++r)
      _mm512_storeu_si512(dst + 2 * d * kTileElements + r * kStep, from.at(r, d));
}

// dst[2][d]: right tiles whose columns are 16 rows, reduced over channels.
FASTATTN_INLINE void pack_right_columns(const RowsOfTile& from, int64_t steps, Bf16* dst) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t d = 0; d < steps; ++d) {
      __m512i x[16];
      FASTATTN_UNROLL for (int r = 0; r < 16; ++r) x[r] = from.at(16 * half + r, d);
      transpose_words(x);
      Bf16* tile = dst + (half * steps + d) * kTileElements;
      FASTATTN_UNROLL for (int r = 0; r < 16; ++r) _mm512_storeu_si512(tile + r * kStep, x[r]);
    }
}

// The rows r and r + 16 side by side: channels 32 d to 32 d + 15, and the other 16.
FASTATTN_INLINE void join_rows(const RowsOfTile& from, int64_t r, int64_t d, __m512i* first,
                               __m512i* second) {
  const __m512i a = from.at(r, d), b = from.at(r + 16, d);
  const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
  *first = _mm512_permutex2var_epi64(even, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), odd);
  *second = _mm512_permutex2var_epi64(even, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), odd);
}

// dst[2 d]: right tiles whose columns are 16 channels, reduced over the 32 rows.
FASTATTN_INLINE void pack_right_rows(const RowsOfTile& from, int64_t steps, Bf16* dst) {
  for (int64_t d = 0; d < steps; ++d)
    for (int64_t r = 0; r < 16; ++r) {
      __m512i first, second;
      join_rows(from, r, d, &first, &second);
      _mm512_storeu_si512(dst + 2 * d * kTileElements + r * kStep, first);
      _mm512_storeu_si512(dst + (2 * d + 1) * kTileElements + r * kStep, second);
    }
}

// dst[2 d]: left tiles whose rows are 16 channels, reduced over the 32 rows.
FASTATTN_INLINE void pack_left_channels(const RowsOfTile& from, int64_t steps, Bf16* dst) {
  for (int64_t d = 0; d < steps; ++d) {
    __m512i first[16], second[16];
    FASTATTN_UNROLL for (int r = 0; r < 16; ++r) join_rows(from, r, d, first + r, second + r);
    transpose_words(first);
    transpose_words(second);
    FASTATTN_UNROLL for (int r = 0; r < 16; ++r) {
      _mm512_storeu_si512(dst + 2 * d * kTileElements + r * kStep, first[r]);
      _mm512_storeu_si512(dst + (2 * d + 1) * kTileElements + r * kStep, second[r]);
    }
  }
}

// Pairs (a[i], b[i]) of bf16, rounded to nearest, ties away from zero. Integer instructions, because
// beside a product of tiles only one port adds floats. A NaN must have the low half 0, as those of
// bf16 do, or the addition carries into its sign.
FASTATTN_INLINE __m512i narrow_pair(VecF a, VecF b) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  // Bytes 2 and 3 of each word of a, to bytes 0 and 1.
  const __m512i order = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(_mm512_add_epi32((__m512i)b, half), 0x3333333333333333ull,
                                  _mm512_add_epi32((__m512i)a, half), order);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
