// Attention with a cache as Python calls it: tensors in, tensors out.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../options.h"
#include "attention_call.h"
#include "cache_call.h"
#include "kernel_table.h"
#include "mask_program.h"
#include "memory.h"
#include "sequences.h"

namespace fastattn {
namespace {

// Query rows of a key head up to which the kernel on vectors is the fastest: for more rows, pages
// are gathered, and quantised rows are widened.
constexpr int64_t kMostRows = 32, kMostQuantisedRows = 64;
constexpr int64_t kMostIntegerRows = 512;  // of int8, multiplied as integers
constexpr int64_t kMostQuantisedQueries = 32;

// Copies the rows of each sequence in order, times their scales, to new tensors
// [B, Hkv, longest, D] and Dv, which the call then reads. Rows outside of the sequences are not
// written.
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
  const bool right = without_gil([&] { return kernels(p.dtype).gather_rows(p); });
  if (!right) complain_of_scales(t, p.Hkv, p.key_scales, p.value_scales, p.float8);
  all.k = {p.keys, {p.Hkv * p.N * p.D, p.N * p.D, p.D, 1}};
  all.v = {p.values, {p.Hkv * p.N * p.Dv, p.N * p.Dv, p.Dv, 1}};
  all.k_scales = all.v_scales = {};
  t.cache.quantised = false;
  t.block_table = nullptr, t.k_batch = nullptr;
}

bool heads_decode_on_tiles(int dtype, int64_t heads, int64_t kv_heads, int64_t queries,
                           bool masked_or_biased) {
  if (masked_or_biased) return false;
  AttentionParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.Hq = heads, p.Hkv = kv_heads, p.Lq = queries, p.D = p.Dv = 1;
  return decodes_on_tiles(p);
}

// Whether a decoding call runs on tiles.
bool runs_on_tiles(const AttentionParams& p, bool masked_or_biased) {
  return heads_decode_on_tiles(static_cast<int>(p.dtype), p.Hq, p.Hkv, p.Lq, masked_or_biased);
}

// Whether the columns of both caches are contiguous, as the kernels read them.
bool has_dense_rows(const AttentionParams& p) { return p.k.stride[3] == 1 && p.v.stride[3] == 1; }

// Whether the kernel on vectors is the fastest for up to `most_rows` query rows of a key head.
bool reads_in_place(const AttentionParams& p, int64_t most_rows) {
  return has_dense_rows(p) && p.Lq * p.Hq / std::max(p.Hkv, int64_t{1}) <= most_rows &&
         std::max(p.D, p.Dv) <= kWidestCached;
}

// Whether quantised rows are read in place; otherwise they are widened first.
bool reads_quantised(const CacheCall& t) {
  const AttentionParams& p = t.attention;
  if (p.dtype == DType::f64 || p.Lq > kMostQuantisedQueries) return false;
  const bool integers = t.cache.dtype == kInt8 && element_bytes(p.dtype) == 2 &&
                        kernels(DType::f32).multiplies_integers(p.D);
  return reads_in_place(p, integers ? kMostIntegerRows : kMostQuantisedRows);
}

// The queries in the dtype that a quantised cache is multiplied in, float32 or wider for rows that
// are read in place. Other rows are widened to that dtype, too.
py::object widen(CacheCall& t, py::handle query) {
  AttentionParams& p = t.attention;
  const bool in_place = reads_quantised(t), sixteen_bits = element_bytes(p.dtype) == 2;
  auto wide = py::reinterpret_borrow<py::object>(query);
  // bfloat16 has the range of the scales; its kernels are faster than float32 kernels.
  if (sixteen_bits && (in_place || p.dtype == DType::f16)) {
    wide = query.attr("float")();
    p.dtype = DType::f32;
  }
  p.sixteen_bits = sixteen_bits && in_place;
  if (!in_place) gather(t, p.dtype);
  return wide;
}

// Whether the query heads of a key head, one query each, are stacked as the queries of one head,
// where they fill the lanes of a panel.
bool stacks(const CacheCall& t) {
  const AttentionParams& p = t.attention;
  if (t.cache.quantised || p.Lq != 1 || p.alibi != nullptr || p.sinks != nullptr) return false;
  return !runs_on_tiles(p, false) &&
         p.Hq > kernels(p.dtype).most_streamed_rows(p.dtype) * std::max(p.Hkv, int64_t{1});
}

// Turns heads into queries at one position, and a window into the first visible key.
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

// Returns (out, lse).
py::tuple decode_attention(const DecodeTensors& x, py::handle options) {
  CacheCall t{};
  AttentionParams& p = t.attention;
  read_score_options(Named(options), p);
  p.threads = threads();
  read_queries(p, x.query, [&] { read_cache(t, x); });
  check_cache(t);

  const DType dtype = p.dtype;
  // float32 where the rows of a quantised cache are read in place, and so is out then.
  py::object wide = py::reinterpret_borrow<py::object>(x.query);
  if (t.cache.quantised) {
    wide = widen(t, x.query);
    p.q = operand_of(view_of("query", wide));
  }
  read_biases(p, x, &t.table);
  const bool of_one_head = !x.mask_program.is_none() || !x.relative_bias.is_none();
  const bool stacked = !of_one_head && stacks(t);
  const bool on_tiles = has_dense_rows(p) && runs_on_tiles(p, of_one_head);
  if (t.block_table != nullptr && !t.cache.quantised && !on_tiles &&
      (stacked || !reads_in_place(p, kMostRows)))
    gather(t, p.dtype);
  check_table(t);
  read_mask_program(x.mask_program, p, t.steps);

  const py::object out = new_rows(wide, p.Dv, dense, &p.out),
                   lse = new_buffer(DType::f64, {p.B, p.Hq, p.Lq}, &p.lse);
  if (stacked) stack(t);
  t.bottom_right = true;
  t.lse_stride = p.Lq;
  int wrong_scales = 0;
  p.wrong_scales = &wrong_scales;
  t.sequence_order = order_of_work(t);
  t.order = t.sequence_order.data();
  without_gil([&] { kernels(p.dtype).attention_sequences_forward(t); });
  if (wrong_scales != 0) complain_of_scales(t, p.Hkv, p.k_scales, p.v_scales, p.float8);
  return py::make_tuple(p.dtype == dtype ? out : converted_to(out, dtype), lse);
}

}  // namespace
}  // namespace fastattn
