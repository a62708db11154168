// Kernels that are wrong, each in one way; the emulator must say so. Not for a real GPU.
#pragma once
#include "hopper.h"
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

// Faults in the use of instructions of sm_90.

inline uint64_t* fault_barrier(int arrivals) {
  auto* barrier = reinterpret_cast<uint64_t*>(dynamic_shared());
  if (threadIdx.x == 0) mbarrier_init(barrier, arrivals);
  __syncthreads();
  return barrier;
}

inline void fault_two_phases_behind(const Probe) {
  uint64_t* barrier = fault_barrier(1);
  if (threadIdx.x == 0) mbarrier_arrive(barrier);
  mbarrier_wait(barrier, 0);
  __syncthreads();
  for (int n = 0; n < 3 && threadIdx.x == 0; ++n) mbarrier_arrive(barrier);
  __syncthreads();
  mbarrier_wait(barrier, 1);  // for the second phase; the fourth has ended
}

inline void fault_bytes_that_never_come(const Probe) {
  uint64_t* barrier = fault_barrier(1);
  if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, 128);
}

inline void fault_more_bytes_than_announced(const Probe probe) {
  uint64_t* barrier = fault_barrier(1);
  TensorMap map;
  map.base = reinterpret_cast<char*>(const_cast<uint32_t*>(probe.in));
  map.element_bytes = 4;
  map.size[0] = map.box[0] = 32;
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, 64);
    tma_load(dynamic_shared() + 1024, map, barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(barrier, 0);
}

inline void fault_too_many_bytes(const Probe) {
  uint64_t* barrier = fault_barrier(1);
  if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, 1 << 20);
}

inline void fault_left_at_a_barrier(const Probe) {
  if (threadIdx.x < 32) barrier_arrive(1, 64);
}

inline void fault_wgmma_without_fence(const Probe) {
  float d[4];
  const MatrixDescriptor a = describe_matrix(shared_address_of(dynamic_shared()), 16, 1024);
  wgmma_fence();
  wgmma_ss<Bf16, 8, false>(d, a, a, false);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_ss<Bf16, 8, false>(d, a, a, false);
}

inline void fault_wgmma_never_waited_for(const Probe) {
  float d[4];
  const MatrixDescriptor a = describe_matrix(shared_address_of(dynamic_shared()), 16, 1024);
  wgmma_fence();
  wgmma_ss<Bf16, 8, false>(d, a, a, false);
  wgmma_commit();
}

inline void fault_store_never_waited_for(const Probe probe) {
  TensorMap map;
  map.base = reinterpret_cast<char*>(probe.out);
  map.element_bytes = 4;
  if (threadIdx.x == 0) tma_store(map, dynamic_shared(), 0, 0, 0, 0);
}

inline void fault_registers_never_given(const Probe) {
  if (threadIdx.x >= 128) take_registers<232>();
}

inline void fault_registers_not_of_eight(const Probe) { give_registers<100>(); }

}  // namespace cuda
}  // namespace fastattn
