// Relative attention: terms of the scores that depend on the distance and on the content of a pair.
// They are a part of the products, before their scale:
//
//   S_ij += a_i . R[b(d)] + P[b(-d)] . k_j,   d = i + offset - j
//
// with position queries a, tables R and P with a row for each bucket, and a map b from distances to
// buckets. A block of keys and some queries have few distances, so they need a band of either
// table:
//
//   A[i][c] = a_i . R[c]    for a panel of queries
//   C[j][c] = k_j . P[c]    for the block of keys and many panels
//
// from which the entries of the pairs are read. Their columns are in descending order of the
// buckets. So where b is linear, a row of C has the entries of consecutive queries one after the
// other, and a row of A the entries of consecutive keys, which a transposition brings across the
// lanes.
#pragma once
#include "blocks.h"
#include "pack.h"
#include "scores.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// base[index[l]] in lane l.
FASTATTN_INLINE VecF gather(const float* base, const int32_t* index) {
#if FASTATTN_AVX512 && !FASTATTN_EMULATED_AVX512
  return (VecF)_mm512_i32gather_ps(_mm512_loadu_si512(index), base, 4);
#else
  alignas(kVectorBytes) float x[kLanes<float>];
  for (int l = 0; l < kLanes<float>; ++l) x[l] = base[index[l]];
  return load(x);
#endif
}
// The same in float64.
FASTATTN_INLINE VecD gather(const double* base, const int32_t* index) {
  alignas(kVectorBytes) double x[kLanes<double>];
  for (int l = 0; l < kLanes<double>; ++l) x[l] = base[index[l]];
  return load(x);
}

template <class P>
class ContentTerms {
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr bool kPaired = P::kPerWord == 2;
  static constexpr int64_t kPanel = kPanelLanes<P>;
  static constexpr int64_t kGroup = 2 * P::kScoreRows;  // keys that read the same columns of C
  static constexpr int64_t kChain = kSame<T, double> ? 64 : 256;  // see longest_chain

  // The columns of pairs whose distances follow one another. `same` and `next` count how many of
  // them, from each one on, are equal, or increase by one.
  struct Entries {
    int32_t *at, *same, *next;
    Range band;  // the buckets; column 0 is the last one

    // The first `count` elements of a row from entry e on; 0 in the other lanes.
    FASTATTN_INLINE Vec<T> read(const T* row, int64_t e, int64_t count = W) const {
      if (count >= W && next[e] >= W) return load(row + at[e]);
      if (count >= W && same[e] >= W) return splat<T>(row[at[e]]);
      if (count >= W) return gather(row, at + e);
      alignas(kVectorBytes) T x[W] = {};
      for (int64_t l = 0; l < count; ++l) x[l] = row[at[e + l]];
      return load(x);
    }

    // row[lanes] += the entry e of each lane, within the band.
    FASTATTN_INLINE void add(T* row, int64_t e, Vec<T> x, int64_t count = W) const {
      if (count >= W && next[e] >= W) return store(row + at[e], load(row + at[e]) + x);
      if (count >= W && same[e] >= W) {
        row[at[e]] += sum_lanes<T>(x);
        return;
      }
      alignas(kVectorBytes) T lanes[W];
      store(lanes, x);
      for (int64_t l = 0; l < count; ++l) row[at[e + l]] += lanes[l];
    }
  };

 public:
  // `keys`: the most of a block; `sharing`: how many queries share a band and C, whole panels.
  ContentTerms(const Sequence& params, int64_t keys, int64_t sharing)
      : p(params),
        of_queries(params.query_table.data != nullptr),
        of_keys(params.key_table.data != nullptr),
        keys(keys),
        sharing(sharing),
        dw(words<P>(params.D)),
        dp(round_up(params.D, W)),
        columns(widest(sharing)),
        columns_of_tile(widest(kPanel)) {}

