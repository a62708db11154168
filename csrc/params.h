// The arguments that Python passes to the kernels: options, addresses, shapes and element strides.
// No dependency on torch.
//
// A struct of options has the fields, under the names, of the record of the same name in
// fastattn/backends/primitives.py, which explains them; options.h reads them. Fields that only
// Python needs are left out.
#pragma once
#include <cstdint>

namespace fastattn {

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3, boolean = 4 };

enum class Weights : int { none = 0, per_head = 1, averaged = 2 };

// Larger than any index in memory. Positions are at most this far from 0, and a limit of twice this
// value has no effect; the sum of both and an index fits 64 bits.
constexpr int64_t kFarthest = int64_t(1) << 60;

// A 4-D operand. Strides count elements and may be 0 (broadcast) or negative.
struct Tensor4 {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

// A mask program says which pairs are visible: leaves and operators in postfix order. Where a
// tensor has fewer batch entries or heads than the call, they repeat. Queries are padded to Lq',
// keys to Lk', multiples of kMaskPadding.
enum class MaskKind : int {
  all_of = 0,    // the two operands before it, both
  any_of = 1,    // at least one of them
  interval = 2,  // low[i] <= j < high[i]
  ids = 3,       // query_id[i] == key_id[j]
  blocks = 4,    // the state of a block, or the bit of a pair
};

constexpr int64_t kMaskPadding = 64;
constexpr int kMaskSteps = 63;  // 32 leaves and the operators between them

struct MaskStep {
  MaskKind kind;
  bool negated;                // a leaf: the other pairs are visible
  int64_t batch, heads;        // of the data
  int64_t block_q, block_k;    // of blocks: queries and keys of one
  int64_t blocks_q, blocks_k;  // of blocks: their number
  const int32_t* data;         // interval: low and high [batch, 2, Lq']; ids: of queries and keys
                               // [batch, Lq' + Lk']; blocks: states [batch, heads, blocks_q,
                               // blocks_k], 0 none, 1 all, 2 + n: bits of block n
  int64_t stride;              // of interval and ids: between batch entries,
  int64_t second;              // and from low to high, or from the queries to the keys
  const uint32_t* bits;        // of blocks: [n, block_k, block_q / 32 rounded up], 1 = visible
};

struct ScoreProgram;  // score_program.h

struct AttentionOptions {
  double scale = 1;
  int64_t offset = 0;         // the diagonal: query i is at position i + offset on the key axis
  int64_t window_left = -1;   // keys visible to the left of the diagonal, -1 = all
  int64_t window_right = -1;  // keys visible to its right, -1 = all; 0 = causal
  double softcap = 0;         // 0 = off
  double dropout_p = 0;       // 0 = off
  int64_t first_query = 0;    // of dropout's draws
  int64_t first_key = 0;
  int64_t first_head = 0;
  Weights weights = Weights::none;
};

// Scaled dot-product attention, forward and backward. "acc" is f32, or f64 for f64.
struct AttentionParams : AttentionOptions {
  DType dtype;  // of q, k, v, out, applied and their gradients
  int threads;

  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;

  Tensor4 q;    // [B, Hq, Lq, D]
  Tensor4 k;    // [B, Hkv, Lk, D]
  Tensor4 v;    // [B, Hkv, Lk, Dv]
  Tensor4 out;  // [B, Hq, Lq, Dv]
  // [B, Hq, Lq] contiguous, f64 because the backward pass would inherit f32's rounding. Null: it is
  // not wanted, and no weights are.
  double* lse;

