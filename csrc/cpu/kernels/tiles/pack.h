// Packs keys and values for products on tiles. A packed tile is 1 KiB without gaps:
//
//   left   [16 rows][32 bf16]             the reduced index runs along a row
//   right  [16 pairs][16 columns][bf16 2] two consecutive elements of the reduced index beside each
//                                         other, the layout of words (policy.h)
//
// Rows and columns beyond the tensor are zeros, so the kernels have no tails.
#pragma once
#include "../pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Queries are right sides of K Q^T: panels of words, which pack_panel() makes.
struct TilePairs {
  typedef Bf16 Storage;
  typedef float Acc;
  typedef float Word;
  static constexpr int kPerWord = 2;
};

constexpr int64_t kBlockKeys = 64;      // keys of a block
constexpr int64_t kTileElements = 512;  // bf16 of a tile
// What a product reduces over, and the side of the square that four accumulators make up.
constexpr int64_t kStep = 32;

// 32 channels of a row from channel c0 on.
FASTATTN_INLINE VecI load_channels(const Bf16* row, int64_t col_stride, int64_t c0, int64_t cols) {
  const int64_t count = min_of<int64_t>(kStep, cols - c0);
  if (col_stride == 1) {
    const __mmask32 there = count >= kStep ? 0xffffffffu : (1u << count) - 1;
    return (VecI)_mm512_maskz_loadu_epi16(there, row + c0);
  }
  alignas(64) Bf16 channels[kStep] = {};
  for (int64_t c = 0; c < count; ++c) channels[c] = row[(c0 + c) * col_stride];
  return (VecI)load(reinterpret_cast<const float*>(channels));
}

// A block of keys [rows <= 64][cols] as left sides of K Q^T, in the order in which it takes them:
// dst[2 x 32 keys][steps x 32 channels][2 x 16 keys] tiles.
FASTATTN_INLINE void pack_keys(const Bf16* src, int64_t row_stride, int64_t col_stride,
                               int64_t rows, int64_t cols, int64_t steps, Bf16* dst) {
  for (int64_t r = 0; r < kBlockKeys; ++r) {
    Bf16* to = dst + (r / 32 * steps * 2 + r / 16 % 2) * kTileElements + r % 16 * kStep;
    for (int64_t d = 0; d < steps; ++d) {
      const VecI x =
          r < rows ? load_channels(src + r * row_stride, col_stride, d * kStep, cols) : VecI{};
      store(reinterpret_cast<float*>(to + d * 2 * kTileElements), (VecF)x);
    }
  }
}

// A block of values [rows <= 64][cols], transposed, as left sides of V^T P:
// dst[steps x 32 channels][2 x 32 keys][2 x 16 channels] tiles.
FASTATTN_INLINE void pack_values(const Bf16* src, int64_t row_stride, int64_t col_stride,
                                 int64_t rows, int64_t cols, int64_t steps, Bf16* dst) {
  alignas(64) uint16_t evens[kStep], odds[kStep];  // the first or the second halves of two vectors
  for (int i = 0; i < kStep; ++i) evens[i] = static_cast<uint16_t>(2 * i), odds[i] = evens[i] + 1;
  const __m512i even = _mm512_load_si512(evens), odd = _mm512_load_si512(odds);
  for (int64_t d = 0; d < steps; ++d) {
    for (int64_t k = 0; k < 2; ++k) {
      // Words of two channels, [keys][channels / 2], become [channels / 2][keys].
      VecF x[2][16];
      FASTATTN_UNROLL for (int half = 0; half < 2; ++half) {
        FASTATTN_UNROLL for (int i = 0; i < 16; ++i) {
          const int64_t r = k * kStep + half * 16 + i;
          x[half][i] = r < rows
                           ? (VecF)load_channels(src + r * row_stride, col_stride, d * kStep, cols)
                           : VecF{};
        }
        transpose<float>(x[half]);
      }
      Bf16* to = dst + (d * 2 + k) * 2 * kTileElements;
      FASTATTN_UNROLL for (int i = 0; i < 16; ++i) {
        const __m512i a = (__m512i)x[0][i], b = (__m512i)x[1][i];
        store(reinterpret_cast<float*>(to + 2 * i * kStep),
              (VecF)_mm512_permutex2var_epi16(a, even, b));
        store(reinterpret_cast<float*>(to + (2 * i + 1) * kStep),
              (VecF)_mm512_permutex2var_epi16(a, odd, b));
      }
    }
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
