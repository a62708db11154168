// Merging states of an online softmax, {m, l, o}: the greatest score, the sum of e^(s - m) and that
// of e^(s - m) v, each of a set of keys of its own.
#pragma once
#include "scores.h"

namespace fastattn {
namespace cuda {

// What sums from maximum m on are multiplied by, to be from `most` on; 0 where there is no key. The
// comparison with `most` keeps inf - inf out.
FASTATTN_DEVICE float shrink_to(float m, float most) {
  if (m == minus_infinity()) return 0.0f;
  return m == most ? 1.0f : exp2_approx((m - most) * kLog2e);
}
FASTATTN_DEVICE double shrink_to(double m, double most) {
  if (m == minus_infinity()) return 0.0;
  return m == most ? 1.0 : exp(m - most);
}

}  // namespace cuda
}  // namespace fastattn
