// The addresses of the cache rows that decoding reads, and their prefetching.
#pragma once
#include "../simd/simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kDecodeBlock = 64;  // keys per block of scores in decoding

// The processor's prefetcher stops at the end of a 4 KiB page. So while row j of a block is read,
// row j of the next block is prefetched into the L2 cache. This is faster on Zen 3 and Emerald
// Rapids, equally fast on Zen 4, and not measured on Arm.
constexpr bool kPrefetchesInOrder = kRegisters == 16 || kVectorBytes == 64;

// The rows of a block at arbitrary addresses, of elements S.
template <class S>
struct BlockRows {
  const S* at[kDecodeBlock];
  int64_t count = 0;
};
template <class S>
struct AnyRows {
  const S* const* at;
  // Row j of the block.
  FASTATTN_INLINE const S* row(int64_t j) const { return at[j]; }
};
// Rows with a constant stride, which need no look-up of addresses.
template <class S>
struct EvenRows {
  const S* first;
  int64_t stride;
  // Row j of the block.
  FASTATTN_INLINE const S* row(int64_t j) const { return first + j * stride; }
};

// The rows of a block, and the rows to prefetch meanwhile.
template <class Rows>
struct Stream {
  Rows now, next;
  int64_t next_count, turns = 1, turn = 0;
  FASTATTN_INLINE auto row(int64_t j) const { return now.row(j); }
  // Prefetches `bytes` bytes of row j, from element d on.
  FASTATTN_INLINE void prefetch(int64_t j, int64_t d, int64_t bytes) const {
    if (j >= next_count || (j & (turns - 1)) != turn) return;
    const char* at = reinterpret_cast<const char*>(next.row(j) + d);
    for (int64_t n = 0; n < bytes; n += 64) __builtin_prefetch(at + n, 0, 2);
  }
  // The passes over a block, `max_rows` rows of the group each, take turns, so that reading is
  // spread over their time.
  FASTATTN_INLINE Stream in_pass(int64_t r, int64_t max_rows, int64_t rows) const {
    int64_t turns = 1;
    while (2 * turns * max_rows <= rows) turns *= 2;
    const int64_t turn = r / max_rows;
    return {now, next, turn < turns ? next_count : 0, turns, turn};
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
