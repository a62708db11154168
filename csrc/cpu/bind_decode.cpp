// Python's view of attention with a cache, and of appending to it.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "mask_program.h"
#include "memory.h"
#include "sdpa_arguments.h"
#include "sequences.h"

namespace py = pybind11;

namespace fastattn {
namespace {

void check_cache(const SequencesParams& t, int64_t entries) {
  const AttentionParams& all = t.attention;
  expect(t.block_table == nullptr || t.page_size > 0 || all.Lk == 0, "pages must have rows");
  for (int64_t b = 0; b < all.B; ++b) {
    const int64_t length = t.k_lengths[b];
    expect(length >= 0 && length <= all.Lk,
           "cache_seqlens must be between 0 and the " + std::to_string(all.Lk) +
               " keys of the cache, got " + std::to_string(length));
    if (t.k_begins != nullptr)
      expect(t.k_begins[b] >= 0 && t.k_begins[b] <= length,
             "cache_leftpad must be between 0 and the " + std::to_string(length) +
                 " keys of the sequence, got " + std::to_string(t.k_begins[b]));
    if (t.block_table != nullptr) {
      for (int64_t n = 0; n * t.page_size < length; ++n) {
        const int32_t page = t.block_table[b * t.block_table_stride + n];
        expect(page >= 0 && page < entries, "block_table must name one of the " +
                                                std::to_string(entries) + " pages, got " +
                                                std::to_string(page));
      }
    } else {
      const int64_t entry = t.k_batch == nullptr ? b : t.k_batch[b];
      expect(entry >= 0 && entry < entries,
             "cache_batch_idx must name one of the " + std::to_string(entries) +
                 " entries of the cache, got " + std::to_string(entry));
    }
  }
}

// Where row j of sequence b is.
CacheRow row_of(const SequencesParams& t, int64_t b, int64_t j) {
  if (t.block_table != nullptr)
    return {t.block_table[b * t.block_table_stride + j / t.page_size], j % t.page_size};
  return {t.k_batch == nullptr ? b : t.k_batch[b], j};
}

// cache: the addresses of lengths [B], begins [B] or 0, entries [B] or 0, and block_table or 0, its row
// stride, and page_size.
void read_cache(const py::dict& cache, SequencesParams& t) {
  using P = SequencesParams;
  static const auto fields = std::make_tuple(
      field("lengths", &P::k_lengths), field("begins", &P::k_begins), field("entries", &P::k_batch),
      field("block_table", &P::block_table), field("block_table_stride", &P::block_table_stride),
      field("page_size", &P::page_size));
  named(cache).read(t, fields);
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
          expect(scale > 0 && scale <= most,
                 std::string(x == &key_scales ? "key_scales" : "value_scales") +
                     " must be positive and " +
                     (float8 ? "at most 1.3e36 for e4m3, got " : "finite, got ") +
                     std::string(py::str(py::float_(scale))) + " for row " + std::to_string(j) +
                     " of sequence " + std::to_string(b));
        }
      }
  }
  throw std::logic_error("fastattn._cpu: a scale was wrong while it was read");
}

// sizes: as those of attention, Lk bounds the keys of a sequence; operands: see optional_arguments and
// read_mask_program; cache_entries: entries or pages.
void decode_attention(int dtype, int threads, const py::tuple& sizes, uintptr_t q,
                      const py::tuple& q_stride, uintptr_t k, const py::tuple& k_stride,
                      uintptr_t v, const py::tuple& v_stride, uintptr_t out,
                      const py::tuple& out_stride, uintptr_t lse, const py::object& options,
                      const py::dict& operands, const py::dict& cache, int64_t cache_entries) {
  SequencesParams t{};
  AttentionParams& all = t.attention;
  all = common_arguments(dtype, py::none(), threads, sizes, q, q_stride, k, k_stride, v, v_stride,
                         out, out_stride, lse);
  read_decode_options(named(options), all);
  optional_arguments(all, operands);
  t.bottom_right = true;
  t.lse_stride = all.Lq;
  read_cache(cache, t);
  check_cache(t, cache_entries);
  check_table(t);
  std::vector<MaskStep> steps;
  read_mask_program(named(operands), all, steps);
  using P = AttentionParams;
  static const auto scales =
      std::make_tuple(field("key_scales", &P::k_scales), field("value_scales", &P::v_scales),
                      field("float8", &P::float8), field("sixteen_bits", &P::sixteen_bits));
  named(operands).read_given(all, scales);
  int wrong_scales = 0;
  all.wrong_scales = &wrong_scales;
  if (t.block_table != nullptr)
    expect(all.k.stride[3] == 1 && all.v.stride[3] == 1 &&
               (decodes_on_tiles(all) || (all.D <= kWidestCached && all.Dv <= kWidestCached)),
           "pages must have dense rows of at most " + std::to_string(kWidestCached) + " elements");
  const auto order = order_of_work(t);
  t.order = order.data();
  {
    py::gil_scoped_release release;
    kernels(all.dtype).attention_sequences_forward(t);
  }
  if (wrong_scales != 0) complain_of_scales(t, all.Hkv, all.k_scales, all.v_scales, all.float8);
}

bool heads_decode_on_tiles(int dtype, int64_t heads, int64_t kv_heads, int64_t queries,
                           bool masked_or_biased) {
  if (masked_or_biased) return false;
  AttentionParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.Hq = heads, p.Hkv = kv_heads, p.Lq = queries, p.D = p.Dv = 1;
  return decodes_on_tiles(p);
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
      expect(at >= 0 && at < p.rotary_rows, "rotary_cos must have a row for each position, got " +
                                                std::to_string(p.rotary_rows) +
                                                " rows and position " + std::to_string(at));
      positions[static_cast<size_t>(b * p.L + i)] = at;
    }
  p.positions = positions.data();
}

