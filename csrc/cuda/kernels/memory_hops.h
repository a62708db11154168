// Memory hops:  u' = phi(H u + C^T p),  p = softmax(scale M u + bias),  K times.
//
// A block of threads owns one query and computes all of its hops in one launch. A memory that is
// the same in every hop is first copied to shared memory, if it fits.
#pragma once
#include "../params.h"
#include "columns.h"
#include "product.h"
#include "scores.h"

namespace fastattn {
namespace cuda {

constexpr int kHopThreads = 128, kHopWarps = kHopThreads / 32;

// Rows with contiguous columns, in global or in shared memory.
template <class T>
struct MemoryRows {
  const typename T::Storage* data;
  int64_t stride;
};

FASTATTN_DEVICE float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::relu:
      return x > 0.0f || x != x ? x : 0.0f;
    case Activation::tanh:
      return tanhf(x);
    case Activation::sigmoid:
      return 1.0f / (1.0f + expf(-x));
    default:
      return x;
  }
}

// The derivative of the activation, from its value y.
FASTATTN_DEVICE float slope_of(Activation activation, float y) {
  switch (activation) {
    case Activation::relu:
      return y > 0.0f ? 1.0f : 0.0f;
    case Activation::tanh:
      return 1.0f - y * y;
    case Activation::sigmoid:
      return y * (1.0f - y);
    default:
      return 1.0f;
  }
}

// One query, and the operations of its block of threads on rows. kN columns are read at once;
// `lanes` neighbouring lanes share a row.
template <class T, int kN>
struct Hops {
  using Storage = typename T::Storage;
  using Chunk = Elements<T, kN>;
  const HopsArguments& p;
  int b, q, width, chunks, lanes;
  int warp, lane;
  float* sums;  // [warps][width], shared

  FASTATTN_DEVICE Hops(const HopsArguments& arguments, int64_t query, float* shared)
      : p(arguments),
        b(static_cast<int>(query / arguments.Q)),
        q(static_cast<int>(query % arguments.Q)),
        width(static_cast<int>(arguments.D)),
        chunks(width / kN),
        lanes(arguments.lanes),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        sums(shared) {}

  static FASTATTN_DEVICE MemoryRows<T> rows_of(const Tensor4& t, int b, int k) {
    const auto* data = static_cast<const Storage*>(t.data);
    return {data + b * t.stride[0] + k * t.stride[1], t.stride[2]};
  }

  // The number of hops of this query: all, or for a retrieval the number that it took.
  FASTATTN_DEVICE int steps() const {
    const int64_t own = p.taken == nullptr ? p.K : p.taken[query()];
    return static_cast<int>(own < p.K ? own : p.K);
  }

  FASTATTN_DEVICE int64_t query() const { return b * p.Q + q; }
  FASTATTN_DEVICE float* state(int n) const {  // [D], state n of the trace
    return static_cast<float*>(p.trace) + (query() * (2 * p.K + 1) + n) * p.D;
  }
  // m and l of hop k.
  FASTATTN_DEVICE float* stats(int k) const {
    return static_cast<float*>(p.stats) + (query() * p.K + k) * 2;
  }

