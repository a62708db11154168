// The emulator's side of csrc/cuda/ptx/registers.h. A block's registers are a pool.
#pragma once
#include "device.h"

namespace emulator {
void give_registers(int count, Place place);
void take_registers(int count, Place place);
}  // namespace emulator

namespace fastattn {
namespace cuda {

template <int kCount>
void give_registers(emulator::Place place = emulator::Place::here()) {
  emulator::give_registers(kCount, place);
}

template <int kCount>
void take_registers(emulator::Place place = emulator::Place::here()) {
  emulator::take_registers(kCount, place);
}

}  // namespace cuda
}  // namespace fastattn
