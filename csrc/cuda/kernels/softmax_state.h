// Merging states of an online softmax, {m, l, o}: the greatest score, the sum of e^(s - m) and that
// of e^(s - m) v, each of a set of keys of its own.
#pragma once
#include "scores.h"

namespace fastattn {
namespace cuda {

// What sums from maximum m on are multiplied by, to be from `most` on; 0 where there is no key.
FASTATTN_DEVICE float shrink_to(float m, float most) {
  return m == minus_infinity() ? 0.0f : exp2_approx((m - most) * kLog2e);
}
FASTATTN_DEVICE double shrink_to(double m, double most) {
  return m == minus_infinity() ? 0.0 : exp(m - most);
}

}  // namespace cuda
}  // namespace fastattn
