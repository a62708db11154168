// Reductions over the lanes of a warp, and sums of rows. For the latter the lanes form groups of
// `lanes` neighbours, a power of two. Each group takes a row, and each lane of it some chunks of kN
// columns.
#pragma once
#include "vector.h"

namespace fastattn {
namespace cuda {

// The sum over all lanes of a warp, in every lane.
template <class Number>
FASTATTN_DEVICE Number sum_of_warp(Number x) {
  FASTATTN_UNROLL
  for (int n = 16; n > 0; n /= 2) x += __shfl_xor_sync(0xffffffffu, x, n);
  return x;
}

// The largest x of a warp, in every lane.
FASTATTN_DEVICE float max_of_warp(float x) {
  FASTATTN_UNROLL
  for (int n = 16; n > 0; n /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, n));
  return x;
}

// The number of lanes per row: one per chunk of kN columns, rounded up to a power of two, at most a
// warp.
template <int kN>
int lanes_of_row(int64_t width) {
  int lanes = 1;
  while (lanes < 32 && lanes * kN < width) lanes *= 2;
  return lanes;
}

// sums[.] = the sum of chunk c over the groups of the warp. All lanes call it.
template <int kN>
FASTATTN_DEVICE void sum_groups(float (&sum)[kN], int lanes, int c, int chunks, float* sums) {
  FASTATTN_UNROLL
  for (int e = 0; e < kN; ++e)
    for (int m = lanes; m < 32; m *= 2) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], m);
  if (static_cast<int>(threadIdx.x) % 32 >= lanes || c >= chunks) return;
  FASTATTN_UNROLL
  for (int e = 0; e < kN; ++e) sums[c * kN + e] = sum[e];
}

}  // namespace cuda
}  // namespace fastattn
