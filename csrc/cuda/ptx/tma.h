// Bulk copies of a box of a tensor between global and shared memory, by one thread. PTX ISA:
// cp.async.bulk.tensor, cp.reduce.async.bulk.tensor; sm_90 and up. The tensor map describes the
// tensor and the layout of a box in shared memory. It is created on the host (tensor_map.h) and
// passed as a __grid_constant__ argument. Coordinates count elements, the innermost dimension
// first. Elements outside of the tensor are loaded as zeros and not stored.
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/tma.h"
#else
#include <cuda.h>

namespace fastattn {
namespace cuda {

using TensorMap = CUtensorMap;

FASTATTN_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `barrier` receives the bytes of the whole box, inside and outside of the tensor.
FASTATTN_DEVICE void tma_load(void* shared, const TensorMap& map, uint64_t* barrier, int c0, int c1,
                              int c2, int c3) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto bar = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

FASTATTN_DEVICE void tma_store(const TensorMap& map, const void* shared, int c0, int c1, int c2,
                               int c3) {
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Adds the box to the tensor instead of storing it, element by element.
FASTATTN_DEVICE void tma_reduce_add(const TensorMap& map, const void* shared, int c0, int c1,
                                    int c2, int c3) {
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Closes a group of this thread's stores.
FASTATTN_DEVICE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but N groups have read shared memory, which may then be overwritten.
template <int N>
FASTATTN_DEVICE void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

}  // namespace cuda
}  // namespace fastattn
#endif
