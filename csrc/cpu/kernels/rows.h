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

// Like max_lanes, but by halves, which has half the latency.
template <class T>
FASTATTN_INLINE T largest_lane(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  FASTATTN_UNROLL for (int width = kLanes<T> / 2; width >= 1; width /= 2) {
    FASTATTN_UNROLL for (int i = 0; i < width; ++i) lanes[i] =
        lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

// s[i] = rows[i] . x for i < count, a vector of rows at a time; s is written in whole vectors.
// Every dot product is the same tree of additions, wherever its row is stored.
template <class T, class S>
FASTATTN_INLINE void row_products(Rows<S> rows, int64_t count, int64_t D, const T* x, T* s) {
  constexpr int W = kLanes<T>;
  const int64_t vectors = vectors_of<T>(D);
  const int last = last_lanes<T>(D);
  for (int64_t i = 0; i < count; i += W) {
    const S* row[W];
    if (rows.at == nullptr && i + W <= count) {
      FASTATTN_UNROLL for (int r = 0; r < W; ++r) row[r] = rows.base + (i + r) * rows.stride;
    } else {
      FASTATTN_UNROLL for (int r = 0; r < W; ++r) row[r] = rows[min_of<int64_t>(i + r, count - 1)];
    }
    // Narrow vectors give long chains of additions, so the chain is split into several.
    constexpr int kWays = max_of(1, 8 / W);
    Vec<T> acc[kWays][W] = {};
    const auto add = [&](int a, int64_t at, int lanes) __attribute__((always_inline)) {
      const Vec<T> y = load(x + at);
      FASTATTN_UNROLL for (int r = 0; r < W; ++r) acc[a][r] += load_as<T>(row[r] + at, lanes) * y;
    };
    int64_t d = 0;
    const int64_t end = (vectors - 1) * W;
    for (; d + (kWays - 1) * W < end; d += kWays * W)
      FASTATTN_UNROLL for (int a = 0; a < kWays; ++a) add(a, d + a * W, W);
    for (; d < end; d += W) add(0, d, W);
    if (last == W)
      add(0, d, W);
    else
      add(0, d, last);
    FASTATTN_UNROLL for (int a = 1; a < kWays; ++a) FASTATTN_UNROLL for (int r = 0; r < W; ++r)
        acc[0][r] += acc[a][r];
    store(s + i, sum_each<T>(acc[0]));
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
    constexpr int kWays = max_of(1, 8 / kVectors);  // independent sums, to hide the latency
    for (; v + kVectors <= vectors; v += kVectors) {
      const int last = v + kVectors == vectors ? last_lanes<T>(D) : W;
      Vec<T> acc[kWays][kVectors];
      FASTATTN_UNROLL for (int a = 0; a < kWays; ++a)
          FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) acc[a][n] = Vec<T>{};
      const S* next = rows.base + v * W;
      const auto add = [&](int a, int64_t i) __attribute__((always_inline)) {
        const S* row = kList ? rows.base + rows.at[i] * rows.stride + v * W : next;
        next += rows.stride;
        const Vec<T> weight = splat<T>(w[i]);
        FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) acc[a][n] +=
            weight * load_as<T>(row + n * W, n == kVectors - 1 ? last : W);
      };
      int64_t i = 0;
      for (; i + kWays <= count; i += kWays)
        FASTATTN_UNROLL for (int a = 0; a < kWays; ++a) add(a, i + a);
      for (; i < count; ++i) add(0, i);
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
        FASTATTN_UNROLL for (int a = 1; a < kWays; ++a) acc[0][n] += acc[a][n];
        T* to = y + (v + n) * W;
        store(to, load(to) * alpha + acc[0][n]);
      }
    }
  };
  if constexpr (kRegisters == 32) block(Width<8>());
  block(Width<4>());
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
  for (int64_t d = 0; d < columns; d += kLanes<T>)
    store(x + d, load_as<T>(row + d, static_cast<int>(min_of<int64_t>(kLanes<T>, columns - d))));
}
template <class T, class S>
FASTATTN_INLINE void write_row(const T* x, int64_t columns, S* row) {
  for (int64_t d = 0; d < columns; d += kLanes<T>)
    store_as<T>(row + d, load(x + d), static_cast<int>(min_of<int64_t>(kLanes<T>, columns - d)));
}

// Calls f with an element of this dtype.
template <class F>
FASTATTN_INLINE void with_element(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(float());
    case DType::f64:
      return f(double());
    case DType::bf16:
      return f(Bf16());
    case DType::f16:
      return f(F16());
    case DType::boolean:
      return;
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
