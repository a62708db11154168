// The emulator's side of csrc/cuda/ptx/tma.h. A load's destination is NaN until it is done, a store
// reads shared memory when it is done: both as late as may be, in any order.
#pragma once
#include "device.h"

namespace emulator {

struct TensorMap {
  char* base = nullptr;
  int element_bytes = 0;
  int swizzle = 0;                   // bytes: 0, 32, 64 or 128
  bool is_float32 = false;           // what an addition adds; else the element must not be added
  int64_t size[4] = {1, 1, 1, 1};    // of the tensor, innermost first
  int64_t stride[4] = {0, 0, 0, 0};  // bytes; stride[0] is element_bytes
  int box[4] = {1, 1, 1, 1};
};

void load_box(void* shared, const TensorMap& map, const void* barrier, const int (&at)[4],
              Place place);
void store_box(const TensorMap& map, const void* shared, const int (&at)[4], bool add, Place place);
void commit_boxes();
void wait_boxes(size_t remaining);

}  // namespace emulator

namespace fastattn {
namespace cuda {

using emulator::TensorMap;

inline void prefetch_tensor_map(const TensorMap&) {}

inline void tma_load(void* shared, const TensorMap& map, uint64_t* barrier, int c0, int c1, int c2,
                     int c3, emulator::Place place = emulator::Place::here()) {
  emulator::load_box(shared, map, barrier, {c0, c1, c2, c3}, place);
}

inline void tma_store(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3,
                      emulator::Place place = emulator::Place::here()) {
  emulator::store_box(map, shared, {c0, c1, c2, c3}, false, place);
}

inline void tma_reduce_add(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3,
                           emulator::Place place = emulator::Place::here()) {
  emulator::store_box(map, shared, {c0, c1, c2, c3}, true, place);
}

inline void tma_commit() { emulator::commit_boxes(); }

template <int N>
void tma_wait_read() {
  emulator::wait_boxes(N);
}

}  // namespace cuda
}  // namespace fastattn
