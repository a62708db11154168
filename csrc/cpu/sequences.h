// Attention over sequences of different lengths: the part that the bindings of packed sequences and
// of a cache share. Everything that is used as an index is checked first: a wrong length must be an
// error, not a crash.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../operands.h"

namespace fastattn {

// The numbers of queries and keys of sequence b.
inline std::pair<int64_t, int64_t> lengths_of(const SequencesParams& t, int64_t b) {
  return {t.q_starts == nullptr ? t.attention.Lq : t.q_starts[b + 1] - t.q_starts[b],
          t.k_starts == nullptr ? t.k_lengths[b] : t.k_starts[b + 1] - t.k_starts[b]};
}

// A table of distances must have all distances of every sequence.
inline void check_table(const SequencesParams& t) {
  const AttentionParams& all = t.attention;
  if (all.relative_bias == nullptr) return;
  int64_t longest = 1;
  for (int64_t b = 0; b < all.B; ++b) {
    const auto [queries, keys] = lengths_of(t, b);
    longest = std::max({longest, queries, keys});
  }
  expect(2 * longest - 1 <= all.relative_bias_size,
         "relative_bias must have at least " + std::to_string(2 * longest - 1) +
             " distances for a sequence of " + std::to_string(longest) + " rows, got " +
             std::to_string(all.relative_bias_size));
}

// The sequences, the most work first.
inline std::vector<int64_t> order_of_work(const SequencesParams& t) {
  const AttentionParams& all = t.attention;
  std::vector<double> work(static_cast<size_t>(all.B));
  for (int64_t b = 0; b < all.B; ++b) {
    const auto [queries, keys] = lengths_of(t, b);
    work[static_cast<size_t>(b)] = static_cast<double>(queries) * static_cast<double>(keys);
  }
  std::vector<int64_t> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return work[static_cast<size_t>(a)] > work[static_cast<size_t>(b)];
  });
  return order;
}

}  // namespace fastattn
