// Attention on tiles, and what has no kernel there on the vectors below.
#include "sdpa_forward.h"
#include "../sdpa_schedule.h"
#include "../sdpa_weights.h"
#include "base.h"

namespace fastattn {
namespace FASTATTN_ISA {

void attention_forward(const AttentionParams& p) {
  if (!on_tiles(p)) return FASTATTN_BASE::table.attention_forward(p);
  if (p.B == 0 || p.Hq == 0 || p.Lq == 0) return;
  with_operands(p, [&](auto operands) {
    typedef decltype(operands) P;
    const Sequences sequences(p);
    Schedule<typename P::OnVectors, TileForward<P>>(sequences).run();
    if (p.weights == Weights::none) return;
    WeightsPass<typename P::OnVectors>(sequences.at(0), P::kParts > 1).run();
  });
}

void attention_sequences_forward(const SequencesParams& p) {
  if (!on_tiles(p.attention)) return FASTATTN_BASE::table.attention_sequences_forward(p);
  if (p.attention.B == 0 || p.attention.Hq == 0) return;
  with_operands(p.attention, [&](auto operands) {
    typedef decltype(operands) P;
    const Sequences sequences(p);
    Schedule<typename P::OnVectors, TileForward<P>>(sequences).run();
  });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
