// Shared by the backward pass and the weights: the weight and the gradient of one pair of a query
// and a key, and the statistics of a row that they need.
#pragma once
#include "mask_program.h"
#include "scores.h"
#include "tile.h"
#include "varlen.h"

namespace fastattn {
namespace cuda {

// The tiles of the backward pass. One side of the scores stays in shared memory, and the other side
// is streamed past it. The four tiles, K, V, Q and dO, take at most 96 KiB of shared memory.
template <class T, int kD>
struct BackwardShape {
  static constexpr bool kWide = sizeof(typename T::Storage) == 4;
  static constexpr int kWarps = kWide && kD == 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStaying = 16 * kWarps;  // 16 rows per warp
  // As many rows as fit in registers beside the sums without spilling.
  static constexpr int kPassing = kD <= (kWide ? 64 : 128) ? 32 : 16;
  using Staying = Tile<T, kStaying, kD>;
  using Passing = Tile<T, kPassing, kD>;
  static constexpr int kTileBytes = 2 * (Staying::kBytes + Passing::kBytes);
  // After the tiles: the statistics and a flag of each streamed row. With options also a bit for
  // each pair, in words of the staying or of the streamed rows.
  static constexpr int kBits = kTileBytes + 20 * kPassing;
  static constexpr int kSharedBytes = kBits + 4 * kStaying;
  static_assert(MaskBits<kStaying, kPassing>::kBytes <= 4 * kStaying, "too many bits");
  static_assert(MaskBits<kPassing, kStaying>::kBytes <= 4 * kStaying, "too many bits");
  static_assert(kSharedBytes <= 97 << 10, "too much shared memory");
};

// The statistics of one query: p = exp((s - hi) - lo), ds = p ((dp - delta) - rest). hi is inf if
// the row is fully masked or does not exist.
struct alignas(16) RowStats {
  float hi, lo, delta, rest;
};

// The stats of a query; past the last query its weights are 0.
FASTATTN_DEVICE RowStats stats_of(const AttentionArguments& p, int b, int h, int i) {
  if (i >= p.Lq) return {float_of_bits(0x7f800000u), 0.0f, 0.0f, 0.0f};
  const float* row = p.row_stats + stats_row(p, b, h, i) * 4;
  return {row[0], row[1], row[2], row[3]};
}

struct Pair {
  float weight;    // after dropout
  float gradient;  // of the score
  float slope;     // derivative with respect to scale q . k
};

// The gradient passed in for the weight itself, in addition to the one through the output.
FASTATTN_DEVICE float weight_gradient(const AttentionArguments& p, int b, int h, int i, int j,
                                      float (*widen)(const void*, int64_t)) {
  const int64_t* stride = p.grad_weights.stride;
  const int64_t n = b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
  const float g = widen(p.grad_weights.data, n);
  return p.weights == Weights::averaged ? g / static_cast<float>(p.Hq) : g;
}

// Element n of a tensor, as a float.
template <class T>
FASTATTN_DEVICE float element_at(const void* data, int64_t n) {
  return T::widen(static_cast<const typename T::Storage*>(data)[n]);
}

// The score of a call without options, less hi. As in the forward pass, it is not rounded before
// the subtraction.
FASTATTN_DEVICE float plain_score(const AttentionArguments& p, float dot, const RowStats& row) {
  return fmaf(dot, p.scale_float, -row.hi);
}

// dp is dO_i . V_j; `words` holds the dropout draws of (i, j / 8).
template <class T, bool kGeneral>
FASTATTN_DEVICE Pair pair_of(const Options& options, float dot, float dp, int i, int j,
                             const Range& visible, const RowStats& row, const Words& words) {
  const AttentionArguments& p = options.p;
  // Excluded pairs are selected, not multiplied by 0, so that NaN or inf in them has no effect.
  if (!kGeneral) {
    if (!visible.has(j)) return {0.0f, 0.0f, 0.0f};
    const float weight = exp2_approx((plain_score(p, dot, row) - row.lo) * kLog2e);
    return {weight, weight * ((dp - row.delta) - row.rest), 1.0f};
  }
  const Score s = options.score(dot, i, j, visible);
  if (s.value == minus_infinity()) return {0.0f, 0.0f, 0.0f};
  const float above = p.plain ? plain_score(p, dot, row) : s.value - row.hi;
  const float weight = exp2_approx((above - row.lo) * kLog2e);
  if (p.grad_weights.data != nullptr)
    dp += weight_gradient(p, options.b, options.h, i, j, element_at<T>);
  const float kept = options.drops() ? options.kept(words, j) : 1.0f;
  if (kept == 0.0f) return {0.0f, weight * (-row.delta - row.rest), s.slope};
  return {weight * kept, weight * ((kept * dp - row.delta) - row.rest), s.slope};
}

}  // namespace cuda
}  // namespace fastattn