  Tensor4 mask;       // [B, Hq, Lq, Lk], null = none
  DType mask_dtype;   // boolean (true = visible) or floating (added)
  bool reduced;       // f32: products may round their factors to 16 bits
  const void* alibi;  // [B, Hq] acc, null = none: score -= slope * |i + offset - j|
  int64_t alibi_stride[2];
  const void* sinks;  // [B, Hq] acc, null = none: the score of one more key, whose value is 0
  int64_t sinks_stride[2];
  const void* relative_bias;  // [B, Hq, relative_bias_size] acc, null = none: a table of distances
                              // d = position(i + offset) - position(j), 0 in the middle
  int64_t relative_bias_stride[2];
  int64_t relative_bias_size;    // odd
  const int32_t* positions;      // [Lk], null = 0, 1, 2, ...
  const MaskStep* mask_program;  // [mask_steps], null = none
  int mask_steps;
  const ScoreProgram* score_program;  // modifies scale q.k, null = none
  // The bias of an image, null = none: key j is token (j / width, j % width).
  Tensor4 row_bias;     // [B, Hq, Lq, height] acc
  Tensor4 column_bias;  // [B, Hq, Lq, width] acc
  int64_t image_height, image_width;
  // Terms of the products, before their scale: a_i . R[b(d)] + P[b(-d)] . k_j with
  // d = i + offset - j.
  Tensor4 position_query;           // a: [B, Hq, Lq, D], null without R
  Tensor4 query_table;              // R: [B, Hq, buckets, D], null = no such term
  Tensor4 key_table;                // P: the same
  const int32_t* distance_buckets;  // b: [2 farthest + 1], from d = -farthest on
  int64_t farthest, buckets;
  int64_t bucket_step;  // by how much b changes at most from one distance to the next
  uint64_t seed;        // of dropout: the Philox key
  Tensor4 applied;      // the weights, [B, Hq, Lq, Lk] (averaged: [B, -, Lq, Lk], head stride 0)

  // backward only
  Tensor4 grad_out;        // [B, Hq, Lq, Dv], null = zero
  const double* grad_lse;  // [B, Hq, Lq] contiguous, null = zero
  Tensor4 grad_weights;    // as applied, null = zero
  Tensor4 grad_q;          // [B, Hq, Lq, D]
  Tensor4 grad_k;          // [B, Hkv, Lk, D]
  Tensor4 grad_v;          // [B, Hkv, Lk, Dv]
  Tensor4
      grad_mask;  // zeroed by the caller, stride 0 where the mask is broadcast; null = not wanted.
                  // f64 where it is broadcast over queries or keys, else acc with key stride 1
  bool partial;   // out and lse are of more keys than k; without sinks and grad_weights
  bool float8;    // of quantised caches (k_scales): e4m3, not int8
  double* grad_sinks;        // [B, Hq] contiguous, zeroed by the caller; null = not wanted
  void* grad_relative_bias;  // [B, Hq, relative_bias_size] acc, contiguous; null = not wanted
  void *grad_row_bias, *grad_column_bias;   // as row_bias and column_bias, contiguous; null = not
                                            // wanted
  Tensor4 grad_position_query;              // [B, Hq, Lq, D]
  void *grad_query_table, *grad_key_table;  // [B, Hq, buckets, D] acc, contiguous

  // of a cache only
  int64_t k_begin;  // keys before it are not visible
  // f32 [B, Hkv, Lk]. Null: k and v are of dtype. Else they are int8 or e4m3, times the scale of
  // their row, and dtype is f32.
  Tensor4 k_scales, v_scales;
  int* wrong_scales;  // set to 1 if a scale is not positive and finite
  bool sixteen_bits;  // of a quantised cache: the caller's queries are, and it rounds out to them
};

// One sequence of a batch: B is 1 and every pointer is at its first row. A rectangular batch counts
// as one "sequence" with B entries.
struct Sequence : AttentionParams {
  int64_t index;         // in the batch: dropout's batch index, and the entry of a mask program
  int64_t mask_query;    // the index of its first query,
  int64_t mask_key;      // and of its first key, in the data of a mask program
  int64_t lse_stride;    // of lse and grad_lse, between heads
  double* score_sums;    // of this task: the gradient of the data of a score program
  const int32_t* pages;  // [ceil(Lk / page_size)], null = none: key j is row j % page_size of the
  int64_t page_size;     // batch entry pages[j / page_size] of k and v
};

// The most columns of a cache row that decoding on vectors reads in place: a latent head with its
// rotated columns.
constexpr int64_t kWidestCached = 576;

// Sequences of different lengths: packed one after the other, or each a part of a cache.
struct SequencesParams {
  AttentionParams attention;  // B sequences; Lq and Lk are upper bounds of their lengths
  bool bottom_right;          // per sequence: offset = keys - queries of the sequence

