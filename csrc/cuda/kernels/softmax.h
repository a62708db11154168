// The state of an online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867)
// for the two rows of a thread's accumulators: lane / 4 and lane / 4 + 8.
#pragma once
#include "element.h"
#include "scores.h"

namespace fastattn {
namespace cuda {

// The columns of a row are spread over four neighbouring lanes.
FASTATTN_DEVICE float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The sum over the four lanes that share a row.
FASTATTN_DEVICE float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes 4 x 4 registers between four neighbouring lanes: x[t] of lane n becomes x[n] of lane
// t.
FASTATTN_DEVICE void exchange_in_fours(uint32_t (&x)[4], int lane) {
  FASTATTN_UNROLL
  for (int bit = 1; bit < 4; bit *= 2) FASTATTN_UNROLL
  for (int t = 0; t < 4; ++t) {
    if ((t & bit) != 0) continue;
    const bool upper = (lane & bit) != 0;
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, upper ? x[t] : x[t | bit], bit);
    (upper ? x[t] : x[t | bit]) = theirs;
  }
}

// The results of a row's sums: its log-sum-exp, and the factor of its O. The logarithm is computed
// last, because O needs the registers.
struct RowTotal {
  double most;
  float sum, factor;
  // log(sum_j e^s_j), in double, whose rounding the backward pass does not see.
  FASTATTN_DEVICE double lse() const { return most + log(static_cast<double>(sum)); }
};

// The result for the maximum score m and the sum l of exp(s - m) over all keys. The sink is added
// here and not to the initial state: it then costs the loop nothing, and the lse of a row without
// visible keys is exactly the sink.
FASTATTN_DEVICE RowTotal total_of_row(double m, float l, float sink) {
  if (sink == minus_infinity()) return {m, l, l == 0.0f ? 0.0f : 1.0f / l};
  const double above = m - sink;
  const float less = exp2_approx(-fabsf(static_cast<float>(above)) * kLog2e);
  if (above > 0) return {m, l + less, 1.0f / (l + less)};
  const float sum = l * less + 1.0f;
  return {sink, sum, less / sum};
}

struct OnlineSoftmax {
  float m[2];  // the maximum score so far
  float l[2];  // the sum of exp(s - m) over this thread's columns

  // The state of no keys.
  FASTATTN_DEVICE void init() {
    m[0] = m[1] = minus_infinity();
    l[0] = l[1] = 0.0f;
  }

  // s <- exp(unit (s - m)); shrink[r] is the factor that rescales earlier sums. unit > 0.
  template <int kTiles>
  FASTATTN_DEVICE void update(float (&s)[kTiles * 4], float unit, float (&shrink)[2]) {
    const float unit_log2 = unit * kLog2e;
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      float most = m[r];
      FASTATTN_UNROLL
      for (int n = 0; n < kTiles; ++n)
        most = fmaxf(most, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
      most = max_of_row(most);
      // In a row without a visible key so far, -inf - m must not be NaN.
      const float from = most == minus_infinity() ? 0.0f : most;
      shrink[r] = exp2_approx((m[r] - from) * unit_log2);
      m[r] = most;
      float sum = 0.0f;
      FASTATTN_UNROLL
      for (int n = 0; n < kTiles; ++n) FASTATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * n + 2 * r + e];
        // Subtract m before multiplying by the unit: a row full of finfo.min would overflow
        // otherwise.
        x = exp2_approx((x - from) * unit_log2);
        sum += x;
      }
      l[r] = l[r] * shrink[r] + sum;
    }
  }

  // Sums l over the four lanes that share a row.
  FASTATTN_DEVICE void finish() {
    l[0] = sum_of_row(l[0]);
    l[1] = sum_of_row(l[1]);
  }

  // `unit` is the one passed to `update`. Otherwise the weights recomputed by the backward pass
  // would not sum to 1.
  FASTATTN_DEVICE RowTotal total(int r, float unit, float sink) const {
    return total_of_row(m[r] * static_cast<double>(unit), l[r], sink);
  }
};

// The factor from a score to the exponent of 2 in ScaledSoftmax: log2 e up to the rounding of a
// float. A large score must be multiplied and divided by the same number.
FASTATTN_DEVICE double exponents_per_score(float unit) {
  constexpr double kLog2eDouble = 1.4426950408889634;
  return unit == 0.0f ? kLog2eDouble : static_cast<double>(unit * kLog2e) / unit;
}

