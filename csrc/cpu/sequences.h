// Attention over sequences with lengths of their own: what the bindings of packed sequences and of
// a cache share. What is read as an address is checked first: a wrong length must be an error, not
// a crash.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "../params.h"

namespace fastattn {

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

// The sequences, the most work first.
inline std::vector<int64_t> order_of_work(const SequencesParams& t) {
  const AttentionParams& all = t.attention;
  std::vector<double> work(static_cast<size_t>(all.B));
  for (int64_t b = 0; b < all.B; ++b) {
    const int64_t queries = t.q_starts == nullptr ? all.Lq : t.q_starts[b + 1] - t.q_starts[b];
    const int64_t keys = t.k_starts == nullptr ? t.k_lengths[b] : t.k_starts[b + 1] - t.k_starts[b];
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
