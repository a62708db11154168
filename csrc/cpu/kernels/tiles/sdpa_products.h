// The main loop of attention on tiles: S^T = K Q^T and O^T = V^T P^T of panels of 32 queries, which
// are across the lanes, against blocks of 64 keys. While the vector units compute the weights of
// block j, the tile unit computes the scores of block j + 1 and adds the outputs of block j - 1, a
// few instructions of each in turn.
//
// In fp32 each operand is two or three parts (parts.h), and a square of a product is one for each
// product of parts. Rows that parts do not represent are zero there, and their scores and outputs
// are computed pair by pair.
#pragma once
#include "sdpa_rows.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class TileProducts {
  typedef TileRows<P> Rows;
  typedef typename Rows::State State;
  typedef typename Rows::Block Block;
  typedef typename P::Format Format;
  typedef PartProducts<Format::kParts> Products;
  static constexpr int kParts = Format::kParts;
  static constexpr int W = Rows::W, kVectors = Rows::kVectors;
  static constexpr int64_t kQueries = Rows::kQueries;
  // Bytes of keys and values that all panels of a task read, one piece after the other: half of the
  // L2 cache of processors with tiles, so that a piece is read from memory only once.
  static constexpr int64_t kPieceBytes = 1 << 20;
  // In fp32, blocks whose outputs are summed before they are added to the others: each adds as many
  // roundings as there are products of parts.
  static constexpr int64_t kBlocksOfSum = 16;
  // The weights of a block have a sum of their own. A chain over all keys rounds more, which does
  // not show in bf16.
  static constexpr bool kSumOfBlock = kParts > 1 || Format::kNarrow;

 public:
  typedef typename Rows::Panel Panel;

  // A task has at most this many blocks of keys.
  explicit TileProducts(const Sequence& params, int64_t most_blocks = INT64_MAX)
      : rows(params),
        p(params),
        most_blocks(most_blocks),
        steps((params.D + kStep - 1) / kStep),
        steps_v((params.Dv + kStep - 1) / kStep) {}

  const TileRows<P> rows;

  struct Buffers {
    float* q;           // [steps][part][16 words][queries]
    float* s[2];        // [keys of a block][queries] scores, of two blocks in turn
    float* weights[2];  // [2][part][16 words][queries]
    typename Rows::Buffers rows;
    float* scratch_square;  // [32][32]
    Square* squares;        // of the scores, then of the outputs
    Element* keys;          // [piece] packed blocks
    Element* values;        // [piece] packed blocks
    // Per block, which keys and which values are packed as zeros, and computed pair by pair.
    uint64_t *keys_apart, *values_apart;  // [piece]
    Panel* panels;                        // as many as are computed together
    size_t bytes;
  };

  // For this many panels at a time.
  Buffers allocate(void* base, int64_t together) const {
    Arena a(base);
    Buffers buf;
    buf.q = a.take<float>(steps * kStep / 2 * kQueries * kParts);
    for (float*& s : buf.s) s = a.take<float>(kBlockKeys * kQueries);
    for (float*& w : buf.weights) w = a.take<float>(kBlockKeys / 2 * kQueries * kParts);
    buf.rows = rows.allocate(a);
    buf.scratch_square = a.take<float>(kQueries * kQueries);
    buf.squares = a.take<Square>(score_squares() + output_squares());
    buf.keys = a.take<Element>(piece() * key_elements());
    buf.values = a.take<Element>(piece() * value_elements());
    buf.keys_apart = a.take<uint64_t>(piece()), buf.values_apart = a.take<uint64_t>(piece());
    buf.panels = a.take<Panel>(together);
    float* o = a.take<float>(together * rows.output_floats());
    float* total = a.take<float>(kParts > 1 ? together * rows.output_floats() : 0);
    buf.bytes = a.used();
    if (base == nullptr) return buf;
    for (int64_t n = 0; n < together; ++n) {
      buf.panels[n].state.o = o + n * rows.output_floats();
      buf.panels[n].state.total = total + n * rows.output_floats();
    }
    list_squares(buf.squares);
    return buf;
  }

  // Panels of one key head.
  struct Task {
    Buffers buf;
    int64_t b, hk;
    Range blocks;               // of keys, that its panels see
    int64_t packed_piece = -1;  // in buf.keys and buf.values
  };

  // Blocks of a piece of the keys: all of them if they fit, else pieces of the same size.
  int64_t piece() const {
    const int64_t block =
        (key_elements() + value_elements()) * static_cast<int64_t>(sizeof(Element));
    const int64_t most = max_of<int64_t>(1, kPieceBytes / block);
    const int64_t all = min_of(rows.all_blocks(), most_blocks);
    const int64_t pieces = max_of<int64_t>(1, (all + most - 1) / most);
    return (all + pieces - 1) / pieces;
  }

  // Statistics and outputs of the first `count` panels of the buffers.
  void compute(Task& task, int64_t count) const {
    each(task, count, [&](Panel& panel) { rows.begin(panel.state); });
    each_piece(task, count, false,
               [&](Panel& panel, Range blocks) { attend<false>(task, panel, blocks); });
    bool safe = true;
    each(task, count, [&](Panel& panel) {
      rows.add_up(panel.state);
      if (p.sinks != nullptr) rows.add_sink(panel);
      panel.state.unsafe = rows.find_unsafe(panel);
      safe &= !panel.state.unsafe;
    });
    if (!safe) compute_exactly(task, count);
  }

 private:
  const Sequence& p;
  const int64_t most_blocks;
  const int64_t steps, steps_v;  // of 32 channels, of queries and of values

  int64_t key_elements() const { return kBlockKeys * steps * kStep * kParts; }  // of a packed block
  int64_t value_elements() const { return kBlockKeys * steps_v * kStep * kParts; }

  // Squares of one block: for the scores, and for the outputs.
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

  // f(panel) of the first `count` panels, with the mask of keys of its head.
  template <class F>
  FASTATTN_INLINE void each(Task& task, int64_t count, F f) const {
    for (int64_t n = 0; n < count; ++n) {
      Panel& panel = task.buf.panels[n];
      rows.read_mask(task.buf.rows, panel.b, panel.h);
      f(panel);
    }
  }
  // f(panel, its blocks of a piece), piece by piece, all panels with one piece before the next.
  // Keys, values and the panel's queries are packed.
  template <class F>
  FASTATTN_INLINE void each_piece(Task& task, int64_t count, bool unsafe_only, F f) const {
    for (int64_t j = task.blocks.begin; j < task.blocks.end; j += piece()) {
      each(task, count, [&](Panel& panel) {
        const Range own{max_of(panel.blocks.begin, j), min_of(panel.blocks.end, j + piece())};
        if (own.begin >= own.end || (unsafe_only && !panel.state.unsafe)) return;
        pack_piece(task, j);
        pack_panel_of(task, panel);
        f(panel, own);
      });
    }
  }

  // Once more, for the panels that need it: first the maxima of all keys, then everything.
  __attribute__((noinline)) void compute_exactly(Task& task, int64_t count) const {
    each_piece(task, count, true,
               [&](Panel& panel, Range blocks) { find_maxima(task, panel, blocks); });
    each(task, count, [&](Panel& panel) {
      if (panel.state.unsafe) rows.begin_again(panel.state);
    });
    each_piece(task, count, true,
               [&](Panel& panel, Range blocks) { attend<true>(task, panel, blocks); });
    each(task, count, [&](Panel& panel) {
      if (!panel.state.unsafe) return;
      rows.add_up(panel.state);
      if (p.sinks != nullptr) rows.add_sink(panel);
    });
  }

  // Packs one piece of keys and values for the tiles, once for all panels.
  void pack_piece(Task& task, int64_t first) const {
    if (task.packed_piece == first) return;
    task.packed_piece = first;
    for (int64_t n = 0; n < min_of(piece(), task.blocks.end - first); ++n) {
      RowsOfTile<P> k[2], v[2];
      uint64_t keys = 0, values = 0;
      for (int64_t half = 0; half < 2; ++half) {
        k[half] = rows.keys_of(task.buf.rows, task.b, task.hk, first + n, half);
        v[half] = rows.values_of(task.buf.rows, task.b, task.hk, first + n, half);
        const uint32_t k_apart = kParts > 1 ? separate_rows(k[half]) : 0;
        const uint32_t v_apart = kParts > 1 || rows.excludes() ? separate_rows(v[half]) : 0;
        k[half].rows_in_use &= ~k_apart, v[half].rows_in_use &= ~v_apart;
        keys |= static_cast<uint64_t>(k_apart) << 32 * half;
        values |= static_cast<uint64_t>(v_apart) << 32 * half;
      }
      task.buf.keys_apart[n] = keys, task.buf.values_apart[n] = values;
      pack_keys<Format>(k, steps, task.buf.keys + n * key_elements());
      pack_values<Format>(v, steps_v, task.buf.values + n * value_elements());
    }
  }
  // Packs the queries of a panel. In fp32, rows that do not split into parts are kept apart.
  void pack_panel_of(Task& task, Panel& panel) const {
    RowsOfTile<P> q = rows.queries_of(panel);
    if constexpr (kParts > 1) q.rows_in_use &= ~(panel.apart = separate_rows(q));
    pack_queries<Format>(q, steps, task.buf.q);
  }

  // Block `block` of the keys, as the softmax reads it.
  Block block_of(const Task& task, int64_t block) const {
    const int64_t n = block - task.packed_piece;
    return {block * kBlockKeys, rows.keys_in(block), task.buf.keys_apart[n],
            task.buf.values_apart[n]};
  }
  // The operands of S = K Q^T for one block.
  Operands score_operands(const Task& task, int64_t block, float* s) const {
    return {task.buf.keys + (block - task.packed_piece) * key_elements(), task.buf.q, s, false};
  }
  // The operands of O += P V for one block.
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
    Squares<Format> squares(buf.scratch_square);
    const auto nothing = []() {};
    const auto next_block = [&](int64_t j) {
      return rows.next_block(buf.rows, panel, j, blocks.end);
    };
    int64_t j = next_block(blocks.begin), before = -1, turn = 0;
    if (j == blocks.end) return;
    squares.multiply(buf.squares, 0, second, second, score_operands(task, j, buf.s[0]), {},
                     nothing);
    squares.flush();
    rows.make_scores(buf.rows, panel, block_of(task, j), buf.s[0]);
    for (; j < blocks.end; ++turn) {
      const int64_t after = next_block(j + 1);
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
      if (Format::kNarrow && state.raised) {
        squares.flush();
        rows.rescale(state);
      }
      if (p.dropout_p > 0) rows.drop(buf.rows, panel, block_of(task, j), weights);
      if (scores) rows.make_scores(buf.rows, panel, block_of(task, after), next);
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
  void end_outputs(Squares<Format>& squares, Task& task, Panel& panel, int64_t block,
                   const float* weights) const {
    State& state = panel.state;
    state.fresh = false;
    if (task.buf.values_apart[block - task.packed_piece] != 0) {
      squares.flush();
      rows.add_apart(task.buf.rows, panel, block_of(task, block), weights);
    }
    if (kParts > 1 && ++state.added % kBlocksOfSum == 0) {
      squares.flush();
      rows.add_to_total(state);
    }
  }

  // Weights of a block from its scores, with squares [begin, end) of the scores of the next block
  // and the outputs of the one before in between. A unit of vector work is a pair of keys.
  template <bool kExact>
  __attribute__((noinline)) void weigh(Squares<Format>& squares, const Buffers& buf, State& state,
                                       const float* s, float* weights, int64_t begin, int64_t end,
                                       Operands scores, Operands outputs) const {
    const VecF exponent = splat(rows.exponent());
    VecF minus_m[kVectors], sum[kVectors], reference[kVectors];
    VecI exact[kVectors];
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      minus_m[n] = load(state.minus_m + n * W);
      sum[n] = kSumOfBlock ? VecF{} : load(state.l + n * W);
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
        Format::split_pairs(even, odd, parts);
        FASTATTN_UNROLL for (int part = 0; part < kParts; ++part)
            store(weights + Rows::word_of(pair, part) * kQueries + n * W, (VecF)parts[part]);
      }
      ++pair;
    };
    const int64_t products = 4 * (end - begin);
    const auto between = [&]() __attribute__((always_inline)) {
      for (due += kPairs; due >= products; due -= products) weigh_pair();
    };
    squares.multiply(buf.squares, begin, score_squares(), end, scores, outputs, between);
    while (pair < kPairs) weigh_pair();
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n)
        store(state.l + n * W, kSumOfBlock ? load(state.l + n * W) + sum[n] : sum[n]);
  }

  // The maximum score of each query of a panel, before any exponential.
  void find_maxima(Task& task, Panel& panel, Range blocks) const {
    const auto next_block = [&](int64_t j) {
      return rows.next_block(task.buf.rows, panel, j, blocks.end);
    };
    float* const s = task.buf.s[0];
    for (int64_t j = next_block(blocks.begin); j < blocks.end; j = next_block(j + 1)) {
      Squares<Format> squares(task.buf.scratch_square);
      squares.multiply(task.buf.squares, 0, score_squares(), score_squares(),
                       score_operands(task, j, s), {}, []() {});
      squares.flush();
      rows.raise_maxima(task.buf.rows, panel, block_of(task, j), s);
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
