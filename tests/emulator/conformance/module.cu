// The Python module _conformance: runs a kernel of wrappers.h or hopper.h by name. Compiled by g++
// over the emulator, or by nvcc for a GPU: the same kernels.
#include <pybind11/pybind11.h>

#include <map>
#include <string>

#include "../../../csrc/cuda/launch.h"
#include "../../../csrc/cuda/tensor_map.h"
#include "hopper.h"
#include "wrappers.h"

namespace py = pybind11;
using namespace fastattn::cuda;

namespace {

struct Kernel {
  void (*function)(Probe);
  int threads;
};

const std::map<std::string, Kernel> kernels = {
    {"exp2_approx", {probe_exp2_approx, 256}},
    {"reciprocal_approx", {probe_reciprocal_approx, 256}},
    {"to_tf32", {probe_to_tf32, 256}},
    {"float_of_bf16", {probe_float_of_bf16, 256}},
    {"float_of_f16", {probe_float_of_f16, 256}},
    {"pack_bf16", {probe_pack_bf16, 256}},
    {"pack_f16", {probe_pack_f16, 256}},
    {"cp_async", {probe_cp_async, 32}},
    {"ldmatrix_x4", {probe_ldmatrix<false>, 32}},
    {"ldmatrix_x4_transposed", {probe_ldmatrix<true>, 32}},
    {"stmatrix_x4", {probe_stmatrix<false>, 32}},
    {"stmatrix_x4_transposed", {probe_stmatrix<true>, 32}},
    {"mma_bf16_m16n8k16", {probe_mma<0>, 32}},
    {"mma_f16_m16n8k16", {probe_mma<1>, 32}},
    {"mma_tf32_m16n8k8", {probe_mma<2>, 32}},
    {"mbarrier", {probe_mbarrier, 128}},
    {"named_barrier", {probe_named_barrier, 128}},
    {"wgmma_ss_bf16", {probe_wgmma<Bf16, false, false>, 128}},
    {"wgmma_ss_bf16_transposed", {probe_wgmma<Bf16, true, false>, 128}},
    {"wgmma_rs_f16", {probe_wgmma<F16, false, true>, 128}},
    {"wgmma_rs_f16_transposed", {probe_wgmma<F16, true, true>, 128}},
    {"wgmma_80", {probe_wgmma_steps<80, false>, 128}},
    {"wgmma_96", {probe_wgmma_steps<96, false>, 128}},
    {"wgmma_96_transposed", {probe_wgmma_steps<96, true>, 128}},
    {"wgmma_128_transposed", {probe_wgmma_steps<128, true>, 128}},
    {"wgmma_192_transposed", {probe_wgmma_steps<192, true>, 128}},
    {"wgmma_256_transposed", {probe_wgmma_steps<256, true>, 128}},
    {"setmaxnreg", {probe_setmaxnreg, 384}},
};

void run(const std::string& name, uintptr_t in, uintptr_t out, uintptr_t stream) {
  const Kernel& kernel = kernels.at(name);
  const Probe probe{reinterpret_cast<const uint32_t*>(in), reinterpret_cast<uint32_t*>(out)};
  const int shared = name.rfind("wgmma", 0) == 0 ? 49152 : 4096;
  launch({name.c_str(), 1, kernel.threads, shared, stream, "a probe"}, kernel.function, probe);
}

// tensor, stored: [2, 3, 8, 96] bf16; added: [8, 32] floats.
void run_tma(uintptr_t tensor, uintptr_t stored, uintptr_t added, uintptr_t out, uintptr_t stream) {
  auto describe = [](uintptr_t base) {
    return make_tensor_map({reinterpret_cast<void*>(base),
                            TensorElement::bf16,
                            {96, 8, 3, 2},
                            {96 * 2, 96 * 8 * 2, 96 * 24 * 2},
                            {64, 4, 2, 1}});
  };
  const TmaProbe probe{describe(tensor), describe(stored),
                       make_tensor_map({reinterpret_cast<void*>(added),
                                        TensorElement::f32,
                                        {32, 8, 1, 1},
                                        {128, 1024, 1024},
                                        {32, 8, 1, 1}}),
                       reinterpret_cast<uint32_t*>(out)};
  launch({"tma", 1, 32, 4096, stream, "a probe"}, probe_tma, probe);
}

}  // namespace

PYBIND11_MODULE(_conformance, m) {
  m.def("run", &run);
  m.def("run_tma", &run_tma);
#ifdef FASTATTN_EMULATED
  m.def("set_seed", &emulator::set_seed);
#endif
}
