// A residual and the normalization of its rows:
//
//   s = scale x + residual,   out = (s - mean(s)) / sqrt(var(s) + eps) gamma + beta
//   RMS:                      out = s / sqrt(mean(s^2) + eps) gamma
//
// The work is bound by memory: a row is read once, and stays in L1 for the passes over it.
#include "../../params.h"
#include "../threads.h"
#include "blocks.h"
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr double kFlopsPerElement = 12;  // the time of one element, in flops

template <class S>
class Norm {
  static constexpr int W = kLanes<float>;

 public:
  explicit Norm(const NormParams& params) : p(params) {}

  // One task for several rows.
  void run() const {
    const int64_t rows_of_task = max_of<int64_t>(1, (64 << 10) / (4 * max_of<int64_t>(1, p.E)));
    const int64_t tasks = (p.rows + rows_of_task - 1) / rows_of_task;
    const double flops = kFlopsPerElement * static_cast<double>(p.rows) * static_cast<double>(p.E);
    const int team = team_size(p.threads, tasks, flops);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t task = 0; task < tasks; ++task) {
      float* const sums = static_cast<float*>(
          thread_scratch(static_cast<size_t>(round_up(p.E, W)) * sizeof(float)));
      const int64_t end = min_of(p.rows, (task + 1) * rows_of_task);
      for (int64_t r = task * rows_of_task; r < end; ++r) row(r, sums);
    }
  }

 private:
  const NormParams& p;

  // The lanes of a vector that are in use.
  static FASTATTN_INLINE int lanes(int64_t left) {
    return static_cast<int>(min_of<int64_t>(W, left));
  }

  // Row r: the sum of its terms, times the scale, plus the residual; then its norm.
  void row(int64_t r, float* s) const {
    const void* const* terms = p.terms == nullptr ? nullptr : p.terms + 3 * r;
    const S* x =
        terms == nullptr ? static_cast<const S*>(p.x) + r * p.E : static_cast<const S*>(terms[0]);
    const S* factor = static_cast<const S*>(p.scale);
    const S* residual = static_cast<const S*>(p.residual);
    S* sum = static_cast<S*>(p.sum);
    VecF total{};
    for (int64_t i = 0; i < p.E; i += W) {
      const int n = lanes(p.E - i);
      VecF v = load_as<float>(x + i, n);
      for (int t = 1; terms != nullptr && t < 3 && terms[t] != nullptr; ++t)
        v += load_as<float>(static_cast<const S*>(terms[t]) + i, n);
      if (factor != nullptr) v *= load_as<float>(factor + i, n);
      if (residual != nullptr) v += load_as<float>(residual + r * p.E + i, n);
      if (sum != nullptr) store_as<float>(sum + r * p.E + i, v, n);
      store(s + i, v);
      total += v;
    }
    if (p.out == nullptr) return;
    const float size = static_cast<float>(p.E);
    const float mean = p.rms ? 0.0f : sum_of(total) / size;
    VecF squares{};
    for (int64_t i = 0; i < p.E; i += W) {
      VecF d = load(s + i) - mean;
      if (p.E - i < W) d = first(d, lanes(p.E - i));  // lanes beyond the row hold -mean
      squares += d * d;
    }
    const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / size + static_cast<float>(p.eps));
    const S* gamma = static_cast<const S*>(p.gamma);
    const S* beta = static_cast<const S*>(p.beta);
    S* out = static_cast<S*>(p.out) + r * p.E;
    for (int64_t i = 0; i < p.E; i += W) {
      const int n = lanes(p.E - i);
      VecF v = (load(s + i) - mean) * scale;
      if (gamma != nullptr) v *= load_as<float>(gamma + i, n);
      if (beta != nullptr) v += load_as<float>(beta + i, n);
      store_as<float>(out + i, v, n);
    }
  }

  // The first n lanes, 0 in the others.
  static FASTATTN_INLINE VecF first(VecF v, int n) {
    alignas(kVectorBytes) float lane[W];
    store(lane, v);
    for (int i = n; i < W; ++i) lane[i] = 0.0f;
    return load(lane);
  }

  // The sum of all lanes, by halves.
  static FASTATTN_INLINE float sum_of(VecF v) {
    alignas(kVectorBytes) float lane[W];
    store(lane, v);
    for (int half = W / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
  }
};

}  // namespace

// LayerNorm or RMSNorm for the dtype.
void norm(const NormParams& p) {
  switch (p.dtype) {
    case DType::f32:
      return Norm<float>(p).run();
    case DType::bf16:
      return Norm<Bf16>(p).run();
    case DType::f16:
      return Norm<F16>(p).run();
    default:
      return;
  }
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
