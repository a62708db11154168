// Attention with a cache, and appending to it, as Python calls them: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_call.h"
#include "kernel_table.h"
#include "mask_program.h"
#include "memory.h"
#include "named.h"
#include "sequences.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Query rows of a key head up to which the kernel on vectors is the fastest: for more rows, pages are
// gathered, and quantised rows are widened.
constexpr int64_t kMostRows = 32, kMostQuantisedRows = 64;
constexpr int64_t kMostIntegerRows = 512;  // of int8, multiplied as integers
constexpr int64_t kMostQuantisedQueries = 32;

// The tensors of a cache, and of where the rows of each sequence are.
struct CacheTensors {
  py::handle keys, values;              // [E, Hkv, N, D] and [E, Hkv, N, Dv]
  py::handle lengths;                   // [B] int64
  py::handle block_table;               // [B, P] int32 or None
  py::handle entries;                   // [B] int64 or None
  py::handle leftpad;                   // [B] int64 or None
  py::handle key_scales, value_scales;  // [E, Hkv, N] float32, or None
};

// The arguments of a call, and the memory that they point to. Of a cache with scales, k and v are
// quantised.
struct CacheCall : SequencesParams {
  bool quantised;
  DType stored;     // of the rows of the cache
  int64_t entries;  // of the cache, or pages
  std::vector<int64_t> begins, sequence_order;
  std::vector<MaskStep> steps;
  py::object copies[4], gathered[2], table;
};

// [E, Hkv, N]
Tensor4 read_scales(const char* name, py::handle from, Sizes sizes) {
  const TensorView x = read_sizes(name, from, DType::f32, sizes);
  return {x.data, {x.stride[0], x.stride[1], x.stride[2], 1}};
}

// Fills the sizes and the operands of the cache; the call has a batch and a dtype.
void read_cache(CacheCall& t, const CacheTensors& from) {
  AttentionParams& p = t.attention;
  const TensorView k = view_of("key_cache", from.keys), v = view_of("value_cache", from.values);
  t.quantised = !from.key_scales.is_none();
  if (t.quantised)
    expect_dtype("key_cache", k, {kInt8, kFloat8});
  else
    expect_dtype("key_cache", k, {p.dtype});
  t.stored = k.dtype, t.entries = k.size[0];
  p.Hkv = k.size[1], p.D = k.size[3], p.Dv = v.size[3];
  const int64_t rows = k.size[2];
  expect_sizes("key_cache", k, k.dtype, {t.entries, p.Hkv, rows, p.D});  // of four dimensions
  expect_sizes("value_cache", v, k.dtype, {t.entries, p.Hkv, rows, p.Dv});
  p.k = operand_of(k), p.v = operand_of(v);
  if (t.quantised) {
    p.k_scales = read_scales("key_scales", from.key_scales, {t.entries, p.Hkv, rows});
    p.v_scales = read_scales("value_scales", from.value_scales, {t.entries, p.Hkv, rows});
    p.float8 = k.dtype == kFloat8;
  }
  const auto indices = [&](const char* name, py::handle x, py::object* copy) {
    return static_cast<const int64_t*>(read_flat(name, x, kInt64, {p.B}, copy));
  };
  t.k_lengths = indices("cache_seqlens", from.lengths, &t.copies[0]);
  if (!from.entries.is_none()) t.k_batch = indices("cache_batch_idx", from.entries, &t.copies[1]);
  if (!from.leftpad.is_none()) t.k_begins = indices("cache_leftpad", from.leftpad, &t.copies[2]);
  p.Lk = rows;
  if (from.block_table.is_none()) return;
  static constexpr int32_t kNoPage = 0;
  TensorView table = view_of("block_table", from.block_table);
  expect_sizes("block_table", table, kInt32, {p.B, table.size[1]});
  if (table.size[1] > 1 && table.stride[1] != 1)
    table = view_of("block_table", t.copies[3] = contiguous(from.block_table));
  t.block_table = table.size[1] > 0 ? static_cast<const int32_t*>(table.data) : &kNoPage;
  t.block_table_stride = table.stride[0];
  t.page_size = rows;
  p.Lk *= table.size[1];
}

