// Memory hops of many queries on one memory: matrix products, bound by arithmetic.
//
// As in attention, scores are stored transposed, S^T = M U^T, with a panel of queries across the
// lanes. The memory is read in place, by broadcast; the softmax is vertical; its result is the
// right-hand side of O^T = C^T P^T. Rows are split into chunks that depend only on N and the width.
//
// A hop needs the result of the previous hop, so each hop has two parallel steps: every chunk
// against every panel, then the merge of each panel's chunks, which also computes its next u.
// Backward has the same structure; there a chunk owns its rows of dM and dC.
#pragma once
#include "../threads.h"
#include "memory_hops.h"
#include "sdpa_backward.h"
#include "team.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// The products and transpositions that both passes use, each compiled once for all its callers.
template <class P, int kVectors>
__attribute__((noinline)) void products_of_panel(int64_t rows, const typename P::Word* A,
                                                 const typename P::Word* panel, int64_t K,
                                                 int64_t chain, typename P::Acc* S,
                                                 Vec<typename P::Acc>* top) {
  score_products<P, kVectors>(rows, A, K, panel, K, chain, S, top);
}
// src [rows][cols] to panels dst [cols][lanes].
template <class T>
__attribute__((noinline)) void pack_rows(const T* src, int64_t row_stride, int64_t rows,
                                         int64_t cols, int64_t lanes, T* dst) {
  pack_transposed<T>(src, row_stride, int64_t(1), rows, cols, lanes, dst, lanes);
}
// The inverse, with each row multiplied by its factor; `add` adds to dst.
template <class T>
__attribute__((noinline)) void unpack_rows(const T* src, int64_t ld, const T* factor, int64_t rows,
                                           int64_t cols, T* dst, int64_t row_stride,
                                           bool add = false) {
  unpack_transposed<T>(src, ld, factor, rows, cols, dst, row_stride, add);
}

// Shared by both passes: the assignment of queries to lanes, the visible rows, scores and weights.
// A panel has kVectors vectors of queries.
template <class T, int kVectors>
class PanelSteps : protected HopSteps<T> {
  typedef HopSteps<T> Base;

 protected:
  typedef typename HopPolicy<T>::type P;
  using Base::batch_of, Base::dp, Base::groups, Base::is_narrow, Base::p, Base::query_of, Base::R,
      Base::row_of, Base::stats, Base::trace, Base::W;
  static constexpr int NV = kVectors;
  static constexpr int64_t L = NV * W;
  static constexpr int64_t kChain = 256;  // the longest chain of additions in a dot product

  explicit PanelSteps(const MemoryHopsParams& params)
      : Base(params),
        D(params.D),
        Bk(key_block<P>(params.D, params.D)),
        chunk(round_up(max_of<int64_t>(256, (params.N + 15) / 16), Bk)),
        chunks((params.N + chunk - 1) / chunk),
        panels((R + L - 1) / L) {}

  const int64_t D, Bk, chunk, chunks, panels;

  // Buffers of one thread.
  struct Tiles {
    T *s, *ds;        // [Bk][L]
    T* bias;          // [Bk][L]
    T* row;           // [Bk]
    T *in, *out;      // [Bk][D]
    T *d_in, *d_out;  // [Bk][dp]
    T* vectors;       // [L + 2][dp]
    int64_t* at;      // [Bk]
  };
  // Buffers of one group of queries, shared by the threads.
  struct Group {
    T* u;                          // [panels][D][L]
    T* g;                          // [panels][D][L]
    T *u_rows, *g_rows;            // [panels L][dp]: scale u, and g
    T* chunk_state;                // [chunks][panels][D + 2][L]: O^T (backward: dU^T), m and l
    T *m, *inverse, *delta;        // [panels L]
    int64_t *order, *moving;       // [R]: the query of each lane; [1]: the number of queries
    T *grad_in, *grad_out_memory;  // [slots][N][D], in T
    int team;                      // of threads that share the tasks; 0 = the group has one thread,
    Tiles tiles;                   // which has these
  };

