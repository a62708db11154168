// The Python module fastattn._cuda. It does not depend on torch, and it can be imported without a
// GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../operands.h"
#include "../options.h"
#include "hopper_allowed.h"
#include "kernels/table.h"

#ifdef FASTATTN_EMULATED
#include "emulator/machine.h"
#include "launch.h"
#endif

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// The compiled architectures, such as "80;90a".
#ifndef FASTATTN_CUDA_ARCHS
#define FASTATTN_CUDA_ARCHS ""
#endif
// The version of fastattn whose Python code calls these kernels.
#ifndef FASTATTN_VERSION
#define FASTATTN_VERSION ""
#endif

py::dict build_info() {
  py::dict info;
#ifdef FASTATTN_EMULATED
  info["device"] = "cpu";
#else
  info["device"] = "cuda";
#endif
  info["version"] = FASTATTN_VERSION;
  info["architectures"] = FASTATTN_CUDA_ARCHS;
  info["widths"] = std::vector<int>(std::begin(kWidths), std::end(kWidths));
  return info;
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn

PYBIND11_MODULE(_cuda, m) {
  fastattn::module_name = "fastattn._cuda";
  m.doc() = "fastattn's CUDA kernels.";
  fastattn::cuda::define_all(m);
  m.def("use_torch", &fastattn::use_torch, py::arg("torch"), py::arg("interface"),
        py::arg("device"));
  m.def("use_rules", &fastattn::use_rules, py::arg("new_rows"), py::arg("summed_to"),
        py::arg("may_round"));
  m.def("build_info", &fastattn::cuda::build_info);
  m.def("allow_hopper", [](bool allowed) { fastattn::cuda::hopper_allowed() = allowed; });
#ifdef FASTATTN_EMULATED
  m.def("set_seed", &emulator::set_seed);
  m.def("take_launches", [] { return std::exchange(fastattn::cuda::launches(), {}); });
  m.def("take_streams", [] { return std::exchange(fastattn::cuda::streams(), {}); });
#endif
}