  const int64_t* q_starts;     // [B + 1] rows of q, null = sequence b is batch entry b
  const int64_t* k_starts;     // [B + 1] rows of k and v, null = batch entry k_batch[b], from row 0
  const int64_t* k_lengths;    // [B], where k_starts is null
  const int64_t* k_batch;      // [B], null = b
  const int64_t* k_begins;     // [B] the first visible key of each, null = 0
  const int64_t* order;        // [B] a permutation, most work first
  int64_t lse_stride;          // between heads of lse; between sequences it is q_starts, or Hq * it
  const int64_t* bias_starts;  // [B] where grad_relative_bias of each sequence begins: it is [Hq,
                               // 2 L - 1], L the greater of its lengths, at least 1

  const int32_t* block_table;  // [B, pages], null = the cache is not paged
  int64_t block_table_stride;
  int64_t page_size;
};

struct AppendOptions {
  bool rotary_interleaved = false;
};

// A row of a cache.
struct CacheRow {
  int64_t entry, row;  // of a paged cache: the page, and the row in it
};

// Where the rows of sequences are in a cache.
struct CachePlaces {
  const int64_t* lengths;      // [B]
  const int64_t* begins;       // [B] the first row of each, null = 0
  const int64_t* entries;      // [B], null = b
  const int32_t* block_table;  // [B, pages], null = the cache is not paged
  int64_t block_table_stride;
  int64_t page_size;
};

// The rows [begin, length) of each sequence, one after the other, times their scales.
struct GatherParams : CachePlaces {
  DType dtype;  // of keys and values; without scales, of the caches, too
  int threads;

  int64_t B, Hkv, D, Dv;
  int64_t N;  // rows of keys and values, at least the length of each sequence

  Tensor4 key_cache;                 // [entries, Hkv, rows, D]
  Tensor4 value_cache;               // [entries, Hkv, rows, Dv]
  Tensor4 key_scales, value_scales;  // f32 [entries, Hkv, rows] of int8 or e4m3, null = none
  bool float8;                       // e4m3, not int8

  void* keys;    // [B, Hkv, N, D], contiguous
  void* values;  // [B, Hkv, N, Dv], contiguous
};

// Appends rows of keys and values to a cache; the lengths include the new rows. With tables of
// angles the keys are rotated, and so are the queries, of the last Lq of the L new tokens.
struct AppendParams : AppendOptions, CachePlaces {
  DType dtype;  // of all but the tables
  int threads;

  int64_t B, Hq, Hkv, Lq, L, D, Dv;

  Tensor4 key;           // [B, Hkv, L, D]
  Tensor4 value;         // [B, Hkv, L, Dv]
  Tensor4 key_cache;     // [entries, Hkv, rows, D]
  Tensor4 value_cache;   // [entries, Hkv, rows, Dv]
  const CacheRow* rows;  // [B, L] where the rows go

  // Quantised caches are int8 or e4m3, times the scale of their row: f32 [entries, Hkv, rows],
  // null = the caches are of dtype.
  Tensor4 key_scales, value_scales;
  bool float8;        // e4m3, not int8
  float* new_scales;  // [2, B, L, Hkv] workspace: of keys, of values

