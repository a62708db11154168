// The operands of csrc/cpu/kernels/tiles/parts.h, for tests/cpu/test_tiles.py.
#define FASTATTN_ISA tested
#include "../../csrc/cpu/kernels/tiles/pack.h"

using namespace fastattn::tested;

namespace {

// parts[kParts][32] of the pairs (a[i], b[i]), or of a and then b.
template <int kParts>
void parts_of(bool pairs, const float* a, const float* b, uint16_t* parts) {
  __m512i x[kParts];
  if (pairs)
    AsBf16<kParts>::split_pairs(load(a), load(b), x);
  else
    AsBf16<kParts>::split_joined(load(a), load(b), x);
  __builtin_memcpy(parts, x, sizeof x);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void parts(int count, int pairs, const float* a, const float* b, uint16_t* to) {
  if (count == 1) return parts_of<1>(pairs, a, b, to);
  if (count == 2) return parts_of<2>(pairs, a, b, to);
  parts_of<3>(pairs, a, b, to);
}

// The pairs (a[i], b[i]) in fp16, [32].
EXPORT void pairs_of_f16(const float* a, const float* b, uint16_t* to) {
  __m512i x[1];
  AsF16::split_pairs(load(a), load(b), x);
  __builtin_memcpy(to, x, sizeof x);
}

// Which of the part's products are computed: left and right part of each; returns how many.
EXPORT int products(int count, int* left, int* right) {
  const auto list = [&](auto of) {
    for (int n = 0; n < decltype(of)::count; ++n) left[n] = of.left[n], right[n] = of.right[n];
    return decltype(of)::count;
  };
  if (count == 1) return list(PartProducts<1>());
  if (count == 2) return list(PartProducts<2>());
  return list(PartProducts<3>());
}

// Of 32 rows of `channels` floats, which ones have no parts that tiles can multiply, as bits.
EXPORT uint32_t rows_that_are_apart(const float* rows, int64_t channels, int64_t col_stride) {
  return separate_rows(
      RowsOfTile<TileFloat<3>>{rows, channels * col_stride, col_stride, channels, ~0u});
}