  struct Buffers {
    Word* temp;     // [lanes][words of D]
    Word* panel;    // [words of D][lanes], of P
    Word* packed;   // [words of D][columns], the band of R
    Word* rows;     // [lanes][words of D], position queries
    T *a, *c;       // [lanes][columns_of_tile], [keys][columns]
    T* grads;       // of C
    Word* pairs;    // [words of lanes][columns_of_tile], of the gradients of A
    Word* table;    // [words of columns][dp], a factor of the gradients
    Word* operand;  // [words of keys or lanes][dp], another one
    Entries of_query, of_key;
    Range* reach;          // [groups of keys], the columns of C that a group reads
    int64_t b, h, q0, q1;  // the queries of the bands and of C
    Range block;
    const Word* ks;  // [keys][words of D]
    T* dk;           // [keys][dp], of the block; set by the caller
    T* sums;         // gradients of the query head, see sums_size(); set by the caller
  };

  // Takes the buffers of a thread from an arena.
  Buffers allocate(Arena& a, bool backward = false) const {
    Buffers f{};
    if (!has_content_terms(p)) return f;
    const auto entries = [&](bool any) {
      const int64_t count = any ? keys + sharing : 0;
      return Entries{a.take<int32_t>(count), a.take<int32_t>(count), a.take<int32_t>(count), {}};
    };
    f.temp = a.take<Word>(kPanel * dw), f.panel = a.take<Word>(of_keys ? kPanel * dw : 0);
    f.packed = a.take<Word>(of_queries ? dw * columns : 0);
    f.rows = a.take<Word>(of_queries ? kPanel * dw : 0);
    f.a = a.take<T>(of_queries ? kPanel * columns_of_tile : 0);
    f.c = a.take<T>(of_keys ? keys * columns : 0);
    f.of_query = entries(of_queries), f.of_key = entries(of_keys);
    f.reach = a.take<Range>(of_keys ? (keys + kGroup - 1) / kGroup : 0);
    if (!backward) return f;
    f.grads = a.take<T>(of_keys ? keys * columns : 0);
    f.pairs = a.take<Word>(of_queries && kPaired ? kPanel / 2 * columns_of_tile : 0);
    f.table = a.take<Word>(words<P>(of_keys ? columns : columns_of_tile) * dp);
    f.operand = a.take<Word>(words<P>(max_of(keys, kPanel)) * dp);
    return f;
  }

  // Of a query head: the gradients of R and P, [buckets][dp] each, and of the position queries,
  // [queries][dp].
  int64_t sums_size(int64_t queries) const {
    return tables_size() + (of_queries ? queries * dp : 0);
  }

  // The keys of the tiles that follow; ks: staged.
  void set_key_block(Buffers& f, int64_t b, int64_t h, Range block, const Word* ks) const {
    if (f.b != b || f.h != h || f.block.begin != block.begin || f.block.end != block.end)
      f.q0 = f.q1 = 0;
    f.b = b, f.h = h, f.block = block, f.ks = ks;
  }

