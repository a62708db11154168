// Additive scores,  e_ij = sum_a v_a tanh(q_ia + k_ja + bias_a),  and their derivatives.
//
// tanh(x) = (e - 1) / (e + 1)  with  e = e^2x = e^2(q + bias) e^2k.  The exponentials depend on one
// row each and are computed once per tile. A pair then costs a few multiplications and half a
// reciprocal for each a: two reciprocals come from one,  1/x = y / (x y)  and  1/y = x / (x y).
#pragma once
#include "columns.h"
#include "product.h"
#include "scores.h"

namespace fastattn {
namespace cuda {

// A block of threads processes 64 rows of each side, 32 columns of a at a time. So a thread copies
// 8 elements of each side, all from one column.
constexpr int kAdditiveRows = kAdditiveTile, kAdditiveColumns = 32, kAdditiveThreads = 256;
constexpr int kAdditiveWarps = kAdditiveThreads / 32;
constexpr int kAdditiveOwn = kAdditiveRows / kAdditiveWarps;
constexpr int kAdditivePitch = kAdditiveRows + 1;

// The factored form is used where max|q| + max|k| + max|bias| is at most this: then the product of
// two factors 1 + e is finite and its reciprocal is not subnormal. Larger values go through tanh
// itself.
constexpr float kFactoredLimit = 21.0f;

// One side of the scores: queries or keys of a batch entry.
template <class T>
struct AdditiveSide {
  const typename T::Storage* data;
  int64_t row_stride, column_stride;
  int rows;

  FASTATTN_DEVICE AdditiveSide(const Tensor4& t, int b, int64_t rows)
      : data(static_cast<const typename T::Storage*>(t.data) + b * t.stride[0]),
        row_stride(t.stride[2]),
        column_stride(t.stride[3]),
        rows(static_cast<int>(rows)) {}

  // x[n] = row row0 + step n of column a, zeros outside; returns max|x|, inf if one is NaN.
  FASTATTN_DEVICE float read(float (&x)[kAdditiveOwn], int row0, int step, int a,
                             int columns) const {
    float most = 0.0f;
    FASTATTN_UNROLL
    for (int n = 0; n < kAdditiveOwn; ++n) {
      const int row = row0 + step * n;
      x[n] = row < rows && a < columns ? T::widen(data[row * row_stride + a * column_stride]) : 0;
      most = fmaxf(most, x[n] == x[n] ? fabsf(x[n]) : float_of_bits(0x7f800000u));
    }
    return most;
  }
};

// The sum of the maxima of x and of y over all threads of a block. `most` is shared memory, [2]
// [warps]. On return, all threads have finished their earlier reads of shared memory.
FASTATTN_DEVICE float greatest_sum(float* most, float x, float y) {
  const unsigned warp = threadIdx.x / 32;
  FASTATTN_UNROLL
  for (int n = 16; n > 0; n /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, n));
    y = fmaxf(y, __shfl_xor_sync(0xffffffffu, y, n));
  }
  if (threadIdx.x % 32 == 0) most[warp] = x, most[kAdditiveWarps + warp] = y;
  __syncthreads();
  FASTATTN_UNROLL
  for (int n = 0; n < kAdditiveWarps; ++n)
    x = fmaxf(x, most[n]), y = fmaxf(y, most[kAdditiveWarps + n]);
  return x + y;
}

// e^(2x).
FASTATTN_DEVICE float exp_twice(float x) { return expf(2.0f * x); }

// The bias of column a, 0 without one.
FASTATTN_DEVICE float bias_of(const AdditiveArguments& p, int a) {
  return p.bias != nullptr && a < p.D ? p.bias[a] : 0.0f;
}

