// The gradient of a relative bias: for each distance of a table, the sum of dS over its pairs.
//
// Positions 0, 1, 2, ...: the pairs are divided into square blocks, and a block of threads takes
// all square blocks of one diagonal. Distances on a diagonal differ by less than a block, so two
// diagonals that are not neighbours have no distance in common, and even and odd diagonals have
// separate tables. Other positions: any two pairs may have the same distance, so one block takes
// all pairs of a head. Either way each sum has one owner, which adds its pairs in one order.
#pragma once
#include "scores.h"

namespace fastattn {
namespace cuda {

template <int kBlock>
FASTATTN_BOTH int64_t diagonals_of(const AttentionArguments& p) {
  const int64_t q_blocks = (p.Lq + kBlock - 1) / kBlock, k_blocks = (p.Lk + kBlock - 1) / kBlock;
  return p.positions == nullptr ? q_blocks + k_blocks - 1 : 1;
}

// Packed sequences: the blocks of threads per head. The host knows only the sum of all lengths, so
// a sequence may have more blocks than diagonals.
template <int kBlock>
FASTATTN_BOTH int64_t packed_diagonals(const AttentionArguments& p) {
  return (p.Lq + p.Lk) / kBlock + p.B;
}

// Packed sequences: finds the n-th diagonal and restricts p to its sequence; false if it does not
// exist.
template <int kBlock>
FASTATTN_DEVICE bool enter_diagonal(AttentionArguments& p, int n, int& b, int& diagonal) {
  const int64_t all_q = p.Lq, all_k = p.Lk;
  auto begin = [&](int64_t b) {
    const int64_t rows = start_of(p.q_starts, b, all_q);
    return (rows + start_of(p.k_starts, b, all_k)) / kBlock + b;
  };
  b = last_sequence(p.B, n, begin);
  if (b == p.B) return false;
  diagonal = static_cast<int>(n - begin(b));
  enter_sequence(p, b);
  return p.Lq > 0 && p.Lk > 0 && diagonal < diagonals_of<kBlock>(p);
}

// The keys of a diagonal for queries [i0, i0 + kBlock).
template <int kBlock>
FASTATTN_DEVICE Range keys_of_diagonal(const AttentionArguments& p, int diagonal, int i0) {
  const int keys = static_cast<int>(p.Lk);
  if (p.positions != nullptr) return {0, keys};
  // Diagonal 0 has the first block of queries and the last one of keys.
  const int64_t last = int64_t(keys - 1) / kBlock * kBlock;
  const int64_t begin = last + i0 - int64_t(diagonal) * kBlock;
  return {clamp_int(begin, 0, keys), clamp_int(begin + kBlock, 0, keys)};
}

// The entry of distance 0 in the table of a diagonal.
FASTATTN_DEVICE float* table_of_diagonal(const PairsArguments& p, int b, int h, int diagonal) {
  const int64_t head = (diagonal & 1) * p.odd_diagonals + h * p.result_stride[1];
  const int64_t middle = p.q_starts == nullptr ? b * p.result_stride[0] + p.relative_bias_size / 2
                                               : p.q_row + p.k_row + (p.Lk - 1) - p.offset;
  return static_cast<float*>(p.result) + head + middle;
}

template <int kQueries, int kKeys>
struct DistanceTile {
  // Rows and columns are in the order of their positions. One more column, so that a column is in
  // different banks.
  float pairs[kQueries][kKeys + 1];
  int query_positions[kQueries], key_positions[kKeys];  // ascending
  int query_places[kQueries], key_places[kKeys];        // in this order
};

// Sorts the positions of `count` of kCount rows. Rows that do not exist come last.
template <int kThreads, int kCount, class Position>
FASTATTN_DEVICE void sort_positions(int count, bool sorted, Position position_of, int* positions,
                                    int* places) {
  for (int n = static_cast<int>(threadIdx.x); n < kCount; n += kThreads) {
    int place = n;
    if (n < count) {
      const int own = position_of(n);
      if (!sorted) {
        place = 0;
        for (int m = 0; m < count; ++m) {
          const int other = position_of(m);
          place += other < own || (other == own && m < n);
        }
      }
      positions[place] = own;
    }
    places[n] = place;
  }
}

// table[distance] += the sum of ds over the pairs of a tile that have this distance. for_each(f)
// calls f(row, column, ds) for each pair of this thread.
template <int kThreads, int kQueries, int kKeys, class ForEach>
FASTATTN_DEVICE void add_by_distance(const AttentionArguments& p, int i0, int j0,
                                     DistanceTile<kQueries, kKeys>& tile, ForEach for_each,
                                     float* table) {
  const int queries = clamp_int(p.Lq - i0, 0, kQueries), keys = clamp_int(p.Lk - j0, 0, kKeys);
  const bool sorted = p.positions == nullptr;
  sort_positions<kThreads, kQueries>(
      queries, sorted, [&](int r) { return position(p, i0 + r + p.offset); }, tile.query_positions,
      tile.query_places);
  sort_positions<kThreads, kKeys>(
      keys, sorted, [&](int c) { return position(p, j0 + c); }, tile.key_positions,
      tile.key_places);
  __syncthreads();  // the places are written
  for_each([&](int row, int column, float ds) {
    tile.pairs[tile.query_places[row]][tile.key_places[column]] = ds;
  });
  __syncthreads();  // the pairs are written
  // Positions that the host has not checked may lead outside of the table.
  const int most = static_cast<int>(p.relative_bias_size / 2);
  const int first =
      clamp_int(int64_t(tile.query_positions[0]) - tile.key_positions[keys - 1], -most, most);
  const int last =
      clamp_int(int64_t(tile.query_positions[queries - 1]) - tile.key_positions[0], -most, most);
  for (int d = first + static_cast<int>(threadIdx.x); d <= last; d += kThreads) {
    float sum = 0.0f;
    for (int c = 0, r = 0; c < keys; ++c) {
      const int wanted = d + tile.key_positions[c];
      while (r < queries && tile.query_positions[r] < wanted) ++r;
      // Several rows may have this position, and the next column may have the position of this one.
      for (int m = r; m < queries && tile.query_positions[m] == wanted; ++m)
        sum += tile.pairs[m][c];
    }
    table[d] += sum;
  }
}

constexpr int kTableThreads = 128;

// Packed sequences: adds the gradients of their tables, in order. A thread sums one element. T
// selects the object file.
template <class T>
__global__ void __launch_bounds__(kTableThreads)
    attention_table_kernel(const __grid_constant__ PairsArguments given) {
  const int64_t n = int64_t(blockIdx.x) * kTableThreads + threadIdx.x,
                size = given.relative_bias_size;
  if (n >= given.Hq * size) return;
  const int h = static_cast<int>(n / size);
  const int64_t d = n % size - size / 2;
  double sum = 0.0;
  for (int b = 0; b < given.B; ++b) {
    PairsArguments p = given;
    enter_sequence(p, b);
    if (d <= p.offset - p.Lk || d >= p.offset + p.Lq) continue;
    for (int diagonal = 0; diagonal < 2; ++diagonal) sum += table_of_diagonal(p, b, h, diagonal)[d];
  }
  given.grad_table[n] = static_cast<float>(sum);
}

}  // namespace cuda
}  // namespace fastattn
