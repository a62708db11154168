// Runs before the backward pass and before the weights, which need no delta. Computes hi, lo, delta
// = dO . O and rest = -d lse of every query, one warp per query.
#pragma once
#include "columns.h"
#include "mask_program.h"
#include "sdpa_pairs.h"
#include "softmax.h"

namespace fastattn {
namespace cuda {

constexpr int kRowsThreads = 128;

// Whether the sink of query i has all the weight: no key is visible, or the sink is inf. Called by
// one warp. Masks and biases are read only if lse alone does not decide.
FASTATTN_DEVICE bool sees_only_sink(const AttentionArguments& p, int b, int h, int i, double lse) {
  const double sink = sink_of(p, b, h);
  if (lse == sink && sink == -static_cast<double>(minus_infinity())) return true;
  const Range visible = visible_keys(p, i);
  if (visible.begin >= visible.end) return true;
  if (!excludes_pairs(p) || lse - sink > 1e-6 * fabs(sink)) return false;
  const Options options(p, b, h);
  bool seen = false;
  for (int j = visible.begin + (static_cast<int>(threadIdx.x) & 31); j < visible.end; j += 32)
    seen |= program_sees(p, b, h, i, j) && options.bias(i, j) != minus_infinity();
  return max_of_warp(seen ? 1.0f : 0.0f) == 0.0f;
}

// The maximum score of query i, and the logarithm of the sum of exp(s - hi), the sink included.
// Used for a row whose scores are so large that adding the logarithm to the maximum loses it, even
// in double. Rare and slow.
template <class T>
FASTATTN_DEVICE void exact_stats(const AttentionArguments& p, int b, int h, int i, float& hi,
                                 float& lo) {
  const Options options(p, b, h);
  const Range visible = visible_keys(p, i);
  const int h_kv = h / static_cast<int>(p.Hq / p.Hkv), lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t q = b * p.q.stride[0] + h * p.q.stride[1] + (p.q_row + i) * p.q.stride[2];
  auto score = [&](int j) {
    if (!program_sees(p, b, h, i, j)) return minus_infinity();
    const int64_t k = b * p.k.stride[0] + h_kv * p.k.stride[1] + (p.k_row + j) * p.k.stride[2];
    float dot = 0.0f;
    for (int d = 0; d < p.D; ++d)
      dot += Product<T>::factor(element_at<T>(p.q.data, q + d * p.q.stride[3])) *
             Product<T>::factor(element_at<T>(p.k.data, k + d * p.k.stride[3]));
    return options.score(dot, i, j, visible).value;
  };
  float most = minus_infinity();
  for (int j = visible.begin + lane; j < visible.end; j += 32) most = fmaxf(most, score(j));
  most = max_of_warp(most);
  float sum = 0.0f;
  for (int j = visible.begin + lane; j < visible.end; j += 32)
    sum += exp2_approx((score(j) - most) * kLog2e);
  const RowTotal total = total_of_row(most, sum_of_warp(sum), sink_of(p, b, h));
  hi = static_cast<float>(total.most);
  lo = logf(total.sum);
}

// kExcludes: a mask, a relative bias or a mask program may exclude pairs. Their code needs
// registers that a call without them keeps for more blocks on a multiprocessor.
template <class T, bool kExcludes>
__global__ void __launch_bounds__(kRowsThreads, kExcludes ? 5 : 8)
    attention_rows_kernel(const __grid_constant__ AttentionArguments given) {
  AttentionArguments p = given;
  if (!kExcludes) p.mask.data = nullptr, p.relative_bias = nullptr, p.mask_table = nullptr;
  // Up to here, lse as two floats keeps enough bits of the logarithm of the sum: 16 for float32, 8
  // for 16 bits. It is better than exact_stats where scores are large products: exact_stats sums
  // the products in another order, and a weight is wrong by the exponential of the difference.
  constexpr bool kWide = sizeof(typename T::Storage) == 4;
  constexpr double kExact = static_cast<double>(int64_t(1) << (kWide ? 32 : 40));
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t row = blockIdx.x * int64_t(kRowsThreads / 32) + threadIdx.x / 32;
  if (row >= rows_of(p)) return;
  int i = static_cast<int>(row % p.Lq), b = static_cast<int>(row / p.Lq / p.Hq);
  const int h = static_cast<int>(row / p.Lq % p.Hq);
  const int64_t g = b * p.grad_out.stride[0] + h * p.grad_out.stride[1] + i * p.grad_out.stride[2];
  const int64_t o = b * p.out.stride[0] + h * p.out.stride[1] + i * p.out.stride[2];
  float delta = 0.0f;
  for (int d = lane; d < p.Dv && p.grad_out.data != nullptr; d += 32)
    delta += element_at<T>(p.grad_out.data, g + d * p.grad_out.stride[3]) *
             element_at<T>(p.out.data, o + d * p.out.stride[3]);
  delta = sum_of_warp(delta);
  float rest = p.grad_lse == nullptr ? 0.0f : -static_cast<float>(p.grad_lse[row]);

  const double lse = p.lse[row];
  const float infinity = float_of_bits(0x7f800000u);
  float hi = static_cast<float>(lse), lo = 0.0f;
  if (p.sinks != nullptr || fabs(lse) > kExact) enter_row(p, b, i);
  if (lse == static_cast<double>(minus_infinity())) {
    hi = infinity, delta = rest = 0.0f;
  } else if (p.sinks != nullptr && sees_only_sink(p, b, h, i, lse)) {
    hi = infinity, delta = 0.0f;
  } else if (fabs(lse) > kExact) {
    exact_stats<T>(p, b, h, i, hi, lo);
  } else {
    lo = static_cast<float>(lse - hi);
  }
  // The kernel of dQ adds the terms of the keys to an exact delta. This is the term of the sink,
  // whose dP is 0.
  if (p.sinks != nullptr && p.exact_delta && hi != infinity)
    rest -= exp2_approx(((sink_of(p, b, h) - hi) - lo) * kLog2e) * delta;
  if (lane == 0) {
    float* stats = p.row_stats + 4 * row;
    stats[0] = hi;
    stats[1] = lo;
    stats[2] = delta;
    stats[3] = rest;
  }
}

}  // namespace cuda
}  // namespace fastattn
