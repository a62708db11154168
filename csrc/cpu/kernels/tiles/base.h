// What runs on tiles, and the instruction set below, whose kernels run the rest.
#pragma once
#include "../../kernel_table.h"
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
  return multiplies_on_tiles(p.dtype, Tiles::kEmulated) && !few && p.Hkv > 0 && p.D > 0 && p.Dv > 0;
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
