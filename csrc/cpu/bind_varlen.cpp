// Python's view of attention over sequences with lengths of their own. What is read as an address
// is checked first: a wrong length must be an error, not a crash.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "sdpa_arguments.h"

namespace py = pybind11;

namespace fastattn {
namespace {

const int64_t* integers_at(const py::handle& address) {
  return reinterpret_cast<const int64_t*>(address.cast<uintptr_t>());
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

void check_starts(const int64_t* starts, int64_t count, int64_t rows, const std::string& name) {
  expect(starts[0] == 0, name + " must begin with 0, got " + std::to_string(starts[0]));
  for (int64_t b = 0; b < count; ++b)
    expect(starts[b] <= starts[b + 1], name + " must not decrease, got " +
                                           std::to_string(starts[b]) + " before " +
                                           std::to_string(starts[b + 1]));
  expect(starts[count] <= rows, name + " must end within the " + std::to_string(rows) +
                                    " rows there are, got " + std::to_string(starts[count]));
}

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

// table: (q_starts, k_starts, k_lengths, k_batch, block_table, block_table_stride, page_size,
// entries of the cache, bottom_right), addresses or 0.
void attention_sequences(int dtype, int threads, const py::tuple& sizes, uintptr_t q,
                         const py::tuple& q_stride, uintptr_t k, const py::tuple& k_stride,
                         uintptr_t v, const py::tuple& v_stride, uintptr_t out,
                         const py::tuple& out_stride, uintptr_t lse, double scale,
                         const py::object& options, const py::tuple& table,
                         const py::object& gradients) {
  SequencesParams t{};
  AttentionParams& all = t.attention;
  all = common_arguments(dtype, threads, sizes, q, q_stride, k, k_stride, v, v_stride, out,
                         out_stride, lse, scale, options);
  t.q_starts = integers_at(table[0]);
  t.k_starts = integers_at(table[1]);
  t.k_lengths = integers_at(table[2]);
  t.k_batch = integers_at(table[3]);
  t.block_table = reinterpret_cast<const int32_t*>(table[4].cast<uintptr_t>());
  t.block_table_stride = table[5].cast<int64_t>();
  t.page_size = table[6].cast<int64_t>();
  t.bottom_right = table[8].cast<bool>();
  t.lse_stride = all.Lq;
  if (t.q_starts != nullptr) check_starts(t.q_starts, all.B, all.Lq, "cu_seqlens_q");
  if (t.k_starts != nullptr)
    check_starts(t.k_starts, all.B, all.Lk, "cu_seqlens_k");
  else
    check_cache(t, table[7].cast<int64_t>());
  if (t.block_table != nullptr)
    expect(all.k.stride[3] == 1 && all.v.stride[3] == 1 && all.D <= 512 && all.Dv <= 512,
           "pages must have dense rows of at most 512 elements");
  if (!gradients.is_none()) gradient_arguments(all, gradients.cast<py::tuple>());

  std::vector<double> work(static_cast<size_t>(all.B));
  for (int64_t b = 0; b < all.B; ++b) {
    const int64_t queries = t.q_starts == nullptr ? all.Lq : t.q_starts[b + 1] - t.q_starts[b];
    const int64_t keys = t.k_starts == nullptr ? t.k_lengths[b] : t.k_starts[b + 1] - t.k_starts[b];
    work[static_cast<size_t>(b)] = static_cast<double>(queries) * static_cast<double>(keys);
  }
  std::vector<int64_t> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return work[static_cast<size_t>(a)] > work[static_cast<size_t>(b)];
  });
  t.order = order.data();

  py::gil_scoped_release release;
  if (gradients.is_none())
    kernels(all.dtype).attention_sequences_forward(t);
  else
    kernels(all.dtype).attention_sequences_backward(t);
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

// sizes: (B, Hkv, rows, keys of the cache, D, Dv, entries of the cache); lengths include the rows.
void append_to_cache(int64_t element, const py::tuple& sizes, const py::tuple& key,
                     const py::tuple& value, const py::tuple& key_cache,
                     const py::tuple& value_cache, const py::tuple& table) {
  int64_t n[7];
  integers(sizes, n);
  SequencesParams t{};
  t.attention.B = n[0];
  t.attention.Hkv = n[1];
  t.attention.Lk = n[3];
  t.k_lengths = integers_at(table[0]);
  t.k_batch = integers_at(table[1]);
  t.block_table = reinterpret_cast<const int32_t*>(table[2].cast<uintptr_t>());
  t.block_table_stride = table[3].cast<int64_t>();
  t.page_size = table[4].cast<int64_t>();
  check_cache(t, n[6]);
  for (int64_t b = 0; b < n[0]; ++b)
    expect(t.k_lengths[b] >= n[2],
           "cache_seqlens must not be negative, got " + std::to_string(t.k_lengths[b] - n[2]));
  const Tensor4 k = optional_operand(key), v = optional_operand(value),
                k_to = optional_operand(key_cache), v_to = optional_operand(value_cache);
  py::gil_scoped_release release;
  append(t, element, n[2], n[4], k, k_to);
  append(t, element, n[2], n[5], v, v_to);
}

}  // namespace

void bind_varlen(py::module_& m) {
  m.def("attention_sequences", &attention_sequences);
  m.def("append_to_cache", &append_to_cache);
}

}  // namespace fastattn
