#include "sinusoidal.h"

#include "../launch.h"
#include "choose.h"

namespace fastattn {
namespace cuda {

namespace {

// Batch rows per thread; fewer where there would otherwise be too few blocks for a whole GPU.
constexpr int64_t kGroupRows = 8, kManyBlocks = 1024;

// Launches the kernel with kN columns for each thread.
template <int kN>
void run(const SinusoidalParams& given, uintptr_t stream) {
  using T = FASTATTN_ELEMENT;
  SinusoidalArguments p{};
  static_cast<SinusoidalParams&>(p) = given;
  p.scale_float = static_cast<float>(p.scale);
  const int64_t chunks = (p.D + kN - 1) / kN, batch = p.B * p.H;
  while (p.column_bits < 8 && int64_t{1} << p.column_bits < chunks) ++p.column_bits;
  const int64_t rows = kSinusoidalThreads >> p.column_bits;
  p.rows_per_block = static_cast<int>(p.L < rows ? p.L : rows);
  p.column_blocks = static_cast<unsigned>(blocks_of(chunks, 1 << p.column_bits));
  const int64_t tiles = blocks_of(p.L, p.rows_per_block) * p.column_blocks;
  const bool many = tiles * blocks_of(batch, kGroupRows) >= kManyBlocks;
  p.group_rows = many ? kGroupRows : 1;
  const int64_t blocks = tiles * blocks_of(batch, p.group_rows);
  p.tiles = static_cast<unsigned>(tiles);
  const int threads = ((p.rows_per_block << p.column_bits) + 31) / 32 * 32;
  launch({"sinusoidal", blocks, threads, 0, stream,
          "B=" + std::to_string(p.B) + " H=" + std::to_string(p.H) + " L=" + std::to_string(p.L) +
              " D=" + std::to_string(p.D)},
         sinusoidal_kernel<T, kN>, p);
}

}  // namespace

// Launches out = scale x + PE. Aligned rows are read in whole chunks.
void sinusoidal(const FASTATTN_ELEMENT*, const SinusoidalParams& p, bool aligned,
                uintptr_t stream) {
  if (p.B * p.H * p.L * p.D == 0) return;
  constexpr int kN = kChunk<FASTATTN_ELEMENT>;
  aligned&& p.D % kN == 0 ? run<kN>(p, stream) : run<1>(p, stream);
}

}  // namespace cuda
}  // namespace fastattn
