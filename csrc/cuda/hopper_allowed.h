// Whether the kernels for Hopper may run. The module includes this header, too, so it has no CUDA.
#pragma once

namespace fastattn {
namespace cuda {

// Can be switched off, to test and measure the other kernels on the same GPU.
inline bool& hopper_allowed() {
#ifdef FASTATTN_EMULATED
  static bool allowed = false;
#else
  static bool allowed = true;
#endif
  return allowed;
}

}  // namespace cuda
}  // namespace fastattn
