// Block sizes are pure functions of the dtype and the head dims. They never depend on the batch,
// the threads or the load, so neither do the bits of a row. The budgets assume 32 KiB of L1 and
// 1 MiB of L2 cache per core. Smaller blocks were not faster with 512 KiB of L2 (Zen 3).
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int kPanelVectors =
    2;  // a panel of queries is two vectors wide, or one where few queries are left

// The vectors of a panel where few queries are left.
template <class P>
constexpr int kFewVectors = P::kHasVariants ? 1 : kPanelVectors;

template <class P>
constexpr int64_t kPanelLanes = kPanelVectors * kLanes<typename P::Acc>;

// Queries per task: their packed copies and outputs stay in L2 while all keys stream by.
template <class P>
FASTATTN_INLINE int64_t query_block(int64_t D, int64_t Dv) {
  const int64_t bytes = (words<P>(D) + Dv) * static_cast<int64_t>(sizeof(typename P::Word));
  const int64_t target = min_of<int64_t>(256 * P::kPerWord, (256 << 10) / bytes);
  return max_of<int64_t>(1, target / kPanelLanes<P>) * kPanelLanes<P>;
}

// Keys per block: a multiple of the score tile's rows (and of a pair), small enough that keys and
// values stay in L2 and the scores of a panel in L1.
template <class P>
FASTATTN_INLINE int64_t key_block(int64_t D, int64_t Dv) {
  constexpr int64_t step = 2 * P::kScoreRows;
  const int64_t bytes =
      (words<P>(D) + words<P>(Dv)) * static_cast<int64_t>(sizeof(typename P::Word));
  const int64_t target = min_of<int64_t>(96 * P::kPerWord, (128 << 10) / bytes);
  return max_of<int64_t>(1, target / step) * step;
}

// Up to this many keys, a panel processes all its keys in one block: two tiles of scores of this
// length still fit in L2.
constexpr int64_t kWholeKeys = 1024;
// The keys of such a block: all of them, filled up to whole tiles.
template <class P>
FASTATTN_INLINE int64_t whole_key_block(int64_t Lk) {
  return round_up(max_of<int64_t>(Lk, 1), 2 * P::kScoreRows);
}

// Whether a thread computes several heads in order and prefetches the next one meanwhile: they are
// so small that the operands of two heads fit in half of L2.
template <class P>
FASTATTN_INLINE bool prefetches_next_head(const AttentionParams& p) {
  constexpr int64_t kBytes = 128 << 10;
  return p.Lk <= key_block<P>(p.D, p.Dv) &&
         (p.Lq + p.Lk) * (p.D + p.Dv) * bytes_of(p.dtype) <= kBytes;
}
constexpr int64_t kHeadsInOrder = 16;

// A bump allocator over the thread's scratch. A first pass with a null base measures the size.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  // `count` elements, aligned to 256 bytes.
  template <class T>
  T* take(int64_t count) {
    char* p = base_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(p);
  }
  size_t used() const { return static_cast<size_t>(used_); }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
