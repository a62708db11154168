// The table of an instruction set with tiles: that of the vectors below it, but for the kernels that
// run on tiles.
#include "base.h"

namespace fastattn {
namespace FASTATTN_ISA {

void attention_forward(const AttentionParams&);
void attention_backward(const AttentionParams&);
void attention_sequences_forward(const SequencesParams&);
void attention_sequences_backward(const SequencesParams&);

namespace {

#define FASTATTN_STRING_(x) #x
#define FASTATTN_STRING(x) FASTATTN_STRING_(x)

KernelTable with_tiles(KernelTable table) {
  table.isa = FASTATTN_STRING(FASTATTN_ISA);
  table.attention_forward = attention_forward;
  table.attention_backward = attention_backward;
  table.attention_sequences_forward = attention_sequences_forward;
  table.attention_sequences_backward = attention_sequences_backward;
  return table;
}

}  // namespace

extern const KernelTable table;
const KernelTable table = with_tiles(FASTATTN_BASE::table);

}  // namespace FASTATTN_ISA
}  // namespace fastattn
