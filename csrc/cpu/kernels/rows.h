// Rows of a matrix against one vector, the width across the lanes: dot products and weighted sums.
// Used where each query reads rows of its own.
#pragma once
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class S>
struct Accumulator {
  typedef float type;
};
template <>
struct Accumulator<double> {
  typedef double type;
};

// e^x for x <= 0, accurate to about one ulp in float32, because the weights of one hop enter the
// next.
FASTATTN_INLINE VecF weight_of(VecF x) { return exp_neg(x); }
FASTATTN_INLINE VecD weight_of(VecD x) { return exp2_neg(x * kLog2E<double>); }

// A set of rows: row i begins at base + at[i] * stride, or at base + i * stride without a list.
template <class S>
struct Rows {
  const S* base;
  int64_t stride;
  const int64_t* at;
  FASTATTN_INLINE const S* operator[](int64_t i) const {
    return base + (at != nullptr ? at[i] : i) * stride;
  }
};

// Vectors of a row; the last one may be partial.
template <class T>
FASTATTN_INLINE int64_t vectors_of(int64_t D) {
  return (D + kLanes<T> - 1) / kLanes<T>;
}
template <class T>
FASTATTN_INLINE int last_lanes(int64_t D) {
  return static_cast<int>(D - (vectors_of<T>(D) - 1) * kLanes<T>);
}

// Lane r < kRows is row(r) . x, a dot product of D elements; kVectors is their number of vectors, or 0
// for any number. Every dot product is the same tree of additions, wherever its row is stored and
// whatever kRows. Chains start from 0: of a sum of two products, the compiler may fuse either.
template <class T, int kVectors, int kRows, class Row>
FASTATTN_INLINE Vec<T> dot_rows(int64_t D, const T* x, Row row) {
  constexpr int W = kLanes<T>;
  // Narrow vectors give long chains of additions, so the chain is split into several.
  constexpr int kWays = max_of(1, 8 / W);
  Vec<T> acc[kWays][kRows] = {};
  const auto add = [&](int a, int64_t at, int lanes) __attribute__((always_inline)) {
    const Vec<T> y = load(x + at);
    FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) acc[a][r] += load_as<T>(row(r) + at, lanes) * y;
  };
  const int64_t end = ((kVectors > 0 ? kVectors : vectors_of<T>(D)) - 1) * W;
  int64_t d = 0;
  if constexpr (kVectors > 0) {
    FASTATTN_UNROLL for (; d < (kVectors - 1) * W; d += W) add(d / W % kWays, d, W);
  } else {
    for (; d + (kWays - 1) * W < end; d += kWays * W)
      FASTATTN_UNROLL for (int a = 0; a < kWays; ++a) add(a, d + a * W, W);
    for (; d < end; d += W) add(0, d, W);
  }
  constexpr int way = kVectors > 0 ? (kVectors - 1) % kWays : 0;
  const int last = last_lanes<T>(D);
  if (last >= W)  // in both branches the compiler knows whether the vector is whole
    add(way, end, W);
  else
    add(way, end, last);
  FASTATTN_UNROLL for (int a = 1; a < kWays; ++a) FASTATTN_UNROLL for (int r = 0; r < kRows; ++r)
      acc[0][r] += acc[a][r];
  return sum_each<T, kRows>(acc[0]);
}

// s[i] = rows[i] . x for i < count, a vector of rows at a time; s has room for whole vectors.
template <class T, int kVectors, class S>
FASTATTN_INLINE void row_products_of(Rows<S> rows, int64_t count, int64_t D, const T* x, T* s) {
  constexpr int W = kLanes<T>, kFew = max_of(1, W / 4);
  int64_t i = 0;
  if (rows.at == nullptr) {
    const auto next = [&](int64_t at) __attribute__((always_inline)) {
      // x86 addresses base + {1, 2} * stride, so one base register serves three rows. Without the
      // asm the compiler keeps a pointer to each row, more than there are registers.
      const S* base[(W + 2) / 3];
      base[0] = rows.base + at * rows.stride;
      FASTATTN_UNROLL for (int g = 0; g < (W + 2) / 3; ++g) {
        if (g > 0) base[g] = base[g - 1] + 3 * rows.stride;
        asm("" : "+r"(base[g]));
      }
      store(s + at, dot_rows<T, kVectors, W>(D, x, [&](int r) __attribute__((always_inline)) {
              return base[r / 3] + r % 3 * rows.stride;
            }));
    };
    for (; i + W <= count; i += W) next(i);
    if (i > 0 && i + kFew < count) next(count - W), i = count;
  }
  const auto some = [&](auto at_once) __attribute__((always_inline)) {
    constexpr int kRows = decltype(at_once)::value;
    const S* row[kRows];
    FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) row[r] =
        rows[min_of<int64_t>(i + r, count - 1)];
    store(s + i, dot_rows<T, kVectors, kRows>(
                     D, x, [&](int r) __attribute__((always_inline)) { return row[r]; }));
    i += kRows;
  };
  while (i + kFew < count) some(Width<W>());
  if (i < count) some(Width<kFew>());
}
template <class T, class S>
FASTATTN_INLINE void row_products(Rows<S> rows, int64_t count, int64_t D, const T* x, T* s) {
  switch (vectors_of<T>(D)) {
    case 1:
      return row_products_of<T, 1>(rows, count, D, x, s);
    case 2:
      return row_products_of<T, 2>(rows, count, D, x, s);
    case 3:
      return row_products_of<T, 3>(rows, count, D, x, s);
    case 4:
      return row_products_of<T, 4>(rows, count, D, x, s);
    default:
      return row_products_of<T, 0>(rows, count, D, x, s);
  }
}

