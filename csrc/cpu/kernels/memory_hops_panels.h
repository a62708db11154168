// Memory hops of many queries on one memory: matrix products, bound by arithmetic.
//
// As in attention, scores lie transposed, S^T = M U^T, a panel of queries across the lanes: the
// memory is read where it lies, by broadcast, the softmax is vertical, and its result is the
// right-hand side of O^T = C^T P^T. Rows go by chunks that depend on N and the width alone. A hop
// needs all of the one before, so each is two steps, shared among the threads: every chunk against
// every panel, and the merge of a panel's chunks, which ends with its next u. Backward likewise;
// a chunk there owns its rows of dM and dC.
#pragma once
#include "../threads.h"
#include "attention_backward.h"
#include "memory_hops.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class S>
struct HopPolicy {
  typedef Single<S> type;
};
template <>
struct HopPolicy<double> {
  typedef Double type;
};

template <class S>
class PanelHops : HopSteps<S> {
  typedef HopSteps<S> Base;
  typedef typename Base::T T;
  typedef typename HopPolicy<S>::type P;
  using Base::batch_of, Base::dp, Base::groups, Base::p, Base::query_of, Base::R, Base::row_of,
      Base::stats, Base::trace, Base::W;
  static constexpr int NV = kPanelVectors;
  static constexpr int64_t L = NV * W;
  static constexpr int64_t kChain = 256;  // the longest chain of additions in a dot product
  static constexpr int64_t kBlockPanels = 256 / L;  // panels that meet a block of rows in cache

 public:
  explicit PanelHops(const MemoryHopsParams& params)
      : Base(params),
        D(params.D),
        Bk(key_block<P>(params.D, params.D)),
        chunk(round_up(max_of<int64_t>(256, (params.N + 15) / 16), Bk)),
        chunks((params.N + chunk - 1) / chunk),
        panels((R + L - 1) / L) {}

  // More queries than this on a memory, and lanes of queries beat lanes of the width.
  static bool serves(const MemoryHopsParams& p) {
    return p.crowded || (p.shared ? p.B * p.Q : p.Q) > 4;
  }

  void forward() {
    run(4.0 * groups * R * p.K * p.N * D, [&](const Group& f, int64_t group, auto each) {
      each(panels, [&](const Tiles&, int64_t i) { begin(f, group, i); });
      choose(f, group, 0);
      for (int64_t k = 0; k < p.K && f.moving[0] > 0; ++k) {
        const int64_t panels = panels_of(f), blocks = (panels + kBlockPanels - 1) / kBlockPanels;
        if (k == 0) each(panels, [&](const Tiles& t, int64_t i) { pack(f, t, group, 0, i); });
        each(blocks * chunks, [&](const Tiles& t, int64_t i) {
          read_chunk(f, t, group, k, i % blocks, i / blocks);
        });
        each(panels, [&](const Tiles& t, int64_t i) { merge(f, t, group, k, i); });
        if (p.weights != nullptr)
          each(panels * chunks, [&](const Tiles& t, int64_t i) {
            write_weights(f, t, group, k, i % panels, i / panels);
          });
        this->rest_together(group);
        choose(f, group, k + 1);
        each(panels_of(f), [&](const Tiles& t, int64_t i) { pack(f, t, group, 2 * k + 2, i); });
      }
    });
  }

  void backward() {
    run(14.0 * groups * R * p.K * p.N * D, [&](const Group& f, int64_t group, auto each) {
      arrange(f, group);
      each(panels, [&](const Tiles&, int64_t i) { begin_backward(f, group, i); });
      for (int64_t k = p.K - 1; k >= 0; --k) {
        while (f.moving[0] < R && this->moves(row_of(group, f.order[f.moving[0]]), k))
          ++f.moving[0];
        const int64_t panels = panels_of(f);
        each(panels, [&](const Tiles& t, int64_t i) { prepare(f, t, group, k, i); });
        if (p.grad_weights.data != nullptr && p.normalize) {
          each(panels * chunks, [&](const Tiles& t, int64_t i) {
            weigh_gradient(f, t, group, k, i % panels, i / panels);
          });
          each(panels, [&](const Tiles&, int64_t i) { add_to_delta(f, i); });
        }
        each(chunks, [&](const Tiles& t, int64_t c) { derive_chunk(f, t, group, k, c); });
        each(panels, [&](const Tiles& t, int64_t i) { collect(f, t, group, k, i); });
      }
      each(panels, [&](const Tiles&, int64_t i) {
        for (int64_t r = i * L; r < min_of(R, (i + 1) * L); ++r)
          this->write_vector(p.grad_query, row_of(group, f.order[r]), f.g_rows + r * dp);
      });
      if constexpr (!kSame<S, T>)
        each(chunks, [&](const Tiles&, int64_t c) { round(f, group, c); });
    });
  }

