// Reading the tensors of the encoding of memories, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "function.h"
#include "options.h"

namespace fastattn {

struct EncodingTensors {
  // [R, B, N, J], [R, G, V, D], [J, D], [R, G, N, D] or None
  FASTATTN_TENSORS(tokens, weight, factors, temporal)
};

struct EncodingGradTensors {
  FASTATTN_TENSORS(grad_out, tokens, factors)  // [R, B, G, N, D]
};

// The part of a call that is not a kernel argument, and the copies that own kernel arguments.
struct EncodingCall {
  bool has_temporal = false;  // of the options of the backward pass
  // R and G, if weight or grad_out has them.
  int64_t models = kLeftOut, tables = kLeftOut;
  py::object copies[3];
};

// Reads the padding index from a record of options.
inline void read_padding(const Named& from, EncodeMemoryParams& p) {
  using O = EncodeMemoryOptions;
  from.read<&O::has_padding_idx, &O::padding_idx>("padding_idx", p);
}

// tokens [R, B, N, J].
inline void read_tokens(EncodeMemoryParams& p, py::handle tokens) {
  const TensorView x = filled("tokens", view_of("tokens", tokens));
  p.R = x.size[0], p.B = x.size[1], p.N = x.size[2], p.J = x.size[3];
  expect_sizes("tokens", x, kInt64, {p.R, p.B, p.N, p.J});
  p.tokens = static_cast<const int64_t*>(x.data);
  std::copy_n(x.stride, 4, p.token_stride);
}

// factors [J, D], in the type of the sums.
inline void read_factors(EncodeMemoryParams& p, EncodingCall& call, py::handle factors) {
  const TensorView x = with_rows("factors", factors, &call.copies[0]);
  expect_sizes("factors", x, accumulator(p.dtype), {p.J, p.D});
  p.factors = x.data, p.factor_stride = x.stride[0];
}

// Fills everything but the result.
inline void read_encoding(EncodeMemoryParams& p, EncodingCall& call, py::handle options,
                          const EncodingTensors& from) {
  read_padding(Named(options), p);
  read_tokens(p, from.tokens);
  const TensorView given = with_rows("weight", from.weight, &call.copies[1]),
                   w = filled("weight", given);
  expect_dtype("weight", w, kFloats);
  p.dtype = w.dtype, p.G = w.size[1], p.V = w.size[2], p.D = w.size[3];
  expect_sizes("weight", w, p.dtype, {p.R, p.G, p.V, p.D});
  p.weight = operand_of(w);
  read_factors(p, call, from.factors);
  if (!from.temporal.is_none()) {
    const TensorView x = filled("temporal", with_rows("temporal", from.temporal, &call.copies[2]));
    expect_sizes("temporal", x, p.dtype, {p.R, p.G, p.N, p.D});
    p.temporal = operand_of(x);
  }
  if (given.rank >= 4) call.models = p.R;
  if (given.rank >= 3) call.tables = p.G;
}

// Fills everything but the results of the backward pass.
inline void read_encoding_gradient(EncodeMemoryParams& p, EncodingCall& call, py::handle options,
                                   const EncodingGradTensors& from) {
  const Named record(options);
  read_padding(record, p);
  p.V = record.read<int64_t>("rows");
  call.has_temporal = record.read<bool>("temporal");
  read_tokens(p, from.tokens);
  const TensorView g = with_rows("grad_out", from.grad_out, &call.copies[1]);
  expect_dtype("grad_out", g, kFloats);
  const bool has_models = g.rank == 5, has_tables = g.rank >= 4;
  const int64_t *n = g.size + has_models,
                *s = g.stride + has_models;  // of [B, G, N, D] or [B, N, D]
  p.dtype = g.dtype, p.G = has_tables ? n[1] : 1, p.D = n[has_tables ? 3 : 2];
  if (has_models) call.models = p.R;
  if (has_tables) call.tables = p.G;
  expect_sizes("grad_out", g, p.dtype, {call.models, p.B, call.tables, p.N, p.D});
  const int64_t stride[] = {g.stride[0], s[0], has_tables ? s[1] : 0, s[has_tables ? 2 : 1]};
  p.grad = g.data;
  std::copy_n(stride, 4, p.grad_stride);
  read_factors(p, call, from.factors);
}

}  // namespace fastattn
