// Merged states of attention on a GPU as Python calls them: tensors in, tensors out.
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

py::tuple merge(uintptr_t stream, py::handle out_a, py::handle lse_a, py::handle out_b,
                py::handle lse_b) {
  MergedStates states(out_a, lse_a, out_b, lse_b);
  py::tuple results = states.new_results(out_a, lse_a);
  const MergeStatesParams& p = states.params;
  const bool aligned = all_aligned(p, {p.out_a, p.out_b, p.out});
  with_element(p.dtype, [&](auto* element) { merge_states(element, p, aligned, stream); });
  return results;
}

py::tuple merge_gradients(uintptr_t stream, py::handle grad_out, py::handle grad_lse,
                          py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b) {
  MergedStates states(out_a, lse_a, out_b, lse_b);
  py::tuple results = states.new_gradients(grad_out, grad_lse, out_a, lse_a, out_b, lse_b);
  const MergeStatesParams& p = states.params;
  const bool aligned = all_aligned(p, {p.grad_out, p.out_a, p.out_b, p.grad_out_a, p.grad_out_b});
  with_element(p.dtype, [&](auto* element) { merge_states_backward(element, p, aligned, stream); });
  return results;
}

}  // namespace

void bind_merge_states(py::module_& m) {
  define(m, "merge_states", &merge);
  define(m, "merge_states_backward", &merge_gradients);
}

}  // namespace cuda
}  // namespace fastattn