void check_cache(const CacheCall& t) {
  const AttentionParams& all = t.attention;
  expect(t.block_table == nullptr || t.page_size > 0 || all.Lk == 0, "pages must have rows");
  for (int64_t b = 0; b < all.B; ++b) {
    const int64_t length = t.k_lengths[b];
    expect(length >= 0 && length <= all.Lk, [&] {
      return "cache_seqlens must be between 0 and the " + std::to_string(all.Lk) +
             " keys of the cache, got " + std::to_string(length);
    });
    if (t.k_begins != nullptr)
      expect(t.k_begins[b] >= 0 && t.k_begins[b] <= length, [&] {
        return "cache_leftpad must be between 0 and the " + std::to_string(length) +
               " keys of the sequence, got " + std::to_string(t.k_begins[b]);
      });
    if (t.block_table != nullptr) {
      for (int64_t n = 0; n * t.page_size < length; ++n) {
        const int32_t page = t.block_table[b * t.block_table_stride + n];
        expect(page >= 0 && page < t.entries, [&] {
          return "block_table must name one of the " + std::to_string(t.entries) + " pages, got " +
                 std::to_string(page);
        });
      }
    } else {
      const int64_t entry = t.k_batch == nullptr ? b : t.k_batch[b];
      expect(entry >= 0 && entry < t.entries, [&] {
        return "cache_batch_idx must name one of the " + std::to_string(t.entries) +
               " entries of the cache, got " + std::to_string(entry);
      });
    }
  }
}

// Where row j of sequence b is.
CacheRow row_of(const SequencesParams& t, int64_t b, int64_t j) {
  if (t.block_table != nullptr)
    return {t.block_table[b * t.block_table_stride + j / t.page_size], j % t.page_size};
  return {t.k_batch == nullptr ? b : t.k_batch[b], j};
}

CachePlaces places_of(const SequencesParams& t) {
  return {t.k_lengths, t.k_begins, t.k_batch, t.block_table, t.block_table_stride, t.page_size};
}

// Names the first scale that is not positive and finite, or with e4m3 times its unit; lengths are those of
// the rows to look at.
[[noreturn]] void complain_of_scales(const SequencesParams& t, int64_t heads,
                                     const Tensor4& key_scales, const Tensor4& value_scales,
                                     bool float8) {
  const float most = std::numeric_limits<float>::max() / (float8 ? 256 : 1);
  for (const Tensor4* x : {&key_scales, &value_scales}) {
    if (x->data == nullptr) continue;
    for (int64_t b = 0; b < t.attention.B; ++b)
      for (int64_t j = t.k_begins == nullptr ? 0 : t.k_begins[b]; j < t.k_lengths[b]; ++j) {
        const CacheRow row = row_of(t, b, j);
        for (int64_t h = 0; h < heads; ++h) {
          const float scale = static_cast<const float*>(
              x->data)[row.entry * x->stride[0] + h * x->stride[1] + row.row * x->stride[2]];
          expect(scale > 0 && scale <= most, [&] {
            return std::string(x == &key_scales ? "key_scales" : "value_scales") +
                   " must be positive and " +
                   (float8 ? "at most 1.3e36 for e4m3, got " : "finite, got ") +
                   std::string(py::str(py::float_(scale))) + " for row " + std::to_string(j) +
                   " of sequence " + std::to_string(b);
          });
        }
      }
  }
  throw std::logic_error("fastattn._cpu: a scale was wrong while it was read");
}

