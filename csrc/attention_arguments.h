// Reading the tensors of attention, dense, packed and additive, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "function.h"
#include "options.h"

namespace fastattn {

struct AttentionTensors {
  // [B, Hq, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]; the others may be None
  FASTATTN_TENSORS(query, key, value, attn_mask, alibi_slopes, seed, sinks, relative_bias,
                   positions, mask_program, position_query, query_table, key_table,
                   distance_buckets, row_bias, column_bias)
};

struct AttentionGradTensors {
  FASTATTN_TENSORS(grad_out, grad_lse, grad_weights, query, key, value, attn_mask, alibi_slopes,
                   seed, out, lse, sinks, relative_bias, positions, mask_program, position_query,
                   query_table, key_table, distance_buckets, row_bias, column_bias)
};

// Packed sequences: [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv], and their starts [B + 1].
struct PackedTensors {
  FASTATTN_TENSORS(query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, seed, sinks,
                   relative_bias, mask_program, position_query, query_table, key_table,
                   distance_buckets)
};

struct PackedGradTensors {
  FASTATTN_TENSORS(grad_out, grad_lse, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                   seed, out, lse, sinks, relative_bias, mask_program, position_query, query_table,
                   key_table, distance_buckets)
};

// Views a tensor of attention as [B, H, L, D].
using Layout = TensorView (*)(const char* name, const TensorView&);

// [B, H, L, D]
inline TensorView dense(const char* name, const TensorView& x) { return permuted(name, x, "0123"); }
// [T, H, D], of packed sequences, as [1, H, T, D]
inline TensorView packed(const char* name, const TensorView& x) {
  return permuted(name, x, ".102");
}
// [B, L, D] as [B, 1, L, D]
inline TensorView headless(const char* name, const TensorView& x) {
  return permuted(name, x, "0.12");
}

// The dtype and the sizes of a call, and its operands.
template <class Tensors>
void read_attention(AttentionParams& p, const Tensors& from, Layout layout) {
  const TensorView q = layout("query", view_of("query", from.query)),
                   k = layout("key", view_of("key", from.key)),
                   v = layout("value", view_of("value", from.value));
  expect_dtype("query", q, kFloats);
  p.dtype = q.dtype;
  p.B = q.size[0], p.Hq = q.size[1], p.Lq = q.size[2], p.D = q.size[3];
  p.Hkv = k.size[1], p.Lk = k.size[2], p.Dv = v.size[3];
  expect_sizes("key", k, p.dtype, {p.B, p.Hkv, p.Lk, p.D});
  expect_sizes("value", v, p.dtype, {p.B, p.Hkv, p.Lk, p.Dv});
  p.q = operand_of(q), p.k = operand_of(k), p.v = operand_of(v);
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
}

// [B|1, Hq]: one number per head, never broadcast over heads. Null for None.
inline const void* read_per_head(const char* name, py::handle from, const AttentionParams& p,
                                 int64_t* strides) {
  if (from.is_none()) return nullptr;
  const TensorView x = read_broadcast(name, from, {p.B, p.Hq}, strides);
  expect_dtype(name, x, {accumulator(p.dtype)});
  expect(x.rank > 0 && x.size[x.rank - 1] == p.Hq, [&] {
    return std::string(name) + " must have an element for each of " + std::to_string(p.Hq) +
           " heads";
  });
  return x.data;
}

// The biases that every kind of attention accepts. `table` owns a copy of relative_bias if its
// columns are not contiguous.
template <class Tensors>
void read_biases(AttentionParams& p, const Tensors& from, py::object* table) {
  p.alibi = read_per_head("alibi_slopes", from.alibi_slopes, p, p.alibi_stride);
  p.sinks = read_per_head("sinks", from.sinks, p, p.sinks_stride);
  if (!from.relative_bias.is_none()) {
    TensorView x = view_of("relative_bias", from.relative_bias);
    p.relative_bias_size = x.rank == 3 ? x.size[2] : 0;
    if (p.relative_bias_size > 1 && x.stride[2] != 1) *table = contiguous(from.relative_bias);
    int64_t stride[3];
    x = read_broadcast("relative_bias", *table ? *table : from.relative_bias,
                       {p.B, p.Hq, p.relative_bias_size}, stride);
    expect_dtype("relative_bias", x, {accumulator(p.dtype)});
    p.relative_bias = x.data;
    std::copy_n(stride, 2, p.relative_bias_stride);
  }
}

// The kernels read a table of distances at d = position(i + offset) - position(j), for all queries
// i and keys j. All of these, smallest <= d <= largest, must be in it.
inline void expect_distances(const AttentionParams& p, int64_t smallest, int64_t largest) {
  const int64_t needed = 2 * std::max(-smallest, largest) + 1;
  expect(p.relative_bias_size % 2 == 1 && p.relative_bias_size >= needed,
         "relative_bias must have an odd number of columns, at least " + std::to_string(needed) +
             ", got " + std::to_string(p.relative_bias_size));
}

// Without the lengths, which may be on a GPU: kernels then clamp distances to the table.
inline void expect_middle(const AttentionParams& p) {
  expect(p.relative_bias == nullptr || p.relative_bias_size % 2 == 1,
         "relative_bias must have an odd number of columns, got " +
             std::to_string(p.relative_bias_size));
}

// Whether the bias is read at all: without pairs it is not.
inline bool reads_relative_bias(const AttentionParams& p) {
  return p.relative_bias != nullptr && p.Lq > 0 && p.Lk > 0;
}

// Also the mask and the positions, which a packed call does not have. The values of the positions
// are not checked.
template <class Tensors>
void read_dense_biases(AttentionParams& p, const Tensors& from, py::object* table) {
  if (!from.attn_mask.is_none()) {
    const TensorView x =
        read_broadcast("attn_mask", from.attn_mask, {p.B, p.Hq, p.Lq, p.Lk}, p.mask.stride);
    expect_dtype("attn_mask", x, {DType::boolean, p.dtype, DType::f32});
    p.mask.data = x.data, p.mask_dtype = x.dtype;
  }
  read_biases(p, from, table);
  int64_t positions = 0;
  if (!from.positions.is_none()) p.positions = read_words("positions", from.positions, &positions);
  if (!reads_relative_bias(p)) return;
  if (p.positions == nullptr)
    return expect_distances(p, p.offset - (p.Lk - 1), p.offset + p.Lq - 1);
  expect(p.offset >= 0 && p.offset + p.Lq <= positions && p.Lk <= positions,
         "positions must have an element for each of " + std::to_string(p.offset + p.Lq) +
             " queries and " + std::to_string(p.Lk) + " keys, got " + std::to_string(positions));
}

// One number per query, contiguous; `owners` owns the memory.
inline double* read_rows(const char* name, py::handle from, const Sizes& sizes,
                         py::object* owners) {
  return static_cast<double*>(read_flat(name, from, DType::f64, sizes, owners));
}

// A tensor of these sizes [B, H, L, D]; data is null for None.
inline Tensor4 read_rows_if_given(const char* name, py::handle from, Layout layout, DType dtype,
                                  const Sizes& sizes) {
  if (from.is_none()) return {};
  const TensorView x = layout(name, view_of(name, from));
  expect_sizes(name, x, dtype, sizes);
  return operand_of(x);
}

// Allocates the weights that a call returns with `make`; or None.
inline py::object new_weights(AttentionParams& p, Make make) {
  if (p.weights == Weights::none) return none();
  const bool per_head = p.weights == Weights::per_head;
  const int64_t heads = per_head ? p.Hq : 1, pairs = p.Lq * p.Lk;
  void* data;
  py::object made = make(p.dtype, {p.B, per_head ? p.Hq : kLeftOut, p.Lq, p.Lk}, &data);
  p.applied = {data, {heads * pairs, heads > 1 ? pairs : 0, p.Lk, 1}};
  return made;
}

// Allocates the gradient of a mask, with the mask's sizes, by `make`. The stride is 0 where a size
// is 1: elements are sums there, of type `wide` if they are sums over all queries or keys.
inline py::object new_grad_mask(AttentionParams& p, py::handle mask, Make make, DType narrow,
                                DType wide) {
  const TensorView x = view_of("attn_mask", mask);
  if (x.rank != 4) throw py::value_error("fastattn: attn_mask must have four dimensions");
  const bool is_sum = x.size[2] == 1 || x.size[3] == 1;
  py::object made = make(is_sum ? wide : narrow, x.sizes(), &p.grad_mask.data);
  int64_t stride = 1;
  for (int n = 3; n >= 0; --n) {
    p.grad_mask.stride[n] = x.size[n] == 1 ? 0 : stride;
    stride *= x.size[n];
  }
  return made;
}

// The gradient of the weights of a call, [B, Hq, Lq, Lk], or averaged [B, Lq, Lk].
inline void read_grad_weights(AttentionParams& p, py::handle from) {
  if (from.is_none()) return;
  expect(p.weights != Weights::none, "grad_weights needs a call that returns weights");
  const bool averaged = p.weights == Weights::averaged;
  p.grad_weights = read_rows_if_given("grad_weights", from, averaged ? headless : dense, p.dtype,
                                      {p.B, averaged ? 1 : p.Hq, p.Lq, p.Lk});
}

// The results of a forward pass and their gradients; `batch` is their first size, 1 if they are
// packed. `owners` owns up to three copies.
template <class Tensors>
void read_results(AttentionParams& p, const Tensors& from, Layout layout, int64_t batch,
                  const Sizes& of_rows, py::object* owners) {
  const Sizes of_out = {batch, p.Hq, p.Lq, p.Dv};
  const TensorView out = layout("out", with_rows("out", from.out, &owners[0]));
  expect_sizes("out", out, p.dtype, of_out);
  p.out = operand_of(out);
  p.grad_out = read_rows_if_given("grad_out", from.grad_out, layout, p.dtype, of_out);
  if (!from.grad_lse.is_none())
    p.grad_lse = read_rows("grad_lse", from.grad_lse, of_rows, &owners[1]);
  p.lse = read_rows("lse", from.lse, of_rows, &owners[2]);
}

// Allocates a tensor with the rows of `like`.
inline py::object new_rows(py::handle like, int64_t width, Layout layout, Tensor4* to,
                           bool zeroed = false) {
  TensorView view;
  py::object made = new_rows(like, width, &view);
  if (zeroed) made.attr("zero_")();
  *to = operand_of(layout("a result", view));
  return made;
}

// Allocates the gradients of query, key and value; the `others` are None.
template <class Tensors>
py::tuple new_row_gradients(AttentionParams& p, const Tensors& of, Layout layout, bool zeroed,
                            size_t others) {
  py::tuple made = no_results(3 + others);
  made[0] = new_rows(of.query, p.D, layout, &p.grad_q, zeroed);
  made[1] = new_rows(of.key, p.D, layout, &p.grad_k, zeroed);
  made[2] = new_rows(of.value, p.Dv, layout, &p.grad_v, zeroed);
  return made;
}

// -- additive attention: one head, D is the hidden width A
// ------------------------------------------

struct AdditiveTensors {
  // [B, Tq, A], [B, Tk, A], [B, Tk, Dv], [A]; the others may be None
  FASTATTN_TENSORS(query, key, value, v, bias, attn_mask, seed)
};

struct AdditiveGradTensors {
  FASTATTN_TENSORS(grad_out, grad_weights, query, key, value, v, bias, attn_mask, seed)
};

// v and bias in the accumulator's type, and the copies that own them.
struct AdditiveVectors {
  const void *v, *bias;
  py::object copies[2];
  bool returns_weights, causal;  // of the options
};

// [B, length, columns], contiguous.
inline Tensor4 one_head(void* data, int64_t length, int64_t columns) {
  return {data, {length * columns, 0, columns, 1}};
}

// Fills everything but the seed.
template <class Tensors>
void read_additive(AttentionParams& p, AdditiveVectors& to, py::handle options,
                   const Tensors& from) {
  const Named record(options);
  record.read<&AdditiveVectors::returns_weights>("weights", to);
  record.read<&AdditiveVectors::causal>("causal", to);
  record.read<&AttentionParams::dropout_p>("dropout_p", p);
  p.window_right = to.causal ? 0 : -1;
  read_attention(p, from, headless);
  const DType acc = accumulator(p.dtype);
  to.v = read_flat("v", from.v, acc, {p.D}, &to.copies[0]);
  to.bias = read_flat_if_given("bias", from.bias, acc, {p.D}, &to.copies[1]);
  if (!from.attn_mask.is_none()) {
    int64_t stride[3];
    const TensorView mask = read_broadcast("attn_mask", from.attn_mask, {p.B, p.Lq, p.Lk}, stride);
    expect_dtype("attn_mask", mask, {DType::boolean, p.dtype, DType::f32});
    p.mask = {mask.data, {stride[0], 0, stride[1], stride[2]}};
    p.mask_dtype = mask.dtype;
  }
}

// Allocates (out, weights or None).
inline py::tuple new_additive_results(AttentionParams& p, bool returns_weights, py::handle query) {
  void* data;
  const py::object out = p.D == p.Dv ? new_contiguous_like(query, &data)
                                     : new_result(p.dtype, {p.B, p.Lq, p.Dv}, &data);
  p.out = one_head(data, p.Lq, p.Dv);
  if (!returns_weights) return py::make_tuple(out, none());
  const py::object weights = new_result(p.dtype, {p.B, p.Lq, p.Lk}, &data);
  p.applied = one_head(data, p.Lq, p.Lk);
  return py::make_tuple(out, weights);
}

// The gradients of both outputs; a missing gradient of out counts as zero.
inline void read_additive_gradients(AttentionParams& p, const AdditiveGradTensors& from) {
  const auto read = [&](const char* name, py::handle x, int64_t columns) {
    return read_rows_if_given(name, x, headless, p.dtype, {p.B, 1, p.Lq, columns});
  };
  p.grad_out = read("grad_out", from.grad_out, p.Dv);
  p.grad_weights = read("grad_weights", from.grad_weights, p.Lk);
}

// Allocates the gradients of query, key and value; v, bias and attn_mask get None.
inline py::tuple new_additive_gradients(AttentionParams& p, const AdditiveGradTensors& of) {
  void* grads[3];
  py::tuple made = no_results(6);
  const py::handle like[] = {of.query, of.key, of.value};
  for (size_t n = 0; n < 3; ++n) made[n] = new_contiguous_like(like[n], &grads[n]);
  p.grad_q = one_head(grads[0], p.Lq, p.D), p.grad_k = one_head(grads[1], p.Lk, p.D);
  p.grad_v = one_head(grads[2], p.Lk, p.Dv);
  return made;
}

}  // namespace fastattn
