// Rows of a matrix against one vector, the width across the lanes: dot products and weighted sums.
// Used where each query reads different rows.
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
// The elements in the last vector of a row.
template <class T>
FASTATTN_INLINE int last_lanes(int64_t D) {
  return static_cast<int>(D - (vectors_of<T>(D) - 1) * kLanes<T>);
}

// How the end of a row is read: as a vector, as a part of one, or as a piece or a part of one.
enum class End { vector, part, piece };
template <End kEnd>
struct EndIs {
  static constexpr End value = kEnd;
};

// Calls f(EndIs) for rows of D elements, outside all loops: the branches of a loop would share the
// addresses of its rows, which are more than there are registers. With kWhole, D is always a number
// of whole vectors, and other ends are not compiled.
template <class T, class S, bool kWhole, class F>
FASTATTN_INLINE void with_end(int64_t D, F f) {
  if constexpr (kWhole) return f(EndIs<End::vector>());
  const int last = last_lanes<T>(D);
  if constexpr (kSame<T, S> && kPiece<T> < kLanes<T>) {
    if (last <= kPiece<T>) return f(EndIs<End::piece>());
  }
  if (last >= kLanes<T>) return f(EndIs<End::vector>());
  f(EndIs<End::part>());
}

// last_lanes, which tells the compiler that a part is less than a vector.
template <class T, End kEnd>
FASTATTN_INLINE int last_lanes_of(int64_t D) {
  const int last = last_lanes<T>(D);
  if (kEnd == End::part && last >= kLanes<T>) __builtin_unreachable();
  return last;
}

// kRows rows with one stride, from one column on. x86 addresses base + {1, 2} * stride, so one base
// register serves three rows. The asm hides that columns have addresses in common: the compiler
// would keep a pointer to each row, more than there are registers.
template <class S, int kRows>
struct Column {
  const S* base[(kRows + 2) / 3];
  int64_t stride;
  FASTATTN_INLINE Column(const S* first, int64_t step) : base{first}, stride(step) {
    FASTATTN_UNROLL for (int g = 0; g < (kRows + 2) / 3; ++g) {
      if (g > 0) base[g] = base[g - 1] + 3 * stride;
      asm("" : "+r"(base[g]));
    }
  }
  FASTATTN_INLINE const S* operator[](int r) const { return base[r / 3] + r % 3 * stride; }
};

// Lane r < kRows is the dot product of x and row r, of D elements; from(d)[r] is the address of its
// element d. For one kEnd every dot product is the same tree of additions, wherever its row is
// stored and whatever kRows. Chains start from 0: of a sum of two products, the compiler may fuse
// either.
template <class T, int kRows, End kEnd, class From>
FASTATTN_INLINE Vec<T> dot_rows(int64_t D, const T* x, From from) {
  constexpr int W = kLanes<T>;
  // Narrow vectors give long chains of additions, so the chain is split into several.
  constexpr int kWays = max_of(1, 8 / W);
  Vec<T> acc[kWays][kRows] = {};
  const auto add = [&](int a, int64_t d, int lanes) __attribute__((always_inline)) {
    const Vec<T> y = load(x + d);
    const auto column = from(d);
    FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) acc[a][r] += load_as<T>(column[r], lanes) * y;
  };
  const int last = last_lanes_of<T, kEnd>(D);
  const int64_t end = D - last;
  if constexpr (kEnd == End::piece) {  // first: a sum is then a multiply-add of vectors
    const Piece<T> y = load_piece(x + end, kPiece<T>);
    const auto column = from(end);
    FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) acc[0][r] =
        padded<T>(load_piece(column[r], last) * y);
  }
  int64_t d = 0;
  for (; d + (kWays - 1) * W < end; d += kWays * W)
    FASTATTN_UNROLL for (int a = 0; a < kWays; ++a) add(a, d + a * W, W);
  for (; d < end; d += W) add(0, d, W);
  if constexpr (kEnd != End::piece) add(0, end, kEnd == End::vector ? W : last);
  FASTATTN_UNROLL for (int a = 1; a < kWays; ++a) FASTATTN_UNROLL for (int r = 0; r < kRows; ++r)
      acc[0][r] += acc[a][r];
  return sum_each<T, kRows>(acc[0]);
}

