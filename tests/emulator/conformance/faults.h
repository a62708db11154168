// Kernels that are wrong, each in one way; the emulator must say so. Not for a real GPU.
#pragma once
#include "wrappers.h"

namespace fastattn {
namespace cuda {

inline void fault_divergence(const Probe) {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    __shfl_xor_sync(0xffffffffu, 1, 1);
}

inline void fault_same_collective_in_two_places(const Probe) {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    __syncwarp();
}

inline void fault_deadlock(const Probe) {
  if (threadIdx.x < 32) __syncthreads();
}

inline void fault_misaligned_copy(const Probe probe) {
  cp_async_16(dynamic_shared() + 8, probe.in, 16);
}

inline void fault_misaligned_source(const Probe probe) {
  cp_async_16(dynamic_shared(), probe.in + 1, 16);
}

inline void fault_copy_out_of_range(const Probe probe) {
  cp_async_16(dynamic_shared() + 4096, probe.in, 16);
}

inline void fault_write_out_of_range(const Probe) { dynamic_shared()[4096 + threadIdx.x] = 0; }

inline void fault_copy_never_waited_for(const Probe probe) {
  cp_async_16(dynamic_shared() + 16 * threadIdx.x, probe.in, 16);
  cp_async_commit();
}

inline void fault_misaligned_ldmatrix(const Probe) {
  uint32_t r[4];
  ldmatrix_x4(r, dynamic_shared() + 4 * threadIdx.x);
}

// These two are wrong results, not errors: out is NaN.
inline void fault_read_before_write(const Probe probe) {
  probe.out[threadIdx.x] = reinterpret_cast<uint32_t*>(dynamic_shared())[threadIdx.x];
}

inline void fault_read_before_wait(const Probe probe) {
  char* mine = dynamic_shared() + 16 * threadIdx.x;
  cp_async_16(mine, probe.in, 16);
  cp_async_commit();
  probe.out[threadIdx.x] = *reinterpret_cast<uint32_t*>(mine);
  cp_async_wait<0>();
}

inline void fault_no_barrier_after_wait(const Probe probe) {
  cp_async_16(dynamic_shared() + 16 * threadIdx.x, probe.in, 16);
  cp_async_commit();
  cp_async_wait<0>();
  const unsigned other = (threadIdx.x + 32) % 64;
  probe.out[threadIdx.x] = *reinterpret_cast<uint32_t*>(dynamic_shared() + 16 * other);
}

}  // namespace cuda
}  // namespace fastattn
