// Merges states of an online softmax over disjoint sets of keys, {m, l, o}: the greatest score, the
// sum of e^(s - m) and the sum of e^(s - m) v.
#pragma once
#include "scores.h"

namespace fastattn {
namespace cuda {

// The factor that rescales sums from the maximum m to the maximum `most`; 0 without a key. The
// comparison with `most` avoids inf - inf.
FASTATTN_DEVICE float shrink_to(float m, float most) {
  if (m == minus_infinity()) return 0.0f;
  return m == most ? 1.0f : exp2_approx((m - most) * kLog2e);
}
// e^(m - most): the factor of a partial result with the maximum m.
FASTATTN_DEVICE double shrink_to(double m, double most) {
  if (m == minus_infinity()) return 0.0;
  return m == most ? 1.0 : exp(m - most);
}

}  // namespace cuda
}  // namespace fastattn
