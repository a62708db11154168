// Attention over packed sequences as Python calls it: tensors in, tensors out.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../options.h"
#include "attention_call.h"
#include "kernel_table.h"
#include "mask_program.h"
#include "sequences.h"

namespace fastattn {
namespace {

// The starts must begin with 0, not decrease, and end within the rows.
void check_starts(const int64_t* starts, int64_t count, int64_t rows, const std::string& name) {
  expect(starts[0] == 0, name + " must begin with 0, got " + std::to_string(starts[0]));
  for (int64_t b = 0; b < count; ++b)
    expect(starts[b] <= starts[b + 1], name + " must not decrease, got " +
                                           std::to_string(starts[b]) + " before " +
                                           std::to_string(starts[b + 1]));
  expect(starts[count] <= rows, name + " must end within the " + std::to_string(rows) +
                                    " rows there are, got " + std::to_string(starts[count]));
}

// cu_seqlens of int32 or int64
void read_starts(const char* name, py::handle from, int64_t rows, std::vector<int64_t>& to) {
  const TensorView x = view_of(name, from);
  expect_dtype(name, x, {kInt32, kInt64});
  expect(x.rank == 1 && x.size[0] > 0, std::string(name) + " must be [B + 1]");
  to.resize(static_cast<size_t>(x.size[0]));
  for (int64_t n = 0; n < x.size[0]; ++n)
    to[static_cast<size_t>(n)] = x.dtype == kInt64
                                     ? static_cast<const int64_t*>(x.data)[n * x.stride[0]]
                                     : static_cast<const int32_t*>(x.data)[n * x.stride[0]];
  check_starts(to.data(), x.size[0] - 1, rows, name);
}

// The arguments of a call, and the memory that they point to.
struct PackedCall : SequencesParams {
  std::vector<int64_t> starts[2], sequence_order;
  std::vector<MaskStep> steps;
  std::vector<double> sink_gradients;  // [B, Hq]
  py::object table, owners[3];         // see read_biases and read_results
  std::vector<int64_t> table_starts;   // [B], see SequencesParams::bias_starts