  // Takes the buffers that all threads of a group of queries share.
  Group group_at(Arena& a) const {
    const bool back = p.grad_query != nullptr;
    const int64_t n = panels * L;
    Group f{};
    f.u = a.take<T>(n * D);
    f.chunk_state = a.take<T>(max_of<int64_t>(1, chunks) * panels * state_size());
    f.m = a.take<T>(n), f.inverse = a.take<T>(n), f.delta = a.take<T>(n);
    f.order = a.take<int64_t>(R), f.moving = a.take<int64_t>(1);
    if (!back) return f;
    f.g = a.take<T>(n * D);
    f.u_rows = a.take<T>(n * dp), f.g_rows = a.take<T>(n * dp);
    if (is_narrow) {
      f.grad_in = a.take<T>(p.grad_in != nullptr ? p.in_slots * p.N * D : 0);
      f.grad_out_memory = a.take<T>(p.grad_out_memory != nullptr ? p.out_slots * p.N * D : 0);
    }
    return f;
  }

  // Takes the buffers of one thread.
  Tiles tiles_at(Arena& a) const {
    const bool back = p.grad_query != nullptr;
    Tiles t;
    t.s = a.take<T>(Bk * L), t.ds = a.take<T>(Bk * L);
    t.bias = a.take<T>(Bk * L), t.row = a.take<T>(Bk);
    t.in = a.take<T>(Bk * D), t.out = a.take<T>(Bk * D);
    t.d_in = a.take<T>(back ? Bk * dp : 0), t.d_out = a.take<T>(back ? Bk * dp : 0);
    t.vectors = a.take<T>((L + 2) * (dp + W));
    t.at = a.take<int64_t>(Bk);
    return t;
  }
  // Elements of a partial result: o [D][lanes], m and l [lanes].
  int64_t state_size() const { return (D + 2) * L; }
  T* chunk_state(const Group& f, int64_t panel, int64_t c) const {
    return f.chunk_state + (c * panels + panel) * state_size();
  }

  // of_group(buffers, group) for every group. Many groups are shared among the threads; otherwise
  // the tasks within each group are.
  template <class F>
  void run(double flops, F of_group) {
    Arena group_size(nullptr), tile_size(nullptr);
    group_at(group_size), tiles_at(tile_size);
    if (groups < 4 * p.threads) {
      void* memory = __builtin_malloc(group_size.used() + 64);
      const auto aligned = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
      Arena arena(reinterpret_cast<void*>(aligned));
      Group f = group_at(arena);
      f.team = team_size(p.threads, max_of(panels, chunks), flops / groups);
      for (int64_t group = 0; group < groups; ++group) of_group(f, group);
      __builtin_free(memory);
      return;
    }
    const auto make = [&] {
      Arena arena(thread_scratch(group_size.used() + tile_size.used()));
      Group f = group_at(arena);
      f.tiles = tiles_at(arena);
      return f;
    };
    each_task(team_size(p.threads, groups, flops), groups, 1, make, of_group);
  }
  // task(tiles, i) for every i < tasks.
  template <class F>
  void each(const Group& f, int64_t tasks, F task) const {
    if (f.team == 0) {
      for (int64_t i = 0; i < tasks; ++i) task(f.tiles, i);
      return;
    }
    const auto make = [&] {
      Arena size(nullptr);
      tiles_at(size);
      Arena own(thread_scratch(size.used()));
      return tiles_at(own);
    };
    each_task(f.team, tasks, 1, make, task);
  }

  // ---- the queries

  // The lanes of hop k: the queries that have not stopped, packed without gaps.
  void choose(const Group& f, int64_t group, int64_t k) const {
    int64_t count = 0;
    for (int64_t r = 0; r < R; ++r)
      if (this->moves(row_of(group, r), k)) f.order[count++] = r;
    f.moving[0] = count;
  }
  // The lanes of all hops of the backward pass. Queries are sorted by their number of steps,
  // longest first, so that the lanes in use are always the first ones.
  void arrange(const Group& f, int64_t group) const {
    f.moving[0] = p.settles ? 0 : R;
    for (int64_t r = 0; r < R; ++r) f.order[r] = r;
    if (!p.settles) return;
    int64_t* const step_counts = p.taken + row_of(group, 0);
    int64_t at = 0;
    for (int64_t steps = p.K; steps >= 0; --steps)
      for (int64_t r = 0; r < R; ++r)
        if (step_counts[r] == steps) f.order[at++] = r;
  }
  // Panels of the queries that have not stopped, and the queries in one.
  int64_t panels_of(const Group& f) const { return (f.moving[0] + L - 1) / L; }
  int64_t lanes_of(const Group& f, int64_t panel) const {
    return min_of(L, f.moving[0] - panel * L);
  }
  // The query in a lane; queries that have not stopped are first in the order.
  int64_t row_in(const Group& f, int64_t group, int64_t lane) const {
    return row_of(group, f.order[lane]);
  }

