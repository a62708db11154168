// How many registers a thread has. PTX ISA: setmaxnreg; sm_90a. By all four warps of a warpgroup.
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/registers.h"
#else

namespace fastattn {
namespace cuda {

// The count is a multiple of 8, from 24 to 256.

// Gives back what is beyond kCount.
template <int kCount>
FASTATTN_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Waits until there are kCount, which others have to give back first.
template <int kCount>
FASTATTN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace cuda
}  // namespace fastattn
#endif
