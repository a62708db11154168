// The peak of multiply-adds that round to fp16, which Intel's Xeons have from Sapphire Rapids on.
// fastattn's kernels accumulate in fp32 and do not use them; other libraries do.
#include <immintrin.h>

#include "peaks.h"

namespace fastattn {
namespace {

// Independent chains, enough to hide the latency on two ports.
constexpr int kChains = 16, kLanes = 32;

// Repeats multiply-adds until a time; returns their number.
double operations(double until) {
  const __m512h a = _mm512_set1_ph(static_cast<_Float16>(0.999f));
  const __m512h b = _mm512_set1_ph(static_cast<_Float16>(1e-3f));
  __m512h sums[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ph(static_cast<_Float16>(i));
  int64_t steps = 0;
  while (omp_get_wtime() < until) {
    for (int turn = 0; turn < 20000; ++turn) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) sums[i] = _mm512_fmadd_ph(sums[i], a, b);
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) asm volatile("" : "+v"(sums[i]));
    }
    steps += 20000;
  }
  return static_cast<double>(steps) * kChains * kLanes * 2;
}

}  // namespace

double peak_of_fma_fp16(int threads, double seconds) {
  return rate_of(threads, seconds, operations);
}

}  // namespace fastattn