// scores[b, i, j], -inf where the pair is excluded.
template <class T>
__global__ void __launch_bounds__(kAdditiveThreads, 2)
    additive_scores_kernel(const __grid_constant__ AdditiveArguments p) {
  constexpr int kRows = kAdditiveRows, kColumns = kAdditiveColumns, kPitch = kAdditivePitch;
  auto most = reinterpret_cast<float*>(dynamic_shared());  // [2][warps]
  float* q_tile = most + 2 * kAdditiveWarps;               // [kColumns][kPitch], e^2q or q
  float* k_tile = q_tile + kColumns * kPitch;              // [kColumns][kPitch], e^2k or k
  float* v_tile = k_tile + kColumns * kPitch;              // [kColumns]
  float* bias_tile = v_tile + kColumns;                    // [kColumns]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const auto k_tiles = static_cast<unsigned>((p.Lk + kRows - 1) / kRows);
  const auto q_tiles = static_cast<unsigned>((p.Lq + kRows - 1) / kRows);
  const int j0 = static_cast<int>(blockIdx.x % k_tiles) * kRows;
  const int i0 = static_cast<int>(blockIdx.x / k_tiles % q_tiles) * kRows;
  const int b = static_cast<int>(blockIdx.x / k_tiles / q_tiles);
  const AdditiveSide<T> queries(p.q, b, p.Lq), keys(p.k, b, p.Lk);
  const int width = static_cast<int>(p.D);

  // Thread (row, column) owns the pairs of queries row + 16 r and keys column + 16 c.
  const int row = thread / 16, column = thread % 16;
  float e[4][4] = {};
  const bool visible = p.window_right < 0 || j0 < i0 + kRows;  // to at least one query of the tile
  for (int a0 = 0; a0 < width && visible; a0 += kColumns) {
    const int a = a0 + lane;
    float q[kAdditiveOwn], k[kAdditiveOwn];
    const float bias = bias_of(p, a);
    const float q_most = queries.read(q, i0 + warp, kAdditiveWarps, a, width);
    const float k_most = keys.read(k, j0 + warp, kAdditiveWarps, a, width);
    const bool factored = greatest_sum(most, q_most + fabsf(bias), k_most) <= kFactoredLimit;
    // The bias has its own factor, because a sum q + bias would be rounded before k is added.
    const float bias_factor = exp_twice(bias);
    FASTATTN_UNROLL
    for (int n = 0; n < kAdditiveOwn; ++n) {
      const int at = lane * kPitch + warp + kAdditiveWarps * n;
      q_tile[at] = factored ? exp_twice(q[n]) * bias_factor : q[n];
      k_tile[at] = factored ? exp_twice(k[n]) : k[n];
    }
    if (warp == 0) {
      v_tile[lane] = a < width ? p.vector[a] : 0.0f;
      bias_tile[lane] = bias;
    }
    __syncthreads();  // the tiles are loaded

    float part[4][4] = {};  // partial sums, as in product.h
    if (!factored) {
      for (int n = 0; n < kColumns && a0 + n < width; ++n) FASTATTN_UNROLL
      for (int r = 0; r < 4; ++r) FASTATTN_UNROLL
      for (int c = 0; c < 4; ++c) {
        const float x = q_tile[n * kPitch + row + 16 * r] + k_tile[n * kPitch + column + 16 * c];
        part[r][c] += v_tile[n] * tanhf(x + bias_tile[n]);
      }
    }
    for (int n = 0; n < kColumns && factored; ++n) {
      const float v = v_tile[n];
      float k[4];
      FASTATTN_UNROLL
      for (int c = 0; c < 4; ++c) k[c] = k_tile[n * kPitch + column + 16 * c];
      FASTATTN_UNROLL
      for (int r = 0; r < 4; ++r) {
        const float q = q_tile[n * kPitch + row + 16 * r];
        FASTATTN_UNROLL
        for (int c = 0; c < 4; c += 2) {
          const float d0 = q * k[c] + 1.0f, d1 = q * k[c + 1] + 1.0f;
          const float n0 = q * k[c] - 1.0f, n1 = q * k[c + 1] - 1.0f;
          const float both = reciprocal_approx(d0 * d1);
          part[r][c] += v * (n0 * (d1 * both));
          part[r][c + 1] += v * (n1 * (d0 * both));
        }
      }
    }
    FASTATTN_UNROLL
    for (int r = 0; r < 4; ++r) FASTATTN_UNROLL
    for (int c = 0; c < 4; ++c) e[r][c] += part[r][c];
  }

  const Options options(p, b, 0);
  FASTATTN_UNROLL
  for (int r = 0; r < 4; ++r) FASTATTN_UNROLL
  for (int c = 0; c < 4; ++c) {
    const int i = i0 + row + 16 * r, j = j0 + column + 16 * c;
    if (i >= p.Lq || j >= p.Lk) continue;
    p.scores[(b * p.Lq + i) * p.Lk + j] = options.score(e[r][c], i, j, visible_keys(p, i)).value;
  }
}