// The rows of each sequence in order, times their scales, [B, Hkv, longest, D] and Dv, new; the rows
// outside of the sequences are not written. The call then reads these.
void gather(CacheCall& t, DType dtype) {
  AttentionParams& all = t.attention;
  GatherParams p{};
  static_cast<CachePlaces&>(p) = places_of(t);
  p.dtype = dtype, p.threads = all.threads, p.float8 = all.float8;
  p.B = all.B, p.Hkv = all.Hkv, p.D = all.D, p.Dv = all.Dv;
  p.key_cache = all.k, p.value_cache = all.v;
  p.key_scales = all.k_scales, p.value_scales = all.v_scales;
  int64_t rows = 0;
  for (int64_t b = 0; b < p.B; ++b) {
    rows += t.k_lengths[b];
    p.N = std::max(p.N, t.k_lengths[b]);
  }
  t.gathered[0] = new_result(dtype, {p.B, p.Hkv, p.N, p.D}, &p.keys);
  t.gathered[1] = new_result(dtype, {p.B, p.Hkv, p.N, p.Dv}, &p.values);
  if (4 * rows >= 3 * p.B * p.N) {  // most of the results is written
    const int64_t column_bytes = p.B * p.Hkv * p.N * element_bytes(p.dtype);
    expect_to_fill(p.keys, static_cast<size_t>(column_bytes * p.D));
    expect_to_fill(p.values, static_cast<size_t>(column_bytes * p.Dv));
  }
  bool right;
  {
    py::gil_scoped_release release;
    right = kernels(p.dtype).gather_rows(p);
  }
  if (!right) complain_of_scales(t, p.Hkv, p.key_scales, p.value_scales, p.float8);
  all.k = {p.keys, {p.Hkv * p.N * p.D, p.N * p.D, p.D, 1}};
  all.v = {p.values, {p.Hkv * p.N * p.Dv, p.N * p.Dv, p.Dv, 1}};
  all.k_scales = all.v_scales = {};
  t.quantised = false, t.stored = dtype;
  t.block_table = nullptr, t.k_batch = nullptr, t.entries = p.B;
}

py::tuple gather_rows(int dtype, py::handle key_cache, py::handle value_cache,
                      py::handle key_scales, py::handle value_scales, py::handle lengths,
                      py::handle block_table, py::handle entries, py::handle leftpad) {
  CacheCall t{};
  t.attention.dtype = static_cast<DType>(dtype), t.attention.threads = threads();
  t.attention.B = view_of("cache_seqlens", lengths).size[0];
  read_cache(t, {key_cache, value_cache, lengths, block_table, entries, leftpad, key_scales,
                 value_scales});
  check_cache(t);
  gather(t, t.attention.dtype);
  return py::make_tuple(t.gathered[0], t.gathered[1]);
}

bool heads_decode_on_tiles(int dtype, int64_t heads, int64_t kv_heads, int64_t queries,
                           bool masked_or_biased) {
  if (masked_or_biased) return false;
  AttentionParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.Hq = heads, p.Hkv = kv_heads, p.Lq = queries, p.D = p.Dv = 1;
  return decodes_on_tiles(p);
}

bool runs_on_tiles(const AttentionParams& p, bool masked_or_biased) {
  return heads_decode_on_tiles(static_cast<int>(p.dtype), p.Hq, p.Hkv, p.Lq, masked_or_biased);
}

bool has_dense_rows(const AttentionParams& p) { return p.k.stride[3] == 1 && p.v.stride[3] == 1; }

// Whether the kernel on vectors is the fastest for these rows, however they are stored.
bool reads_in_place(const AttentionParams& p, int64_t most_rows) {
  return has_dense_rows(p) && p.Lq * p.Hq / std::max(p.Hkv, int64_t{1}) <= most_rows &&
         std::max(p.D, p.Dv) <= kWidestCached;
}

// Of quantised rows: otherwise they are widened first.
bool reads_quantised(const CacheCall& t) {
  const AttentionParams& p = t.attention;
  if (p.dtype == DType::f64 || p.Lq > kMostQuantisedQueries) return false;
  const bool integers = t.stored == kInt8 && element_bytes(p.dtype) == 2 &&
                        kernels(DType::f32).multiplies_integers(p.D);
  return reads_in_place(p, integers ? kMostIntegerRows : kMostQuantisedRows);
}

// Whether the heads of a key head, one query each, are faster as the queries of one head: they then fill
// the lanes of a panel.
bool stacks(const CacheCall& t) {
  const AttentionParams& p = t.attention;
  if (t.quantised || p.Lq != 1 || p.alibi != nullptr || p.sinks != nullptr) return false;
  return !runs_on_tiles(p, false) &&
         p.Hq > kernels(p.dtype).most_streamed_rows(p.dtype) * std::max(p.Hkv, int64_t{1});
}

