// Python's view of merged states of attention: addresses, shapes and strides in, nothing out.
#include "../merge_states_arguments.h"
#include "kernel_table.h"
#include "memory.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Of a dense result with the shape of the outputs.
void expect(const MergeStatesParams& p, const Tensor4& result) {
  const size_t element = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
  expect_to_fill(result.data, static_cast<size_t>(p.B * p.H * p.L * p.D) * element);
}

void merge_states(const py::tuple& dtypes, int threads, const py::tuple& sizes,
                  const py::tuple& states, const py::tuple& results) {
  MergeStatesParams p = read_states(dtypes, sizes, states);
  read_results(results, p);
  p.threads = threads;
  py::gil_scoped_release release;
  expect(p, p.out);
  kernels(p.dtype).merge_states_forward(p);
}

void merge_states_backward(const py::tuple& dtypes, int threads, const py::tuple& sizes,
                           const py::tuple& given, const py::tuple& states,
                           const py::tuple& results) {
  MergeStatesParams p = read_states(dtypes, sizes, states);
  read_gradients(given, results, p);
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