  int64_t rotary_pairs;      // rotated columns / 2, 0 = no rotation: the rest is null
  Tensor4 query, rotated;    // [B, Hq, Lq, D]
  Tensor4 rotary_cos;        // [1, 1, rotary_rows, rotary_pairs]
  Tensor4 rotary_sin;        // the same
  bool tables_are_f32;       // else of dtype
  int64_t rotary_rows;       // positions of the tables
  const int64_t* positions;  // [B, L] of the new tokens, each a row of the tables
};

// Why appending to a quantised cache fails; nothing is written then.
enum class AppendFault : int {
  none = 0,
  key = 1,    // is not finite
  value = 2,  // is not finite
  scale = 3,  // of an earlier row is not positive and finite
};

constexpr int64_t kFarthestOffset = int64_t(1) << 62;  // of the sinusoidal encoding

struct SinusoidalOptions {
  int64_t offset = 0;
  double scale = 1;
  bool has_padding_idx = false;  // else padding_idx is None
  int64_t padding_idx = 0;
};

// out = x * scale + PE(position), and 0 for PE where position == padding_idx.
//
// Angles are 64-bit fractions of a turn: column c of PE is sin(2 pi a / 2^64) with
// a = position * frequency[c] + phase[c] mod 2^64, which unsigned arithmetic gives exactly; cosines
// have phase 2^62.
struct SinusoidalParams : SinusoidalOptions {
  DType dtype;  // of x and out; f32, f64, bf16 or f16
  int threads;

  int64_t B, H, L, D;

  Tensor4 x;    // [B, H, L, D]
  Tensor4 out;  // [B, H, L, D]

  const int64_t* positions;  // [B, H, L], null = offset + l
  int64_t position_stride[3];

  const uint64_t* frequency;  // [D], readable (zeros) to a multiple of 16
  const uint64_t* phase;      // [D], as frequency
  // The number of sine and cosine pairs of one frequency, or 0 if the columns are not pairs. A pair
  // is columns 2i and 2i + 1 if interleaved, else i and pairs + i. Columns from 2 * pairs on are 0.
  int64_t pairs;
  bool interleaved;
  const uint64_t* pair_frequency;  // [pairs]
};

enum class MlpActivation : int { none = 0, relu = 1, gelu = 2, gelu_tanh = 3, silu = 4 };

// y = f(x W^T + b). K > 0.
struct LinearParams {
  DType dtype;  // of all four; f32, f64, bf16 or f16
  int threads;
  bool on_tiles;  // if the instruction set has them

  int64_t M, N, K;

  const void* x;  // [M, K]
  int64_t x_stride[2];
  const void* w;  // [N, K], or [K, N] if w_transposed, rows dense
  int64_t w_stride;
  bool w_transposed;
  const void* packed;  // w as pack_weight() left it, null = not packed; for tiles only
  const void* bias;    // [N], null = 0
  void* y;             // [M, N], rows dense
  int64_t y_stride;
  MlpActivation activation;  // f; none in f64
};

// Rows of E elements: s = x + residual, and out = s normalized, times gamma, plus beta.
struct NormParams {
  DType dtype;  // of all; f32, bf16 or f16
  int threads;

  int64_t rows, E;  // rows dense, one after the other

  const void* x;             // [rows, E]
  const void* const* terms;  // [rows][3]: rows [E], whose sum is x; null = no more; null = x itself
  const void* scale;         // [E], of x; null = 1
  const void* residual;      // [rows, E], null = 0
  void* sum;                 // [rows, E], s; null = not wanted; may be x or residual
  const void* gamma;         // [E], null = 1
  const void* beta;          // [E], null = 0
  double eps;
  bool rms;   // divide by the root of the mean square, without subtracting the mean
  void* out;  // [rows, E], null = s is all that is wanted; may be x or residual
};

// Additive attention, forward and backward, on the operands of attention with one head: D is the
// hidden width A, and scale, softcap, window_left, ALiBi and lse are not used.
struct AdditiveParams {
  AttentionParams attention;

  const void* vector;  // [A] acc, contiguous: v of the scores
  const void* bias;    // [A] acc, contiguous, added to q; null = none
  bool wants_weights;

