// What runs on tiles, and the instruction set below, whose kernels run the rest.
#pragma once
#include "../../kernel_table.h"

namespace fastattn {
namespace FASTATTN_BASE {
extern const KernelTable table;
}
namespace FASTATTN_ISA {
namespace {

// backends/cpu/__init__.py says the same to explain().
inline bool on_tiles(const AttentionParams& p) {
  return p.dtype == DType::bf16 && p.Hkv > 0 && p.D > 0 && p.Dv > 0 && p.sinks == nullptr;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
