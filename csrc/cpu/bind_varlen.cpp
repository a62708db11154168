// Attention over packed sequences as Python calls it: tensors in, tensors out.
#include <pybind11/pybind11.h>

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

namespace py = pybind11;

namespace fastattn {
namespace {

void check_starts(const int64_t* starts, int64_t count, int64_t rows, const std::string& name) {
  expect(starts[0] == 0, name + " must begin with 0, got " + std::to_string(starts[0]));
  for (int64_t b = 0; b < count; ++b)
    expect(starts[b] <= starts[b + 1], name + " must not decrease, got " +
                                           std::to_string(starts[b]) + " before " +
                                           std::to_string(starts[b + 1]));
  expect(starts[count] <= rows, name + " must end within the " + std::to_string(rows) +
                                    " rows there are, got " + std::to_string(starts[count]));
}

// The arguments of a call, and the memory that they point to.
struct PackedCall : SequencesParams {
  std::vector<int64_t> starts[2], sequence_order;
  std::vector<MaskStep> steps;
  std::vector<double> sink_gradients;  // [B, Hq]
  py::object table;                    // see read_biases
  std::vector<int64_t> table_starts;   // [B], see SequencesParams::bias_starts
};

// cu_seqlens of int32 or int64; `most`: None, or the length of the longest sequence.
void read_starts(const char* name, py::handle from, int64_t rows, py::handle most,
                 std::vector<int64_t>& to) {
  const TensorView x = view_of(name, from);
  expect_dtype(name, x, {kInt32, kInt64});
  expect(x.rank == 1 && x.size[0] > 0, std::string(name) + " must be [B + 1]");
  to.resize(static_cast<size_t>(x.size[0]));
  for (int64_t n = 0; n < x.size[0]; ++n)
    to[static_cast<size_t>(n)] = x.dtype == kInt64
                                     ? static_cast<const int64_t*>(x.data)[n * x.stride[0]]
                                     : static_cast<const int32_t*>(x.data)[n * x.stride[0]];
  check_starts(to.data(), x.size[0] - 1, rows, name);
  if (most.is_none()) return;
  const int64_t longest = integer(most.ptr());
  for (size_t b = 0; b + 1 < to.size(); ++b)
    expect(to[b + 1] - to[b] <= longest,
           std::string(name) + " has a sequence of more than " + std::to_string(longest) + " rows");
}

void read_packed_call(PackedCall& t, const py::object& options, py::handle query, py::handle key,
                      py::handle value, py::handle q_starts, py::handle k_starts,
                      const Biases& biases, py::handle most_queries, py::handle most_keys) {
  AttentionParams& p = t.attention;
  VarlenOptions asked;
  read_varlen_options(Named(options), asked);
  static_cast<AttentionOptions&>(p) = asked;
  t.bottom_right = asked.bottom_right;
  read_packed_attention(p, query, key, value);
  read_starts("cu_seqlens_q", q_starts, p.Lq, most_queries, t.starts[0]);
  read_starts("cu_seqlens_k", k_starts, p.Lk, most_keys, t.starts[1]);
  expect(t.starts[0].size() == t.starts[1].size(),
         "cu_seqlens_q and cu_seqlens_k must have the same length");
  p.B = static_cast<int64_t>(t.starts[0].size()) - 1;
  t.q_starts = t.starts[0].data(), t.k_starts = t.starts[1].data();
  t.lse_stride = p.Lq;
  p.threads = threads();
  p.reduced = reduces(p);
  int64_t positions = 0;
  read_biases(p, biases, &positions, &t.table);
  p.seed = read_seed(biases.seed);
  check_table(t);
  read_mask_program(biases.mask_program, p, t.steps, true);
  t.sequence_order = order_of_work(t);
  t.order = t.sequence_order.data();
}

// The rows after the last sequence: out is 0 there, and lse -inf.
void fill_rest(const PackedCall& t, const TensorView& out, double* lse) {
  const AttentionParams& p = t.attention;
  const int64_t end = t.starts[0].back();
  const auto bytes = static_cast<size_t>(element_bytes(p.dtype) * p.Dv);
  for (int64_t i = end; i < p.Lq; ++i)
    for (int64_t h = 0; h < p.Hq; ++h) {
      if (bytes > 0)
        std::memset(static_cast<char*>(out.data) +
                        element_bytes(p.dtype) * (i * out.stride[0] + h * out.stride[1]),
                    0, bytes);
      lse[h * p.Lq + i] = -std::numeric_limits<double>::infinity();
    }
}

// (out, lse), new.
py::tuple varlen_attention(const py::object& options, py::handle query, py::handle key,
                           py::handle value, py::handle q_starts, py::handle k_starts,
                           py::handle alibi_slopes, py::handle seed, py::handle sinks,
                           py::handle relative_bias, py::handle mask_program,
                           py::handle most_queries, py::handle most_keys) {
  PackedCall t{};
  AttentionParams& p = t.attention;
  const py::none none;
  read_packed_call(t, options, query, key, value, q_starts, k_starts,
                   {none, alibi_slopes, seed, sinks, relative_bias, none, mask_program},
                   most_queries, most_keys);
  TensorView of_out;
  const py::object out = new_rows(query, p.Dv, &of_out);
  p.out = packed_operand(of_out);
  void* data;
  const py::object lse = new_buffer(DType::f64, {p.Hq, p.Lq}, &data);
  p.lse = static_cast<double*>(data);
  {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_sequences_forward(t);
    fill_rest(t, of_out, p.lse);
  }
  return py::make_tuple(out, lse);
}

// Whether the kernels leave rows of the gradients unwritten: after the last sequence, and of sequences
// without queries or without keys.
bool has_gaps(const PackedCall& t) {
  const AttentionParams& p = t.attention;
  bool gaps = p.Hq == 0 || t.starts[0].back() < p.Lq || t.starts[1].back() < p.Lk;
  for (int64_t b = 0; b < p.B && !gaps; ++b) {
    const auto [queries, keys] = lengths_of(t, b);
    gaps = queries == 0 || keys == 0;
  }
  return gaps;
}

// The lse of a sequence without keys is the sink, which gets the gradients of its rows.
void add_sequences_without_keys(PackedCall& t) {
  const AttentionParams& p = t.attention;
  for (int64_t b = 0; b < p.B; ++b) {
    if (lengths_of(t, b).second > 0) continue;
    for (int64_t h = 0; h < p.Hq; ++h) {
      const int64_t at = b * p.sinks_stride[0] + h * p.sinks_stride[1];
      const double sink = p.dtype == DType::f64 ? static_cast<const double*>(p.sinks)[at]
                                                : static_cast<const float*>(p.sinks)[at];
      if (sink == -std::numeric_limits<double>::infinity()) continue;
      for (int64_t i = t.q_starts[b]; i < t.q_starts[b + 1]; ++i)
        t.sink_gradients[static_cast<size_t>(b * p.Hq + h)] += p.grad_lse[h * p.Lq + i];
    }
  }
}

// Where the gradients of the tables of each sequence are: one has the distances below its own length,
// so that their sum takes O(Tq + Tk) memory. Returns how many numbers they are.
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

// The gradient of a table [1, Hq, size], new, from those of its sequences.
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
  py::object made = new_zeros(dtype, {1, p.Hq, size}, &data);
  std::transform(sum.begin(), sum.end(), static_cast<T*>(data),
                 [](double x) { return static_cast<T>(x); });
  return made;
}

template <class T>
py::tuple derive(PackedCall& t, py::handle query, py::handle key, py::handle value,
                 py::handle sinks) {
  AttentionParams& p = t.attention;
  const bool gaps = has_gaps(t);
  const auto new_gradient = [&](py::handle of, int64_t width, Tensor4* to) {
    TensorView view;
    py::object made = new_rows(of, width, &view);
    if (gaps) made.attr("zero_")();
    *to = packed_operand(view);
    return made;
  };
  const py::object of_query = new_gradient(query, p.D, &p.grad_q),
                   of_key = new_gradient(key, p.D, &p.grad_k),
                   of_value = new_gradient(value, p.Dv, &p.grad_v);
  if (p.sinks != nullptr) {
    t.sink_gradients.resize(static_cast<size_t>(p.B * p.Hq));
    p.grad_sinks = t.sink_gradients.data();
  }
  std::vector<T> tables;
  if (p.relative_bias != nullptr) {
    tables.resize(static_cast<size_t>(place_tables(t)));
    p.grad_relative_bias = tables.data();
  }
  {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_sequences_backward(t);
  }
  py::object of_sinks = py::none(), of_table = py::none();
  if (p.sinks != nullptr) {
    if (p.grad_lse != nullptr) add_sequences_without_keys(t);
    of_sinks = summed_sink_gradients(t.sink_gradients, p.B, sinks);
  }
  if (p.relative_bias != nullptr) of_table = summed_tables(t, tables, accumulator(p.dtype));
  return py::make_tuple(of_query, of_key, of_value, of_sinks, of_table);
}

// The gradients, new: of query, key, value, and of sinks and relative_bias, or None without them.
py::tuple varlen_attention_backward(const py::object& options, py::handle grad_out,
                                    py::handle grad_lse, py::handle query, py::handle key,
                                    py::handle value, py::handle q_starts, py::handle k_starts,
                                    py::handle alibi_slopes, py::handle seed, py::handle out,
                                    py::handle lse, py::handle sinks, py::handle relative_bias,
                                    py::handle mask_program) {
  static constexpr double kZero = 0;
  PackedCall t{};
  AttentionParams& p = t.attention;
  const py::none none;
  read_packed_call(t, options, query, key, value, q_starts, k_starts,
                   {none, alibi_slopes, seed, sinks, relative_bias, none, mask_program}, none,
                   none);
  TensorView of_out = read_sizes("out", out, p.dtype, {p.Lq, p.Hq, p.Dv});
  py::object kept[3];
  if (of_out.stride[2] != 1) of_out = view_of("out", kept[0] = contiguous(out));
  p.out = packed_operand(of_out);
  p.grad_out.data = const_cast<double*>(&kZero);
  if (!grad_out.is_none())
    p.grad_out = packed_operand(read_sizes("grad_out", grad_out, p.dtype, {p.Lq, p.Hq, p.Dv}));
  if (!grad_lse.is_none()) p.grad_lse = read_rows("grad_lse", grad_lse, {p.Hq, p.Lq}, &kept[1]);
  p.lse = read_rows("lse", lse, {p.Hq, p.Lq}, &kept[2]);
  return p.dtype == DType::f64 ? derive<double>(t, query, key, value, sinks)
                               : derive<float>(t, query, key, value, sinks);
}

}  // namespace

void bind_varlen(py::module_& m) {
  m.def("varlen_attention", &varlen_attention);
  m.def("varlen_attention_backward", &varlen_attention_backward);
}

}  // namespace fastattn
