// Memory hops of many queries on one memory, forward: every chunk against every panel, then the
// merge of each panel's chunks and the step to the next u.
#pragma once
#include "memory_hops_panels.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T, int kVectors>
class PanelForward : public PanelSteps<T, kVectors> {
  typedef PanelSteps<T, kVectors> Base;
  typedef typename Base::P P;
  typedef typename Base::Group Group;
  typedef typename Base::Tiles Tiles;
  typedef typename Base::Block Block;
  using Base::add_transposed, Base::Bk, Base::block_of, Base::choose, Base::chunk, Base::chunks,
      Base::D, Base::dp, Base::each, Base::excludes, Base::groups, Base::is_narrow, Base::L,
      Base::lanes_of, Base::NV, Base::p, Base::pack, Base::panels, Base::panels_of,
      Base::chunk_state, Base::R, Base::row_in, Base::row_of, Base::run, Base::scores, Base::spread,
      Base::stats, Base::trace, Base::W, Base::weigh;
  static constexpr int64_t kBlockPanels = 256 / L;  // panels per block of rows in cache

 public:
  explicit PanelForward(const MemoryHopsParams& params) : Base(params) {}

  void forward() {
    run(4.0 * groups * R * p.K * p.N * D,
        [&](const Group& f, int64_t group) __attribute__((noinline)) { of_group(f, group); });
  }

 private:
  // All hops of one group of queries.
  void of_group(const Group& f, int64_t group) const {
    each(f, panels, [&](const Tiles& t, int64_t i) { begin(t, group, i); });
    choose(f, group, 0);
    for (int64_t k = 0; k < p.K && f.moving[0] > 0; ++k) {
      const int64_t panels = panels_of(f), blocks = (panels + kBlockPanels - 1) / kBlockPanels;
      each(f, panels, [&](const Tiles& t, int64_t i) { pack(f, t, group, 2 * k, i); });
      each(f, blocks * chunks,
           [&](const Tiles& t, int64_t i) { read_chunk(f, t, group, k, i % blocks, i / blocks); });
      each(f, panels, [&](const Tiles& t, int64_t i) { merge(f, t, group, k, i); });
      if (p.weights != nullptr)
        each(f, panels * chunks, [&](const Tiles& t, int64_t i) {
          write_weights(f, t, group, k, i % panels, i / panels);
        });
      this->count_joint_step(group);
      choose(f, group, k + 1);
    }
  }

  // u_1 of a panel, before any query stops.
  void begin(const Tiles& t, int64_t group, int64_t panel) const {
    if (p.resume) return;
    for (int64_t r = panel * L; r < min_of(R, (panel + 1) * L); ++r) {
      const int64_t row = row_of(group, r);
      this->read_vector(p.query, row, t.vectors);
      __builtin_memcpy(trace(row, 0), t.vectors, static_cast<size_t>(D) * sizeof(T));
      if (p.settles && !this->moves(row, 0))  // the result of a query that takes no step
        this->write_vector(p.out, row, t.vectors);
    }
  }

  // Reads chunk c of the memory for one block of panels; its state stays apart, to be merged.
  void read_chunk(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t block_of_panels,
                  int64_t c) const {
    const int64_t first = block_of_panels * kBlockPanels;
    const int64_t last = min_of(panels_of(f), first + kBlockPanels);
    for (int64_t i = first; i < last; ++i) {
      T* o = chunk_state(f, i, c);
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
      for (int64_t i = first; i < last; ++i)
        read_block(f, t, group, k, i, block, chunk_state(f, i, c));
    }
  }

  // For a panel and a block of rows: O^T <- alpha O^T + C^T P^T.
  void read_block(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                  const Block& block, T* o) const {
    Vec<T> top[NV], alpha[NV];
    scores(f, t, group, k, panel, block, top);
    T *m = o + D * L, *l = m + L;
    if (p.normalize) {
      soften(t.s, block.count, top, m, l, alpha);
    } else {
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) alpha[n] = splat<T>(T(1));
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

  // o of a panel from its chunks, then the step to the next u.
  void merge(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel) const {
    T* total = chunk_state(f, panel, 0);
    T *m = total + D * L, *l = m + L;
    if (chunks == 0) {
      for (int64_t x = 0; x < (D + 2) * L; ++x) total[x] = T(0);
      for (int64_t x = 0; x < L; ++x) m[x] = -kInf<T>;
    }
    for (int64_t c = 1; c < chunks; ++c) {
      const T* other = chunk_state(f, panel, c);
      for (int64_t x = 0; x < L; x += W) {
        Shares<T> share = {splat<T>(T(1)), splat<T>(T(1))};
        if (p.normalize) {
          Vec<T> to = load(m + x), sum = load(l + x);
          share = merge_sums<T>(&to, &sum, load(other + D * L + x), load(other + (D + 1) * L + x),
                                kWeight<T>);
          store(m + x, to), store(l + x, sum);
        }
        for (int64_t d = 0; d < D; ++d) {
          T* o = total + d * L + x;
          store(o, load(o) * share.first + load(other + d * L + x) * share.second);
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
    unpack_rows(total, L, inverse, queries, D, o, dp);
    for (int64_t x = 0; x < queries; ++x) {
      const int64_t row = row_in(f, group, panel * L + x);
      stats(row, k)[0] = m[x], stats(row, k)[1] = l[x];
      this->read_state(row, 2 * k, u);
      this->step(row, k, u, o + x * dp, next);
      if (p.settles || k == p.K - 1) this->write_vector(p.out, row, u);
    }
  }

  // Writes the weights of one panel for the rows of chunk c.
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
      const int64_t first = (row * p.K + k) * p.N + n0, next = p.K * p.N;
      if (!is_narrow) {
        unpack_rows(t.s, L, ones, queries, n1 - n0, static_cast<T*>(p.weights) + first, next);
        continue;
      }
      unpack_rows(t.s, L, ones, queries, n1 - n0, t.ds, n1 - n0);
      for (int64_t x = 0; x < queries; ++x)
        write_elements(t.ds + x * (n1 - n0), n1 - n0, p.weights, p.dtype, first + x * next);
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
