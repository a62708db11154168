// Packs rows of tensors for products on tiles. A packed tile is 1 KiB without gaps:
//
//   left   [16 rows][32]             the reduced index runs along a row
//   right  [16 pairs][16 columns][2] two consecutive elements of the reduced index beside each
//                                         other, the layout of words (policy.h)
//
// Rows and columns beyond the tensor are zeros, so the kernels have no tails. Each tile is there
// once for each part of its numbers (parts.h).
#pragma once
#include "../pack.h"
#include "../scores.h"
#include "parts.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kBlockKeys = 64;      // keys of a block
constexpr int64_t kTileElements = 512;  // of a tile
// What a product reduces over, and the side of the square that four accumulators make up.
constexpr int64_t kStep = 32;

// The first n bits.
FASTATTN_INLINE uint32_t first_bits(int64_t n) {
  return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1;
}

// The parts of the first `count` of 32 channels side by side; the others are zeros.
template <class Format, class S>
FASTATTN_INLINE void load_dense(const S* from, int64_t count, __m512i (&parts)[Format::kParts]) {
  if constexpr (kSame<S, typename Format::Number>) {
    parts[0] = _mm512_maskz_loadu_epi16(first_bits(count), from);
  } else {
    VecF x[2];
    FASTATTN_UNROLL for (int64_t i = 0; i < 2; ++i) x[i] = load_as<float>(
        from + 16 * i, static_cast<int>(max_of<int64_t>(0, min_of<int64_t>(16, count - 16 * i))));
    Format::split_joined(x[0], x[1], parts);
  }
}
// The parts of 32 channels of a row from channel c0 on.
template <class Format, class S>
FASTATTN_INLINE void load_channels(const S* row, int64_t col_stride, int64_t c0, int64_t cols,
                                   __m512i (&parts)[Format::kParts]) {
  const int64_t count = min_of<int64_t>(kStep, cols - c0);
  if (col_stride == 1) return load_dense<Format>(row + c0, count, parts);
  alignas(64) S channels[kStep] = {};
  for (int64_t c = 0; c < count; ++c) channels[c] = row[(c0 + c) * col_stride];
  load_dense<Format>(channels, kStep, parts);
}

// At most 32 rows of a tensor.
template <class P>
struct RowsOfTile {
  typedef typename P::Storage Storage;
  const Storage* data;
  int64_t row_stride, col_stride, channels;
  uint32_t rows_in_use;  // bit r: row r exists and is not left out

  // Channels 32 d to 32 d + 31 of row r.
  template <class Format>
  FASTATTN_INLINE void at(int64_t r, int64_t d, __m512i (&parts)[Format::kParts]) const {
    if (rows_in_use >> r & 1)
      return load_channels<Format>(data + r * row_stride, col_stride, d * kStep, channels, parts);
    FASTATTN_UNROLL for (__m512i& part : parts) part = _mm512_setzero_si512();
  }
  // Element c of row r.
  FASTATTN_INLINE float at(int64_t r, int64_t c) const {
    return widen(data[r * row_stride + c * col_stride]);
  }
};
// Rows [begin, end) of a head of a tensor.
template <class P>
FASTATTN_INLINE RowsOfTile<P> rows_of(const Tensor4& x, int64_t b, int64_t h, int64_t begin,
                                      int64_t end, int64_t channels) {
  const int64_t* st = x.stride;
  const auto* data =
      static_cast<const typename P::Storage*>(x.data) + b * st[0] + h * st[1] + begin * st[2];
  return {data, st[2], st[3], channels, first_bits(end - begin)};
}

// The rows that products of tiles would get wrong, as bits. In 16 bits they are rows with NaN or
// inf, of which a product with zero is NaN. A float may also be too large for a sum of products, or
// so small that its lower parts, or their products, are subnormal, which tiles flush to zero. What
// a row contributes then is within a rounding of what its largest element does.
constexpr float kLargestOfRow = 0x1p56f, kLeastOfRow = 0x1p-40f;

// The rows whose products are computed on vectors: too large or too small for bf16 parts, as bits.
template <class P>
FASTATTN_INLINE uint32_t separate_rows(const RowsOfTile<P>& x, float least = kLeastOfRow) {
  uint32_t separate = 0;
  for (int r = 0; r < 32; ++r) {
    if (!(x.rows_in_use >> r & 1)) continue;
    const auto* row = x.data + r * x.row_stride;
    bool apart;
    if constexpr (P::Format::kParts == 1) {
      apart = !all_finite(row, 0, x.col_stride, 1, x.channels);
    } else {
      // Of the magnitudes as integers, which have the same order, with NaN above inf.
      VecI max_magnitude{};
      for (int64_t c = 0; c < x.channels; c += kLanes<float>) {
        const int count = static_cast<int>(min_of<int64_t>(kLanes<float>, x.channels - c));
        VecF some{};
        if (x.col_stride == 1)
          some = load_first(row + c, count);
        else
          for (int i = 0; i < count; ++i) some[i] = row[(c + i) * x.col_stride];
        const VecI magnitude = (VecI)some & 0x7fffffff;
        max_magnitude = magnitude > max_magnitude ? magnitude : max_magnitude;
      }
      const int32_t largest = _mm512_reduce_max_epi32((__m512i)max_magnitude);
      apart = largest > static_cast<int32_t>(bits_of(kLargestOfRow)) ||
              (largest != 0 && largest < static_cast<int32_t>(bits_of(least)));
    }
    if (apart) separate |= 1u << r;
  }
  return separate;
}
// What a product of a tile would be, for a pair of rows that is apart.
template <class P>
__attribute__((noinline)) float dot_apart(const RowsOfTile<P>& a, int64_t i, const RowsOfTile<P>& b,
                                          int64_t j) {
  double sum = 0;
  for (int64_t c = 0; c < a.channels; ++c)
    sum += static_cast<double>(a.at(i, c)) * static_cast<double>(b.at(j, c));
  return static_cast<float>(sum);
}

