// The peaks of AMX's tiles. Written from Intel's manual and compiled, but not yet run on a
// processor with AMX (docs/benchmarks.md says how it is tested without).
#include "peaks.h"
#include "tiles.h"

namespace fastattn {
namespace {

// Inline asm, because GCC's intrinsics are macros that take only literals, and its _tile_loadd has
// no memory operand, so the compiler may move the stores of the loaded values after it.
struct TilesBf16 {
  void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
  void release() { asm volatile("tilerelease"); }
  template <int T>
  void load(const void* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  void product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

struct TilesFp16 : TilesBf16 {
  // TDPFP16PS is unknown to many assemblers: VEX.128.F2.0F38.W0 5C /r, where reg is the sum, rm is
  // A, and vvvv, inverted, is B. (TDPBF16PS has F3 in place of F2: 2 in the last two bits.)
  template <int C, int A, int B>
  void product() {
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"((~B & 15) << 3 | 3),
                 "i"(0xc0 | C << 3 | A));
  }
};

template <class TileUnit>
double peak(int threads, double seconds) {
  return rate_of(threads, seconds, [](double until) {
    return tile_operations(TileUnit{}, until, [] { return omp_get_wtime(); });
  });
}

}  // namespace

double peak_of_tiles_bf16(int threads, double seconds) { return peak<TilesBf16>(threads, seconds); }
double peak_of_tiles_fp16(int threads, double seconds) { return peak<TilesFp16>(threads, seconds); }

}  // namespace fastattn
