// Reading a cache of keys and values, and where the rows of each sequence are in it, for the bindings of
// both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "operands.h"

namespace fastattn {

struct CacheTensors {
  py::handle keys, values;              // [E, Hkv, N, D] and [E, Hkv, N, Dv]
  py::handle lengths;                   // [B] int64
  py::handle block_table;               // [B, P] int32 or None
  py::handle entries;                   // [B] int64 or None
  py::handle leftpad;                   // [B] int64 or None
  py::handle key_scales, value_scales;  // [E, Hkv, N] float32, or None
};

// The same as addresses; a null pointer is none.
struct Cache {
  DType dtype;          // of the rows
  int64_t entries = 0;  // or pages
  int64_t heads = 0, rows = 0, width = 0, value_width = 0;
  int64_t capacity = 0;  // the keys that an entry, or a row of the block table, has room for
  bool quantised = false;
  Tensor4 keys, values, key_scales, value_scales;
  const int64_t *lengths = nullptr, *chosen = nullptr, *begins = nullptr;
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  py::object copies[4];
};

// [E, Hkv, N]
inline Tensor4 read_scales(const char* name, py::handle from, Sizes sizes) {
  const TensorView x = read_sizes(name, from, DType::f32, sizes);
  return {x.data, {x.stride[0], x.stride[1], x.stride[2], 1}};
}

// dtype: of a cache without scales
inline void read_cache(Cache& to, const CacheTensors& from, DType dtype, int64_t batch) {
  const TensorView k = view_of("key_cache", from.keys), v = view_of("value_cache", from.values);
  to.quantised = !from.key_scales.is_none();
  if (to.quantised)
    expect_dtype("key_cache", k, {kInt8, kFloat8});
  else
    expect_dtype("key_cache", k, {dtype});
  to.dtype = k.dtype;
  to.entries = k.size[0], to.heads = k.size[1], to.rows = k.size[2];
  to.width = k.size[3], to.value_width = v.size[3];
  expect_sizes("key_cache", k, k.dtype, {to.entries, to.heads, to.rows, to.width});
  expect_sizes("value_cache", v, k.dtype, {to.entries, to.heads, to.rows, to.value_width});
  to.keys = operand_of(k), to.values = operand_of(v);
  if (to.quantised) {
    const Sizes sizes = {to.entries, to.heads, to.rows};
    to.key_scales = read_scales("key_scales", from.key_scales, sizes);
    to.value_scales = read_scales("value_scales", from.value_scales, sizes);
  }
  const auto indices = [&](const char* name, py::handle x, py::object* copy) {
    return static_cast<const int64_t*>(read_flat(name, x, kInt64, {batch}, copy));
  };
  to.lengths = indices("cache_seqlens", from.lengths, &to.copies[0]);
  if (!from.entries.is_none()) to.chosen = indices("cache_batch_idx", from.entries, &to.copies[1]);
  if (!from.leftpad.is_none()) to.begins = indices("cache_leftpad", from.leftpad, &to.copies[2]);
  to.capacity = to.rows;
  if (from.block_table.is_none()) return;
  static constexpr int32_t kNoPage = 0;
  TensorView table = view_of("block_table", from.block_table);
  expect_sizes("block_table", table, kInt32, {batch, table.size[1]});
  if (table.size[1] > 1 && table.stride[1] != 1)
    table = view_of("block_table", to.copies[3] = contiguous(from.block_table));
  to.block_table = table.data != nullptr ? static_cast<const int32_t*>(table.data) : &kNoPage;
  to.block_table_stride = table.stride[0];
  to.capacity *= table.size[1];
}

}  // namespace fastattn
