// The peaks of AMX's tiles. docs/benchmarks.md explains how they are tested without AMX.
#include "peaks.h"
#include "tiles.h"

namespace fastattn {
namespace {

struct TilesBf16 : HardwareTiles {
  // Tile C += tile A x tile B, of bf16.
  template <int C, int A, int B>
  static void product() {
    multiply_bf16<C, A, B>();
  }
};
struct TilesFp16 : HardwareTiles {
  // Tile C += tile A x tile B, of fp16.
  template <int C, int A, int B>
  static void product() {
    multiply_f16<C, A, B>();
  }
};

// Operations per second of a kind of tile product.
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
