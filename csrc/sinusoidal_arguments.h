// Reading the tensors of the sinusoidal encoding, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "function.h"
#include "options.h"

namespace fastattn {

struct EncodedTensors {
  // [..., L, D] of at most four dimensions; int64, broadcasts to [..., L], or None
  FASTATTN_TENSORS(x, positions)
};

// `offset` overrides the offset of the options unless it is None.
inline void read_sinusoidal_options(py::handle options, py::handle offset, SinusoidalParams& p) {
  using O = SinusoidalOptions;
  struct {
    int layout;
  } asked;
  const Named record(options);
  record.read_choice<&decltype(asked)::layout>(
      "layout", asked, {"interleaved", "tensor2tensor", "marian", "split_exponent"});
  p.interleaved = asked.layout == 0;  // the only one whose pairs are neighbours
  record.read<&O::offset>("offset", p);
  record.read<&O::scale>("scale", p);
  record.read<&O::has_padding_idx, &O::padding_idx>("padding_idx", p);
  if (!offset.is_none()) p.offset = integer(offset.ptr());
  if (p.offset < -kFarthestOffset || p.offset > kFarthestOffset)
    throw py::value_error("fastattn: offset must be within " + std::to_string(kFarthestOffset) +
                          " of 0, got " + std::to_string(p.offset));
}

// The columns of fastattn/sinusoids.py: three vectors of int64 with the bits of their numbers.
inline void read_columns(py::handle columns, SinusoidalParams& p) {
  constexpr int64_t kMultiple = 16;  // the kernels read whole vectors
  const int64_t readable = (p.D + kMultiple - 1) / kMultiple * kMultiple;
  const auto given = py::reinterpret_borrow<py::tuple>(columns);
  const auto read = [&](size_t n, int64_t least, int64_t most) {
    const TensorView x = view_of("a column", given[n]);
    expect_sizes("a column", x, kInt64, {x.size[0]});
    if (!x.is_contiguous() || x.size[0] < least || x.size[0] > most)
      throw py::value_error("fastattn: the frequencies are not those of " + std::to_string(p.D) +
                            " columns");
    if (n == 2) p.pairs = x.size[0];
    return static_cast<const uint64_t*>(x.data);
  };
  p.frequency = read(0, readable, INT64_MAX), p.phase = read(1, readable, INT64_MAX);
  p.pair_frequency = read(2, 0, (p.D + 1) / 2);
}

// Fills everything but the threads. Returns `out`, a dense tensor of x's sizes and dtype, or a new
// tensor for None.
inline py::object read_encoding(SinusoidalParams& p, const EncodedTensors& from, py::handle options,
                                py::handle columns, py::handle offset, py::handle out) {
  read_sinusoidal_options(options, offset, p);
  const TensorView x = view_of("x", from.x);
  expect_dtype("x", x, kFloats);
  if (x.rank < 2) throw py::value_error("fastattn: x must have at least two dimensions");
  const TensorView four = filled("x", x);
  p.dtype = x.dtype;
  p.B = four.size[0], p.H = four.size[1], p.L = four.size[2], p.D = four.size[3];
  p.x = operand_of(x);
  if (!from.positions.is_none()) {
    const TensorView at =
        read_broadcast("positions", from.positions, {p.B, p.H, p.L}, p.position_stride);
    expect_dtype("positions", at, {kInt64});
    p.positions = static_cast<const int64_t*>(at.data);
  }
  read_columns(columns, p);
  TensorView of_out;
  auto made = py::reinterpret_borrow<py::object>(out);
  if (out.is_none()) {
    made = new_like(from.x, &of_out);
  } else {
    of_out = view_of("out", out);
    expect_sizes("out", of_out, x.dtype, x.sizes());
  }
  p.out = operand_of(of_out);
  return made;
}

}  // namespace fastattn
