// The table of this instruction set. Attention is compiled for it; FASTATTN_REST names the
// instruction set whose kernels compute the rest. An instruction set that extends another one
// (FASTATTN_EXTENDS) compiles attention and linear layers in bf16 only.
#pragma once
#include "../kernel_table.h"

namespace fastattn {

namespace FASTATTN_REST {
void sinusoidal(const SinusoidalParams&);
double measure_peak(Peak, int threads, double seconds);
void linear(const LinearParams&);
void norm(const NormParams&);
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
#if defined(FASTATTN_EXTENDS)
void attention_forward(const AttentionParams&);
void attention_backward(const AttentionParams&);
void attention_sequences_forward(const SequencesParams&);
void attention_sequences_backward(const SequencesParams&);
#endif
}  // namespace FASTATTN_REST

namespace FASTATTN_ISA {
using namespace FASTATTN_REST;

void attention_forward(const AttentionParams&);
void attention_backward(const AttentionParams&);
void attention_sequences_forward(const SequencesParams&);
void attention_sequences_backward(const SequencesParams&);

#if defined(FASTATTN_EXTENDS) || defined(FASTATTN_BASE)
void linear(const LinearParams&);
#endif
#if defined(FASTATTN_BASE)
void pack_weight(const LinearParams&, void* to);
#endif
#if defined(FASTATTN_EXTENDS)
double measure_peak(Peak, int threads, double seconds);

namespace {
// Whether the call multiplies pairs of bf16. Quantised caches are multiplied in float32.
inline bool has_pairs(const LinearParams& p) { return p.dtype == DType::bf16; }
inline bool has_pairs(const AttentionParams& p) {
  return p.dtype == DType::bf16 && p.k_scales.data == nullptr;
}
inline bool has_pairs(const SequencesParams& p) { return has_pairs(p.attention); }

// Runs the kernel that was compiled for 16-bit pairs, or for the other dtypes.
template <class Params, void (*kPairs)(const Params&), void (*kRest)(const Params&)>
void by_dtype(const Params& p) {
  (has_pairs(p) ? kPairs : kRest)(p);
}
}  // namespace
#define FASTATTN_PAIRS(Params, f) by_dtype<Params, f, FASTATTN_REST::f>
#else
#define FASTATTN_PAIRS(Params, f) f
#endif

#define FASTATTN_STRING_(x) #x
#define FASTATTN_STRING(x) FASTATTN_STRING_(x)

// A constant: code that fills it would run when the module is loaded, with the instructions of this
// file, on processors that lack them.
extern const KernelTable table;
constexpr KernelTable table = {
    FASTATTN_STRING(FASTATTN_ISA),
    FASTATTN_PAIRS(AttentionParams, attention_forward),
    FASTATTN_PAIRS(AttentionParams, attention_backward),
    sinusoidal,
    measure_peak,
    FASTATTN_PAIRS(LinearParams, linear),
#if defined(FASTATTN_BASE)
    pack_weight,
#else
    nullptr,
#endif
    norm,
    additive_forward,
    additive_backward,
    memory_hops_forward,
    memory_hops_backward,
    encode_memory,
    encode_memory_backward,
    FASTATTN_PAIRS(SequencesParams, attention_sequences_forward),
    FASTATTN_PAIRS(SequencesParams, attention_sequences_backward),
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
