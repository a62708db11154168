// The checks of a relative bias that both modules share.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "arguments.h"

namespace fastattn {

// The kernels read a table of distances at d = position(i + offset) - position(j), for all queries
// i and keys j. All of these, smallest <= d <= largest, must be in it.
inline void expect_distances(const AttentionParams& p, int64_t smallest, int64_t largest) {
  const int64_t needed = 2 * std::max(-smallest, largest) + 1;
  expect(p.relative_bias_size % 2 == 1 && p.relative_bias_size >= needed,
         "relative_bias must have an odd number of columns, at least " + std::to_string(needed) +
             ", got " + std::to_string(p.relative_bias_size));
}

// Without the lengths, which may be on a GPU: kernels then clamp distances to the table.
inline void expect_middle(const AttentionParams& p) {
  expect(p.relative_bias == nullptr || p.relative_bias_size % 2 == 1,
         "relative_bias must have an odd number of columns, got " +
             std::to_string(p.relative_bias_size));
}

inline bool reads_relative_bias(const AttentionParams& p) {
  return p.relative_bias != nullptr && p.Lq > 0 && p.Lk > 0;
}

// Everything but the values of the positions. `positions`: how many there are.
inline void check_relative_bias(const AttentionParams& p, int64_t positions) {
  if (!reads_relative_bias(p)) return;
  if (p.positions == nullptr)
    return expect_distances(p, p.offset - (p.Lk - 1), p.offset + p.Lq - 1);
  expect(p.offset >= 0 && p.offset + p.Lq <= positions && p.Lk <= positions,
         "positions must have an element for each of " + std::to_string(p.offset + p.Lq) +
             " queries and " + std::to_string(p.Lk) + " keys, got " + std::to_string(positions));
}

}  // namespace fastattn
