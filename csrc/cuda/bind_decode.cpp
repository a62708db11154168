// Python's view of decoding on a GPU.
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// sizes: (B, Hq, Hkv, Lq, capacity, D, Dv); cache: (key_cache, value_cache, lengths, entries,
// block_table, block_table_stride, page_size, cache_entries), the first two (address, strides),
// then three addresses.
DecodeArguments arguments(int dtype, const py::tuple& sizes, const py::tuple& cache) {
  DecodeArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[7];
  integers(sizes, n);
  p.B = n[0], p.Hq = n[1], p.Hkv = n[2], p.Lq = n[3], p.Lk = n[4], p.D = n[5], p.Dv = n[6];
  p.k = optional_operand(cache[0]);
  p.v = optional_operand(cache[1]);
  p.lengths = reinterpret_cast<const int64_t*>(cache[2].cast<uintptr_t>());
  p.entries = reinterpret_cast<const int64_t*>(cache[3].cast<uintptr_t>());
  p.block_table = reinterpret_cast<const int32_t*>(cache[4].cast<uintptr_t>());
  p.block_table_stride = cache[5].cast<int64_t>();
  p.page_size = cache[6].cast<int64_t>();
  p.cache_entries = cache[7].cast<int64_t>();
  return p;
}

// operands: (query, out), each (address, strides); options: (scale, window_left, window_right,
// softcap, alibi or None); results: (lse, part_sums, part_stats, split_keys, splits), the first
// three addresses.
void decode(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& operands,
            const py::tuple& cache, const py::tuple& options, const py::tuple& results) {
  DecodeArguments p = arguments(dtype, sizes, cache);
  p.q = optional_operand(operands[0]);
  p.out = optional_operand(operands[1]);
  p.scale = options[0].cast<double>();
  p.scale_float = static_cast<float>(p.scale);
  p.window_left = options[1].cast<int64_t>();
  p.window_right = options[2].cast<int64_t>();
  p.softcap = options[3].cast<double>();
  p.softcap_float = static_cast<float>(p.softcap);
  if (!options[4].is_none()) {
    const auto alibi = options[4].cast<py::tuple>();
    p.alibi = reinterpret_cast<const void*>(alibi[0].cast<uintptr_t>());
    integers(alibi[1].cast<py::tuple>(), p.alibi_stride);
  }
  p.lse = reinterpret_cast<double*>(results[0].cast<uintptr_t>());
  p.part_sums = reinterpret_cast<float*>(results[1].cast<uintptr_t>());
  p.part_stats = reinterpret_cast<float*>(results[2].cast<uintptr_t>());
  p.split_keys = results[3].cast<int64_t>();
  p.splits = results[4].cast<int64_t>();
  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  p.aligned = is_aligned(p.q, bytes) && is_aligned(p.k, bytes) && is_aligned(p.v, bytes);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { decode_attention(element, p, stream); });
}

// operands: (key, value), each (address, strides).
void append(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& operands,
            const py::tuple& cache) {
  DecodeArguments p = arguments(dtype, sizes, cache);
  p.new_k = optional_operand(operands[0]);
  p.new_v = optional_operand(operands[1]);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { append_to_cache(element, p, stream); });
}

}  // namespace

void bind_decode(py::module_& m) {
  m.def("decode_attention", &decode);
  m.def("append_to_cache", &append);
}

}  // namespace cuda
}  // namespace fastattn
