// The arguments of the CUDA kernels: the operands of the CPU kernels, and values that the host
// derives.
#pragma once
#include "../both.h"
#include "../params.h"

namespace fastattn {
namespace cuda {

// The largest length, head count or batch: indices are ints, offsets 64-bit.
constexpr int64_t kMaxLength = int64_t(1) << 30;

// How many pairs of a tile of kMaskTile queries and keys a mask program makes visible. `some` is
// conservative: the tile may have no visible pair, or only visible pairs.
enum class Seen : uint8_t { none, some, all };
constexpr int kMaskTile = 64;
static_assert(kMaskPadding % kMaskTile == 0, "kernels read the leaves of whole tiles");

// Tiles of a mask that cover a length.
FASTATTN_BOTH int64_t mask_tiles_of(int64_t length) { return (length + kMaskTile - 1) / kMaskTile; }

// The number of rows of tiles, over all batch entries and heads. Packed sequences have one head's
// rows, as many as blocks_of_head<kMaskTile> of kernels/varlen.h.
FASTATTN_BOTH int64_t mask_rows_of(bool packed, int64_t batch, int64_t heads, int64_t queries) {
  return packed ? queries / kMaskTile + batch + 1 : batch * heads * mask_tiles_of(queries);
}

// A mask program as kernels read it, in the GPU's memory; see kernels/mask_program.h.
struct MaskTable {
  int count;                // of steps; 0 = the program is not valid, and no pair is visible
  int width;                // keys whose values are computed at a time, a power of two up to 32
  bool of_batch, of_heads;  // whether the tiles differ between batch entries, between heads
  MaskStep steps[kMaskSteps];
  int64_t partial[kMaskSteps];  // of blocks: how many have bits
};

struct AttentionArguments : AttentionParams {
  // The Philox key, [] on the device, so the host never waits for it; null = no dropout.
  const uint64_t* seed_address;
  uint32_t keep_below;  // of 65536: a pair is kept if its draw is below it
  float keep_scale;     // 65536 / keep_below, 0 if that is 0

  float scale_float, softcap_float;
  // Query i can see keys [i + begin, i + end) that exist. Includes the offset and both windows,
  // clamped to +-kMaxLength, which no distance reaches.
  int window_begin, window_end;
  bool aligned;  // q, k, v and out: 16-byte rows, contiguous columns
  // The forward pass has no options but a window, and its tensors are aligned. It subtracts the
  // maximum of a row from scores that are not rounded.
  bool plain;
  bool tf32;  // float32 only: products may round their factors to tf32
  // A mask program, and the table into which a kernel parses it, because the host would have to
  // wait for it.
  const int32_t* mask_words;  // [mask_length], null = none
  int64_t mask_length;
  MaskTable* mask_table;  // null = none; Seen [mask_rows_of(...), mask_columns] follow it
  int64_t mask_columns;   // tiles of keys; one sequence may have fewer
  // Backward: delta is summed with the same weights that it is multiplied by, not computed from the
  // rounded output.
  bool exact_delta;

  // backward, and weights
  float* row_stats;   // [B, Hq, Lq, 4]: RowStats of kernels/sdpa_pairs.h
  float* grad_table;  // [Hq, relative_bias_size], of packed sequences: the sum of their gradients

  // The strides of lse, row_stats and grad_lse between batch entries and heads, in rows.
  int64_t stats_stride[2];

