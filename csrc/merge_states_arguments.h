// Reading states of attention to merge, and allocating the results, for the bindings of both
// modules.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "function.h"

namespace fastattn {

struct StateTensors {
  FASTATTN_TENSORS(out_a, lse_a, out_b, lse_b)
};

struct StateGradTensors {
  FASTATTN_TENSORS(grad_out, grad_lse, out_a, lse_a, out_b, lse_b)
};

// Outputs [..., L, D] of at most four dimensions, and lse [..., L], as [B, H, L, D] and [B, H, L,
// -].
inline Tensor4 read_output(const MergeStatesParams& p, const char* name, py::handle from) {
  const TensorView x = filled(name, view_of(name, from));
  expect_sizes(name, x, p.dtype, {p.B, p.H, p.L, p.D});
  return operand_of(x);
}

// A log-sum-exp as an operand with one column.
inline Tensor4 operand_of_lse(const TensorView& x) {
  return {x.data, {x.stride[1], x.stride[2], x.stride[3], 1}};
}

// Reads a log-sum-exp, [..., L].
inline Tensor4 read_lse(const MergeStatesParams& p, const char* name, py::handle from) {
  const TensorView x = filled(name, view_of(name, from));
  expect_sizes(name, x, p.lse_dtype, {1, p.B, p.H, p.L});
  return operand_of_lse(x);
}

// Reads two states: outputs [..., L, D] and their log-sum-exps [..., L].
template <class Tensors>
void read_states(MergeStatesParams& p, const Tensors& from) {
  const TensorView out = view_of("out_a", from.out_a), lse = view_of("lse_a", from.lse_a),
                   x = filled("out_a", out);
  expect_dtype("out_a", out, kFloats);
  expect_dtype("lse_a", lse, {DType::f32, DType::f64});
  if (out.rank < 2) throw py::value_error("fastattn: out_a must have at least two dimensions");
  p.B = x.size[0], p.H = x.size[1], p.L = x.size[2], p.D = x.size[3];
  p.dtype = out.dtype, p.lse_dtype = lse.dtype;
  p.out_a = operand_of(x), p.lse_a = read_lse(p, "lse_a", from.lse_a);
  p.out_b = read_output(p, "out_b", from.out_b), p.lse_b = read_lse(p, "lse_b", from.lse_b);
}

// A new output, shaped like another one.
inline py::object new_output(py::handle like, Tensor4* to) {
  TensorView made;
  py::object result = new_like(like, &made);
  *to = operand_of(made);
  return result;
}

// A new log-sum-exp, shaped like another one.
inline py::object new_lse(py::handle like, Tensor4* to) {
  TensorView made;
  py::object result = new_like(like, &made);
  *to = operand_of_lse(filled("lse", made));
  return result;
}

// Allocates (out, lse).
inline py::tuple new_states(MergeStatesParams& p, const StateTensors& of) {
  const py::object out = new_output(of.out_a, &p.out), lse = new_lse(of.lse_a, &p.lse);
  return py::make_tuple(out, lse);
}

// Allocates the gradients of the four tensors. A result may have no gradient: None.
inline py::tuple new_state_gradients(MergeStatesParams& p, const StateGradTensors& from) {
  if (!from.grad_out.is_none()) p.grad_out = read_output(p, "grad_out", from.grad_out);
  if (!from.grad_lse.is_none()) p.grad_lse = read_lse(p, "grad_lse", from.grad_lse);
  const py::object of_out_a = new_output(from.out_a, &p.grad_out_a),
                   of_lse_a = new_lse(from.lse_a, &p.grad_lse_a),
                   of_out_b = new_output(from.out_b, &p.grad_out_b),
                   of_lse_b = new_lse(from.lse_b, &p.grad_lse_b);
  return py::make_tuple(of_out_a, of_lse_a, of_out_b, of_lse_b);
}

}  // namespace fastattn