  // Calls f(n, rows[n] . x) on one thread for every row of [first, last); x is in shared memory.
  template <class F>
  FASTATTN_DEVICE void dots(const MemoryRows<T>& rows, const float* x, int first, int last,
                            F f) const {
    const int group = lane / lanes, step = 32 / lanes * kHopWarps;
    for (int n0 = first; n0 < last; n0 += step) {
      const int n = n0 + warp * (32 / lanes) + group;
      float sum = 0.0f;
      for (int c = lane % lanes; c < chunks && n < last; c += lanes) {
        const Chunk row = Chunk::load(rows.data + n * rows.stride + c * kN);
        FASTATTN_UNROLL
        for (int e = 0; e < kN; ++e) sum += row[e] * x[c * kN + e];
      }
      for (int m = lanes / 2; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
      if (n < last && lane % lanes == 0) f(n, sum);
    }
  }

  // Calls to(d, sum of weights[n - first] rows[n][d]) on one thread for every column. Rows whose
  // weight is no_part() are not read. `weights` is in shared memory; a barrier precedes the calls
  // of `to`.
  template <class F>
  FASTATTN_DEVICE void weighted_sum(const MemoryRows<T>& rows, const float* weights, int first,
                                    int last, F to) const {
    const int group = lane / lanes, step = 32 / lanes * kHopWarps;
    for (int c0 = 0; c0 < chunks; c0 += lanes) {
      const int c = c0 + lane % lanes;
      float sum[kN] = {};
      for (int n = first + warp * (32 / lanes) + group; n < last && c < chunks; n += step) {
        const float w = weights[n - first];
        if (!takes_part(w)) continue;
        const Chunk row = Chunk::load(rows.data + n * rows.stride + c * kN);
        FASTATTN_UNROLL
        for (int e = 0; e < kN; ++e) sum[e] += w * row[e];
      }
      sum_groups<kN>(sum, lanes, c, chunks, sums + warp * width);
    }
    __syncthreads();
    for (int d = static_cast<int>(threadIdx.x); d < width; d += kHopThreads) {
      float sum = 0.0f;
      FASTATTN_UNROLL
      for (int n = 0; n < kHopWarps; ++n) sum += sums[n * width + d];
      to(d, sum);
    }
  }

  // The score of a dot product, -inf if the row is excluded.
  FASTATTN_DEVICE float score(float dot, int k, int n) const {
    const int64_t at = b * p.mask.stride[0] + q * p.mask.stride[1] + k * p.mask.stride[2];
    if (p.mask.data != nullptr &&
        static_cast<const uint8_t*>(p.mask.data)[at + n * p.mask.stride[3]] == 0)
      return minus_infinity();
    const float s = dot * p.scale_float;
    if (p.bias.data == nullptr) return s;
    const int64_t m =
        b * p.bias.stride[0] + q * p.bias.stride[1] + k * p.bias.stride[2] + n * p.bias.stride[3];
    const float more = p.bias_dtype == DType::f32
                           ? static_cast<const float*>(p.bias.data)[m]
                           : T::widen(static_cast<const Storage*>(p.bias.data)[m]);
    return more == minus_infinity() ? more : s + more;
  }

  // The weight of a score before the division by the sum; no_part() if it is excluded.
  FASTATTN_DEVICE float weight(float s, float most) const {
    if (s == minus_infinity()) return no_part();
    return p.normalize ? exp2_approx((s - most) * kLog2e) : s + 0.0f;  // not -0: that is no_part()
  }

  // The sum, or the maximum, of one number per thread. `room` is shared memory, [warps]. Two
  // barriers.
  FASTATTN_DEVICE float sum_of_block(float* room, float x) const {
    x = sum_of_warp(x);
    __syncthreads();
    if (lane == 0) room[warp] = x;
    __syncthreads();
    float sum = room[0];
    FASTATTN_UNROLL
    for (int n = 1; n < kHopWarps; ++n) sum += room[n];
    return sum;
  }
  // The largest x of all threads; `room` [kHopWarps] is in shared memory.
  FASTATTN_DEVICE float most_of_block(float* room, float x) const {
    x = max_of_warp(x);
    __syncthreads();
    if (lane == 0) room[warp] = x;
    __syncthreads();
    float most = room[0];
    FASTATTN_UNROLL
    for (int n = 1; n < kHopWarps; ++n) most = fmaxf(most, room[n]);
    return most;
  }

  // Turns the scores in s, in shared memory, into weights not yet divided by their sum l; m is the
  // maximum.
  FASTATTN_DEVICE void weigh(float* s, int count, float* room, float& m, float& l) const {
    float most = minus_infinity(), sum = 0.0f;
    for (int n = static_cast<int>(threadIdx.x); n < count; n += kHopThreads)
      most = fmaxf(most, s[n]);
    m = most_of_block(room, most);
    for (int n = static_cast<int>(threadIdx.x); n < count; n += kHopThreads) {
      s[n] = weight(s[n], m);
      sum += s[n];
    }
    l = sum_of_block(room, sum);
  }

  // A memory of the first hop, copied to shared memory.
  FASTATTN_DEVICE MemoryRows<T> residing(const Tensor4& t, Storage* room) const {
    const MemoryRows<T> rows = rows_of(t, b, 0);
    const int all = static_cast<int>(p.N) * chunks;
    for (int n = static_cast<int>(threadIdx.x); n < all; n += kHopThreads)
      Chunk::load(rows.data + n / chunks * rows.stride + n % chunks * kN).store(room + n * kN);
    return {room, width};
  }

  // u' = phi(H u + o), written to `u`. o is [D], y is scratch [D], all in shared memory.
  FASTATTN_DEVICE void step(float* u, const float* o, float* y, int k) const {
    if (p.proj.data != nullptr)
      dots(rows_of(p.proj, 0, k), u, 0, width, [&](int d, float dot) { y[d] = dot; });
    __syncthreads();
    for (int d = static_cast<int>(threadIdx.x); d < width; d += kHopThreads) {
      const float before = p.settles ? 0.0f : p.proj.data != nullptr ? y[d] : u[d];
      u[d] = activate(p.activation, before + o[d]);
    }
    __syncthreads();
  }

  // -- backward

  // The slot of hop k in xs[which] and ys[which], [2][B, Q, slots, N] and [..., D]: 0 holds ds and
  // scale u, 1 holds p and g. In a stack, C_k is memory k + 1.
  FASTATTN_DEVICE int64_t slot(int which, int k) const {
    const int64_t all = p.B * p.Q * p.slots;
    return which * all + query() * p.slots + k + (which == 1 && p.stack ? 1 : 0);
  }

  // g = the gradient of the query's output, 0 if it has none.
  FASTATTN_DEVICE void read_gradient(float* g) const {
    const auto* given = static_cast<const Storage*>(p.grad_out.data) + b * p.grad_out.stride[0] +
                        q * p.grad_out.stride[1];
    for (int d = static_cast<int>(threadIdx.x); d < width; d += kHopThreads)
      g[d] = p.grad_out.data == nullptr ? 0.0f : T::widen(given[d * p.grad_out.stride[3]]);
  }

  // g <- g o phi'(y), and reads u; stores both in ys.
  FASTATTN_DEVICE void enter(float* g, float* u, int k) const {
    for (int d = static_cast<int>(threadIdx.x); d < width; d += kHopThreads) {
      g[d] *= slope_of(p.activation, state(2 * k + 2)[d]);
      u[d] = state(2 * k)[d];
      p.ys[slot(0, k) * width + d] = p.scale_float * u[d];
      p.ys[slot(1, k) * width + d] = g[d];
    }
  }

  // The gradient of the weight of row n in hop k, 0 if it has none.
  FASTATTN_DEVICE float weight_gradient(int k, int n) const {
    const int64_t* stride = p.grad_weights.stride;
    if (p.grad_weights.data == nullptr) return 0.0f;
    const auto* given = static_cast<const Storage*>(p.grad_weights.data);
    return T::widen(given[b * stride[0] + q * stride[1] + k * stride[2] + n * stride[3]]);
  }

  // Returns ds from p and dp; stores ds and p in xs.
  FASTATTN_DEVICE float hand_on(float weight, float dp, float delta, int k, int n) const {
    const bool seen = takes_part(weight);
    const float ds = !seen ? no_part() : p.normalize ? weight * (dp - delta) : dp;
    p.xs[slot(0, k) * p.N + n] = ds;
    p.xs[slot(1, k) * p.N + n] = weight;
    return ds;
  }

  // g <- H^T g + more, all in shared memory. A thread reads the elements of `more` that it wrote.
  FASTATTN_DEVICE void leave(float* g, const float* more, int k) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (p.proj.data != nullptr) {
      __syncthreads();  // the sums are read
      weighted_sum(rows_of(p.proj, 0, k), g, 0, width, [&](int, float) {});
    }
    __syncthreads();
    for (int d = thread; d < width; d += kHopThreads) {
      float before = p.settles ? 0.0f : g[d];
      if (p.proj.data != nullptr) {
        before = 0.0f;
        FASTATTN_UNROLL
        for (int n = 0; n < kHopWarps; ++n) before += sums[n * width + d];
      }
      g[d] = before + more[d];
    }
    __syncthreads();
  }
};

