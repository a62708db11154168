// Attention on a GPU, dense and packed, as Python calls it: tensors in, tensors out.
#include <cstdint>

#include "../attention_arguments.h"
#include "binding.h"

namespace fastattn {
namespace cuda {
namespace {

// The arguments of a call, and the memory that they point to.
struct Call : AttentionArguments {
  py::object table, mask, starts[2], kept[3], zeros, row_stats_owner, tables;
};

bool is_packed(const Call& p) { return p.q_starts != nullptr; }

// Reads the rest of a call, after its options, operands, sizes and biases.
template <class Tensors>
void read_rest(Call& p, const Tensors& from) {
  read_mask_program(p, from.mask_program, is_packed(p), &p.mask);
  p.stats_stride[0] = is_packed(p) ? 0 : p.Hq * p.Lq;
  p.stats_stride[1] = p.Lq;
  p.scale_float = static_cast<float>(p.scale);
  p.softcap_float = static_cast<float>(p.softcap);
  p.tf32 = p.dtype == DType::f32 && may_round();
  set_dropout(p, from.seed);
  set_window(p);
}

// Reads the tensors and options of a call with one length for all sequences.
template <class Tensors>
Call dense_call(py::handle options, const Tensors& from) {
  Call p{};
  read_attention_options(Named(options), p);
  read_attention(p, from, dense);
  read_dense_biases(p, from, &p.table);
  read_rest(p, from);
  return p;
}

// Reads the tensors and options of a call with packed sequences.
template <class Tensors>
Call packed_call(py::handle options, const Tensors& from) {
  Call p{};
  read_varlen_options(Named(options), p, p);
  read_attention(p, from, packed);
  p.B = view_of("cu_seqlens_q", from.cu_seqlens_q).size[0] - 1;
  const auto read = [&](const char* name, py::handle x, py::object* copy) {
    return static_cast<const int64_t*>(read_flat(name, x, kInt64, {p.B + 1}, copy));
  };
  p.q_starts = read("cu_seqlens_q", from.cu_seqlens_q, &p.starts[0]);
  p.k_starts = read("cu_seqlens_k", from.cu_seqlens_k, &p.starts[1]);
  read_biases(p, from, &p.table);
  expect_middle(p);
  read_rest(p, from);
  return p;
}

// Called when out is allocated.
void set_alignment(Call& p) {
  p.aligned = are_aligned(p.dtype, {p.q, p.k, p.v, p.out});
  p.plain = p.aligned && p.scale_float > 0 && p.softcap_float == 0 && !excludes_pairs(p) &&
            p.alibi == nullptr && p.seed_address == nullptr;
}

// Attention has one more type: float32 with tf32 products.
template <class F>
void with_element_of_attention(const Call& p, F f) {
  if (!p.tf32) return with_element(p.dtype, f);
  py::gil_scoped_release release;
  f(static_cast<Tf32*>(nullptr));
}

// Where the stride of the result is 0, it is a sum over the dimension.
PairsArguments pairs(const AttentionArguments& p, const Tensor4& result, bool gradient,
                     float factor) {
  PairsArguments pairs{};
  static_cast<AttentionArguments&>(pairs) = p;
  pairs.gradient = gradient;
  pairs.factor = factor;
  pairs.result = result.data;
  const int64_t sizes[4] = {p.B, p.Hq, p.Lq, p.Lk};
  for (int n = 0; n < 4; ++n) {
    pairs.result_stride[n] = result.stride[n];
    pairs.sizes[n] = result.stride[n] == 0 ? 1 : static_cast<int>(sizes[n]);
  }
  return pairs;
}

// [B, Hq, Lq, 4], or of packed sequences [Hq, Tq, 4]
py::object new_row_stats(Call& p) {
  return new_floats({is_packed(p) ? kLeftOut : p.B, p.Hq, p.Lq, 4}, &p.row_stats);
}

// Returns (out, lse, weights or None).
py::tuple forward(uintptr_t stream, Call& p, py::handle query, Layout layout) {
  const py::object out = new_rows(query, p.Dv, layout, &p.out);
  set_alignment(p);
  const Sizes of_rows = {is_packed(p) ? kLeftOut : p.B, p.Hq, p.Lq};
  const py::object lse = new_result(DType::f64, of_rows, &p.lse);
  const py::object weights = new_weights(p, new_result);
  PairsArguments w{};
  if (p.weights != Weights::none) {
    const bool averaged = p.weights == Weights::averaged && p.Hq > 0;
    p.row_stats_owner = new_row_stats(p);
    w = pairs(p, p.applied, false, averaged ? static_cast<float>(1.0 / p.Hq) : 1.0f);
  }
  with_element_of_attention(p, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    if (!attention_forward_hopper(element, p, stream)) attention_forward(element, p, stream);
    if (w.result == nullptr) return;
    attention_rows(element, p, stream);
    attention_pairs(element, w, stream);
  });
  return py::make_tuple(out, lse, weights);
}

// scaled_dot_product_attention: out, lse and the weights.
py::tuple attention(const AttentionTensors& x, py::handle options, Stream stream) {
  Call p = dense_call(options, x);
  return forward(stream, p, x.query, dense);
}

// varlen_attention: out and lse of packed sequences.
py::tuple varlen_attention(const PackedTensors& x, py::handle options, Stream stream) {
  Call p = packed_call(options, x);
  const py::tuple results = forward(stream, p, x.query, packed);
  return py::make_tuple(results[0], results[1]);  // packed calls have no weights
}

// The gradient of a relative bias, which is summed over queries and keys: its strides there are 0.
PairsArguments distances(const Call& p) {
  const bool packed = is_packed(p);
  const int64_t size = packed ? p.Lq + p.Lk : p.relative_bias_size, batch = p.Hq * size;
  Tensor4 table{p.Lq > 0 && p.Lk > 0 ? p.grad_relative_bias : nullptr,
                {packed ? 0 : batch, size, 0, 0}};
  PairsArguments result = pairs(p, table, true, 1.0f);
  result.by_distance = true;
  result.odd_diagonals = packed ? batch : p.B * batch;
  return result;
}

// Allocates and returns the statistics of the rows, and launches.
py::object backward(uintptr_t stream, Call& p) {
  set_alignment(p);
  p.aligned = p.aligned && are_aligned(p.dtype, {p.grad_out, p.grad_q, p.grad_k, p.grad_v});
  // The row sums of the gradient of a mask equal the gradient of lse, to the eps of the mask's
  // dtype. A mask may be float32, and a relative bias always is. And dO . O does not include a
  // gradient of the weights.
  p.exact_delta = p.dtype == DType::f32 || p.grad_weights.data != nullptr ||
                  p.grad_mask.data != nullptr || p.grad_relative_bias != nullptr;
  py::object stats = new_row_stats(p);
  const PairsArguments mask = pairs(p, p.grad_mask, true, 1.0f), table = distances(p);
  with_element_of_attention(p, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    attention_rows(element, p, stream);
    if (!attention_backward_hopper(element, p, stream)) attention_backward(element, p, stream);
    if (mask.result != nullptr) attention_pairs(element, mask, stream);
    if (table.result != nullptr) attention_pairs(element, table, stream);
    if (table.result != nullptr && p.grad_table != nullptr) attention_table(element, table, stream);
  });
  return stats;
}

// Reads the results of the forward pass and their gradients; a missing gradient of out is zero.
template <class Tensors>
void read_gradients(Call& p, Tensors x, Layout layout, int64_t batch, const Sizes& of_rows) {
  if (x.grad_out.is_none()) {
    TensorView made;
    p.zeros = new_like(x.out, &made).attr("zero_")();
    x.grad_out = p.zeros;
  }
  read_results(p, x, layout, batch, of_rows, p.kept);
}

// Returns the gradients of query, key, value, and of attn_mask, if the options ask for it; the
// statistics of the rows [B, Hq, Lq, 4]; and the gradient of relative_bias or None.
py::tuple attention_gradients(const AttentionGradTensors& x, py::handle options, Stream stream) {
  Call p = dense_call(options, x);
  read_gradients(p, x, dense, p.B, {p.B, p.Hq, p.Lq});
  read_grad_weights(p, x.grad_weights);
  py::tuple made = new_row_gradients(p, x, dense, false, 3);
  py::object of_mask, tables;
  if (Named(options).read<bool>("needs_mask_grad"))
    of_mask = new_grad_mask(p, x.attn_mask, new_result, DType::f32, DType::f32);
  if (!x.relative_bias.is_none())  // two, whose sum is the gradient
    tables = new_zeros(DType::f32, {2, p.B, p.Hq, p.relative_bias_size}, &p.grad_relative_bias);
  made[4] = backward(stream, p);
  if (of_mask) made[3] = gradient_of(x.attn_mask, of_mask);
  if (tables) made[5] = gradient_of(x.relative_bias, tables);
  return made;
}

// Returns the gradients of query, key and value, the statistics of the rows [Hq, Tq, 4], and the
// gradient of relative_bias or None.
py::tuple varlen_gradients(const PackedGradTensors& x, py::handle options, Stream stream) {
  Call p = packed_call(options, x);
  read_gradients(p, x, packed, 1, {p.Hq, p.Lq});
  py::tuple made = new_row_gradients(p, x, packed, false, 2);
  if (!x.relative_bias.is_none()) {
    // A sequence has the distances below its own length, so the sums take O(Tq + Tk) memory.
    p.tables = new_zeros(DType::f32, {2, p.Hq, p.Lq + p.Lk}, &p.grad_relative_bias);
    void* data;
    made[4] = new_zeros(DType::f32, {1, p.Hq, p.relative_bias_size}, &data);
    p.grad_table = static_cast<float*>(data);
  }
  made[3] = backward(stream, p);
  return made;
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