// Turns scores into weights after dropout, no_part() where the pair is excluded. One warp per
// query. The backward pass also turns the gradients dp of the weights, dO . V, into gradients of
// the scores,
//   g = p (dp - sum of p dp).
template <class T, bool kBackward>
__global__ void __launch_bounds__(kAdditiveThreads, 2)
    additive_rows_kernel(const __grid_constant__ AdditiveArguments p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = int64_t(blockIdx.x) * kAdditiveWarps + threadIdx.x / 32;
  if (row >= p.B * p.Lq) return;
  const int i = static_cast<int>(row % p.Lq), b = static_cast<int>(row / p.Lq);
  const int keys = static_cast<int>(p.Lk);
  float* scores = p.scores + row * p.Lk;
  float m = minus_infinity();
  for (int j = lane; j < keys; j += 32) m = fmaxf(m, scores[j]);
  m = max_of_warp(m);
  float l = 0.0f;
  for (int j = lane; j < keys; j += 32)
    if (scores[j] != minus_infinity()) l += exp2_approx((scores[j] - m) * kLog2e);
  l = sum_of_warp(l);

  const Options options(p, b, 0);
  const auto kept = [&](int j) {
    return options.drops() ? options.kept(options.words(i, j), j) : 1.0f;
  };
  const auto weight = [&](int j) { return exp2_approx((scores[j] - m) * kLog2e) / l; };
  if constexpr (kBackward) {
    float* gradients = p.gradients + row * p.Lk;
    const int64_t given = b * p.grad_weights.stride[0] + i * p.grad_weights.stride[2];
    const auto* more = static_cast<const typename T::Storage*>(p.grad_weights.data);
    float delta = 0.0f;
    for (int j = lane; j < keys; j += 32) {
      if (scores[j] == minus_infinity()) continue;
      float dp = gradients[j];
      if (more != nullptr) dp += T::widen(more[given + j * p.grad_weights.stride[3]]);
      const float z = kept(j);
      dp = z == 0.0f ? 0.0f : dp * z;  // dropped gradients are selected, too
      gradients[j] = dp;
      delta += weight(j) * dp;
    }
    delta = sum_of_warp(delta);
    for (int j = lane; j < keys; j += 32) {
      const bool seen = scores[j] != minus_infinity();
      const float w = seen ? weight(j) : 0.0f;
      gradients[j] = seen ? w * (gradients[j] - delta) : 0.0f;
      scores[j] = seen ? w * kept(j) : no_part();
    }
  } else {
    const int64_t asked = b * p.applied.stride[0] + i * p.applied.stride[2];
    auto* weights = static_cast<typename T::Storage*>(p.applied.data);
    for (int j = lane; j < keys; j += 32) {
      const bool seen = scores[j] != minus_infinity();
      const float w = seen ? weight(j) * kept(j) : 0.0f;
      scores[j] = seen ? w : no_part();
      if (weights != nullptr) weights[asked + j * p.applied.stride[3]] = narrow<T>(w);
    }
  }
}