// The layout of a block's shared memory.
struct HopRooms {
  float *sums, *u, *o, *y, *s, *t, *few;
  char* memory;  // [in rows, out rows] that are kept here, 16-byte aligned
  // Scores that do not fit are in global memory, `elsewhere` [blocks, 2, rows].
  FASTATTN_DEVICE HopRooms(int width, int rows, float* elsewhere = nullptr) {
    const int w = (width + 3) / 4 * 4, n = elsewhere != nullptr ? 0 : (rows + 3) / 4 * 4;
    sums = reinterpret_cast<float*>(dynamic_shared());
    u = sums + kHopWarps * w;
    o = u + w;
    y = o + w;
    s = y + w;
    t = s + n;
    few = t + n;
    memory = reinterpret_cast<char*>(few + 2 * kHopWarps);
    if (elsewhere != nullptr) {
      s = elsewhere + int64_t(blockIdx.x) * 2 * rows;
      t = s + rows;
    }
  }
};

// All hops of one query.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    memory_hops_kernel(const __grid_constant__ HopsArguments p) {
  using Storage = typename T::Storage;
  const int rows = static_cast<int>(p.N), width = static_cast<int>(p.D);
  const int thread = static_cast<int>(threadIdx.x);
  const HopRooms room(width, rows, p.scores);
  const Hops<T, kN> hops(p, blockIdx.x, room.sums);

  auto* free = reinterpret_cast<Storage*>(room.memory);
  MemoryRows<T> in{}, out{};
  if (p.in_resides) in = hops.residing(p.in_memory, free), free += rows * width;
  if (p.out_resides) out = p.same_rows ? in : hops.residing(p.out_memory, free);
  const auto* query = static_cast<const Storage*>(p.query.data) + hops.b * p.query.stride[0] +
                      hops.q * p.query.stride[1];
  for (int d = thread; d < width; d += kHopThreads) {
    room.u[d] = T::widen(query[d * p.query.stride[3]]);
    hops.state(0)[d] = room.u[d];
  }
  __syncthreads();

  for (int k = 0; k < hops.steps(); ++k) {
    if (!p.in_resides) in = hops.rows_of(p.in_memory, hops.b, k);
    if (!p.out_resides) out = hops.rows_of(p.out_memory, hops.b, k);
    // s = scale M u + bias
    hops.dots(in, room.u, 0, rows, [&](int n, float dot) { room.s[n] = hops.score(dot, k, n); });
    __syncthreads();
    // p = softmax(s)
    float m = 0.0f, l = 1.0f;
    hops.weigh(room.s, rows, room.few, m, l);
    const float inverse = !p.normalize ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l;
    // o = C^T p
    hops.weighted_sum(out, room.s, 0, rows, [&](int d, float sum) {
      room.o[d] = sum * inverse;
      hops.state(2 * k + 1)[d] = room.o[d];
    });
    if (p.weights != nullptr) {
      auto* weights = static_cast<Storage*>(p.weights) + (hops.query() * p.K + k) * p.N;
      for (int n = thread; n < rows; n += kHopThreads)
        weights[n] = narrow<T>(takes_part(room.s[n]) ? room.s[n] * inverse : 0.0f);
    }
    if (thread == 0) hops.stats(k)[0] = m, hops.stats(k)[1] = l;
    __syncthreads();
    // u = phi(H u + o)
    hops.step(room.u, room.o, room.y, k);
    for (int d = thread; d < width; d += kHopThreads) hops.state(2 * k + 2)[d] = room.u[d];
  }
  auto* result = static_cast<Storage*>(p.out) + hops.query() * p.D;
  for (int d = thread; d < width; d += kHopThreads) result[d] = narrow<T>(room.u[d]);
}

