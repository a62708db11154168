// Python's view of additive attention: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// (address, strides) or None
Tensor4 optional(const py::object& pair) {
  if (pair.is_none()) return {};
  const auto t = pair.cast<py::tuple>();
  return operand(t[0].cast<uintptr_t>(), t[1].cast<py::tuple>());
}

void* address(const py::handle& number) {
  return reinterpret_cast<void*>(number.cast<uintptr_t>());
}

// operands: q, k, value. options: mask, mask_dtype, causal, dropout_p, seed.
AdditiveParams common(int dtype, int threads, const py::tuple& sizes, const py::tuple& operands,
                      uintptr_t vector, uintptr_t bias, const py::tuple& options) {
  AdditiveParams x{};
  AttentionParams& p = x.attention;
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4];
  p.Hq = p.Hkv = 1;
  p.q = optional(operands[0]);
  p.k = optional(operands[1]);
  p.v = optional(operands[2]);
  p.scale = 1;
  p.mask = optional(options[0]);
  p.mask_dtype = static_cast<DType>(options[1].cast<int>());
  p.window_left = -1;
  p.window_right = options[2].cast<bool>() ? 0 : -1;
  p.dropout_p = options[3].cast<double>();
  p.seed = options[4].cast<uint64_t>();
  x.vector = reinterpret_cast<const void*>(vector);
  x.bias = reinterpret_cast<const void*>(bias);
  return x;
}

// results: out, weights
void additive_forward(int dtype, int threads, const py::tuple& sizes, const py::tuple& operands,
                      uintptr_t vector, uintptr_t bias, const py::tuple& options,
                      const py::tuple& results) {
  AdditiveParams x = common(dtype, threads, sizes, operands, vector, bias, options);
  x.attention.out = optional(results[0]);
  x.attention.weights = optional(results[1]);
  x.wants_weights = x.attention.weights.data != nullptr;
  py::gil_scoped_release release;
  kernels(x.attention.dtype).additive_forward(x);
}

// given: grad_out, grad_weights. results: grad_q, grad_k, grad_value, each (address, strides), then
// the addresses of grad_vector, grad_bias, grad_scores, then grad_mask as those. parts: (address,
// chunk_rows, chunks).
void additive_backward(int dtype, int threads, const py::tuple& sizes, const py::tuple& operands,
                       uintptr_t vector, uintptr_t bias, const py::tuple& options,
                       const py::tuple& given, const py::tuple& results, const py::tuple& parts) {
  AdditiveParams x = common(dtype, threads, sizes, operands, vector, bias, options);
  AttentionParams& p = x.attention;
  p.grad_out = optional(given[0]);
  p.grad_weights = optional(given[1]);
  p.grad_q = optional(results[0]);
  p.grad_k = optional(results[1]);
  p.grad_v = optional(results[2]);
  x.grad_vector = address(results[3]);
  x.grad_bias = address(results[4]);
  x.grad_scores = address(results[5]);
  p.grad_mask = optional(results[6]);
  x.parts = address(parts[0]);
  x.chunk_rows = parts[1].cast<int64_t>();
  x.chunks = parts[2].cast<int64_t>();
  x.direct = parts[3].cast<bool>();
  py::gil_scoped_release release;
  kernels(x.attention.dtype).additive_backward(x);
}

}  // namespace

void bind_additive(py::module_& m) {
  m.def("additive_forward", &additive_forward);
  m.def("additive_backward", &additive_backward);
}

}  // namespace fastattn
