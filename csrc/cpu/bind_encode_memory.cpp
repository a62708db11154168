// The encoding of memories as Python calls it: tensors in, tensors out. The tokens are row indices of a
// table, so they are checked here, before a kernel reads anything.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "kernel_table.h"
#include "memory.h"
#include "named.h"
#include "operands.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Whether all tokens are in [0, V) or the padding; if not, `place` is the position of the first
// other one.
bool tokens_are_rows(const EncodeMemoryParams& p, int64_t (&place)[4]) {
  const uint64_t rows = static_cast<uint64_t>(p.V);
  const int64_t models = p.token_stride[0] == 0 && p.R > 0 ? 1 : p.R;  // all models share one batch
  for (int64_t r = 0; r < models; ++r) {
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t n = 0; n < p.N; ++n) {
        const int64_t* const sentence =
            p.tokens + r * p.token_stride[0] + b * p.token_stride[1] + n * p.token_stride[2];
        for (int64_t j = 0; j < p.J; ++j) {
          const int64_t token = sentence[j * p.token_stride[3]];
          if (static_cast<uint64_t>(token) < rows) continue;
          if (p.has_padding_idx && token == p.padding_idx) continue;
          place[0] = r, place[1] = b, place[2] = n, place[3] = j;
          return false;
        }
      }
    }
  }
  return true;
}

void check_tokens(const EncodeMemoryParams& p) {
  int64_t at[4];
  if (tokens_are_rows(p, at)) return;
  int64_t offset = 0;
  for (int i = 0; i < 4; ++i) offset += at[i] * p.token_stride[i];
  throw py::index_error("tokens[" + std::to_string(at[1]) + ", " + std::to_string(at[2]) + ", " +
                        std::to_string(at[3]) + "] is " + std::to_string(p.tokens[offset]) +
                        ", but weight has " + std::to_string(p.V) + " rows");
}

// The arguments of a call, and the copies that they point to.
struct EncodingCall : EncodeMemoryParams {
  bool has_temporal = false;  // of the options of the backward pass
  py::object copies[3];
};

// A tensor whose columns are contiguous, or a copy.
TensorView with_columns(const char* name, py::handle from, py::object* copy) {
  const TensorView x = view_of(name, from);
  const int last = x.rank - 1;
  if (last < 0 || x.stride[last] == 1 || x.size[last] == 1) return x;
  return view_of(name, *copy = contiguous(from));
}

// Four dimensions: those that are missing at the front have size 1.
TensorView filled(const char* name, TensorView x) {
  expect(x.rank <= 4, std::string("fastattn: ") + name + " has too many dimensions");
  const int missing = 4 - x.rank;
  std::copy_backward(x.size, x.size + x.rank, x.size + 4);
  std::copy_backward(x.stride, x.stride + x.rank, x.stride + 4);
  std::fill_n(x.size, missing, 1), std::fill_n(x.stride, missing, 0);
  x.rank = 4;
  return x;
}

void read_tokens(EncodingCall& p, py::handle tokens) {
  const TensorView x = filled("tokens", view_of("tokens", tokens));
  p.R = x.size[0], p.B = x.size[1], p.N = x.size[2], p.J = x.size[3];
  expect_sizes("tokens", x, kInt64, {p.R, p.B, p.N, p.J});
  p.tokens = static_cast<const int64_t*>(x.data);
  std::copy_n(x.stride, 4, p.token_stride);
}

void read_factors(EncodingCall& p, py::handle factors) {
  const TensorView x = with_columns("factors", factors, &p.copies[0]);
  expect_sizes("factors", x, accumulator(p.dtype), {p.J, p.D});
  p.factors = x.data, p.factor_stride = x.stride[0];
}

// The memories [R, B, G, N, D], new; [B, G, N, D] if tokens [B, N, J] and the tables are without R, [B, N, D]
// if the tables are without G, too.
py::object encode_memory(const py::object& options, py::handle tokens, py::handle weight,
                         py::handle factors, py::handle temporal) {
  EncodingCall p{};
  read_encode_memory_options(named(options), p);
  read_tokens(p, tokens);
  const TensorView given = with_columns("weight", weight, &p.copies[1]),
                   w = filled("weight", given);
  expect_dtype("weight", w, {DType::f32, DType::f64, DType::bf16, DType::f16});
  p.dtype = w.dtype, p.G = w.size[1], p.V = w.size[2], p.D = w.size[3];
  expect_sizes("weight", w, p.dtype, {p.R, p.G, p.V, p.D});
  p.weight = operand_of(w);
  read_factors(p, factors);
  if (!temporal.is_none()) {
    const TensorView x = filled("temporal", with_columns("temporal", temporal, &p.copies[2]));
    expect_sizes("temporal", x, p.dtype, {p.R, p.G, p.N, p.D});
    p.temporal = operand_of(x);
  }
  p.threads = threads();
  py::object out = given.rank == 4   ? new_result(p.dtype, {p.R, p.B, p.G, p.N, p.D}, &p.out)
                   : given.rank == 3 ? new_result(p.dtype, {p.B, p.G, p.N, p.D}, &p.out)
                                     : new_result(p.dtype, {p.B, p.N, p.D}, &p.out);
  {
    py::gil_scoped_release release;
    check_tokens(p);
    const int64_t elements = p.R * p.B * p.G * p.N * p.D;
    expect_to_fill(p.out, static_cast<size_t>(elements * element_bytes(p.dtype)));
    kernels(p.dtype).encode_memory(p);
  }
  return out;
}

// The gradients of weight, and of temporal or None, new, in the accumulator's dtype. grad is as the
// memories.
py::tuple encode_memory_backward(const py::object& options, py::handle grad, py::handle tokens,
                                 py::handle factors) {
  static const auto fields = std::make_tuple(field("rows", &EncodeMemoryParams::V),
                                             field("temporal", &EncodingCall::has_temporal));
  EncodingCall p{};
  read_encode_memory_options(named(options), p);
  named(options).read(p, fields);
  read_tokens(p, tokens);
  const TensorView g = with_columns("grad", grad, &p.copies[1]);
  expect_dtype("grad", g, {DType::f32, DType::f64, DType::bf16, DType::f16});
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
  read_factors(p, factors);
  p.threads = threads();
  const auto new_table = [&](int64_t rows, void** data) {
    const DType wide = accumulator(p.dtype);
    if (has_models) return new_result(wide, {p.R, p.G, rows, p.D}, data);
    return has_tables ? new_result(wide, {p.G, rows, p.D}, data)
                      : new_result(wide, {rows, p.D}, data);
  };
  const py::object of_weight = new_table(p.V, &p.grad_weight);
  py::object of_temporal = py::none();
  if (p.has_temporal) of_temporal = new_table(p.N, &p.grad_temporal);
  {
    py::gil_scoped_release release;
    check_tokens(p);
    kernels(p.dtype).encode_memory_backward(p);
  }
  return py::make_tuple(of_weight, of_temporal);
}

}  // namespace

void bind_encode_memory(py::module_& m) {
  m.def("encode_memory", &encode_memory);
  m.def("encode_memory_backward", &encode_memory_backward);
}

}  // namespace fastattn
