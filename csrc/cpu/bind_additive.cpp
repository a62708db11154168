// Python's view of additive attention.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "../arguments.h"
#include "kernel_table.h"
#include "named.h"
#include "tensors.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// operands: query, key, value, the addresses of vector and bias, mask, mask_dtype, seed.
AdditiveParams common(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                      const py::dict& operands) {
  using P = AttentionParams;
  using A = AdditiveParams;
  static const auto shared = std::make_tuple(
      field("query", &P::q), field("key", &P::k), field("value", &P::v), field("mask", &P::mask),
      field("mask_dtype", &P::mask_dtype), field("seed", &P::seed));
  static const auto own = std::make_tuple(field("vector", &A::vector), field("bias", &A::bias));
  AdditiveParams x{};
  AttentionParams& p = x.attention;
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4];
  p.Hq = p.Hkv = 1;
  AdditiveOptions asked;
  read_additive_options(named(options), asked);
  p.window_right = asked.causal ? 0 : -1;
  p.dropout_p = asked.dropout_p;
  named(operands).read(p, shared);
  named(operands).read(x, own);
  return x;
}

void run_forward(const AdditiveParams& x) {
  py::gil_scoped_release release;
  kernels(x.attention.dtype).additive_forward(x);
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

// results: out, applied
void additive_forward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                      const py::dict& operands, const py::dict& results) {
  using P = AttentionParams;
  static const auto written = std::make_tuple(field("out", &P::out), field("applied", &P::applied));
  AdditiveParams x = common(dtype, threads, sizes, options, operands);
  named(results).read(x.attention, written);
  x.wants_weights = x.attention.applied.data != nullptr;
  run_forward(x);
}

// gradients: grad_out, grad_weights, grad_query, grad_key, grad_value, grad_mask, then the addresses
// of grad_vector, grad_bias and grad_scores.
void additive_backward(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                       const py::dict& operands, const py::dict& gradients) {
  using P = AttentionParams;
  using A = AdditiveParams;
  static const auto shared =
      std::make_tuple(field("grad_out", &P::grad_out), field("grad_weights", &P::grad_weights),
                      field("grad_query", &P::grad_q), field("grad_key", &P::grad_k),
                      field("grad_value", &P::grad_v), field("grad_mask", &P::grad_mask));
  static const auto own =
      std::make_tuple(field("grad_vector", &A::grad_vector), field("grad_bias", &A::grad_bias),
                      field("grad_scores", &A::grad_scores));
  AdditiveParams x = common(dtype, threads, sizes, options, operands);
  named(gradients).read(x.attention, shared);
  named(gradients).read(x, own);
  run_backward(x);
}

// -- calls without masks, dropout and weights, whose tensors are read here --------------------------

// [B, L, A] as an operand with a head dimension.
Tensor4 headless(const TensorView& x) {
  return {x.data, {x.stride[0], 0, x.stride[1], x.stride[2]}};
}

// The strides of contiguous [B, L, columns].
void rows(Tensor4& x, int64_t length, int64_t columns) {
  const int64_t stride[4] = {length * columns, 0, columns, 1};
  std::copy(stride, stride + 4, x.stride);
}

// Reads query [B, Tq, A], key [B, Tk, A] and value [B, Tk, Dv]; false if the general path has to see
// the call.
bool read_rows(py::handle query, py::handle key, py::handle value, AttentionParams& p) {
  TensorView q, k, v;
  if (!read_tensor(query, &q) || !read_tensor(key, &k) || !read_tensor(value, &v)) return false;
  if (q.rank != 3 || k.rank != 3 || v.rank != 3) return false;
  if (q.dtype == DType::boolean || k.dtype != q.dtype || v.dtype != q.dtype) return false;
  p.dtype = q.dtype;
  p.B = q.size[0], p.Lq = q.size[1], p.Lk = k.size[1], p.D = q.size[2], p.Dv = v.size[2];
  p.Hq = p.Hkv = 1;
  p.q = headless(q), p.k = headless(k), p.v = headless(v);
  return k.has_sizes({p.B, p.Lk, p.D}) && v.has_sizes({p.B, p.Lk, p.Dv});
}

