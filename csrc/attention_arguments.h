// Reading the tensors of attention, dense, packed and additive, for the bindings of both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "arguments.h"
#include "operands.h"

namespace fastattn {

// The dtype and the sizes of a call, and its operands [B, H, L, D].
inline void read_attention(AttentionParams& p, py::handle query, py::handle key, py::handle value) {
  const TensorView q = view_of("query", query), k = view_of("key", key),
                   v = view_of("value", value);
  expect_dtype("query", q, kFloats);
  p.dtype = q.dtype;
  p.B = q.size[0], p.Hq = q.size[1], p.Lq = q.size[2], p.D = q.size[3];
  p.Hkv = k.size[1], p.Lk = k.size[2], p.Dv = v.size[3];
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, p.D});  // of four dimensions
  expect_sizes("key", k, p.dtype, {p.B, p.Hkv, p.Lk, p.D});
  expect_sizes("value", v, p.dtype, {p.B, p.Hkv, p.Lk, p.Dv});
  p.q = operand_of(q), p.k = operand_of(k), p.v = operand_of(v);
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
}

// [T, H, D] as [-, H, T, D]
inline Tensor4 packed_operand(const TensorView& x) {
  return {x.data, {0, x.stride[1], x.stride[0], x.stride[2]}};
}

// The same of packed sequences [T, H, D], whose batch is not known yet.
inline void read_packed_attention(AttentionParams& p, py::handle query, py::handle key,
                                  py::handle value) {
  const TensorView q = view_of("query", query), k = view_of("key", key),
                   v = view_of("value", value);
  expect_dtype("query", q, kFloats);
  p.dtype = q.dtype;
  p.Lq = q.size[0], p.Hq = q.size[1], p.D = q.size[2];
  p.Lk = k.size[0], p.Hkv = k.size[1], p.Dv = v.size[2];
  expect_sizes("query", q, p.dtype, {p.Lq, p.Hq, p.D});  // of three dimensions
  expect_sizes("key", k, p.dtype, {p.Lk, p.Hkv, p.D});
  expect_sizes("value", v, p.dtype, {p.Lk, p.Hkv, p.Dv});
  p.q = packed_operand(q), p.k = packed_operand(k), p.v = packed_operand(v);
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
}

struct Biases {
  py::handle attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program;
};

// One number a head: the heads do not share it.
inline void expect_heads(const char* name, const TensorView& x, DType acc, int64_t heads) {
  expect_dtype(name, x, {acc});
  expect(x.rank > 0 && x.size[x.rank - 1] == heads, [&] {
    return std::string(name) + " must have an element for each of " + std::to_string(heads) +
           " heads";
  });
}

// Fills everything but the seed and a mask program. `positions`: how many there are; `table` owns a copy
// of relative_bias, if its columns are not together.
inline void read_biases(AttentionParams& p, const Biases& from, int64_t* positions,
                        py::object* table) {
  const DType acc = accumulator(p.dtype);
  if (!from.attn_mask.is_none()) {
    const TensorView x =
        read_broadcast("attn_mask", from.attn_mask, {p.B, p.Hq, p.Lq, p.Lk}, p.mask.stride);
    expect_dtype("attn_mask", x, {DType::boolean, p.dtype, DType::f32});
    p.mask.data = x.data, p.mask_dtype = x.dtype;
  }
  if (!from.alibi_slopes.is_none()) {
    const TensorView x =
        read_broadcast("alibi_slopes", from.alibi_slopes, {p.B, p.Hq}, p.alibi_stride);
    expect_heads("alibi_slopes", x, acc, p.Hq);
    p.alibi = x.data;
  }
  if (!from.sinks.is_none()) {
    const TensorView x = read_broadcast("sinks", from.sinks, {p.B, p.Hq}, p.sinks_stride);
    expect_heads("sinks", x, acc, p.Hq);
    p.sinks = x.data;
  }
  if (!from.relative_bias.is_none()) {
    TensorView x = view_of("relative_bias", from.relative_bias);
    p.relative_bias_size = x.rank == 3 ? x.size[2] : 0;
    if (p.relative_bias_size > 1 && x.stride[2] != 1) *table = contiguous(from.relative_bias);
    int64_t stride[3];
    x = read_broadcast("relative_bias", *table ? *table : from.relative_bias,
                       {p.B, p.Hq, p.relative_bias_size}, stride);
    expect_dtype("relative_bias", x, {acc});
    p.relative_bias = x.data;
    std::copy_n(stride, 2, p.relative_bias_stride);
  }
  if (!from.positions.is_none()) p.positions = read_words("positions", from.positions, positions);
}

