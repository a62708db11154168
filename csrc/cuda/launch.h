// Launches a kernel with CUDA or in the emulator; an error raises an exception that names the
// launch.
#pragma once
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "device.h"
#include "hopper_allowed.h"

#ifndef FASTATTN_EMULATED
#include <cuda_runtime.h>
#endif

namespace fastattn {
namespace cuda {

// The properties of the current device that the kernels for Hopper need.
struct Hopper {
  bool present;
  int multiprocessors;
};

inline Hopper find_hopper() {
#ifdef FASTATTN_EMULATED
  return {hopper_allowed(), 3};
#else
  int device = 0, major = 0, minor = 0, count = 0;
  const bool known =
      hopper_allowed() && cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  return {known && major == 9 && minor == 0, count};
#endif
}

struct Launch {
  const char* name;    // for errors
  int64_t blocks;      // one dimension; nothing is launched for 0
  int threads;         // per block
  int shared_bytes;    // dynamic
  uintptr_t stream;    // cudaStream_t
  std::string shapes;  // for errors
};

#ifdef FASTATTN_EMULATED
// The number of launches of each kernel, by name, from which tests see which kernels ran.
inline std::map<std::string, int>& launches() {
  static std::map<std::string, int> counts;
  return counts;
}

// The streams of all launches, for tests.
inline std::set<uintptr_t>& streams() {
  static std::set<uintptr_t> used;
  return used;
}
#endif

inline void refuse(const Launch& launch, const std::string& what) {
  throw std::runtime_error(std::string("fastattn: ") + launch.name + " [" + launch.shapes +
                           "]: " + what);
}

template <class Arguments>
void launch(const Launch& how, void (*kernel)(Arguments), const Arguments& arguments) {
  if (how.blocks == 0) return;
  if (how.blocks > 0x7fffffff) refuse(how, "more than 2^31 - 1 blocks");
#ifdef FASTATTN_EMULATED
  ++launches()[how.name];
  streams().insert(how.stream);
  emulator::run_grid({static_cast<unsigned>(how.blocks)}, {static_cast<unsigned>(how.threads)},
                     static_cast<size_t>(how.shared_bytes), [&] { kernel(arguments); });
#else
  const auto check = [&](cudaError_t error) {
    if (error != cudaSuccess) refuse(how, cudaGetErrorString(error));
  };
  // Above 48 KiB a kernel must request its shared memory. The request is cheap and allowed during
  // stream capture.
  check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes));
  kernel<<<static_cast<unsigned>(how.blocks), how.threads, how.shared_bytes,
           reinterpret_cast<cudaStream_t>(how.stream)>>>(arguments);
  check(cudaGetLastError());
#endif
}

}  // namespace cuda
}  // namespace fastattn
