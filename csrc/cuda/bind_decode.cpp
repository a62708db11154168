// Decoding on a GPU as Python calls it: tensors in, tensors out.
#include <algorithm>

#include "../attention_arguments.h"
#include "../cache_arguments.h"
#include "../relative_bias_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// A sequence is split between blocks of threads at multiples of kSplitKeys; chosen without a
// measurement. With more than kMostRows query rows per key head there is enough work without a split.
constexpr int64_t kSplitKeys = 256, kMostRows = 64;

// The arguments of a call, and what they point to.
struct DecodeCall : DecodeArguments {
  Cache cache;
  py::object table, mask, parts[2];
};

// The call has a batch and a dtype.
void read_cache(DecodeCall& p, const CacheTensors& from) {
  Cache& c = p.cache;
  read_cache(c, from, p.dtype, p.B);
  p.Hkv = c.heads, p.Lk = c.capacity, p.D = c.width, p.Dv = c.value_width;
  p.k = c.keys, p.v = c.values;
  p.lengths = c.lengths, p.entries = c.chosen;
  p.block_table = c.block_table, p.block_table_stride = c.block_table_stride;
  p.page_size = c.rows, p.cache_entries = c.entries;
}

// (out, lse), new.
py::tuple decode(uintptr_t stream, const py::object& options, py::handle query,
                 py::handle key_cache, py::handle value_cache, py::handle cache_seqlens,
                 py::handle block_table, py::handle cache_batch_idx, py::handle alibi_slopes,
                 py::handle sinks, py::handle relative_bias, py::handle mask_program) {
  DecodeCall p{};
  const py::none none;
  read_decode_options(Named(options), p);
  const TensorView q = view_of("query", query);
  expect_dtype("query", q, kFloats);
  p.dtype = q.dtype, p.B = q.size[0], p.Hq = q.size[1], p.Lq = q.size[2];
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, q.size[3]});  // of four dimensions
  read_cache(
      p, {key_cache, value_cache, cache_seqlens, block_table, cache_batch_idx, none, none, none});
  expect_sizes("query", q, p.dtype, {p.B, p.Hq, p.Lq, p.D});
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
  p.q = operand_of(q);
  int64_t positions = 0;
  read_biases(p, {none, alibi_slopes, none, sinks, relative_bias, none, mask_program}, &positions,
              &p.table);
  expect_middle(p);
  read_mask_program(p, mask_program, false, &p.mask);
  const bool divided = p.Lq * p.Hq <= kMostRows * p.Hkv;
  p.split_keys = divided ? kSplitKeys : std::max(p.Lk, int64_t{1});
  p.splits = (p.Lk + p.split_keys - 1) / p.split_keys;
  p.parts[0] = new_floats({p.B, p.Hq, p.Lq, p.splits, p.Dv}, &p.part_sums);
  p.parts[1] = new_floats({p.B, p.Hq, p.Lq, p.splits, 2}, &p.part_stats);
  const py::object out = new_rows(query, p.Dv, &p.out);
  void* data;
  const py::object lse = new_result(DType::f64, {p.B, p.Hq, p.Lq}, &data);
  p.lse = static_cast<double*>(data);
  p.scale_float = static_cast<float>(p.scale);
  p.softcap_float = static_cast<float>(p.softcap);
  const int64_t bytes = element_bytes(p.dtype);
  p.aligned = is_aligned(p.q, bytes) && is_aligned(p.k, bytes) && is_aligned(p.v, bytes);
  with_element(p.dtype, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    decode_attention(element, p, stream);
  });
  return py::make_tuple(out, lse);
}

void append(uintptr_t stream, py::handle key_cache, py::handle value_cache, py::handle key,
            py::handle value, py::handle cache_seqlens, py::handle block_table,
            py::handle cache_batch_idx) {
  DecodeCall p{};
  const py::none none;
  const TensorView k = view_of("key", key);
  p.dtype = k.dtype, p.B = k.size[0], p.Lq = k.size[2];
  read_cache(
      p, {key_cache, value_cache, cache_seqlens, block_table, cache_batch_idx, none, none, none});
  p.Hq = p.Hkv;
  expect_sizes("key", k, p.dtype, {p.B, p.Hkv, p.Lq, p.D});
  p.new_k = operand_of(k);
  p.new_v = operand_of(read_sizes("value", value, p.dtype, {p.B, p.Hkv, p.Lq, p.Dv}));
  with_element(p.dtype, [&](auto* element) { append_to_cache(element, p, stream); });
}

}  // namespace

void bind_decode(py::module_& m) {
  define(m, "decode_attention", &decode);
  define(m, "append_to_cache", &append);
}

}  // namespace cuda
}  // namespace fastattn
