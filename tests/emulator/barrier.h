// The emulator's side of csrc/cuda/ptx/barrier.h. Memory is sequentially consistent here: the
// fences do nothing.
#pragma once
#include "device.h"

namespace emulator {
void init_mbarrier(const void* barrier, int arrivals, Place place);
void arrive_mbarrier(const void* barrier, long announced, Place place);
void bring_bytes(const void* barrier, long bytes);  // of a bulk copy that is done
void wait_mbarrier(const void* barrier, int parity, Place place);
}  // namespace emulator

namespace fastattn {
namespace cuda {

inline void barrier_sync(int id, int threads, emulator::Place place = emulator::Place::here()) {
  emulator::sync_barrier(id, static_cast<unsigned>(threads), "bar.sync", place);
}

inline void barrier_arrive(int id, int threads, emulator::Place place = emulator::Place::here()) {
  emulator::arrive_barrier(id, static_cast<unsigned>(threads), place);
}

inline void mbarrier_init(uint64_t* barrier, int arrivals,
                          emulator::Place place = emulator::Place::here()) {
  emulator::init_mbarrier(barrier, arrivals, place);
}

inline void mbarrier_arrive(uint64_t* barrier, emulator::Place place = emulator::Place::here()) {
  emulator::arrive_mbarrier(barrier, 0, place);
}

inline void mbarrier_arrive_expect(uint64_t* barrier, int bytes,
                                   emulator::Place place = emulator::Place::here()) {
  emulator::arrive_mbarrier(barrier, bytes, place);
}

inline void mbarrier_wait(uint64_t* barrier, int parity,
                          emulator::Place place = emulator::Place::here()) {
  emulator::wait_mbarrier(barrier, parity, place);
}

inline void mbarrier_fence_init() {}
inline void fence_proxy_async() {}

}  // namespace cuda
}  // namespace fastattn
