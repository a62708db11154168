// Chooses the compiled kernel for run-time sizes and options.
#pragma once
#include <string>

#include "../params.h"
#include "table.h"
#include "varlen.h"

namespace fastattn {
namespace cuda {

template <int kN>
struct Width {
  static constexpr int value = kN;
};

// Calls f(Width<N>) for the smallest N that holds both D and Dv.
template <class F>
void with_width(const AttentionArguments& p, F f) {
  const int64_t columns = p.D > p.Dv ? p.D : p.Dv;
  if (columns > 128) return f(Width<256>());
  if (columns > 64) return f(Width<128>());
  f(Width<64>());
}

// No options but a window, in memory that can be copied 16 bytes at a time.
inline bool is_plain(const AttentionArguments& p) {
  return p.plain && p.aligned && p.grad_weights.data == nullptr;
}

// The sizes of a call, for the error of a failed launch.
inline std::string shapes(const AttentionArguments& p) {
  auto text = [](int64_t n) { return std::to_string(n); };
  return "B=" + text(p.B) + " Hq=" + text(p.Hq) + " Hkv=" + text(p.Hkv) + " Lq=" + text(p.Lq) +
         " Lk=" + text(p.Lk) + " D=" + text(p.D) + " Dv=" + text(p.Dv);
}

// The number of blocks of kRows queries, over all heads and sequences.
template <int kRows>
int64_t blocks_of_queries(const AttentionArguments& p) {
  const int64_t batches = p.q_starts == nullptr ? p.B : 1;
  return blocks_of_head<kRows>(p.q_starts, p.Lq, p.B) * p.Hq * batches;
}

// The number of blocks of kRows keys, over all key heads and sequences.
template <int kRows>
int64_t blocks_of_keys(const AttentionArguments& p) {
  const int64_t batches = p.k_starts == nullptr ? p.B : 1;
  return blocks_of_head<kRows>(p.k_starts, p.Lk, p.B) * p.Hkv * batches;
}

// The blocks that cover a length.
inline int64_t blocks_of(int64_t length, int block) { return (length + block - 1) / block; }

}  // namespace cuda
}  // namespace fastattn
