// Included by every device header: CUDA itself or, under g++ with FASTATTN_EMULATED, the emulator
// of tests/emulator.
#pragma once
#include <cstdint>

#ifdef FASTATTN_EMULATED
#include "emulator/device.h"
#define FASTATTN_DEVICE inline
#define FASTATTN_UNROLL
#define FASTATTN_UNROLL_BY(n)
#else
#define FASTATTN_DEVICE __device__ __forceinline__
#define FASTATTN_UNROLL _Pragma("unroll")
#define FASTATTN_PRAGMA(x) _Pragma(#x)
#define FASTATTN_UNROLL_BY(n) FASTATTN_PRAGMA(unroll n)
#endif

namespace fastattn {
namespace cuda {

// Returns x but hides its value from the compiler. Values computed from it, such as addresses, are
// then recomputed at each use, and not kept in registers throughout a loop.
FASTATTN_DEVICE int anew(unsigned x) {
#ifndef FASTATTN_EMULATED
  asm volatile("" : "+r"(x));
#endif
  return static_cast<int>(x);
}

// The block's dynamic shared memory, with the alignment that TMA needs.
FASTATTN_DEVICE char* dynamic_shared() {
#ifdef FASTATTN_EMULATED
  return emulator::machine.shared;
#else
  extern __shared__ __align__(1024) char fastattn_shared[];
  return fastattn_shared;
#endif
}

}  // namespace cuda
}  // namespace fastattn
