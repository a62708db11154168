// The emulator's side of csrc/cuda/ptx/mma.h.
#pragma once
#include "device.h"

namespace emulator {
enum class Format { bf16, f16, tf32 };
void multiply(Format format, float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Place place);
}  // namespace emulator

namespace fastattn {
namespace cuda {

inline void mma_bf16_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              emulator::Place place = emulator::Place::here()) {
  emulator::multiply(emulator::Format::bf16, d, a, b0, b1, place);
}

inline void mma_f16_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             emulator::Place place = emulator::Place::here()) {
  emulator::multiply(emulator::Format::f16, d, a, b0, b1, place);
}

inline void mma_tf32_m16n8k8(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             emulator::Place place = emulator::Place::here()) {
  emulator::multiply(emulator::Format::tf32, d, a, b0, b1, place);
}

}  // namespace cuda
}  // namespace fastattn