  // Reads the tensors and the options of a call with packed sequences.
  template <class Tensors>
  PackedCall(py::handle options, const Tensors& from) : SequencesParams{} {
    AttentionParams& p = attention;
    read_varlen_options(Named(options), p, *this);
    read_attention(p, from, packed);
    read_starts("cu_seqlens_q", from.cu_seqlens_q, p.Lq, starts[0]);
    read_starts("cu_seqlens_k", from.cu_seqlens_k, p.Lk, starts[1]);
    expect(starts[0].size() == starts[1].size(),
           "cu_seqlens_q and cu_seqlens_k must have the same length");
    int64_t longest = 1;
    for (const auto& side : starts)
      for (size_t b = 0; b + 1 < side.size(); ++b)
        longest = std::max(longest, side[b + 1] - side[b]);
    read_content_terms(p, from, packed, longest - 1);  // all sequences share the tables
    p.B = static_cast<int64_t>(starts[0].size()) - 1;
    q_starts = starts[0].data(), k_starts = starts[1].data();
    lse_stride = p.Lq;
    p.threads = threads();
    p.reduced = reduces(p);
    read_biases(p, from, &table);
    p.seed = read_seed(from.seed);
    check_table(*this);
    read_mask_program(from.mask_program, p, steps, true);
    sequence_order = order_of_work(*this);
    order = sequence_order.data();
  }
};

// Fills the rows after the last sequence: out is 0 there, and lse -inf.
void fill_rest(const PackedCall& t) {
  const AttentionParams& p = t.attention;
  const int64_t end = t.starts[0].back();
  const auto bytes = static_cast<size_t>(element_bytes(p.dtype) * p.Dv);
  for (int64_t i = end; i < p.Lq; ++i)
    for (int64_t h = 0; h < p.Hq; ++h) {
      if (bytes > 0)
        std::memset(static_cast<char*>(p.out.data) +
                        element_bytes(p.dtype) * (i * p.out.stride[2] + h * p.out.stride[1]),
                    0, bytes);
      p.lse[h * p.Lq + i] = -std::numeric_limits<double>::infinity();
    }
}

// Returns (out, lse).
py::tuple varlen_attention(const PackedTensors& x, py::handle options) {
  PackedCall t(options, x);
  AttentionParams& p = t.attention;
  const py::object out = new_rows(x.query, p.Dv, packed, &p.out),
                   lse = new_buffer(DType::f64, {p.Hq, p.Lq}, &p.lse);
  without_gil([&] {
    kernels(p.dtype).attention_sequences_forward(t);
    fill_rest(t);
  });
  return py::make_tuple(out, lse);
}

// Whether the kernels leave rows of the gradients unwritten: after the last sequence, and of
// sequences without queries or without keys.
bool has_gaps(const PackedCall& t) {
  const AttentionParams& p = t.attention;
  bool gaps = p.Hq == 0 || t.starts[0].back() < p.Lq || t.starts[1].back() < p.Lk;
  for (int64_t b = 0; b < p.B && !gaps; ++b) {
    const auto [queries, keys] = lengths_of(t, b);
    gaps = queries == 0 || keys == 0;
  }
  return gaps;
}

// Adds the gradients of sinks by sequences without keys, which no kernel visits.
void add_sequences_without_keys(PackedCall& t) {
  const AttentionParams& p = t.attention;
  for (int64_t b = 0; b < p.B; ++b) {
    const auto [queries, keys] = lengths_of(t, b);
    for (int64_t h = 0; keys == 0 && h < p.Hq; ++h)
      t.sink_gradients[static_cast<size_t>(b * p.Hq + h)] +=
          from_rows_without_keys(p, b, h, p.grad_lse + h * p.Lq + t.q_starts[b], queries);
  }
}

// Lays out the gradients of relative_bias, one table per sequence. A table has only the distances
// below the length of its sequence, so all together take O(Tq + Tk) memory. Returns the number of
// their elements.
int64_t place_tables(PackedCall& t) {
  int64_t end = 0;
  for (int64_t b = 0; b < t.attention.B; ++b) {
    const auto [queries, keys] = lengths_of(t, b);
    t.table_starts.push_back(end);
    end += t.attention.Hq * (2 * std::max({queries, keys, int64_t{1}}) - 1);
  }
  t.bias_starts = t.table_starts.data();
  return end;
}

// Sums the tables of all sequences to the gradient of relative_bias, [1, Hq, size].
template <class T>
py::object summed_tables(const PackedCall& t, const std::vector<T>& parts, DType dtype) {
  const AttentionParams& p = t.attention;
  const int64_t size = p.relative_bias_size;
  std::vector<double> sum(static_cast<size_t>(p.Hq * size));
  for (int64_t b = 0; b < p.B; ++b) {
    const auto [queries, keys] = lengths_of(t, b);
    const int64_t side = std::max({queries, keys, int64_t{1}}), width = 2 * side - 1;
    for (int64_t h = 0; h < p.Hq; ++h)
      for (int64_t d = 0; d < width; ++d)
        sum[static_cast<size_t>(h * size + size / 2 - side + 1 + d)] += static_cast<double>(
            parts[static_cast<size_t>(t.table_starts[static_cast<size_t>(b)] + h * width + d)]);
  }
  void* data;
  py::object gradients = new_zeros(dtype, {1, p.Hq, size}, &data);
  std::transform(sum.begin(), sum.end(), static_cast<T*>(data),
                 [](double x) { return static_cast<T>(x); });
  return gradients;
}

// Returns the gradients in the order of the primitive; T is the type of their sums.
template <class T>
py::tuple run_backward(PackedCall& t, const PackedGradTensors& x) {
  AttentionParams& p = t.attention;
  py::tuple gradients = new_row_gradients(p, x, packed, has_gaps(t), 5);
  const TermGradients terms(p, x, packed, has_gaps(t));
  if (p.sinks != nullptr) {
    t.sink_gradients.resize(static_cast<size_t>(p.B * p.Hq));
    p.grad_sinks = t.sink_gradients.data();
  }
  std::vector<T> tables;
  if (p.relative_bias != nullptr) {
    tables.resize(static_cast<size_t>(place_tables(t)));
    p.grad_relative_bias = tables.data();
  }
  without_gil([&] { kernels(p.dtype).attention_sequences_backward(t); });
  if (p.sinks != nullptr) {
    if (p.grad_lse != nullptr) add_sequences_without_keys(t);
    gradients[3] = summed_sink_gradients(t.sink_gradients, p.B, x.sinks);
  }
  terms.place(gradients, 5, x);
  if (p.relative_bias != nullptr) gradients[4] = summed_tables(t, tables, accumulator(p.dtype));
  return gradients;
}

// The gradients, new: of query, key, value, and of sinks, relative_bias, position_query,
// query_table and key_table, or None without them.
py::tuple varlen_attention_backward(const PackedGradTensors& x, py::handle options) {
  PackedCall t(options, x);
  AttentionParams& p = t.attention;
  read_results(p, x, packed, 1, {p.Hq, p.Lq}, t.owners);
  complete(p.grad_out);
  return p.dtype == DType::f64 ? run_backward<double>(t, x) : run_backward<float>(t, x);
}

}  // namespace
}  // namespace fastattn
