// One table of kernels per instruction set. The binding calls through the table that the processor
// supports.
#pragma once
#include "../params.h"

namespace fastattn {

enum class Peak : int { fma_f32 = 0, fma_f64 = 1, dot_bf16 = 2, read_bandwidth = 3 };

// Whether an instruction set with tiles multiplies tensors of this dtype on them. fp16 needs an
// instruction that few processors have; emulated tiles have it.
bool multiplies_on_tiles(DType dtype, bool emulated);

// Whether tiles are faster than vectors for attention of this size. Measured on Emerald Rapids, one
// thread, both passes (docs/cpu-kernels.md). It depends only on the lengths of one sequence, so
// that its bits do not depend on the rest of the batch.
bool pays_on_tiles(DType dtype, int64_t queries, int64_t keys, int64_t columns);

// Whether attention with a cache fills tiles: at least a tile of query rows shares a key head, and
// one head has fewer rows than a panel, so the rows of several heads are stacked. A mask program or
// a relative bias excludes this, because its query indices count within one head.
inline bool fills_tiles(const AttentionParams& p) {
  if (p.mask_program != nullptr || p.relative_bias != nullptr) return false;
  return p.D > 0 && p.Dv > 0 && p.Hkv > 0 && p.Lq < 32 && p.Lq * (p.Hq / p.Hkv) >= 16;
}

// The bytes of a weight [N, K] that is packed for tiles: as many parts as its numbers have, and the
// magnitudes of its rows.
inline int64_t packed_weight_bytes(DType dtype, int64_t N, int64_t K) {
  const int64_t parts = dtype == DType::f32 ? 3 : dtype == DType::f16 ? 2 : 1;
  const int64_t rows = (N + 31) / 32 * 32;
  return rows * ((K + 31) / 32 * 32 * parts * 2 + 4);
}

struct KernelTable {
  const char* isa;
  void (*attention_forward)(const AttentionParams&);
  void (*attention_backward)(const AttentionParams&);
  void (*sinusoidal)(const SinusoidalParams&);
  double (*measure_peak)(Peak, int threads,
                         double seconds);  // GFLOP/s or GB/s; 0 where the ISA has no such unit
  void (*linear)(const LinearParams&);
  void (*pack_weight)(const LinearParams&, void* to);  // null without tiles
  void (*norm)(const NormParams&);
  void (*additive_forward)(const AdditiveParams&);
  void (*additive_backward)(const AdditiveParams&);
  void (*memory_hops_forward)(const MemoryHopsParams&);
  void (*memory_hops_backward)(const MemoryHopsParams&);
  void (*encode_memory)(const EncodeMemoryParams&);
  void (*encode_memory_backward)(const EncodeMemoryParams&);
  void (*attention_sequences_forward)(const SequencesParams&);
  void (*attention_sequences_backward)(const SequencesParams&);
  void (*local_attention_forward)(const LocalParams&);
  void (*local_attention_backward)(const LocalParams&);
  void (*merge_states_forward)(const MergeStatesParams&);
  void (*merge_states_backward)(const MergeStatesParams&);
  AppendFault (*append_to_cache)(const AppendParams&);
  bool (*gather_rows)(const GatherParams&);      // whether all scales are positive and finite
  bool (*multiplies_integers)(int64_t columns);  // whether decoding multiplies int8 as integers
  int64_t (*most_streamed_rows)(DType);          // of a key head, one query each (kernels/decode.h)
};

// The table in use for tensors of this dtype, chosen on first use (isa.cpp).
const KernelTable& kernels(DType dtype);

// Whether attention with a cache runs on tiles.
bool decodes_on_tiles(const AttentionParams& p);

}  // namespace fastattn
