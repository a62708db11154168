// Reading the tensors of the sinusoidal encoding, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "arguments.h"
#include "operands.h"
#include "options.h"

namespace fastattn {

// x [..., L, D] of at most four dimensions; positions, int64, broadcasts to [..., L], or is None.
inline TensorView read_encoded(SinusoidalParams& p, py::handle from, py::handle positions) {
  const TensorView x = view_of("x", from);
  expect_dtype("x", x, kFloats);
  if (x.rank < 2) throw py::value_error("fastattn: x must have at least two dimensions");
  int64_t sizes[4] = {1, 1, 1, 1};
  std::copy_n(x.size, x.rank, sizes + 4 - x.rank);
  p.dtype = x.dtype;
  p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.D = sizes[3];
  p.x = operand_of(x);
  if (positions.is_none()) return x;
  const TensorView at = read_broadcast("positions", positions, {p.B, p.H, p.L}, p.position_stride);
  expect_dtype("positions", at, {kInt64});
  p.positions = static_cast<const int64_t*>(at.data);
  return x;
}

// The result: `out`, a dense tensor of x's sizes and dtype, or a new one for None.
inline py::object place_encoding(SinusoidalParams& p, py::handle x, const TensorView& of_x,
                                 py::object out) {
  TensorView of_out;
  if (out.is_none()) {
    out = new_like(x, &of_out);
  } else {
    of_out = view_of("out", out);
    expect_sizes("out", of_out, of_x.dtype, of_x.size, of_x.rank);
  }
  p.out = operand_of(of_out);
  return out;
}

}  // namespace fastattn
