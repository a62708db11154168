// The bias of an image whose keys are its tokens, row by row, from two numbers for each query:
//
//   bias[i][j] = rows[i][y] + columns[i][x],   (y, x) = (j / width, j % width)
#pragma once
#include "pack.h"
#include "relative_bias.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

FASTATTN_INLINE bool has_image_bias(const AttentionParams& p) { return p.row_bias.data != nullptr; }

// The row of one query in a tensor [B, H, Lq, ...].
template <class T>
FASTATTN_INLINE const T* of_query(const Tensor4& x, int64_t b, int64_t h, int64_t i) {
  return static_cast<const T*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
}

// Calls f(y, x, j, n) for the runs of keys [j, j + n) of one row of the image, n at most
// `max_count`.
template <class F>
FASTATTN_INLINE void each_run(int64_t width, int64_t j0, int64_t j1, int64_t max_count, F f) {
  for (int64_t j = j0, n; j < j1; j += n) {
    n = min_of(min_of(max_count, j1 - j), width - j % width);
    f(j / width, j % width, j, n);
  }
}

// tile[j - j0][lane] = bias[i0 + lane][j] for keys [j0, j1), 0 in the lanes past the last query.
// With `add` it is added to the tile.
template <class T>
__attribute__((noinline)) void pack_image_bias(const AttentionParams& p, int64_t b, int64_t h,
                                               int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                                               int64_t lanes, bool add, T* tile) {
  constexpr int W = kLanes<T>;
  constexpr int64_t kRun = W, kMost = 2 * W;  // the widest panel
  alignas(kVectorBytes) T columns[kRun * kMost], row[kMost] = {};
  each_run(p.image_width, j0, j1, kRun, [&](int64_t y, int64_t x, int64_t j, int64_t n) {
    const Tensor4& c = p.column_bias;
    pack_transposed<T>(of_query<T>(c, b, h, i0) + x * c.stride[3], c.stride[2], c.stride[3],
                       i1 - i0, n, lanes, columns, lanes);
    for (int64_t i = i0; i < i1; ++i)
      row[i - i0] = of_query<T>(p.row_bias, b, h, i)[y * p.row_bias.stride[3]];
    for (int64_t k = 0; k < n; ++k)
      for (int64_t l = 0; l < lanes; l += W) {
        T* const to = tile + (j + k - j0) * lanes + l;
        const Vec<T> bias = sum_of_biases<T>(load(columns + k * lanes + l), load(row + l));
        store(to, add ? sum_of_biases<T>(load(to), bias) : bias);
      }
  });
}

// bias[j - j0] = the bias of query i and key j, for one query; added to it with `add`.
template <class T>
__attribute__((noinline)) void read_image_bias_row(const AttentionParams& p, int64_t b, int64_t h,
                                                   int64_t i, int64_t j0, int64_t j1, bool add,
                                                   T* bias) {
  const T* const rows = of_query<T>(p.row_bias, b, h, i);
  const T* const columns = of_query<T>(p.column_bias, b, h, i);
  const auto sum = [](T a, T c) { return a == -kInf<T> || c == -kInf<T> ? -kInf<T> : a + c; };
  for (int64_t j = j0; j < j1; ++j) {
    const T both = sum(rows[j / p.image_width * p.row_bias.stride[3]],
                       columns[j % p.image_width * p.column_bias.stride[3]]);
    bias[j - j0] = add ? sum(bias[j - j0], both) : both;
  }
}

// Of a query head: the sums of the gradients of rows and columns, [panels][rows, columns][lanes].
FASTATTN_INLINE int64_t image_sums(const AttentionParams& p, int64_t queries) {
  return p.grad_row_bias == nullptr ? 0 : queries * (p.image_height + p.image_width);
}

// d rows += dS, summed over the columns; d columns += dS, summed over the rows. For queries i0...
template <class T, int kVectors>
__attribute__((noinline)) void add_image_gradient(const AttentionParams& p, int64_t i0, int64_t j0,
                                                  int64_t j1, const T* ds, T* sums) {
  constexpr int64_t W = kLanes<T>, L = kVectors * W;
  T* const rows = sums + i0 * (p.image_height + p.image_width);
  T* const columns = rows + p.image_height * L;
  each_run(p.image_width, j0, j1, j1 - j0, [&](int64_t y, int64_t x, int64_t j, int64_t n) {
    FASTATTN_UNROLL for (int v = 0; v < kVectors; ++v) {
      Vec<T> sum{};
      for (int64_t k = 0; k < n; ++k) {
        const Vec<T> d = load(ds + (j + k - j0) * L + v * W);
        T* const to = columns + (x + k) * L + v * W;
        store(to, load(to) + d);
        sum += d;
      }
      store(rows + y * L + v * W, load(rows + y * L + v * W) + sum);
    }
  });
}

// Writes the gradients of rows and columns of a head, if they are wanted, from their sums.
template <class T, int kVectors>
FASTATTN_INLINE void write_image_gradient(const AttentionParams& p, int64_t b, int64_t h,
                                          const T* sums) {
  constexpr int64_t L = kVectors * kLanes<T>;
  if (p.grad_row_bias == nullptr) return;
  T ones[L];
  for (T& x : ones) x = T(1);
  const auto write = [&](const T* from, void* to, int64_t size) {
    T* out = static_cast<T*>(to) + (b * p.Hq + h) * p.Lq * size;
    const int64_t both = p.image_height + p.image_width;
    for (int64_t i = 0; i < p.Lq; i += L)
      unpack_transposed<T>(from + i * both, L, ones, min_of(L, p.Lq - i), size, out + i * size,
                           size);
  };
  write(sums, p.grad_row_bias, p.image_height);
  write(sums + p.image_height * L, p.grad_column_bias, p.image_width);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
