// Hopfield retrieval: memory hops without the old state, u' = C^T softmax(scale M u + bias),
// repeated until convergence.
//
// A block of threads takes the queries that stop together, usually one. It detects convergence
// itself, so the host never waits.
#pragma once
#include "memory_hops.h"

namespace fastattn {
namespace cuda {

// The limit of steps for a search without a limit. A search that takes this many steps is caught in
// a cycle caused by rounding.
constexpr int64_t kMostSteps = 1 << 20;

// p.K is the maximum number of steps, < 0 = no limit; p.trace is [B, Q, 2, D], the last two states.
template <class T, int kN>
__global__ void __launch_bounds__(kHopThreads, 4)
    hopfield_kernel(const __grid_constant__ HopsArguments p) {
  using Storage = typename T::Storage;
  const int rows = static_cast<int>(p.N), width = static_cast<int>(p.D);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const HopRooms room(width, rows, p.scores);
  const int64_t first = int64_t(blockIdx.x) * p.together;
  auto sums = reinterpret_cast<double*>(room.few);  // [warps]
  const auto sum_of_block = [&](double x) {
    x = sum_of_warp(x);
    __syncthreads();
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };

  const Hops<T, kN> one(p, first, room.sums);
  auto* free = reinterpret_cast<Storage*>(room.memory);
  MemoryRows<T> in = one.rows_of(p.in_memory, one.b, 0), out = one.rows_of(p.out_memory, one.b, 0);
  if (p.in_resides) in = one.residing(p.in_memory, free), free += rows * width;
  if (p.out_resides) out = p.same_rows ? in : one.residing(p.out_memory, free);
  const auto ends_of = [&](int64_t query) {
    return static_cast<float*>(p.trace) + query * 2 * width;
  };
  for (int64_t query = first; query < first + p.together; ++query) {
    const auto* state = static_cast<const Storage*>(p.query.data) + one.b * p.query.stride[0] +
                        query % p.Q * p.query.stride[1];
    for (int d = thread; d < width; d += kHopThreads)
      ends_of(query)[d] = ends_of(query)[width + d] = T::widen(state[d * p.query.stride[3]]);
  }

  const int64_t limit = p.K < 0 ? kMostSteps : p.K;
  int64_t taken = 0;
  bool moves = true;
  for (int64_t step = 1; step <= limit && moves; ++step) {
    double by = 0.0, length = 0.0;
    for (int64_t query = first; query < first + p.together; ++query) {
      const Hops<T, kN> hops(p, query, room.sums);
      float* ends = ends_of(query);
      __syncthreads();  // the memory is loaded, and the previous query is done
      for (int d = thread; d < width; d += kHopThreads) room.u[d] = ends[width + d];
      __syncthreads();
      hops.dots(in, room.u, 0, rows, [&](int n, float dot) { room.s[n] = hops.score(dot, 0, n); });
      __syncthreads();
      float m = 0.0f, l = 1.0f;
      hops.weigh(room.s, rows, room.few, m, l);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      hops.weighted_sum(out, room.s, 0, rows, [&](int d, float sum) {
        const float now = sum * inverse, step_of_column = now - room.u[d];
        by += static_cast<double>(step_of_column) * step_of_column;
        length += static_cast<double>(now) * now;
        ends[d] = room.u[d];
        ends[width + d] = now;
      });
    }
    by = sum_of_block(by);
    length = sum_of_block(length);
    // Converged if the step is at most eps, or no longer than its rounding error. NaN counts as
    // converged.
    constexpr double kUnit = 4 * 0x1p-23;
    const double least = fmax(p.eps * p.eps, kUnit * kUnit * length);
    moves = by > least;
    taken = moves ? -step : step;
  }

  __syncthreads();  // the last states are written
  for (int64_t query = first; query < first + p.together; ++query) {
    auto* result = static_cast<Storage*>(p.out) + query * width;
    for (int d = thread; d < width; d += kHopThreads)
      result[d] = narrow<T>(ends_of(query)[width + d]);
    if (thread == 0) p.taken[query] = taken;
  }
}

}  // namespace cuda
}  // namespace fastattn