// The heads as queries at one position, and a window as the first key that they see.
void stack(CacheCall& t) {
  AttentionParams& p = t.attention;
  const int64_t group = p.Hq / p.Hkv;
  for (Tensor4* x : {&p.q, &p.out}) x->stride[2] = x->stride[1], x->stride[1] *= group;
  p.Hq = p.Hkv, p.Lq = group;
  if (p.window_left >= 0) {
    for (int64_t b = 0; b < p.B; ++b)
      t.begins.push_back(std::max(t.k_lengths[b] - 1 - p.window_left,
                                  t.k_begins == nullptr ? int64_t{0} : t.k_begins[b]));
    t.k_begins = t.begins.data();
  }
  p.window_left = p.window_right = -1;
}

// (out, lse), new. The queries of a quantised cache become float32 where its rows are read in place, and
// so is out then.
py::tuple decode_attention(const py::object& options, py::handle query, py::handle key_cache,
                           py::handle value_cache, py::handle cache_seqlens, py::handle block_table,
                           py::handle cache_batch_idx, py::handle alibi_slopes, py::handle sinks,
                           py::handle relative_bias, py::handle mask_program,
                           py::handle cache_leftpad, py::handle key_scales,
                           py::handle value_scales) {
  CacheCall t{};
  AttentionParams& p = t.attention;
  read_decode_options(named(options), p);
  TensorView q = view_of("query", query);
  expect_dtype("query", q, {DType::f32, DType::f64, DType::bf16, DType::f16});
  p.dtype = q.dtype, p.threads = threads();
  p.B = q.size[0], p.Hq = q.size[1], p.Lq = q.size[2];
  read_cache(t, {key_cache, value_cache, cache_seqlens, block_table, cache_batch_idx, cache_leftpad,
                 key_scales, value_scales});
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, p.D});
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
  check_cache(t);

  py::object wide;  // the queries of a quantised cache
  if (t.quantised) {
    const bool in_place = reads_quantised(t);
    p.sixteen_bits = element_bytes(p.dtype) == 2;
    // bfloat16 has the range of the scales; its kernels are faster than those of float32.
    if (p.sixteen_bits && (in_place || p.dtype == DType::f16)) {
      wide = query.attr("float")();
      q = view_of("query", wide);
      p.dtype = DType::f32;
    }
    if (!in_place) gather(t, p.dtype), p.sixteen_bits = false;
  }
  const py::handle like = wide ? py::handle(wide) : query;
  p.q = operand_of(q);
  int64_t positions = 0;
  const py::none none;
  read_biases(p, {none, alibi_slopes, none, sinks, relative_bias, none, mask_program}, &positions,
              &t.table);
  const bool of_one_head = !mask_program.is_none() || !relative_bias.is_none();
  const bool stacked = !of_one_head && stacks(t);
  const bool on_tiles = has_dense_rows(p) && runs_on_tiles(p, of_one_head);
  if (t.block_table != nullptr && !t.quantised && !on_tiles &&
      (stacked || !reads_in_place(p, kMostRows)))
    gather(t, p.dtype);
  check_table(t);
  read_mask_program(mask_program, p, t.steps);

  const py::object out = new_rows(like, p.Dv, &p.out);
  void* data;
  const py::object lse = new_buffer(DType::f64, {p.B, p.Hq, p.Lq}, &data);
  p.lse = static_cast<double*>(data);
  if (stacked) stack(t);
  t.bottom_right = true;
  t.lse_stride = p.Lq;
  int wrong_scales = 0;
  p.wrong_scales = &wrong_scales;
  t.sequence_order = order_of_work(t);
  t.order = t.sequence_order.data();
  {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_sequences_forward(t);
  }
  if (wrong_scales != 0) complain_of_scales(t, p.Hkv, p.k_scales, p.v_scales, p.float8);
  return py::make_tuple(out, lse);
}

