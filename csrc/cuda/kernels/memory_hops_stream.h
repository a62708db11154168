// Memory hops over a long memory. In each hop one launch gives a block to every few rows, and the
// next launch gives a block to every query. The splits depend only on the number of rows.
#pragma once
#include "memory_hops.h"
#include "softmax_state.h"

namespace fastattn {
namespace cuda {

// The rows of a block, and the partial result that the combining block reads.
template <class T, int kN>
struct Split {
  Hops<T, kN> hops;
  int index, first, last;
  FASTATTN_DEVICE Split(const HopsArguments& p, float* sums)
      : hops(p, blockIdx.x / static_cast<unsigned>(p.splits), sums),
        index(static_cast<int>(blockIdx.x % static_cast<unsigned>(p.splits))),
        first(index * kHopRowsOfSplit),
        last(first + kHopRowsOfSplit < p.N ? first + kHopRowsOfSplit : static_cast<int>(p.N)) {}
};

// The partial result of a split: o [width], m and l.
template <class T, int kN>
FASTATTN_DEVICE float* partial_of(const Hops<T, kN>& hops, int split) {
  return hops.p.partial + (hops.query() * hops.p.splits + split) * (hops.width + 2);
}

// The partial result of one split: the weighted sum of rows, the maximum score and the sum of the
// weights.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    memory_hops_split_kernel(const __grid_constant__ HopsArguments p) {
  const int width = static_cast<int>(p.D), thread = static_cast<int>(threadIdx.x), k = p.hop;
  const HopRooms room(width, kHopRowsOfSplit);
  const Split<T, kN> split(p, room.sums);
  const Hops<T, kN>& hops = split.hops;
  const int first = split.first, last = split.last;
  for (int d = thread; d < width; d += kHopThreads) room.u[d] = hops.state(2 * k)[d];
  __syncthreads();
  hops.dots(hops.rows_of(p.in_memory, hops.b, k), room.u, first, last, [&](int n, float dot) {
    const float s = hops.score(dot, k, n);
    room.s[n - first] = s;
    if (p.scores != nullptr) p.scores[hops.query() * p.N + n] = s;
  });
  __syncthreads();
  float m = 0.0f, l = 1.0f;
  hops.weigh(room.s, last - first, room.few, m, l);
  float* to = partial_of(hops, split.index);
  hops.weighted_sum(hops.rows_of(p.out_memory, hops.b, k), room.s, first, last,
                    [&](int d, float sum) { to[d] = sum; });
  if (thread == 0) to[width] = m, to[width + 1] = l;
}

// The results of one query: o, its statistics, the weights if they are requested, and u'.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    memory_hops_combine_kernel(const __grid_constant__ HopsArguments p) {
  using Storage = typename T::Storage;
  const int width = static_cast<int>(p.D), thread = static_cast<int>(threadIdx.x), k = p.hop;
  const HopRooms room(width, kHopRowsOfSplit);
  const Hops<T, kN> hops(p, blockIdx.x, room.sums);
  float m = minus_infinity(), l = 0.0f;
  for (int n = 0; n < p.splits; ++n) m = fmaxf(m, partial_of(hops, n)[width]);
  const auto factor = [&](int n) {  // only for a split with visible rows
    return p.normalize ? shrink_to(partial_of(hops, n)[width], m) : 1.0f;
  };
  const auto is_empty = [&](int n) { return partial_of(hops, n)[width] == minus_infinity(); };
  for (int n = 0; n < p.splits; ++n)
    if (!is_empty(n)) l += factor(n) * partial_of(hops, n)[width + 1];
  const float inverse = !p.normalize ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l;
  for (int d = thread; d < width; d += kHopThreads) {
    float sum = 0.0f;
    for (int n = 0; n < p.splits; ++n)
      if (!is_empty(n)) sum += factor(n) * partial_of(hops, n)[d];
    room.o[d] = sum * inverse;
    hops.state(2 * k + 1)[d] = room.o[d];
    room.u[d] = hops.state(2 * k)[d];
  }
  if (p.weights != nullptr) {
    const float* scores = p.scores + hops.query() * p.N;
    auto* weights = static_cast<Storage*>(p.weights) + (hops.query() * p.K + k) * p.N;
    for (int n = thread; n < p.N; n += kHopThreads) {
      const float w = hops.weight(scores[n], m);
      weights[n] = narrow<T>(takes_part(w) ? w * inverse : 0.0f);
    }
  }
  if (thread == 0) hops.stats(k)[0] = m, hops.stats(k)[1] = l;
  __syncthreads();
  hops.step(room.u, room.o, room.y, k);
  auto* result = static_cast<Storage*>(p.out) + hops.query() * p.D;
  for (int d = thread; d < width; d += kHopThreads) {
    hops.state(2 * k + 2)[d] = room.u[d];
    if (k + 1 == p.K) result[d] = narrow<T>(room.u[d]);
  }
}

