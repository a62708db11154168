// How many registers a thread has. PTX ISA: setmaxnreg; sm_90a. By all four warps of a warpgroup.
#pragma once
#include "../device.h"

namespace fastattn {
namespace cuda {

// The count is a multiple of 8, from 24 to 240. The emulator has registers enough.

// Gives back what is beyond kCount.
template <int kCount>
FASTATTN_DEVICE void give_registers() {
#ifndef FASTATTN_EMULATED
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Waits until there are kCount, which others have to give back first.
template <int kCount>
FASTATTN_DEVICE void take_registers() {
#ifndef FASTATTN_EMULATED
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace cuda
}  // namespace fastattn
