// The emulator's side of csrc/cuda/ptx/copy.h. A copy's destination is NaN from its begin to its
// end, which comes as late as it may: in the wait of the thread that began it.
#pragma once
#include "device.h"

namespace emulator {
void begin_copy(void* shared, const void* global, int bytes, Place place);
void commit_copies();
void wait_copies(size_t remaining);
}  // namespace emulator

namespace fastattn {
namespace cuda {

inline void cp_async_16(void* shared, const void* global, int bytes,
                        emulator::Place place = emulator::Place::here()) {
  emulator::begin_copy(shared, global, bytes, place);
}

inline void cp_async_commit() { emulator::commit_copies(); }

template <int N>
void cp_async_wait() {
  emulator::wait_copies(N);
}

}  // namespace cuda
}  // namespace fastattn
