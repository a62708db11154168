// Matrix products in float, without tensor cores, for the operators other than attention. Any
// strides; a sum runs over up to three dimensions.
//
//   c[s, t][m, n] = sum over k of x[s, t][m, k] y[s, t][k, n],  k = (k0, k1, k2)
//
// A block owns 64 x 64 elements of c and sums them in order, without atomics, so the results are
// bitwise equal in every run.
#pragma once
#include "vector.h"

namespace fastattn {
namespace cuda {

struct ProductArguments {
  int64_t batch[2];
  int rows, columns;  // of c
  int depth[3];       // their product fits in an int, too
  const void* x;
  int64_t x_batch[2], x_row, x_depth[3];  // strides
  const void* y;
  int64_t y_batch[2], y_column, y_depth[3];
  void* c;
  int64_t c_batch[2], c_row, c_column;
};

constexpr int kProductTile = 64, kProductDepth = 32, kProductThreads = 256;
// One more element per row, so that neighbouring lanes that write down a column use different
// banks.
constexpr int kProductPitch = kProductTile + 1;

// Stands for the weight of an excluded pair: any product with it is 0. (A weight of 0 times NaN
// would be NaN.)
FASTATTN_DEVICE float no_part() { return float_of_bits(0x80000000u); }
FASTATTN_DEVICE bool takes_part(float weight) { return bits_of_float(weight) != 0x80000000u; }

// kMarked: x may hold no_part().
template <class X, class Y, class C, bool kMarked>
__global__ void __launch_bounds__(kProductThreads)
    product_kernel(const __grid_constant__ ProductArguments p) {
  constexpr int kTile = kProductTile, kDepth = kProductDepth, kPitch = kProductPitch;
  auto x_tile = reinterpret_cast<float*>(dynamic_shared());  // [kDepth][kPitch]
  float* y_tile = x_tile + kDepth * kPitch;                  // [kDepth][kPitch]
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned column_tiles = static_cast<unsigned>((p.columns + kTile - 1) / kTile);
  const unsigned row_tiles = static_cast<unsigned>((p.rows + kTile - 1) / kTile);
  const int n0 = static_cast<int>(blockIdx.x % column_tiles) * kTile;
  const int m0 = static_cast<int>(blockIdx.x / column_tiles % row_tiles) * kTile;
  const int64_t st = blockIdx.x / column_tiles / row_tiles;
  const int64_t s = st / p.batch[1], t = st % p.batch[1];
  const auto* x =
      static_cast<const typename X::Storage*>(p.x) + s * p.x_batch[0] + t * p.x_batch[1];
  const auto* y =
      static_cast<const typename Y::Storage*>(p.y) + s * p.y_batch[0] + t * p.y_batch[1];

  // Thread (row, column) owns c[row + 16 r][column + 16 n].
  const int row = thread / 16, column = thread % 16;
  float sum[4][4] = {};
  const int depth = p.depth[0] * p.depth[1] * p.depth[2];
  for (int k0 = 0; k0 < depth; k0 += kDepth) {
    // Neighbouring lanes read along the contiguous dimension of x, and of y.
    bool odd = false;
    for (int n = thread; n < kTile * kDepth; n += kProductThreads) {
      const bool x_along_depth = p.x_row != 1, y_along_depth = p.y_column != 1;
      const int xm = x_along_depth ? n / kDepth : n % kTile;
      const int xk = x_along_depth ? n % kDepth : n / kTile;
      const int yn = y_along_depth ? n / kDepth : n % kTile;
      const int yk = y_along_depth ? n % kDepth : n / kTile;
      auto offset = [&](int k, const int64_t* stride) {
        if (depth == p.depth[2]) return k * stride[2];
        const int rest = k / p.depth[2];
        return k % p.depth[2] * stride[2] + rest % p.depth[1] * stride[1] +
               rest / p.depth[1] * stride[0];
      };
      float a = 0.0f, b = 0.0f;
      if (m0 + xm < p.rows && k0 + xk < depth)
        a = X::widen(x[(m0 + xm) * p.x_row + offset(k0 + xk, p.x_depth)]);
      if (n0 + yn < p.columns && k0 + yk < depth)
        b = Y::widen(y[(n0 + yn) * p.y_column + offset(k0 + yk, p.y_depth)]);
      x_tile[xk * kPitch + xm] = a;
      y_tile[yk * kPitch + yn] = b;
      odd |= !(fabsf(b) < float_of_bits(0x7f800000u));
    }
    const bool careful = __syncthreads_or(kMarked && odd) != 0;
    // Sums of partial sums: one long chain of additions would round more than a library does.
    float part[4][4] = {};
    for (int k = 0; k < kDepth; ++k) {
      float a[4], b[4];
      FASTATTN_UNROLL
      for (int r = 0; r < 4; ++r) a[r] = x_tile[k * kPitch + row + 16 * r];
      FASTATTN_UNROLL
      for (int n = 0; n < 4; ++n) b[n] = y_tile[k * kPitch + column + 16 * n];
      if (kMarked && careful) {
        FASTATTN_UNROLL
        for (int r = 0; r < 4; ++r) FASTATTN_UNROLL
        for (int n = 0; n < 4; ++n)
          if (takes_part(a[r])) part[r][n] += a[r] * b[n];
        continue;
      }
      FASTATTN_UNROLL
      for (int r = 0; r < 4; ++r) FASTATTN_UNROLL
      for (int n = 0; n < 4; ++n) part[r][n] += a[r] * b[n];
    }
    FASTATTN_UNROLL
    for (int r = 0; r < 4; ++r) FASTATTN_UNROLL
    for (int n = 0; n < 4; ++n) sum[r][n] += part[r][n];
    __syncthreads();  // the tiles are read
  }

  auto* c = static_cast<typename C::Storage*>(p.c) + s * p.c_batch[0] + t * p.c_batch[1];
  FASTATTN_UNROLL
  for (int r = 0; r < 4; ++r) FASTATTN_UNROLL
  for (int n = 0; n < 4; ++n) {
    const int m = m0 + row + 16 * r, j = n0 + column + 16 * n;
    if (m < p.rows && j < p.columns) c[m * p.c_row + j * p.c_column] = narrow<C>(sum[r][n]);
  }
}

}  // namespace cuda
}  // namespace fastattn
