// CUDA C++ without its compiler: qualifiers, built-in variables, and the functions of a warp and a
// block that kernels use. csrc/cuda/device.h includes it in place of CUDA's own headers.
#pragma once
#include <cmath>
#include <cstring>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::emulator::ThreadIndex{::emulator::machine.current->id})
#define blockIdx (::emulator::machine.block_index)
#define blockDim (::emulator::machine.block)
#define gridDim (::emulator::machine.grid)

namespace emulator {

struct ThreadIndex {
  unsigned x;
};

// out = in of the lane that source(lane) names.
template <class T, class F>
T shuffle(const char* operation, T value, Place place, F source) {
  struct Argument {
    T in, out;
    int from;
  } mine{value, value, source(static_cast<int>(lane()))};
  warp_together(operation, &mine, place, [](void** arguments) {
    for (int n = 0; n < 32; ++n) {
      auto* a = static_cast<Argument*>(arguments[n]);
      a->out = static_cast<Argument*>(arguments[a->from])->in;
    }
  });
  return mine.out;
}

inline void whole_warp(unsigned mask, Place place) {
  if (mask != 0xffffffffu) fail("only collectives of whole warps are modelled", place);
}

}  // namespace emulator

inline void __syncthreads(emulator::Place place = emulator::Place::here()) {
  emulator::sync_barrier(0, static_cast<unsigned>(emulator::machine.threads.size()),
                         "__syncthreads", place);
}

inline int __syncthreads_or(int mine, emulator::Place place = emulator::Place::here()) {
  return emulator::sync_or(mine != 0, place);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       emulator::Place place = emulator::Place::here()) {
  emulator::whole_warp(mask, place);
  emulator::warp_together("__syncwarp", nullptr, place, [](void**) {});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip,
                  emulator::Place place = emulator::Place::here()) {
  emulator::whole_warp(mask, place);
  return emulator::shuffle("__shfl_xor_sync", value, place, [=](int n) { return n ^ flip; });
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, emulator::Place place = emulator::Place::here()) {
  emulator::whole_warp(mask, place);
  return emulator::shuffle("__shfl_sync", value, place, [=](int) { return from & 31; });
}

inline int __any_sync(unsigned mask, int mine, emulator::Place place = emulator::Place::here()) {
  emulator::whole_warp(mask, place);
  struct Argument {
    bool mine, any;
  } argument{mine != 0, false};
  emulator::warp_together("__any_sync", &argument, place, [](void** arguments) {
    bool any = false;
    for (int n = 0; n < 32; ++n) any |= static_cast<Argument*>(arguments[n])->mine;
    for (int n = 0; n < 32; ++n) static_cast<Argument*>(arguments[n])->any = any;
  });
  return argument.any;
}

// One fiber runs at a time, so plain operations are atomic.
template <class T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}

template <class T>
T atomicOr(T* address, T value) {
  const T before = *address;
  *address = before | value;
  return before;
}

template <class T>
T atomicMax(T* address, T value) {
  const T before = *address;
  *address = before < value ? value : before;
  return before;
}

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
