// What runs on tiles, and the instruction set below, whose kernels run the rest.
#pragma once
#include "../../kernel_table.h"

namespace fastattn {
namespace FASTATTN_BASE {
extern const KernelTable table;
}
namespace FASTATTN_ISA {
namespace {

inline bool on_tiles(const AttentionParams& p) {
  return p.dtype == DType::bf16 && p.Hkv > 0 && p.D > 0 && p.Dv > 0;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
