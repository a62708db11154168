// Additive attention as Python calls it: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>

#include "../attention_arguments.h"
#include "../options.h"
#include "kernel_table.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// The arguments of a call, and the copies that they point to.
struct AdditiveCall : AdditiveParams {
  AdditiveVectors vectors;
};

void read_additive_call(AdditiveCall& x, const py::object& options, const AdditiveTensors& from) {
  AttentionParams& p = x.attention;
  AdditiveOptions asked;
  read_additive_options(Named(options), asked);
  p.window_right = asked.causal ? 0 : -1;
  p.dropout_p = asked.dropout_p;
  read_additive(p, x.vectors, from);
  x.vector = x.vectors.v, x.bias = x.vectors.bias;
  p.threads = threads();
  p.seed = read_seed(from.seed);
}

// (out, weights or None), new.
py::tuple additive_attention(const py::object& options, py::handle query, py::handle key,
                             py::handle value, py::handle v, py::handle bias, py::handle attn_mask,
                             py::handle seed) {
  static const auto fields = std::make_tuple(field("weights", &AdditiveParams::wants_weights));
  AdditiveCall x{};
  AttentionParams& p = x.attention;
  read_additive_call(x, options, {query, key, value, v, bias, attn_mask, seed});
  Named(options).read(x, fields);
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
  Named(options).read(asked, fields);
  AdditiveCall x{};
  AttentionParams& p = x.attention;
  const AdditiveTensors tensors{query, key, value, v, bias, attn_mask, seed};
  read_additive_call(x, options, tensors);
  p.grad_out.data = const_cast<double*>(&kZero);
  read_additive_gradients(p, grad_out, grad_weights);
  const py::tuple grads = new_additive_gradients(p, tensors);
  const py::handle wide_v = x.vectors.copies[0] ? x.vectors.copies[0] : v;
  const py::object of_v = new_contiguous_like(wide_v, &x.grad_vector);
  py::object of_bias = py::none(), of_mask = py::none(), scores;
  if (!bias.is_none()) of_bias = new_contiguous_like(wide_v, &x.grad_bias);
  if (asked.needs_mask_grad) of_mask = new_grad_mask(x, attn_mask, &scores);
  run_backward(x);
  return py::make_tuple(grads[0], grads[1], grads[2], of_v, of_bias, of_mask);
}

}  // namespace

void bind_additive(py::module_& m) {
  m.def("additive_attention", &additive_attention);
  m.def("additive_attention_backward", &additive_attention_backward);
}

}  // namespace fastattn
