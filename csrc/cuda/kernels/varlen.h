// Which sequence a block of threads works on, and which of its rows.
//
// In a rectangular batch every head has the same number of blocks. Of packed sequences the host
// knows only how many rows there are in all, since it does not wait for the lengths: sequence b has
// the blocks from starts[b] / kRows + b on. These are as many as it needs or one more, which finds
// no rows. B stands for the rows after the last sequence, which see nothing and are seen by none.
#pragma once
#include "../params.h"
#include "tile.h"

namespace fastattn {
namespace cuda {

// Blocks of a head: of Lq, or of Lk, rows.
template <int kRows>
FASTATTN_BOTH int64_t blocks_of_head(const int64_t* starts, int64_t rows, int64_t batch) {
  return starts == nullptr ? (rows + kRows - 1) / kRows : rows / kRows + batch + 1;
}

// Row starts[b]. Whatever there is in memory, starts begin at 0 and are never outside of the
// tensor.
FASTATTN_DEVICE int start_of(const int64_t* starts, int64_t b, int64_t rows) {
  return b == 0 ? 0 : clamp_int(starts[b], 0, static_cast<int>(rows));
}

// Where sequence b ends; after the last one are the rows that are left.
FASTATTN_DEVICE int end_of(const int64_t* starts, int64_t b, int64_t batch, int64_t rows) {
  const int begin = start_of(starts, b, rows);
  const int end = b < batch ? start_of(starts, b + 1, rows) : static_cast<int>(rows);
  return end < begin ? begin : end;
}

// The last b of [0, B] with begin(b) <= n, where begin rises.
template <class Begin>
FASTATTN_DEVICE int last_sequence(int64_t batch, int64_t n, Begin begin) {
  int64_t low = 0, high = batch;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (begin(middle) <= n)
      low = middle;
    else
      high = middle - 1;
  }
  return static_cast<int>(low);
}

// p becomes what sequence b alone would be given.
FASTATTN_DEVICE void enter_sequence(AttentionArguments& p, int b) {
  const int64_t all_q = p.Lq, all_k = p.Lk;  // of all sequences
  p.q_row = start_of(p.q_starts, b, all_q);
  p.k_row = start_of(p.k_starts, b, all_k);
  p.Lq = end_of(p.q_starts, b, p.B, all_q) - p.q_row;
  p.Lk = end_of(p.k_starts, b, p.B, all_k) - p.k_row;
  if (p.bottom_right) {
    p.offset = p.Lk - p.Lq;
    set_window(p);
  }
}

struct Block {
  int b, h;  // h: of the side that is divided into blocks
  int row;   // its first row, of the sequence
};

// The block of queries, false if there are no such rows.
template <int kRows>
FASTATTN_DEVICE bool enter_queries(AttentionArguments& p, Block& block) {
  const auto blocks = static_cast<unsigned>(blocks_of_head<kRows>(p.q_starts, p.Lq, p.B));
  const auto head = blockIdx.x / blocks;
  // Last queries first: with a causal mask theirs is the most work.
  const int n = static_cast<int>(blocks - 1 - blockIdx.x % blocks);
  if (p.q_starts == nullptr) {
    block = {static_cast<int>(head / static_cast<unsigned>(p.Hq)),
             static_cast<int>(head % static_cast<unsigned>(p.Hq)), n * kRows};
    return true;
  }
  auto begin = [&](int64_t b) { return start_of(p.q_starts, b, p.Lq) / kRows + b; };
  const int b = last_sequence(p.B, n, begin);
  block = {b, static_cast<int>(head), static_cast<int>(n - begin(b)) * kRows};
  enter_sequence(p, b);
  if (b == p.B) p.Lk = 0;
  return block.row < p.Lq;
}

// The block of keys, false if there are no such rows.
template <int kRows>
FASTATTN_DEVICE bool enter_keys(AttentionArguments& p, Block& block) {
  const auto blocks = static_cast<unsigned>(blocks_of_head<kRows>(p.k_starts, p.Lk, p.B));
  const auto head = blockIdx.x / blocks;
  const int n = static_cast<int>(blockIdx.x % blocks);
  if (p.k_starts == nullptr) {
    block = {static_cast<int>(head / static_cast<unsigned>(p.Hkv)),
             static_cast<int>(head % static_cast<unsigned>(p.Hkv)), n * kRows};
    return true;
  }
  auto begin = [&](int64_t b) { return start_of(p.k_starts, b, p.Lk) / kRows + b; };
  const int b = last_sequence(p.B, n, begin);
  block = {b, static_cast<int>(head), static_cast<int>(n - begin(b)) * kRows};
  enter_sequence(p, b);
  if (b == p.B) p.Lq = 0;
  return block.row < p.Lk;
}

// All queries of all heads.
FASTATTN_BOTH int64_t rows_of(const AttentionArguments& p) {
  return (p.q_starts == nullptr ? p.B : 1) * p.Hq * p.Lq;
}

// Query i of a batch entry; of packed sequences row i of all, which becomes query i of b.
FASTATTN_DEVICE void enter_row(AttentionArguments& p, int& b, int& i) {
  if (p.q_starts == nullptr) return;
  b = last_sequence(p.B, i, [&](int64_t n) { return start_of(p.q_starts, n, p.Lq); });
  enter_sequence(p, b);
  i -= static_cast<int>(p.q_row);
}

// Of lse and of row_stats: query i.
FASTATTN_DEVICE int64_t stats_row(const AttentionArguments& p, int b, int h, int i) {
  return b * p.stats_stride[0] + h * p.stats_stride[1] + p.q_row + i;
}

// The matrix of one head of an operand, from row `row` on.
template <class Storage>
FASTATTN_DEVICE Matrix<Storage> head_of(const Tensor4& t, int b, int h, int64_t row,
                                        int64_t columns, bool aligned) {
  const int64_t offset = b * t.stride[0] + h * t.stride[1] + row * t.stride[2];
  return {static_cast<Storage*>(t.data) + offset, t.stride[2], t.stride[3],
          static_cast<int>(columns), aligned};
}

}  // namespace cuda
}  // namespace fastattn
