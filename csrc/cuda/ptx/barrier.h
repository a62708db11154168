// Barriers other than __syncthreads. PTX ISA: bar.sync, bar.arrive, mbarrier, fence.proxy.async. An
// mbarrier is 8 bytes of shared memory, aligned to 8. Its phase ends when all the arrivals it was
// initialised for and all announced bytes have arrived; then the next phase begins.
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/barrier.h"
#else

namespace fastattn {
namespace cuda {

// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads, a multiple of 32.
FASTATTN_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
FASTATTN_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

FASTATTN_DEVICE uint32_t address_of_barrier(const uint64_t* barrier) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
}

// Called by one thread. The others may use it after mbarrier_fence_init and a barrier.
FASTATTN_DEVICE void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of_barrier(barrier)),
               "r"(arrivals)
               : "memory");
}

FASTATTN_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of_barrier(barrier))
               : "memory");
}

// sm_90 and up, as everything below. Arrives, and announces the bytes that a bulk copy will bring.
FASTATTN_DEVICE void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of_barrier(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of this parity has ended: 0 for the first phase, 1 for the second, 0 ...
FASTATTN_DEVICE void mbarrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}" ::"r"(address_of_barrier(barrier)),
      "r"(parity)
      : "memory");
}

FASTATTN_DEVICE void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Required between ordinary stores to shared memory and their use by TMA or wgmma.
FASTATTN_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cuda
}  // namespace fastattn
#endif
