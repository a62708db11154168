// Backward attention on tiles, and what has no kernel there on the vectors below.
#include "sdpa_backward.h"

#include "../sdpa_backward_schedule.h"
#include "base.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
struct TileUnits {
  // Calls use(unit): on tiles, one unit serves all sequences.
  template <class Use>
  static auto with(const Sequence& s, Use use) {
    return use(TileBackwardUnit<P>(s));
  }
};

}  // namespace

// Backward of a batch, on tiles where they support it.
void attention_backward(const AttentionParams& p) {
  if (!on_tiles(p)) return FASTATTN_BASE::table.attention_backward(p);
  if (p.B == 0 || p.Hq == 0 || p.Lq == 0 || p.Lk == 0) return;
  with_operands(p, [&](auto operands) {
    typedef decltype(operands) P;
    const Sequences sequences(p);
    Backward<P, TileUnits<P>>(sequences).run();
  });
}

// Backward of packed sequences, each on tiles or on vectors.
void attention_sequences_backward(const SequencesParams& p) {
  if (p.attention.Hq == 0) return;
  const auto tiled = [](const SequencesParams& part) {
    with_operands(part.attention, [&](auto operands) {
      typedef decltype(operands) P;
      const Sequences sequences(part);
      Backward<P, TileUnits<P>>(sequences).run();
    });
  };
  divide(p, backward_on_tiles, tiled, FASTATTN_BASE::table.attention_sequences_backward);
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
