// Whether the kernels for Hopper may run: a header for the module, too, which knows no CUDA.
#pragma once

namespace fastattn {
namespace cuda {

// They may be switched off, to test and to measure the others on their machine.
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
