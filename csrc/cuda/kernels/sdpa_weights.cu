#include "sdpa_weights.h"

#include "../launch.h"
#include "choose.h"

namespace fastattn {
namespace cuda {

// Launches the evaluation of a mask program for each tile of pairs.
void attention_mask(const FASTATTN_ELEMENT*, const AttentionArguments& p, uintptr_t stream) {
  const int64_t tiles = mask_rows_of(p.q_starts != nullptr, p.B, p.Hq, p.Lq) * p.mask_columns;
  // At least one, which writes the steps.
  const int64_t blocks = clamp_int(blocks_of(tiles, kMaskTilesOfBlock), 1, kMostMaskBlocks);
  launch({"attention_mask", blocks, kMaskThreads, sizeof(MaskTable), stream, shapes(p)},
         attention_mask_kernel<FASTATTN_ELEMENT>, p);
}

// Launches the kernel that prepares the stats of all rows, one warp for each.
void attention_rows(const FASTATTN_ELEMENT*, const AttentionArguments& p, uintptr_t stream) {
  launch({"attention_rows", blocks_of(rows_of(p), kRowsThreads / 32), kRowsThreads, 0, stream,
          shapes(p)},
         excludes_pairs(p) ? attention_rows_kernel<FASTATTN_ELEMENT, true>
                           : attention_rows_kernel<FASTATTN_ELEMENT, false>,
         p);
}

// Launches the kernel that writes a value for each pair: weights, or gradients of a bias.
void attention_pairs(const FASTATTN_ELEMENT*, const PairsArguments& p, uintptr_t stream) {
  with_width(p, [&](auto width) {
    using Shape = BackwardShape<FASTATTN_ELEMENT, decltype(width)::value>;
    const bool packed = p.q_starts != nullptr;
    const int64_t of_keys = packed          ? packed_diagonals<Shape::kStaying>(p)
                            : p.by_distance ? diagonals_of<Shape::kStaying>(p)
                                            : blocks_of(p.sizes[3], Shape::kPassing);
    const int64_t blocks =
        blocks_of(p.sizes[2], Shape::kStaying) * of_keys * p.sizes[0] * p.sizes[1];
    launch({"attention_pairs", blocks, Shape::kThreads, Shape::kSharedBytes, stream, shapes(p)},
           packed ? attention_pairs_kernel<FASTATTN_ELEMENT, decltype(width)::value, true>
                  : attention_pairs_kernel<FASTATTN_ELEMENT, decltype(width)::value, false>,
           p);
  });
}

// Launches the sums of a relative bias over all pairs with the same distance.
void attention_table(const FASTATTN_ELEMENT*, const PairsArguments& p, uintptr_t stream) {
  launch({"attention_table", blocks_of(p.Hq * p.relative_bias_size, kTableThreads), kTableThreads,
          0, stream, shapes(p)},
         attention_table_kernel<FASTATTN_ELEMENT>, p);
}

}  // namespace cuda
}  // namespace fastattn