// 16 x 16 words, in place.
FASTATTN_INLINE void transpose_words(__m512i* x) {
  VecF v[16];
  FASTATTN_UNROLL for (int i = 0; i < 16; ++i) v[i] = (VecF)x[i];
  transpose<float>(v);
  FASTATTN_UNROLL for (int i = 0; i < 16; ++i) x[i] = (__m512i)v[i];
}

// dst[d][part][2]: left tiles of 16 rows, reduced over channels.
template <class Format, class P>
FASTATTN_INLINE void pack_left(const RowsOfTile<P>& from, int64_t steps, Element* dst) {
  for (int64_t d = 0; d < steps; ++d)
    for (int64_t r = 0; r < 32; ++r) {
      __m512i x[Format::kParts];
      from.template at<Format>(r, d, x);
      FASTATTN_UNROLL for (int part = 0; part < Format::kParts; ++part) _mm512_storeu_si512(
          dst + 2 * (d * Format::kParts + part) * kTileElements + r * kStep, x[part]);
    }
}

// Words of 16 rows from row r on, two channels each: to[part][16 words][row_words], 16 rows in a
// row.
template <class Format, class P>
FASTATTN_INLINE void pack_words(const RowsOfTile<P>& from, int64_t r, int64_t d, int64_t row_words,
                                int64_t part_words, float* to) {
  __m512i x[Format::kParts][16];
  FASTATTN_UNROLL for (int i = 0; i < 16; ++i) {
    __m512i one[Format::kParts];
    from.template at<Format>(r + i, d, one);
    FASTATTN_UNROLL for (int part = 0; part < Format::kParts; ++part) x[part][i] = one[part];
  }
  FASTATTN_UNROLL for (int part = 0; part < Format::kParts; ++part) {
    transpose_words(x[part]);
    FASTATTN_UNROLL for (int i = 0; i < 16; ++i)
        _mm512_storeu_si512(to + part * part_words + i * row_words, x[part][i]);
  }
}

// A block of keys, rows[2] of 32 each, as left sides of K Q^T, in the order in which it takes them:
// dst[2 x 32 keys][steps x 32 channels][part][2 x 16 keys] tiles.
template <class Format, class P>
FASTATTN_INLINE void pack_keys(const RowsOfTile<P>* rows, int64_t steps, Element* dst) {
  for (int64_t half = 0; half < 2; ++half)
    pack_left<Format>(rows[half], steps, dst + half * steps * 2 * Format::kParts * kTileElements);
}

// A panel of 32 queries as right sides of K Q^T: dst[steps x 32 channels][part][16 words][32].
template <class Format, class P>
FASTATTN_INLINE void pack_queries(const RowsOfTile<P>& rows, int64_t steps, float* dst) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t d = 0; d < steps; ++d)
      pack_words<Format>(rows, 16 * half, d, kStep, 16 * kStep,
                         dst + d * Format::kParts * 16 * kStep + 16 * half);
}

// A block of values, rows[2] of 32 each, transposed, as left sides of V^T P:
// dst[steps x 32 channels][2 x 32 keys][part][2 x 16 channels] tiles.
template <class Format, class P>
FASTATTN_INLINE void pack_values(const RowsOfTile<P>* rows, int64_t steps, Element* dst) {
  alignas(64) uint16_t evens[kStep], odds[kStep];  // the first or the second halves of two vectors
  for (int i = 0; i < kStep; ++i) evens[i] = static_cast<uint16_t>(2 * i), odds[i] = evens[i] + 1;
  const __m512i even = _mm512_load_si512(evens), odd = _mm512_load_si512(odds);
  for (int64_t d = 0; d < steps; ++d) {
    for (int64_t k = 0; k < 2; ++k) {
      // Words of two channels, [keys][channels / 2], become [channels / 2][keys].
      float words[2][Format::kParts][16 * 16];
      FASTATTN_UNROLL for (int half = 0; half < 2; ++half)
          pack_words<Format>(rows[k], 16 * half, d, 16, 16 * 16, words[half][0]);
      for (int part = 0; part < Format::kParts; ++part) {
        Element* to = dst + ((d * 2 + k) * Format::kParts + part) * 2 * kTileElements;
        FASTATTN_UNROLL for (int i = 0; i < 16; ++i) {
          const __m512i a = _mm512_loadu_si512(words[0][part] + 16 * i);
          const __m512i b = _mm512_loadu_si512(words[1][part] + 16 * i);
          _mm512_storeu_si512(to + 2 * i * kStep, _mm512_permutex2var_epi16(a, even, b));
          _mm512_storeu_si512(to + (2 * i + 1) * kStep, _mm512_permutex2var_epi16(a, odd, b));
        }
      }
    }
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
