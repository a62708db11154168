// Memory hops, forward and backward: the choice of the kernel, and the gradient of the projection.
#include "memory_hops_panels_backward.h"
#include "memory_hops_panels_forward.h"
#include "memory_hops_short.h"
#include "memory_hops_stream.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// dH = sum g u^T over the queries, and over the hops if they share H. A task owns some rows of dH.
template <class S>
class ProjectionGradient : HopSteps<S> {
  typedef HopSteps<S> Base;
  typedef typename Base::T T;
  using Base::dp, Base::p, Base::W;
  static constexpr int64_t kRows = 16;    // of dH, per task
  static constexpr int64_t kTerms = 256;  // the longest chain of additions

 public:
  explicit ProjectionGradient(const MemoryHopsParams& params) : Base(params) {}

  void run() {
    const int64_t queries = p.B * p.Q, blocks = (p.D + kRows - 1) / kRows;
    const int64_t tasks = p.proj_slots * blocks, hops = p.K / p.proj_slots;
    const int team = team_size(p.threads, tasks, 2.0 * queries * p.K * p.D * p.D);
    T* u =
        static_cast<T*>(__builtin_malloc(static_cast<size_t>(queries * p.K * dp + 1) * sizeof(T)));
    for (int64_t row = 0; row < queries; ++row)
      for (int64_t k = 0; k < p.K; ++k)
        this->read_vector(this->trace(row, 2 * k), 1, u + (k * queries + row) * dp);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      T* sum = static_cast<T*>(thread_scratch(static_cast<size_t>(kRows * dp) * sizeof(T)));
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < tasks; ++t) {
        const int64_t slot = t / blocks, i0 = t % blocks * kRows;
        const int64_t rows = min_of(kRows, p.D - i0);
        for (int64_t x = 0; x < kRows * dp; ++x) sum[x] = T(0);
        for (int64_t k = slot * hops; k < (slot + 1) * hops; ++k)
          for (int64_t row = 0; row < queries; row += kTerms) {
            const T* g = static_cast<const T*>(p.grad_states) + (row * p.K + k) * p.D + i0;
            outer_products<T>(rows, g, p.K * p.D, u + (k * queries + row) * dp, dp, dp / W,
                              min_of(kTerms, queries - row),
                              [&](int64_t i, int64_t v, Vec<T> x) __attribute__((always_inline)) {
                                T* to = sum + i * dp + v * W;
                                store(to, load(to) + x);
                              });
          }
        S* dst = static_cast<S*>(p.grad_proj) + (slot * p.D + i0) * p.D;
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t d = 0; d < p.D; d += W)
            store_as<T>(dst + i * p.D + d, load(sum + i * dp + d),
                        static_cast<int>(min_of<int64_t>(W, p.D - d)));
      }
    }
    __builtin_free(u);
  }
};

// With more queries of a memory than this, queries across the lanes are faster than the width
// across the lanes.
constexpr int64_t kMostStreamed = 4;

// Runs the kernel for as many queries of a memory as there are: Panels, or for few of them
// StreamHops or, of a short memory, ShortHops. A panel of which they fill no more than half is half
// as wide: 16 queries on 64 rows of 64 take 0.6 of the time forward and 0.7 backward (Zen 4), with
// the same bits.
template <template <class, int> class Panels, class S, class F>
void with_kernel(const MemoryHopsParams& p, F run) {
  typedef typename Accumulator<S>::type T;
  const int64_t queries = p.shared ? p.B * p.Q : p.Q;
  if (queries <= kMostStreamed && !p.crowded)
    return ShortHops<S>::serves(p) ? run(ShortHops<S>(p)) : run(StreamHops<S>(p));
  if (queries <= kLanes<T>) return run(Panels<S, 1>(p));
  run(Panels<S, kPanelVectors>(p));
}

}  // namespace

void memory_hops_forward(const MemoryHopsParams& p) {
  if (p.B == 0 || p.Q == 0) return;
  with_element(p.dtype, [&](auto element) {
    with_kernel<PanelForward, decltype(element)>(p, [](auto&& kernel) { kernel.forward(); });
  });
}

void memory_hops_backward(const MemoryHopsParams& p) {
  if (p.B == 0 || p.Q == 0) return;
  with_element(p.dtype, [&](auto element) {
    typedef decltype(element) S;
    with_kernel<PanelBackward, S>(p, [](auto&& kernel) { kernel.backward(); });
    if (p.grad_proj != nullptr) ProjectionGradient<S>(p).run();
  });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
