// The loop that measures a tile unit: products on registers only.
#pragma once
#include "../simd/tiles.h"

namespace fastattn {
namespace {

// C[16, 16] += A[16, 32] B[32, 16]: a multiplication and an addition for each of 16 x 16 x 32.
constexpr int64_t kProductOperations = 2 * 16 * 16 * 32;
constexpr int kProductsOfTurn = 4;
constexpr int kTurns = 4000;  // between two reads of the clock: about 0.1 ms

// The values of A and B. They have both signs and every bit of the mantissa, so that the
// multipliers toggle, and are small enough as bf16 and as fp16 that no sum overflows.
struct alignas(64) TileValues {
  uint16_t values[16 * 32];
  TileValues() {
    for (int i = 0; i < 16 * 32; ++i)
      values[i] = static_cast<uint16_t>((i & 1) << 15 | 0x2c00 | (37 * i & 0xff));
  }
};

// Operations done by one thread until `until`. A product takes 16 cycles and its sum is ready after
// 52. Four accumulators, each with its own pair of the four operands, keep the unit busy.
template <class TileUnit, class Clock>
double tile_operations(TileUnit unit, double until, Clock now) {
  const TileValues values;
  unit.configure(TileConfig{});
  unit.template load<4>(values.values, 64);
  unit.template load<5>(values.values, 64);
  unit.template load<6>(values.values, 64);
  unit.template load<7>(values.values, 64);
  int64_t turns = 0;
  while (now() < until) {
    for (int i = 0; i < kTurns; ++i) {
      unit.template product<0, 4, 6>();
      unit.template product<1, 4, 7>();
      unit.template product<2, 5, 6>();
      unit.template product<3, 5, 7>();
    }
    turns += kTurns;
  }
  unit.release();
  return static_cast<double>(turns) * kProductsOfTurn * kProductOperations;
}

}  // namespace
}  // namespace fastattn
