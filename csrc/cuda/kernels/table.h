// The kernels, as overloads on the element type. kernels/*.cu are compiled once for each of
// FASTATTN_ELEMENT = Bf16, F16, F32, and attention also for Tf32. The first argument is never read;
// its type selects the element type.
#pragma once
#include <cstdint>

#include "../params.h"

namespace fastattn {
namespace cuda {

// The widths that kernels are compiled for: a head uses the smallest width that holds its columns.
constexpr int kWidths[] = {64, 128, 256};

struct Bf16;
struct F16;
struct F32;
struct Tf32;

#define FASTATTN_ATTENTION_OF(T)                                                    \
  void attention_mask(const T*, const AttentionArguments& p, uintptr_t stream);     \
  void attention_forward(const T*, const AttentionArguments& p, uintptr_t stream);  \
  void attention_rows(const T*, const AttentionArguments& p, uintptr_t stream);     \
  void attention_backward(const T*, const AttentionArguments& p, uintptr_t stream); \
  void attention_pairs(const T*, const PairsArguments& p, uintptr_t stream);        \
  void attention_table(const T*, const PairsArguments& p, uintptr_t stream);

#define FASTATTN_KERNELS_OF(T)                                                                 \
  FASTATTN_ATTENTION_OF(T)                                                                     \
  void additive_forward(const T*, const AdditiveArguments& p, uintptr_t stream);               \
  void additive_backward(const T*, const AdditiveArguments& p, uintptr_t stream);              \
  void decode_attention(const T*, const DecodeArguments& p, uintptr_t stream);                 \
  void append_to_cache(const T*, const DecodeArguments& p, uintptr_t stream);                  \
  void encode_memory_forward(const T*, const EncodeMemoryArguments& p, bool aligned,           \
                             uintptr_t stream);                                                \
  void encode_memory_backward(const T*, const EncodeMemoryArguments& p, bool aligned,          \
                              uintptr_t stream);                                               \
  void hopfield_search(const T*, const HopsArguments& p, bool aligned, uintptr_t stream);      \
  void memory_hops_forward(const T*, const HopsArguments& p, bool aligned, uintptr_t stream);  \
  void memory_hops_backward(const T*, const HopsArguments& p, bool aligned, uintptr_t stream); \
  void merge_states(const T*, const MergeStatesParams& p, bool aligned, uintptr_t stream);     \
  void merge_states_backward(const T*, const MergeStatesParams& p, bool aligned,               \
                             uintptr_t stream);                                                \
  void sinusoidal(const T*, const SinusoidalParams& p, bool aligned, uintptr_t stream);

// The kernels for Hopper return false if they do not support the call; the others then run.
#ifdef FASTATTN_HOPPER
bool attention_forward_hopper(const Bf16*, const AttentionArguments& p, uintptr_t stream);
bool attention_forward_hopper(const F16*, const AttentionArguments& p, uintptr_t stream);
bool attention_backward_hopper(const Bf16*, const AttentionArguments& p, uintptr_t stream);
bool attention_backward_hopper(const F16*, const AttentionArguments& p, uintptr_t stream);
#endif
inline bool attention_forward_hopper(const void*, const AttentionArguments&, uintptr_t) {
  return false;
}
inline bool attention_backward_hopper(const void*, const AttentionArguments&, uintptr_t) {
  return false;
}

FASTATTN_KERNELS_OF(Bf16)
FASTATTN_KERNELS_OF(F16)
FASTATTN_KERNELS_OF(F32)
FASTATTN_ATTENTION_OF(Tf32)
#undef FASTATTN_KERNELS_OF
#undef FASTATTN_ATTENTION_OF

}  // namespace cuda
}  // namespace fastattn
