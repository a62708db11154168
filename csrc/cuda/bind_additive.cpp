// Python's view of additive attention on a GPU: one head, a window of -1 or 0 to the right.
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

float* floats(const py::handle& address) {
  return reinterpret_cast<float*>(address.cast<uintptr_t>());
}

// sizes: (B, Tq, Tk, A, Dv); operands: (query, key, value), each (address, strides); options:
// (vector, bias, mask, mask_dtype, causal, dropout_p, seed address), the first two addresses.
AdditiveArguments arguments(int dtype, const py::tuple& sizes, const py::tuple& operands,
                            const py::tuple& options) {
  AdditiveArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Hq = p.Hkv = 1, p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4];
  p.q = optional_operand(operands[0]);
  p.k = optional_operand(operands[1]);
  p.v = optional_operand(operands[2]);
  p.scale = p.scale_float = 1.0f;
  p.vector = floats(options[0]);
  p.bias = floats(options[1]);
  p.mask = optional_operand(options[2]);
  p.mask_dtype = static_cast<DType>(options[3].cast<int>());
  p.window_left = -1;
  p.window_right = options[4].cast<bool>() ? 0 : -1;
  set_window(p);
  set_dropout(p, options[5].cast<double>(), options[6].cast<uintptr_t>());
  return p;
}

// results: (out, weights or None, scores), scores an address.
void forward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& operands,
             const py::tuple& options, const py::tuple& results) {
  AdditiveArguments p = arguments(dtype, sizes, operands, options);
  p.out = optional_operand(results[0]);
  p.weights = optional_operand(results[1]);
  p.scores = floats(results[2]);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { additive_forward(element, p, stream); });
}

// gradients: (grad_out, grad_weights or None, grad_query, grad_key, grad_value, scores, gradients,
// parts), the last three addresses.
void backward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& operands,
              const py::tuple& options, const py::tuple& gradients) {
  AdditiveArguments p = arguments(dtype, sizes, operands, options);
  p.grad_out = optional_operand(gradients[0]);
  p.grad_weights = optional_operand(gradients[1]);
  p.grad_q = optional_operand(gradients[2]);
  p.grad_k = optional_operand(gradients[3]);
  p.grad_v = optional_operand(gradients[4]);
  p.scores = floats(gradients[5]);
  p.gradients = floats(gradients[6]);
  p.parts = floats(gradients[7]);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { additive_backward(element, p, stream); });
}

}  // namespace

void bind_additive(py::module_& m) {
  m.def("additive_forward", &forward);
  m.def("additive_backward", &backward);
  m.attr("additive_tile") = kAdditiveTile;
}

}  // namespace cuda
}  // namespace fastattn