// sizes: (B, Hq, Hkv, Lq, rows, keys of the cache, D, Dv, entries of the cache); operands: key, value,
// the caches, and key_scales, value_scales (unless values are columns of the keys) and float8 of quantised
// ones; rotary: empty, or the rest of AppendParams; lengths of the cache are those without
// the rows.
void append_to_cache(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                     const py::dict& operands, const py::dict& rotary, const py::dict& cache) {
  using P = AppendParams;
  static const auto fields =
      std::make_tuple(field("key", &P::key), field("value", &P::value),
                      field("key_cache", &P::key_cache), field("value_cache", &P::value_cache));
  static const auto of_rotation = std::make_tuple(
      field("rotary_pairs", &P::rotary_pairs), field("query", &P::query),
      field("rotated", &P::rotated), field("rotary_cos", &P::rotary_cos),
      field("rotary_sin", &P::rotary_sin), field("tables_are_f32", &P::tables_are_f32),
      field("rotary_rows", &P::rotary_rows), field("positions", &P::positions));
  int64_t n[9];
  integers(sizes, n);
  AppendParams p{};
  p.dtype = static_cast<DType>(dtype), p.threads = threads;
  p.B = n[0], p.Hq = n[1], p.Hkv = n[2], p.Lq = n[3], p.L = n[4], p.D = n[6], p.Dv = n[7];
  SequencesParams t{};
  t.attention.B = p.B;
  t.attention.Lk = n[5];
  read_cache(cache, t);
  std::vector<int64_t> lengths(t.k_lengths, t.k_lengths + p.B);
  for (int64_t& length : lengths) {
    expect(length >= 0 && length <= n[5] - p.L,
           "cache_seqlens must be at least 0 and, plus " + std::to_string(p.L) +
               " to append, at most " + std::to_string(n[5]) + ", got " + std::to_string(length));
    length += p.L;
  }
  t.k_lengths = lengths.data();
  check_cache(t, n[8]);
  check_appended_rows(t, p.L);
  static const auto scales =
      std::make_tuple(field("key_scales", &P::key_scales), field("value_scales", &P::value_scales),
                      field("float8", &P::float8));
  named(operands).read(p, fields);
  named(operands).read_given(p, scales);
  std::vector<int64_t> positions;
  if (!rotary.empty()) {
    read_append_options(named(options), p);
    named(rotary).read(p, of_rotation);
    expect(p.Lq <= p.L, "each query must be of a new token");
    read_positions(p, t, positions);
  }
  const std::vector<CacheRow> rows = rows_of(t, p.L);
  p.rows = rows.data();
  static_cast<CachePlaces&>(p) = places_of(t);
  std::vector<float> new_scales(
      p.key_scales.data == nullptr ? 0 : static_cast<size_t>(2 * p.B * p.L * p.Hkv));
  p.new_scales = new_scales.data();
  AppendFault fault;
  {
    py::gil_scoped_release release;
    fault = kernels(p.dtype).append_to_cache(p);
  }
  const std::string range =
      std::string(" must be finite to be quantised, and its elements at most ") +
      (p.float8 ? "5.9e38" : "4.3e40") + ", got inf, NaN or more";
  expect(fault != AppendFault::key, "key" + range);
  expect(fault != AppendFault::value, "value" + range);
  if (fault != AppendFault::scale) return;
  for (int64_t& length : lengths) length -= p.L;
  complain_of_scales(t, p.Hkv, p.key_scales, p.value_scales, p.float8);
}

// sizes: (B, Hkv, keys of the cache, D, Dv, entries of the cache, rows of the results); operands: the
// caches, the scales and float8 of quantised ones, and the addresses of keys and values.
void gather_rows(int dtype, int threads, const py::tuple& sizes, const py::dict& operands,
                 const py::dict& cache) {
  using P = GatherParams;
  static const auto fields =
      std::make_tuple(field("key_cache", &P::key_cache), field("value_cache", &P::value_cache),
                      field("keys", &P::keys), field("values", &P::values));
  static const auto scales =
      std::make_tuple(field("key_scales", &P::key_scales), field("value_scales", &P::value_scales),
                      field("float8", &P::float8));
  int64_t n[7];
  integers(sizes, n);
  GatherParams p{};
  p.dtype = static_cast<DType>(dtype), p.threads = threads;
  p.B = n[0], p.Hkv = n[1], p.D = n[3], p.Dv = n[4], p.N = n[6];
  SequencesParams t{};
  t.attention.B = p.B, t.attention.Lk = n[2];
  read_cache(cache, t);
  check_cache(t, n[5]);
  for (int64_t b = 0; b < p.B; ++b)
    expect(t.k_lengths[b] <= p.N, "the result must have a row for each of a sequence");
  static_cast<CachePlaces&>(p) = places_of(t);
  named(operands).read(p, fields);
  named(operands).read_given(p, scales);
  int64_t rows = 0;
  for (int64_t b = 0; b < p.B; ++b) rows += t.k_lengths[b];
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
}

}  // namespace

void bind_decode(py::module_& m) {
  m.def("decode_attention", &decode_attention);
  m.def("decodes_on_tiles", &heads_decode_on_tiles);
  m.def("multiplies_integers",
        [](int64_t columns) { return kernels(DType::f32).multiplies_integers(columns); });
  m.def("most_streamed_rows", [](int dtype) {
    const DType type = static_cast<DType>(dtype);
    return kernels(type).most_streamed_rows(type);
  });
  m.def("append_to_cache", &append_to_cache);
  m.def("gather_rows", &gather_rows);
}

}  // namespace fastattn
