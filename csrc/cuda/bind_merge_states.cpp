// Python's view of merged states of attention on a GPU.
#include "../merge_states_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// Whether rows are copied 16 bytes at a time. The strides of a missing operand are 0.
bool all_aligned(const MergeStatesParams& p, std::initializer_list<Tensor4> rows) {
  const int64_t bytes = element_bytes(p.dtype);
  bool aligned = p.D * bytes % 16 == 0;
  for (const Tensor4& t : rows) aligned = aligned && (t.data == nullptr || is_aligned(t, bytes));
  return aligned;
}

// operands: see read_states and read_results
void merge_states_forward(int dtype, int lse_dtype, uintptr_t stream, const py::tuple& sizes,
                          const py::dict& operands) {
  MergeStatesParams p = read_states(dtype, lse_dtype, sizes, named(operands));
  read_results(named(operands), p);
  const bool aligned = all_aligned(p, {p.out_a, p.out_b, p.out});
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { merge_states(element, p, aligned, stream); });
}

// operands: see read_states and read_gradients
void merge_states_gradient(int dtype, int lse_dtype, uintptr_t stream, const py::tuple& sizes,
                           const py::dict& operands) {
  MergeStatesParams p = read_states(dtype, lse_dtype, sizes, named(operands));
  read_gradients(named(operands), p);
  const bool aligned = all_aligned(p, {p.grad_out, p.out_a, p.out_b, p.grad_out_a, p.grad_out_b});
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { merge_states_backward(element, p, aligned, stream); });
}

}  // namespace

void bind_merge_states(py::module_& m) {
  m.def("merge_states", &merge_states_forward);
  m.def("merge_states_backward", &merge_states_gradient);
}

}  // namespace cuda
}  // namespace fastattn
