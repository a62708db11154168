// Maps a block of threads to a sequence and to rows of it.
//
// In a rectangular batch every head has the same number of blocks. For packed sequences the host
// knows only the total number of rows, because it does not wait for the lengths. So the blocks of
// sequence b start at starts[b] / kRows + b. That is as many blocks as the sequence needs, or one
// more, which has no rows and returns. The rows after the last sequence form one extra sequence,
// number B: its queries are fully masked, and no query can see its keys.
#pragma once
#include "../params.h"
#include "tile.h"

namespace fastattn {
namespace cuda {

// The number of blocks of a head; `rows` is Lq or Lk.
template <int kRows>
FASTATTN_BOTH int64_t blocks_of_head(const int64_t* starts, int64_t rows, int64_t batch) {
  return starts == nullptr ? (rows + kRows - 1) / kRows : rows / kRows + batch + 1;
}

// The first row of sequence b. Invalid starts are harmless: the first start is always 0, and all
// are clamped to the tensor.
FASTATTN_DEVICE int start_of(const int64_t* starts, int64_t b, int64_t rows) {
  return b == 0 ? 0 : clamp_int(starts[b], 0, static_cast<int>(rows));
}

// The end of sequence b. The extra sequence b == batch ends at the last row.
FASTATTN_DEVICE int end_of(const int64_t* starts, int64_t b, int64_t batch, int64_t rows) {
  const int begin = start_of(starts, b, rows);
  const int end = b < batch ? start_of(starts, b + 1, rows) : static_cast<int>(rows);
  return end < begin ? begin : end;
}

// The last b in [0, B] with begin(b) <= n; `begin` must not decrease.
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

// Restricts p to sequence b.
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
  int b, h;  // h: the head of the side that is divided into blocks
  int row;   // its first row within the sequence
};

// Packed sequences: finds the n-th block of kRows queries, and restricts p to its sequence.
template <int kRows>
FASTATTN_DEVICE Block enter_packed_queries(AttentionArguments& p, int n, int h) {
  auto begin = [&](int64_t b) { return start_of(p.q_starts, b, p.Lq) / kRows + b; };
  const int b = last_sequence(p.B, n, begin);
  const Block block{b, h, static_cast<int>(n - begin(b)) * kRows};
  enter_sequence(p, b);
  if (b == p.B) p.Lk = 0;
  return block;
}

// Finds this block's queries; false if it has none.
template <int kRows>
FASTATTN_DEVICE bool enter_queries(AttentionArguments& p, Block& block) {
  const auto blocks = static_cast<unsigned>(blocks_of_head<kRows>(p.q_starts, p.Lq, p.B));
  const auto head = blockIdx.x / blocks;
  // Last queries first, because with a causal mask they have the most work.
  const int n = static_cast<int>(blocks - 1 - blockIdx.x % blocks);
  if (p.q_starts == nullptr) {
    block = {static_cast<int>(head / static_cast<unsigned>(p.Hq)),
             static_cast<int>(head % static_cast<unsigned>(p.Hq)), n * kRows};
    return true;
  }
  block = enter_packed_queries<kRows>(p, n, static_cast<int>(head));
  return block.row < p.Lq;
}

// Finds this block's keys; false if it has none.
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

// The number of queries of all heads.
FASTATTN_BOTH int64_t rows_of(const AttentionArguments& p) {
  return (p.q_starts == nullptr ? p.B : 1) * p.Hq * p.Lq;
}

// Packed sequences: turns row i of all sequences into query i of sequence b.
FASTATTN_DEVICE void enter_row(AttentionArguments& p, int& b, int& i) {
  if (p.q_starts == nullptr) return;
  b = last_sequence(p.B, i, [&](int64_t n) { return start_of(p.q_starts, n, p.Lq); });
  enter_sequence(p, b);
  i -= static_cast<int>(p.q_row);
}

// The row of lse and row_stats for query i.
FASTATTN_DEVICE int64_t stats_row(const AttentionArguments& p, int b, int h, int i) {
  return b * p.stats_stride[0] + h * p.stats_stride[1] + p.q_row + i;
}

// The matrix of one head of an operand, starting at row `row`.
template <class Storage>
FASTATTN_DEVICE Matrix<Storage> head_of(const Tensor4& t, int b, int h, int64_t row,
                                        int64_t columns, bool aligned) {
  const int64_t offset = b * t.stride[0] + h * t.stride[1] + row * t.stride[2];
  return {static_cast<Storage*>(t.data) + offset, t.stride[2], t.stride[3],
          static_cast<int>(columns), aligned};
}

}  // namespace cuda
}  // namespace fastattn
