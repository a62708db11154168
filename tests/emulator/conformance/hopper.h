// The wrappers of sm_90: mbarriers, named barriers, TMA and wgmma, each by a kernel of its own.
#pragma once
#include "../../../csrc/cuda/ptx/barrier.h"
#include "../../../csrc/cuda/ptx/registers.h"
#include "../../../csrc/cuda/ptx/tma.h"
#include "../../../csrc/cuda/ptx/wgmma.h"
#include "wrappers.h"

namespace fastattn {
namespace cuda {

// The host pass of nvcc, too, must see the bodies' declarations; only sm_90a has the instructions.
#if defined(FASTATTN_EMULATED) || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTATTN_HOPPER 1
#endif

struct TmaProbe {
  TensorMap load, store, add;
  uint32_t* out;  // shared memory as the load left it: [1024] words
};

// 128 threads. Words pass from warp to warp through two phases of one mbarrier.
__global__ void probe_mbarrier(const Probe probe) {
#ifdef FASTATTN_HOPPER
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  auto* barrier = reinterpret_cast<uint64_t*>(dynamic_shared() + 1024);
  const int t = static_cast<int>(threadIdx.x), warp = t / 32;
  if (t == 0) {
    mbarrier_init(barrier, 32);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (warp == 0) {
    shared[t] = probe.in[t];
    mbarrier_arrive(barrier);
  }
  mbarrier_wait(barrier, 0);
  const uint32_t first = shared[t % 32];
  __syncthreads();
  if (warp == 3) {
    shared[t % 32] = probe.in[t];
    mbarrier_arrive(barrier);
  }
  mbarrier_wait(barrier, 1);
  probe.out[t] = first + 3 * shared[t % 32];
#endif
}

// 128 threads. Warp 1 waits for what warp 0 has written, warp 3 for warp 2, on barriers of their
// own.
__global__ void probe_named_barrier(const Probe probe) {
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int t = static_cast<int>(threadIdx.x), pair = t / 64;
  if (t / 32 % 2 == 0) {
    shared[t] = probe.in[t];
    __syncwarp();
    barrier_arrive(1 + pair, 64);
  } else {
    barrier_sync(1 + pair, 64);
    probe.out[t] = shared[t - 32];
  }
}

// A box of 64 x 4 x 2 x 1 (bf16, at (32, -1, 1, 0)) comes, is looked at and goes; then 32 x 8
// floats are added.
__global__ void probe_tma(const __grid_constant__ TmaProbe probe) {
#ifdef FASTATTN_HOPPER
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  auto* barrier = reinterpret_cast<uint64_t*>(dynamic_shared() + 2048);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (t == 0) {
    prefetch_tensor_map(probe.load);
    mbarrier_arrive_expect(barrier, 1024);
    tma_load(shared, probe.load, barrier, 32, -1, 1, 0);
  }
  mbarrier_wait(barrier, 0);
  for (int n = t; n < 256; n += 32) probe.out[n] = shared[n];
  __syncwarp();
  if (t == 0) {
    tma_store(probe.store, shared, 32, -1, 1, 0);
    tma_commit();
    tma_wait_read<0>();
  }
  __syncwarp();
  for (int n = t; n < 256; n += 32) shared[n] = bits_of_float(static_cast<float>(n));
  fence_proxy_async();
  __syncwarp();
  if (t == 0) {
    tma_reduce_add(probe.add, shared, 0, 0, 0, 0);
    tma_commit();
    tma_wait_read<0>();
  }
  __syncwarp();
#endif
}

// 128 threads. in: [a 64 x 16 as shared memory: 2048 words][b: 4096 words][thread][a 4], and d is
// thread + register at first. out: [thread][32].
template <class T, bool kTransposed, bool kRegisters>
__global__ void probe_wgmma(const Probe probe) {
#ifdef FASTATTN_HOPPER
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int t = static_cast<int>(threadIdx.x);
  for (int n = t; n < 4096; n += 128) shared[n] = probe.in[n];
  fence_proxy_async();
  __syncthreads();
  uint32_t a[4];
  float d[32];
  for (int n = 0; n < 4; ++n) a[n] = probe.in[4096 + 4 * t + n];
  for (int n = 0; n < 32; ++n) d[n] = static_cast<float>(t + n);
  const uint32_t start = shared_address_of(shared);
  // a: 64 rows of 128 bytes; b: 64 rows, which are n or, transposed, k.
  const MatrixDescriptor da = describe_matrix(start, 0, 1024);
  const MatrixDescriptor db = describe_matrix(start + 8192, 1024, 1024);
  wgmma_fence();
  if (kRegisters)
    wgmma_rs<T, 64, kTransposed>(d, a, db, true);
  else
    wgmma_ss<T, 64, kTransposed>(d, da, db, true);
  wgmma_commit();
  wgmma_wait<0>();
  for (int n = 0; n < 32; ++n) probe.out[32 * t + n] = bits_of_float(d[n]);
#endif
}

// 128 threads. d [64, N] = a b over k = 64 in four steps, by descriptors that move on. b is [N, 64]
// and a rows 64 to 127 of [128, 64]; or, transposed, b is [64, N] in panels of 64 columns and a in
// registers. in: both as they lie in shared memory, 4096 and 8192 words, [thread][step][a 4]. out:
// [thread][N / 2].
template <int kN, bool kTransposed>
__global__ void probe_wgmma_steps(const Probe probe) {
#ifdef FASTATTN_HOPPER
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int t = static_cast<int>(threadIdx.x);
  for (int n = t; n < 12288; n += 128) shared[n] = probe.in[n];
  fence_proxy_async();
  __syncthreads();
  uint32_t registers[4][4];
  float d[kN / 2];
  for (int n = 0; n < 16; ++n) registers[n / 4][n % 4] = probe.in[12288 + 16 * t + n];
  for (int n = 0; n < kN / 2; ++n) d[n] = static_cast<float>(t + n);
  const uint32_t start = shared_address_of(shared);
  const MatrixDescriptor a = describe_matrix(start, 16, 1024) + 8192;
  const MatrixDescriptor b = describe_matrix(start + 16384, 8192, 1024);
  wgmma_fence();
  FASTATTN_UNROLL
  for (int step = 0; step < 4; ++step) {
    if constexpr (kTransposed)
      wgmma_rs<Bf16, kN, true>(d, registers[step], b + 2048 * step, step > 0);
    else
      wgmma_ss<Bf16, kN, false>(d, a + 32 * step, b + 32 * step, step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_arrived(d);
  for (int n = 0; n < kN / 2; ++n) probe.out[kN / 2 * t + n] = bits_of_float(d[n]);
#endif
}

// 384 threads. The first warpgroup gives its registers to the others.
__global__ void __launch_bounds__(384, 1) probe_setmaxnreg(const Probe probe) {
#ifdef FASTATTN_HOPPER
  const int t = static_cast<int>(threadIdx.x);
  if (t < 128) {
    give_registers<40>();
    probe.out[t] = probe.in[t];
  } else {
    take_registers<232>();
    probe.out[t] = 3 * probe.in[t];
  }
#endif
}

}  // namespace cuda
}  // namespace fastattn
