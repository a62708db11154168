// The exponential of weights on tiles.
#pragma once
#include "../../simd/math.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// 2^x of any x with a relative error of 1e-4 (coarse, for weights in bf16), or 1.4e-8: the
// polynomial is 1 at 0 and 2 at 1, so the result is continuous and a lone key has weight 1. 2^-inf
// is 0 without a clamp, and NaN stays NaN.
template <bool kCoarse>
FASTATTN_INLINE VecF exp2_any(VecF x) {
  const VecF f =
      (VecF)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  const VecF p = kCoarse ? horner<float>(f, 1.0f, 0.6954243f, 0.22630768f, 0.07826797f)
                         : horner<float>(f, 1.0f, 0.693147f, 0.24022952f, 0.055484153f,
                                         0.009678064f, 0.0012440877f, 0.00021715026f);
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)x);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