// s[i] = rows[i] . x for the kRows rows from i on; rows past the last of `count` repeat it. Stores
// a whole vector.
template <class T, int kRows, End kEnd, class S>
FASTATTN_INLINE void some_products(Rows<S> rows, int64_t i, int64_t count, int64_t D, const T* x,
                                   T* s) {
  struct {
    const S* row[kRows];
    int64_t d;
    FASTATTN_INLINE const S* operator[](int r) const { return row[r] + d; }
  } column;
  FASTATTN_UNROLL for (int r = 0; r < kRows; ++r) column.row[r] =
      rows[min_of<int64_t>(i + r, count - 1)];
  const auto from = [&](int64_t d) __attribute__((always_inline)) {
    column.d = d;
    return column;
  };
  store(s + i, dot_rows<T, kRows, kEnd>(D, x, from));
}
// s[i] = rows[i] . x for i < count, of at least as many rows as a vector has lanes. Writes whole
// vectors.
//
// As all products and sums of rows, it is compiled once for all its callers. They pass the fields
// of a Rows as separate arguments, in registers: a struct would be copied through memory by a
// vector load, which waits for the stores of the fields.
template <class T, End kEnd, class S>
__attribute__((noinline)) void products_in_order(const S* base, int64_t stride, int64_t count,
                                                 int64_t D, const T* x, T* s) {
  constexpr int W = kLanes<T>, kFew = max_of(1, W / 4);
  int64_t i = 0;
  for (; i + kFew < count; i += W) {
    const int64_t at = min_of(i, count - W);
    const auto from = [&](int64_t d) __attribute__((always_inline)) {
      return Column<S, W>(base + at * stride + d, stride);
    };
    store(s + at, dot_rows<T, W, kEnd>(D, x, from));
  }
  const Rows<S> rows{base, stride, nullptr};
  if (i < count) some_products<T, kFew, kEnd>(rows, i, count, D, x, s);
}
// The products for a list of rows, or for fewer rows than a vector has lanes.
template <class T, End kEnd, class S>
__attribute__((noinline)) void products_of_list(const S* base, int64_t stride, const int64_t* list,
                                                int64_t count, int64_t D, const T* x, T* s) {
  const Rows<S> rows{base, stride, list};
  constexpr int W = kLanes<T>, kFew = max_of(1, W / 4);
  int64_t i = 0;
  for (; i + kFew < count; i += W) some_products<T, W, kEnd>(rows, i, count, D, x, s);
  if (i < count) some_products<T, kFew, kEnd>(rows, i, count, D, x, s);
}
// s[i] = rows[i] . x for any rows.
template <class T, bool kWhole = false, class S>
FASTATTN_INLINE void row_products(const Rows<S>& rows, int64_t count, int64_t D, const T* x, T* s) {
  with_end<T, S, kWhole>(D, [&](auto how) __attribute__((always_inline)) {
    constexpr End kEnd = decltype(how)::value;
    if (rows.at != nullptr || count < kLanes<T>)
      products_of_list<T, kEnd>(rows.base, rows.stride, rows.at, count, D, x, s);
    else
      products_in_order<T, kEnd>(rows.base, rows.stride, count, D, x, s);
  });
}
// The product of one row, in the order of all others.
template <class T>
__attribute__((noinline)) T row_product(const T* row, int64_t D, const T* x) {
  T product;
  with_end<T, T, false>(D, [&](auto how) __attribute__((always_inline)) {
    const auto from = [&](int64_t d)
                          __attribute__((always_inline)) { return Rows<T>{row + d, 0, nullptr}; };
    product = dot_rows<T, 1, decltype(how)::value>(D, x, from)[0];
  });
  return product;
}

