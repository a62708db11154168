// Reading the tensors of the encoding of memories, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "arguments.h"
#include "operands.h"
#include "options.h"

namespace fastattn {

// What a call has beside the arguments of its kernel, and the copies that they point to.
struct EncodingCall {
  bool has_temporal = false;  // of the options of the backward pass
  py::object copies[3];
};

// A tensor whose columns are contiguous, or a copy.
inline TensorView with_columns(const char* name, py::handle from, py::object* copy) {
  const TensorView x = view_of(name, from);
  const int last = x.rank - 1;
  if (last < 0 || x.stride[last] == 1 || x.size[last] == 1) return x;
  return view_of(name, *copy = contiguous(from));
}

// Four dimensions: those that are missing at the front have size 1.
inline TensorView filled(const char* name, TensorView x) {
  expect(x.rank <= 4, std::string("fastattn: ") + name + " has too many dimensions");
  const int missing = 4 - x.rank;
  std::copy_backward(x.size, x.size + x.rank, x.size + 4);
  std::copy_backward(x.stride, x.stride + x.rank, x.stride + 4);
  std::fill_n(x.size, missing, 1), std::fill_n(x.stride, missing, 0);
  x.rank = 4;
  return x;
}

inline void read_tokens(EncodeMemoryParams& p, py::handle tokens) {
  const TensorView x = filled("tokens", view_of("tokens", tokens));
  p.R = x.size[0], p.B = x.size[1], p.N = x.size[2], p.J = x.size[3];
  expect_sizes("tokens", x, kInt64, {p.R, p.B, p.N, p.J});
  p.tokens = static_cast<const int64_t*>(x.data);
  std::copy_n(x.stride, 4, p.token_stride);
}

inline void read_factors(EncodeMemoryParams& p, EncodingCall& call, py::handle factors) {
  const TensorView x = with_columns("factors", factors, &call.copies[0]);
  expect_sizes("factors", x, accumulator(p.dtype), {p.J, p.D});
  p.factors = x.data, p.factor_stride = x.stride[0];
}

// Fills everything but the result; returns the dimensions of weight.
inline int read_encoding(EncodeMemoryParams& p, EncodingCall& call, const py::object& options,
                         py::handle tokens, py::handle weight, py::handle factors,
                         py::handle temporal) {
  read_encode_memory_options(Named(options), p);
  read_tokens(p, tokens);
  const TensorView given = with_columns("weight", weight, &call.copies[1]),
                   w = filled("weight", given);
  expect_dtype("weight", w, kFloats);
  p.dtype = w.dtype, p.G = w.size[1], p.V = w.size[2], p.D = w.size[3];
  expect_sizes("weight", w, p.dtype, {p.R, p.G, p.V, p.D});
  p.weight = operand_of(w);
  read_factors(p, call, factors);
  if (!temporal.is_none()) {
    const TensorView x = filled("temporal", with_columns("temporal", temporal, &call.copies[2]));
    expect_sizes("temporal", x, p.dtype, {p.R, p.G, p.N, p.D});
    p.temporal = operand_of(x);
  }
  return given.rank;
}

// The same of the backward pass; returns the dimensions of grad.
inline int read_encoding_gradient(EncodeMemoryParams& p, EncodingCall& call,
                                  const py::object& options, py::handle grad, py::handle tokens,
                                  py::handle factors) {
  static const auto of_kernel = std::make_tuple(field("rows", &EncodeMemoryParams::V));
  static const auto of_call = std::make_tuple(field("temporal", &EncodingCall::has_temporal));
  read_encode_memory_options(Named(options), p);
  Named(options).read(p, of_kernel);
  Named(options).read(call, of_call);
  read_tokens(p, tokens);
  const TensorView g = with_columns("grad", grad, &call.copies[1]);
  expect_dtype("grad", g, kFloats);
  const bool has_models = g.rank == 5, has_tables = g.rank >= 4;
  const int64_t *n = g.size + has_models,
                *s = g.stride + has_models;  // of [B, G, N, D] or [B, N, D]
  p.dtype = g.dtype, p.G = has_tables ? n[1] : 1, p.D = n[has_tables ? 3 : 2];
  if (has_models)
    expect_sizes("grad", g, p.dtype, {p.R, p.B, p.G, p.N, p.D});
  else if (has_tables)
    expect_sizes("grad", g, p.dtype, {p.B, p.G, p.N, p.D});
  else
    expect_sizes("grad", g, p.dtype, {p.B, p.N, p.D});
  const int64_t stride[] = {g.stride[0], s[0], has_tables ? s[1] : 0, s[has_tables ? 2 : 1]};
  p.grad = g.data;
  std::copy_n(stride, 4, p.grad_stride);
  read_factors(p, call, factors);
  return g.rank;
}

}  // namespace fastattn
