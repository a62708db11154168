// Merged states of attention as Python calls them: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../arguments.h"
#include "../merge_states_arguments.h"
#include "kernel_table.h"
#include "memory.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Expects that a dense result with the sizes of the outputs is filled.
void expect_filled(const MergeStatesParams& p, const Tensor4& result) {
  const int64_t elements = p.B * p.H * p.L * p.D;
  expect_to_fill(result.data, static_cast<size_t>(elements * element_bytes(p.dtype)));
}

py::tuple merge_states(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b) {
  MergedStates states(out_a, lse_a, out_b, lse_b);
  MergeStatesParams& p = states.params;
  p.threads = threads();
  py::tuple results = states.new_results(out_a, lse_a);
  {
    py::gil_scoped_release release;
    expect_filled(p, p.out);
    kernels(p.dtype).merge_states_forward(p);
  }
  return results;
}

py::tuple merge_states_backward(py::handle grad_out, py::handle grad_lse, py::handle out_a,
                                py::handle lse_a, py::handle out_b, py::handle lse_b) {
  MergedStates states(out_a, lse_a, out_b, lse_b);
  MergeStatesParams& p = states.params;
  p.threads = threads();
  py::tuple results = states.new_gradients(grad_out, grad_lse, out_a, lse_a, out_b, lse_b);
  {
    py::gil_scoped_release release;
    expect_filled(p, p.grad_out_a);
    expect_filled(p, p.grad_out_b);
    kernels(p.dtype).merge_states_backward(p);
  }
  return results;
}

}  // namespace

void bind_merge_states(py::module_& m) {
  m.def("merge_states", &merge_states);
  m.def("merge_states_backward", &merge_states_backward);
}

}  // namespace fastattn