// Backward, hop by hop from the last one. With u and y = u' of a hop,
//   g <- g o phi'     dp = C g (+ the gradient of p)     ds = p o (dp - p . dp)
//   g <- H^T g + scale M^T ds
// The terms of the sums dM = scale ds u^T, dC = p g^T, dH = g u^T are stored: ds and p in xs, scale
// u and g in ys.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    memory_hops_backward_kernel(const __grid_constant__ HopsArguments p) {
  using Storage = typename T::Storage;
  const int rows = static_cast<int>(p.N), width = static_cast<int>(p.D);
  const int thread = static_cast<int>(threadIdx.x);
  const HopRooms room(width, rows, p.scores);
  const Hops<T, kN> hops(p, blockIdx.x, room.sums);
  float *g = room.o, *s = room.s, *dp = room.t;

  auto* free = reinterpret_cast<Storage*>(room.memory);
  MemoryRows<T> in{}, out{};
  if (p.in_resides) in = hops.residing(p.in_memory, free), free += rows * width;
  if (p.out_resides) out = p.same_rows ? in : hops.residing(p.out_memory, free);
  hops.read_gradient(g);
  for (int k = hops.steps(); k < p.K; ++k)
    for (int n = thread; n < rows; n += kHopThreads)
      p.xs[hops.slot(0, k) * p.N + n] = p.xs[hops.slot(1, k) * p.N + n] = no_part();

  for (int k = hops.steps() - 1; k >= 0; --k) {
    if (!p.in_resides) in = hops.rows_of(p.in_memory, hops.b, k);
    if (!p.out_resides) out = hops.rows_of(p.out_memory, hops.b, k);
    hops.enter(g, room.u, k);
    __syncthreads();
    hops.dots(in, room.u, 0, rows, [&](int n, float dot) { s[n] = hops.score(dot, k, n); });
    hops.dots(out, g, 0, rows, [&](int n, float dot) { dp[n] = dot + hops.weight_gradient(k, n); });
    __syncthreads();
    const float m = hops.stats(k)[0], l = hops.stats(k)[1];
    const float inverse = !p.normalize ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l;
    float delta = 0.0f;
    for (int n = thread; n < rows; n += kHopThreads) {
      s[n] = hops.weight(s[n], m);
      if (!takes_part(s[n])) continue;
      s[n] *= inverse;
      if (p.normalize) delta += s[n] * dp[n];
    }
    delta = hops.sum_of_block(room.few, delta);
    for (int n = thread; n < rows; n += kHopThreads) dp[n] = hops.hand_on(s[n], dp[n], delta, k, n);
    __syncthreads();
    // g = H^T g + scale M^T ds
    hops.weighted_sum(in, dp, 0, rows, [&](int d, float sum) { room.y[d] = sum * p.scale_float; });
    hops.leave(g, room.y, k);
  }
  auto* result = static_cast<Storage*>(p.grad_query) + hops.query() * p.D;
  for (int d = thread; d < width; d += kHopThreads) result[d] = narrow<T>(g[d]);
}

}  // namespace cuda
}  // namespace fastattn
