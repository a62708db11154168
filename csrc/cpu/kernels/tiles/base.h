// The instruction set below the tiles: its kernels run what has no kernel on tiles.
#pragma once
#include "../../kernel_table.h"

namespace fastattn {
namespace FASTATTN_BASE {
extern const KernelTable table;
}
}  // namespace fastattn
