// What the bindings of dense and of packed attention share: reading the biases of a call, the rows of
// lse, and summing the gradients of sinks.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../arguments.h"
#include "isa.h"
#include "kernel_table.h"
#include "mask_program.h"
#include "operands.h"

namespace fastattn {

namespace py = pybind11;

// Whether products of float32 may round their factors to 16 bits. Only tiles do, so that the question
// to PyTorch's settings costs calls on vectors nothing.
inline bool reduces(const AttentionParams& p) {
  return p.dtype == DType::f32 && pays_on_tiles(p.dtype, p.Lq, p.Lk, p.D) && on_tiles(DType::f32) &&
         rule_of_rounding()().cast<bool>();
}

struct Biases {
  py::handle attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program;
};

// One number a head: the heads do not share it.
inline void expect_heads(const char* name, const TensorView& x, DType acc, int64_t heads) {
  expect_dtype(name, x, {acc});
  expect(
      x.rank > 0 && x.size[x.rank - 1] == heads,
      std::string(name) + " must have an element for each of " + std::to_string(heads) + " heads");
}

// Fills everything but a mask program; `positions`: how many there are; `table` owns a copy of
// relative_bias, if its columns are not together.
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
  p.seed = read_seed(from.seed);
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

inline void read_mask_program(py::handle program, AttentionParams& p, std::vector<MaskStep>& steps,
                              bool packed = false) {
  if (program.is_none()) return;
  int64_t count = 0;
  const int32_t* words = read_words("mask_program", program, &count);
  read_mask_program(words, count, p, steps, packed);
}

// A number for each query, contiguous; `kept` owns it.
inline double* read_rows(const char* name, py::handle from, Sizes sizes, py::object* kept) {
  return static_cast<double*>(read_flat(name, from, DType::f64, sizes, kept));
}

// The gradient of sinks, new, of their sizes, from those of the sequences [B, Hq]: the sum over the
// sequences that share one, in their order.
inline py::object summed_sink_gradients(const std::vector<double>& of_sequences, int64_t batch,
                                        py::handle sinks) {
  const TensorView x = view_of("sinks", sinks);
  const int64_t entries = x.rank == 2 ? x.size[0] : 1, heads = x.size[x.rank - 1];
  void* data;
  py::object made = x.rank == 2 ? new_zeros(x.dtype, {entries, heads}, &data)
                                : new_zeros(x.dtype, {heads}, &data);
  const int64_t sharing = entries == 1 ? batch : 1;
  for (int64_t n = 0; n < entries * heads; ++n) {
    double sum = 0;
    for (int64_t b = 0; b < sharing; ++b) sum += of_sequences[static_cast<size_t>(b * heads + n)];
    if (x.dtype == DType::f64)
      static_cast<double*>(data)[n] = sum;
    else
      static_cast<float*>(data)[n] = static_cast<float>(sum);
  }
  return made;
}

}  // namespace fastattn
