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
    float* q;           // [steps][part][16 words][queries] of the panel that advance() reached
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
    Range blocks;                     // of keys, that its panels see
    int64_t packed_piece = -1;        // in buf.keys and buf.values
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

  // Statistics and outputs of the first `count` panels of the buffers. Writes out and lse as soon as
  // a panel is done, if they are wanted.
  void compute(Task& task, int64_t count, bool writes) const {
    Panel* const panels = task.buf.panels;
    for (int64_t n = 0; n < count; ++n) rows.begin(panels[n].state);
    const auto settle = [&](Panel& panel) {
      rows.add_up(panel.state);
      if (p.sinks != nullptr) rows.add_sink(panel);
      panel.state.unsafe = rows.find_unsafe(panel);
      panel.state.settled = true;
      if (writes && !panel.state.unsafe) rows.finish(panel);
    };
    each_piece(task, [&](Range piece) {
      attend<false>(task, count, piece, [&](Panel& panel) {
        if (panel.blocks.end <= piece.end) settle(panel);
      });
    });
    bool safe = true;
    for (int64_t n = 0; n < count; ++n) {
      if (!panels[n].state.settled) settle(panels[n]);
      safe &= !panels[n].state.unsafe;
    }
    if (!safe) compute_exactly(task, count, writes);
  }

 private:
  const Sequence& p;
  const int64_t most_blocks;
  const int64_t steps, steps_v;  // of 32 channels, of queries and of values

  int64_t key_elements() const { return kBlockKeys * steps * kStep * kParts; }  // of a packed block
  int64_t value_elements() const { return kBlockKeys * steps_v * kStep * kParts; }

  // f(blocks) of each piece of the keys.
  template <class F>
  FASTATTN_INLINE void each_piece(const Task& task, F f) const {
    for (int64_t j = task.blocks.begin; j < task.blocks.end; j += piece()) f({j, j + piece()});
  }

  // A block of the keys that panel n sees, and the end of its blocks of a piece.
  struct Meeting {
    int64_t n = -1, block = 0, end = 0;
  };
  // The next meeting of a piece of the keys: all blocks of a panel, then the next panel. Packs what
  // its scores need. False after the last one.
  bool advance(Task& task, int64_t count, Range piece, bool unsafe_only, Meeting& x) const {
    Buffers& buf = task.buf;
    if (x.n >= 0) {
      x.block = rows.next_block(buf.rows, buf.panels[x.n], x.block + 1, x.end);
      if (x.block < x.end) return true;
    }
    while (++x.n < count) {
      Panel& panel = buf.panels[x.n];
      if (unsafe_only && !panel.state.unsafe) continue;
      rows.read_mask(buf.rows, panel.b, panel.h);
      x.end = min_of(panel.blocks.end, piece.end);
      x.block = rows.next_block(buf.rows, panel, max_of(panel.blocks.begin, piece.begin), x.end);
      if (x.block >= x.end) continue;
      pack_piece(task, piece.begin);
      pack_panel_of(panel, buf.q);
      if (x.n + 1 < count) read_ahead(task, buf.panels[x.n + 1], x.end - x.block);
      return true;
    }
    return false;
  }
  // Reads ahead the queries of a panel during so many blocks.
  void read_ahead(Task& task, const Panel& panel, int64_t blocks) const {
    const RowsOfTile<P> q = rows.queries_of(panel);
    task.next_panel = {};
    task.next_panel.add(q.data, p.q.stride, panel.i1 - panel.i0, p.D);
    task.next_panel.share(blocks);
  }

  // Once more, for the panels that need it: first the maxima of all keys, then everything.
  __attribute__((noinline)) void compute_exactly(Task& task, int64_t count, bool writes) const {
    Panel* const panels = task.buf.panels;
    each_piece(task, [&](Range piece) { find_maxima(task, count, piece); });
    for (int64_t n = 0; n < count; ++n)
      if (panels[n].state.unsafe) rows.begin_again(panels[n].state);
    each_piece(task, [&](Range piece) { attend<true>(task, count, piece, [](Panel&) {}); });
    for (int64_t n = 0; n < count; ++n) {
      Panel& panel = panels[n];
      if (!panel.state.unsafe) continue;
      rows.add_up(panel.state);
      if (p.sinks != nullptr) rows.add_sink(panel);
      if (writes) rows.finish(panel);
    }
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
  void pack_panel_of(Panel& panel, float* to) const {
    RowsOfTile<P> q = rows.queries_of(panel);
    if constexpr (kParts > 1) q.rows_in_use &= ~(panel.apart = separate_rows(q));
    pack_queries<Format>(q, steps, to);
  }

  // Block `block` of the keys, as the softmax reads it.
  Block block_of(const Task& task, int64_t block) const {
    const int64_t n = block - task.packed_piece;
    return {block * kBlockKeys, rows.keys_in(block), task.buf.keys_apart[n],
            task.buf.values_apart[n]};
  }
  // The operands of S = K Q^T for one block.
  Operands score_operands(const Task& task, const Meeting& x, float* s) const {
    return {task.buf.keys + (x.block - task.packed_piece) * key_elements(),
            task.buf.q,
            s,
            2,
            steps,
            false};
  }
  // The operands of O += P V for one block.
  Operands output_operands(const Task& task, const Meeting& x, const float* weights) const {
    const State& state = task.buf.panels[x.n].state;
    return {task.buf.values + (x.block - task.packed_piece) * value_elements(),
            weights,
            state.o,
            steps_v,
            2,
            !state.fresh};
  }

  // The first `count` panels and their blocks of a piece: O += P V, l += P. The last block of a panel
  // overlaps the first one of the next. Calls done(panel) after its last block.
  template <bool kExact, class Done>
  __attribute__((noinline)) void attend(Task& task, int64_t count, Range piece, Done done) const {
    Buffers& buf = task.buf;
    Squares<Format> squares(buf.scratch_square);
    Meeting x, before;
    if (!advance(task, count, piece, kExact, x)) return;
    multiply(squares, score_operands(task, x, buf.s[0]));
    rows.make_scores(buf.rows, buf.panels[x.n], block_of(task, x.block), buf.s[0]);
    int64_t turn = 0;
    for (bool more = true; more; ++turn) {
      Panel& panel = buf.panels[x.n];
      State& state = panel.state;
      Meeting after = x;
      more = advance(task, count, piece, kExact, after);
      task.next_panel.read_some(), task.next_head.read_some();
      const bool values = before.n >= 0;
      float* const weights = buf.weights[turn % 2];
      float* const next = buf.s[(turn + 1) % 2];
      const float* const old = buf.weights[(turn + 1) % 2];
      const Operands scores = more ? score_operands(task, after, next) : Operands{};
      const Operands outputs = values ? output_operands(task, before, old) : Operands{};
      // The vector work of 64 units is spread over the steps: 8 of them with 64 channels.
      if (kExact || steps + steps_v > 4)
        weigh<kExact, 4>(squares, state, buf.s[turn % 2], weights, scores, outputs);
      else
        weigh<kExact, kExact ? 4 : 8>(squares, state, buf.s[turn % 2], weights, scores, outputs);
      if (values)
        end_outputs(squares, task, before, old);
      else
        squares.flush();
      if (values && before.n != x.n) {
        squares.flush();
        done(buf.panels[before.n]);
      }
      if (Format::kNarrow && state.raised) {
        squares.flush();
        rows.rescale(state);
      }
      if (p.dropout_p > 0) rows.drop(buf.rows, panel, block_of(task, x.block), weights);
      if (more) rows.make_scores(buf.rows, buf.panels[after.n], block_of(task, after.block), next);
      before = x, x = after;
    }
    squares.flush();
    const float* const weights = buf.weights[(turn + 1) % 2];
    multiply(squares, output_operands(task, before, weights));
    end_outputs(squares, task, before, weights);
    done(buf.panels[before.n]);
  }

  // What the products of a block's outputs leave to do.
  void end_outputs(Squares<Format>& squares, Task& task, const Meeting& x,
                   const float* weights) const {
    Panel& panel = task.buf.panels[x.n];
    State& state = panel.state;
    state.fresh = false;
    if (task.buf.values_apart[x.block - task.packed_piece] != 0) {
      squares.flush();
      rows.add_apart(task.buf.rows, panel, block_of(task, x.block), weights);
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
    if constexpr (kExact) power = select<float>(x.exact, (score - x.reference) * exponent, power);
    return exp2_any<P::kCoarseExp>(power);
  }

  // The maximum score of each query of the unsafe panels, before any exponential.
  void find_maxima(Task& task, int64_t count, Range piece) const {
    float* const s = task.buf.s[0];
    for (Meeting x; advance(task, count, piece, true, x);) {
      Squares<Format> squares(task.buf.scratch_square);
      multiply(squares, score_operands(task, x, s));
      rows.raise_maxima(task.buf.rows, task.buf.panels[x.n], block_of(task, x.block), s);
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
