// Additive attention as Python calls it: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>

#include "../arguments.h"
#include "kernel_table.h"
#include "named.h"
#include "operands.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// The arguments of a call, and the copies that they point to.
struct AdditiveCall : AdditiveParams {
  py::object vector_copy, bias_copy;
};

// [B, L, columns] as an operand with a head dimension.
Tensor4 headless(const TensorView& x) {
  return {x.data, {x.stride[0], 0, x.stride[1], x.stride[2]}};
}

// The same of contiguous memory.
Tensor4 headless(void* data, int64_t length, int64_t columns) {
  return {data, {length * columns, 0, columns, 1}};
}

void read_additive_call(AdditiveCall& x, const py::object& options, py::handle query,
                        py::handle key, py::handle value, py::handle v, py::handle bias,
                        py::handle attn_mask, py::handle seed) {
  AttentionParams& p = x.attention;
  AdditiveOptions asked;
  read_additive_options(named(options), asked);
  p.window_right = asked.causal ? 0 : -1;
  p.dropout_p = asked.dropout_p;
  const TensorView of_query = view_of("query", query), of_key = view_of("key", key),
                   of_value = view_of("value", value);
  expect_dtype("query", of_query, {DType::f32, DType::f64, DType::bf16, DType::f16});
  p.dtype = of_query.dtype;
  p.threads = threads();
  p.B = of_query.size[0], p.Lq = of_query.size[1], p.D = of_query.size[2];
  p.Lk = of_key.size[1], p.Dv = of_value.size[2];
  p.Hq = p.Hkv = 1;
  expect_sizes("query", of_query, p.dtype, {p.B, p.Lq, p.D});  // of three dimensions
  expect_sizes("key", of_key, p.dtype, {p.B, p.Lk, p.D});
  expect_sizes("value", of_value, p.dtype, {p.B, p.Lk, p.Dv});
  p.q = headless(of_query), p.k = headless(of_key), p.v = headless(of_value);
  const DType acc = accumulator(p.dtype);
  x.vector = read_flat("v", v, acc, {p.D}, &x.vector_copy);
  if (!bias.is_none()) x.bias = read_flat("bias", bias, acc, {p.D}, &x.bias_copy);
  if (!attn_mask.is_none()) {
    int64_t stride[3];
    const TensorView mask = read_broadcast("attn_mask", attn_mask, {p.B, p.Lq, p.Lk}, stride);
    expect_dtype("attn_mask", mask, {DType::boolean, p.dtype, DType::f32});
    p.mask = {mask.data, {stride[0], 0, stride[1], stride[2]}};
    p.mask_dtype = mask.dtype;
  }
  p.seed = read_seed(seed);
}

// (out, weights or None), new.
py::tuple additive_attention(const py::object& options, py::handle query, py::handle key,
                             py::handle value, py::handle v, py::handle bias, py::handle attn_mask,
                             py::handle seed) {
  static const auto fields = std::make_tuple(field("weights", &AdditiveParams::wants_weights));
  AdditiveCall x{};
  AttentionParams& p = x.attention;
  read_additive_call(x, options, query, key, value, v, bias, attn_mask, seed);
  named(options).read(x, fields);
  void* data;
  const py::object out = p.D == p.Dv ? new_contiguous_like(query, &data)
                                     : new_result(p.dtype, {p.B, p.Lq, p.Dv}, &data);
  p.out = headless(data, p.Lq, p.Dv);
  py::object weights = py::none();
  if (x.wants_weights) {
    weights = new_result(p.dtype, {p.B, p.Lq, p.Lk}, &data);
    p.applied = headless(data, p.Lq, p.Lk);
  }
  {
    py::gil_scoped_release release;
    kernels(p.dtype).additive_forward(x);
  }
  return py::make_tuple(out, weights);
}

