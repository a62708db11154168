// Activations of the hidden units of an MLP, applied to the sums of a product while they are in
// cache.
#pragma once
#include "../../params.h"
#include "../simd/math.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// erfc(z) / 2 for z >= 0:  t e^(P(t) - z^2) / 2  with  t = 1 / (1 + z / 2).  P is fitted to
// z <= 9.5, with an absolute error of 3e-7, which is the relative error of the result.
FASTATTN_INLINE VecF half_erfc(VecF z) {
  const VecF t = 1.0f / (1.0f + 0.5f * z);
  const VecF p =
      horner<float>(t, -1.26512455f, 0.991729548f, 0.44876519f, -0.275326633f, 0.948491251f,
                    -1.92578059f, 1.60431951f, -0.619069552f, 0.0919957186f);
  return 0.5f * t * exp_neg(p - z * z);
}

// 1 / (1 + e^-x)
FASTATTN_INLINE VecF sigmoid(VecF x) {
  const VecF e = exp_neg(select<float>(x < 0.0f, x, -x)), small = e / (1.0f + e);
  return select<float>(x < 0.0f, small, 1.0f - small);
}

FASTATTN_INLINE VecF relu(VecF x) { return select<float>(x < 0.0f, VecF{}, x); }  // keeps NaN

// x Phi(x), Phi the distribution function of a normal variable
FASTATTN_INLINE VecF gelu(VecF x) {
  const VecF tail = half_erfc(0.707106781f * select<float>(x < 0.0f, -x, x));
  return x * select<float>(x < 0.0f, tail, 1.0f - tail);
}

// The tanh approximation of gelu:
//   x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2  =  x sigmoid(2 ...)
FASTATTN_INLINE VecF gelu_tanh(VecF x) {
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

FASTATTN_INLINE VecF silu(VecF x) { return x * sigmoid(x); }

// y = f(y), `count` a number of whole vectors
template <VecF (*f)(VecF)>
__attribute__((noinline)) void apply(float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<float>) store(y + i, f(load(y + i)));
}

// Applies an activation to y[count], in place.
inline void activate(MlpActivation activation, float* y, int64_t count) {
  switch (activation) {
    case MlpActivation::none:
      return;
    case MlpActivation::relu:
      return apply<relu>(y, count);
    case MlpActivation::gelu:
      return apply<gelu>(y, count);
    case MlpActivation::gelu_tanh:
      return apply<gelu_tanh>(y, count);
    case MlpActivation::silu:
      return apply<silu>(y, count);
  }
}
// No activation in float64: its layers are not fused.
inline void activate(MlpActivation, double*, int64_t) {}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
