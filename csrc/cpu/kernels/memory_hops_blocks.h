// The rows of a memory that a query reads, block by block: which ones it can see, and how they are
// stored.
#pragma once
#include "memory_hops.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T>
class HopBlocks : protected HopSteps<T> {
  typedef HopSteps<T> Base;

 protected:
  using Base::batch_of, Base::dp, Base::groups, Base::is_narrow, Base::p, Base::query_of,
      Base::row_of, Base::W;
  static constexpr int64_t kCached = 1 << 20;  // elements that fit in the caches

  explicit HopBlocks(const MemoryHopsParams& params) : Base(params) {}

  // The rows of a block that a query can see in a hop: their positions in the memory, from n0 on.
  struct Block {
    int64_t count;
    bool all;  // at[i] = i
    bool biased;
    int64_t at[kHopBlock];
    T bias[kHopBlock];
  };

  // Finds the visible rows of [n0, n1) for one query, and their biases.
  FASTATTN_INLINE void see(int64_t row, int64_t k, int64_t n0, int64_t n1, Block* block) const {
    block->all = true;
    block->biased = p.bias.data != nullptr;
    block->count = n1 - n0;
    if (p.mask.data != nullptr || p.bias.data != nullptr) select_rows(row, k, n0, n1, block);
  }
  // Lists the rows of [n0, n1) that a query sees in hop k, with their bias.
  __attribute__((noinline)) void select_rows(int64_t row, int64_t k, int64_t n0, int64_t n1,
                                             Block* block) const {
    const int64_t b = batch_of(row), q = query_of(row);
    const int64_t *sm = p.mask.stride, *sb = p.bias.stride;
    const Bool* mask =
        static_cast<const Bool*>(p.mask.data) + b * sm[0] + q * sm[1] + k * sm[2] + n0 * sm[3];
    T bias[kHopBlock] = {};
    if (block->biased)
      read_elements(p.bias.data, p.bias_dtype, b * sb[0] + q * sb[1] + k * sb[2] + n0 * sb[3],
                    sb[3], n1 - n0, bias);
    int64_t count = 0;
    for (int64_t i = 0; i < n1 - n0; ++i) {
      const bool visible = (p.mask.data == nullptr || mask[i * sm[3]].bits) && bias[i] != -kInf<T>;
      block->at[count] = i;
      block->bias[count] = bias[i];
      count += visible;
    }
    block->all = count == n1 - n0;
    block->count = count;
  }

  // Space for a block of narrow rows as T, or one row of a gradient.
  struct WideBlock {
    T* rows;           // [kHopBlock][D] if rows are narrow, [dp]
    const void* from;  // the whole block whose rows are widened; null = none, or part of a block
  };
  // The buffers of one thread, for both memories.
  struct WideBlocks {
    WideBlock in, out;
  };
  // Takes the buffers of widened blocks from an arena.
  WideBlocks wide_at(Arena& a) const {
    const int64_t size = is_narrow ? kHopBlock * p.D + W : dp;
    T *const in = a.take<T>(size), *const out = a.take<T>(size);
    return {{in, nullptr}, {out, nullptr}};
  }

  // The rows of a block that a query can see, in place or widened. Whole vectors of 16-bit elements
  // are widened as they are multiplied. The end of a row that does not fill a vector would be read
  // element by element, so such rows are widened first, once per block.
  FASTATTN_INLINE StoredRows rows_of(StoredRows stored, const Block& block, WideBlock* wide) const {
    if (is_narrow && p.D != dp) return widen_block(stored, block, wide);
    return {stored.base, stored.stride, block.all ? nullptr : block.at, stored.dtype};
  }
  // The rows of a block in the type of the sums; a block that was already widened for another query
  // is not widened again.
  __attribute__((noinline)) StoredRows widen_block(StoredRows rows, const Block& block,
                                                   WideBlock* wide) const {
    if (!block.all) rows.at = block.at;
    const bool has_all = rows.base != nullptr && wide->from == rows.base;
    if (has_all) return {wide->rows, p.D, rows.at, kStoredAs<T>};
    widen(rows, block.count, p.D, wide->rows);
    wide->from = block.all ? rows.base : nullptr;
    return {wide->rows, p.D, nullptr, kStoredAs<T>};
  }

  // Whether a query, in its last hop, prefetches the rows of the next group. Main memory is idle
  // then, because its own rows come from the cache: one memory fits in the caches, all of them do
  // not, and no row is masked.
  FASTATTN_INLINE bool prefetches_next_group(int64_t group, int64_t row, int64_t k) const {
    return k == p.K - 1 && group + 1 < groups && row + 1 == row_of(group + 1, 0) &&
           groups * p.N * p.D > kCached && p.N * p.D <= kCached / 2 && p.mask.data == nullptr;
  }
  // Prefetches rows [n0, n1) of the next group's memories. Inline, because the compiler removes
  // calls of a function that only prefetches.
  FASTATTN_INLINE void prefetch_next(int64_t group, int64_t n0, int64_t n1) const {
    const StoredRows in = this->in_rows(group + 1, 0, n0), out = this->out_rows(group + 1, 0, n0);
    const int64_t size = bytes_of(p.dtype), row = p.D * size;
    const char *of_in = static_cast<const char*>(in.base),
               *of_out = static_cast<const char*>(out.base);
    for (int64_t n = n0; n < n1; ++n, of_in += in.stride * size, of_out += out.stride * size)
      for (int64_t line = 0; line < row; line += 64) {
        __builtin_prefetch(of_in + line, 0, 2);
        __builtin_prefetch(of_out + line, 0, 2);
      }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
