// Python's view of merged states of attention on a GPU.
#include "../merge_states_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// Whether rows go 16 bytes at a time; of operands that are not there the strides are 0.
bool all_aligned(const MergeStatesParams& p, std::initializer_list<Tensor4> rows) {
  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  bool aligned = p.D * bytes % 16 == 0;
  for (const Tensor4& t : rows) aligned = aligned && (t.data == nullptr || is_aligned(t, bytes));
  return aligned;
}

void merge_states_forward(const py::tuple& dtypes, uintptr_t stream, const py::tuple& sizes,
                          const py::tuple& states, const py::tuple& results) {
  MergeStatesParams p = read_states(dtypes, sizes, states);
  read_results(results, p);
  const bool aligned = all_aligned(p, {p.out_a, p.out_b, p.out});
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { merge_states(element, p, aligned, stream); });
}

void merge_states_gradient(const py::tuple& dtypes, uintptr_t stream, const py::tuple& sizes,
                           const py::tuple& given, const py::tuple& states,
                           const py::tuple& results) {
  MergeStatesParams p = read_states(dtypes, sizes, states);
  read_gradients(given, results, p);
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
