// Decoding on a GPU as Python calls it: tensors in, tensors out.
#include <algorithm>

#include "../cache_arguments.h"
#include "binding.h"

namespace fastattn {
namespace cuda {
namespace {

// A sequence is split between blocks of threads at multiples of kSplitKeys; not tuned. With more
// than kMostRows query rows per key head there is enough work without a split.
constexpr int64_t kSplitKeys = 256, kMostRows = 64;

// The arguments of a call, and the memory that they point to.
struct DecodeCall : DecodeArguments {
  Cache cache;
  py::object table, mask, parts[2];
};

// Reads the cache of a call whose batch and dtype are known.
template <class Tensors>
void read_cache(DecodeCall& p, const Tensors& from) {
  Cache& c = p.cache;
  read_cache(c, p, from);
  p.lengths = c.lengths, p.entries = c.chosen;
  p.block_table = c.block_table, p.block_table_stride = c.block_table_stride;
  p.page_size = c.rows, p.cache_entries = c.entries;
}

// Returns (out, lse).
py::tuple decode(const DecodeTensors& x, py::handle options, Stream stream) {
  DecodeCall p{};
  read_score_options(Named(options), p);
  read_queries(p, x.query, [&] { read_cache(p, x); });
  read_biases(p, x, &p.table);
  expect_middle(p);
  read_mask_program(p, x.mask_program, false, &p.mask);
  const bool divided = p.Lq * p.Hq <= kMostRows * p.Hkv;
  p.split_keys = divided ? kSplitKeys : std::max(p.Lk, int64_t{1});
  p.splits = (p.Lk + p.split_keys - 1) / p.split_keys;
  p.parts[0] = new_floats({p.B, p.Hq, p.Lq, p.splits, p.Dv}, &p.part_sums);
  p.parts[1] = new_floats({p.B, p.Hq, p.Lq, p.splits, 2}, &p.part_stats);
  const py::object out = new_rows(x.query, p.Dv, dense, &p.out),
                   lse = new_result(DType::f64, {p.B, p.Hq, p.Lq}, &p.lse);
  p.scale_float = static_cast<float>(p.scale);
  p.softcap_float = static_cast<float>(p.softcap);
  p.aligned = are_aligned(p.dtype, {p.q, p.k, p.v});
  with_element(p.dtype, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    decode_attention(element, p, stream);
  });
  return py::make_tuple(out, lse);
}

// append_to_cache: writes new keys and values into the caches, in place.
py::object append(const AppendTensors& x, py::handle, Stream stream) {
  DecodeCall p{};
  const TensorView k = view_of("key", x.key);
  p.dtype = k.dtype, p.B = k.size[0], p.Lq = k.size[2];
  read_cache(p, x);
  p.Hq = p.Hkv;
  expect_sizes("key", k, p.dtype, {p.B, p.Hkv, p.Lq, p.D});
  p.new_k = operand_of(k);
  p.new_v = operand_of(read_sizes("value", x.value, p.dtype, {p.B, p.Hkv, p.Lq, p.Dv}));
  with_element(p.dtype, [&](auto* element) { append_to_cache(element, p, stream); });
  return py::none();
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
