// Attention on a GPU, dense and packed, as Python calls it: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>

#include "../attention_arguments.h"
#include "../relative_bias_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// The arguments of a call, and what they point to.
struct Call : AttentionArguments {
  py::object table, mask, starts[2], rows[2], row_stats_owner, tables;
};

bool is_packed(const Call& p) { return p.q_starts != nullptr; }

// What is left to read after the options, the operands and the sizes of a call.
void read_rest(Call& p, const Biases& biases) {
  int64_t positions = 0;
  read_biases(p, biases, &positions, &p.table);
  read_mask_program(p, biases.mask_program, is_packed(p), &p.mask);
  if (is_packed(p))
    expect_middle(p);
  else
    check_relative_bias(p, positions);
  p.stats_stride[0] = is_packed(p) ? 0 : p.Hq * p.Lq;
  p.stats_stride[1] = p.Lq;
  p.scale_float = static_cast<float>(p.scale);
  p.softcap_float = static_cast<float>(p.softcap);
  p.tf32 = p.dtype == DType::f32 && rule_of_rounding()().cast<bool>();
  set_dropout(p, biases.seed);
  set_window(p);
}

void read_call(Call& p, const py::object& options, py::handle query, py::handle key,
               py::handle value, const Biases& biases) {
  read_attention_options(Named(options), p);
  read_attention(p, query, key, value);
  read_rest(p, biases);
}

void read_packed_call(Call& p, const py::object& options, py::handle query, py::handle key,
                      py::handle value, py::handle q_starts, py::handle k_starts,
                      const Biases& biases) {
  VarlenOptions asked;
  read_varlen_options(Named(options), asked);
  static_cast<AttentionOptions&>(p) = asked;
  p.bottom_right = asked.bottom_right;
  read_packed_attention(p, query, key, value);
  p.B = view_of("cu_seqlens_q", q_starts).size[0] - 1;
  const auto read = [&](const char* name, py::handle from, py::object* copy) {
    return static_cast<const int64_t*>(read_flat(name, from, kInt64, {p.B + 1}, copy));
  };
  p.q_starts = read("cu_seqlens_q", q_starts, &p.starts[0]);
  p.k_starts = read("cu_seqlens_k", k_starts, &p.starts[1]);
  read_rest(p, biases);
}

// After out is known.
void set_alignment(Call& p) {
  const int64_t bytes = element_bytes(p.dtype);
  p.aligned = is_aligned(p.q, bytes) && is_aligned(p.k, bytes) && is_aligned(p.v, bytes) &&
              is_aligned(p.out, bytes);
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

// A contiguous result of these sizes, for pairs().
Tensor4 summed(void* data, const int64_t (&sizes)[4]) {
  Tensor4 made{data, {}};
  int64_t stride = 1;
  for (int n = 3; n >= 0; --n) {
    made.stride[n] = sizes[n] == 1 ? 0 : stride;
    stride *= sizes[n];
  }
  return made;
}

// [B, Hq, Lq, 4], or of packed sequences [Hq, Tq, 4]
py::object new_row_stats(Call& p) {
  return is_packed(p) ? new_floats({p.Hq, p.Lq, 4}, &p.row_stats)
                      : new_floats({p.B, p.Hq, p.Lq, 4}, &p.row_stats);
}

// Allocates lse and the weights, and launches: (lse, weights or None).
py::tuple forward(uintptr_t stream, Call& p) {
  set_alignment(p);
  void* data;
  const py::object lse = is_packed(p) ? new_result(DType::f64, {p.Hq, p.Lq}, &data)
                                      : new_result(DType::f64, {p.B, p.Hq, p.Lq}, &data);
  p.lse = static_cast<double*>(data);
  py::object weights = py::none();
  PairsArguments w{};
  if (p.weights != Weights::none) {
    const bool averaged = p.weights == Weights::averaged;
    weights = averaged ? new_result(p.dtype, {p.B, p.Lq, p.Lk}, &data)
                       : new_result(p.dtype, {p.B, p.Hq, p.Lq, p.Lk}, &data);
    p.applied = summed(data, {p.B, averaged ? 1 : p.Hq, p.Lq, p.Lk});
    p.row_stats_owner = new_row_stats(p);
    w = pairs(p, p.applied, false, averaged && p.Hq > 0 ? static_cast<float>(1.0 / p.Hq) : 1.0f);
  }
  with_element_of_attention(p, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    if (!attention_forward_hopper(element, p, stream)) attention_forward(element, p, stream);
    if (w.result == nullptr) return;
    attention_rows(element, p, stream);
    attention_pairs(element, w, stream);
  });
  return py::make_tuple(lse, weights);
}

