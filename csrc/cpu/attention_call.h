// Helpers of the CPU's bindings of attention, in addition to csrc/attention_arguments.h.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "../attention_arguments.h"
#include "isa.h"
#include "kernel_table.h"
#include "mask_program.h"

namespace fastattn {

// Whether products of float32 may round their factors to 16 bits. Only tiles do, so calls on
// vectors do not pay for reading PyTorch's settings.
inline bool reduces(const AttentionParams& p) {
  return p.dtype == DType::f32 && pays_on_tiles(p.dtype, p.Lq, p.Lk, p.D) && on_tiles(DType::f32) &&
         may_round();
}

// Reads a mask program into `steps`, to which p then points; None leaves p without one.
inline void read_mask_program(py::handle program, AttentionParams& p, std::vector<MaskStep>& steps,
                              bool packed = false) {
  if (program.is_none()) return;
  int64_t count = 0;
  const int32_t* words = read_words("mask_program", program, &count);
  read_mask_program(words, count, p, steps, packed);
}

constexpr double kZero = 0;

// A missing gradient becomes a zero that kernels can read.
inline void complete(Tensor4& grad_out) {
  if (grad_out.data == nullptr) grad_out.data = const_cast<double*>(&kZero);
}

// The gradient of a sink from rows without keys, whose lse is the sink.
inline double from_rows_without_keys(const AttentionParams& p, int64_t b, int64_t h,
                                     const double* grad_lse, int64_t rows) {
  const int64_t at = b * p.sinks_stride[0] + h * p.sinks_stride[1];
  const double sink = p.dtype == DType::f64 ? static_cast<const double*>(p.sinks)[at]
                                            : static_cast<const float*>(p.sinks)[at];
  const bool is_none = sink == -std::numeric_limits<double>::infinity();
  return is_none ? 0.0 : std::accumulate(grad_lse, grad_lse + rows, 0.0);
}

// Allocates the gradient of sinks: the gradients of the sequences, [B, Hq], summed in order over
// the sequences that share a sink.
inline py::object summed_sink_gradients(const std::vector<double>& of_sequences, int64_t batch,
                                        py::handle sinks) {
  const TensorView x = view_of("sinks", sinks);
  const int64_t entries = x.rank == 2 ? x.size[0] : 1, heads = x.size[x.rank - 1];
  void* data;
  py::object result = new_zeros(x.dtype, x.sizes(), &data);
  const int64_t sharing = entries == 1 ? batch : 1;
  for (int64_t n = 0; n < entries * heads; ++n) {
    double sum = 0;
    for (int64_t b = 0; b < sharing; ++b) sum += of_sequences[static_cast<size_t>(b * heads + n)];
    if (x.dtype == DType::f64)
      static_cast<double*>(data)[n] = sum;
    else
      static_cast<float*>(data)[n] = static_cast<float>(sum);
  }
  return result;
}

// The terms of relative attention: kernels read a bucket for each distance, up to `farthest`, and a
// row for each bucket.
template <class Tensors>
void read_content_terms(AttentionParams& p, const Tensors& x, Layout layout, int64_t farthest) {
  const auto read = [&](const char* name, py::handle from, Tensor4& to) {
    if (from.is_none()) return;
    const TensorView view = view_of(name, from);
    expect(view.rank == 4 && view.size[2] > 0,
           std::string(name) + " must have four dimensions and at least one bucket");
    expect(p.buckets == 0 || view.size[2] == p.buckets, [&] {
      return "key_table must have " + std::to_string(p.buckets) + " buckets, as query_table, got " +
             std::to_string(view.size[2]);
    });
    p.buckets = view.size[2];
    expect_broadcast(name, view, {p.B, p.Hq, p.buckets, p.D}, to.stride);
    expect_dtype(name, view, {p.dtype});
    to.data = view.data;
  };
  read("query_table", x.query_table, p.query_table);
  read("key_table", x.key_table, p.key_table);
  expect(x.position_query.is_none() == x.query_table.is_none(),
         "position_query and query_table must be given together");
  p.position_query = read_rows_if_given("position_query", x.position_query, layout, p.dtype,
                                        {p.B, p.Hq, p.Lq, p.D});
  if (p.buckets == 0) return;
  expect(!x.distance_buckets.is_none(), "distance_buckets must be given with a table");
  int64_t count = 0;
  const int32_t* const b = read_words("distance_buckets", x.distance_buckets, &count);
  p.farthest = count / 2, p.distance_buckets = b;
  const int64_t needed = p.Lq > 0 && p.Lk > 0 ? farthest : 0;
  expect(count % 2 == 1 && p.farthest >= needed, [&] {
    return "distance_buckets must have an odd number of elements, at least " +
           std::to_string(2 * needed + 1) + ", got " + std::to_string(count);
  });
  for (int64_t n = 0; n < count; ++n) {
    expect(0 <= b[n] && b[n] < p.buckets, [&] {
      return "the elements of distance_buckets must be at least 0 and less than " +
             std::to_string(p.buckets) + ", got " + std::to_string(b[n]);
    });
    if (n > 0) p.bucket_step = std::max<int64_t>(p.bucket_step, std::abs(b[n] - b[n - 1]));
  }
}

// The gradients of the terms, made by a backward pass: of the position queries, and the sums of
// each table, [B, Hq, buckets, D].
struct TermGradients {
  py::object of_position_query = none(), of_queries, of_keys;

  // Makes the gradients of position_query and of the tables; zeroed: rows without keys stay 0.
  template <class Tensors>
  TermGradients(AttentionParams& p, const Tensors& x, Layout layout, bool zeroed) {
    const Sizes table{p.B, p.Hq, p.buckets, p.D};
    if (!x.query_table.is_none()) {
      of_position_query = new_rows(x.position_query, p.D, layout, &p.grad_position_query, zeroed);
      of_queries = new_zeros(accumulator(p.dtype), table, &p.grad_query_table);
    }
    if (!x.key_table.is_none()) of_keys = new_zeros(accumulator(p.dtype), table, &p.grad_key_table);
  }

  // After the kernel: the gradients, from place `at` on.
  template <class Tensors>
  void place(py::tuple& gradients, size_t at, const Tensors& x) const {
    gradients[at] = of_position_query;
    if (of_queries) gradients[at + 1] = gradient_of(x.query_table, of_queries);
    if (of_keys) gradients[at + 2] = gradient_of(x.key_table, of_keys);
  }
};

}  // namespace fastattn
