// Reading the arguments of merged states: an operand is (address, strides), None where there is
// none; lse has a last dimension of size 1.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "arguments.h"

namespace fastattn {

inline Tensor4 state_operand(const pybind11::handle& item) {
  if (item.is_none()) return {};
  const auto pair = item.cast<pybind11::tuple>();
  return operand(pair[0].cast<uintptr_t>(), pair[1].cast<pybind11::tuple>());
}

// dtypes: of outputs, of lse; sizes: B, H, L, D; states: out_a, lse_a, out_b, lse_b
inline MergeStatesParams read_states(const pybind11::tuple& dtypes, const pybind11::tuple& sizes,
                                     const pybind11::tuple& states) {
  MergeStatesParams p{};
  p.dtype = static_cast<DType>(dtypes[0].cast<int>());
  p.lse_dtype = static_cast<DType>(dtypes[1].cast<int>());
  int64_t n[4];
  integers(sizes, n);
  p.B = n[0], p.H = n[1], p.L = n[2], p.D = n[3];
  p.out_a = state_operand(states[0]), p.lse_a = state_operand(states[1]);
  p.out_b = state_operand(states[2]), p.lse_b = state_operand(states[3]);
  return p;
}

// results: out, lse
inline void read_results(const pybind11::tuple& results, MergeStatesParams& p) {
  p.out = state_operand(results[0]), p.lse = state_operand(results[1]);
}

// given: grad_out, grad_lse; results: the gradients of the states
inline void read_gradients(const pybind11::tuple& given, const pybind11::tuple& results,
                           MergeStatesParams& p) {
  p.grad_out = state_operand(given[0]), p.grad_lse = state_operand(given[1]);
  p.grad_out_a = state_operand(results[0]), p.grad_lse_a = state_operand(results[1]);
  p.grad_out_b = state_operand(results[2]), p.grad_lse_b = state_operand(results[3]);
}

}  // namespace fastattn
