// A cache of keys and values as the CPU's kernels read it, for attention and appending. Everything
// that is used as an index is checked first: a wrong length must be an error, not a crash.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cache_arguments.h"

namespace fastattn {

// The arguments of a call, and the memory that they point to. For a quantised cache, k and v are
// its quantised rows.
struct CacheCall : SequencesParams {
  Cache cache;
  std::vector<int64_t> begins, sequence_order;
  std::vector<MaskStep> steps;
  py::object gathered[2], table;
};

// Reads the cache of a call whose batch and dtype are known.
template <class Tensors>
void read_cache(CacheCall& t, const Tensors& from) {
  AttentionParams& p = t.attention;
  Cache& c = t.cache;
  read_cache(c, p, from);
  p.k_scales = c.key_scales, p.v_scales = c.value_scales, p.float8 = c.dtype == kFloat8;
  t.k_lengths = c.lengths, t.k_batch = c.chosen, t.k_begins = c.begins;
  t.block_table = c.block_table, t.block_table_stride = c.block_table_stride;
  t.page_size = c.block_table == nullptr ? 0 : c.rows;
}

// Checks the lengths, pages and entries of a cache before anything reads it.
inline void check_cache(const CacheCall& t) {
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
        expect(page >= 0 && page < t.cache.entries, [&] {
          return "block_table must name one of the " + std::to_string(t.cache.entries) +
                 " pages, got " + std::to_string(page);
        });
      }
    } else {
      const int64_t entry = t.k_batch == nullptr ? b : t.k_batch[b];
      expect(entry >= 0 && entry < t.cache.entries, [&] {
        return "cache_batch_idx must name one of the " + std::to_string(t.cache.entries) +
               " entries of the cache, got " + std::to_string(entry);
      });
    }
  }
}

// Where row j of sequence b is.
inline CacheRow row_of(const SequencesParams& t, int64_t b, int64_t j) {
  if (t.block_table != nullptr)
    return {t.block_table[b * t.block_table_stride + j / t.page_size], j % t.page_size};
  return {t.k_batch == nullptr ? b : t.k_batch[b], j};
}

// Where the rows of the caches are.
inline CachePlaces places_of(const SequencesParams& t) {
  return {t.k_lengths, t.k_begins, t.k_batch, t.block_table, t.block_table_stride, t.page_size};
}

// Throws an error that names the first scale that is not positive, or not finite (for e4m3: times
// 256). Only the first k_lengths[b] rows of each sequence are searched.
[[noreturn]] inline void complain_of_scales(const SequencesParams& t, int64_t heads,
                                            const Tensor4& key_scales, const Tensor4& value_scales,
                                            bool float8) {
  const float max_scale = std::numeric_limits<float>::max() / (float8 ? 256 : 1);
  for (const Tensor4* x : {&key_scales, &value_scales}) {
    if (x->data == nullptr) continue;
    for (int64_t b = 0; b < t.attention.B; ++b)
      for (int64_t j = t.k_begins == nullptr ? 0 : t.k_begins[b]; j < t.k_lengths[b]; ++j) {
        const CacheRow row = row_of(t, b, j);
        for (int64_t h = 0; h < heads; ++h) {
          const float scale = static_cast<const float*>(
              x->data)[row.entry * x->stride[0] + h * x->stride[1] + row.row * x->stride[2]];
          expect(scale > 0 && scale <= max_scale, [&] {
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

}  // namespace fastattn
