// Backward attention in bf16 on tiles, and what has no kernel there on the vectors below.
#include "sdpa_backward.h"

#include "../sdpa_backward_schedule.h"
#include "base.h"

namespace fastattn {
namespace FASTATTN_ISA {

void attention_backward(const AttentionParams& p) {
  if (!on_tiles(p) || p.dtype != DType::bf16) return FASTATTN_BASE::table.attention_backward(p);
  if (p.B == 0 || p.Hq == 0 || p.Lq == 0 || p.Lk == 0) return;
  const Sequences sequences(p);
  Backward<TileBf16, TileBackwardUnit<TileBf16>>(sequences).run();
}

void attention_sequences_backward(const SequencesParams& p) {
  if (!on_tiles(p.attention) || p.attention.dtype != DType::bf16)
    return FASTATTN_BASE::table.attention_sequences_backward(p);
  if (p.attention.B == 0 || p.attention.Hq == 0) return;
  const Sequences sequences(p);
  Backward<TileBf16, TileBackwardUnit<TileBf16>>(sequences).run();
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
