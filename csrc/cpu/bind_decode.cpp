// Python's view of attention with a cache, and of appending to it.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernel_table.h"
#include "mask_program.h"
#include "sdpa_arguments.h"
#include "sequences.h"

namespace py = pybind11;

namespace fastattn {
namespace {

void check_cache(const SequencesParams& t, int64_t entries) {
  const AttentionParams& all = t.attention;
  for (int64_t b = 0; b < all.B; ++b) {
    const int64_t length = t.k_lengths[b];
    expect(length >= 0 && length <= all.Lk,
           "cache_seqlens must be between 0 and the " + std::to_string(all.Lk) +
               " keys of the cache, got " + std::to_string(length));
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

// cache: the addresses of lengths [B], entries [B] or 0, and block_table or 0, its row stride, and
// page_size.
void read_cache(const py::dict& cache, SequencesParams& t) {
  using P = SequencesParams;
  static const auto fields = std::make_tuple(
      field("lengths", &P::k_lengths), field("entries", &P::k_batch),
      field("block_table", &P::block_table), field("block_table_stride", &P::block_table_stride),
      field("page_size", &P::page_size));
  named(cache).read(t, fields);
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
  all = common_arguments(dtype, false, threads, sizes, q, q_stride, k, k_stride, v, v_stride, out,
                         out_stride, lse);
  read_decode_options(named(options), all);
  optional_arguments(all, operands);
  t.bottom_right = true;
  t.lse_stride = all.Lq;
  read_cache(cache, t);
  check_cache(t, cache_entries);
  check_table(t);
  std::vector<MaskStep> steps;
  read_mask_program(named(operands), all, steps);
  if (t.block_table != nullptr)
    expect(all.k.stride[3] == 1 && all.v.stride[3] == 1 &&
               (decodes_on_tiles(all) || (all.D <= 512 && all.Dv <= 512)),
           "pages must have dense rows of at most 512 elements");
  const auto order = order_of_work(t);
  t.order = order.data();
  py::gil_scoped_release release;
  kernels(all.dtype).attention_sequences_forward(t);
}

bool heads_decode_on_tiles(int dtype, int64_t heads, int64_t kv_heads, int64_t queries) {
  AttentionParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.Hq = heads, p.Hkv = kv_heads, p.Lq = queries, p.D = p.Dv = 1;
  return decodes_on_tiles(p);
}

// Rows [0, L) of `from` of sequence b become rows lengths[b], lengths[b] + 1, ... of its cache.
void append(const SequencesParams& t, int64_t element, int64_t rows, int64_t width,
            const Tensor4& from, const Tensor4& to) {
  const AttentionParams& all = t.attention;
  const auto* source = static_cast<const char*>(from.data);
  auto* target = static_cast<char*>(to.data);
  for (int64_t b = 0; b < all.B; ++b) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = t.k_lengths[b] - rows + i;
      const bool paged = t.block_table != nullptr;
      const int64_t row = paged ? at % t.page_size : at;
      const int64_t entry = paged ? t.block_table[b * t.block_table_stride + at / t.page_size]
                            : t.k_batch != nullptr ? t.k_batch[b]
                                                   : b;
      for (int64_t h = 0; h < all.Hkv; ++h) {
        const char* x =
            source + element * (b * from.stride[0] + h * from.stride[1] + i * from.stride[2]);
        char* y = target + element * (entry * to.stride[0] + h * to.stride[1] + row * to.stride[2]);
        if (from.stride[3] == 1 && to.stride[3] == 1) {
          std::memcpy(y, x, static_cast<size_t>(width * element));
          continue;
        }
        for (int64_t d = 0; d < width; ++d)
          std::memcpy(y + d * to.stride[3] * element, x + d * from.stride[3] * element,
                      static_cast<size_t>(element));
      }
    }
  }
}

// The rows to append, and where to.
struct NewRows {
  Tensor4 key, value;              // [B, Hkv, rows, D or Dv]
  Tensor4 key_cache, value_cache;  // [entries, Hkv, keys, D or Dv]
};

// sizes: (B, Hkv, rows, keys of the cache, D, Dv, entries of the cache); operands: those of NewRows;
// lengths of the cache are those without the rows.
void append_to_cache(int64_t element, const py::tuple& sizes, const py::dict& operands,
                     const py::dict& cache) {
  using R = NewRows;
  static const auto fields =
      std::make_tuple(field("key", &R::key), field("value", &R::value),
                      field("key_cache", &R::key_cache), field("value_cache", &R::value_cache));
  int64_t n[7];
  integers(sizes, n);
  SequencesParams t{};
  t.attention.B = n[0];
  t.attention.Hkv = n[1];
  t.attention.Lk = n[3];
  read_cache(cache, t);
  std::vector<int64_t> lengths(t.k_lengths, t.k_lengths + n[0]);
  for (int64_t& length : lengths) length += n[2];
  t.k_lengths = lengths.data();
  check_cache(t, n[6]);
  for (const int64_t length : lengths)
    expect(length >= n[2],
           "cache_seqlens must not be negative, got " + std::to_string(length - n[2]));
  NewRows rows;
  named(operands).read(rows, fields);
  py::gil_scoped_release release;
  append(t, element, n[2], n[4], rows.key, rows.key_cache);
  append(t, element, n[2], n[5], rows.value, rows.value_cache);
}

}  // namespace

void bind_decode(py::module_& m) {
  m.def("decode_attention", &decode_attention);
  m.def("decodes_on_tiles", &heads_decode_on_tiles);
  m.def("append_to_cache", &append_to_cache);
}

}  // namespace fastattn
