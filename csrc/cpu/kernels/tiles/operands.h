// Squares of 32 rows of a tensor as operands of products of tiles, for the backward pass: left or
// right, reduced over the channels or over the rows. pack.h has the roles of the forward pass.
//
// A product pairs neighbours of the reduced index. Channels are reduced in their own order. Where
// the 32 rows are reduced, row r is beside row r + 16, the order in which split_pairs joins two
// vectors of weights.
#pragma once
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// dst[2][d][part]: right tiles whose columns are 16 rows, reduced over channels.
template <class Format, class P>
FASTATTN_INLINE void pack_right_columns(const RowsOfTile<P>& from, int64_t steps, Element* dst) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t d = 0; d < steps; ++d)
      pack_words<Format>(
          from, 16 * half, d, 16, 16 * 16,
          reinterpret_cast<float*>(dst + (half * steps + d) * Format::kParts * kTileElements));
}

// The rows r and r + 16 side by side: channels 32 d to 32 d + 15, and the other 16.
template <class Format, class P>
FASTATTN_INLINE void join_rows(const RowsOfTile<P>& from, int64_t r, int64_t d,
                               __m512i (&first)[Format::kParts],
                               __m512i (&second)[Format::kParts]) {
  __m512i a[Format::kParts], b[Format::kParts];
  from.template at<Format>(r, d, a), from.template at<Format>(r + 16, d, b);
  FASTATTN_UNROLL for (int part = 0; part < Format::kParts; ++part) {
    const __m512i even = _mm512_unpacklo_epi16(a[part], b[part]);
    const __m512i odd = _mm512_unpackhi_epi16(a[part], b[part]);
    first[part] = _mm512_permutex2var_epi64(even, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), odd);
    second[part] =
        _mm512_permutex2var_epi64(even, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), odd);
  }
}

// dst[d][part][2]: right tiles whose columns are 16 channels, reduced over the 32 rows.
template <class Format, class P>
FASTATTN_INLINE void pack_right_rows(const RowsOfTile<P>& from, int64_t steps, Element* dst) {
  for (int64_t d = 0; d < steps; ++d)
    for (int64_t r = 0; r < 16; ++r) {
      __m512i first[Format::kParts], second[Format::kParts];
      join_rows<Format>(from, r, d, first, second);
      FASTATTN_UNROLL for (int part = 0; part < Format::kParts; ++part) {
        Element* const to = dst + 2 * (d * Format::kParts + part) * kTileElements + r * kStep;
        _mm512_storeu_si512(to, first[part]);
        _mm512_storeu_si512(to + kTileElements, second[part]);
      }
    }
}

// dst[d][part][2]: left tiles whose rows are 16 channels, reduced over the 32 rows.
template <class Format, class P>
FASTATTN_INLINE void pack_left_channels(const RowsOfTile<P>& from, int64_t steps, Element* dst) {
  for (int64_t d = 0; d < steps; ++d) {
    __m512i x[Format::kParts][2][16];
    FASTATTN_UNROLL for (int r = 0; r < 16; ++r) {
      __m512i first[Format::kParts], second[Format::kParts];
      join_rows<Format>(from, r, d, first, second);
      FASTATTN_UNROLL for (int part = 0; part < Format::kParts; ++part) x[part][0][r] = first[part],
                                                                        x[part][1][r] =
                                                                            second[part];
    }
    FASTATTN_UNROLL for (int part = 0; part < Format::kParts; ++part)
        FASTATTN_UNROLL for (int half = 0; half < 2; ++half) {
      transpose_words(x[part][half]);
      FASTATTN_UNROLL for (int r = 0; r < 16; ++r) _mm512_storeu_si512(
          dst + (2 * (d * Format::kParts + part) + half) * kTileElements + r * kStep,
          x[part][half][r]);
    }
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
