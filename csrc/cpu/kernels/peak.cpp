// Measures the peak performance of this machine, the reference of every benchmark.
#include <omp.h>

#include "../kernel_table.h"
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Independent chains of multiply-adds, enough to hide the latency; returns the operations done by
// one thread.
template <class V, class Step>
FASTATTN_INLINE double chains(double until, int64_t per_step, Step step) {
  constexpr int kChains = kRegisters == 32 ? 16 : 12;
  V acc[kChains];
  FASTATTN_UNROLL for (int i = 0; i < kChains; ++i) acc[i] = V{} + static_cast<float>(i);
  int64_t steps = 0;
  while (omp_get_wtime() < until) {
    for (int it = 0; it < 20000; ++it) {
      FASTATTN_UNROLL for (int i = 0; i < kChains; ++i) acc[i] = step(acc[i]);
      FASTATTN_UNROLL for (int i = 0; i < kChains; ++i) asm volatile("" : FASTATTN_OPERAND(acc[i]));
    }
    steps += 20000;
  }
  return static_cast<double>(steps) * kChains * static_cast<double>(per_step);
}

// Repeats multiply-adds until a time; returns their number.
double operations(Peak kind, double until) {
  const VecF a = splat(0.999f), b = splat(1e-3f);
  const VecD c = splat(0.999), d = splat(1e-3);
  if (kind == Peak::fma_f32)
    return chains<VecF>(until, 2 * kLanes<float>, [&](VecF x) { return x * a + b; });
  if (kind == Peak::fma_f64)
    return chains<VecD>(until, 2 * kLanes<double>, [&](VecD x) { return x * c + d; });
#if defined(FASTATTN_HAS_PAIRS)
  return chains<VecF>(until, 4 * kLanes<float>,
                      [&](VecF x) { return PairBf16::multiply_add(a, b, x); });
#else
  return 0;
#endif
}

// Bytes read by one thread from its part of a buffer far larger than the caches.
double bytes_read(const char* from, int64_t bytes, double until) {
  double total = 0;
  VecI acc[8] = {};
  while (omp_get_wtime() < until) {
    for (int64_t i = 0; i + 8 * kVectorBytes <= bytes; i += 8 * kVectorBytes)
      FASTATTN_UNROLL for (int n = 0; n < 8; ++n) acc[n] |=
          (VecI)load(reinterpret_cast<const float*>(from + i + n * kVectorBytes));
    FASTATTN_UNROLL for (int n = 0; n < 8; ++n) asm volatile("" : FASTATTN_OPERAND(acc[n]));
    total += static_cast<double>(bytes);
  }
  return total;
}

}  // namespace

// Operations (or bytes) per second of all threads.
double measure_peak(Peak kind, int threads, double seconds) {
#if !defined(FASTATTN_HAS_PAIRS)
  if (kind == Peak::dot_bf16) return 0;
#endif
  constexpr int64_t kBytes = int64_t(256) << 20;
  char* buffer = nullptr;
  if (kind == Peak::read_bandwidth) {
    buffer = static_cast<char*>(__builtin_malloc(kBytes));
    __builtin_memset(buffer, 1, kBytes);
  }
  double done = 0;
  const double begin = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : done)
  {
    const int64_t bytes_of_thread = kBytes / omp_get_num_threads() / 4096 * 4096;
    done += buffer != nullptr ? bytes_read(buffer + omp_get_thread_num() * bytes_of_thread,
                                           bytes_of_thread, begin + seconds)
                              : operations(kind, begin + seconds);
  }
  const double elapsed = omp_get_wtime() - begin;
  __builtin_free(buffer);
  return done / elapsed * 1e-9;
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