// y = factor sum_i w[i] rows[i], or if it adds, factor y + sum_i w[i] rows[i]; y is padded to whole
// vectors. The padding gets zeros, or NaN if a weight is not finite.
template <class T, bool kList, End kEnd, class S>
__attribute__((noinline)) void write_sum(const S* base, int64_t stride, const int64_t* list,
                                         int64_t count, int64_t D, const T* w, bool adds, T factor,
                                         T* y) {
  constexpr int W = kLanes<T>;
  const int last = last_lanes_of<T, kEnd>(D);
  int64_t left = vectors_of<T>(D) - (kEnd == End::piece);
  const S* column = base;
  // kVectors vectors of columns; with kEnds, the last of them ends as a row does.
  const auto sweep = [&](auto width, auto ends) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(width)::value;
    constexpr bool kEnds = decltype(ends)::value;
    constexpr int kPieces = kEnds && kEnd == End::piece, kSums = kVectors + kPieces;
    constexpr int kWays = (7 + kSums) / kSums;  // independent sums, to hide the latency
    Vec<T> acc[kWays][max_of(1, kVectors)] = {};
    Piece<T> tail_sums[kWays] = {};
    const S* next = column;
    const auto add = [&](int a, int64_t i) __attribute__((always_inline)) {
      const S* row = kList ? column + list[i] * stride : next;
      next += stride;
      const Vec<T> weight = splat<T>(w[i]);
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
        const bool part = kEnds && kEnd == End::part && n == kVectors - 1;
        acc[a][n] += weight * load_as<T>(row + n * W, part ? last : W);
      }
      if constexpr (kPieces > 0)
        tail_sums[a] += piece_of<T>(weight) * load_piece(row + kVectors * W, last);
    };
    int64_t i = 0;
    for (; i + kWays <= count; i += kWays)
      FASTATTN_UNROLL for (int a = 0; a < kWays; ++a) add(a, i + a);
    for (; i < count; ++i) add(0, i);
    const auto finish = [&](int n, Vec<T> x) __attribute__((always_inline)) {
      store(y + n * W, adds ? load(y + n * W) * factor + x : x * factor);
    };
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      FASTATTN_UNROLL for (int a = 1; a < kWays; ++a) acc[0][n] += acc[a][n];
      finish(n, acc[0][n]);
    }
    FASTATTN_UNROLL for (int a = 1; a < kWays; ++a) tail_sums[0] += tail_sums[a];
    if constexpr (kPieces > 0) finish(kVectors, padded<T>(tail_sums[0]));
    column += kVectors * W, y += kVectors * W, left -= kVectors;
  };
  constexpr Width<0> inside;
  constexpr Width<1> at_end;
  constexpr int kOwnEnd = kEnd != End::vector;  // the last sweep differs from all others
  if constexpr (kRegisters == 32)
    while (left >= 8 + kOwnEnd) sweep(Width<8>(), inside);
  while (left >= 4 + kOwnEnd) sweep(Width<4>(), inside);
  if constexpr (kOwnEnd)
    if (left == 4) return sweep(Width<4>(), at_end);
  if (left == 3) return sweep(Width<3>(), at_end);
  if (left == 2) return sweep(Width<2>(), at_end);
  if (left == 1) return sweep(Width<1>(), at_end);
  if constexpr (kEnd == End::piece) sweep(Width<0>(), at_end);
}
// write_sum() for any rows.
template <class T, bool kWhole = false, class S>
FASTATTN_INLINE void weighted_sum(const Rows<S>& rows, int64_t count, int64_t D, const T* w,
                                  bool adds, T factor, T* y) {
  with_end<T, S, kWhole>(D, [&](auto how) __attribute__((always_inline)) {
    constexpr End kEnd = decltype(how)::value;
    if (rows.at == nullptr)
      write_sum<T, false, kEnd>(rows.base, rows.stride, nullptr, count, D, w, adds, factor, y);
    else
      write_sum<T, true, kEnd>(rows.base, rows.stride, rows.at, count, D, w, adds, factor, y);
  });
}
// y = alpha y + sum_i w[i] rows[i]
template <class T, class S>
FASTATTN_INLINE void add_rows(const Rows<S>& rows, int64_t count, int64_t D, const T* w, T alpha,
                              T* y) {
  weighted_sum<T>(rows, count, D, w, true, alpha, y);
}

// read_row: x = the row, then zeros up to a whole vector. write_row is the inverse.
template <class T, class S>
FASTATTN_INLINE void read_row(const S* row, int64_t columns, T* x) {
  int64_t d = 0;
  for (; d + kLanes<T> <= columns; d += kLanes<T>) store(x + d, load_as<T>(row + d, kLanes<T>));
  if (d < columns) store(x + d, load_as<T>(row + d, static_cast<int>(columns - d)));
}