 private:
  const int64_t D, Bk, chunk, chunks, panels;

  // What the threads share of one group of queries.
  struct Group {
    T* u;                          // [panels][D][L]
    T* g;                          // [panels][D][L]
    T *u_rows, *g_rows;            // [panels L][dp]: scale u, and g
    T* part;                       // [chunks][panels][D + 2][L]: O^T (backward: dU^T), m and l
    T *m, *inverse, *delta;        // [panels L]
    int64_t *order, *moving;       // [R]: the query in each lane; [1]: how many there are
    T *grad_in, *grad_out_memory;  // [slots][N][D], in T
  };
  // A thread's own.
  struct Tiles {
    T *s, *ds;        // [Bk][L]
    T *bias, *dw;     // [Bk][L]
    T *in, *out;      // [Bk][D]
    T *d_in, *d_out;  // [Bk][dp]
    T* vectors;       // [L + 2][dp]
    int64_t* at;      // [Bk]
  };

  Group group_at(Arena& a) const {
    const bool back = p.grad_query != nullptr;
    const int64_t n = panels * L;
    Group f{};
    f.u = a.take<T>(n * D);
    f.part = a.take<T>(max_of<int64_t>(1, chunks) * panels * part_size());
    f.m = a.take<T>(n), f.inverse = a.take<T>(n), f.delta = a.take<T>(n);
    f.order = a.take<int64_t>(R), f.moving = a.take<int64_t>(1);
    if (!back) return f;
    f.g = a.take<T>(n * D);
    f.u_rows = a.take<T>(n * dp), f.g_rows = a.take<T>(n * dp);
    if constexpr (!kSame<S, T>) {
      f.grad_in = a.take<T>(p.grad_in != nullptr ? p.in_slots * p.N * D : 0);
      f.grad_out_memory = a.take<T>(p.grad_out_memory != nullptr ? p.out_slots * p.N * D : 0);
    }
    return f;
  }
  Tiles tiles_at(Arena& a) const {
    const bool back = p.grad_query != nullptr;
    Tiles t;
    t.s = a.take<T>(Bk * L), t.ds = a.take<T>(Bk * L);
    t.bias = a.take<T>(Bk * L), t.dw = a.take<T>(Bk * L);
    t.in = a.take<T>(Bk * D), t.out = a.take<T>(Bk * D);
    t.d_in = a.take<T>(back ? Bk * dp : 0), t.d_out = a.take<T>(back ? Bk * dp : 0);
    t.vectors = a.take<T>((L + 2) * (dp + W));
    t.at = a.take<int64_t>(Bk);
    return t;
  }
  int64_t part_size() const { return (D + 2) * L; }
  T* part(const Group& f, int64_t panel, int64_t c) const {
    return f.part + (c * panels + panel) * part_size();
  }

