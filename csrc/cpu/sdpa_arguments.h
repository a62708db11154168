// Reading the arguments of attention: what its bindings share.
#pragma once
#include <pybind11/pybind11.h>

#include "../arguments.h"

namespace fastattn {

namespace py = pybind11;

// (address, strides) or None
inline Tensor4 optional_operand(const py::object& pair) {
  if (pair.is_none()) return {};
  const auto t = pair.cast<py::tuple>();
  return operand(t[0].cast<uintptr_t>(), t[1].cast<py::tuple>());
}

inline AttentionParams common_arguments(int dtype, int threads, const py::tuple& sizes, uintptr_t q,
                                        const py::tuple& q_stride, uintptr_t k,
                                        const py::tuple& k_stride, uintptr_t v,
                                        const py::tuple& v_stride, uintptr_t out,
                                        const py::tuple& out_stride, uintptr_t lse, double scale,
                                        const py::object& options) {
  AttentionParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[7];
  integers(sizes, n);
  p.B = n[0], p.Hq = n[1], p.Hkv = n[2], p.Lq = n[3], p.Lk = n[4], p.D = n[5], p.Dv = n[6];
  p.q = operand(q, q_stride);
  p.k = operand(k, k_stride);
  p.v = operand(v, v_stride);
  p.out = operand(out, out_stride);
  p.lse = reinterpret_cast<double*>(lse);
  p.scale = scale;
  p.window_left = p.window_right = -1;
  if (options.is_none()) return p;

  // (offset, window_left, window_right, softcap, mask, mask_dtype, alibi, dropout_p, seed,
  // weights_mode, weights)
  const auto o = options.cast<py::tuple>();
  p.offset = o[0].cast<int64_t>();
  p.window_left = o[1].cast<int64_t>();
  p.window_right = o[2].cast<int64_t>();
  p.softcap = o[3].cast<double>();
  p.mask = optional_operand(o[4]);
  p.mask_dtype = static_cast<DType>(o[5].cast<int>());
  if (!o[6].is_none()) {
    const auto alibi = o[6].cast<py::tuple>();
    p.alibi = reinterpret_cast<const void*>(alibi[0].cast<uintptr_t>());
    integers(alibi[1].cast<py::tuple>(), p.alibi_stride);
  }
  p.dropout_p = o[7].cast<double>();
  p.seed = o[8].cast<uint64_t>();
  p.weights_mode = static_cast<Weights>(o[9].cast<int>());
  p.weights = optional_operand(o[10]);
  return p;
}

// (grad_out, grad_lse, grad_weights, grad_q, grad_k, grad_v, grad_mask), each (address, strides) or
// None; grad_lse is an address, 0 for none.
inline void gradient_arguments(AttentionParams& p, const py::tuple& gradients) {
  p.grad_out = optional_operand(gradients[0]);
  p.grad_lse = reinterpret_cast<const double*>(gradients[1].cast<uintptr_t>());
  p.grad_weights = optional_operand(gradients[2]);
  p.grad_q = optional_operand(gradients[3]);
  p.grad_k = optional_operand(gradients[4]);
  p.grad_v = optional_operand(gradients[5]);
  p.grad_mask = optional_operand(gradients[6]);
}

}  // namespace fastattn
