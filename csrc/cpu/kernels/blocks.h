// Block sizes: pure functions of the dtype and the head dims, never of the batch, the threads or
// the load, so that a row's bits do not depend on them. Budgets are for a 32 KiB L1 and a 1 MiB L2
// cache a core.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int kPanelVectors =
    2;  // a panel of queries is two vectors wide, one where few queries are left

template <class P>
constexpr int64_t kPanelLanes = kPanelVectors * kLanes<typename P::Acc>;

// Queries of a task: their packed copies and outputs stay in L2 while all keys stream by.
template <class P>
FASTATTN_INLINE int64_t query_block(int64_t D, int64_t Dv) {
  const int64_t bytes = (words<P>(D) + Dv) * static_cast<int64_t>(sizeof(typename P::Word));
  const int64_t wanted = min_of<int64_t>(256 * P::kPerWord, (256 << 10) / bytes);
  return max_of<int64_t>(1, wanted / kPanelLanes<P>) * kPanelLanes<P>;
}

// Keys of a block: a multiple of the score tile's rows (and of a pair), small enough that keys and
// values stay in L2 and the scores of a panel in L1.
template <class P>
FASTATTN_INLINE int64_t key_block(int64_t D, int64_t Dv) {
  constexpr int64_t step = 2 * P::kScoreRows;
  const int64_t bytes =
      (words<P>(D) + words<P>(Dv)) * static_cast<int64_t>(sizeof(typename P::Word));
  const int64_t wanted = min_of<int64_t>(96 * P::kPerWord, (128 << 10) / bytes);
  return max_of<int64_t>(1, wanted / step) * step;
}

// Up to here a panel can meet all its keys at once: two tiles of scores this long still fit L2.
constexpr int64_t kWholeKeys = 1024;
template <class P>
FASTATTN_INLINE int64_t whole_key_block(int64_t Lk) {
  return round_up(max_of<int64_t>(Lk, 1), 2 * P::kScoreRows);
}

// A bump allocator over the thread's scratch; first measured with a null base, then taken.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
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