// Converts x[columns] to the stored dtype and writes it.
template <class T, class S>
FASTATTN_INLINE void write_row(const T* x, int64_t columns, S* row) {
  int64_t d = 0;
  for (; d + kLanes<T> <= columns; d += kLanes<T>) store_as<T>(row + d, load(x + d), kLanes<T>);
  if (d < columns) store_as<T>(row + d, load(x + d), static_cast<int>(columns - d));
}

// read_row(), write_row(), and products and sums of rows, of elements whose dtype is known at run
// time.
template <class T>
__attribute__((noinline)) void read_row(Elements row, int64_t columns, T* x) {
  with_elements(
      row, [&](const auto* from) __attribute__((always_inline)) { read_row(from, columns, x); });
}
template <class T>
__attribute__((noinline)) void write_row(const T* x, int64_t columns, Elements row) {
  with_elements(row, [&](auto* to) __attribute__((always_inline)) { write_row(x, columns, to); });
}
// s[i] = row i . x and y += sum_i w[i] row i for `count` rows, row i at first + at[i] * stride, or
// at first + i * stride without a list. Rows of 16 bits are widened piece by piece.
template <class T>
__attribute__((noinline)) void products_of(const T* first, int64_t stride, const int64_t* at,
                                           int64_t count, int64_t D, const T* x, T* s) {
  row_products<T>(Rows<T>{first, stride, at}, count, D, x, s);
}
// y += sum_n w_n row_n, over `count` rows: `at` has their indices, null means the first rows.
template <class T>
__attribute__((noinline)) void add_rows_of(const T* first, int64_t stride, const int64_t* at,
                                           int64_t count, int64_t D, const T* w, T* y) {
  add_rows<T>(Rows<T>{first, stride, at}, count, D, w, T(1), y);
}
// Calls of_piece(piece, i0, rows, d0, columns) for each piece of the rows, as floats; rows of
// `piece` are kPieceColumns apart.
constexpr int64_t kPieceRows = 32, kPieceColumns = 128;
// Calls of_piece(piece, i0, rows, d0, columns) for all rows, in pieces that are widened to float.
template <class F>
FASTATTN_INLINE void each_piece(Elements first, int64_t stride, const int64_t* at, int64_t count,
                                int64_t D, F of_piece) {
  alignas(kVectorBytes) float piece[kPieceRows * kPieceColumns];
  for (int64_t i0 = 0; i0 < count; i0 += kPieceRows)
    for (int64_t d0 = 0; d0 < D; d0 += kPieceColumns) {
      const int64_t rows = min_of(kPieceRows, count - i0), columns = min_of(kPieceColumns, D - d0);
      for (int64_t r = 0; r < rows; ++r)
        read_row(first + (at != nullptr ? at[i0 + r] : i0 + r) * stride + d0, columns,
                 piece + r * kPieceColumns);
      of_piece(piece, i0, rows, d0, columns);
    }
}
// products_of() for elements whose dtype is known at run time: 16-bit rows are widened in pieces.
inline void products_of(Elements first, int64_t stride, const int64_t* at, int64_t count, int64_t D,
                        const float* x, float* s) {
  if (const float* own = in_place<float>(first))
    return products_of(own, stride, at, count, D, x, s);
  each_piece(first, stride, at, count, D,
             [&](const float* piece, int64_t i0, int64_t rows, int64_t d0, int64_t columns) {
               alignas(kVectorBytes) float part[kPieceRows];
               products_of(piece, kPieceColumns, nullptr, rows, columns, x + d0, part);
               for (int64_t r = 0; r < rows; ++r)
                 s[i0 + r] = d0 == 0 ? part[r] : s[i0 + r] + part[r];
             });
}
// add_rows_of() for elements whose dtype is known at run time.
inline void add_rows_of(Elements first, int64_t stride, const int64_t* at, int64_t count, int64_t D,
                        const float* w, float* y) {
  if (const float* own = in_place<float>(first))
    return add_rows_of(own, stride, at, count, D, w, y);
  each_piece(first, stride, at, count, D,
             [&](const float* piece, int64_t i0, int64_t rows, int64_t d0, int64_t columns) {
               add_rows_of(piece, kPieceColumns, nullptr, rows, columns, w + i0, y + d0);
             });
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
