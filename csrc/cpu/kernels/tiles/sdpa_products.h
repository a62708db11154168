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
    return buf;
  }

  // Panels of one key head.
  struct Task {
    Buffers buf;
    int64_t b, hk;
    Range blocks;               // of keys, that its panels see
    int64_t packed_piece = -1;  // in buf.keys and buf.values
    RowsAhead next_panel, next_head;  // queries, and keys and values
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
    return {task.buf.keys + (block - task.packed_piece) * key_elements(), task.buf.q, s, 2, steps,
            false};
  }
  // The operands of O += P V for one block.
  Operands output_operands(const Task& task, const State& state, int64_t block,
                           const float* weights) const {
    return {task.buf.values + (block - task.packed_piece) * value_elements(), weights, state.o,
            steps_v, 2, !state.fresh};
  }

  // A panel and its blocks of a piece: O += P V, l += P.
  template <bool kExact>
  __attribute__((noinline)) void attend(Task& task, Panel& panel, Range blocks) const {
    Buffers& buf = task.buf;
    State& state = panel.state;
    Squares<Format> squares(buf.scratch_square);
    const auto next_block = [&](int64_t j) {
      return rows.next_block(buf.rows, panel, j, blocks.end);
    };
    int64_t j = next_block(blocks.begin), before = -1, turn = 0;
    if (j == blocks.end) return;
    multiply(squares, score_operands(task, j, buf.s[0]));
    rows.make_scores(buf.rows, panel, block_of(task, j), buf.s[0]);
    for (; j < blocks.end; ++turn) {
      const int64_t after = next_block(j + 1);
      task.next_panel.read_some(), task.next_head.read_some();
      const bool scores = after < blocks.end, values = before >= 0;
      float* const weights = buf.weights[turn % 2];
      float* const next = buf.s[(turn + 1) % 2];
      const float* const old = buf.weights[(turn + 1) % 2];
      const Operands next_scores = scores ? score_operands(task, after, next) : Operands{};
      const Operands outputs = values ? output_operands(task, state, before, old) : Operands{};
      const auto weigh_by = [&](auto units) {
        weigh<kExact, decltype(units)::value>(squares, state, buf.s[turn % 2], weights, next_scores,
                                              outputs);
      };
      if (kExact || steps + steps_v > 4)
        weigh_by(Width<4>());
      else
        weigh_by(Width<kExact ? 4 : 8>());
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
    multiply(squares, output_operands(task, state, before, weights));
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

  // Products without vector work.
  __attribute__((noinline)) static void multiply(Squares<Format>& squares, const Operands& x) {
    squares.multiply(x, {}, [](auto) {});
    squares.flush();
  }

  // Weights of a block from its scores, with the products of the scores of the next block and of
  // the outputs of the one before in between, kUnits units of vector work a step. A unit is half of
  // the queries of a pair of keys.
  template <bool kExact, int kUnits>
  __attribute__((noinline)) void weigh(Squares<Format>& squares, State& state, const float* s,
                                       float* weights, const Operands& scores,
                                       const Operands& outputs) const {
    const VecF exponent = splat(rows.exponent());
    static_assert(kVectors == 2 && kUnits % 2 == 0);
    // Named, because the compiler keeps no array of vectors in registers.
    Half first = half_of<kExact>(state, 0), second = half_of<kExact>(state, 1);
    const float* const end = s + kBlockKeys * kQueries;
    const auto unit = [&](Half& x, int n) __attribute__((always_inline)) {
      const VecF even = weight<kExact>(x, load(s + n * W), exponent);
      const VecF odd = weight<kExact>(x, load(s + kQueries + n * W), exponent);
      x.sum += even + odd;
      __m512i parts[kParts];
      Format::split_pairs(even, odd, parts);
      FASTATTN_UNROLL for (int part = 0; part < kParts; ++part)
          store(weights + part * 16 * kQueries + n * W, (VecF)parts[part]);
    };
    const auto next_pair = [&]() __attribute__((always_inline)) {
      s += 2 * kQueries, weights += kQueries;
      // Of each 16 pairs there are all parts, one after the other.
      if (kParts > 1 && s == end - kBlockKeys / 2 * kQueries)
        weights += (kParts - 1) * 16 * kQueries;
    };
    // Units of the first and of the second half of the queries in turn.
    const auto between = [&](auto product) __attribute__((always_inline)) {
      constexpr int n = decltype(product)::value, kProducts = Squares<Format>::kProducts;
      constexpr int kBegin = n * kUnits / kProducts, kEnd = (n + 1) * kUnits / kProducts;
      if constexpr (kBegin == kEnd) return;
      if (s == end) return;
      if constexpr (kBegin % 2 == 0) unit(first, 0);
      if constexpr (kBegin % 2 == 1 || kBegin + 1 < kEnd) unit(second, 1), next_pair();
    };
    squares.multiply(scores, outputs, between);
    for (; s < end; next_pair()) unit(first, 0), unit(second, 1);
    store(state.l, kSumOfBlock ? load(state.l) + first.sum : first.sum);
    store(state.l + W, kSumOfBlock ? load(state.l + W) + second.sum : second.sum);
  }

  // What the weights of half of the queries are relative to, and their sum.
  struct Half {
    VecF minus_m, sum, reference;
    VecI exact;
  };
  template <bool kExact>
  static FASTATTN_INLINE Half half_of(const State& state, int n) {
    Half x{load(state.minus_m + n * W), kSumOfBlock ? VecF{} : load(state.l + n * W), {}, {}};
    if constexpr (kExact) {
      const VecF m = load(state.m + n * W);
      x.reference = select<float>(m == -kInf<float>, VecF{}, m);
      x.exact = (VecI)load(reinterpret_cast<const float*>(state.exact) + n * W);
    }
    return x;
  }
  template <bool kExact>
  static FASTATTN_INLINE VecF weight(const Half& x, VecF score, VecF exponent) {
    VecF power = score * exponent + x.minus_m;
    if constexpr (kExact)
      power = select<float>(x.exact, (score - x.reference) * exponent, power);
    return exp2_any<P::kCoarseExp>(power);
  }

  // The maximum score of each query of a panel, before any exponential.
  void find_maxima(Task& task, Panel& panel, Range blocks) const {
    const auto next_block = [&](int64_t j) {
      return rows.next_block(task.buf.rows, panel, j, blocks.end);
    };
    float* const s = task.buf.s[0];
    for (int64_t j = next_block(blocks.begin); j < blocks.end; j = next_block(j + 1)) {
      Squares<Format> squares(task.buf.scratch_square);
      multiply(squares, score_operands(task, j, s));
      rows.raise_maxima(task.buf.rows, panel, block_of(task, j), s);
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
