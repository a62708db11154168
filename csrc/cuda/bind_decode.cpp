// Python's view of decoding on a GPU.
#include "../relative_bias_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// sizes: (B, Hq, Hkv, Lq, capacity, D, Dv); cache: key_cache, value_cache, the addresses of
// lengths, entries or 0, and block_table or 0, its row stride, page_size and cache_entries.
DecodeArguments cache_arguments(int dtype, const py::tuple& sizes, const py::dict& cache) {
  using P = DecodeArguments;
  static const auto fields = std::make_tuple(
      field("key_cache", &P::k), field("value_cache", &P::v), field("lengths", &P::lengths),
      field("entries", &P::entries), field("block_table", &P::block_table),
      field("block_table_stride", &P::block_table_stride), field("page_size", &P::page_size),
      field("cache_entries", &P::cache_entries));
  DecodeArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[7];
  integers(sizes, n);
  p.B = n[0], p.Hq = n[1], p.Hkv = n[2], p.Lq = n[3], p.Lk = n[4], p.D = n[5], p.Dv = n[6];
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
  named(cache).read(p, fields);
  return p;
}

// operands: query, and see read_biases and read_mask_program; results: out, the addresses of lse,
// part_sums and part_stats, split_keys, splits.
void launch_decode(int dtype, uintptr_t stream, const py::tuple& sizes, const py::object& options,
                   const py::dict& operands, const py::dict& cache, const py::dict& results) {
  using P = DecodeArguments;
  static const auto given = std::make_tuple(field("query", &P::q));
  static const auto written =
      std::make_tuple(field("out", &P::out), field("lse", &P::lse),
                      field("part_sums", &P::part_sums), field("part_stats", &P::part_stats),
                      field("split_keys", &P::split_keys), field("splits", &P::splits));
  DecodeArguments p = cache_arguments(dtype, sizes, cache);
  read_decode_options(named(options), p);
  named(operands).read(p, given);
  read_biases(named(operands), p);
  expect_middle(p);
  read_mask_program(named(operands), p);
  named(results).read(p, written);
  p.scale_float = static_cast<float>(p.scale);
  p.softcap_float = static_cast<float>(p.softcap);
  const int64_t bytes = element_bytes(p.dtype);
  p.aligned = is_aligned(p.q, bytes) && is_aligned(p.k, bytes) && is_aligned(p.v, bytes);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    decode_attention(element, p, stream);
  });
}

// operands: key, value
void launch_append(int dtype, uintptr_t stream, const py::tuple& sizes, const py::dict& operands,
                   const py::dict& cache) {
  using P = DecodeArguments;
  static const auto rows = std::make_tuple(field("key", &P::new_k), field("value", &P::new_v));
  DecodeArguments p = cache_arguments(dtype, sizes, cache);
  named(operands).read(p, rows);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { append_to_cache(element, p, stream); });
}

}  // namespace

void bind_decode(py::module_& m) {
  m.def("decode_attention", &launch_decode);
  m.def("append_to_cache", &launch_append);
}

}  // namespace cuda
}  // namespace fastattn