// Backward for one split: stores p and dp in xs, and its part of p . dp.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    memory_hops_split_weights_kernel(const __grid_constant__ HopsArguments p) {
  const int width = static_cast<int>(p.D), thread = static_cast<int>(threadIdx.x), k = p.hop;
  const HopRooms room(width, kHopRowsOfSplit);
  const Split<T, kN> split(p, room.sums);
  const Hops<T, kN>& hops = split.hops;
  const int first = split.first, last = split.last;
  for (int d = thread; d < width; d += kHopThreads) {
    room.u[d] = hops.state(2 * k)[d];
    room.o[d] = p.ys[hops.slot(1, k) * width + d];
  }
  __syncthreads();
  hops.dots(hops.rows_of(p.in_memory, hops.b, k), room.u, first, last,
            [&](int n, float dot) { room.s[n - first] = hops.score(dot, k, n); });
  hops.dots(hops.rows_of(p.out_memory, hops.b, k), room.o, first, last,
            [&](int n, float dot) { room.t[n - first] = dot + hops.weight_gradient(k, n); });
  __syncthreads();
  const float m = hops.stats(k)[0], l = hops.stats(k)[1];
  const float inverse = !p.normalize ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l;
  float delta = 0.0f;
  for (int n = first + thread; n < last; n += kHopThreads) {
    float w = hops.weight(room.s[n - first], m);
    if (takes_part(w)) {
      w *= inverse;
      if (p.normalize) delta += w * room.t[n - first];
    }
    p.xs[hops.slot(0, k) * p.N + n] = room.t[n - first];
    p.xs[hops.slot(1, k) * p.N + n] = w;
  }
  delta = hops.sum_of_block(room.few, delta);
  if (thread == 0) partial_of(hops, split.index)[width] = delta;
}

// Then ds, and the split's part of M^T ds.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    memory_hops_split_scores_kernel(const __grid_constant__ HopsArguments p) {
  const int width = static_cast<int>(p.D), thread = static_cast<int>(threadIdx.x), k = p.hop;
  const HopRooms room(width, kHopRowsOfSplit);
  const Split<T, kN> split(p, room.sums);
  const Hops<T, kN>& hops = split.hops;
  const int first = split.first, last = split.last;
  float delta = 0.0f;
  for (int n = 0; n < p.splits; ++n) delta += partial_of(hops, n)[width];
  for (int n = first + thread; n < last; n += kHopThreads) {
    const float dp = p.xs[hops.slot(0, k) * p.N + n], w = p.xs[hops.slot(1, k) * p.N + n];
    room.t[n - first] = hops.hand_on(w, dp, delta, k, n);
  }
  __syncthreads();
  float* to = partial_of(hops, split.index);
  hops.weighted_sum(hops.rows_of(p.in_memory, hops.b, k), room.t, first, last,
                    [&](int d, float sum) { to[d] = sum; });
}

// Then the gradient of u, summed over the splits of hop `hop` (K: the incoming gradient), which
// continues into the hop before it.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    memory_hops_combine_backward_kernel(const __grid_constant__ HopsArguments p) {
  using Storage = typename T::Storage;
  const int width = static_cast<int>(p.D), thread = static_cast<int>(threadIdx.x), k = p.hop;
  const HopRooms room(width, kHopRowsOfSplit);
  const Hops<T, kN> hops(p, blockIdx.x, room.sums);
  float* g = room.o;
  if (k == p.K) {
    hops.read_gradient(g);
  } else {
    for (int d = thread; d < width; d += kHopThreads) {
      float sum = 0.0f;
      for (int n = 0; n < p.splits; ++n) sum += partial_of(hops, n)[d];
      room.y[d] = sum * p.scale_float;
      g[d] = p.ys[hops.slot(1, k) * width + d];
    }
    hops.leave(g, room.y, k);
  }
  if (k > 0) return hops.enter(g, room.u, k - 1);
  auto* result = static_cast<Storage*>(p.grad_query) + hops.query() * p.D;
  for (int d = thread; d < width; d += kHopThreads) result[d] = narrow<T>(g[d]);
}

}  // namespace cuda
}  // namespace fastattn
