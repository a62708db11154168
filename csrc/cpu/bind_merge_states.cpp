// Merged states of attention as Python calls them: tensors in, tensors out.
#include <cstdint>

#include "../merge_states_arguments.h"
#include "kernel_table.h"
#include "memory.h"

namespace fastattn {
namespace {

// Expects that a dense result with the sizes of the outputs is filled.
void expect_filled(const MergeStatesParams& p, const Tensor4& result) {
  const int64_t elements = p.B * p.H * p.L * p.D;
  expect_to_fill(result.data, static_cast<size_t>(elements * element_bytes(p.dtype)));
}

// Returns (out, lse) of the merged states.
py::tuple merge_states(const StateTensors& x, py::handle) {
  MergeStatesParams p{};
  read_states(p, x);
  p.threads = threads();
  const py::tuple results = new_states(p, x);
  without_gil([&] {
    expect_filled(p, p.out);
    kernels(p.dtype).merge_states_forward(p);
  });
  return results;
}

// Returns the gradients of out_a, lse_a, out_b and lse_b.
py::tuple merge_states_backward(const StateGradTensors& x, py::handle) {
  MergeStatesParams p{};
  read_states(p, x);
  p.threads = threads();
  const py::tuple results = new_state_gradients(p, x);
  without_gil([&] {
    expect_filled(p, p.grad_out_a);
    expect_filled(p, p.grad_out_b);
    kernels(p.dtype).merge_states_backward(p);
  });
  return results;
}

}  // namespace
}  // namespace fastattn
