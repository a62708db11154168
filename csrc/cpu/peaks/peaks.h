// The peaks of units that other libraries use and these kernels do not. The reference for a dtype
// is the fastest arithmetic that any code can reach on this processor. One unit per file, compiled
// with its own flags; if the compiler rejects them, the file is left out (FASTATTN_HAVE_PEAK_*, see
// setup.py).
#pragma once
#include <omp.h>

#include <cstdint>
#include <vector>

namespace fastattn {

// Each runs for `seconds` on `threads` threads and returns GFLOP/s. Call it only where the
// processor has the feature.
double peak_of_tiles_bf16(int threads, double seconds);  // TDPBF16PS: amx_bf16
double peak_of_tiles_fp16(int threads, double seconds);  // TDPFP16PS: amx_fp16
double peak_of_fma_fp16(int threads, double seconds);    // VFMADD213PH: avx512_fp16

struct Unit {
  const char* name;     // "tile_bf16", "tile_f16", "fma_f16": kinds of measure_peak
  const char* feature;  // the required feature, as in processor.h
  double (*measure)(int threads, double seconds);  // null if not compiled
};
const std::vector<Unit>& units();
// 0 if this processor or this build has no such unit.
double measure_unit(const Unit& unit, int threads, double seconds);

namespace {

// Runs all threads from the same start to the same end; `operations(until)` returns how many
// operations one thread did. Internal linkage, because each file compiles it with its own
// instructions.
template <class Operations>
double rate_of(int threads, double seconds, Operations operations) {
  double done = 0;
  const double begin = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : done)
  done += operations(begin + seconds);
  return done / (omp_get_wtime() - begin) * 1e-9;
}

}  // namespace
}  // namespace fastattn