  // ---- rows and their visibility

  bool excludes() const { return p.mask.data != nullptr || p.bias.data != nullptr; }
  // True if mask and bias are the same for all queries of a group: one value per row.
  bool by_row() const {
    const auto common = [&](const Tensor4& x) {
      return x.data == nullptr || (x.stride[1] == 0 && (x.stride[0] == 0 || !p.shared));
    };
    return common(p.mask) && common(p.bias);
  }

  // The first element of the row of a mask or a bias, from memory row n on.
  int64_t first_of(const Tensor4& x, int64_t row, int64_t k, int64_t n) const {
    const int64_t* st = x.stride;
    return batch_of(row) * st[0] + query_of(row) * st[1] + k * st[2] + n * st[3];
  }
  // to[i] = the bias of a query and memory row n + i, -inf where it is excluded.
  __attribute__((noinline)) void read_bias(int64_t row, int64_t k, int64_t n, int64_t count,
                                           T* to) const {
    if (p.bias.data != nullptr)
      read_elements(p.bias.data, p.bias_dtype, first_of(p.bias, row, k, n), p.bias.stride[3], count,
                    to);
    for (int64_t i = 0; p.bias.data == nullptr && i < count; ++i) to[i] = T(0);
    if (p.mask.data == nullptr) return;
    const Bool* visible = static_cast<const Bool*>(p.mask.data) + first_of(p.mask, row, k, n);
    for (int64_t i = 0; i < count; ++i)
      if (!visible[i * p.mask.stride[3]].bits) to[i] = -kInf<T>;
  }

  // A block of rows in cache, without rows that are masked out for all queries.
  struct Block {
    int64_t n0, count;
    bool all;           // row i of the block is n0 + i, else n0 + at[i]
    bool by_row;        // bias[i] is the bias of row i; else the bias is per panel
    bool leaky;         // has a non-finite element, and a partial mask
    const T *in, *out;  // [count][D]
  };

  // Describes rows [n0, n1) of a group's memory: which of them take part, and their bias.
  __attribute__((noinline)) Block block_of(const Tiles& t, int64_t group, int64_t k, int64_t n0,
                                           int64_t n1) const {
    Block block{n0, n1 - n0, true, by_row(), false, nullptr, nullptr};
    if (excludes() && block.by_row) {
      block.count = 0;
      read_bias(row_of(group, 0), k, n0, n1 - n0, t.bias);
      for (int64_t i = 0; i < n1 - n0; ++i) {
        if (t.bias[i] == -kInf<T>) continue;
        t.at[block.count] = i;
        t.bias[block.count++] = t.bias[i];
      }
      block.all = block.count == n1 - n0;
    }
    const StoredRows in = this->in_rows(group, k, n0), out = this->out_rows(group, k, n0);
    block.in = stage(in, block, t.at, t.in);
    block.out = out.is(in) ? block.in : stage(out, block, t.at, t.out);
    block.leaky = excludes() && !block.by_row &&
                  !(all_finite(block.in, D, int64_t(1), block.count, D) &&
                    all_finite(block.out, D, int64_t(1), block.count, D));
    return block;
  }

  // The visible rows of a block, copied together if some are hidden.
  const T* stage(StoredRows stored, const Block& block, const int64_t* at, T* dst) const {
    if (!block.all) stored.at = at;
    if (is_narrow) return widen(stored, block.count, D, dst), dst;
    const Rows<T> rows = stored.as<T>();
    if (block.all && rows.stride == D) return rows.base;
    for (int64_t i = 0; i < block.count; ++i)
      __builtin_memcpy(dst + i * D, rows[i], static_cast<size_t>(D) * sizeof(T));
    return dst;
  }

  // t.bias of a panel and a block; in lanes without a query, every row is excluded.
  __attribute__((noinline)) void bias_tile(const Group& f, const Tiles& t, int64_t group, int64_t k,
                                           int64_t panel, const Block& block) const {
    const int64_t queries = lanes_of(f, panel);
    for (int64_t x = 0; x < block.count * L; x += W)
      store(t.bias + x, x % L + W <= queries ? Vec<T>{} : splat<T>(-kInf<T>));
    const int64_t rows = block.count;  // all, because the bias is not by row
    for (int64_t l = 0; l < queries; ++l) {
      read_bias(row_in(f, group, panel * L + l), k, block.n0, rows, t.row);
      for (int64_t i = 0; i < rows; ++i) t.bias[i * L + l] = t.row[i];
    }
  }

