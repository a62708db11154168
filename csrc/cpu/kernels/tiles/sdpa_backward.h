// One unit of the backward pass on tiles: a key head and a chunk of its keys, against all queries
// of its head group. The scores are transposed, keys by queries, as in the unit on vectors:
//
//   S = K Q^T     dP = V dO^T     P = 2^(S - lse)     dS = P o (dP - delta)
//   dV += P dO    dK += dS Q      dQ^T += K^T dS
//
// sdpa_gradients.h has what is on vectors, from S and dP to P and dS; here are the products.
//
// Loads and stores of sums take longer than products. So keys and queries meet in blocks of 4 x 8
// squares of 32 x 32 pairs, and a square of a sum is loaded and stored once for up to eight
// squares. A block has two phases: square by square, S and dP on tiles, then P and dS on vectors;
// and the sums, on tiles alone. Queries are taken in panels that stay in L2 with their dQ.
//
// In fp32 each operand is two or three parts (parts.h), W and dS too, and a square of a product is
// one for each product of parts. Rows that parts do not represent are zero there, and what they
// contribute is computed pair by pair. In fp16, dS is summed as two parts of bf16.
#pragma once
#include "operands.h"
#include "sdpa_gradients.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class TileBackwardUnit {
  typedef typename P::Storage Storage;
  typedef typename P::Acc T;
  typedef TileGradients<P> Gradients;
  typedef typename Gradients::Square Square;
  typedef typename Gradients::Block Block;
  typedef typename P::Format Format;
  typedef typename P::GradFormat GradFormat;
  static constexpr int kParts = Format::kParts, kGradParts = GradFormat::kParts;
  static constexpr int kMostParts = kGradParts > kParts ? kGradParts : kParts;
  static constexpr int W = kLanes<T>;
  static constexpr int kSide = Gradients::kSide, kSquare = Gradients::kSquare;
  template <class Of>
  static constexpr int64_t kTiles = Gradients::template kTiles<Of>;
  static constexpr int kRows = Gradients::kRows, kColumns = Gradients::kColumns;
  static constexpr int kKeysOfBlock = Gradients::kKeysOfBlock;
  static constexpr int kQueriesOfBlock = Gradients::kQueriesOfBlock;

  // A chunk packs all queries of its head group, so that few heads make many tasks. With 1024
  // keys, the packing is a small part of its work.
  static constexpr int64_t kChunkKeys = 1024, kMostChunks = 8;
  // Queries of a panel times channels, so that its packed operands and dQ stay in L2: 0.75 MiB, or
  // 0.9 MiB in parts.
  static constexpr int64_t kPanelElements = 1 << (kMostParts > 1 ? 15 : 16);
  // In fp32, queries whose dK and dV are summed before they are added to the others: each square
  // adds as many roundings as there are products of parts. A multiple of a panel.
  static constexpr int64_t kQueriesOfSum = 1024;
  // Gradients are often smaller than other numbers, and computing pairs one by one is slow.
  static constexpr float kLeastGradient = 0x1p-60f;

 public:
  explicit TileBackwardUnit(const Sequence& params)
      : p(params),
        chunk(round_up(max_of(kChunkKeys, (params.Lk + kMostChunks - 1) / kMostChunks),
                       kKeysOfBlock)),
        dp(round_up(params.D, kSide)),
        dvp(round_up(params.Dv, kSide)),
        panel(queries_of_panel()),
        excludes(make_rule<T>(params).excludes),
        gradients(params) {}

  static constexpr bool heads_follow() { return false; }
  static constexpr bool sums_delta() { return false; }  // it is prepared from O
  // The products of the forward pass, in its order. Scores of 10^9 that are rounded otherwise
  // differ by hundreds, and a weight would be 2^hundreds.
  static constexpr bool forward_scores() { return true; }
  int64_t chunks() const { return (p.Lk + chunk - 1) / chunk; }
  // Of a query head: dQ, [queries / 32][D][32], then the sums of the gradient of its relative bias.
  int64_t dq_size() const { return round_up(p.Lq, kSide) * dp + relative_sums<T>(p, kSide); }

  struct Buffers {
    Element *k, *v;      // [kRows][D | Dv / 32][part][2] left tiles: keys, over channels
    Element* k_t;        // [kRows][D / 32][part][2] left tiles: channels, over keys
    Element *q_columns,  // [panel / 32][2][D | Dv / 32][part] right tiles: queries,
        *g_columns;      //   over channels
    Element *q_rows,
        *g_rows;         // [panel / 32][D | Dv / 32][part][2] right tiles: channels, over queries
    T *dk, *dv;          // [chunk / 32][D | Dv / 32] squares, keys by channels
    T *all_dk, *all_dv;  // in fp32, the sums of dk and dv before; else the same
    Square* square;      // [2]
    T* scratch_square;   // a square that is not read
    T* pending;          // where the sums go that tiles 0 to 3 hold
    // Rows that some of these tiles have as zeros, as bits: of a block, of a panel.
    uint32_t k_apart[kRows], v_apart[kRows], *q_apart, *g_apart;  // [panel / 32]
    typename Gradients::Buffers gradients;
    size_t bytes;
  };

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    const int64_t queries = min_of(panel, round_up(p.Lq, kSide));
    Buffers f;
    const auto tiles = [&](int64_t elements, int parts = kParts) {
      return a.take<Element>(elements * parts);
    };
    f.k = tiles(kKeysOfBlock * dp), f.v = tiles(kKeysOfBlock * dvp);
    f.k_t = tiles(kKeysOfBlock * dp, kGradParts);
    f.q_columns = tiles(queries * dp), f.g_columns = tiles(queries * dvp);
    f.q_rows = tiles(queries * dp, kGradParts), f.g_rows = tiles(queries * dvp);
    f.q_apart = a.take<uint32_t>(queries / kSide), f.g_apart = a.take<uint32_t>(queries / kSide);
    const int64_t keys = min_of(chunk, round_up(p.Lk, kSide));
    f.dk = a.take<T>(keys * dp), f.dv = a.take<T>(keys * dvp);
    f.all_dk = kParts > 1 ? a.take<T>(keys * dp) : f.dk;
    f.all_dv = kParts > 1 ? a.take<T>(keys * dvp) : f.dv;
    f.square = a.take<Square>(2);
    f.scratch_square = a.take<T>(kSquare);
    f.pending = f.scratch_square;
    f.gradients = gradients.allocate(a, queries);
    f.bytes = a.used();
    return f;
  }

  // dK and dV of chunk c of key head `head`, and its partial dQ, [query head of the
  // group][dq_size].
  void run(Buffers& f, int64_t head, int64_t c, const PreparedRows<T>& prepared, T* dq) const {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv, group = p.Hq / p.Hkv;
    const Range keys{c * chunk, min_of(p.Lk, (c + 1) * chunk)};
    const int64_t padded = round_up(keys.end - keys.begin, kSide);
    __builtin_memset(f.dk, 0, static_cast<size_t>(padded * dp) * sizeof(T));
    __builtin_memset(f.dv, 0, static_cast<size_t>(padded * dvp) * sizeof(T));
    if (kParts > 1) {
      __builtin_memset(f.all_dk, 0, static_cast<size_t>(padded * dp) * sizeof(T));
      __builtin_memset(f.all_dv, 0, static_cast<size_t>(padded * dvp) * sizeof(T));
    }
    __builtin_memset(dq, 0, static_cast<size_t>(group * dq_size()) * sizeof(T));
    {
      const TileScope tiles;
      for (int64_t g = 0; g < group; ++g) {
        Block x{};
        x.b = b, x.h = hk * group + g, x.hk = hk;
        f.gradients.scores.relative = relative_of(dq + g * dq_size());
        query_head(f, x, keys, prepared, dq + g * dq_size());
      }
    }
    write_rows(f.all_dk, dp, p.D, static_cast<T>(p.scale), p.grad_k, b, hk, keys);
    write_rows(f.all_dv, dvp, p.Dv, 1 / gradients.weight_scale, p.grad_v, b, hk, keys);
  }

  // Writes dQ, and the gradient of a relative bias, of query head g of a key head.
  void write_dq(int64_t head, int64_t g, const T* dq) const {
    const int64_t b = head / p.Hkv, h = head % p.Hkv * (p.Hq / p.Hkv) + g;
    write_query_gradients<P>(p, b, h, dq, dp);
    write_relative_gradient(p, b, h, relative_of(dq));
  }

 private:
  const Sequence& p;
  const int64_t chunk, dp, dvp, panel;
  const bool excludes;  // some pairs may be excluded
  const Gradients gradients;

  // A power of two, so that kQueriesOfSum is a multiple of it.
  int64_t queries_of_panel() const {
    const int64_t most = kParts > 1 ? kQueriesOfSum : INT64_MAX;
    int64_t queries = kQueriesOfBlock;
    while (2 * queries <= min_of(most, kPanelElements / max_of(dp, dvp))) queries *= 2;
    return queries;
  }

  // The sums of the gradient of a relative bias, behind the sums of dQ.
  template <class Sum>
  Sum* relative_of(Sum* dq) const {
    return dq + round_up(p.Lq, kSide) * dp;
  }

  // The gradients of one query head, for the keys of a block.
  void query_head(Buffers& f, Block& x, Range keys, const PreparedRows<T>& prepared, T* dq) const {
    const Range seen = gradients.seen_keys(f.gradients, x.b, x.h, keys);
    for (int64_t i = 0; i < p.Lq; i += panel) {
      if (i % kQueriesOfSum == 0) add_up(f, keys);
      const int64_t end = min_of(p.Lq, i + panel);
      const Range visible = visible_to_any(p, i, end);
      Range r{max_of(seen.begin, visible.begin), min_of(seen.end, visible.end)};
      r = visible_by_program(p, x.b, x.h, i, end, r);
      const bool of_sink = keys.begin == 0 && p.grad_sinks != nullptr;
      if (r.begin >= r.end && !of_sink) continue;
      x.direct = pack_queries(f, x.b, x.h, i, end, prepared);
      if (of_sink)
        p.grad_sinks[(p.index + x.b) * p.Hq + x.h] +=
            gradients.of_sink(f.gradients, x.b, x.h, {i, end});
      x.dq = dq + i * dp;
      for (int64_t j = keys.begin + (r.begin - keys.begin) / kKeysOfBlock * kKeysOfBlock; j < r.end;
           j += kKeysOfBlock) {
        x.j0 = j, x.j1 = min_of(keys.end, j + kKeysOfBlock);
        if (gradients.excludes(f.gradients, {x.j0, x.j1}) || hidden(x, i, end)) continue;
        x.dk = f.dk + (j - keys.begin) * dp, x.dv = f.dv + (j - keys.begin) * dvp;
        x.keys_apart = pack_keys(f, x);
        const Range seeing = seeing_any(p, x.j0, x.j1);
        const int64_t from =
            max_of<int64_t>(0, seeing.begin - i) / kQueriesOfBlock * kQueriesOfBlock;
        for (x.first = from; i + x.first < min_of(end, seeing.end); x.first += kQueriesOfBlock) {
          x.i0 = i + x.first, x.i1 = min_of(end, x.i0 + kQueriesOfBlock);
          if (!hidden(x, x.i0, x.i1)) block(f, x);
        }
      }
      flush(f);
    }
    add_up(f, keys);
  }

  // A mask program excludes all keys of a block for queries [i0, i1).
  bool hidden(const Block& x, int64_t i0, int64_t i1) const {
    const Range keys = visible_by_program(p, x.b, x.h, i0, i1, {x.j0, x.j1});
    return keys.begin >= keys.end;
  }

  // Adds dK and dV to their sums over the queries before, in fp32.
  void add_up(Buffers& f, Range keys) const {
    if (kParts == 1) return;
    const int64_t padded = round_up(keys.end - keys.begin, kSide);
    const auto add = [&](T* from, T* to, int64_t count) {
      for (int64_t at = 0; at < count; at += W) {
        store(to + at, load(to + at) + load(from + at));
        store(from + at, Vec<T>{});
      }
    };
    add(f.dk, f.all_dk, padded * dp);
    add(f.dv, f.all_dv, padded * dvp);
  }

  // The gradients of one block of queries and keys.
  void block(Buffers& f, Block& x) const {
    for (int row = 0; row < kRows; ++row) {
      const Range keys = x.keys(row), seeing = seeing_any(p, keys.begin, keys.end);
      const int64_t begin = max_of(x.i0, seeing.begin), end = min_of(x.i1, seeing.end);
      x.columns[row] = {0, 0};
      if (keys.begin < keys.end && begin < end)
        x.columns[row] = {(begin - x.i0) / kSide, (end - x.i0 + kSide - 1) / kSide};
    }
    if (!weights(f, x)) return;
    sums(f, x);
    bool apart = x.keys_apart;
    for (int64_t i = x.i0; kParts > 1 && i < x.i1; i += kSide) {
      const int64_t n = (x.first + i - x.i0) / kSide;
      apart |= (f.q_apart[n] | f.g_apart[n]) != 0;
    }
    if (apart) add_apart(f, x);
  }

  // ---- Packing ----------------------------------------------------------------------------------

  // Packs queries [i0, i1) of a head. True if all their weights are 2^(exponent S - lse).
  //
  // A fully masked query is zero: it passes no gradient, not even NaN times zero.
  bool pack_queries(Buffers& f, int64_t b, int64_t h, int64_t i0, int64_t i1,
                    const PreparedRows<T>& prepared) const {
    const bool direct = gradients.take_rows(f.gradients, b, h, i0, i1, prepared);
    for (int64_t n = 0; i0 + n < i1; n += kSide) {
      const int64_t i = i0 + n, end = min_of(i1, i + kSide);
      RowsOfTile<P> q = rows_of<P>(p.q, b, h, i, end, p.D);
      RowsOfTile<P> g = rows_of<P>(p.grad_out, b, h, i, end, p.Dv);
      for (int64_t r = 0; r < end - i; ++r)
        if (f.gradients.rows.high[n + r] == kInf<T>) q.rows_in_use &= ~(1u << r);
      g.rows_in_use = q.rows_in_use;
      if constexpr (kParts > 1) {
        q.rows_in_use &= ~(f.q_apart[n / kSide] = separate_rows(q));
        g.rows_in_use &= ~(f.g_apart[n / kSide] = separate_rows(g, kLeastGradient));
      }
      pack_right_columns<Format>(q, dp / kSide, f.q_columns + n * dp * kParts);
      pack_right_rows<GradFormat>(q, dp / kSide, f.q_rows + n * dp * kGradParts);
      pack_right_columns<Format>(g, dvp / kSide, f.g_columns + n * dvp * kParts);
      pack_right_rows<Format>(g, dvp / kSide, f.g_rows + n * dvp * kParts);
    }
    return direct;
  }

  // Packs the keys and values of a block. True if k_t has some keys as zeros: in 16 bits, where
  // some pairs are excluded, keys that are not finite. In fp32, k and v have these as zeros too.
  bool pack_keys(Buffers& f, const Block& x) const {
    bool apart = false;
    for (int row = 0; row < kRows; ++row) {
      const Range r = x.keys(row);
      f.k_apart[row] = f.v_apart[row] = 0;
      if (r.begin >= r.end) continue;
      RowsOfTile<P> k = keys_of(p.k, x, row, p.D), v = keys_of(p.v, x, row, p.Dv), some = k;
      if (kParts > 1 || excludes) some.rows_in_use &= ~(f.k_apart[row] = separate_rows(k));
      if constexpr (kParts > 1) k = some, v.rows_in_use &= ~(f.v_apart[row] = separate_rows(v));
      apart |= f.k_apart[row] != 0;
      pack_left<Format>(v, dvp / kSide, f.v + row * kSide * dvp * kParts);
      pack_left<Format>(k, dp / kSide, f.k + row * kSide * dp * kParts);
      pack_left_channels<GradFormat>(some, dp / kSide, f.k_t + row * kSide * dp * kGradParts);
    }
    return apart;
  }
  // The rows of K or V in one row of squares.
  RowsOfTile<P> keys_of(const Tensor4& from, const Block& x, int64_t row, int64_t channels) const {
    const Range r = x.keys(row);
    return rows_of<P>(from, x.b, x.hk, r.begin, r.end, channels);
  }
  // The rows of Q or dO in one column of squares.
  RowsOfTile<P> queries_of(const Tensor4& from, const Block& x, int64_t column,
                           int64_t channels) const {
    return rows_of<P>(from, x.b, x.h, x.i0 + kSide * column, x.end_of(column), channels);
  }

  // ---- Products ---------------------------------------------------------------------------------

  // Two tiles of each part a step: `step` elements from one step to the next, `second` from one
  // tile to the other, `part` from one part to the next.
  struct Operand {
    const Element* at;
    int64_t step, second, part;
  };
  template <int Tile>
  static constexpr int64_t kCorner = (Tile / 2 * 16) * kSide + Tile % 2 * 16;  // of its floats
  static constexpr int64_t kRowBytes = kSide * sizeof(T);

  // A square of C = A B, or C += A B. The sums stay in tiles 0 to 3 until the next product needs
  // these: a store right behind its product would hold up all that follows. Operands that are read
  // once do not displace from L1 what is stored there.
  template <class Of, bool kAdd, bool kLeftOnce, bool kRightOnce>
  FASTATTN_INLINE void product(Buffers& f, int64_t steps, Operand a, Operand b, T* c) const {
    typedef PartProducts<Of::kParts> Products;
    const auto load_operand = [&](auto tile, auto once, const Element* from)
                                  __attribute__((always_inline)) {
                                    if constexpr (decltype(once)::value)
                                      Tiles::load_once<decltype(tile)::value>(from, 64);
                                    else
                                      Tiles::load<decltype(tile)::value>(from, 64);
                                  };
    const auto start = [&](auto tile) __attribute__((always_inline)) {
      constexpr int t = decltype(tile)::value;
      Tiles::store<t>(f.pending + kCorner<t>, kRowBytes);
      if constexpr (kAdd)
        Tiles::load<t>(c + kCorner<t>, kRowBytes);
      else
        Tiles::zero<t>();
    };
    // Product n of parts, which shares a side with the one before.
    const auto of_parts = [&](auto first, auto n) __attribute__((always_inline)) {
      constexpr int i = decltype(n)::value, before = i == 0 ? 0 : i - 1;
      constexpr bool kFirst = decltype(first)::value && i == 0;
      constexpr bool kNewLeft = i == 0 || Products::left[i] != Products::left[before];
      constexpr bool kNewRight = i == 0 || Products::right[i] != Products::right[before];
      const Element* const left = a.at + Products::left[i] * a.part;
      const Element* const right = b.at + Products::right[i] * b.part;
      if constexpr (kNewLeft) load_operand(Width<4>(), Width<kLeftOnce>(), left);
      if constexpr (kNewRight) load_operand(Width<6>(), Width<kRightOnce>(), right);
      if constexpr (kFirst) start(Width<0>());
      Of::template multiply<0, 4, 6>();
      if constexpr (kNewRight) load_operand(Width<7>(), Width<kRightOnce>(), right + b.second);
      if constexpr (kFirst) start(Width<1>());
      Of::template multiply<1, 4, 7>();
      if constexpr (kNewLeft) load_operand(Width<5>(), Width<kLeftOnce>(), left + a.second);
      if constexpr (kFirst) start(Width<2>());
      Of::template multiply<2, 5, 6>();
      if constexpr (kFirst) start(Width<3>());
      Of::template multiply<3, 5, 7>();
    };
    const auto all_parts = [&](auto first, auto... n)
                               __attribute__((always_inline)) { (of_parts(first, n), ...); };
    const auto step = [&](auto first) __attribute__((always_inline)) {
      if constexpr (Of::kParts == 1) all_parts(first, Width<0>());
      if constexpr (Of::kParts == 2) all_parts(first, Width<0>(), Width<1>(), Width<2>());
      if constexpr (Of::kParts == 3)
        all_parts(first, Width<0>(), Width<1>(), Width<2>(), Width<3>(), Width<4>(), Width<5>());
      a.at += a.step, b.at += b.step;
    };
    step(Width<true>());
    for (int64_t k = 1; k < steps; ++k) step(Width<false>());
    f.pending = c;
  }

  // Stores the tiles of the square whose sum is pending.
  void flush(Buffers& f) const {
    Tiles::store<0>(f.pending + kCorner<0>, kRowBytes);
    Tiles::store<1>(f.pending + kCorner<1>, kRowBytes);
    Tiles::store<2>(f.pending + kCorner<2>, kRowBytes);
    Tiles::store<3>(f.pending + kCorner<3>, kRowBytes);
    f.pending = f.scratch_square;
  }

  // ---- Phase one: the weights of a block --------------------------------------------------------

  // False if no pair is visible. The vectors are a square behind the tiles, so that dP may still be
  // in tiles when its products end.
  __attribute__((noinline)) bool weights(Buffers& f, const Block& x) const {
    int done = 0;
    for (int column = 0; column < kColumns; ++column)
      for (int row = 0; row < kRows; ++row) {
        if (!x.has(row, column)) continue;
        Square& s = f.square[done % 2];
        s.row = row, s.column = column;
        if (!gradients.choose_method(f.gradients, x, s)) {
          gradients.clear(f.gradients, row, column);
          continue;
        }
        const int64_t n = x.first + column * kSide, d = dp / kSide, dv = dvp / kSide;
        const auto multiply = [&](int64_t steps, const Element* rows, const Element* columns,
                                  T* to) __attribute__((always_inline)) {
          constexpr int64_t kTile = kTiles<Format>;
          product<Format, false, true, true>(f, steps, {rows, 2 * kTile, kTileElements, kSquare},
                                             {columns, kTile, steps * kTile, kTileElements}, to);
        };
        multiply(d, f.k + row * kSide * dp * kParts, f.q_columns + n * dp * kParts, s.s);
        multiply(dv, f.v + row * kSide * dvp * kParts, f.g_columns + n * dvp * kParts, s.dp);
        if (done > 0) weigh(f, x, f.square[(done - 1) % 2]);
        ++done;
      }
    if (done == 0) return false;
    flush(f);
    weigh(f, x, f.square[(done - 1) % 2]);
    return true;
  }

  // The products of pairs of which a row was packed as zeros.
  __attribute__((noinline)) void multiply_apart(const Buffers& f, const Block& x, Square& s) const {
    const int64_t n = x.first / kSide + s.column;
    const auto multiply = [&](uint32_t keys, uint32_t queries, const RowsOfTile<P>& k,
                              const RowsOfTile<P>& q, T* to) {
      if (keys == 0 && queries == 0) return;
      for (int64_t r = 0; r < kSide; ++r)
        for (int64_t i = 0; i < kSide; ++i)
          if (k.rows_in_use >> r & q.rows_in_use >> i & (keys >> r | queries >> i) & 1)
            to[r * kSide + i] = dot_apart(k, r, q, i);
    };
    multiply(f.k_apart[s.row], f.q_apart[n], keys_of(p.k, x, s.row, p.D),
             queries_of(p.q, x, s.column, p.D), s.s);
    multiply(f.v_apart[s.row], f.g_apart[n], keys_of(p.v, x, s.row, p.Dv),
             queries_of(p.grad_out, x, s.column, p.Dv), s.dp);
  }

  // The weights and dS of a square; rows that tiles cannot hold are multiplied apart first.
  void weigh(Buffers& f, const Block& x, Square& s) const {
    if constexpr (kParts > 1) multiply_apart(f, x, s);
    gradients.weigh(f.gradients, x, s);
  }

  // ---- Phase two: the sums ----------------------------------------------------------------------

  // dq, dk and dv += the products of ds and of the weights, on tiles.
  __attribute__((noinline)) void sums(Buffers& f, const Block& x) const {
    for (int64_t row = 0; row < kRows; ++row) {
      const Range c = x.columns[row];
      if (c.begin >= c.end) continue;
      const int64_t n = x.first + kSide * c.begin;
      const auto add = [&](auto of, const Element* weights, const Element* rows, int64_t padded,
                           T* sum) __attribute__((always_inline)) {
        typedef decltype(of) Of;
        const Element* const left = weights + Gradients::template left_of<Of>(row, c.begin);
        for (int64_t d = 0; d < padded / kSide; ++d)
          product<Of, true, false, true>(f, c.end - c.begin,
                                         {left, kTiles<Of>, kColumns * kTiles<Of>, kTileElements},
                                         {rows + (n * padded + d * kSquare) * Of::kParts,
                                          kSide * padded * Of::kParts, kTileElements, kSquare},
                                         sum + row * kSide * padded + d * kSquare);
      };
      add(Format(), f.gradients.w_left, f.g_rows, dvp, x.dv);      // dV += P dO
      add(GradFormat(), f.gradients.ds_left, f.q_rows, dp, x.dk);  // dK += dS Q
    }
    for (int64_t column = 0; column < kColumns; ++column) {
      int64_t begin = 0, end = kRows;  // the rows that have this column are consecutive
      while (begin < end && !x.has(begin, column)) ++begin;
      while (begin < end && !x.has(end - 1, column)) --end;
      if (begin == end) continue;
      T* const dq = x.dq + (x.first + kSide * column) * dp;
      for (int64_t d = 0; d < dp / kSide; ++d)  // dQ^T += K^T dS
        product<GradFormat, true, true, false>(
            f, end - begin,
            {f.k_t + (begin * kSide * dp + d * kSquare) * kGradParts, kSide * dp * kGradParts,
             kTileElements, kSquare},
            {f.gradients.ds_right + Gradients::right_of(begin, column), kTiles<GradFormat>,
             kRows * kTiles<GradFormat>, kTileElements},
            dq + d * kSquare);
    }
  }

  // The sums pair by pair, skipping zeros, for the rows that the tiles have as zeros.
  __attribute__((noinline)) void add_apart(Buffers& f, const Block& x) const {
    flush(f);
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t column = x.columns[row].begin; column < x.columns[row].end; ++column)
        add_apart(f, x, row, column);
  }

  // The same sums for the rows of one square that tiles leave out, element by element.
  void add_apart(Buffers& f, const Block& x, int64_t row, int64_t column) const {
    const int64_t n = x.first / kSide + column;
    const uint32_t q_apart = kParts > 1 ? f.q_apart[n] : 0, g_apart = kParts > 1 ? f.g_apart[n] : 0;
    if ((f.k_apart[row] | q_apart | g_apart) == 0) return;
    const RowsOfTile<P> k = keys_of(p.k, x, row, p.D), q = queries_of(p.q, x, column, p.D);
    const RowsOfTile<P> g = queries_of(p.grad_out, x, column, p.Dv);
    T *const dk = x.dk + row * kSide * dp, *const dv = x.dv + row * kSide * dvp;
    T* const dq = x.dq + (x.first + kSide * column) * dp;
    for (int64_t r = 0; r < kSide; ++r)
      for (int64_t i = 0; i < kSide; ++i) {
        const bool of_k = f.k_apart[row] >> r & 1, of_q = q_apart >> i & 1, of_g = g_apart >> i & 1;
        if (!of_k && !of_q && !of_g) continue;
        const T w = pair_of<Format>(f.gradients.w_left, row, column, r, i);
        const T ds = pair_of<GradFormat>(f.gradients.ds_left, row, column, r, i);
        for (int64_t d = 0; of_k && ds != T(0) && d < p.D; ++d)
          dq[d * kSide + i] += ds * k.at(r, d);
        for (int64_t d = 0; of_q && ds != T(0) && d < p.D; ++d)
          dk[d / kSide * kSquare + r * kSide + d % kSide] += ds * q.at(i, d);
        for (int64_t d = 0; of_g && w != T(0) && d < p.Dv; ++d)
          dv[d / kSide * kSquare + r * kSide + d % kSide] += w * g.at(i, d);
      }
  }

  // Key r and query i of a square in left sides. Half of the 32 queries are in each half of the
  // words of a row.
  template <class Of>
  static T pair_of(const Element* left, int64_t row, int64_t column, int64_t r, int64_t i) {
    const int64_t at = Gradients::template left_of<Of>(row, column) +
                       r / 16 * kColumns * kTiles<Of> + r % 16 * kStep + i % 16 * 2 + i / 16;
    return Of::sum(left + at, kTileElements);
  }

  // Writes squares of keys by channels, scaled and rounded.
  void write_rows(const T* squares, int64_t padded, int64_t channels, T factor, const Tensor4& to,
                  int64_t b, int64_t hk, Range keys) const {
    Storage* dst = static_cast<Storage*>(to.data) + b * to.stride[0] + hk * to.stride[1];
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const int64_t r = j - keys.begin;
      const T* row = squares + r / kSide * kSide * padded + r % kSide * kSide;
      for (int64_t d = 0; d < channels; d += W)
        store_as<T>(dst + j * to.stride[2] + d,
                    load(row + d / kSide * kSquare + d % kSide) * factor,
                    static_cast<int>(min_of<int64_t>(W, channels - d)));
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
