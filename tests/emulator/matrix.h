// The emulator's side of csrc/cuda/ptx/matrix.h.
#pragma once
#include "device.h"

namespace emulator {
void load_matrices(uint32_t* registers, const void* row, bool transposed, Place place);
void store_matrices(void* row, const uint32_t* registers, bool transposed, Place place);
}  // namespace emulator

namespace fastattn {
namespace cuda {

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row,
                        emulator::Place place = emulator::Place::here()) {
  emulator::load_matrices(r, row, false, place);
}

inline void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row,
                                   emulator::Place place = emulator::Place::here()) {
  emulator::load_matrices(r, row, true, place);
}

inline void stmatrix_x4(void* row, const uint32_t (&r)[4],
                        emulator::Place place = emulator::Place::here()) {
  emulator::store_matrices(row, r, false, place);
}

inline void stmatrix_x4_transposed(void* row, const uint32_t (&r)[4],
                                   emulator::Place place = emulator::Place::here()) {
  emulator::store_matrices(row, r, true, place);
}

}  // namespace cuda
}  // namespace fastattn
