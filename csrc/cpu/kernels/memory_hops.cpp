// Memory hops, forward and backward: the choice of the kernel, and the gradient of the projection.
#include "memory_hops_panels_backward.h"
#include "memory_hops_panels_forward.h"
#include "memory_hops_short.h"
#include "memory_hops_stream.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// dH = sum g u^T over the queries, and over the hops if they share H. A task owns some rows of dH.
template <class T>
class ProjectionGradient : HopSteps<T> {
  typedef HopSteps<T> Base;
  using Base::dp, Base::p, Base::W;
  static constexpr int64_t kRows = 16;    // of dH, per task
  static constexpr int64_t kTerms = 256;  // the longest chain of additions

 public:
  explicit ProjectionGradient(const MemoryHopsParams& params) : Base(params) {}

  // dH = sum over queries of g u^T, each block of rows by one task.
  void run() {
    const int64_t queries = p.B * p.Q, blocks = (p.D + kRows - 1) / kRows;
    const int64_t tasks = p.proj_slots * blocks, hops = p.K / p.proj_slots;
    const int team = team_size(p.threads, tasks, 2.0 * queries * p.K * p.D * p.D);
    T* u =
        static_cast<T*>(__builtin_malloc(static_cast<size_t>(queries * p.K * dp + 1) * sizeof(T)));
    for (int64_t row = 0; row < queries; ++row)
      for (int64_t k = 0; k < p.K; ++k) this->read_state(row, 2 * k, u + (k * queries + row) * dp);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      const int64_t size = kRows * dp;
      T* const sum = static_cast<T*>(thread_scratch(2 * static_cast<size_t>(size) * sizeof(T)));
      T* const chain_sum = sum + size;  // of one chain
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < tasks; ++t) {
        const int64_t slot = t / blocks, i0 = t % blocks * kRows;
        const int64_t rows = min_of(kRows, p.D - i0);
        for (int64_t x = 0; x < size; ++x) sum[x] = T(0);
        for (int64_t k = slot * hops; k < (slot + 1) * hops; ++k)
          for (int64_t row = 0; row < queries; row += kTerms) {
            const T* g = static_cast<const T*>(p.grad_states) + (row * p.K + k) * p.D + i0;
            outer_products(rows, g, p.K * p.D, u + (k * queries + row) * dp, dp, dp / W,
                           min_of(kTerms, queries - row), chain_sum, dp);
            for (int64_t x = 0; x < rows * dp; x += W)
              store(sum + x, load(sum + x) + load(chain_sum + x));
          }
        for (int64_t i = 0; i < rows; ++i)
          write_elements(sum + i * dp, p.D, p.grad_proj, p.dtype, (slot * p.D + i0 + i) * p.D);
      }
    }
    __builtin_free(u);
  }
};

// With more queries of a memory than this, queries across the lanes are faster than the width
// across the lanes.
constexpr int64_t kMostStreamed = 4;

// Runs the kernel for the number of queries per memory: Panels for many; for few, StreamHops, or
// ShortHops if the memory is short. If the queries fill at most half of a panel, a panel of half
// the width runs, with the same bits. Doubles have only wide panels: calls in double are too rare
// to compile both.
template <template <class, int> class Panels, class T, class F>
void with_kernel(const MemoryHopsParams& p, F run) {
  const int64_t queries = p.shared ? p.B * p.Q : p.Q;
  if (queries <= kMostStreamed && !p.crowded)
    return ShortHops<T>::serves(p) ? run(ShortHops<T>(p)) : run(StreamHops<T>(p));
  if constexpr (kSame<T, float>) {
    if (queries <= kLanes<T>) return run(Panels<T, 1>(p));
  }
  run(Panels<T, kPanelVectors>(p));
}

// Calls f with a value of the type in which a dtype is computed.
template <class F>
void with_number(DType dtype, F f) {
  with_arithmetic(dtype, [&](auto policy) { f(typename decltype(policy)::Acc()); });
}

// A call whose projection is of type T, widened if needed.
template <class T>
class WithProjection {
 public:
  explicit WithProjection(const MemoryHopsParams& params) : p(params), widened_(nullptr) {
    if (p.proj.data == nullptr || p.dtype == kStoredAs<T>) return;
    const int64_t D = p.D, *st = params.proj.stride;
    widened_ = static_cast<T*>(
        __builtin_malloc(static_cast<size_t>(p.proj_slots * D * D + 1) * sizeof(T)));
    for (int64_t i = 0; i < p.proj_slots * D; ++i)
      read_elements(params.proj.data, p.dtype, i / D * st[1] + i % D * st[2], int64_t(1), D,
                    widened_ + i * D);
    p.proj = {widened_, {0, p.proj_slots > 1 ? D * D : 0, D, 1}};
  }
  ~WithProjection() { __builtin_free(widened_); }
  WithProjection(const WithProjection&) = delete;
  WithProjection& operator=(const WithProjection&) = delete;

  MemoryHopsParams p;

 private:
  T* widened_;
};

}  // namespace

// The forward pass of all hops: the states, the statistics and, if wanted, the weights.
void memory_hops_forward(const MemoryHopsParams& params) {
  if (params.B == 0 || params.Q == 0) return;
  with_number(params.dtype, [&](auto zero) {
    typedef decltype(zero) T;
    const WithProjection<T> call(params);
    with_kernel<PanelForward, T>(call.p, [](auto&& kernel) { kernel.forward(); });
  });
}

// The backward pass of all hops, from the last to the first.
void memory_hops_backward(const MemoryHopsParams& params) {
  if (params.B == 0 || params.Q == 0) return;
  with_number(params.dtype, [&](auto zero) {
    typedef decltype(zero) T;
    const WithProjection<T> call(params);
    with_kernel<PanelBackward, T>(call.p, [](auto&& kernel) { kernel.backward(); });
    if (call.p.grad_proj != nullptr) ProjectionGradient<T>(call.p).run();
  });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
