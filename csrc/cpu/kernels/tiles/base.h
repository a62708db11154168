// What runs on tiles, and the instruction set below, whose kernels run the rest.
#pragma once
#include "../../kernel_table.h"
#include "../decode.h"
#include "../varlen.h"
#include "parts.h"

namespace fastattn {
namespace FASTATTN_BASE {
extern const KernelTable table;
}
namespace FASTATTN_ISA {
namespace {

// backends/cpu/__init__.py says the same to explain().
inline bool on_tiles(const AttentionParams& p) {
  // Of a few queries the sums on vectors are of short chains, and more exact (tile.h).
  const bool few = p.dtype == DType::f32 && p.Lq <= 4;
  if (p.score_program != nullptr) return false;
  return multiplies_on_tiles(p.dtype, Tiles::kEmulated) && !few && !has_content_terms(p) &&
         p.row_bias.data == nullptr && p.Hkv > 0 && p.D > 0 && p.Dv > 0 &&
         pays_on_tiles(p.dtype, p.Lq, p.Lk, p.D);
}

// The forward pass of a few queries is decoding, which is bound by memory.
inline bool forward_on_tiles(const Sequence& p) { return on_tiles(p) && !is_decoded<Single>(p); }
inline bool backward_on_tiles(const Sequence& p) { return on_tiles(p); }

// Runs the sequences of a call that belong on tiles by one function, then the others by another.
template <class OnTiles, class OnVectors>
inline void divide(const SequencesParams& p, bool (*belongs)(const Sequence&), OnTiles run_on_tiles,
                   OnVectors run_on_vectors) {
  const int64_t count = p.attention.B;
  const Sequences sequences(p);
  int64_t* const order = static_cast<int64_t*>(
      __builtin_malloc(static_cast<size_t>(max_of<int64_t>(1, count)) * sizeof(int64_t)));
  int64_t tiled = 0;
  for (int64_t n = 0; n < count; ++n)
    if (belongs(sequences.at(n))) order[tiled++] = p.order[n];
  for (int64_t n = 0, at = tiled; n < count; ++n)
    if (!belongs(sequences.at(n))) order[at++] = p.order[n];
  SequencesParams calls = p;
  calls.order = order, calls.attention.B = tiled;
  if (tiled > 0) run_on_tiles(calls);
  calls.order = order + tiled, calls.attention.B = count - tiled;
  if (tiled < count) run_on_vectors(calls);
  __builtin_free(order);
}

// Calls f(P()) with the operands of a call that runs on tiles.
template <class F>
inline void with_operands(const AttentionParams& p, F f) {
  if constexpr (has_kernels(DType::bf16))
    if (p.dtype == DType::bf16) return f(TileBf16());
  if constexpr (has_kernels(DType::f16))
    if (p.dtype == DType::f16) return f(TileF16());
  if constexpr (has_kernels(DType::f32)) {
    if (p.dtype != DType::f32) return;
    if (p.reduced) return f(TileFloat<2>());
    f(TileFloat<3>());
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
