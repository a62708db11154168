// The rows of a panel of queries on tiles, before, between and after its products: which pairs are
// visible, the scores, the references and sums of the weights, dropout, and what is written.
//
// Weights are relative to a reference, the maximum of the first block in which a query sees a key.
// Nothing is rescaled: floats carry their own exponent, and so do bf16, so that later weights may
// be far above one. Where a sum leaves the safe range, its query is computed again from its true
// maximum. Lanes never mix, so the bits of a query do not depend on the others of its panel.
//
// Weights in fp16 are 2^8 at the reference. Where one would exceed 2^15, the reference becomes the
// maximum of its block, and the sums of its query are rescaled.
#pragma once
#include "../blocks.h"
#include "../mask.h"
#include "../sdpa_rows.h"
#include "exp2.h"
#include "squares.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class TileRows {
  typedef typename P::Storage Storage;
  typedef typename P::Format Format;
  static constexpr int kParts = Format::kParts;

 public:
  static constexpr int W = kLanes<float>, kVectors = 2;
  static constexpr int64_t kQueries = kLanesOfSquare;  // of a panel

  explicit TileRows(const Sequence& params)
      : p(params),
        rule(make_rule<float>(params)),
        dropout(make_dropout(params)),
        key_mask(is_key_mask(params)),
        steps_v((params.Dv + kStep - 1) / kStep) {}

  // What is known of a panel between two pieces of the keys.
  struct alignas(64) State {
    float m[kQueries];        // the reference, or the maximum of an exact query; -inf before a key
    float minus_m[kQueries];  // -m * exponent
    float l[kQueries];        // sum of the weights
    int32_t exact[kQueries];  // all ones: the weight is 2^((s - m) * exponent), without overflow
    float rescale[kQueries];  // what the outputs of the blocks before are to be multiplied by
    float* o;                 // [channels][queries]
    float* total;             // [channels][queries], in fp32: the sums of o before
    int64_t added;            // blocks, to o
    bool fresh;               // o holds nothing yet
    bool totalled;            // total holds something
    bool waiting;             // some queries have seen no key so far
    bool raised;              // some references, so that rescale is due
    bool unsafe;              // some queries are to be computed again
    bool settled;             // all keys are read, and unsafe is known
  };

  // Where the queries of a panel are on the axis of keys, and their slopes (see LanesOfHead).
  struct Lanes {
    int64_t i0, i1;
    alignas(64) float position[kQueries];  // less i0
    alignas(64) float slopes[kQueries];
    bool any_slope;
    FASTATTN_INLINE bool sloped() const { return any_slope; }
    FASTATTN_INLINE VecF slope(int n) const { return load(slopes + n * W); }
    FASTATTN_INLINE VecF queries(int n) const { return load(position + n * W); }
  };

  struct Panel {
    State state;
    int64_t b, hk, h, i0, i1;
    Lanes lanes;
    Range all;       // keys, seen by all of its queries
    Range blocks;    // of keys, seen by some of them
    uint32_t apart;  // queries that are packed as zeros
  };

  // A block of keys. Those that are packed as zeros, in K or in V, are computed pair by pair.
  struct Block {
    int64_t j0, keys;
    uint64_t keys_apart, values_apart;
  };

  struct Buffers {
    float* bias;               // [keys of a block][queries]
    float* mask;               // [Lk] a mask of keys
    bool* excluded;            // [blocks] the mask excludes all of their keys
    uint32_t* keep;            // [words of a block][queries]
    Storage *keys, *values;    // [2 halves][32][D | Dv] of a paged cache
    int64_t masked_head = -1;  // in mask
  };

  // Takes the buffers of a thread from an arena.
  Buffers allocate(Arena& a) const {
    Buffers buf;
    buf.bias = a.take<float>(has_bias_of_pairs(p) ? kBlockKeys * kQueries : 0);
    buf.mask = a.take<float>(key_mask ? p.Lk : 0);
    buf.excluded = a.take<bool>(key_mask ? all_blocks() : 0);
    buf.keep = a.take<uint32_t>(p.dropout_p > 0 ? kBlockKeys / 2 * kQueries : 0);
    buf.keys = a.take<Storage>(p.pages != nullptr ? kBlockKeys * p.D : 0);
    buf.values = a.take<Storage>(p.pages != nullptr ? kBlockKeys * p.Dv : 0);
    return buf;
  }

  float exponent() const { return rule.exponent; }
  bool excludes() const { return rule.excludes; }
  // Blocks of all keys, and the keys in one.
  int64_t all_blocks() const { return (p.Lk + kBlockKeys - 1) / kBlockKeys; }
  int64_t keys_in(int64_t block) const { return min_of(kBlockKeys, p.Lk - block * kBlockKeys); }
  int64_t output_floats() const { return steps_v * kStep * kQueries; }

  // ---- Which pairs are visible ------------------------------------------------------------------

  // Sets which queries a panel has, and which keys they see.
  void place(Buffers& buf, Panel& panel, int64_t b, int64_t hk, int64_t h, int64_t i0) const {
    const int64_t i1 = min_of(p.Lq, i0 + kQueries);
    panel.b = b, panel.hk = hk, panel.h = h, panel.i0 = i0, panel.i1 = i1;
    panel.apart = 0;
    const float slope = alibi_slope<float>(p, b, h);
    panel.lanes.i0 = i0, panel.lanes.i1 = i1, panel.lanes.any_slope = slope != 0;
    for (int64_t l = 0; l < kQueries; ++l)
      panel.lanes.position[l] = static_cast<float>(l), panel.lanes.slopes[l] = slope;
    panel.all = visible_to_all(p, i0, i1);
    panel.blocks = blocks_of(buf, b, h, i0, i1);
  }
  // The blocks of keys that some of the queries [i0, i1) see.
  Range blocks_of(Buffers& buf, int64_t b, int64_t h, int64_t i0, int64_t i1) const {
    const Range seen = visible_by_program(p, b, h, i0, i1, visible_to_any(p, i0, i1));
    Range blocks{0, 0};
    if (seen.begin < seen.end)
      blocks = {seen.begin / kBlockKeys, (seen.end + kBlockKeys - 1) / kBlockKeys};
    if (key_mask) {
      read_mask(buf, b, h);
      const bool* const excluded = buf.excluded;
      while (blocks.begin < blocks.end && excluded[blocks.end - 1]) --blocks.end;
      while (blocks.begin < blocks.end && excluded[blocks.begin]) ++blocks.begin;
    }
    return blocks;
  }
  // The mask of keys of a head, and the blocks that it excludes as a whole.
  void read_mask(Buffers& buf, int64_t b, int64_t h) const {
    if (!key_mask || buf.masked_head == h || (buf.masked_head >= 0 && p.mask.stride[1] == 0))
      return;
    buf.masked_head = h;
    read_mask_row(p, b, h, 0, 0, p.Lk, buf.mask);
    for (int64_t j = 0; j < all_blocks(); ++j)
      buf.excluded[j] = all_excluded(buf.mask + j * kBlockKeys, keys_in(j));
  }
  // The first block from j on of which a panel sees a key.
  int64_t next_block(const Buffers& buf, const Panel& panel, int64_t j, int64_t end) const {
    while (j < end && hidden(buf, panel, j)) ++j;
    return j;
  }

  // The queries of a panel.
  RowsOfTile<P> queries_of(const Panel& panel) const {
    return rows_of<P>(p.q, panel.b, panel.h, panel.i0, panel.i1, p.D);
  }
  // Half a block of keys or of values.
  RowsOfTile<P> keys_of(const Buffers& buf, int64_t b, int64_t hk, int64_t block,
                        int64_t half) const {
    return half_of(p.k, b, hk, block, half, p.D, buf.keys);
  }
  // The same for values.
  RowsOfTile<P> values_of(const Buffers& buf, int64_t b, int64_t hk, int64_t block,
                          int64_t half) const {
    return half_of(p.v, b, hk, block, half, p.Dv, buf.values);
  }

  // ---- From products to scores ------------------------------------------------------------------

  // Before the first key.
  void begin(State& state) const {
    for (int64_t i = 0; i < kQueries; ++i) state.exact[i] = 0;
    state.unsafe = state.settled = false;
    forget_references(state);
    clear(state);
  }
  // The same for queries that were computed before and keep their references. Those in fp16 start
  // from the first one again, because each rescaling rounds.
  static void begin_again(State& state) {
    state.waiting = false;
    if (Format::kNarrow) forget_references(state);
    clear(state);
  }

  // S of a block, from products to scores: -inf where a key is not visible. A query that sees its
  // first key takes its reference.
  __attribute__((noinline)) void make_scores(const Buffers& buf, Panel& panel, const Block& block,
                                             float* s) const {
    State& state = panel.state;
    VecF top[kVectors];
    if (!apply(buf, panel, block, s, top, state.waiting || Format::kNarrow)) return;
    if (state.waiting) take_references(panel, top);
    if constexpr (Format::kNarrow) raise_references(state, top);
  }

  // The maxima of the queries to be computed exactly, from the products of a block.
  void raise_maxima(const Buffers& buf, Panel& panel, const Block& block, float* s) const {
    State& state = panel.state;
    VecF top[kVectors];
    apply(buf, panel, block, s, top, true);
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF m = load(state.m + n * W);
      const VecI exact = (VecI)load(reinterpret_cast<const float*>(state.exact) + n * W);
      store(state.m + n * W, select<float>(exact, max_of(m, top[n]), m));
    }
  }

  // ---- The weights of a block -------------------------------------------------------------------

  // Of the weights of a block: the row of a part of a pair of keys.
  static FASTATTN_INLINE int64_t word_of(int64_t pair, int64_t part) {
    return (pair / 16 * kParts + part) * 16 + pair % 16;
  }

  // Dropped weights are zero, and stay in the sum.
  __attribute__((noinline)) void drop(const Buffers& buf, const Panel& panel, const Block& block,
                                      float* weights) const {
    dropout_mask<2>(dropout, panel.i0, block.j0, block.keys, kQueries, panel.h, p.index + panel.b,
                    buf.keep);
    for (int64_t pair = 0; pair < (block.keys + 1) / 2; ++pair)
      for (int64_t part = 0; part < kParts; ++part)
        FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
          float* const w = weights + word_of(pair, part) * kQueries + n * W;
          store(w, keep_lanes(load(w), buf.keep + pair * kQueries + n * W));
        }
  }

  // O += V^T P pair by pair, skipping weights of zero, for values that were packed as zeros.
  __attribute__((noinline)) void add_apart(const Buffers& buf, const Panel& panel,
                                           const Block& block, const float* weights) const {
    for (int64_t r = 0; r < block.keys; ++r) {
      if (!(block.values_apart >> r & 1)) continue;
      const RowsOfTile<P> v = values_of(buf, panel.b, panel.hk, block.j0 / kBlockKeys, r / 32);
      const Element* row = reinterpret_cast<const Element*>(weights + word_of(r / 2, 0) * kQueries);
      for (int64_t i = 0; i < kQueries; ++i) {
        const float weight = Format::sum(row + 2 * i + r % 2, 2 * 16 * kQueries);
        if (weight == 0) continue;
        for (int64_t d = 0; d < p.Dv; ++d)
          panel.state.o[d * kQueries + i] += weight * v.at(r % 32, d);
      }
    }
  }

  // ---- Sums and results -------------------------------------------------------------------------

  // O relative to references that were raised.
  __attribute__((noinline)) void rescale(State& state) const {
    state.raised = false;
    for (int64_t at = 0; at < output_floats(); at += W)
      store(state.o + at, load(state.o + at) * load(state.rescale + at % kQueries));
  }

  // total += O.
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

  // The head's sink, a key whose value is 0, joins the sums. It is the reference of a query that
  // sees no other key.
  __attribute__((noinline)) void add_sink(Panel& panel) const {
    State& state = panel.state;
    const FirstState<float> first = first_state<float>(p, rule, panel.b, panel.h);
    const VecF sink = splat(first.maximum), exponent = splat(rule.exponent);
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF before = load(state.m + n * W), l = load(state.l + n * W);
      const VecI alone = see_nothing<float>(before, l);
      const VecF m = select<float>(alone, sink, before);
      const VecF minus_m = select<float>(alone, minus_reference(m), load(state.minus_m + n * W));
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
  // weights of a row by more than 2^4, up to none at all. In fp16, which has fewer exponents, the
  // limit is 2^26.
  bool find_unsafe(Panel& panel) const {
    State& state = panel.state;
    if (state.fresh) return false;
    const float sink = first_state<float>(p, rule, panel.b, panel.h).maximum;
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
      constexpr float kMost = Format::kNarrow ? 0x1p26f : 0x1p29f;
      const VecI safe = summed & (minus_m < kMost) & (minus_m > -kMost) & (rest == 0);
      const VecI there = iota<float>() + float(n * W) < float(panel.i1 - panel.i0);
      const VecI unsafe = ~safe & there;
      store(reinterpret_cast<float*>(state.exact) + n * W, (VecF)unsafe);
      some |= unsafe;
      store(state.m + n * W, select<float>(unsafe, splat(sink), m));
    }
    return any(some);
  }

  // The state of a panel, to be merged with its states over other keys: o is [channels][queries].
  // Weights were relative to minus_m, which is a rounded product; here they are relative to m.
  void give(const State& state, float* m_out, float* l_out, float* o_out) const {
    const __m512 exponent = _mm512_set1_ps(rule.exponent);
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF m = load(state.m + n * W), minus_m = load(state.minus_m + n * W);
      const VecI exact = (VecI)load(reinterpret_cast<const float*>(state.exact) + n * W);
      const VecF rest = (VecF)_mm512_fmadd_ps((__m512)m, exponent, (__m512)minus_m);
      const VecI relative = exact | (VecI)(m == -kInf<float>);
      const VecF factor = exp2_any<false>(select<float>(relative, VecF{}, -rest));
      store(m_out + n * W, m);
      store(l_out + n * W, load(state.l + n * W) * factor);
      for (int64_t at = n * W; at < output_floats(); at += kQueries)
        store(o_out + at, state.fresh ? VecF{} : load(state.o + at) * factor);
    }
  }

  // Writes out and lse of a panel of queries.
  void finish(Panel& panel) const {
    State& state = panel.state;
    const int64_t rows = panel.i1 - panel.i0;
    if (state.fresh)  // it sees no key
      __builtin_memset(state.o, 0, static_cast<size_t>(output_floats()) * sizeof(float));
    finish_rows<P>(p, rule, dropout, panel.b, panel.h, panel.i0, rows, kQueries, state.m, state.l,
                   state.o);
    if (p.lse == nullptr) return;
    double* const lse = p.lse + (panel.b * p.Hq + panel.h) * p.lse_stride + panel.i0;
    // Weights were relative to minus_m, which is a rounded product.
    for (int64_t i = 0; i < rows; ++i)
      if (!state.exact[i] && state.m[i] != -kInf<float>)
        lse[i] -=
            (state.minus_m[i] + static_cast<double>(state.m[i]) * rule.exponent) * kLn2<double>;
  }

 private:
  const Sequence& p;
  const ScoreRule<float> rule;
  const DropoutRule dropout;
  const bool key_mask;
  const int64_t steps_v;  // of 32 channels, of values

  // Keys or values [32 half, 32 half + 32) of a block. The rows of a paged cache are copied to
  // `copies`, because they are not at equal distances.
  RowsOfTile<P> half_of(const Tensor4& x, int64_t b, int64_t hk, int64_t block, int64_t half,
                        int64_t channels, Storage* copies) const {
    const int64_t begin = min_of(p.Lk, block * kBlockKeys + 32 * half);
    const int64_t end = min_of(p.Lk, begin + 32);
    if (p.pages == nullptr) return rows_of<P>(x, b, hk, begin, end, channels);
    Storage* const copy = copies + half * 32 * channels;
    const Storage* const base = static_cast<const Storage*>(x.data) + hk * x.stride[1];
    for (int64_t j = begin; j < end; ++j)
      __builtin_memcpy(
          copy + (j - begin) * channels,
          base + p.pages[j / p.page_size] * x.stride[0] + j % p.page_size * x.stride[2],
          static_cast<size_t>(channels) * sizeof(Storage));
    return {copy, channels, 1, channels, first_bits(end - begin)};
  }

  // A mask excludes all pairs of a block.
  bool hidden(const Buffers& buf, const Panel& panel, int64_t block) const {
    if (key_mask && buf.excluded[block]) return true;
    const int64_t j0 = block * kBlockKeys;
    const Range keys =
        visible_by_program(p, panel.b, panel.h, panel.i0, panel.i1, {j0, j0 + keys_in(block)});
    return keys.begin >= keys.end;
  }

  // The state of a panel that has read no keys.
  static void clear(State& state) {
    state.fresh = true, state.totalled = false, state.added = 0;
    state.raised = false;
    __builtin_memset(state.l, 0, sizeof state.l);
  }
  // Gives up the references of lanes that are not exact, for the next block to choose.
  static void forget_references(State& state) {
    state.waiting = true;
    for (int64_t i = 0; i < kQueries; ++i)
      if (!state.exact[i]) state.m[i] = -kInf<float>, state.minus_m[i] = 0;
  }

  // Powers of two: weights in fp16 at the reference, and the largest one.
  static constexpr float kPower = 8, kMostPower = 15;

  // The reference of a maximum as a summand of the exponent. In fp16, weights are stored 2^kPower
  // times larger.
  FASTATTN_INLINE VecF minus_reference(VecF m) const {
    const VecF minus_m = m * -rule.exponent;
    return select<float>(m == -kInf<float>, VecF{}, Format::kNarrow ? minus_m + kPower : minus_m);
  }
  // A query that sees its first key takes its reference.
  void take_references(Panel& panel, const VecF* top) const {
    State& state = panel.state;
    VecI still{};
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF before = load(state.m + n * W);
      const VecF m = select<float>(before == -kInf<float>, top[n], before);
      store(state.m + n * W, m);
      store(state.minus_m + n * W, minus_reference(m));
      still |=
          (VecI)(m == -kInf<float>)&(iota<float>() + float(n * W) < float(panel.i1 - panel.i0));
    }
    state.waiting = any(still);
  }
  // Raises the references whose block has a weight above 2^kMostPower, and rescales their sums.
  void raise_references(State& state, const VecF* top) const {
    VecI some{};
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const VecF m = load(state.m + n * W), minus_m = load(state.minus_m + n * W);
      const VecI higher = (top[n] > m) & (top[n] * rule.exponent + minus_m > kMostPower);
      const VecF raised = select<float>(higher, minus_reference(top[n]), minus_m);
      const VecF factor = select<float>(higher, exp2_any<false>(raised - minus_m), splat(1.0f));
      store(state.m + n * W, select<float>(higher, top[n], m));
      store(state.minus_m + n * W, raised);
      store(state.l + n * W, load(state.l + n * W) * factor);
      store(state.rescale + n * W, factor);
      some |= higher;
    }
    state.raised = any(some);
  }

  // Whether any lane is not 0.
  static FASTATTN_INLINE bool any(VecI lanes) {
    int32_t found[W], some = 0;
    store(reinterpret_cast<float*>(found), (VecF)lanes);
    for (int32_t x : found) some |= x;
    return some != 0;
  }

  // Turns the products of a block into scores, and finds their maximum over the keys if it is
  // wanted or comes for nothing; else false.
  bool apply(const Buffers& buf, const Panel& panel, const Block& block, float* s, VecF* top,
             bool wants_top) const {
    const int64_t j0 = block.j0, keys = block.keys;
    for (int64_t r = keys * kQueries; r < kBlockKeys * kQueries; r += W)
      store(s + r, splat(-kInf<float>));
    if (kParts > 1) score_apart(buf, panel, block, s);
    const bool edge = j0 < panel.all.begin || j0 + keys > panel.all.end;
    Bias<float> bias;
    if (key_mask) bias.keys = buf.mask + j0;
    // A block whose pairs a program excludes is skipped, so a tile is filled unless all are
    // visible.
    if (has_bias_of_pairs(p) && pack_bias(p, panel.b, panel.h, panel.i0, panel.i1, j0, j0 + keys,
                                          kQueries, buf.bias) != Coverage::all)
      bias.tile = buf.bias;
    if (rule.natural || bias.exists() || edge) {
      apply_rule<float, kVectors>(p, rule, s, keys, panel.lanes, j0, bias, nullptr, top);
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
  void score_apart(const Buffers& buf, const Panel& panel, const Block& block, float* s) const {
    if (block.keys_apart == 0 && panel.apart == 0) return;
    const RowsOfTile<P> q = queries_of(panel);
    for (int64_t r = 0; r < block.keys; ++r) {
      const RowsOfTile<P> k = keys_of(buf, panel.b, panel.hk, block.j0 / kBlockKeys, r / 32);
      for (int64_t i = 0; i < panel.i1 - panel.i0; ++i)
        if ((block.keys_apart >> r | panel.apart >> i) & 1)
          s[r * kQueries + i] = dot_apart(q, i, k, r % 32);
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