  // backward only
  int64_t chunk_rows;  // queries per partial sum of dk, dv, ...; a function of Lq
  int64_t chunks;      // ceil(Lq / chunk_rows)
  bool direct;        // one chunk, of the storage type: dk and d value are the gradients themselves
  void* parts;        // acc, uninitialised: [B, chunks, 2 * A], and if not direct also
                      // [B, chunks, Lk * (A + Dv)]; null in the forward pass
  void* grad_vector;  // [A] acc
  void* grad_bias;    // [A] acc, null = not wanted
  void* grad_scores;  // [B, Lq, Lk] acc, null = not wanted; its sum, if the mask is broadcast, is
                      // grad_mask, in f64 and zeroed by the caller
};

enum class Activation : int { none = 0, relu = 1, tanh = 2, sigmoid = 3 };

struct MemoryHopOptions {
  Activation activation = Activation::none;
  bool normalize = true;  // "softmax"; else the scores are the weights
  double scale = 1;
};

// Memory hops, forward and backward: u' = phi(H u + C^T softmax(scale M u + bias)), K times. "acc"
// is f32, or f64 for f64. A memory, projection, mask or bias that is shared by the batch, the
// queries or the hops has stride 0 there.
struct MemoryHopsParams : MemoryHopOptions {
  DType dtype;  // of all but the mask, the bias and the acc arrays
  int threads;

  int64_t B, Q, K, N, D;
  bool shared;     // one memory for all B, in and out
  bool same_rows;  // M_k and C_k are the same rows, in every hop
  bool stack;      // C_k is M_k+1

  Tensor4 query;       // [B, Q, -, D]
  Tensor4 in_memory;   // [B, K, N, D], D contiguous
  Tensor4 out_memory;  // [B, K, N, D], D contiguous
  Tensor4 proj;        // [-, K, D, D], the last contiguous; null = identity
  Tensor4 mask;        // [B, Q, K, N] boolean, null = none
  Tensor4 bias;        // [B, Q, K, N], null = none
  DType bias_dtype;

  void* out;      // [B, Q, D]
  void* trace;    // [B, Q, 2K + 1, D] acc: u_1, o_1, u_2, ..., u_K+1
  void* stats;    // [B, Q, K, 2] acc: m and l of p = exp(s - m) / l
  void* weights;  // [B, Q, K, N], null = not wanted; in backward: null = not kept

  // backward only; a gradient that is null is not wanted, the others are contiguous
  Tensor4 grad_out;             // [B, Q, -, D], null = zero
  Tensor4 grad_weights;         // [B, Q, K, N], null = zero
  void* grad_query;             // [B, Q, D]
  void* grad_in;                // [B or 1, in_slots, N, D]; all of a stack
  void* grad_out_memory;        // [B or 1, out_slots, N, D]; null for a stack or the same rows
  int64_t in_slots, out_slots;  // 1, or one per hop, or K + 1 for a stack
  void* grad_proj;              // [proj_slots, D, D]
  void* grad_states;            // [B, Q, K, D] acc: of H u + o, needed for grad_proj
  int64_t proj_slots;
  void* grad_scores;  // [B, Q, K, N] acc: of the bias before it is summed to its own shape

  // Hopfield retrieval: u' = o, until each query converges.
  bool settles;
  bool crowded;      // many queries per memory, whatever Q is
  bool search;       // search for the convergence step; else repeat `taken` steps
  bool resume;       // of a search: continue from the trace
  bool keep;         // of a search in one call where queries stop separately: keep all states
  int64_t together;  // this many consecutive queries stop together; divides Q
  double eps;        // a step of at most this length is the last
  int64_t* taken;    // [B, Q]: steps taken; during a search, minus the steps so far
  double* moved;     // [B, Q, 2]: |u' - u|^2 and |u'|^2, of a search where several stop together
  // The trace is u_1 ... u_K+1 [B, Q, K + 1, D]. A search without `keep` has only the last two
  // states [B, Q, 2, D], with stats [B, Q, 1, 2].
};

struct EncodeMemoryOptions {
  bool has_padding_idx = false;  // else padding_idx is None
  int64_t padding_idx = 0;
};

// out[i] = sum_j factors[j] o weight[tokens[i, j]] + temporal[i], for R models with G tables each;
// 0 for a sentence of only padding. "acc" is f32, or f64 for f64.
struct EncodeMemoryParams : EncodeMemoryOptions {
  DType dtype;  // of weight, temporal, out and grad; f32, f64, bf16 or f16
  int threads;

