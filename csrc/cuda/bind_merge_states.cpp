// Merged states of attention on a GPU as Python calls them: tensors in, tensors out.
#include "../merge_states_arguments.h"
#include "binding.h"

namespace fastattn {
namespace cuda {
namespace {

// The output and the log-sum-exp of two partial results over different keys.
py::tuple merge(const StateTensors& x, py::handle, Stream stream) {
  MergeStatesParams p{};
  read_states(p, x);
  const py::tuple results = new_states(p, x);
  const bool aligned = are_aligned(p.dtype, {p.out_a, p.out_b, p.out}, p.D);
  with_element(p.dtype, [&](auto* element) { merge_states(element, p, aligned, stream); });
  return results;
}

// The gradients of both states.
py::tuple merge_gradients(const StateGradTensors& x, py::handle, Stream stream) {
  MergeStatesParams p{};
  read_states(p, x);
  const py::tuple results = new_state_gradients(p, x);
  const bool aligned =
      are_aligned(p.dtype, {p.grad_out, p.out_a, p.out_b, p.grad_out_a, p.grad_out_b}, p.D);
  with_element(p.dtype, [&](auto* element) { merge_states_backward(element, p, aligned, stream); });
  return results;
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
