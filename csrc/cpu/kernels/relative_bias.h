// A bias that depends on the distance of query and key only, from a table of distances:
//
//   bias[i][j] = table[position(i + offset) - position(j)],  table[0] in the middle of the table
//
// Queries are across the lanes. Where their positions are consecutive, so are their entries: a row
// of a tile is a copy of a part of the table. That holds for all queries if positions are 0, 1, 2,
// ..., and for each row of a two-dimensional window.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// The position of row n: n itself, unless the call has positions.
FASTATTN_INLINE int64_t position(const AttentionParams& p, int64_t n) {
  return p.positions == nullptr ? n : p.positions[n];
}

// The entry of distance 0.
template <class T>
FASTATTN_INLINE const T* middle_of_table(const AttentionParams& p, int64_t b, int64_t h) {
  const int64_t* st = p.relative_bias_stride;
  return static_cast<const T*>(p.relative_bias) + b * st[0] + h * st[1] + p.relative_bias_size / 2;
}

// The sum of two biases: -inf in either excludes the pair.
template <class T>
FASTATTN_INLINE Vec<T> sum_of_biases(Vec<T> a, Vec<T> b) {
  const Vec<T> excluded = splat<T>(-kInf<T>);
  return select<T>((a == excluded) | (b == excluded), excluded, a + b);
}

// tile[j - j0][lane] = bias[i0 + lane][j] for keys [j0, j1), 0 in the lanes past the last query.
// With `add` it is added to the tile.
template <class T>
__attribute__((noinline)) void pack_relative_bias(const AttentionParams& p, int64_t b, int64_t h,
                                                  int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                                                  int64_t lanes, bool add, T* tile) {
  constexpr int W = kLanes<T>;
  const T* table = middle_of_table<T>(p, b, h);
  if (!add && i1 - i0 < lanes)
    __builtin_memset(tile, 0, static_cast<size_t>((j1 - j0) * lanes) * sizeof(T));
  for (int64_t i = i0, end; i < i1; i = end) {  // queries [i, end) have consecutive positions
    const int64_t first = position(p, i + p.offset);
    for (end = i + 1; end < i1 && position(p, end + p.offset) == first + end - i;) ++end;
    for (int64_t j = j0; j < j1; ++j) {
      const T* from = table + first - position(p, j);
      T* to = tile + (j - j0) * lanes + i - i0;
      for (int64_t x = 0; x < end - i; x += W) {
        const int count = static_cast<int>(min_of<int64_t>(W, end - i - x));
        const Vec<T> bias = load_first(from + x, count);
        store_first(to + x, add ? sum_of_biases<T>(load_first(to + x, count), bias) : bias, count);
      }
    }
  }
}

// bias[j - j0] = the bias of query i and key j, for one query; with `add`, adds it instead.
template <class T>
__attribute__((noinline)) void read_relative_bias_row(const AttentionParams& p, int64_t b,
                                                      int64_t h, int64_t i, int64_t j0, int64_t j1,
                                                      bool add, T* bias) {
  const T* from = middle_of_table<T>(p, b, h) + position(p, i + p.offset);
  for (int64_t j = j0; j < j1; ++j) {
    const T x = from[-position(p, j)];
    T& to = bias[j - j0];
    to = !add ? x : x == -kInf<T> || to == -kInf<T> ? -kInf<T> : to + x;
  }
}

// The number of sums of a table's gradient: whole vectors, and room for a panel of lanes that ends
// past the table.
template <class T>
FASTATTN_INLINE int64_t relative_sums(const AttentionParams& p, int64_t lanes) {
  return p.grad_relative_bias == nullptr ? 0 : round_up(p.relative_bias_size + lanes, kLanes<T>);
}

// {a[1], a[2], ..., b[0]}
template <class T, int... I>
FASTATTN_INLINE Vec<T> shift_lanes(Vec<T> a, Vec<T> b, Indices<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (I + 1)...);
#else
  return __builtin_shuffle(a, b, Mask<T>{(I + 1)...});
#endif
}

// d table += dS, summed over the pairs of a tile [keys r][lanes] that have the same distance. The
// lanes past the last query are 0.
template <class T, int kVectors>
__attribute__((noinline)) void add_relative_gradient(const AttentionParams& p, int64_t i0,
                                                     int64_t i1, int64_t j0, int64_t j1,
                                                     const T* ds, T* sums) {
  constexpr int W = kLanes<T>, L = kVectors * W;
  T* const table = sums + p.relative_bias_size / 2;
  if (p.positions != nullptr) {
    for (int64_t j = j0; j < j1; ++j, ds += L)
      for (int64_t i = i0; i < i1; ++i)
        table[position(p, i + p.offset) - position(p, j)] += ds[i - i0];
    return;
  }
  // From a key to the previous one, the entries shift by one lane. So the sums shift in registers,
  // and lane 0 is complete. Sums in memory would wait for the previous row's store.
  Vec<T> sum[kVectors] = {};
  T* to = table + i0 + p.offset - (j1 - 1);
  for (int64_t j = j1 - 1; j >= j0; --j, ++to) {
    const T* row = ds + (j - j0) * L;
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) sum[n] += load(row + n * W);
    *to += sum[0][0];
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) sum[n] = shift_lanes<T>(
        sum[n], n + 1 < kVectors ? sum[n + 1] : Vec<T>{}, typename CountTo<kLanes<T>>::type());
  }
  FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) store(to + n * W, load(to + n * W) + sum[n]);
}

// Writes the gradient of the table of a head, if it is wanted, from its sums.
template <class T>
FASTATTN_INLINE void write_relative_gradient(const AttentionParams& p, int64_t b, int64_t h,
                                             const T* sums) {
  if (p.grad_relative_bias == nullptr) return;
  const int64_t size = p.relative_bias_size;
  __builtin_memcpy(static_cast<T*>(p.grad_relative_bias) + (b * p.Hq + h) * size, sums,
                   static_cast<size_t>(size) * sizeof(T));
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
