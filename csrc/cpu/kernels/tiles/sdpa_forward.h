// Forward attention in bf16 and fp32 on tiles:  O = softmax(scale Q K^T + bias) V.
//
// As on vectors (sdpa_forward.cpp), scores and outputs are transposed: S^T = K Q^T and
// O^T = V^T P^T, with the 32 queries of a panel across the lanes. So rules, masks and dropout are
// the same functions on the same layouts. Keys come in blocks of 64. While the vector units compute
// the weights of block j, the tile unit computes the scores of block j + 1 and adds the outputs of
// block j - 1, a few instructions of each in turn.
//
// Nothing is rescaled. Weights are relative to a reference, the maximum of the first block in which
// a query sees a key; floats carry their own exponent, so that later weights may be far above one.
// Where a sum leaves the safe range, its query is computed again from its true maximum. Lanes never
// mix, so the bits of a query do not depend on the others of its panel.
//
// In fp32 each operand is two or three parts (parts.h), and a square of a product is one for each
// product of parts. Rows that parts do not represent are zero there, and their scores and outputs
// are computed pair by pair.
//
// The speed was measured with prototypes of the same main loop. This kernel has run on emulated
// tiles only.
#pragma once
#include "../../threads.h"
#include "../blocks.h"
#include "../mask.h"
#include "../sdpa_rows.h"
#include "exp2.h"
#include "squares.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class TileForward {
  typedef typename P::Storage Storage;
  typedef PartProducts<P::kParts> Products;
  static constexpr int kParts = P::kParts;
  static constexpr int W = kLanes<float>, kVectors = 2;
  static constexpr int64_t kQueries = kLanesOfSquare;  // of a panel
  // Keys and values that all panels of a task read stay in half of the L2 cache of such processors.
  // With more, 8192 keys of 128 channels took 1.6 times as long.
  static constexpr int64_t kPieceBytes = 1 << 20;
  static constexpr int64_t kPanelsAtATime = 256;  // that wait for the next such piece
  static constexpr int64_t kLeastPanels = 16;     // that share the packing of a task
  // In fp32, blocks whose outputs are summed before they are added to the others: each adds as many
  // roundings as there are products of parts.
  static constexpr int64_t kBlocksOfSum = 16;

 public:
  explicit TileForward(const Sequence& params)
      : p(params),
        rule(make_rule<float>(params)),
        dropout(make_dropout(params)),
        key_mask(is_key_mask(params)),
        steps((params.D + kStep - 1) / kStep),
        steps_v((params.Dv + kStep - 1) / kStep),
        group(params.Hq / params.Hkv),
        panels((params.Lq + kQueries - 1) / kQueries),
        share(panels_of_a_task()),
        bytes(allocate(nullptr).bytes) {}

  int64_t tasks() const { return p.B * p.Hkv * chunks(); }

  // A task is a share of the panels of a key head. Under a causal mask the longest ones come first.
  void run(int64_t t) const {
    const TileScope tiles;
    Task task{allocate(thread_scratch(bytes)), {}, {}, {}};
    const int64_t heads = p.B * p.Hkv;
    const bool causal = p.window_right >= 0;
    const int64_t head = causal ? t % heads : t / chunks();
    const int64_t chunk = causal ? chunks() - 1 - t / heads : t % chunks();
    task.b = head / p.Hkv, task.hk = head % p.Hkv;
    list_squares(task.buf.squares);
    const Range all{chunk * share, min_of((chunk + 1) * share, group * panels)};
    task.blocks = blocks_of(task, all);
    for (int64_t n = all.begin; n < all.end; n += batch()) {
      const Range some{n, min_of(n + batch(), all.end)};
      if (!compute(task, some)) compute_exactly(task, some);
    }
  }

 private:
  const Sequence& p;
  const ScoreRule<float> rule;
  const DropoutRule dropout;
  const bool key_mask;
  const int64_t steps, steps_v;  // of 32 channels, of queries and of values
  const int64_t group, panels;   // panels of a query head
  const int64_t share;           // panels of a task
  const size_t bytes;

  // Tasks are less than a head where there are few heads. Each packs its own keys and values.
  int64_t panels_of_a_task() const {
    const int64_t heads = p.B * p.Hkv, all = group * panels;
    const int64_t wanted = (4 * p.threads + heads - 1) / max_of<int64_t>(1, heads);
    const int64_t count = max_of<int64_t>(1, min_of(wanted, all / kLeastPanels));
    return max_of<int64_t>(1, (all + count - 1) / count);
  }
  int64_t chunks() const { return (group * panels + share - 1) / share; }

  int64_t key_elements() const { return kBlockKeys * steps * kStep * kParts; }  // of a packed block
  int64_t value_elements() const { return kBlockKeys * steps_v * kStep * kParts; }
  int64_t output_floats() const { return steps_v * kStep * kQueries; }
  int64_t all_blocks() const { return (p.Lk + kBlockKeys - 1) / kBlockKeys; }
  // Blocks of a piece: all of them if they fit, else pieces of the same size.
  int64_t piece() const {
    const int64_t block = (key_elements() + value_elements()) * static_cast<int64_t>(sizeof(Bf16));
    const int64_t most = max_of<int64_t>(1, kPieceBytes / block);
    const int64_t pieces = max_of<int64_t>(1, (all_blocks() + most - 1) / most);
    return (all_blocks() + pieces - 1) / pieces;
  }
  int64_t batch() const { return piece() >= all_blocks() ? 1 : min_of(share, kPanelsAtATime); }

  // What is known of a panel between two pieces of the keys.
  struct alignas(64) State {
    float m[kQueries];        // the reference, or the maximum of an exact query; -inf before a key
    float minus_m[kQueries];  // -m * exponent
    float l[kQueries];        // sum of the weights
    int32_t exact[kQueries];  // all ones: the weight is 2^((s - m) * exponent), without overflow
    float* o;                 // [channels][queries]
    float* total;             // [channels][queries], in fp32: the sums of o before
    int64_t added;            // blocks, to o
    bool fresh;               // o holds nothing yet
    bool totalled;            // total holds something
    bool waiting;             // some queries have seen no key so far
    bool unsafe;              // some queries are to be computed again
  };

  struct Buffers {
    float* q;           // [steps][part][16 words][queries]
    float* s[2];        // [keys of a block][queries] scores, of two blocks in turn
    float* weights[2];  // [2][part][16 words][queries]
    float* bias;        // [keys of a block][queries]
    float* mask;        // [Lk] a mask of keys
    bool* excluded;     // [blocks] the mask excludes all of their keys
    uint32_t* keep;     // [words of a block][queries]
    float* nowhere;     // [32][32]
    Square* squares;    // those of the scores, then those of the outputs
    Bf16* keys;         // [piece] packed blocks
    Bf16* values;       // [piece] packed blocks
    // Per block, which keys and which values are packed as zeros, and computed pair by pair.
    uint64_t *keys_apart, *values_apart;  // [piece]
    State* states;                        // [batch]
    size_t bytes;
  };

  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers buf;
    buf.q = a.take<float>(steps * kStep / 2 * kQueries * kParts);
    for (float*& s : buf.s) s = a.take<float>(kBlockKeys * kQueries);
    for (float*& w : buf.weights) w = a.take<float>(kBlockKeys / 2 * kQueries * kParts);
    buf.bias = a.take<float>(has_bias_of_pairs(p) ? kBlockKeys * kQueries : 0);
    buf.mask = a.take<float>(key_mask ? p.Lk : 0);
    buf.excluded = a.take<bool>(key_mask ? all_blocks() : 0);
    buf.keep = a.take<uint32_t>(p.dropout_p > 0 ? kBlockKeys / 2 * kQueries : 0);
    buf.nowhere = a.take<float>(kQueries * kQueries);
    buf.squares = a.take<Square>(score_squares() + output_squares());
    buf.keys = a.take<Bf16>(piece() * key_elements());
    buf.values = a.take<Bf16>(piece() * value_elements());
    buf.keys_apart = a.take<uint64_t>(piece()), buf.values_apart = a.take<uint64_t>(piece());
    buf.states = a.take<State>(batch());
    float* o = a.take<float>(batch() * output_floats());
    float* total = a.take<float>(kParts > 1 ? batch() * output_floats() : 0);
    if (base != nullptr)
      for (int64_t n = 0; n < batch(); ++n) {
        buf.states[n].o = o + n * output_floats();
        buf.states[n].total = total + n * output_floats();
      }
    buf.bytes = a.used();
    return buf;
  }

  int64_t score_squares() const { return 2 * steps * Products::count; }
  int64_t output_squares() const { return 2 * steps_v * Products::count; }
  // Both kinds read their packed tiles one after the other.
  void list_squares(Square* list) const {
    const auto add = [&](int64_t left, int64_t right, int64_t sum, bool first) {
      for (int n = 0; n < Products::count; ++n)
        *list++ = {(left * kParts + Products::left[n]) * 2 * kTileElements,
                   (right * kParts + Products::right[n]) * kRightTile, sum * kStep * kQueries,
                   first && n == 0};
    };
    for (int64_t keys = 0; keys < 2; ++keys)
      for (int64_t d = 0; d < steps; ++d) add(keys * steps + d, d, keys, d == 0);
    for (int64_t d = 0; d < steps_v; ++d)
      for (int64_t keys = 0; keys < 2; ++keys) add(d * 2 + keys, keys, d, keys == 0);
  }

  struct Task {
    Buffers buf;
    int64_t b, hk;
    Range blocks;               // of keys, that its panels see
    int64_t packed_piece = -1;  // in buf.keys and buf.values
    int64_t masked_head = -1;   // in buf.mask
  };

  struct Panel {
    State& state;
    int64_t h, i0, i1;
    Range all;           // keys, seen by all of its queries
    Range blocks;        // of keys, seen by some of them
    uint32_t apart = 0;  // queries that are packed as zeros
  };

  Panel panel_of(Task& task, int64_t n, Range some) const {
    const int64_t h = task.hk * group + n / panels, i0 = n % panels * kQueries;
    const int64_t i1 = min_of(p.Lq, i0 + kQueries);
    const Range seen = visible_to_any(p, i0, i1);
    Range blocks{0, 0};
    if (seen.begin < seen.end)
      blocks = {seen.begin / kBlockKeys, (seen.end + kBlockKeys - 1) / kBlockKeys};
    if (key_mask) {
      read_mask(task, h);
      const bool* const excluded = task.buf.excluded;
      while (blocks.begin < blocks.end && excluded[blocks.end - 1]) --blocks.end;
      while (blocks.begin < blocks.end && excluded[blocks.begin]) ++blocks.begin;
    }
    return {task.buf.states[n - some.begin], h, i0, i1, visible_to_all(p, i0, i1), blocks};
  }
  // The mask of keys of a head, and the blocks that it excludes as a whole.
  void read_mask(Task& task, int64_t h) const {
    if (task.masked_head == h || (task.masked_head >= 0 && p.mask.stride[1] == 0)) return;
    task.masked_head = h;
    read_mask_row(p, task.b, h, 0, 0, p.Lk, task.buf.mask);
    for (int64_t j = 0; j < all_blocks(); ++j)
      task.buf.excluded[j] = all_excluded(task.buf.mask + j * kBlockKeys, keys_in(j));
  }
  // The blocks that some panels of a task see.
  Range blocks_of(Task& task, Range some) const {
    Range found{all_blocks(), 0};
    for (int64_t n = some.begin; n < some.end; ++n) {
      const Range blocks = panel_of(task, n, {n, n + 1}).blocks;
      if (blocks.begin >= blocks.end) continue;
      found = {min_of(found.begin, blocks.begin), max_of(found.end, blocks.end)};
    }
    return found;
  }

  // f(panel) of panels [some.begin, some.end).
  template <class F>
  FASTATTN_INLINE void each(Task& task, Range some, F f) const {
    for (int64_t n = some.begin; n < some.end; ++n) {
      Panel panel = panel_of(task, n, some);
      f(panel);
    }
  }
  // f(panel, its blocks of a piece), piece by piece, all panels with one piece before the next.
  // Keys, values and the panel's queries are packed.
  template <class F>
  FASTATTN_INLINE void each_piece(Task& task, Range some, bool unsafe_only, F f) const {
    for (int64_t j = task.blocks.begin; j < task.blocks.end; j += piece()) {
      each(task, some, [&](Panel& panel) {
        const Range own{max_of(panel.blocks.begin, j), min_of(panel.blocks.end, j + piece())};
        if (own.begin >= own.end || (unsafe_only && !panel.state.unsafe)) return;
        pack_piece(task, j);
        pack_panel_of(task, panel);
        f(panel, own);
      });
    }
  }

  // False if some queries must be computed exactly.
  bool compute(Task& task, Range some) const {
    each(task, some, [&](Panel& panel) {
      State& state = panel.state;
      for (int64_t i = 0; i < kQueries; ++i)
        state.m[i] = -kInf<float>, state.minus_m[i] = 0, state.exact[i] = 0;
      clear(state);
      state.waiting = true;
    });
    each_piece(task, some, false,
               [&](Panel& panel, Range blocks) { attend<false>(task, panel, blocks); });
    bool safe = true;
    each(task, some, [&](Panel& panel) {
      add_up(panel.state);
      if (p.sinks != nullptr) add_sink(task, panel);
      panel.state.unsafe = find_unsafe(task, panel);
      if (!panel.state.unsafe) finish(task, panel);
      safe &= !panel.state.unsafe;
    });
    return safe;
  }

  // Once more, for the panels that need it: first the maxima of all keys, then everything.
  __attribute__((noinline)) void compute_exactly(Task& task, Range some) const {
    each_piece(task, some, true,
               [&](Panel& panel, Range blocks) { find_maxima(task, panel, blocks); });
    each(task, some, [&](Panel& panel) { clear(panel.state); });
    each_piece(task, some, true,
               [&](Panel& panel, Range blocks) { attend<true>(task, panel, blocks); });
    each(task, some, [&](Panel& panel) {
      if (!panel.state.unsafe) return;
      add_up(panel.state);
      if (p.sinks != nullptr) add_sink(task, panel);
      finish(task, panel);
    });
  }

  static void clear(State& state) {
    state.fresh = true, state.totalled = false, state.added = 0;
    state.waiting = false;
    __builtin_memset(state.l, 0, sizeof state.l);
  }

  void pack_piece(Task& task, int64_t first) const {
    if (task.packed_piece == first) return;
    task.packed_piece = first;
    for (int64_t n = 0; n < min_of(piece(), task.blocks.end - first); ++n) {
      RowsOfTile<P> k[2], v[2];
      uint64_t keys = 0, values = 0;
      for (int64_t half = 0; half < 2; ++half) {
        k[half] = rows_of_keys(task, p.k, first + n, half, p.D);
        v[half] = rows_of_keys(task, p.v, first + n, half, p.Dv);
        const uint32_t k_apart = kParts > 1 ? rows_apart(k[half]) : 0;
        const uint32_t v_apart = kParts > 1 || rule.excludes ? rows_apart(v[half]) : 0;
        k[half].taken &= ~k_apart, v[half].taken &= ~v_apart;
        keys |= static_cast<uint64_t>(k_apart) << 32 * half;
        values |= static_cast<uint64_t>(v_apart) << 32 * half;
      }
      task.buf.keys_apart[n] = keys, task.buf.values_apart[n] = values;
      pack_keys(k, steps, task.buf.keys + n * key_elements());
      pack_values(v, steps_v, task.buf.values + n * value_elements());
    }
  }
  RowsOfTile<P> rows_of_keys(const Task& task, const Tensor4& x, int64_t block, int64_t half,
                             int64_t channels) const {
    const int64_t begin = min_of(p.Lk, block * kBlockKeys + 32 * half);
    return rows_of<P>(x, task.b, task.hk, begin, min_of(p.Lk, begin + 32), channels);
  }
  RowsOfTile<P> queries_of(const Task& task, const Panel& panel) const {
    return rows_of<P>(p.q, task.b, panel.h, panel.i0, panel.i1, p.D);
  }
  void pack_panel_of(Task& task, Panel& panel) const {
    RowsOfTile<P> q = queries_of(task, panel);
    if constexpr (kParts > 1) q.taken &= ~(panel.apart = rows_apart(q));
    pack_queries(q, steps, task.buf.q);
  }

  int64_t keys_in(int64_t block) const { return min_of(kBlockKeys, p.Lk - block * kBlockKeys); }
  // The first block from j on that the mask of keys does not exclude.
  int64_t next_block(const Task& task, int64_t j, int64_t end) const {
    while (key_mask && j < end && task.buf.excluded[j]) ++j;
    return j;
  }
  Operands score_operands(const Task& task, int64_t block, float* s) const {
    return {task.buf.keys + (block - task.packed_piece) * key_elements(), task.buf.q, s, false};
  }
  Operands output_operands(const Task& task, const State& state, int64_t block,
                           const float* weights) const {
    return {task.buf.values + (block - task.packed_piece) * value_elements(), weights, state.o,
            !state.fresh};
  }

  // A panel and its blocks of a piece: O += P V, l += P.
  template <bool kExact>
  __attribute__((noinline)) void attend(Task& task, Panel& panel, Range blocks) const {
    Buffers& buf = task.buf;
    State& state = panel.state;
    const int64_t second = score_squares(), last = second + output_squares();
    Squares squares(buf.nowhere);
    const auto nothing = []() {};
    int64_t j = next_block(task, blocks.begin, blocks.end), before = -1, turn = 0;
    if (j == blocks.end) return;
    squares.multiply(buf.squares, 0, second, second, score_operands(task, j, buf.s[0]), {},
                     nothing);
    squares.flush();
    make_scores(task, panel, j, buf.s[0]);
    for (; j < blocks.end; ++turn) {
      const int64_t after = next_block(task, j + 1, blocks.end);
      const bool scores = after < blocks.end, values = before >= 0;
      float* const weights = buf.weights[turn % 2];
      float* const next = buf.s[(turn + 1) % 2];
      const float* const old = buf.weights[(turn + 1) % 2];
      weigh<kExact>(squares, buf, state, buf.s[turn % 2], weights, scores ? 0 : second,
                    values ? last : second, scores ? score_operands(task, after, next) : Operands{},
                    values ? output_operands(task, state, before, old) : Operands{});
      if (values)
        end_outputs(squares, task, panel, before, old);
      else
        squares.flush();
      if (p.dropout_p > 0) drop(task, panel, j, weights);
      if (scores) make_scores(task, panel, after, next);
      before = j, j = after;
    }
    squares.flush();
    const float* const weights = buf.weights[(turn + 1) % 2];
    squares.multiply(buf.squares, second, second, last, {},
                     output_operands(task, state, before, weights), nothing);
    end_outputs(squares, task, panel, before, weights);
    squares.flush();
  }

  // What the products of a block's outputs leave to do.
  void end_outputs(Squares& squares, Task& task, Panel& panel, int64_t block,
                   const float* weights) const {
    State& state = panel.state;
    state.fresh = false;
    if (task.buf.values_apart[block - task.packed_piece] != 0) {
      squares.flush();
      add_apart(task, panel, block, weights);
    }
    if (kParts > 1 && ++state.added % kBlocksOfSum == 0) {
      squares.flush();
      add_to_total(state);
    }
  }
  void add_to_total(State& state) const {
    for (int64_t at = 0; at < output_floats(); at += W) {
      const VecF o = load(state.o + at);
      store(state.total + at, state.totalled ? load(state.total + at) + o : o);
    }
    state.fresh = state.totalled = true;
  }
  // O, with what was added to the total before.
  void add_up(State& state) const {
    if (kParts == 1 || !state.totalled) return;
    for (int64_t at = 0; at < output_floats(); at += W) {
      const VecF total = load(state.total + at);
      store(state.o + at, state.fresh ? total : total + load(state.o + at));
    }
    state.fresh = state.totalled = false;
  }

  // Weights of a block from its scores, with squares [begin, end) of the scores of the next block
  // and the outputs of the one before in between. A unit of vector work is a pair of keys.
  template <bool kExact>
  __attribute__((noinline)) void weigh(Squares& squares, const Buffers& buf, State& state,
                                       const float* s, float* weights, int64_t begin, int64_t end,
                                       Operands scores, Operands outputs) const {
    const VecF exponent = splat(rule.exponent);
    VecF minus_m[kVectors], sum[kVectors], reference[kVectors];
    VecI exact[kVectors];
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      minus_m[n] = load(state.minus_m + n * W);
      sum[n] = kParts > 1 ? VecF{} : load(state.l + n * W);
      if constexpr (kExact) {
        const VecF m = load(state.m + n * W);
        reference[n] = select<float>(m == -kInf<float>, VecF{}, m);
        exact[n] = (VecI)load(reinterpret_cast<const float*>(state.exact) + n * W);
      }
    }
    const auto weight = [&](VecF x, int n) __attribute__((always_inline)) {
      VecF power = x * exponent + minus_m[n];
      if constexpr (kExact) power = select<float>(exact[n], (x - reference[n]) * exponent, power);
      return exp2_any<P::kCoarseExp>(power);
    };
    constexpr int64_t kPairs = kBlockKeys / 2;
    int64_t pair = 0, due = 0;
    const auto weigh_pair = [&]() __attribute__((always_inline)) {
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
        const VecF even = weight(load(s + 2 * pair * kQueries + n * W), n);
        const VecF odd = weight(load(s + (2 * pair + 1) * kQueries + n * W), n);
        sum[n] += even + odd;
        __m512i parts[kParts];
        split_pairs(even, odd, parts);
        FASTATTN_UNROLL for (int part = 0; part < kParts; ++part)
            store(weights + word_of(pair, part) * kQueries + n * W, (VecF)parts[part]);
      }
      ++pair;
    };
    const int64_t products = 4 * (end - begin);
    const auto between = [&]() __attribute__((always_inline)) {
      for (due += kPairs; due >= products; due -= products) weigh_pair();
    };
    squares.multiply(buf.squares, begin, score_squares(), end, scores, outputs, between);
    while (pair < kPairs) weigh_pair();
    // In fp32 a block has a sum of its own, because a chain over all keys would round more.
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n)
        store(state.l + n * W, kParts > 1 ? load(state.l + n * W) + sum[n] : sum[n]);
  }
  // Of the weights of a block: the row of a part of a pair of keys.
  static FASTATTN_INLINE int64_t word_of(int64_t pair, int64_t part) {
    return (pair / 16 * kParts + part) * 16 + pair % 16;
  }

  // S of a block, from products to scores: -inf where a key is not visible. A query that sees its
  // first key takes its reference.
  __attribute__((noinline)) void make_scores(Task& task, Panel& panel, int64_t block,
                                             float* s) const {
    State& state = panel.state;
    VecF top[kVectors];
    if (!apply(task, panel, block, s, top, state.waiting) || !state.waiting) return;
    VecI still{};
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF before = load(state.m + n * W);
      const VecF m = select<float>(before == -kInf<float>, top[n], before);
      refer(state, n, m);
      still |=
          (VecI)(m == -kInf<float>)&(iota<float>() + float(n * W) < float(panel.i1 - panel.i0));
    }
    state.waiting = any(still);
  }
  FASTATTN_INLINE void refer(State& state, int n, VecF m) const {
    store(state.m + n * W, m);
    store(state.minus_m + n * W, select<float>(m == -kInf<float>, VecF{}, m * -rule.exponent));
  }
  static FASTATTN_INLINE bool any(VecI lanes) {
    int32_t found[W], some = 0;
    store(reinterpret_cast<float*>(found), (VecF)lanes);
    for (int32_t x : found) some |= x;
    return some != 0;
  }

  // The same, and the maximum over the keys if it is wanted or comes for nothing; else false.
  bool apply(Task& task, const Panel& panel, int64_t block, float* s, VecF* top,
             bool wants_top) const {
    const int64_t j0 = block * kBlockKeys, keys = keys_in(block);
    for (int64_t r = keys * kQueries; r < kBlockKeys * kQueries; r += W)
      store(s + r, splat(-kInf<float>));
    if (kParts > 1) score_apart(task, panel, block, s);
    const bool edge = j0 < panel.all.begin || j0 + keys > panel.all.end;
    if (rule.natural || has_bias(p) || edge) {
      Bias<float> bias;
      if (key_mask) bias.keys = task.buf.mask + j0;
      if (has_bias_of_pairs(p)) {
        pack_bias(p, task.b, panel.h, panel.i0, panel.i1, j0, j0 + keys, kQueries, task.buf.bias);
        bias.tile = task.buf.bias;
      }
      apply_rule<float, kVectors>(p, rule, s, keys, panel.i0, panel.i1, j0, bias,
                                  alibi_slope<float>(p, task.b, panel.h), nullptr, top);
      return true;
    }
    if (!wants_top) return false;
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) top[n] = splat(-kInf<float>);
    for (int64_t r = 0; r < keys; ++r)
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) top[n] =
          max_of(top[n], load(s + r * kQueries + n * W));
    return true;
  }

  // The products of the pairs whose key or query was packed as zeros.
  void score_apart(const Task& task, const Panel& panel, int64_t block, float* s) const {
    const uint64_t keys = task.buf.keys_apart[block - task.packed_piece];
    if (keys == 0 && panel.apart == 0) return;
    const RowsOfTile<P> q = queries_of(task, panel);
    for (int64_t r = 0; r < keys_in(block); ++r) {
      const RowsOfTile<P> k = rows_of_keys(task, p.k, block, r / 32, p.D);
      for (int64_t i = 0; i < panel.i1 - panel.i0; ++i)
        if ((keys >> r | panel.apart >> i) & 1) s[r * kQueries + i] = dot_apart(q, i, k, r % 32);
    }
  }

  // Dropped weights are zero, and stay in the sum.
  __attribute__((noinline)) void drop(Task& task, const Panel& panel, int64_t block,
                                      float* weights) const {
    const int64_t keys = keys_in(block);
    dropout_mask<2>(dropout, panel.i0, block * kBlockKeys, keys, kQueries, panel.h,
                    p.index + task.b, task.buf.keep);
    for (int64_t pair = 0; pair < (keys + 1) / 2; ++pair)
      for (int64_t part = 0; part < kParts; ++part)
        FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
          float* const w = weights + word_of(pair, part) * kQueries + n * W;
          store(w, keep_lanes(load(w), task.buf.keep + pair * kQueries + n * W));
        }
  }

  // O += V^T P pair by pair, skipping weights of zero, for values that were packed as zeros.
  __attribute__((noinline)) void add_apart(const Task& task, const Panel& panel, int64_t block,
                                           const float* weights) const {
    const uint64_t values = task.buf.values_apart[block - task.packed_piece];
    for (int64_t r = 0; r < keys_in(block); ++r) {
      if (!(values >> r & 1)) continue;
      const RowsOfTile<P> v = rows_of_keys(task, p.v, block, r / 32, p.Dv);
      const Bf16* row = reinterpret_cast<const Bf16*>(weights + word_of(r / 2, 0) * kQueries);
      for (int64_t i = 0; i < kQueries; ++i) {
        const float weight = sum_of_parts<kParts>(row + 2 * i + r % 2, 2 * 16 * kQueries);
        if (weight == 0) continue;
        for (int64_t d = 0; d < p.Dv; ++d)
          panel.state.o[d * kQueries + i] += weight * v.at(r % 32, d);
      }
    }
  }

  // The head's sink, a key whose value is 0, joins the sums. It is the reference of a query that sees
  // no other key.
  __attribute__((noinline)) void add_sink(const Task& task, Panel& panel) const {
    State& state = panel.state;
    const FirstState<float> first = first_state<float>(p, rule, task.b, panel.h);
    const VecF sink = splat(first.maximum), exponent = splat(rule.exponent);
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF before = load(state.m + n * W), l = load(state.l + n * W);
      const VecI alone = (before == -kInf<float>)&(l == l);  // see sees_nothing
      const VecF m = select<float>(alone, sink, before);
      const VecF minus_m = select<float>(m == -kInf<float>, VecF{}, m * -rule.exponent);
      const VecI exact = (VecI)load(reinterpret_cast<const float*>(state.exact) + n * W);
      const VecF difference = select<float>(sink == m, VecF{}, sink - m);
      const VecF power = select<float>(exact, difference * exponent, sink * exponent + minus_m);
      store(state.m + n * W, m);
      store(state.minus_m + n * W, minus_m);
      store(state.l + n * W, l + first.sum * exp2_any<P::kCoarseExp>(power));
    }
  }

  // Marks the queries whose weights, sum or output left the safe range. NaN and inf in the inputs
  // are among them, and stay. minus_m is a rounded product: from 2^29 on, its error could scale all
  // weights of a row by more than 2^4, up to none at all.
  bool find_unsafe(const Task& task, Panel& panel) const {
    State& state = panel.state;
    if (state.fresh) return false;
    const float sink = first_state<float>(p, rule, task.b, panel.h).maximum;
    VecI some{};
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF l = load(state.l + n * W), minus_m = load(state.minus_m + n * W);
      VecF rest{};  // NaN where an output is not finite
      for (int64_t d = 0; d < p.Dv; ++d) {
        const VecF x = load(state.o + d * kQueries + n * W);
        rest += x - x;
      }
      const VecF m = load(state.m + n * W);
      const VecI summed = ((l > 0x1p-60f) | (m == -kInf<float>)) & (l < 0x1p60f);
      const VecI safe = summed & (minus_m < 0x1p29f) & (minus_m > -0x1p29f) & (rest == 0);
      const VecI there = iota<float>() + float(n * W) < float(panel.i1 - panel.i0);
      const VecI unsafe = ~safe & there;
      store(reinterpret_cast<float*>(state.exact) + n * W, (VecF)unsafe);
      some |= unsafe;
      store(state.m + n * W, select<float>(unsafe, splat(sink), m));
    }
    return any(some);
  }

  // The maxima of the queries to be computed exactly.
  void find_maxima(Task& task, Panel& panel, Range blocks) const {
    State& state = panel.state;
    float* const s = task.buf.s[0];
    for (int64_t j = next_block(task, blocks.begin, blocks.end); j < blocks.end;
         j = next_block(task, j + 1, blocks.end)) {
      Squares squares(task.buf.nowhere);
      squares.multiply(task.buf.squares, 0, score_squares(), score_squares(),
                       score_operands(task, j, s), {}, []() {});
      squares.flush();
      VecF top[kVectors];
      apply(task, panel, j, s, top, true);
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
        const VecF m = load(state.m + n * W);
        const VecI exact = (VecI)load(reinterpret_cast<const float*>(state.exact) + n * W);
        store(state.m + n * W, select<float>(exact, max_of(m, top[n]), m));
      }
    }
  }

  void finish(const Task& task, Panel& panel) const {
    State& state = panel.state;
    const int64_t rows = panel.i1 - panel.i0;
    if (state.fresh)  // it sees no key
      __builtin_memset(state.o, 0, static_cast<size_t>(output_floats()) * sizeof(float));
    double* const lse = p.lse + (task.b * p.Hq + panel.h) * p.lse_stride + panel.i0;
    finish_rows<float, Storage>(p, rule, dropout, task.b, panel.h, panel.i0, rows, kQueries,
                                state.m, state.l, state.o);
    // Weights were relative to minus_m, which is a rounded product.
    for (int64_t i = 0; i < rows; ++i)
      if (!state.exact[i] && state.m[i] != -kInf<float>)
        lse[i] -=
            (state.minus_m[i] + static_cast<double>(state.m[i]) * rule.exponent) * kLn2<double>;
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
