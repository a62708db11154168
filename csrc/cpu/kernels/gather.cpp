// Gathers the rows of each sequence of a cache, for kernels that read neither pages nor quantised
// rows. With the scale c_j of row x_j of a quantised cache,
//
//   to[b, h, j] = c_j x_j,  begin_b <= j < length_b
//
// Other rows of the result stay unwritten. The work is bound by memory, so each row is read once
// and written once.
#include "../../params.h"
#include "../simd/convert.h"
#include "../threads.h"
#include "policy.h"
#include "scales.h"
#include "team.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class S>
class Gather {
  typedef decltype(widen(S())) T;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kRows = 64;           // per task
  static constexpr double kFlopsPerElement = 4;  // the time of one element, in flops

 public:
  explicit Gather(const GatherParams& params) : p(params) {}

  // Whether all scales are positive and finite.
  bool run() const {
    const int64_t blocks = (p.N + kRows - 1) / kRows, tasks = p.B * p.Hkv * blocks;
    const double elements = static_cast<double>(p.B * p.Hkv * p.N) * (p.D + p.Dv);
    const int team = team_size(p.threads, tasks, kFlopsPerElement * elements);
    int wrong = 0;
    each_task(team, tasks, kStatic, [&](int64_t t) {
      const int64_t b = t / blocks / p.Hkv, h = t / blocks % p.Hkv, j = t % blocks * kRows;
      const int64_t begin = p.begins == nullptr ? 0 : p.begins[b];
      const int64_t j0 = max_of(j, begin), j1 = min_of(j + kRows, p.lengths[b]);
      if (j0 < j1 && !rows(b, h, j0, j1)) __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
    });
    return wrong == 0;
  }

 private:
  const GatherParams& p;

  // Copies keys and values [j0, j1) of a head out of the cache; false if a scale is invalid.
  bool rows(int64_t b, int64_t h, int64_t j0, int64_t j1) const {
    S* const keys = static_cast<S*>(p.keys) + (b * p.Hkv + h) * p.N * p.D;
    S* const values = static_cast<S*>(p.values) + (b * p.Hkv + h) * p.N * p.Dv;
    const bool right = rows_of(p.key_cache, p.key_scales, p.D, b, h, j0, j1, keys);
    return rows_of(p.value_cache, p.value_scales, p.Dv, b, h, j0, j1, values) && right;
  }

  // Widens rows [j0, j1) of one head of a cache to `to` [j1 - j0][columns]. False if a scale is not
  // positive and finite.
  bool rows_of(const Tensor4& cache, const Tensor4& scales, int64_t columns, int64_t b, int64_t h,
               int64_t j0, int64_t j1, S* to) const {
    const int64_t entry = p.entries == nullptr ? b : p.entries[b];
    const int32_t* const pages =
        p.block_table == nullptr ? nullptr : p.block_table + b * p.block_table_stride;
    const auto each = [&](auto example, auto write) {
      typedef decltype(example) X;
      each_run(head_rows<X>(cache, entry, h, pages, p.page_size), j0, j1,
               [&](const X* from, int64_t j, int64_t count) {
                 for (int64_t n = 0; n < count; ++n)
                   write(from + n * cache.stride[2], j + n, to + (j + n) * columns);
               });
    };
    if (scales.data == nullptr) {
      each(S(), [&](const S* from, int64_t, S* x) { copy(from, cache.stride[3], columns, x); });
      return true;
    }
    alignas(kVectorBytes) float factors[kRows];
    read_scales(scale_rows(scales, entry, h, pages, p.page_size), j0, j1, factors);
    for (int64_t n = j1 - j0; n < kRows; ++n) factors[n] = 1.0f;
    if (p.float8)
      for (int64_t n = 0; n < kRows; ++n) factors[n] *= kE4m3Unit;
    const auto scaled = [&](const auto* from, int64_t j, S* x) {
      scale(from, cache.stride[3], static_cast<T>(factors[j - j0]), columns, x);
    };
    if (p.float8)
      each(E4m3(), scaled);
    else
      each(Int8(), scaled);
    return !any_wrong(factors, kRows);
  }

  // Copies one row.
  static void copy(const S* from, int64_t stride, int64_t columns, S* to) {
    if (stride == 1) {
      __builtin_memcpy(to, from, static_cast<size_t>(columns) * sizeof(S));
      return;
    }
    for (int64_t d = 0; d < columns; ++d) to[d] = from[d * stride];
  }

  // Copies one quantised row, times its scale.
  template <class X>
  static void scale(const X* from, int64_t stride, T factor, int64_t columns, S* to) {
    if (stride == 1) {
      for (int64_t d = 0; d < columns; d += W) {
        const int n = static_cast<int>(min_of<int64_t>(W, columns - d));
        store_as<T>(to + d, load_as<T>(from + d, n) * factor, n);
      }
      return;
    }
    for (int64_t d = 0; d < columns; ++d)
      narrow(static_cast<T>(widen(from[d * stride])) * factor, to + d);
  }
};

}  // namespace

// Copies the caches of each sequence into dense keys and values. False if a scale is not positive
// and finite.
bool gather_rows(const GatherParams& p) {
  bool right = true;
  with_stored(p.dtype, [&](auto stored) { right = Gather<decltype(stored)>(p).run(); });
  return right;
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