  int64_t R, G, B, N, J, V, D;

  const int64_t* tokens;  // [R, B, N, J]; each is in [0, V) or the padding
  int64_t token_stride[4];

  const void* factors;  // [J, D] acc, columns contiguous
  int64_t factor_stride;

  // forward
  Tensor4 weight;    // [R, G, V, D], columns contiguous
  Tensor4 temporal;  // [R, G, N, D], columns contiguous, null = none
  void* out;         // [R, B, G, N, D] contiguous

  // backward
  const void* grad;  // [R, B, G, N, D], columns contiguous
  int64_t grad_stride[4];
  void* grad_weight;    // [R, G, V, D] acc, contiguous
  void* grad_temporal;  // [R, G, N, D] acc, contiguous, null = not wanted
};

struct LocalOptions {
  int64_t reach = 1;  // D
  bool bell = false;  // z is the bell curve, else 1
};

// Local attention: query i reads the keys j within `reach` of its position p_i, without padding.
//   w = softmax(q . k),  z_j = exp(-2 ((j - p_i) / D)^2),  out = sum_j w_j z_j factor_j v_j
// A window is the W keys from max(0, ceil(p_i - D)) on. "acc" is f32, or f64 for f64. Arrays
// without a stride are contiguous.
struct LocalParams : LocalOptions {
  DType dtype;  // of query, key, value, out and their gradients; f32, f64, bf16 or f16
  int threads;

  int64_t B, Lq, Lk, D, Dv, W;  // W = min(2 reach + 1, Lk)

  Tensor4 query;           // [B, Lq, D, -], columns contiguous
  Tensor4 key;             // [B, Lk, D, -], columns contiguous
  Tensor4 value;           // [B, Lk, Dv, -], columns contiguous
  const void* positions;   // [B, Lq] acc, any numbers
  const uint8_t* padding;  // [B, Lk], 0 or 1, null = 0
  const void* factor;      // [B, Lq, W] acc, null = 1
  void* weights;           // [B, Lq, W] acc: w, written by forward, read by backward
  void* out;               // [B, Lq, Dv]

  // backward
  Tensor4 grad_out;          // [B, Lq, Dv, -], columns contiguous, null = zero
  const void* grad_weights;  // [B, Lq, W] acc, null = zero
  void* grad_query;          // [B, Lq, D]
  void* grad_key;            // [B, Lk, D]
  void* grad_value;          // [B, Lk, Dv]
  void* grad_positions;      // [B, Lq] acc
  void* coefficients;        // [2, B, Lq, W] acc: the factors of each key and value
};

// Merges two states of attention, a and b, of disjoint sets of keys, forward and backward.
//   lse = log(e^lse_a + e^lse_b),  out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b
// An lse of -inf is an empty state, whose output is not read and whose gradients are 0.
struct MergeStatesParams {
  DType dtype;      // of outputs and their gradients; f32, f64, bf16 or f16
  DType lse_dtype;  // of lse and its gradients; f32 or f64
  int threads;

  int64_t B, H, L, D;

  Tensor4 out_a, out_b;  // [B, H, L, D]
  Tensor4 lse_a, lse_b;  // [B, H, L, -]

  // forward
  Tensor4 out;  // [B, H, L, D]
  Tensor4 lse;  // [B, H, L, -]

  // backward
  Tensor4 grad_out;                // [B, H, L, D], null = zero
  Tensor4 grad_lse;                // [B, H, L, -], null = zero
  Tensor4 grad_out_a, grad_out_b;  // [B, H, L, D]
  Tensor4 grad_lse_a, grad_lse_b;  // [B, H, L, -]
};

}  // namespace fastattn