// The gradient of the mask, new and in the type that sums it: that of the scores, or their sum where
// the mask is broadcast, which `scores` then owns.
py::object new_grad_mask(AdditiveCall& x, py::handle attn_mask, py::object* scores) {
  AttentionParams& p = x.attention;
  const TensorView mask = view_of("attn_mask", attn_mask);
  if (mask.rank != 3) throw py::value_error("fastattn: attn_mask must have three dimensions");
  *scores = new_result(accumulator(p.dtype), {p.B, p.Lq, p.Lk}, &x.grad_scores);
  if (mask.has_sizes({p.B, p.Lq, p.Lk})) return *scores;
  const int64_t* n = mask.size;
  void* data;
  // One element may sum thousands of terms.
  py::object made = new_zeros(DType::f64, {n[0], n[1], n[2]}, &data);
  const auto step = [&](int d, int64_t stride) { return n[d] == 1 ? 0 : stride; };
  p.grad_mask = {data, {step(0, n[1] * n[2]), 0, step(1, n[2]), step(2, 1)}};
  return made;
}

// With the workspace. The gradients of keys are summed from parts, of at most kMostChunks chunks of
// queries.
void run_backward(AdditiveParams& x) {
  constexpr int64_t kMostChunks = 8, kChunkRows = 128;
  py::gil_scoped_release release;
  const AttentionParams& p = x.attention;
  const int64_t step = kMostChunks * kChunkRows;
  x.chunk_rows = std::max<int64_t>(1, (p.Lq + step - 1) / step) * kChunkRows;
  x.chunks = (p.Lq + x.chunk_rows - 1) / x.chunk_rows;
  x.direct = x.chunks == 1 && p.dtype == accumulator(p.dtype);
  const int64_t part = 2 * p.D + (x.direct ? 0 : p.Lk * (p.D + p.Dv));
  const int64_t bytes = p.B * x.chunks * part * element_bytes(accumulator(p.dtype));
  const std::unique_ptr<char[]> parts(new char[static_cast<size_t>(bytes) + 1]);
  x.parts = parts.get();
  kernels(p.dtype).additive_backward(x);
}

// The gradients, new: of query, key and value, and in the accumulator's dtype of v and of bias, or
// None without it; of attn_mask only where the options ask for it, in the type that sums it.
py::tuple additive_attention_backward(const py::object& options, py::handle grad_out,
                                      py::handle grad_weights, py::handle query, py::handle key,
                                      py::handle value, py::handle v, py::handle bias,
                                      py::handle attn_mask, py::handle seed) {
  static constexpr double kZero = 0;
  struct Asked {
    bool needs_mask_grad;
  };
  static const auto fields = std::make_tuple(field("needs_mask_grad", &Asked::needs_mask_grad));
  Asked asked;
  named(options).read(asked, fields);
  AdditiveCall x{};
  AttentionParams& p = x.attention;
  read_additive_call(x, options, query, key, value, v, bias, attn_mask, seed);
  p.grad_out.data = const_cast<double*>(&kZero);
  if (!grad_out.is_none())
    p.grad_out = headless(read_sizes("grad_out", grad_out, p.dtype, {p.B, p.Lq, p.Dv}));
  if (!grad_weights.is_none())
    p.grad_weights = headless(read_sizes("grad_weights", grad_weights, p.dtype, {p.B, p.Lq, p.Lk}));
  const auto new_gradient = [](py::handle of, int64_t length, int64_t columns, Tensor4* to) {
    void* data;
    py::object made = new_contiguous_like(of, &data);
    *to = headless(data, length, columns);
    return made;
  };
  const py::object of_query = new_gradient(query, p.Lq, p.D, &p.grad_q),
                   of_key = new_gradient(key, p.Lk, p.D, &p.grad_k),
                   of_value = new_gradient(value, p.Lk, p.Dv, &p.grad_v);
  const py::handle wide_v = x.vector_copy ? x.vector_copy : v;
  const py::object of_v = new_contiguous_like(wide_v, &x.grad_vector);
  py::object of_bias = py::none(), of_mask = py::none(), scores;
  if (!bias.is_none()) of_bias = new_contiguous_like(wide_v, &x.grad_bias);
  if (asked.needs_mask_grad) of_mask = new_grad_mask(x, attn_mask, &scores);
  run_backward(x);
  return py::make_tuple(of_query, of_key, of_value, of_v, of_bias, of_mask);
}

}  // namespace

void bind_additive(py::module_& m) {
  m.def("additive_attention", &additive_attention);
  m.def("additive_attention_backward", &additive_attention_backward);
}

}  // namespace fastattn