// y = alpha y + sum_i w[i] rows[i], D across the lanes; y is padded to whole vectors.
template <bool kList, class T, class S>
FASTATTN_INLINE void add_rows_of(Rows<S> rows, int64_t count, int64_t D, const T* w, T alpha,
                                 T* y) {
  constexpr int W = kLanes<T>;
  const int64_t vectors = vectors_of<T>(D);
  int64_t v = 0;
  const auto block = [&](auto width) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(width)::value;
    constexpr int kWays = (7 + kVectors) / kVectors;  // independent sums, to hide the latency
    for (; v + kVectors <= vectors; v += kVectors) {
      const int last = v + kVectors == vectors ? last_lanes<T>(D) : W;
      Vec<T> acc[kWays][kVectors];
      FASTATTN_UNROLL for (int a = 0; a < kWays; ++a)
          FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) acc[a][n] = Vec<T>{};
      const auto sweep = [&](int lanes) __attribute__((always_inline)) {
        const S* next = rows.base + v * W;
        const auto add = [&](int a, int64_t i) __attribute__((always_inline)) {
          const S* row = kList ? rows.base + rows.at[i] * rows.stride + v * W : next;
          next += rows.stride;
          const Vec<T> weight = splat<T>(w[i]);
          FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) acc[a][n] +=
              weight * load_as<T>(row + n * W, n == kVectors - 1 ? lanes : W);
        };
        int64_t i = 0;
        for (; i + kWays <= count; i += kWays)
          FASTATTN_UNROLL for (int a = 0; a < kWays; ++a) add(a, i + a);
        for (; i < count; ++i) add(0, i);
      };
      if (last >= W)  // as in dot_rows
        sweep(W);
      else
        sweep(last);
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
        FASTATTN_UNROLL for (int a = 1; a < kWays; ++a) acc[0][n] += acc[a][n];
        T* to = y + (v + n) * W;
        store(to, load(to) * alpha + acc[0][n]);
      }
    }
  };
  if constexpr (kRegisters == 32) block(Width<8>());
  block(Width<4>());
  block(Width<3>());
  block(Width<2>());
  block(Width<1>());
}
template <class T, class S>
FASTATTN_INLINE void add_rows(Rows<S> rows, int64_t count, int64_t D, const T* w, T alpha, T* y) {
  if (rows.at == nullptr)
    add_rows_of<false>(rows, count, D, w, alpha, y);
  else
    add_rows_of<true>(rows, count, D, w, alpha, y);
}

// read_row: x = the row, then zeros up to a whole vector. write_row is the inverse.
template <class T, class S>
FASTATTN_INLINE void read_row(const S* row, int64_t columns, T* x) {
  int64_t d = 0;
  for (; d + kLanes<T> <= columns; d += kLanes<T>) store(x + d, load_as<T>(row + d, kLanes<T>));
  if (d < columns) store(x + d, load_as<T>(row + d, static_cast<int>(columns - d)));
}
template <class T, class S>
FASTATTN_INLINE void write_row(const T* x, int64_t columns, S* row) {
  int64_t d = 0;
  for (; d + kLanes<T> <= columns; d += kLanes<T>) store_as<T>(row + d, load(x + d), kLanes<T>);
  if (d < columns) store_as<T>(row + d, load(x + d), static_cast<int>(columns - d));
}

// Calls f with an element of this dtype.
template <class F>
FASTATTN_INLINE void with_element(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      if constexpr (has_kernels(DType::f32)) f(float());
      return;
    case DType::f64:
      if constexpr (has_kernels(DType::f64)) f(double());
      return;
    case DType::bf16:
      if constexpr (has_kernels(DType::bf16)) f(Bf16());
      return;
    case DType::f16:
      if constexpr (has_kernels(DType::f16)) f(F16());
      return;
    case DType::boolean:
      return;
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