// Where the new rows of each sequence go; lengths are those with the new rows.
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

// Two sequences, or two places of one, must not append to the same row of a page: it would be written
// twice.
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

// The positions of the new tokens; without given ones, those of their rows.
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

// The tables of angles, and the queries that they rotate; the result is new.
py::object read_rotation(AppendParams& p, py::handle rotary_cos, py::handle rotary_sin,
                         py::handle query) {
  const TensorView cos = view_of("rotary_cos", rotary_cos), q = view_of("query", query);
  expect_dtype("rotary_cos", cos, {p.dtype, DType::f32});
  p.rotary_rows = cos.size[0], p.rotary_pairs = cos.size[1];
  const auto table = [](const TensorView& x) {
    return Tensor4{x.data, {0, 0, x.stride[0], x.stride[1]}};
  };
  expect_sizes("rotary_cos", cos, cos.dtype, {p.rotary_rows, p.rotary_pairs});
  p.rotary_cos = table(cos);
  p.rotary_sin =
      table(read_sizes("rotary_sin", rotary_sin, cos.dtype, {p.rotary_rows, p.rotary_pairs}));
  p.tables_are_f32 = cos.dtype == DType::f32;
  p.Hq = q.size[1], p.Lq = q.size[2];
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, p.D});
  p.query = operand_of(q);
  expect(p.Lq <= p.L, "each query must be of a new token");
  return new_rows(query, p.D, &p.rotated);
}

// The rotated queries, new, or None without tables.
py::object append_to_cache(const py::object& options, py::handle key_cache, py::handle value_cache,
                           py::handle key, py::handle value, py::handle cache_seqlens,
                           py::handle block_table, py::handle cache_batch_idx,
                           py::handle rotary_cos, py::handle rotary_sin,
                           py::handle rotary_positions, py::handle query, py::handle key_scales,
                           py::handle value_scales, py::handle cache_leftpad) {
  const TensorView k = view_of("key", key);
  expect_dtype("key", k, {DType::f32, DType::f64, DType::bf16, DType::f16});
  CacheCall t{};
  AttentionParams& all = t.attention;
  all.dtype = k.dtype, all.B = k.size[0];
  read_cache(t, {key_cache, value_cache, cache_seqlens, block_table, cache_batch_idx, cache_leftpad,
                 key_scales, value_scales});
  AppendParams p{};
  p.dtype = k.dtype, p.threads = threads();
  p.B = all.B, p.Hkv = all.Hkv, p.L = k.size[2], p.D = all.D, p.Dv = all.Dv;
  expect_sizes("key", k, p.dtype, {p.B, p.Hkv, p.L, p.D});
  p.key = operand_of(k);
  p.value = operand_of(read_sizes("value", value, p.dtype, {p.B, p.Hkv, p.L, p.Dv}));
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
  py::object rotated = py::none(), kept;
  std::vector<int64_t> positions;
  if (!rotary_cos.is_none()) {
    read_append_options(named(options), p);
    rotated = read_rotation(p, rotary_cos, rotary_sin, query);
    if (!rotary_positions.is_none())
      p.positions = static_cast<const int64_t*>(
          read_flat("rotary_positions", rotary_positions, kInt64, {p.B, p.L}, &kept));
    read_positions(p, t, positions);
  }
  const std::vector<CacheRow> rows = rows_of(t, p.L);
  p.rows = rows.data();
  static_cast<CachePlaces&>(p) = places_of(t);
  std::vector<float> new_scales(t.quantised ? static_cast<size_t>(2 * p.B * p.L * p.Hkv) : 0);
  p.new_scales = new_scales.data();
  AppendFault fault;
  {
    py::gil_scoped_release release;
    fault = kernels(p.dtype).append_to_cache(p);
  }
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

void bind_decode(py::module_& m) {
  m.def("decode_attention", &decode_attention);
  m.def("decodes_on_tiles", &heads_decode_on_tiles);
  m.def("append_to_cache", &append_to_cache);
  m.def("gather_rows", &gather_rows);
}

}  // namespace fastattn
