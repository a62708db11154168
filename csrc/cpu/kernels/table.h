// The table of this instruction set. Attention is its own; FASTATTN_REST names the instruction set
// whose kernels compute the rest.
#pragma once
#include "../kernel_table.h"

namespace fastattn {

namespace FASTATTN_REST {
void sinusoidal(const SinusoidalParams&);
double measure_peak(Peak, int threads, double seconds);
void linear(const LinearParams&);
void additive_forward(const AdditiveParams&);
void additive_backward(const AdditiveParams&);
void memory_hops_forward(const MemoryHopsParams&);
void memory_hops_backward(const MemoryHopsParams&);
void encode_memory(const EncodeMemoryParams&);
void encode_memory_backward(const EncodeMemoryParams&);
void local_attention_forward(const LocalParams&);
void local_attention_backward(const LocalParams&);
void merge_states_forward(const MergeStatesParams&);
void merge_states_backward(const MergeStatesParams&);
AppendFault append_to_cache(const AppendParams&);
bool gather_rows(const GatherParams&);
bool multiplies_integers(int64_t columns);
int64_t most_streamed_rows(DType);
}  // namespace FASTATTN_REST

namespace FASTATTN_ISA {
using namespace FASTATTN_REST;

void attention_forward(const AttentionParams&);
void attention_backward(const AttentionParams&);
void attention_sequences_forward(const SequencesParams&);
void attention_sequences_backward(const SequencesParams&);

#define FASTATTN_STRING_(x) #x
#define FASTATTN_STRING(x) FASTATTN_STRING_(x)

// A constant: code that fills it would run when the module is loaded, with the instructions of this
// file, on processors that lack them.
extern const KernelTable table;
constexpr KernelTable table = {
    FASTATTN_STRING(FASTATTN_ISA),
    attention_forward,
    attention_backward,
    sinusoidal,
    measure_peak,
    linear,
    additive_forward,
    additive_backward,
    memory_hops_forward,
    memory_hops_backward,
    encode_memory,
    encode_memory_backward,
    attention_sequences_forward,
    attention_sequences_backward,
    local_attention_forward,
    local_attention_backward,
    merge_states_forward,
    merge_states_backward,
    append_to_cache,
    gather_rows,
    multiplies_integers,
    most_streamed_rows,
};

}  // namespace FASTATTN_ISA
}  // namespace fastattn