// An OnlineSoftmax for dot products that are not yet multiplied by `unit`. It needs one operation
// less per score, and is used only where no mask adds values near the largest float. m is scaled;
// the rounding error of that product changes all weights of a row by the same factor.
//
// That factor is at most 2 up to |m| = kExact. Beyond, it would soon overflow a weight in 16 bits,
// so the maximum is m + low, and both are subtracted. This is rare, and the loop has no register to
// spare: `low` is in shared memory and is valid only if |m| >= kExact. Steps handle `low` already
// from kRounded = kExact - 512 on. So a step that ignores it has a maximum at least 512 above any
// earlier maximum with a `low`, and the earlier sums shrink to 0 anyway.
struct ScaledSoftmax : OnlineSoftmax {
  static constexpr float kRounded = 1 << 24, kExact = kRounded + 512;

  // Whether a maximum is so large that its low word matters.
  static FASTATTN_DEVICE bool has_low(float m) {
    return fabsf(m) >= kExact && m != minus_infinity();
  }

  // `low`, of this thread's rows, needs no initial value.
  template <int kTiles>
  FASTATTN_DEVICE void update(float (&s)[kTiles * 4], float unit, float (&shrink)[2],
                              float (&low)[2]) {
    const float unit_log2 = unit * kLog2e;
    float now[2], from[2];
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      float most = minus_infinity();
      FASTATTN_UNROLL
      for (int n = 0; n < kTiles; ++n)
        most = fmaxf(most, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
      now[r] = fmaxf(m[r], max_of_row(most) * unit_log2);
      // In a row without a visible key so far, -inf - m must not be NaN.
      from[r] = now[r] == minus_infinity() ? 0.0f : now[r];
      shrink[r] = exp2_approx(m[r] - from[r]);
    }
    if (__any_sync(0xffffffffu, fabsf(from[0]) >= kRounded || fabsf(from[1]) >= kRounded)) {
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        shrink[r] = subtract_first<kTiles>(s, r, from[r], unit_log2, low[r]);
        if (has_low(from[r])) from[r] = 0.0f;
      }
    }
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      m[r] = now[r];
      float sum = 0.0f;
      FASTATTN_UNROLL
      for (int n = 0; n < kTiles; ++n) FASTATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * n + 2 * r + e];
        x = exp2_approx(fmaf(x, unit_log2, -from[r]));
        sum += x;
      }
      l[r] = l[r] * shrink[r] + sum;
    }
  }

  // Subtracts the new maximum, from + low, from the scores of a row that has a low; other rows of
  // the warp are unchanged. Returns the factor of earlier sums.
  template <int kTiles>
  FASTATTN_DEVICE float subtract_first(float (&s)[kTiles * 4], int r, float from, float unit_log2,
                                       float& low) const {
    const bool large = has_low(from);
    const float before = has_low(m[r]) ? low : 0.0f;
    float after = m[r] == from ? before : minus_infinity();
    const float times = large ? unit_log2 : 1.0f, minus = large ? from : 0.0f;
    FASTATTN_UNROLL
    for (int n = 0; n < kTiles; ++n) FASTATTN_UNROLL
    for (int e = 0; e < 2; ++e) {
      float& x = s[4 * n + 2 * r + e];
      x = fmaf(x, times, -minus);
      after = fmaxf(after, x);
    }
    after = max_of_row(after);
    if (!large) after = 0.0f;
    low = after;
    const float back = large ? 1.0f / unit_log2 : 1.0f;
    FASTATTN_UNROLL
    for (int n = 0; n < kTiles; ++n) FASTATTN_UNROLL
    for (int e = 0; e < 2; ++e) {
      float& x = s[4 * n + 2 * r + e];
      x = (x - after) * back;
    }
    return exp2_approx((m[r] - from) + (before - after));
  }

  // The result in units of the score: undoes the rounded multiplication of `update`.
  FASTATTN_DEVICE RowTotal total(int r, float unit, float sink, const float (&low)[2]) const {
    const double most = static_cast<double>(m[r]) + (has_low(m[r]) ? low[r] : 0.0f);
    return total_of_row(most / exponents_per_score(unit), l[r], sink);
  }
};

}  // namespace cuda
}  // namespace fastattn