// Reads v and bias [A] in the accumulator's dtype, contiguous; bias may be None.
bool read_vectors(py::handle vector, py::handle bias, AdditiveParams& x) {
  const DType acc = accumulator(x.attention.dtype);
  const auto read = [&](py::handle from, const void** to) {
    TensorView view;
    if (!read_tensor(from, &view) || view.dtype != acc || !view.has_sizes({x.attention.D}) ||
        !view.is_contiguous())
      return false;
    *to = view.data;
    return true;
  };
  return read(vector, &x.vector) && (bias.is_none() || read(bias, &x.bias));
}

// 0 if the general path has to see a call; else a number that is the same for calls of the same dtype,
// and odd if a tensor requires a gradient. Here v and bias have the dtype of the others.
int64_t plain_additive_call(py::handle query, py::handle key, py::handle value, py::handle v,
                            py::handle bias) {
  AttentionParams p{};
  if (!read_rows(query, key, value, p)) return 0;
  if (p.B == 0 || p.Lq == 0 || p.Lk == 0 || p.D == 0 || p.Dv == 0) return 0;
  const auto fits = [&](py::handle x) {
    TensorView view;
    return read_tensor(x, &view) && view.dtype == p.dtype && view.has_sizes({p.D});
  };
  if (!fits(v) || !(bias.is_none() || fits(bias))) return 0;
  return number_of_call(p.dtype, {query, key, value, v, bias});
}

AdditiveParams plain_call(py::handle query, py::handle key, py::handle value, py::handle vector,
                          py::handle bias, bool causal, int threads) {
  AdditiveParams x{};
  if (!read_rows(query, key, value, x.attention) || !read_vectors(vector, bias, x))
    throw py::type_error("fastattn: not a plain call of additive attention");
  x.attention.window_right = causal ? 0 : -1;
  x.attention.threads = threads;
  return x;
}

// out, new.
py::object plain_additive(py::handle query, py::handle key, py::handle value, py::handle vector,
                          py::handle bias, bool causal, int threads) {
  AdditiveParams x = plain_call(query, key, value, vector, bias, causal, threads);
  const AttentionParams& p = x.attention;
  void** const data = &x.attention.out.data;
  const py::object out =
      p.D == p.Dv ? new_contiguous_like(query, data) : new_result(p.dtype, {p.B, p.Lq, p.Dv}, data);
  rows(x.attention.out, p.Lq, p.Dv);
  run_forward(x);
  return out;
}

// The gradients of query, key, value, vector and bias, new, the last two in the accumulator's dtype;
// None if the general path has to see the call.
py::object plain_additive_backward(py::handle grad_out, py::handle query, py::handle key,
                                   py::handle value, py::handle vector, py::handle bias,
                                   bool causal, int threads) {
  AdditiveParams x = plain_call(query, key, value, vector, bias, causal, threads);
  AttentionParams& p = x.attention;
  TensorView of_out;
  if (!read_tensor(grad_out, &of_out) || of_out.dtype != p.dtype ||
      !of_out.has_sizes({p.B, p.Lq, p.Dv}))
    return py::none();
  p.grad_out = headless(of_out);
  const py::object grad_query = new_contiguous_like(query, &p.grad_q.data),
                   grad_key = new_contiguous_like(key, &p.grad_k.data),
                   grad_value = new_contiguous_like(value, &p.grad_v.data),
                   grad_vector = new_contiguous_like(vector, &x.grad_vector);
  rows(p.grad_q, p.Lq, p.D), rows(p.grad_k, p.Lk, p.D), rows(p.grad_v, p.Lk, p.Dv);
  py::object grad_bias = py::none();
  if (!bias.is_none()) grad_bias = new_contiguous_like(bias, &x.grad_bias);
  run_backward(x);
  return py::make_tuple(grad_query, grad_key, grad_value, grad_vector, grad_bias);
}

}  // namespace

void bind_additive(py::module_& m) {
  m.def("plain_additive_call", &plain_additive_call);
  m.def("plain_additive", &plain_additive);
  m.def("plain_additive_backward", &plain_additive_backward);
  m.def("additive_forward", &additive_forward);
  m.def("additive_backward", &additive_backward);
}

}  // namespace fastattn
