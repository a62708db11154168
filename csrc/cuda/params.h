// What a CUDA kernel is given: the operands that the CPU's kernels have, and what the host derives.
#pragma once
#include "../params.h"

namespace fastattn {
namespace cuda {

// The greatest that a length, a head count or a batch may be: indices are ints, offsets 64-bit.
constexpr int64_t kMaxLength = int64_t(1) << 30;

struct AttentionArguments : AttentionParams {
  // The Philox key, [] on the device, so that the host never waits for it; null = no dropout.
  const uint64_t* seed_address;
  uint32_t keep_below;  // of 65536: a pair whose draw is below it is kept
  float keep_scale;     // 65536 / keep_below, 0 if that is 0

  float scale_float, softcap_float;
  int window_begin, window_end;  // query i sees keys [i + begin, i + end), before 0 <= j < Lk
  bool aligned;                  // q, k, v and out: 16-byte rows, contiguous columns

  // backward, and weights
  float* row_stats;  // [B, Hq, Lq, 4]: RowStats of kernels/attention_pairs.h
};

struct PairsArguments : AttentionArguments {
  bool gradient;  // of the mask, else weights
  void* result;   // weights: in the element type; gradient: float
  int64_t result_stride[4];
  // The extent of the result in each dimension of [B, Hq, Lq, Lk]: that, or 1 where it is a sum.
  int sizes[4];
  float factor;  // of the sums
};

// Rows of a tile of additive attention, on both sides.
constexpr int kAdditiveTile = 64;

// Additive attention: D is the hidden width A, there is one head, and v of the scores and the bias
// are contiguous floats. Between its kernels stand numbers of pairs, never of [B, Lq, Lk, A].
struct AdditiveArguments : AttentionArguments {
  const float* vector;  // [A]
  const float* bias;    // [A], null = none
  float* scores;        // [B, Lq, Lk]: scores, then weights
  float* gradients;     // [B, Lq, Lk], backward: of the weights, then of the scores
  float* parts;         // [B, tiles of queries, 2, A], backward: of dv and dbias
};

// A query with more rows than one block of threads takes has a block for each so many of them.
constexpr int kHopRowsOfBlock = 512, kHopRowsOfSplit = 256;
constexpr int64_t kMaxHopWidth = 2048;

struct HopsArguments : MemoryHopsParams {
  float scale_float;
  int lanes;                     // that share a row, a power of two
  bool in_resides, out_resides;  // in shared memory, for all hops

  // backward: [2][B, Q, slots, N] and [2][B, Q, slots, D], what the gradients of the memories are
  // sums of; see Hops::slot
  float *xs, *ys;
  int64_t slots;                   // hops, and one more for a stack
  bool in_of_batch, out_of_batch;  // one memory for all B, and one gradient

  // split over blocks: the hop of this launch, and of each split of a query [D + 2]
  int hop, splits;
  float* partial;  // [B, Q, splits, D + 2]
  // Split: [B, Q, N], null = no weights are asked for. Else [B, Q, 2, N] for what shared memory has
  // no room for, null = it has.
  float* scores;
};

struct EncodeMemoryArguments : EncodeMemoryParams {
  int lanes;        // that share a row, a power of two
  int column_bits;  // forward: 2^column_bits threads a sentence
  // backward: the places of the words, sorted by their row of the table and then in order; where
  // those of each row begin; whether a sentence has a word
  const int64_t* order;      // [R, B N J]
  const int64_t* starts;     // [R, V + 1]
  const uint8_t* sentences;  // [R, B, N]
};

struct SinusoidalArguments : SinusoidalParams {
  float scale_float;
  // How the work is cut, see kernels/sinusoidal.h.
  int column_bits, rows_per_block;
  unsigned column_blocks, tiles;  // blocks of one group of batch rows
  int64_t group_rows;
};

}  // namespace cuda
}  // namespace fastattn
