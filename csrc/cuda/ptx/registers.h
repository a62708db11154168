// Changes the number of registers per thread. PTX ISA: setmaxnreg; sm_90a. Called by all four warps
// of a warpgroup.
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/registers.h"
#else

namespace fastattn {
namespace cuda {

// The count is a multiple of 8, from 24 to 256.

// Releases the registers above kCount.
template <int kCount>
FASTATTN_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Waits until kCount registers are available; others must release them first.
template <int kCount>
FASTATTN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace cuda
}  // namespace fastattn
#endif
