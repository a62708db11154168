// Additive attention as Python calls it: tensors in, tensors out.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "attention_call.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

// The arguments of a call, and the copies that they point to.
struct AdditiveCall : AdditiveParams {
  AdditiveVectors vectors;

  // Reads the tensors and the options of a call.
  template <class Tensors>
  AdditiveCall(py::handle options, const Tensors& from) : AdditiveParams{} {
    read_additive(attention, vectors, options, from);
    vector = vectors.v, bias = vectors.bias;
    attention.threads = threads();
    attention.seed = read_seed(from.seed);
  }
};

// Returns (out, weights or None).
py::tuple additive_attention(const AdditiveTensors& x, py::handle options) {
  AdditiveCall call(options, x);
  call.wants_weights = call.vectors.returns_weights;
  const py::tuple results = new_additive_results(call.attention, call.wants_weights, x.query);
  without_gil([&] { kernels(call.attention.dtype).additive_forward(call); });
  return results;
}

// Allocates the gradient of the mask. It is the gradient of the scores itself, or for a broadcast
// mask a sum of it in float64; `scores` always owns the gradient of the scores.
py::object new_grad_mask(AdditiveCall& x, py::handle attn_mask, py::object* scores) {
  AttentionParams& p = x.attention;
  const TensorView mask = view_of("attn_mask", attn_mask);
  if (mask.rank != 3) throw py::value_error("fastattn: attn_mask must have three dimensions");
  *scores = new_result(accumulator(p.dtype), {p.B, p.Lq, p.Lk}, &x.grad_scores);
  if (mask.has_sizes({p.B, p.Lq, p.Lk})) return *scores;
  const int64_t* n = mask.size;
  void* data;
  // One element may sum thousands of terms.
  py::object gradient = new_zeros(DType::f64, mask.sizes(), &data);
  const auto step = [&](int d, int64_t stride) { return n[d] == 1 ? 0 : stride; };
  p.grad_mask = {data, {step(0, n[1] * n[2]), 0, step(1, n[2]), step(2, 1)}};
  return gradient;
}

// Allocates the workspace and runs the kernel. The gradients of keys are sums of parts, one for
// each of at most kMostChunks chunks of queries.
void run_backward(AdditiveParams& x) {
  constexpr int64_t kMostChunks = 8, kChunkRows = 128;
  const AttentionParams& p = x.attention;
  const int64_t step = kMostChunks * kChunkRows;
  x.chunk_rows = std::max<int64_t>(1, (p.Lq + step - 1) / step) * kChunkRows;
  x.chunks = (p.Lq + x.chunk_rows - 1) / x.chunk_rows;
  x.direct = x.chunks == 1 && p.dtype == accumulator(p.dtype);
  const int64_t chunk_size = 2 * p.D + (x.direct ? 0 : p.Lk * (p.D + p.Dv));
  const int64_t bytes = p.B * x.chunks * chunk_size * element_bytes(accumulator(p.dtype));
  const std::unique_ptr<char[]> buffer(new char[static_cast<size_t>(bytes) + 1]);
  x.parts = buffer.get();
  kernels(p.dtype).additive_backward(x);
}

// Returns the gradients of query, key, value, v, bias and attn_mask. An absent tensor has None, and
// so has the mask unless the options ask for its gradient.
py::tuple additive_attention_backward(const AdditiveGradTensors& x, py::handle options) {
  AdditiveCall call(options, x);
  AttentionParams& p = call.attention;
  read_additive_gradients(p, x);
  complete(p.grad_out);
  py::tuple gradients = new_additive_gradients(p, x);
  const py::object& copy = call.vectors.copies[0];
  const py::handle wide_v = copy ? py::handle(copy) : x.v;
  gradients[3] = new_contiguous_like(wide_v, &call.grad_vector);
  if (!x.bias.is_none()) gradients[4] = new_contiguous_like(wide_v, &call.grad_bias);
  py::object scores;
  if (Named(options).read<bool>("needs_mask_grad"))
    gradients[5] = new_grad_mask(call, x.attn_mask, &scores);
  without_gil([&] { run_backward(call); });
  const py::handle of[] = {x.v, x.bias, x.attn_mask};
  for (size_t n = 0; n < 3; ++n)
    if (!gradients[3 + n].is_none()) gradients[3 + n] = gradient_of(of[n], gradients[3 + n]);
  return gradients;
}

}  // namespace
}  // namespace fastattn
