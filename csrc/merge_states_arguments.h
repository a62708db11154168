// Reading the arguments of merged states. All operands are of rank 4; lse has a last dimension of
// size 1.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "arguments.h"
#include "options.h"

namespace fastattn {

// sizes: B, H, L, D; operands: out_a, lse_a, out_b, lse_b
inline MergeStatesParams read_states(int dtype, int lse_dtype, const pybind11::tuple& sizes,
                                     const Named& operands) {
  using P = MergeStatesParams;
  static const auto fields = std::make_tuple(field("out_a", &P::out_a), field("lse_a", &P::lse_a),
                                             field("out_b", &P::out_b), field("lse_b", &P::lse_b));
  MergeStatesParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.lse_dtype = static_cast<DType>(lse_dtype);
  int64_t n[4];
  integers(sizes, n);
  p.B = n[0], p.H = n[1], p.L = n[2], p.D = n[3];
  operands.read(p, fields);
  return p;
}

inline void read_results(const Named& operands, MergeStatesParams& p) {
  using P = MergeStatesParams;
  static const auto fields = std::make_tuple(field("out", &P::out), field("lse", &P::lse));
  operands.read(p, fields);
}

inline void read_gradients(const Named& operands, MergeStatesParams& p) {
  using P = MergeStatesParams;
  static const auto fields =
      std::make_tuple(field("grad_out", &P::grad_out), field("grad_lse", &P::grad_lse),
                      field("grad_out_a", &P::grad_out_a), field("grad_lse_a", &P::grad_lse_a),
                      field("grad_out_b", &P::grad_out_b), field("grad_lse_b", &P::grad_lse_b));
  operands.read(p, fields);
}

}  // namespace fastattn