// One side of 64 rows stays and the other side is streamed, for 32 columns of a. With
// h = g e / (1 + e)^2, which is g (1 - tanh^2) / 4:
//   dq_i = 4 v sum_j h_ij     dk_j = 4 v sum_i h_ij     dv = sum_ij g_ij tanh_ij
//   dbias = sum_i dq_i
// A lane has one column, and a warp 8 of the rows that stay.
template <class T, bool kOfKeys>
__global__ void __launch_bounds__(kAdditiveThreads, 2)
    additive_gradient_kernel(const __grid_constant__ AdditiveArguments p) {
  constexpr int kRows = kAdditiveRows, kColumns = kAdditiveColumns, kOwn = kAdditiveOwn;
  constexpr int kPitch = kRows + 2;                        // even: g is read in pairs
  auto most = reinterpret_cast<float*>(dynamic_shared());  // [2 warps]
  float* passing = most + 2 * kAdditiveWarps;              // [kRows][kColumns], e^2x or x
  float* g_tile = passing + kRows * kColumns;              // [kRows that stay][kPitch]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const auto column_tiles = static_cast<unsigned>((p.D + kColumns - 1) / kColumns);
  const auto row_tiles = static_cast<unsigned>(((kOfKeys ? p.Lk : p.Lq) + kRows - 1) / kRows);
  const int a = static_cast<int>(blockIdx.x % column_tiles) * kColumns + lane;
  const auto tile = static_cast<int>(blockIdx.x / column_tiles % row_tiles);
  const int b = static_cast<int>(blockIdx.x / column_tiles / row_tiles);
  const int width = static_cast<int>(p.D), own = tile * kRows + warp * kOwn;
  const AdditiveSide<T> stay(kOfKeys ? p.k : p.q, b, kOfKeys ? p.Lk : p.Lq);
  const AdditiveSide<T> pass(kOfKeys ? p.q : p.k, b, kOfKeys ? p.Lq : p.Lk);
  const float bias = bias_of(p, a), bias_factor = exp_twice(bias);

  float raw[kOwn], factor[kOwn], total[kOwn] = {}, slope_total = 0.0f;
  const float stay_most = stay.read(raw, own, 1, a, width) + fabsf(bias);
  FASTATTN_UNROLL
  for (int r = 0; r < kOwn; ++r) factor[r] = exp_twice(raw[r]) * (kOfKeys ? 1.0f : bias_factor);

  int first = 0, last = pass.rows;
  if (p.window_right >= 0) {  // causal: keys up to the query
    if (kOfKeys) first = tile * kRows < last ? tile * kRows : last;
    if (!kOfKeys && tile * kRows + kRows < last) last = tile * kRows + kRows;
  }
  for (int j0 = first; j0 < last; j0 += kRows) {
    float x[kOwn];
    const float x_most = pass.read(x, j0 + warp, kAdditiveWarps, a, width);
    const bool factored = greatest_sum(most, stay_most, x_most) <= kFactoredLimit;
    FASTATTN_UNROLL
    for (int n = 0; n < kOwn; ++n)
      passing[(warp + kAdditiveWarps * n) * kColumns + lane] =
          factored ? exp_twice(x[n]) * (kOfKeys ? bias_factor : 1.0f) : x[n];
    for (int n = thread; n < kRows * kRows; n += kAdditiveThreads) {
      // Neighbouring lanes read along the keys.
      const int i = (kOfKeys ? j0 : tile * kRows) + n / kRows;
      const int j = (kOfKeys ? tile * kRows : j0) + n % kRows;
      const float g = i < p.Lq && j < p.Lk ? p.gradients[(b * p.Lq + i) * p.Lk + j] : 0.0f;
      g_tile[kOfKeys ? n % kRows * kPitch + n / kRows : n / kRows * kPitch + n % kRows] = g;
    }
    __syncthreads();  // the tiles are loaded

    const float* g = g_tile + warp * kOwn * kPitch;
    float part[kOwn] = {}, slope = 0.0f;  // partial sums, as in product.h
    if (factored) {
      for (int j = 0; j < kRows; j += 2) {
        const float x0 = passing[j * kColumns + lane], x1 = passing[(j + 1) * kColumns + lane];
        FASTATTN_UNROLL
        for (int r = 0; r < kOwn; ++r) {
          const float e0 = factor[r] * x0, e1 = factor[r] * x1;
          const float d0 = e0 + 1.0f, d1 = e1 + 1.0f, both = reciprocal_approx(d0 * d1);
          const float r0 = d1 * both, r1 = d0 * both;
          const float w0 = g[r * kPitch + j] * r0, w1 = g[r * kPitch + j + 1] * r1;
          part[r] += w0 * (e0 * r0) + w1 * (e1 * r1);
          if (!kOfKeys) slope += w0 * (e0 - 1.0f) + w1 * (e1 - 1.0f);
        }
      }
    } else {
      for (int j = 0; j < kRows; ++j) {
        FASTATTN_UNROLL
        for (int r = 0; r < kOwn; ++r) {
          const float gj = g[r * kPitch + j];
          if (gj == 0.0f) continue;  // excluded pairs are skipped
          // 1 / (1 + e^-2|x|) and 1 / (1 + e^2|x|): their product is (1 - t^2) / 4, their
          // difference |t|. q and k are added first: where they cancel, the sum is exact.
          const float sum = raw[r] + passing[j * kColumns + lane] + bias;
          const float e = expf(-2.0f * fabsf(sum)), upper = 1.0f / (1.0f + e), lower = e * upper;
          part[r] += gj * upper * lower;
          if (!kOfKeys) slope += gj * (sum < 0.0f ? lower - upper : upper - lower);
        }
      }
    }
    FASTATTN_UNROLL
    for (int r = 0; r < kOwn; ++r) total[r] += part[r];
    slope_total += slope;
  }

  const float v = a < width ? p.vector[a] : 0.0f;
  const Tensor4& to = kOfKeys ? p.grad_k : p.grad_q;
  auto* result = static_cast<typename T::Storage*>(to.data) + b * to.stride[0];
  float sum = 0.0f;
  FASTATTN_UNROLL
  for (int r = 0; r < kOwn; ++r) {
    total[r] *= 4.0f * v;
    sum += total[r];
    if (own + r < stay.rows && a < width)
      result[(own + r) * to.stride[2] + a * to.stride[3]] = narrow<T>(total[r]);
  }
  if constexpr (!kOfKeys) {
    __syncthreads();  // the tiles are read
    passing[warp * kColumns + lane] = slope_total;
    g_tile[warp * kColumns + lane] = sum;
    __syncthreads();
    if (warp > 0 || a >= width) return;
    float dv = 0.0f, dbias = 0.0f;
    FASTATTN_UNROLL
    for (int n = 0; n < kAdditiveWarps; ++n) {
      dv += passing[n * kColumns + lane];
      dbias += g_tile[n * kColumns + lane];
    }
    float* parts = p.parts + (int64_t(b) * row_tiles + tile) * 2 * width;
    parts[a] = dv;
    parts[width + a] = dbias;
  }
}

}  // namespace cuda
}  // namespace fastattn