  // t.s = scale M U^T + bias [count][L] of a panel; also finds the maximum. Excluded pairs get -inf
  // before a softmax, and 0 without one, where -inf is a weight like any other.
  __attribute__((noinline)) void scores(const Group& f, const Tiles& t, int64_t group, int64_t k,
                                        int64_t panel, const Block& block, Vec<T>* top) const {
    products_of_panel<P, NV>(block.count, block.in, f.u + panel * L * D, D, kChain, t.s, top);
    const T scale = static_cast<T>(p.scale);
    const bool tile = excludes() && !block.by_row;
    if (tile) {
      bias_tile(f, t, group, k, panel, block);
    } else if (scale == T(1) && !excludes()) {
      return;
    }
    const Vec<T> excluded = splat<T>(p.normalize ? -kInf<T> : T(0));
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) top[n] = splat<T>(-kInf<T>);
    for (int64_t i = 0; i < block.count; ++i) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        T* s = t.s + i * L + n * W;
        Vec<T> x = load(s) * scale;
        if (tile) {
          const Vec<T> b = load(t.bias + i * L + n * W);
          x = select<T>(b == -kInf<T>, excluded, x + b);
        } else if (excludes()) {
          x += t.bias[i];
        }
        store(s, x);
        top[n] = max_of(top[n], x);
      }
  }

  // y[D][L] += A^T x: A [count][D], x [count][L]. Zeros of x are skipped where A is not finite.
  __attribute__((noinline)) void add_transposed(const T* A, const T* x, const Block& block,
                                                const Vec<T>* alpha, T* y) const {
    if (!block.leaky) {
      tile_rows<P, P::kOutputRows, NV, true>(
          D, A, D, x, L, block.count, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t d, int n, Vec<T> sum) __attribute__((always_inline)) {
            T* to = y + d * L + n * W;
            store(to, alpha[n] * load(to) + sum);
          });
      return;
    }
    for (int64_t d = 0; d < D; ++d) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        T* to = y + d * L + n * W;
        store(to, alpha[n] * load(to));
      }
    for (int64_t i = 0; i < block.count; ++i)
      for (int64_t l = 0; l < L; ++l) {
        const T weight = x[i * L + l];
        if (weight == T(0)) continue;
        for (int64_t d = 0; d < D; ++d) y[d * L + l] += weight * A[i * D + d];
      }
  }

  // f.u of a panel, from the trace.
  __attribute__((noinline)) void pack(const Group& f, const Tiles& t, int64_t group, int64_t at,
                                      int64_t panel) const {
    const int64_t lanes = lanes_of(f, panel), first = row_in(f, group, panel * L);
    T* to = f.u + panel * L * D;
    if (!p.settles) return pack_rows(trace(first, at), (2 * p.K + 1) * D, lanes, D, L, to);
    for (int64_t x = 0; x < lanes; ++x)
      this->read_state(row_in(f, group, panel * L + x), at, t.vectors + x * dp);
    pack_rows(t.vectors, dp, lanes, D, L, to);
  }

  // t.s = p of a panel and a block.
  __attribute__((noinline)) void weigh(const Group& f, const Tiles& t, int64_t group, int64_t k,
                                       int64_t panel, const Block& block) const {
    Vec<T> top[NV];
    if (block.count > 0) scores(f, t, group, k, panel, block, top);
    if (!p.normalize) return;
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      const Vec<T> m = load(f.m + panel * L + n * W), inverse = load(f.inverse + panel * L + n * W);
      _Pragma("GCC unroll 4") for (int64_t i = 0; i < block.count; ++i) {
        T* x = t.s + i * L + n * W;
        store(x, weight_of(load(x) - m) * inverse);
      }
    }
  }

  // Moves tile rows to the positions of the block's rows; zero elsewhere.
  static void spread(T* tile, const Block& block, const int64_t* at, int64_t rows) {
    if (block.all) return;
    int64_t i = block.count - 1;
    for (int64_t n = rows - 1; n >= 0; --n) {
      const bool is_moved = i >= 0 && at[i] == n;
      for (int64_t x = 0; x < L; x += W)
        store(tile + n * L + x, is_moved ? load(tile + i * L + x) : Vec<T>{});
      i -= is_moved;
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