// A number for each query, contiguous; `kept` owns it.
inline double* read_rows(const char* name, py::handle from, Sizes sizes, py::object* kept) {
  return static_cast<double*>(read_flat(name, from, DType::f64, sizes, kept));
}

// The weights of a call, new or as they are given, [B, Hq, Lq, Lk], or averaged [B, Lq, Lk].
inline void read_grad_weights(AttentionParams& p, py::handle from) {
  if (from.is_none()) return;
  expect(p.weights != Weights::none, "grad_weights needs a call that returns weights");
  const TensorView x = p.weights == Weights::averaged
                           ? read_sizes("grad_weights", from, p.dtype, {p.B, p.Lq, p.Lk})
                           : read_sizes("grad_weights", from, p.dtype, {p.B, p.Hq, p.Lq, p.Lk});
  p.grad_weights.data = x.data;
  const int64_t *s = x.stride, averaged[] = {s[0], 0, s[1], s[2]};
  std::copy_n(x.rank == 4 ? s : averaged, 4, p.grad_weights.stride);
}

// -- additive attention: one head, D is the hidden width A ------------------------------------------

struct AdditiveTensors {
  py::handle query, key, value;  // [B, Tq, A], [B, Tk, A], [B, Tk, Dv]
  py::handle v, bias;            // [A]; bias or None
  py::handle attn_mask, seed;    // or None
};

// The vectors in the accumulator's type, and the copies that own them.
struct AdditiveVectors {
  const void *v, *bias;
  py::object copies[2];
};

// [B, L, columns] as an operand with a head dimension.
inline Tensor4 headless(const TensorView& x) {
  return {x.data, {x.stride[0], 0, x.stride[1], x.stride[2]}};
}

// The same of contiguous memory.
inline Tensor4 headless(void* data, int64_t length, int64_t columns) {
  return {data, {length * columns, 0, columns, 1}};
}

// Fills everything but the options and the seed.
inline void read_additive(AttentionParams& p, AdditiveVectors& to, const AdditiveTensors& from) {
  const TensorView q = view_of("query", from.query), k = view_of("key", from.key),
                   v = view_of("value", from.value);
  expect_dtype("query", q, kFloats);
  p.dtype = q.dtype;
  p.B = q.size[0], p.Lq = q.size[1], p.D = q.size[2];
  p.Lk = k.size[1], p.Dv = v.size[2];
  p.Hq = p.Hkv = 1;
  expect_sizes("query", q, p.dtype, {p.B, p.Lq, p.D});  // of three dimensions
  expect_sizes("key", k, p.dtype, {p.B, p.Lk, p.D});
  expect_sizes("value", v, p.dtype, {p.B, p.Lk, p.Dv});
  p.q = headless(q), p.k = headless(k), p.v = headless(v);
  const DType acc = accumulator(p.dtype);
  to.v = read_flat("v", from.v, acc, {p.D}, &to.copies[0]);
  if (!from.bias.is_none()) to.bias = read_flat("bias", from.bias, acc, {p.D}, &to.copies[1]);
  if (!from.attn_mask.is_none()) {
    int64_t stride[3];
    const TensorView mask = read_broadcast("attn_mask", from.attn_mask, {p.B, p.Lq, p.Lk}, stride);
    expect_dtype("attn_mask", mask, {DType::boolean, p.dtype, DType::f32});
    p.mask = {mask.data, {stride[0], 0, stride[1], stride[2]}};
    p.mask_dtype = mask.dtype;
  }
}

// The gradients of both outputs; that of out is zero, if it is none.
inline void read_additive_gradients(AttentionParams& p, py::handle grad_out,
                                    py::handle grad_weights) {
  if (!grad_out.is_none())
    p.grad_out = headless(read_sizes("grad_out", grad_out, p.dtype, {p.B, p.Lq, p.Dv}));
  if (!grad_weights.is_none())
    p.grad_weights = headless(read_sizes("grad_weights", grad_weights, p.dtype, {p.B, p.Lq, p.Lk}));
}

// The gradients of query, key and value, new.
inline py::tuple new_additive_gradients(AttentionParams& p, const AdditiveTensors& of) {
  const auto make = [](py::handle like, int64_t length, int64_t columns, Tensor4* to) {
    void* data;
    py::object made = new_contiguous_like(like, &data);
    *to = headless(data, length, columns);
    return made;
  };
  const py::object of_query = make(of.query, p.Lq, p.D, &p.grad_q),
                   of_key = make(of.key, p.Lk, p.D, &p.grad_k),
                   of_value = make(of.value, p.Lk, p.Dv, &p.grad_v);
  return py::make_tuple(of_query, of_key, of_value);
}

}  // namespace fastattn
