// Where the rows of a cache are that decoding reads, and what it prefetches.
#pragma once
#include "../simd/simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kDecodeBlock = 64;  // keys whose scores decoding holds at once

// The processor's prefetcher stops at the end of a 4 KiB page. So while row j is read, row j of those
// that are read next is prefetched into the L2 cache: 1.1 to 1.3 times the speed on Zen 3, 1.3 to 1.6
// on an Intel Xeon (Emerald Rapids, caches of more than L2), the same on Zen 4. Not measured on Arm.
constexpr bool kPrefetchesInOrder = kRegisters == 16 || kVectorBytes == 64;

// The addresses of the rows of a block, of elements S, wherever they are.
template <class S>
struct BlockRows {
  const S* at[kDecodeBlock];
  int64_t count = 0;
};
template <class S>
struct AnyRows {
  const S* const* at;
  FASTATTN_INLINE const S* row(int64_t j) const { return at[j]; }
};
// Rows at one distance from each other: without the look-up a token reads its cache 1.15 times as fast
// in float32 (Zen 5).
template <class S>
struct EvenRows {
  const S* first;
  int64_t stride;
  FASTATTN_INLINE const S* row(int64_t j) const { return first + j * stride; }
};

// The rows of a block, and those that are read next.
template <class Rows>
struct Stream {
  Rows now, next;
  int64_t next_count, turns = 1, turn = 0;
  FASTATTN_INLINE auto row(int64_t j) const { return now.row(j); }
  // Of row j, the lines of `bytes` bytes from element d on.
  FASTATTN_INLINE void prefetch(int64_t j, int64_t d, int64_t bytes) const {
    if (j >= next_count || (j & (turns - 1)) != turn) return;
    const char* at = reinterpret_cast<const char*>(next.row(j) + d);
    for (int64_t n = 0; n < bytes; n += 64) __builtin_prefetch(at + n, 0, 2);
  }
  // The passes over a block, `most` rows of the group each, take turns, so that reading is spread
  // over their time.
  FASTATTN_INLINE Stream in_pass(int64_t r, int64_t most, int64_t rows) const {
    int64_t turns = 1;
    while (2 * turns * most <= rows) turns *= 2;
    const int64_t turn = r / most;
    return {now, next, turn < turns ? next_count : 0, turns, turn};
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
