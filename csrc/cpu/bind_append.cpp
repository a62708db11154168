// Appending to a cache as Python calls it: tensors in, tensors out.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../options.h"
#include "cache_call.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

// The destination of each new row; the lengths include the new rows.
std::vector<CacheRow> rows_of(const SequencesParams& t, int64_t count) {
  const int64_t batch = t.attention.B;
  std::vector<CacheRow> rows(static_cast<size_t>(batch * count));
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = t.k_lengths[b] - count + i;
      rows[static_cast<size_t>(b * count + i)] = row_of(t, b, at);
    }
  return rows;
}

// No row of a page may be appended to twice, by two sequences or by two positions of one sequence.
void check_appended_rows(const SequencesParams& t, int64_t count) {
  if (t.block_table == nullptr || count == 0) return;
  struct Rows {
    int64_t page, begin, end;
  };
  std::vector<Rows> written;
  for (int64_t b = 0; b < t.attention.B; ++b) {
    const int64_t end = t.k_lengths[b], begin = end - count;
    for (int64_t n = begin / t.page_size; n * t.page_size < end; ++n) {
      const int64_t first = n * t.page_size;
      written.push_back({t.block_table[b * t.block_table_stride + n],
                         std::max(begin - first, int64_t(0)), std::min(end - first, t.page_size)});
    }
  }
  std::sort(written.begin(), written.end(), [](const Rows& a, const Rows& b) {
    return a.page != b.page ? a.page < b.page : a.begin < b.begin;
  });
  const auto twice = std::adjacent_find(
      written.begin(), written.end(),
      [](const Rows& a, const Rows& b) { return a.page == b.page && b.begin < a.end; });
  if (twice != written.end())
    throw std::invalid_argument("block_table must not append twice to one row, got page " +
                                std::to_string(twice->page) + " twice");
}

// The positions of the new tokens: rotary_positions, or by default their rows in the cache.
void read_positions(AppendParams& p, const SequencesParams& t, std::vector<int64_t>& positions) {
  positions.resize(static_cast<size_t>(p.B * p.L));
  for (int64_t b = 0; b < p.B; ++b)
    for (int64_t i = 0; i < p.L; ++i) {
      const int64_t at =
          p.positions == nullptr ? t.k_lengths[b] - p.L + i : p.positions[b * p.L + i];
      expect(at >= 0 && at < p.rotary_rows, [&] {
        return "rotary_cos must have a row for each position, got " +
               std::to_string(p.rotary_rows) + " rows and position " + std::to_string(at);
      });
      positions[static_cast<size_t>(b * p.L + i)] = at;
    }
  p.positions = positions.data();
}

// Reads the tables of angles and the queries that they rotate; allocates and returns the result.
py::object read_rotation(AppendParams& p, const AppendTensors& from) {
  const TensorView cos = view_of("rotary_cos", from.rotary_cos), q = view_of("query", from.query);
  expect_dtype("rotary_cos", cos, {p.dtype, DType::f32});
  p.rotary_rows = cos.size[0], p.rotary_pairs = cos.size[1];
  const auto table = [](const TensorView& x) {
    return Tensor4{x.data, {0, 0, x.stride[0], x.stride[1]}};
  };
  expect_sizes("rotary_cos", cos, cos.dtype, {p.rotary_rows, p.rotary_pairs});
  p.rotary_cos = table(cos);
  p.rotary_sin =
      table(read_sizes("rotary_sin", from.rotary_sin, cos.dtype, {p.rotary_rows, p.rotary_pairs}));
  p.tables_are_f32 = cos.dtype == DType::f32;
  p.Hq = q.size[1], p.Lq = q.size[2];
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, p.D});
  p.query = operand_of(q);
  expect(p.Lq <= p.L, "each query must be of a new token");
  return new_rows(from.query, p.D, dense, &p.rotated);
}

// Returns the rotated queries, or None without tables.
py::object append_to_cache(const AppendTensors& x, py::handle options) {
  const TensorView k = view_of("key", x.key);
  expect_dtype("key", k, kFloats);
  expect_sizes("key", k, k.dtype, {k.size[0], k.size[1], k.size[2], k.size[3]});  // of four
  CacheCall t{};
  AttentionParams& all = t.attention;
  all.dtype = k.dtype, all.B = k.size[0];
  read_cache(t, x);
  AppendParams p{};
  p.dtype = k.dtype, p.threads = threads();
  p.B = all.B, p.Hkv = all.Hkv, p.L = k.size[2], p.D = all.D, p.Dv = all.Dv;
  expect_sizes("key", k, p.dtype, {p.B, p.Hkv, p.L, p.D});
  p.key = operand_of(k);
  p.value = operand_of(read_sizes("value", x.value, p.dtype, {p.B, p.Hkv, p.L, p.Dv}));
  p.key_cache = all.k, p.value_cache = all.v;
  p.key_scales = all.k_scales, p.value_scales = all.v_scales, p.float8 = all.float8;
  const bool one_scale =
      p.key_scales.data == p.value_scales.data &&
      std::equal(p.key_scales.stride, p.key_scales.stride + 3, p.value_scales.stride);
  if (one_scale) p.value_scales = {};  // values are columns of the keys

  std::vector<int64_t> lengths(t.k_lengths, t.k_lengths + p.B);  // with the new rows
  for (int64_t& length : lengths) {
    expect(length >= 0 && length <= all.Lk - p.L, [&] {
      return "cache_seqlens must be at least 0 and, plus " + std::to_string(p.L) +
             " to append, at most " + std::to_string(all.Lk) + ", got " + std::to_string(length);
    });
    length += p.L;
  }
  t.k_lengths = lengths.data();
  check_cache(t);
  check_appended_rows(t, p.L);
  py::object rotated = none(), owner;
  std::vector<int64_t> positions;
  if (!x.rotary_cos.is_none()) {
    Named(options).read<&AppendOptions::rotary_interleaved>("rotary_interleaved", p);
    rotated = read_rotation(p, x);
    p.positions = static_cast<const int64_t*>(
        read_flat_if_given("rotary_positions", x.rotary_positions, kInt64, {p.B, p.L}, &owner));
    read_positions(p, t, positions);
  }
  const std::vector<CacheRow> rows = rows_of(t, p.L);
  p.rows = rows.data();
  static_cast<CachePlaces&>(p) = places_of(t);
  std::vector<float> new_scales(t.cache.quantised ? static_cast<size_t>(2 * p.B * p.L * p.Hkv) : 0);
  p.new_scales = new_scales.data();
  const AppendFault fault = without_gil([&] { return kernels(p.dtype).append_to_cache(p); });
  const auto range = [&] {
    return std::string(" must be finite to be quantised, and its elements at most ") +
           (p.float8 ? "5.9e38" : "4.3e40") + ", got inf, NaN or more";
  };
  expect(fault != AppendFault::key, [&] { return "key" + range(); });
  expect(fault != AppendFault::value, [&] { return "value" + range(); });
  if (fault == AppendFault::scale) {
    for (int64_t& length : lengths) length -= p.L;
    complain_of_scales(t, p.Hkv, p.key_scales, p.value_scales, p.float8);
  }
  return rotated;
}

}  // namespace
}  // namespace fastattn