  // Many groups are shared among the threads; else the tasks within one are.
  template <class F>
  void run(double flops, F of_group) {
    Arena group_size(nullptr), tile_size(nullptr);
    group_at(group_size), tiles_at(tile_size);
    if (groups < 4 * p.threads) {
      const int team = team_size(p.threads, max_of(panels, chunks), flops / groups);
      void* memory = __builtin_malloc(group_size.used() + 64);
      const auto aligned = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
      Arena arena(reinterpret_cast<void*>(aligned));
      const Group f = group_at(arena);
      for (int64_t group = 0; group < groups; ++group)
        of_group(f, group, [&](int64_t tasks, auto task) {
#pragma omp parallel num_threads(team) if (team > 1)
          {
            Arena own(thread_scratch(tile_size.used()));
            const Tiles t = tiles_at(own);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < tasks; ++i) task(t, i);
          }
        });
      __builtin_free(memory);
      return;
    }
    const int team = team_size(p.threads, groups, flops);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Arena arena(thread_scratch(group_size.used() + tile_size.used()));
      const Group f = group_at(arena);
      const Tiles t = tiles_at(arena);
#pragma omp for schedule(dynamic, 1)
      for (int64_t group = 0; group < groups; ++group)
        of_group(f, group, [&](int64_t tasks, auto task) {
          for (int64_t i = 0; i < tasks; ++i) task(t, i);
        });
    }
  }

  // ---- which queries

  // The lanes of hop k: the queries that still move, close together.
  void choose(const Group& f, int64_t group, int64_t k) const {
    int64_t count = 0;
    for (int64_t r = 0; r < R; ++r)
      if (this->moves(row_of(group, r), k)) f.order[count++] = r;
    f.moving[0] = count;
  }
  // Those of all hops of backward: who moves longest comes first, so that the lanes in use are
  // always the first ones.
  void arrange(const Group& f, int64_t group) const {
    f.moving[0] = p.settles ? 0 : R;
    for (int64_t r = 0; r < R; ++r) f.order[r] = r;
    if (!p.settles) return;
    int64_t* const taken = p.taken + row_of(group, 0);
    int64_t at = 0;
    for (int64_t steps = p.K; steps >= 0; --steps)
      for (int64_t r = 0; r < R; ++r)
        if (taken[r] == steps) f.order[at++] = r;
  }
  int64_t panels_of(const Group& f) const { return (f.moving[0] + L - 1) / L; }
  int64_t lanes_of(const Group& f, int64_t panel) const {
    return min_of(L, f.moving[0] - panel * L);
  }
  int64_t row_in(const Group& f, int64_t group, int64_t lane) const {
    return row_of(group, f.order[lane]);
  }

  // ---- rows and what of them is seen

  bool excludes() const { return p.mask.data != nullptr || p.bias.data != nullptr; }
  // The mask and the bias are the same for all queries of a group: one value a row.
  bool by_row() const {
    const auto common = [&](const Tensor4& x) {
      return x.data == nullptr || (x.stride[1] == 0 && (x.stride[0] == 0 || !p.shared));
    };
    return common(p.mask) && common(p.bias);
  }

  // The bias of a query and a row, -inf where it is excluded.
  T bias_at(int64_t row, int64_t k, int64_t n) const {
    const int64_t b = batch_of(row), q = query_of(row), *sm = p.mask.stride, *sb = p.bias.stride;
    if (p.mask.data != nullptr &&
        !static_cast<const Bool*>(p.mask.data)[b * sm[0] + q * sm[1] + k * sm[2] + n * sm[3]].bits)
      return -kInf<T>;
    T x = T(0);
    if (p.bias.data != nullptr)
      with_storage(p.bias.data, p.bias_dtype, [&](const auto* data) {
        x = static_cast<T>(widen(data[b * sb[0] + q * sb[1] + k * sb[2] + n * sb[3]]));
      });
    return x;
  }

  // A block of rows in cache, without those that no query may see.
  struct Block {
    int64_t n0, count;
    bool all;           // row i of the block is n0 + i, else n0 + at[i]
    bool by_row;        // bias[i] is that of row i; else it comes by panel
    bool leaky;         // holds a number that is not finite beside a partial mask
    const T *in, *out;  // [count][D]
  };

  Block block_of(const Tiles& t, int64_t group, int64_t k, int64_t n0, int64_t n1) const {
    Block block{n0, n1 - n0, true, by_row(), false, nullptr, nullptr};
    if (excludes() && block.by_row) {
      block.count = 0;
      for (int64_t n = n0; n < n1; ++n) {
        const T bias = bias_at(row_of(group, 0), k, n);
        if (bias == -kInf<T>) continue;
        t.at[block.count] = n - n0;
        t.bias[block.count++] = bias;
      }
      block.all = block.count == n1 - n0;
    }
    const Rows<S> in = this->in_rows(group, k, n0), out = this->out_rows(group, k, n0);
    block.in = stage(in, block, t.at, t.in);
    block.out = in.base == out.base ? block.in : stage(out, block, t.at, t.out);
    block.leaky = excludes() && !block.by_row &&
                  !(all_finite(block.in, D, int64_t(1), block.count, D) &&
                    all_finite(block.out, D, int64_t(1), block.count, D));
    return block;
  }

  const T* stage(Rows<S> rows, const Block& block, const int64_t* at, T* dst) const {
    if constexpr (kSame<S, T>) {
      if (block.all && rows.stride == D) return rows.base;
    }
    if (block.all) {
      stage_rows<T>(rows.base, rows.stride, int64_t(1), block.count, D, dst, D);
    } else {
      for (int64_t i = 0; i < block.count; ++i)
        stage_rows<T>(rows.base + at[i] * rows.stride, D, int64_t(1), 1, D, dst + i * D, D);
    }
    return dst;
  }

  // t.bias of a panel and a block; lanes without a query see nothing.
  __attribute__((noinline)) void bias_tile(const Group& f, const Tiles& t, int64_t group, int64_t k,
                                           int64_t panel, const Block& block) const {
    const int64_t queries = lanes_of(f, panel);
    for (int64_t x = 0; x < block.count * L; x += W)
      store(t.bias + x, x % L + W <= queries ? Vec<T>{} : splat<T>(-kInf<T>));
    const auto offset = [&](const Tensor4& x, int64_t row) {
      const int64_t* st = x.stride;
      return batch_of(row) * st[0] + query_of(row) * st[1] + k * st[2] + block.n0 * st[3];
    };
    for (int64_t l = 0; l < queries; ++l) {
      const int64_t row = row_in(f, group, panel * L + l);
      T* to = t.bias + l;
      if (p.bias.data != nullptr) {
        with_storage(p.bias.data, p.bias_dtype, [&](const auto* data) {
          const auto* from = data + offset(p.bias, row);
          for (int64_t i = 0; i < block.count; ++i)
            to[i * L] = static_cast<T>(widen(from[i * p.bias.stride[3]]));
        });
      } else {
        for (int64_t i = 0; i < block.count; ++i) to[i * L] = T(0);
      }
      if (p.mask.data == nullptr) continue;
      const Bool* seen = static_cast<const Bool*>(p.mask.data) + offset(p.mask, row);
      for (int64_t i = 0; i < block.count; ++i)
        if (!seen[i * p.mask.stride[3]].bits) to[i * L] = -kInf<T>;
    }
  }

  // t.s = scale M U^T + bias [count][L] of a panel, -inf where excluded, and the maximum.
  __attribute__((noinline)) void scores(const Group& f, const Tiles& t, int64_t group, int64_t k,
                                        int64_t panel, const Block& block, Vec<T>* top) const {
    score_products<P, NV>(block.count, block.in, f.u + panel * L * D, D, kChain, t.s, top);
    const T scale = static_cast<T>(p.scale);
    const bool tile = excludes() && !block.by_row;
    if (tile) {
      bias_tile(f, t, group, k, panel, block);
    } else if (scale == T(1) && !excludes()) {
      return;
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) top[n] = splat<T>(-kInf<T>);
    for (int64_t i = 0; i < block.count; ++i) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        T* s = t.s + i * L + n * W;
        Vec<T> x = load(s) * scale;
        if (tile) {
          const Vec<T> b = load(t.bias + i * L + n * W);
          x = select<T>(b == -kInf<T>, splat<T>(-kInf<T>), x + b);
        } else if (excludes()) {
          x += t.bias[i];
        }
        store(s, x);
        top[n] = max_of(top[n], x);
      }
  }

  // y[D][L] += A^T x: A [count][D], x [count][L]; zeros are left out where A is not finite.
  void add_transposed(const T* A, const T* x, const Block& block, const Vec<T>* alpha, T* y) const {
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

  // ---- forward

  // u_1 of a panel, before any is left out.
  void begin(const Group&, int64_t group, int64_t panel) const {
    if (p.resume) return;
    const int64_t* st = p.query.stride;
    for (int64_t r = panel * L; r < min_of(R, (panel + 1) * L); ++r) {
      const int64_t row = row_of(group, r);
      const S* from =
          static_cast<const S*>(p.query.data) + batch_of(row) * st[0] + query_of(row) * st[1];
      for (int64_t d = 0; d < D; ++d) trace(row, 0)[d] = static_cast<T>(widen(from[d * st[3]]));
      if (p.settles && !this->moves(row, 0)) write_trace(row);
    }
  }

  void write_trace(int64_t row) const {  // the result of a query that takes no step
    for (int64_t d = 0; d < D; ++d) narrow(trace(row, 0)[d], static_cast<S*>(p.out) + row * D + d);
  }

  // f.u of a panel, from the trace.
  void pack(const Group& f, const Tiles& t, int64_t group, int64_t at, int64_t panel) const {
    const int64_t lanes = lanes_of(f, panel), first = row_in(f, group, panel * L);
    T* to = f.u + panel * L * D;
    if (!p.settles)
      return pack_transposed<T>(trace(first, at), (2 * p.K + 1) * D, int64_t(1), lanes, D, L, to,
                                L);
    for (int64_t x = 0; x < lanes; ++x)
      this->read_vector(trace(row_in(f, group, panel * L + x), at), 1, t.vectors + x * dp);
    pack_transposed<T>(t.vectors, dp, int64_t(1), lanes, D, L, to, L);
  }

  void read_chunk(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t block_of_panels,
                  int64_t c) const {
    const int64_t first = block_of_panels * kBlockPanels;
    const int64_t last = min_of(panels_of(f), first + kBlockPanels);
    for (int64_t i = first; i < last; ++i) {
      T* o = part(f, i, c);
      for (int64_t x = 0; x < D * L; x += W) store(o + x, Vec<T>{});
      for (int64_t x = 0; x < L; x += W) {
        store(o + D * L + x, splat<T>(-kInf<T>));
        store(o + (D + 1) * L + x, Vec<T>{});
      }
    }
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += Bk) {
      const Block block = block_of(t, group, k, n0, min_of(end, n0 + Bk));
      if (block.count == 0) continue;
      for (int64_t i = first; i < last; ++i) read_block(f, t, group, k, i, block, part(f, i, c));
    }
  }

  // O^T <- alpha O^T + C^T P^T of a panel and a block of rows.
  void read_block(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                  const Block& block, T* o) const {
    Vec<T> top[NV], alpha[NV];
    scores(f, t, group, k, panel, block, top);
    T *m = o + D * L, *l = m + L;
    if (p.normalize) {
      soften(t.s, block.count, top, m, l, alpha);
    } else {
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) alpha[n] = splat<T>(T(1));
      if (excludes())
        for (int64_t x = 0; x < block.count * L; x += W) {
          const Vec<T> s = load(t.s + x);
          store(t.s + x, select<T>(s == -kInf<T>, Vec<T>{}, s));
        }
    }
    add_transposed(block.out, t.s, block, alpha, o);
  }

  // m' = max(m, S);  alpha = e^(m - m');  S <- e^(S - m');  l = alpha l + sum S
  static FASTATTN_INLINE void soften(T* s, int64_t count, const Vec<T>* top, T* m, T* l,
                                     Vec<T>* alpha) {
    Vec<T> reference[NV], sum[NV];
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      const Vec<T> before = load(m + n * W), after = max_of(before, top[n]);
      store(m + n * W, after);
      reference[n] = select<T>(after == -kInf<T>, Vec<T>{}, after);
      alpha[n] = weight_of(before - reference[n]);
      sum[n] = Vec<T>{};
    }
    _Pragma("GCC unroll 4") for (int64_t i = 0; i < count; ++i)
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      T* x = s + i * L + n * W;
      const Vec<T> e = weight_of(load(x) - reference[n]);
      sum[n] += e;
      store(x, e);
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n)
        store(l + n * W, alpha[n] * load(l + n * W) + sum[n]);
  }

  // o of a panel from its chunks, and the step to the next u.
  void merge(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel) const {
    T* total = part(f, panel, 0);
    T *m = total + D * L, *l = m + L;
    if (chunks == 0) {
      for (int64_t x = 0; x < (D + 2) * L; ++x) total[x] = T(0);
      for (int64_t x = 0; x < L; ++x) m[x] = -kInf<T>;
    }
    for (int64_t c = 1; c < chunks; ++c) {
      const T* other = part(f, panel, c);
      for (int64_t x = 0; x < L; x += W) {
        Vec<T> a = splat<T>(T(1)), b = a;
        if (p.normalize) {
          const Vec<T> mine = load(m + x), its = load(other + D * L + x), to = max_of(mine, its);
          const Vec<T> reference = select<T>(to == -kInf<T>, Vec<T>{}, to);
          a = weight_of(mine - reference);
          b = weight_of(its - reference);
          store(m + x, to);
          store(l + x, load(l + x) * a + load(other + (D + 1) * L + x) * b);
        }
        for (int64_t d = 0; d < D; ++d) {
          T* o = total + d * L + x;
          store(o, load(o) * a + load(other + d * L + x) * b);
        }
      }
    }
    T inverse[L];
    for (int64_t x = 0; x < L; ++x) {
      const bool nothing = m[x] == -kInf<T>;
      inverse[x] = p.normalize ? (nothing ? T(0) : T(1) / l[x]) : T(1);
      f.m[panel * L + x] = nothing ? T(0) : m[x];
      f.inverse[panel * L + x] = inverse[x];
    }
    T *o = t.vectors, *u = o + L * dp, *next = u + dp + W;
    const int64_t queries = lanes_of(f, panel);
    for (int64_t x = 0; x < queries * dp; x += W) store(o + x, Vec<T>{});
    unpack_transposed<T>(total, L, inverse, queries, D, o, dp);
    for (int64_t x = 0; x < queries; ++x) {
      const int64_t row = row_in(f, group, panel * L + x);
      stats(row, k)[0] = m[x], stats(row, k)[1] = l[x];
      this->read_vector(trace(row, 2 * k), 1, u);
      this->step(row, k, u, o + x * dp, next);
      if (p.settles || k == p.K - 1) this->write_vector(p.out, row, u);
    }
  }

  void write_weights(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                     int64_t c) const {
    const int64_t row = row_of(group, panel * L), queries = min_of(L, R - panel * L);
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += Bk) {
      const int64_t n1 = min_of(end, n0 + Bk);
      const Block block = block_of(t, group, k, n0, n1);
      weigh(f, t, group, k, panel, block);
      spread(t.s, block, t.at, n1 - n0);
      T ones[L];
      for (T& x : ones) x = T(1);
      unpack_transposed<T>(t.s, L, ones, queries, n1 - n0,
                           static_cast<S*>(p.weights) + (row * p.K + k) * p.N + n0, p.K * p.N);
    }
  }

  // Tile rows back to the places of the block's rows, zero elsewhere.
  static void spread(T* tile, const Block& block, const int64_t* at, int64_t rows) {
    if (block.all) return;
    int64_t i = block.count - 1;
    for (int64_t n = rows - 1; n >= 0; --n) {
      const bool seen = i >= 0 && at[i] == n;
      for (int64_t x = 0; x < L; x += W)
        store(tile + n * L + x, seen ? load(tile + i * L + x) : Vec<T>{});
      i -= seen;
    }
  }

  // t.s = p of a panel and a block.
  void weigh(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
             const Block& block) const {
    Vec<T> top[NV];
    if (block.count > 0) scores(f, t, group, k, panel, block, top);
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      const Vec<T> m = load(f.m + panel * L + n * W), inverse = load(f.inverse + panel * L + n * W);
      _Pragma("GCC unroll 4") for (int64_t i = 0; i < block.count; ++i) {
        T* x = t.s + i * L + n * W;
        const Vec<T> s = load(x);
        if (p.normalize)
          store(x, weight_of(s - m) * inverse);
        else
          store(x, select<T>(s == -kInf<T>, Vec<T>{}, s));
      }
    }
  }

  // ---- backward

  void begin_backward(const Group& f, int64_t group, int64_t panel) const {
    const int64_t* st = p.grad_out.stride;
    for (int64_t r = panel * L; r < (panel + 1) * L; ++r) {
      T* g = f.g_rows + r * dp;
      for (int64_t d = 0; d < dp; ++d) g[d] = T(0);
      if (r >= R || p.grad_out.data == nullptr) continue;
      const int64_t row = row_in(f, group, r);
      this->read_vector(
          static_cast<const S*>(p.grad_out.data) + batch_of(row) * st[0] + query_of(row) * st[1],
          st[3], g);
    }
  }

  // g <- g o phi', and everything of a panel that does not depend on the rows.
  void prepare(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel) const {
    const T scale = static_cast<T>(p.scale);
    for (int64_t r = panel * L; r < (panel + 1) * L; ++r) {
      T *u = f.u_rows + r * dp, *g = f.g_rows + r * dp;
      f.m[r] = f.inverse[r] = f.delta[r] = T(0);
      for (int64_t d = 0; d < dp; ++d) u[d] = T(0);
      if (r >= f.moving[0]) {
        if (p.settles) f.m[r] = kInf<T>;  // e^(s - m) = 0, whatever its bias
        continue;
      }
      const int64_t row = row_in(f, group, r);
      this->through_activation(trace(row, 2 * k + 2), g);
      this->keep_state(row, k, g);
      const T m = stats(row, k)[0];
      if (p.normalize && m == -kInf<T>) continue;
      const T *from = trace(row, 2 * k), *o = trace(row, 2 * k + 1);
      for (int64_t d = 0; d < D; ++d) u[d] = from[d] * scale;
      if (!p.normalize) {
        f.inverse[r] = T(1);
        continue;
      }
      f.m[r] = m, f.inverse[r] = T(1) / stats(row, k)[1];
      Vec<T> sum{};
      for (int64_t d = 0; d < D; d += W)
        sum += load_first(o + d, static_cast<int>(min_of<int64_t>(W, D - d))) * load(g + d);
      f.delta[r] = sum_lanes<T>(sum);
    }
    pack(f, t, group, 2 * k, panel);
    pack_transposed<T>(f.g_rows + panel * L * dp, dp, int64_t(1), L, D, L, f.g + panel * L * D, L);
    // A query that sees nothing hands on nothing, not even its own NaN times zero.
    for (int64_t r = panel * L; r < min_of(R, (panel + 1) * L); ++r) {
      if (f.inverse[r] != T(0)) continue;
      for (int64_t d = 0; d < D; ++d)
        f.u[(panel * D + d) * L + r % L] = f.g[(panel * D + d) * L + r % L] = T(0);
    }
  }

  // t.dw = the gradient of the weights, of a panel and a block.
  void pack_weight_gradient(const Tiles& t, int64_t group, int64_t k, int64_t panel,
                            const Block& block) const {
    const int64_t *st = p.grad_weights.stride, queries = min_of(L, R - panel * L);
    for (int64_t l = 0; l < L; ++l) {
      const int64_t row = row_of(group, panel * L + min_of(l, queries - 1));
      const S* from = static_cast<const S*>(p.grad_weights.data) + batch_of(row) * st[0] +
                      query_of(row) * st[1] + k * st[2] + block.n0 * st[3];
      for (int64_t i = 0; i < block.count; ++i)
        t.dw[i * L + l] =
            l < queries ? static_cast<T>(widen(from[(block.all ? i : t.at[i]) * st[3]])) : T(0);
    }
  }

  // The part of delta that the gradient of the weights adds: sum_i p_i dw_i of a chunk.
  void weigh_gradient(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                      int64_t c) const {
    Vec<T> sum[NV] = {};
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += Bk) {
      const Block block = block_of(t, group, k, n0, min_of(end, n0 + Bk));
      weigh(f, t, group, k, panel, block);
      pack_weight_gradient(t, group, k, panel, block);
      for (int64_t i = 0; i < block.count; ++i) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
          const Vec<T> w = load(t.s + i * L + n * W);
          sum[n] += select<T>(w == T(0), Vec<T>{}, w * load(t.dw + i * L + n * W));
        }
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) store(part(f, panel, c) + n * W, sum[n]);
  }
  void add_to_delta(const Group& f, int64_t panel) const {
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t x = 0; x < L; x += W) {
        T* delta = f.delta + panel * L + x;
        store(delta, load(delta) + load(part(f, panel, c) + x));
      }
  }

  void derive_chunk(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t c) const {
    const int64_t panels = panels_of(f);
    for (int64_t i = 0; i < panels; ++i)
      for (int64_t x = 0; x < D * L; x += W) store(part(f, i, c) + x, Vec<T>{});
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += Bk) {
      const int64_t n1 = min_of(end, n0 + Bk);
      const Block block = block_of(t, group, k, n0, n1);
      __builtin_memset(t.d_in, 0, static_cast<size_t>(Bk * dp) * sizeof(T));
      __builtin_memset(t.d_out, 0, static_cast<size_t>(Bk * dp) * sizeof(T));
      for (int64_t i = 0; i < panels; ++i) {
        if (block.count > 0) derive_block(f, t, group, k, i, block, part(f, i, c));
        if (p.grad_scores != nullptr) write_scores(f, t, group, k, i, block, n1 - n0);
      }
      add_gradients(f, t, group, k, block, n1);
    }
  }

  // p and ds of a panel and a block, in t.s and t.ds, and what they add to the gradients.
  void derive_block(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                    const Block& block, T* du) const {
    Vec<T> top[NV], one[NV];
    weigh(f, t, group, k, panel, block);
    score_products<P, NV>(block.count, block.out, f.g + panel * L * D, D, kChain, t.ds, top);  // dP
    const bool weighted = p.grad_weights.data != nullptr;
    if (weighted) pack_weight_gradient(t, group, k, panel, block);
    const bool tile = excludes() && !block.by_row;
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      one[n] = splat<T>(T(1));
      const Vec<T> delta = load(f.delta + panel * L + n * W);
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t at = i * L + n * W;
        const Vec<T> weight = load(t.s + at);
        Vec<T> ds = load(t.ds + at);
        if (weighted) ds += load(t.dw + at);
        if (p.normalize) ds = weight * (ds - delta);
        // What is excluded may be NaN, and 0 * NaN must not pass.
        if (tile)
          ds = p.normalize ? select<T>(weight == T(0), Vec<T>{}, ds)
                           : select<T>(load(t.bias + at) == -kInf<T>, Vec<T>{}, ds);
        store(t.ds + at, ds);
      }
    }
    const int64_t queries = lanes_of(f, panel);
    if (p.grad_in != nullptr || p.grad_out_memory != nullptr) {
      T* d_out = p.same_rows ? t.d_in : t.d_out;
      add_product<P>(block.count, t.s, L, f.g_rows + panel * L * dp, dp, queries, d_out, dp,
                     dp / W);
      add_product<P>(block.count, t.ds, L, f.u_rows + panel * L * dp, dp, queries, t.d_in, dp,
                     dp / W);
    }
    add_transposed(block.in, t.ds, block, one, du);
  }

  void write_scores(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                    const Block& block, int64_t rows) const {
    if (block.count == 0)
      __builtin_memset(t.ds, 0, static_cast<size_t>(rows * L) * sizeof(T));
    else
      spread(t.ds, block, t.at, rows);
    T ones[L];
    for (T& x : ones) x = T(1);
    const auto place = [&](int64_t row) {
      return static_cast<T*>(p.grad_scores) + (row * p.K + k) * p.N + block.n0;
    };
    const int64_t lanes = lanes_of(f, panel);
    if (!p.settles)
      return unpack_transposed<T>(t.ds, L, ones, lanes, rows, place(row_of(group, panel * L)),
                                  p.K * p.N);
    for (int64_t x = 0; x < lanes; ++x) {
      T* to = place(row_in(f, group, panel * L + x));
      for (int64_t n = 0; n < rows; ++n) to[n] = t.ds[n * L + x];
    }
  }

  // Adds a block's gradients to those of the memories, whose first hop overwrites.
  void add_gradients(const Group& f, const Tiles& t, int64_t group, int64_t k, const Block& block,
                     int64_t n1) const {
    spread_rows(t.d_in, block, t.at, n1 - block.n0);
    spread_rows(t.d_out, block, t.at, n1 - block.n0);
    const bool last = k == p.K - 1;
    const auto add = [&](T* all, int64_t slots, int64_t slot, const T* from, bool first) {
      if (all == nullptr) return;
      for (int64_t n = block.n0; n < n1; ++n) {
        T* to = all + (slot * p.N + n) * D;
        const T* x = from + (n - block.n0) * dp;
        for (int64_t d = 0; d < D; d += W) {
          const int count = static_cast<int>(min_of<int64_t>(W, D - d));
          const Vec<T> v = load(x + d);
          store_first(to + d, first ? v : load_first(to + d, count) + v, count);
        }
      }
      (void)slots;
    };
    T* in = gradient(f.grad_in, p.grad_in, group, p.in_slots);
    T* out = gradient(f.grad_out_memory, p.grad_out_memory, group, p.out_slots);
    if (p.stack) {
      add(in, p.in_slots, k + 1, t.d_out, last);
      add(in, p.in_slots, k, t.d_in, true);
      return;
    }
    const bool own_in = p.in_slots > 1, own_out = p.out_slots > 1;
    add(in, p.in_slots, own_in ? k : 0, t.d_in, own_in || last);
    add(out, p.out_slots, own_out ? k : 0, t.d_out, own_out || last);
  }
  void spread_rows(T* rows, const Block& block, const int64_t* at, int64_t count) const {
    if (block.all) return;
    int64_t i = block.count - 1;
    for (int64_t n = count - 1; n >= 0; --n) {
      const bool seen = i >= 0 && at[i] == n;
      for (int64_t d = 0; d < dp; d += W)
        store(rows + n * dp + d, seen ? load(rows + i * dp + d) : Vec<T>{});
      i -= seen;
    }
  }

  // Where a memory's gradient is summed: in the result, or in T beside a narrower one.
  T* gradient(T* wide, void* result, int64_t group, int64_t slots) const {
    if (result == nullptr) return nullptr;
    if constexpr (kSame<S, T>) return static_cast<T*>(result) + group * slots * p.N * D;
    return wide;
  }

  void round(const Group& f, int64_t group, int64_t c) const {
    const int64_t n0 = c * chunk, n1 = min_of(p.N, n0 + chunk);
    const auto all = [&](const T* from, void* to, int64_t slots) {
      if (to == nullptr) return;
      for (int64_t slot = 0; slot < slots; ++slot) {
        S* dst = static_cast<S*>(to) + ((group * slots + slot) * p.N + n0) * D;
        const T* src = from + (slot * p.N + n0) * D;
        const int64_t count = (n1 - n0) * D;
        for (int64_t x = 0; x < count; x += W) {
          const int n = static_cast<int>(min_of<int64_t>(W, count - x));
          store_as<T>(dst + x, load_first(src + x, n), n);
        }
      }
    };
    all(f.grad_in, p.grad_in, p.in_slots);
    all(f.grad_out_memory, p.grad_out_memory, p.out_slots);
  }

  // g <- H^T g + scale M^T ds of a panel, from its chunks.
  void collect(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel) const {
    (void)group;
    T* total = part(f, panel, 0);
    if (chunks == 0) __builtin_memset(total, 0, static_cast<size_t>(D * L) * sizeof(T));
    for (int64_t c = 1; c < chunks; ++c) {
      const T* other = part(f, panel, c);
      for (int64_t x = 0; x < D * L; x += W) store(total + x, load(total + x) + load(other + x));
    }
    T factor[L];
    for (T& x : factor) x = static_cast<T>(p.scale);
    const int64_t queries = lanes_of(f, panel);
    T* next = t.vectors;
    for (int64_t r = panel * L; r < panel * L + queries && p.proj.data != nullptr; ++r) {
      T* g = f.g_rows + r * dp;
      for (int64_t d = 0; d < dp; ++d) next[d] = T(0);
      add_rows<T>(this->proj_rows(k), D, D, g, T(1), next);
      __builtin_memcpy(g, next, static_cast<size_t>(dp) * sizeof(T));
    }
    if (p.settles)  // H = 0
      __builtin_memset(f.g_rows + panel * L * dp, 0, static_cast<size_t>(queries * dp) * sizeof(T));
    unpack_transposed<T>(total, L, factor, queries, D, f.g_rows + panel * L * dp, dp, true);
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
