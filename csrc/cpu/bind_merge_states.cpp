// Python's view of merged states of attention: addresses, shapes and strides in, nothing out.
#include "../merge_states_arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Expects that a dense result with the shape of the outputs is filled.
void expect(const MergeStatesParams& p, const Tensor4& result) {
  const int64_t elements = p.B * p.H * p.L * p.D;
  expect_to_fill(result.data, static_cast<size_t>(elements * element_bytes(p.dtype)));
}

// operands: see read_states and read_results
void merge_states(int dtype, int lse_dtype, int threads, const py::tuple& sizes,
                  const py::dict& operands) {
  MergeStatesParams p = read_states(dtype, lse_dtype, sizes, named(operands));
  read_results(named(operands), p);
  p.threads = threads;
  py::gil_scoped_release release;
  expect(p, p.out);
  kernels(p.dtype).merge_states_forward(p);
}

// operands: see read_states and read_gradients
void merge_states_backward(int dtype, int lse_dtype, int threads, const py::tuple& sizes,
                           const py::dict& operands) {
  MergeStatesParams p = read_states(dtype, lse_dtype, sizes, named(operands));
  read_gradients(named(operands), p);
  p.threads = threads;
  py::gil_scoped_release release;
  expect(p, p.grad_out_a);
  expect(p, p.grad_out_b);
  kernels(p.dtype).merge_states_backward(p);
}

}  // namespace

void bind_merge_states(py::module_& m) {
  m.def("merge_states", &merge_states);
  m.def("merge_states_backward", &merge_states_backward);
}

}  // namespace fastattn