  // S[key][lane] += the terms, for queries [i0, i1) and keys r of the block; and the maximum over
  // the keys.
  template <int NV>
  __attribute__((noinline)) void add(Buffers& f, int64_t i0, int64_t i1, Range r, T* S,
                                     Vec<T>* top) const {
    constexpr int64_t L = NV * W;
    if (i0 < f.q0 || i1 > f.q1) find_bands(f, i0, i1);
    if (of_queries) {
      const Range tile = multiply_queries(f, i0, i1, r);
      each_square<NV>(f, i0, i1, r, tile, [&](const Square& at) __attribute__((always_inline)) {
        Vec<T> x[W];
        if (at.linear) {
          FASTATTN_UNROLL for (int l = 0; l < W; ++l) x[l] =
              load(at.row + l * columns_of_tile + f.of_query.at[at.entry - l]);
        } else {
          alignas(kVectorBytes) T square[W * W] = {};
          for (int64_t l = 0; l < at.rows; ++l)
            store(square + l * W,
                  f.of_query.read(at.row + l * columns_of_tile, at.entry - l, at.keys));
          FASTATTN_UNROLL for (int l = 0; l < W; ++l) x[l] = load(square + l * W);
        }
        transpose<T>(x);
        T* const to = S + at.lane;
        FASTATTN_UNROLL for (int l = 0; l < W; ++l) if (l < at.keys)
            store(to + l * L, load(to + l * L) + x[l]);
      });
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) top[n] = splat<T>(-kInf<T>);
    for (int64_t j = r.begin; j < r.end; ++j) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        T* const to = S + (j - r.begin) * L + n * W;
        Vec<T> s = load(to);
        if (of_keys) {
          s += f.of_key.read(f.c + (j - f.block.begin) * columns, of_pair(f, i0, j) + n * W);
          store(to, s);
        }
        top[n] = max_of(top[n], s);
      }
  }

  // The gradients of the terms of the tile that was added last, from dS[key][lane]. The gradients
  // of C are summed until the block or its queries change.
  template <int NV>
  __attribute__((noinline)) void add_gradients(Buffers& f, int64_t i0, int64_t i1, Range r,
                                               const T* ds) const {
    constexpr int64_t L = NV * W;
    if (of_keys)
      for (int64_t j = r.begin; j < r.end; ++j)
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n)
            f.of_key.add(f.grads + (j - f.block.begin) * columns, of_pair(f, i0, j) + n * W,
                         load(ds + (j - r.begin) * L + n * W));
    if (!of_queries) return;
    const Range tile = columns_of(f, i0, i1, r);
    const int64_t nc = tile.end - tile.begin, rows = i1 - i0;
    for (int64_t l = 0; l < rows; ++l)
      __builtin_memset(f.a + l * columns_of_tile, 0,
                       static_cast<size_t>(round_up(nc, P::kPerWord)) * sizeof(T));
    each_square<NV>(f, i0, i1, r, tile, [&](const Square& at) __attribute__((always_inline)) {
      Vec<T> x[W];
      FASTATTN_UNROLL for (int l = 0; l < W; ++l) x[l] =
          l < at.keys ? load(ds + at.lane + l * L) : Vec<T>{};
      transpose<T>(x);
      if (at.linear) {
        FASTATTN_UNROLL for (int l = 0; l < W; ++l) {
          T* const to = at.row + l * columns_of_tile + f.of_query.at[at.entry - l];
          store(to, load(to) + x[l]);
        }
      } else {
        alignas(kVectorBytes) T square[W * W];
        FASTATTN_UNROLL for (int l = 0; l < W; ++l) store(square + l * W, x[l]);
        for (int64_t l = 0; l < at.rows; ++l)
          f.of_query.add(at.row + l * columns_of_tile, at.entry - l, load(square + l * W), at.keys);
      }
    });
    // da += dA R,  dR += dA^T a
    const int64_t *sa = p.position_query.stride, last = f.of_query.band.end - 1 - tile.begin;
    stage_descending(f, p.query_table, last, nc);
    stage_seen(position_queries(f, i0), sa[2], sa[3], rows, f.operand, f.a, columns_of_tile, nc);
    const Word* const by_column = pair_up(f.a, rows, nc, columns_of_tile, f.pairs);
    add_product<false>(rows, reinterpret_cast<const Word*>(f.a), columns_of_tile, f.table, nc,
                       f.sums + tables_size() + i0 * dp, dp);
    add_product<true>(nc, by_column, columns_of_tile, f.operand, rows, f.sums + last * dp, -dp);
  }

  // dk += dC P,  dP += dC^T k, for the block and the queries of C.
  __attribute__((noinline)) void close(Buffers& f) const {
    if (!of_keys || f.q1 == 0) return;
    const int64_t nk = f.block.end - f.block.begin, *sk = p.k.stride, last = f.of_key.band.end - 1,
                  nc = f.of_key.band.end - f.of_key.band.begin;
    stage_descending(f, p.key_table, last, nc);
    const Source k = P::elements(p.k.data, p.dtype) + f.b * sk[0] + f.h / (p.Hq / p.Hkv) * sk[1] +
                     f.block.begin * sk[2];
    stage_seen(k, sk[2], sk[3], nk, f.operand, f.grads, columns, nc);
    const Word* const by_column =
        pair_up(f.grads, nk, nc, columns, reinterpret_cast<Word*>(f.c));  // C was read
    for (int64_t j = 0; j < nk; j += kGroup) {
      const Range reach = f.reach[j / kGroup];
      const int64_t word = reach.begin / P::kPerWord;
      add_product<false>(min_of(kGroup, nk - j),
                         reinterpret_cast<const Word*>(f.grads + j * columns) + word, columns,
                         f.table + word * dp, reach.end - word * P::kPerWord, f.dk + j * dp, dp);
    }
    T* const sums = f.sums + (of_queries ? p.buckets * dp : 0) + last * dp;
    for (int64_t c = 0; c < nc; c += kPanel) {
      const Range readers = keys_reading(f, c);
      const int64_t word = readers.begin / P::kPerWord;
      add_product<true>(min_of(kPanel, nc - c), by_column + word * columns + c, columns,
                        f.operand + word * dp, readers.end - readers.begin, sums - c * dp, -dp);
    }
    f.q0 = f.q1 = 0;
  }

  // Writes the gradients of a query head from their sums, scaled.
  void write(const T* sums, int64_t b, int64_t h) const {
    const auto rows = [&](const T* from, auto to, int64_t stride, int64_t count) {
      for (int64_t r = 0; r < count; ++r)
        for (int64_t d = 0; d < p.D; d += W)
          store_as<T>(to + r * stride + d, load(from + r * dp + d) * static_cast<T>(p.scale),
                      static_cast<int>(min_of<int64_t>(W, p.D - d)));
    };
    const int64_t table = (b * p.Hq + h) * p.buckets * p.D;
    if (of_queries) {
      const int64_t* st = p.grad_position_query.stride;
      const Source to = P::elements(p.grad_position_query.data, p.dtype) + b * st[0] + h * st[1];
      with_elements(to, [&](auto* first) { rows(sums + tables_size(), first, st[2], p.Lq); });
      rows(sums, static_cast<T*>(p.grad_query_table) + table, p.D, p.buckets);
      sums += p.buckets * dp;
    }
    if (of_keys) rows(sums, static_cast<T*>(p.grad_key_table) + table, p.D, p.buckets);
  }

 private:
  const Sequence& p;
  const bool of_queries, of_keys;
  const int64_t keys, sharing, dw, dp, columns, columns_of_tile;

  // Elements of the gradients of both tables.
  int64_t tables_size() const { return (of_queries + of_keys) * p.buckets * dp; }

  // The columns of a band of a block of keys and so many queries, and room for the last vectors.
  int64_t widest(int64_t queries) const {
    return round_up(min_of(p.buckets, p.bucket_step * (keys + queries) + 1), kPanel) + kPanel;
  }

  // The table of the current head.
  Source table(const Tensor4& x, const Buffers& f) const {
    return P::elements(x.data, p.dtype) + f.b * x.stride[0] + f.h * x.stride[1];
  }
  Source position_queries(const Buffers& f, int64_t i) const {
    return table(p.position_query, f) + i * p.position_query.stride[2];
  }

  // The entries of query i and key j: one later for the next query in C, for the next key in A.
  static int64_t of_pair(const Buffers& f, int64_t i, int64_t j) {
    return i - f.q0 + f.block.end - 1 - j;
  }
  int64_t of_pair_in_a(const Buffers& f, int64_t i, int64_t j) const {
    return f.q0 + sharing - 1 - i + j - f.block.begin;
  }

  // The range of x[first], ..., x[last].
  static Range values_of(const int32_t* x, int64_t first, int64_t last) {
    int32_t min = x[first], max = min;
    for (int64_t n = first + 1; n <= last; ++n) {
      min = min_of(min, x[n]);
      max = max_of(max, x[n]);
    }
    return {min, max + 1};
  }

  // The keys, in whole groups, that read columns of C from c on, of a panel.
  static Range keys_reading(const Buffers& f, int64_t c) {
    const int64_t nk = f.block.end - f.block.begin;
    Range readers{nk, nk};
    for (int64_t j = 0; j < nk; j += kGroup) {
      const Range reach = f.reach[j / kGroup];
      if (reach.begin < c + kPanel && c < reach.end)
        readers = {min_of(readers.begin, j), min_of(nk, j + kGroup)};
    }
    return readers;
  }

  // Entry e is for b(top - e); beyond b(low) and b(high) it repeats these.
  void find(Entries& to, int64_t top, int64_t low, int64_t high, int64_t count) const {
    const int32_t* const bucket = p.distance_buckets + p.farthest;
    to.band = values_of(bucket, low, high);
    const int32_t last = static_cast<int32_t>(to.band.end - 1);
    for (int64_t e = count - 1; e >= 0; --e) {
      to.at[e] = last - bucket[max_of(low, min_of(high, top - e))];
      const bool follows = e + 1 < count;
      to.same[e] = follows && to.at[e + 1] == to.at[e] ? to.same[e + 1] + 1 : 1;
      to.next[e] = follows && to.at[e + 1] == to.at[e] + 1 ? to.next[e + 1] + 1 : 1;
    }
  }

  // The bands of the block and of the queries from i0 on: R is packed, and C multiplied.
  __attribute__((noinline)) void find_bands(Buffers& f, int64_t i0, int64_t i1) const {
    if (f.grads != nullptr) close(f);
    f.q0 = i0;
    f.q1 = max_of(i1, min_of(i0 + sharing, seeing_any(p, f.block.begin, f.block.end).end));
    const int64_t nk = f.block.end - f.block.begin, count = nk + sharing - 1;
    const int64_t low = f.q0 + p.offset - (f.block.end - 1),
                  high = f.q1 - 1 + p.offset - f.block.begin;
    if (of_queries) {
      find(f.of_query, f.q0 + sharing - 1 + p.offset - f.block.begin, low, high, count);
      const int64_t nc = f.of_query.band.end - f.of_query.band.begin;
      for (int64_t c = 0; c < nc; c += kPanel)
        pack_columns(f, p.query_table, f.of_query.band, c, f.packed + c, columns);
    }
    if (!of_keys) return;
    find(f.of_key, -low, -high, -low, count);
    if (f.grads != nullptr)
      __builtin_memset(f.grads, 0, static_cast<size_t>(nk * columns) * sizeof(T));
    // Lanes past the last query read entries, too.
    const int64_t lanes = min_of(sharing, round_up(f.q1 - f.q0, kPanel));
    for (int64_t j = 0; j < nk; j += kGroup)
      f.reach[j / kGroup] =
          values_of(f.of_key.at, max_of<int64_t>(0, nk - j - kGroup), nk - 1 - j + lanes - 1);
    for (int64_t c = 0; c < f.of_key.band.end - f.of_key.band.begin; c += kPanel) {
      const Range readers = keys_reading(f, c);
      if (readers.begin == readers.end) continue;
      pack_columns(f, p.key_table, f.of_key.band, c, f.panel, kPanel);
      multiply(readers.end - readers.begin, f.ks + readers.begin * dw, f.panel, kPanel,
               f.c + readers.begin * columns + c, columns);
    }
  }

  // [words of D][lanes], the rows of a table for a panel of columns.
  void pack_columns(const Buffers& f, const Tensor4& x, Range band, int64_t c, Word* to,
                    int64_t ld) const {
    const int64_t first = band.end - 1 - c;
    pack_panel<P>(table(x, f) + first * x.stride[2], -x.stride[2], x.stride[3],
                  min_of(kPanel, first + 1 - band.begin), p.D, kPanel, to, ld, f.temp);
  }

  // to[n][panel of columns] = A B, A: [n][words of D], B: [words of D][ldb].
  void multiply(int64_t n, const Word* A, const Word* B, int64_t ldb, T* to, int64_t ld) const {
    tile_rows<P, P::kScoreRows, kPanelVectors, false>(
        n, A, dw, B, ldb, dw, [](int64_t, int) { return Vec<T>{}; },
        [&](int64_t r, int v, Vec<T> x)
            __attribute__((always_inline)) { store(to + r * ld + v * W, x); });
  }

  // The columns of A that a tile reads.
  Range columns_of(const Buffers& f, int64_t i0, int64_t i1, Range r) const {
    return values_of(f.of_query.at, of_pair_in_a(f, i1 - 1, r.begin),
                     of_pair_in_a(f, i0, r.end - 1));
  }

  // A = a R^T for a tile, whose columns it returns.
  Range multiply_queries(Buffers& f, int64_t i0, int64_t i1, Range r) const {
    const int64_t* st = p.position_query.stride;
    const Range tile = columns_of(f, i0, i1, r);
    const Word* rows = stage_keys<P>(position_queries(f, i0), st[2], st[3], i1 - i0, p.D, f.rows);
    for (int64_t c = tile.begin; c < tile.end; c += kPanel)
      multiply(i1 - i0, rows, f.packed + c, columns, f.a + c - tile.begin, columns_of_tile);
    return tile;
  }

  // A vector of queries and as many keys, of a tile.
  struct Square {
    T* row;         // of A, of its first query, less the first column of the tile
    int64_t entry;  // of its first pair
    int64_t lane;   // its first pair in the tile
    int64_t rows, keys;
    bool linear;  // whole, and b is linear in it
  };
  // Calls run(square) for all squares of queries [i0, i1) and keys r. `tile`: the columns of A.
  template <int NV, class F>
  FASTATTN_INLINE void each_square(const Buffers& f, int64_t i0, int64_t i1, Range r, Range tile,
                                   F run) const {
    for (int64_t j = r.begin; j < r.end; j += W)
      for (int64_t l = 0; l < NV * W && l < i1 - i0; l += W) {
        const int64_t e = of_pair_in_a(f, i0 + l, j);
        const int64_t rows = min_of<int64_t>(W, i1 - i0 - l), keys_ = min_of<int64_t>(W, r.end - j);
        const bool whole = rows == W && keys_ == W;
        run(Square{f.a + l * columns_of_tile - tile.begin, e, (j - r.begin) * NV * W + l, rows,
                   keys_, whole && f.of_query.next[e - W + 1] >= 2 * W - 1});
      }
  }

  // f.table[words of n][dp], the rows of a table from bucket `last` down.
  void stage_descending(const Buffers& f, const Tensor4& x, int64_t last, int64_t n) const {
    stage_padded<P>(table(x, f) + last * x.stride[2], -x.stride[2], x.stride[3], n, p.D, f.table,
                    dp);
  }

  // dst[words of n][dp]. Rows of NaN or inf whose gradients [n][ld] are all 0 are cleared: no pair
  // sees them, and 0 * NaN must not pass.
  void stage_seen(Source src, int64_t row_stride, int64_t col_stride, int64_t n, Word* dst,
                  const T* grads, int64_t ld, int64_t terms) const {
    stage_padded<P>(src, row_stride, col_stride, n, p.D, dst, dp);
    if (all_finite(src, row_stride, col_stride, n, p.D)) return;
    for (int64_t row = 0; row < n; ++row) {
      if (all_finite(src + row * row_stride, row_stride, col_stride, int64_t(1), p.D)) continue;
      bool any_nonzero = false;
      for (int64_t t = 0; t < terms && !any_nonzero; ++t) any_nonzero = grads[row * ld + t] != T(0);
      if (!any_nonzero) clear_row<P>(dst, row, dp);
    }
  }

  // Gradients [n][ld] as the words of both products: pairs of columns, in place, and pairs of rows,
  // in `pairs` [words of n][ld], which is returned. Where a word is one element, both are the
  // gradients.
  const Word* pair_up(T* grads, int64_t n, int64_t nc, int64_t ld, Word* pairs) const {
    if constexpr (kPaired) {
      for (int64_t row = 0; row < n; row += 2)
        for (int64_t c = 0; c < nc; c += 2 * W) {
          T *const even = grads + row * ld, *const odd = even + ld;
          const VecF e0 = load(even + c), e1 = load(even + c + W);
          store(even + c / 2, P::as_bf16(e0, e1));
          VecF o0{}, o1{};
          if (row + 1 < n) {
            o0 = load(odd + c), o1 = load(odd + c + W);
            store(odd + c / 2, P::as_bf16(o0, o1));
          }
          store(pairs + row / 2 * ld + c, P::as_pairs(e0, o0));
          store(pairs + row / 2 * ld + c + W, P::as_pairs(e1, o1));
        }
      return pairs;
    }
    (void)n, (void)nc, (void)ld, (void)pairs;
    return reinterpret_cast<const Word*>(grads);
  }

  // C[n][dp] += A B, of K terms; A is [n][lda], or [words of K][lda] with kColumns. B: [words of
  // K][dp].
  template <bool kColumns>
  void add_product(int64_t n, const Word* A, int64_t lda, const Word* B, int64_t K, T* C,
                   int64_t ldc) const {
    for (int64_t k = 0; k < words<P>(K); k += kChain)
      product_rows<P, kColumns>(n, A + (kColumns ? k * lda : k), lda, B + k * dp, dp,
                                min_of(words<P>(K) - k, kChain), dp / W,
                                [&](int64_t r, int64_t v, Vec<T> x) __attribute__((always_inline)) {
                                  T* const to = C + r * ldc + v * W;
                                  store(to, load(to) + x);
                                });
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
