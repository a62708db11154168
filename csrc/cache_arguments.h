// Reading a cache of keys and values, and the place of each sequence in it, for the bindings of
// both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "attention_arguments.h"

namespace fastattn {

// Tensors with a cache have key_cache [E, Hkv, N, D], value_cache [E, Hkv, N, Dv] and cache_seqlens
// [B] int64; or None: block_table [B, P] int32, cache_batch_idx and cache_leftpad [B] int64,
// key_scales and value_scales [E, Hkv, N] float32.
struct DecodeTensors {
  // query [B, Hq, Lq, D]
  FASTATTN_TENSORS(query, key_cache, value_cache, cache_seqlens, block_table, cache_batch_idx,
                   alibi_slopes, sinks, relative_bias, mask_program, cache_leftpad, key_scales,
                   value_scales)
};

struct AppendTensors {
  // key [B, Hkv, L, D], value [B, Hkv, L, Dv], rotary_cos and rotary_sin [M, R / 2],
  // rotary_positions [B, L] int64, query [B, Hq, Lq, D]
  FASTATTN_TENSORS(key_cache, value_cache, key, value, cache_seqlens, block_table, cache_batch_idx,
                   rotary_cos, rotary_sin, rotary_positions, query, key_scales, value_scales,
                   cache_leftpad)
};

// The rows of a cache and its index tensors; a null pointer stands for None.
struct Cache {
  DType dtype;            // of the rows
  int64_t entries, rows;  // the number of entries or pages, and the rows in each
  bool quantised;
  Tensor4 key_scales, value_scales;
  const int64_t *lengths, *chosen, *begins;
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  py::object copies[4];
};

// [E, Hkv, N]
inline Tensor4 read_scales(const char* name, py::handle from, const Sizes& sizes) {
  const TensorView x = read_sizes(name, from, DType::f32, sizes);
  return {x.data, {x.stride[0], x.stride[1], x.stride[2], 1}};
}

// Also fills the sizes of the call and, for a cache without scales, its operands. The call already
// has its batch and dtype.
template <class Tensors>
void read_cache(Cache& to, AttentionParams& p, const Tensors& from) {
  const TensorView k = view_of("key_cache", from.key_cache),
                   v = view_of("value_cache", from.value_cache);
  to.quantised = !from.key_scales.is_none();
  if (to.quantised)
    expect_dtype("key_cache", k, {kInt8, kFloat8});
  else
    expect_dtype("key_cache", k, {p.dtype});
  to.dtype = k.dtype, to.entries = k.size[0], to.rows = k.size[2];
  p.Hkv = k.size[1], p.Lk = to.rows, p.D = k.size[3], p.Dv = v.size[3];
  expect_sizes("key_cache", k, k.dtype, {to.entries, p.Hkv, to.rows, p.D});
  expect_sizes("value_cache", v, k.dtype, {to.entries, p.Hkv, to.rows, p.Dv});
  p.k = operand_of(k), p.v = operand_of(v);
  if (to.quantised) {
    const Sizes sizes = {to.entries, p.Hkv, to.rows};
    to.key_scales = read_scales("key_scales", from.key_scales, sizes);
    to.value_scales = read_scales("value_scales", from.value_scales, sizes);
  }
  to.lengths = static_cast<const int64_t*>(
      read_flat("cache_seqlens", from.cache_seqlens, kInt64, {p.B}, &to.copies[0]));
  const auto indices = [&](const char* name, py::handle x, py::object* copy) {
    return static_cast<const int64_t*>(read_flat_if_given(name, x, kInt64, {p.B}, copy));
  };
  to.chosen = indices("cache_batch_idx", from.cache_batch_idx, &to.copies[1]);
  to.begins = indices("cache_leftpad", from.cache_leftpad, &to.copies[2]);
  if (from.block_table.is_none()) return;
  static constexpr int32_t kNoPage = 0;
  TensorView table = view_of("block_table", from.block_table);
  expect_sizes("block_table", table, kInt32, {p.B, table.size[1]});
  if (table.size[1] > 1 && table.stride[1] != 1)
    table = view_of("block_table", to.copies[3] = contiguous(from.block_table));
  to.block_table = table.data != nullptr ? static_cast<const int32_t*>(table.data) : &kNoPage;
  to.block_table_stride = table.stride[0];
  p.Lk *= table.size[1];  // the keys that a row of the table has room for
}

// Reads the dtype and the sizes of the queries, then calls `read` for the cache.
template <class Read>
void read_queries(AttentionParams& p, py::handle query, Read read) {
  const TensorView q = view_of("query", query);
  expect_dtype("query", q, kFloats);
  p.dtype = q.dtype, p.B = q.size[0], p.Hq = q.size[1], p.Lq = q.size[2];
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, q.size[3]});  // of four dimensions
  read();
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, p.D});
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
  p.q = operand_of(q);
}

}  // namespace fastattn
