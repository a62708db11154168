#include "peaks/peaks.h"
#include "processor.h"

namespace fastattn {

// The units whose peak can be measured, and the instruction sets that they need.
const std::vector<Unit>& units() {
  static const std::vector<Unit> all = {
#if FASTATTN_HAVE_PEAK_AMX
      {"tile_bf16", "amx_bf16", peak_of_tiles_bf16},
      {"tile_f16", "amx_fp16", peak_of_tiles_fp16},
#else
      {"tile_bf16", "amx_bf16", nullptr},
      {"tile_f16", "amx_fp16", nullptr},
#endif
#if FASTATTN_HAVE_PEAK_AVX512_FP16
      {"fma_f16", "avx512_fp16", peak_of_fma_fp16},
#else
      {"fma_f16", "avx512_fp16", nullptr},
#endif
  };
  return all;
}

// FLOP/s of a unit, measured for `seconds`; 0 if the processor does not have it.
double measure_unit(const Unit& unit, int threads, double seconds) {
  const bool runs = unit.measure != nullptr && has_feature(unit.feature);
  return runs ? unit.measure(threads, seconds) : 0;
}

}  // namespace fastattn