  // Sequences packed one after the other: sequence b is rows [starts[b], starts[b + 1]). Then Lq
  // and Lk count all rows, batch strides are 0, and a kernel replaces these and the fields below by
  // the values of its sequence (kernels/varlen.h). Null: a rectangular batch.
  const int64_t* q_starts;  // [B + 1]
  const int64_t* k_starts;  // [B + 1]
  bool bottom_right;        // per sequence: offset = keys - queries of the sequence
  int q_row, k_row;         // the first row of the sequence, 0 in a rectangular batch
};

FASTATTN_BOTH int clamp_int(int64_t x, int low, int high) {
  return static_cast<int>(x < low ? low : x > high ? high : x);
}

// Updates the window after the offset has changed.
FASTATTN_BOTH void set_window(AttentionArguments& p) {
  constexpr int kAll = static_cast<int>(kMaxLength);
  p.window_begin = p.window_left < 0 ? -kAll : clamp_int(p.offset - p.window_left, -kAll, kAll);
  p.window_end = p.window_right < 0 ? kAll : clamp_int(p.offset + p.window_right + 1, -kAll, kAll);
}

// A mask or a relative bias, which is read for each pair and may exclude it.
FASTATTN_BOTH bool has_bias(const AttentionArguments& p) {
  return p.mask.data != nullptr || p.relative_bias != nullptr;
}

// Can anything but the window exclude a pair?
FASTATTN_BOTH bool excludes_pairs(const AttentionArguments& p) {
  return has_bias(p) || p.mask_table != nullptr;
}

struct PairsArguments : AttentionArguments {
  bool gradient;     // of the mask or of the relative bias, else weights
  bool by_distance;  // of the relative bias, see kernels/relative_bias.h
  // weights: in the element type; gradient: float; by_distance: two tables for each head, zeroed by
  // the caller, whose sum is the gradient, [2, B, Hq, relative_bias_size]. Of packed sequences [2,
  // Hq, Lq + Lk]: the least distance of sequence b is at q_starts[b] + k_starts[b].
  void* result;
  int64_t result_stride[4];
  // The size of the result in each dimension of [B, Hq, Lq, Lk]: the full size, or 1 if it is
  // summed.
  int sizes[4];
  float factor;           // multiplies the sums
  int64_t odd_diagonals;  // by_distance: from the first tables to the second ones
};

// Decoding with a cache: k and v are [E, Hkv, N, .], entries of N keys or pages of N keys, and Lk
// bounds the keys of a sequence. For the append, Lq is the number of new keys.
struct DecodeArguments : AttentionArguments {
  const int64_t* lengths;      // [B]
  const int64_t* entries;      // [B], the entry of each sequence, null = b
  const int32_t* block_table;  // [B, pages], null = the cache is not paged
  int64_t block_table_stride;
  int64_t page_size;      // N
  int64_t cache_entries;  // E

  int64_t split_keys;  // a sequence is split at multiples of this
  int64_t splits;      // ceil(Lk / split_keys)
  float* part_sums;    // [B, Hq, Lq, splits, Dv]: of exp(s - m) V
  float* part_stats;   // [B, Hq, Lq, splits, 2]: m and the sum of exp(s - m)

  Tensor4 new_k;  // [B, Hkv, L, D], append only
  Tensor4 new_v;  // [B, Hkv, L, Dv]
};

// Rows of a tile of additive attention, on both sides.
constexpr int kAdditiveTile = 64;

// Additive attention: D is the hidden width A, there is one head, and v of the scores and the bias
// are contiguous floats. The kernels exchange arrays of [B, Lq, Lk], never of [B, Lq, Lk, A].
struct AdditiveArguments : AttentionArguments {
  const float* vector;  // [A]
  const float* bias;    // [A], null = none
  float* scores;        // [B, Lq, Lk]: scores, then weights
  float* gradients;     // [B, Lq, Lk], backward: of the weights, then of the scores
  float* parts;         // [B, tiles of queries, 2, A], backward: of dv and dbias
};

// If a query has more rows than kHopRowsOfBlock, each block takes kHopRowsOfSplit of them.
constexpr int kHopRowsOfBlock = 512, kHopRowsOfSplit = 256;
constexpr int64_t kMaxHopWidth = 2048;

struct HopsArguments : MemoryHopsParams {
  float scale_float;
  int lanes;                     // lanes that share a row, a power of two
  bool in_resides, out_resides;  // kept in shared memory for all hops

  // backward: [2][B, Q, slots, N] and [2][B, Q, slots, D], the terms of the gradients of the
  // memories; see Hops::slot
  float *xs, *ys;
  int64_t slots;                   // hops, and one more for a stack
  bool in_of_batch, out_of_batch;  // one memory for all B, and one gradient

  // If a query is split over blocks: the hop of this launch, and the partial results, [D + 2] per
  // split.
  int hop, splits;
  float* partial;  // [B, Q, splits, D + 2]
  // If split: [B, Q, N], null = weights are not requested. Otherwise [B, Q, 2, N] for scores that
  // do not fit in shared memory, null = they fit.
  float* scores;
};

struct EncodeMemoryArguments : EncodeMemoryParams {
  int lanes;        // lanes that share a row, a power of two
  int column_bits;  // forward: 2^column_bits threads per sentence
  // backward: the positions of the words, sorted by their row of the table and then by position;
  // the first of each row; whether a sentence has a word
  const int64_t* order;      // [R, B N J]
  const int64_t* starts;     // [R, V + 1]
  const uint8_t* sentences;  // [R, B, N]
};

struct MergeStatesArguments : MergeStatesParams {
  int lanes;  // that share a row, a power of two
};

struct SinusoidalArguments : SinusoidalParams {
  float scale_float;
  // How the work is divided; see kernels/sinusoidal.h.
  int column_bits, rows_per_block;
  unsigned column_blocks, tiles;  // blocks of one group of batch rows
  int64_t group_rows;
};

}  // namespace cuda
}  // namespace fastattn
