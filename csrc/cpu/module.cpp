// The Python module fastattn._cpu. It does not depend on torch: one build serves every torch
// version.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "../operands.h"
#include "../tensors.h"
#include "isa.h"
#include "kernel_table.h"
#include "peaks/peaks.h"
#include "processor.h"

namespace py = pybind11;

namespace fastattn {

void define_attention(py::module_& m);
void define_others(py::module_& m);

namespace {

// Operations or bytes per second that this processor reaches.
double measure_peak(const std::string& kind, int threads, double seconds) {
  static const char* const names[] = {"fma_f32", "fma_f64", "dot_bf16", "read_bandwidth"};
  py::gil_scoped_release release;
  const DType of = kind == "dot_bf16" ? DType::bf16 : DType::f32;
  for (int i = 0; i < 4; ++i)
    if (kind == names[i]) return kernels(of).measure_peak(static_cast<Peak>(i), threads, seconds);
  std::string allowed;
  for (const char* name : names) allowed += std::string(name) + ", ";
  for (const Unit& unit : units()) {
    if (kind == unit.name) return measure_unit(unit, threads, seconds);
    allowed += std::string(unit.name) + (&unit == &units().back() ? "" : ", ");
  }
  throw std::invalid_argument("measure_peak: kind is \"" + kind + "\"; allowed are " + allowed);
}

// What this module was compiled for, and what runs here.
py::dict build_info() {
  py::dict info;
  info["isa"] = current_isa();
  info["compiled"] = compiled_isas();
  info["supported"] = supported_isas();
  info["unsupported"] = unsupported_isas();
  info["emulated"] = emulated_isas();
  info["no_float16_on_tiles"] = why_no_tiles("fp16");
#if defined(__VERSION__)
  info["compiler"] = __VERSION__;
#endif
  return info;
}

// The processor's vendor, family, model and features.
py::dict describe_processor() {
  py::dict info;
  const Processor& found = processor();
  info["vendor"] = found.vendor;
  info["family"] = found.family;
  info["model"] = found.model;
  info["brand"] = found.brand;
  info["features"] = found.features;
  return info;
}

}  // namespace
}  // namespace fastattn

PYBIND11_MODULE(_cpu, m) {
  fastattn::module_name = "fastattn._cpu";
  m.doc() = "fastattn's CPU kernels. Import torch first: its OpenMP runtime is shared.";
  fastattn::define_attention(m);
  fastattn::define_others(m);
  m.def("build_info", &fastattn::build_info);
  m.def("set_isa", &fastattn::set_isa);
  m.def("set_default_isa", &fastattn::set_default_isa);
  m.def("on_tiles",
        [](int dtype) { return fastattn::on_tiles(static_cast<fastattn::DType>(dtype)); });
  m.def("has_tiles",
        [](int dtype) { return fastattn::has_tiles(static_cast<fastattn::DType>(dtype)); });
  m.def("set_all_sizes_on_tiles", &fastattn::set_all_sizes_on_tiles);
  m.def("pays_on_tiles", [](int dtype, int64_t queries, int64_t keys, int64_t columns) {
    return fastattn::pays_on_tiles(static_cast<fastattn::DType>(dtype), queries, keys, columns);
  });
  m.def("processor", &fastattn::describe_processor);
  m.def(
      "usable_features",
      [](uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx,
         uint32_t leaf7_1_eax, uint64_t xcr0, bool tiles_allowed) {
        return fastattn::usable_features(
            {leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax, xcr0}, tiles_allowed);
      },
      py::kw_only(), py::arg("leaf1_ecx"), py::arg("leaf7_ebx"), py::arg("leaf7_ecx"),
      py::arg("leaf7_edx"), py::arg("leaf7_1_eax"), py::arg("xcr0"), py::arg("tiles_allowed"));
  m.def(
      "why_no_tiles",
      [](const std::string& type, uint32_t leaf7_edx, uint32_t leaf7_1_eax, uint64_t xcr0,
         int error) {
        fastattn::FeatureRegisters registers;
        registers.leaf7_edx = leaf7_edx;
        registers.leaf7_1_eax = leaf7_1_eax;
        registers.xcr0 = xcr0;
        return fastattn::why_no_tiles(type, registers, error);
      },
      py::arg("type"), py::kw_only(), py::arg("leaf7_edx"), py::arg("leaf7_1_eax"), py::arg("xcr0"),
      py::arg("error"));
  m.def("use_torch", &fastattn::use_torch, py::arg("torch"), py::arg("interface"),
        py::arg("device") = "cpu");
  m.def("use_rules", &fastattn::use_rules, py::arg("new_rows"), py::arg("summed_to"),
        py::arg("may_round"));
  m.def("measure_peak", &fastattn::measure_peak, py::arg("kind"), py::arg("threads"),
        py::arg("seconds") = 0.1);
}