// (out, lse, weights or None), new.
py::tuple attention(uintptr_t stream, const py::object& options, py::handle query, py::handle key,
                    py::handle value, py::handle attn_mask, py::handle alibi_slopes,
                    py::handle seed, py::handle sinks, py::handle relative_bias,
                    py::handle positions, py::handle mask_program) {
  Call p{};
  read_call(p, options, query, key, value,
            {attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program});
  const py::object out = new_rows(query, p.Dv, &p.out);
  const py::tuple others = forward(stream, p);
  return py::make_tuple(out, others[0], others[1]);
}

// (out, lse), new.
py::tuple varlen_attention(uintptr_t stream, const py::object& options, py::handle query,
                           py::handle key, py::handle value, py::handle q_starts,
                           py::handle k_starts, py::handle alibi_slopes, py::handle seed,
                           py::handle sinks, py::handle relative_bias, py::handle mask_program) {
  Call p{};
  const py::none none;
  read_packed_call(p, options, query, key, value, q_starts, k_starts,
                   {none, alibi_slopes, seed, sinks, relative_bias, none, mask_program});
  TensorView of_out;
  const py::object out = new_rows(query, p.Dv, &of_out);
  p.out = packed_operand(of_out);
  return py::make_tuple(out, forward(stream, p)[0]);
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

// Allocates the statistics of the rows, which it returns, and launches.
py::object backward(uintptr_t stream, Call& p) {
  set_alignment(p);
  const int64_t bytes = element_bytes(p.dtype);
  for (const Tensor4& t : {p.grad_out, p.grad_q, p.grad_k, p.grad_v})
    p.aligned = p.aligned && is_aligned(t, bytes);
  // The row sums of the gradient of a mask equal the gradient of lse, to the eps of the mask's
  // dtype, which may be float32, as that of a relative bias is. And dO . O does not include a
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

// New, in float32 and of the mask's sizes.
py::object new_grad_mask(Call& p, py::handle mask) {
  const TensorView x = view_of("attn_mask", mask);
  if (x.rank != 4) throw py::value_error("fastattn: attn_mask must have four dimensions");
  const int64_t* n = x.size;
  void* data;
  py::object made = new_result(DType::f32, {n[0], n[1], n[2], n[3]}, &data);
  p.grad_mask = summed(data, {n[0], n[1], n[2], n[3]});
  return made;
}

// The gradients of query, key, value, and of attn_mask in float32, where the options ask for it; the
// statistics of the rows [B, Hq, Lq, 4]; and two tables [B, Hq, size], whose sum is the gradient of
// relative_bias. New, or None.
py::tuple attention_gradients(uintptr_t stream, const py::object& options, py::handle grad_out,
                              py::handle grad_lse, py::handle grad_weights, py::handle query,
                              py::handle key, py::handle value, py::handle attn_mask,
                              py::handle alibi_slopes, py::handle seed, py::handle out,
                              py::handle lse, py::handle sinks, py::handle relative_bias,
                              py::handle positions, py::handle mask_program) {
  struct Asked {
    bool needs_mask_grad;
  } asked;
  static const auto fields = std::make_tuple(field("needs_mask_grad", &Asked::needs_mask_grad));
  Named(options).read(asked, fields);
  Call p{};
  read_call(p, options, query, key, value,
            {attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program});
  p.out = operand_of(read_sizes("out", out, p.dtype, {p.B, p.Hq, p.Lq, p.Dv}));
  p.grad_out = operand_of(read_sizes("grad_out", grad_out, p.dtype, {p.B, p.Hq, p.Lq, p.Dv}));
  if (!grad_lse.is_none())
    p.grad_lse = read_rows("grad_lse", grad_lse, {p.B, p.Hq, p.Lq}, &p.rows[0]);
  p.lse = read_rows("lse", lse, {p.B, p.Hq, p.Lq}, &p.rows[1]);
  read_grad_weights(p, grad_weights);
  const py::object of_query = new_rows(query, p.D, &p.grad_q),
                   of_key = new_rows(key, p.D, &p.grad_k),
                   of_value = new_rows(value, p.Dv, &p.grad_v);
  py::object of_mask = py::none(), of_table = py::none();
  if (asked.needs_mask_grad) of_mask = new_grad_mask(p, attn_mask);
  if (!relative_bias.is_none())
    of_table = new_zeros(DType::f32, {2, p.B, p.Hq, p.relative_bias_size}, &p.grad_relative_bias);
  const py::object stats = backward(stream, p);
  return py::make_tuple(of_query, of_key, of_value, of_mask, stats, of_table);
}

// The gradients of query, key and value, the statistics of the rows [Hq, Tq, 4], and the gradient of
// relative_bias. New, or None.
py::tuple varlen_gradients(uintptr_t stream, const py::object& options, py::handle grad_out,
                           py::handle grad_lse, py::handle query, py::handle key, py::handle value,
                           py::handle q_starts, py::handle k_starts, py::handle alibi_slopes,
                           py::handle seed, py::handle out, py::handle lse, py::handle sinks,
                           py::handle relative_bias, py::handle mask_program) {
  Call p{};
  const py::none none;
  read_packed_call(p, options, query, key, value, q_starts, k_starts,
                   {none, alibi_slopes, seed, sinks, relative_bias, none, mask_program});
  p.out = packed_operand(read_sizes("out", out, p.dtype, {p.Lq, p.Hq, p.Dv}));
  p.grad_out = packed_operand(read_sizes("grad_out", grad_out, p.dtype, {p.Lq, p.Hq, p.Dv}));
  if (!grad_lse.is_none()) p.grad_lse = read_rows("grad_lse", grad_lse, {p.Hq, p.Lq}, &p.rows[0]);
  p.lse = read_rows("lse", lse, {p.Hq, p.Lq}, &p.rows[1]);
  const auto new_gradient = [](py::handle of, int64_t width, Tensor4* to) {
    TensorView view;
    py::object made = new_rows(of, width, &view);
    *to = packed_operand(view);
    return made;
  };
  const py::object of_query = new_gradient(query, p.D, &p.grad_q),
                   of_key = new_gradient(key, p.D, &p.grad_k),
                   of_value = new_gradient(value, p.Dv, &p.grad_v);
  py::object of_table = py::none();
  if (!relative_bias.is_none()) {
    // A sequence has the distances below its own length, so the sums take O(Tq + Tk) memory.
    p.tables = new_zeros(DType::f32, {2, p.Hq, p.Lq + p.Lk}, &p.grad_relative_bias);
    void* data;
    of_table = new_zeros(DType::f32, {1, p.Hq, p.relative_bias_size}, &data);
    p.grad_table = static_cast<float*>(data);
  }
  const py::object stats = backward(stream, p);
  return py::make_tuple(of_query, of_key, of_value, stats, of_table);
}

}  // namespace

void bind_sdpa(py::module_& m) {
  define(m, "attention", &attention);
  define(m, "attention_backward", &attention_gradients);
  define(m, "varlen_attention", &varlen_attention);
  define(m, "varlen_attention_backward", &varlen_gradients);
}

}  // namespace cuda
}  // namespace fastattn
