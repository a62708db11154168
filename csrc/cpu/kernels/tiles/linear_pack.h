// Packs the operands of a linear layer for products on tiles. A line is a row of x (left side) or a
// row of W (right side). A chunk is 32 lines by 32 elements of the reduced index, as
// [part][2 tiles of 16 lines], and a tile is 1 KiB without gaps:
//
//   left   [16 lines][16 pairs][2]        right   [16 pairs][16 lines][2]
//
// A pair is elements k and k + 16 of the chunk: the sides may share any order, and two vectors make
// these pairs without an exchange between lanes. Elements beyond the tensor are zeros.
#pragma once
#include "../pack.h"
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// As AsBf16, but each part is rounded instead of cut off. The products that are left out are then
// smaller and of no preferred sign, so the errors of a long sum of positive numbers cancel. Packing
// waits for memory, so that the rounding costs nothing.
template <int kPartsT>
struct RoundedBf16 : AsBf16<kPartsT> {
  using AsBf16<kPartsT>::kParts;
  static FASTATTN_INLINE void split_pairs(VecF a, VecF b, __m512i (&parts)[kParts]) {
    FASTATTN_UNROLL for (int part = 0; part + 1 < kParts; ++part) {
      const VecF of_a = upper(rounded_above(a)), of_b = upper(rounded_above(b));
      parts[part] = pair_upper(of_a, of_b);
      a -= of_a, b -= of_b;
    }
    parts[kParts - 1] = pair_upper(a, b);  // exact: at most 8 bits are left
  }

 private:
  static FASTATTN_INLINE VecF upper(VecF x) {
    return (VecF)((VecI)x & static_cast<int32_t>(0xffff0000));
  }
};

// A matrix by its lines.
template <class S>
struct Lines {
  const S* data;
  int64_t count, reduced;  // lines, and elements of each
  int64_t stride;          // between lines, or if `across`, between elements of a line
  bool across;             // the lines of one element are adjacent, else the elements of one line
};

// The magnitudes of numbers as integers, which have the same order; NaN is above inf.
FASTATTN_INLINE VecI magnitude_bits(VecF x) { return (VecI)x & 0x7fffffff; }
FASTATTN_INLINE VecI larger(VecI a, VecI b) { return a > b ? a : b; }

// One tile of each part, kTileElements * 2 apart: `lines` lines and `reduced` elements from `from`
// on. `largest` has the magnitudes so far: of each lane's line if kAcross, else of line i in [i].
template <class F, bool kFull, bool kAcross, bool kTransposed, class S>
FASTATTN_INLINE void pack_tile(const S* from, int64_t stride, int64_t lines, int64_t reduced,
                               Element* to, VecI* largest) {
  constexpr int W = 16;
  const auto count = [](int64_t n) {
    return kFull ? W : static_cast<int>(max_of<int64_t>(0, min_of<int64_t>(W, n)));
  };
  const int64_t along = kAcross ? lines : reduced, others = kAcross ? reduced : lines;
  __m512i words[F::kParts][W];
  FASTATTN_UNROLL for (int i = 0; i < W; ++i) {
    const S* const first = from + i * stride;
    const S* const second = kAcross ? first + W * stride : first + W;
    const bool has_first = i < others, has_second = kAcross ? i + W < others : i < others;
    const VecF a = load_as<float>(first, has_first ? count(along) : 0);
    const VecF b = load_as<float>(second, has_second ? count(kAcross ? along : along - W) : 0);
    __m512i parts[F::kParts];
    F::split_pairs(a, b, parts);
    FASTATTN_UNROLL for (int part = 0; part < F::kParts; ++part) words[part][i] = parts[part];
    if (F::kParts > 1)
      largest[kAcross ? 0 : i] =
          larger(largest[kAcross ? 0 : i], larger(magnitude_bits(a), magnitude_bits(b)));
  }
  FASTATTN_UNROLL for (int part = 0; part < F::kParts; ++part) {
    if (kTransposed) transpose_words(words[part]);
    FASTATTN_UNROLL for (int i = 0; i < W; ++i)
        _mm512_storeu_si512(to + part * 2 * kTileElements + i * kStep, words[part][i]);
  }
}

// dst[steps] chunks of 32 lines from `line` on, reduced from k on. largest[32] becomes the largest
// magnitude of each line in [k, k + 32 steps), or with k > 0 stays at least what it was.
template <class F, bool kLeft, bool kAcross, class S>
__attribute__((noinline)) void pack_lines(const Lines<S>& x, int64_t line, int64_t k, int64_t steps,
                                          Element* dst, int32_t* largest) {
  VecI most_of[2][16] = {};
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t first = line + 16 * half, lines = x.count - first;
      const int64_t at = k + kStep * s, reduced = x.reduced - at;
      const S* const from = x.data + (kAcross ? at * x.stride + first : first * x.stride + at);
      // No prefetcher of the processor follows two lines of each of many rows.
      if (kAcross && half == 0 && s + 1 < steps)
        for (int64_t i = kStep; i < min_of(2 * kStep, reduced); ++i)
          __builtin_prefetch(from + i * x.stride), __builtin_prefetch(from + i * x.stride + 16);
      Element* const to = dst + (2 * F::kParts * s + half) * kTileElements;
      if (lines >= 16 && reduced >= kStep)
        pack_tile<F, true, kAcross, kLeft == kAcross>(from, x.stride, 16, kStep, to, most_of[half]);
      else
        pack_tile<F, false, kAcross, kLeft == kAcross>(from, x.stride, lines, reduced, to,
                                                       most_of[half]);
    }
  if (F::kParts == 1 || largest == nullptr) return;
  for (int64_t half = 0; half < 2; ++half) {
    VecI most = most_of[half][0];
    if (!kAcross) {
      transpose_words(reinterpret_cast<__m512i*>(most_of[half]));
      FASTATTN_UNROLL for (int i = 0; i < 16; ++i) most =
          i == 0 ? most_of[half][0] : larger(most, most_of[half][i]);
    }
    VecI before;
    __builtin_memcpy(&before, largest + 16 * half, sizeof before);
    if (k > 0) most = larger(before, most);
    __builtin_memcpy(largest + 16 * half, &most, sizeof most);
  }
}

template <class F, bool kLeft, class S>
void pack_lines(const Lines<S>& x, int64_t line, int64_t k, int64_t steps, Element* dst,
                int32_t* largest) {
  if (x.across)
    pack_lines<F, kLeft, true>(x, line, k, steps, dst, largest);
  else
    pack_lines<F, kLeft, false>(x, line, k, steps, dst, largest);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
