// Asynchronous copies from global to shared memory, 16 bytes per thread. PTX ISA: cp.async.
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/copy.h"
#else

namespace fastattn {
namespace cuda {

// Starts to copy `bytes` (0 to 16) and fills up to 16 with zeros. Both addresses are multiples of
// 16. The data are visible to this thread after cp_async_wait, and to others after a barrier that
// follows it.
FASTATTN_DEVICE void cp_async_16(void* shared, const void* global, int bytes) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}

// Closes a group of the copies that this thread has started.
FASTATTN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N groups of this thread are pending.
template <int N>
FASTATTN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace cuda
}  // namespace fastattn
#endif
