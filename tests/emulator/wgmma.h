// The emulator's side of csrc/cuda/ptx/wgmma.h. A product is computed when its group is waited for:
// until then d holds what it held, and whoever writes to a's or b's memory, or registers, is too
// early.
#pragma once
#include "device.h"

namespace emulator {

struct Wgmma {
  const uint32_t* a;      // rs: of four registers
  uint64_t a_descriptor;  // ss
  uint64_t b_descriptor;
  float* d;
  int columns;
  bool registers, half, transposed, accumulate;
  Place place;
};

void begin_wgmma(const Wgmma& operation);
void fence_wgmma();
void commit_wgmma();
void wait_wgmma(size_t remaining, Place place);

}  // namespace emulator

namespace fastattn {
namespace cuda {

inline uint32_t shared_address_of(const void* shared) {
  return emulator::shared_address(shared, 1, 1, "cvta", {});
}

inline void wgmma_fence() { emulator::fence_wgmma(); }
inline void wgmma_commit() { emulator::commit_wgmma(); }

template <int N>
void wgmma_wait(emulator::Place place = emulator::Place::here()) {
  emulator::wait_wgmma(N, place);
}

template <int kCount>
void wgmma_arrived(float (&)[kCount]) {}

template <class T>
constexpr bool kIsHalf = false;
template <>
inline constexpr bool kIsHalf<F16> = true;

template <class T, int kN, bool kTransposed>
void wgmma_ss(float (&d)[kN / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate,
              emulator::Place place = emulator::Place::here()) {
  emulator::begin_wgmma(
      {nullptr, a.bits, b.bits, d, kN, false, kIsHalf<T>, kTransposed, accumulate, place});
}

template <class T, int kN, bool kTransposed>
void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], MatrixDescriptor b, bool accumulate,
              emulator::Place place = emulator::Place::here()) {
  emulator::begin_wgmma({a, 0, b.bits, d, kN, true, kIsHalf<T>, kTransposed, accumulate, place});
}

}  // namespace cuda
}  // namespace fastattn
