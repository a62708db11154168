// Attention on tiles, and what has no kernel there on the vectors below.
#include "sdpa_forward.h"
#include "../sdpa_schedule.h"
#include "../sdpa_weights.h"
#include "base.h"
#include "decode.h"

namespace fastattn {
namespace FASTATTN_ISA {

// Forward of a batch, on tiles where they support it.
void attention_forward(const AttentionParams& p) {
  if (!forward_on_tiles(Sequences(p).at(0))) return FASTATTN_BASE::table.attention_forward(p);
  if (p.B == 0 || p.Hq == 0 || p.Lq == 0) return;
  with_operands(p, [&](auto operands) {
    typedef decltype(operands) P;
    const Sequences sequences(p);
    Schedule<typename P::OnVectors, TileForward<P>, NoDecode>(sequences).run();
    if (p.weights == Weights::none) return;
    WeightsPass<typename P::OnVectors>(sequences.at(0), P::Format::kParts > 1).run();
  });
}

namespace {

// Sequences in a cache, where many query rows share a key head.
template <class P>
void decode(const SequencesParams& p) {
  const Sequences sequences(p);
  Schedule<typename P::OnVectors, TileForward<P>, TileDecode<P>>(sequences).run();
}

}  // namespace

// Forward of packed sequences or of a cache, each on tiles or on vectors.
void attention_sequences_forward(const SequencesParams& p) {
  const AttentionParams& all = p.attention;
  if (all.k_scales.data != nullptr) return FASTATTN_BASE::table.attention_sequences_forward(p);
  if (p.k_lengths != nullptr && multiplies_on_tiles(all.dtype, Tiles::kEmulated) &&
      fills_tiles(all)) {
    if (all.B == 0) return;
    if (all.dtype == DType::bf16) return decode<TileBf16>(p);
    return all.dtype == DType::f16 ? decode<TileF16>(p) : decode<TileFloat<3>>(p);
  }
  if (all.Hq == 0) return;
  const auto tiled = [](const SequencesParams& part) {
    with_operands(part.attention, [&](auto operands) {
      typedef decltype(operands) P;
      const Sequences sequences(part);
      Schedule<typename P::OnVectors, TileForward<P>, NoDecode>(sequences).run();
    });
  };
  divide(p, forward_on_tiles, tiled, FASTATTN_BASE::table.attention_sequences_forward);
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
