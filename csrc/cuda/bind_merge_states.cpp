// Merged states of attention on a GPU as Python calls them: tensors in, tensors out.
#include "../merge_states_arguments.h"
#include "binding.h"

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

py::tuple merge(const StateTensors& x, py::handle, Stream stream) {
  MergeStatesParams p{};
  read_states(p, x);
  const py::tuple results = new_states(p, x);
  const bool aligned = all_aligned(p, {p.out_a, p.out_b, p.out});
  with_element(p.dtype, [&](auto* element) { merge_states(element, p, aligned, stream); });
  return results;
}

py::tuple merge_gradients(const StateGradTensors& x, py::handle, Stream stream) {
  MergeStatesParams p{};
  read_states(p, x);
  const py::tuple results = new_state_gradients(p, x);
  const bool aligned = all_aligned(p, {p.grad_out, p.out_a, p.out_b, p.grad_out_a, p.grad_out_b});
  with_element(p.dtype, [&](auto* element) { merge_states_backward(element, p, aligned, stream); });
  return results;
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
