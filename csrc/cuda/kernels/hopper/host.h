// Derives the arguments of a kernel for Hopper from the arguments of a call; host code.
#pragma once
#include "../../launch.h"
#include "../../tensor_map.h"
#include "../choose.h"
#include "common.h"

namespace fastattn {
namespace cuda {
namespace hopper {

// Describes an operand [batch, H, L, columns] to TMA, with `rows` rows of `heads` heads as the box
// of a tile. False if TMA cannot copy it.
inline bool describe(const Tensor4& t, bool is_half, int64_t batch, int64_t H, int64_t L,
                     int64_t columns, int heads, int rows, TensorOperand& operand) {
  TensorDescription d{};
  d.base = t.data;
  d.element = is_half ? TensorElement::f16 : TensorElement::bf16;
  const int64_t size[4] = {columns, H, L, batch};
  const int64_t stride[4] = {0, t.stride[1], t.stride[2], t.stride[0]};
  const int box[4] = {64, heads, rows, 1};
  for (int n = 0; n < 4; ++n) {
    d.size[n] = size[n];
    d.box[n] = box[n];
    if (n == 0) continue;
    // TMA gets only the first entry of a dimension with stride 0.
    if (stride[n] == 0) d.size[n] = 1;
    if (stride[n] == 0 && size[n] > 1 && (n == 2 || box[n] > 1)) return false;
    if (stride[n] < 0 || 2 * stride[n] >= int64_t(1) << 40) return false;
    d.stride[n - 1] = d.size[n] == 1 ? 16 : 2 * stride[n];
  }
  operand.head_step = d.size[1] > 1;
  operand.batch_step = d.size[3] > 1;
  operand.map = make_tensor_map(d);
  return true;
}

// This many bytes of keys and values are expected to stay in an L2 cache of 50 MB.
constexpr int64_t kSectionBytes = 32 << 20;

// Sets all arguments but the operands; `staying` rows are cut into tiles of tile_rows.
inline void cut(HopperArguments& p, const int64_t* starts, int64_t staying, int64_t passing) {
  const int64_t batches = starts == nullptr ? p.B : 1;
  const int64_t heads = p.Hkv * batches;
  const int64_t tiles =
      starts == nullptr ? blocks_of(staying, p.tile_rows) : staying / p.tile_rows + p.B + 1;
  const int64_t fitting = kSectionBytes / (2 * (passing + 1) * (p.D + p.Dv));
  p.heads = static_cast<int>(heads);
  p.section_heads = clamp_int(fitting, 1, p.heads);
  p.tiles_of_head = static_cast<int>(tiles);
  p.tiles = clamp_int(tiles * heads, 0, 0x7fffffff);
}

// Is there work to do, and do these kernels support it? They have no mask programs: the two
// consumers, the producer and the clearing warp would all have to skip the same tiles.
inline bool takes(const Hopper& device, const AttentionArguments& p) {
  return device.present && p.mask_table == nullptr && p.aligned && p.D > 0 && p.Dv > 0 &&
         p.Lq > 0 && p.Lk > 0 && p.B > 0 && p.Hkv > 0 && p.Hq / p.Hkv <= kRows &&
         p.B * p.Hq * (p.Lq + p.Lk) < int64_t(1) << 36;
}

// Calls f(Width<D>, Width<Dv>) for the narrowest pair of widths that holds both. There are fewer
// pairs with options, because each takes seconds to compile; 96 columns use the tiles of 128 in any
// case.
template <bool kGeneral, class F>
void with_widths(const AttentionArguments& p, F f) {
  const int64_t columns = p.D > p.Dv ? p.D : p.Dv;
  if (columns <= 64) return f(Width<64>(), Width<64>());
  if constexpr (!kGeneral) {
    if (columns <= 96) return f(Width<96>(), Width<96>());
  }
  if (columns <= 128) return f(Width<128>(), Width<128>());
  if constexpr (!kGeneral) {
    if (p.D <= 192 && p.Dv <= 128) return f(Width<192>(), Width<128>());
  }
  if (columns <= 192) return f(Width<192>(), Width<192>());
  f(Width<256>(), Width<256>());
}

}  // namespace hopper
}  // namespace cuda
}  // namespace fastattn
