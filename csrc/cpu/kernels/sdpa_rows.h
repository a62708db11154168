// What the forward kernels on vectors and on tiles do alike to the output of a panel of queries,
// O[channel][lane].
#pragma once
#include "pack.h"
#include "scores.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// O += V^T P pair by pair, skipping weights of zero: for blocks with non-finite values. P is
// [keys][lanes], or [keys / 2][lanes] in words of two.
template <int kPerWord, class T, class S>
__attribute__((noinline)) void add_visible_only(const T* P, int64_t lanes, int64_t keys, S* v,
                                                int64_t row_stride, int64_t col_stride, int64_t Dv,
                                                T* O) {
  const auto weight_at = [&](int64_t j, int64_t i) {
    if constexpr (kPerWord == 1) return P[j * lanes + i];
    const uint32_t pair = bits_of(static_cast<float>(P[j / 2 * lanes + i]));
    return static_cast<T>(float_of(j % 2 ? pair & 0xffff0000u : pair << 16));
  };
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < lanes; ++i) {
      const T weight = weight_at(j, i);
      if (weight == T(0)) continue;
      for (int64_t d = 0; d < Dv; ++d)
        O[d * lanes + i] += weight * static_cast<T>(widen(v[j * row_stride + d * col_stride]));
    }
  }
}

// The same for elements whose dtype is known at run time.
template <int kPerWord, class T>
void add_visible_only(const T* P, int64_t lanes, int64_t keys, Elements v, int64_t row_stride,
                      int64_t col_stride, int64_t Dv, T* O) {
  with_elements(v, [&](auto* from) {
    add_visible_only<kPerWord>(P, lanes, keys, from, row_stride, col_stride, Dv, O);
  });
}

// lse = m + ln l for queries from i on, and the factor of their outputs, 1 / l; a fully masked row
// gives -inf and 0. m and l have all lanes.
template <class T>
FASTATTN_INLINE void finish_sums(const Sequence& p, const ScoreRule<T>& rule,
                                 const DropoutRule& dropout, int64_t b, int64_t h, int64_t i,
                                 int64_t rows, int64_t lanes, const T* m, const T* l, T* factor) {
  if (p.lse != nullptr) {
    double* const lse = p.lse + (b * p.Hq + h) * p.lse_stride + i;
    constexpr int64_t kStep = kLanes<double>;
    for (int64_t r = 0; r < rows; r += kStep)
      store_first(lse + r,
                  log_sum_exp(rule, load_as<double>(m + r, kStep), load_as<double>(l + r, kStep)),
                  static_cast<int>(min_of(kStep, rows - r)));
  }
  const T keep_factor = p.dropout_p > 0 ? static_cast<T>(dropout.factor) : T(1);
  for (int64_t r = 0; r < lanes; r += kLanes<T>) {
    const Vec<T> sum = load(l + r);
    store(factor + r, select<T>(see_nothing<T>(load(m + r), sum), Vec<T>{}, keep_factor / sum));
  }
}

// The same, and out = O / l; l is overwritten.
template <class P, class T>
FASTATTN_INLINE void finish_rows(const Sequence& p, const ScoreRule<T>& rule,
                                 const DropoutRule& dropout, int64_t b, int64_t h, int64_t i,
                                 int64_t rows, int64_t lanes, const T* m, T* l, const T* O) {
  const auto out = P::elements(p.out.data, p.dtype) + b * p.out.stride[0] + h * p.out.stride[1];
  finish_sums(p, rule, dropout, b, h, i, rows, lanes, m, l, l);
  unpack_transposed<T>(O, lanes, l, rows, p.Dv, out + i * p.out.stride[2], p.out.stride[2]);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
