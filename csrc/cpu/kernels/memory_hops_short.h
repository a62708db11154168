// Memory hops on a short memory: its rows are one block, all of whose scores are in scratch before
// the softmax.
//
// Each hop depends on the short vector that the previous hop computes, so latency is the bound. A
// hop has no chunks, no running maximum and nothing to merge: only the products and sums of rows
// and the step to the next u. Backward recomputes the weights, unless the forward kept them.
#pragma once
#include "memory_hops_rows.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T>
class ShortHops : RowHops<T> {
  typedef RowHops<T> Base;
  typedef typename Base::Block Block;
  typedef typename Base::Hop Hop;
  typedef typename Base::Scratch Scratch;
  using Base::ds_row, Base::groups, Base::is_narrow, Base::np, Base::p, Base::p_row, Base::R,
      Base::stats, Base::W;

 public:
  explicit ShortHops(const MemoryHopsParams& params) : Base(params) {}

  static bool serves(const MemoryHopsParams& p) { return p.N <= kHopBlock && p.together <= 1; }

  // One task for each group of queries that share a memory.
  void forward() const {
    const double flops = Base::kForward * groups * R * p.K * p.N * p.D;
    run(flops, [&](Scratch& f, int64_t group) {
      this->forward_alone(f, group, [&](int64_t row, int64_t k) __attribute__((always_inline)) {
        take_hop(f, group, row, k);
      });
    });
  }

  // One task for each group: the queries one by one, hop by hop from the last.
  void backward() const {
    const double flops = Base::kBackward * groups * R * p.K * p.N * p.D;
    run(flops, [&](Scratch& f, int64_t group) {
      for (int64_t r = 0; r < R; ++r)
        this->backward_query(f, group, r, [&](const Hop& hop) __attribute__((always_inline)) {
          backward_hop(f, group, hop);
        });
      if (this->differentiates_rows())
        this->write_gradients(f, f.wide, group, 0, this->finite_vectors(f));
    });
  }

 private:
  template <class F>
  void run(double flops, F of_group) const {
    this->each_group(flops, [&](Arena& arena) { return this->allocate(arena); }, of_group);
  }

  // One hop of one query, in one pass: the scores of all rows fit a block.
  FASTATTN_INLINE void take_hop(Scratch& f, int64_t group, int64_t row, int64_t k) const {
    alignas(64) T s[kHopBlock];
    Block block;
    this->see(row, k, 0, p.N, &block);
    if (this->prefetches_next_group(group, row, k)) this->prefetch_next(group, 0, p.N);
    T m = -kInf<T>, l = T(0);
    if (block.count > 0) {
      this->scores(this->rows_of(this->in_rows(group, k, 0), block, &f.wide.in), block, f.u, s);
      if (p.normalize) this->soften(s, block.count, &m, &l);
    }
    const T inverse = this->normalizer(m, l);
    weighted_sum(this->rows_of(this->out_rows(group, k, 0), block, &f.wide.out), block.count, p.D,
                 s, false, inverse, f.o);
    stats(row, k)[0] = m, stats(row, k)[1] = l;
    if (p.weights != nullptr) write_weights(row, k, block, s, inverse);
    this->step(row, k, f.u, f.o, f.next);
  }

  // p, from e^(s - m).
  FASTATTN_INLINE void write_weights(int64_t row, int64_t k, const Block& block, const T* s,
                                     T inverse) const {
    const int64_t first = (row * p.K + k) * p.N;
    T rounded[kHopBlock];
    T* const to = is_narrow ? rounded : static_cast<T*>(p.weights) + first;
    if (block.all) {
      int64_t n = 0;
      for (; n + W <= p.N; n += W) store(to + n, load(s + n) * inverse);
      if (n < p.N) store_first(to + n, load(s + n) * inverse, static_cast<int>(p.N - n));
    } else {
      for (int64_t n = 0; n < p.N; ++n) to[n] = T(0);
      for (int64_t i = 0; i < block.count; ++i) to[block.at[i]] = s[i] * inverse;
    }
    if (is_narrow) write_elements(to, p.N, p.weights, p.dtype, first);
  }

  // p of a hop [N] as the forward kept it, null if it did not.
  FASTATTN_INLINE const T* kept_weights(const Hop& hop) const {
    if (is_narrow || p.weights == nullptr) return nullptr;
    return static_cast<const T*>(p.weights) + (hop.row * p.K + hop.k) * p.N;
  }

  // p, ds = p (dp - delta) and f.o = M^T ds.
  FASTATTN_INLINE void backward_hop(Scratch& f, int64_t group, const Hop& hop) const {
    T* const ds_to = f.coef + ds_row(hop.k, hop.r) * np;
    T* const p_to = f.coef + p_row(hop.k, hop.r) * np;
    alignas(64) T seen_p[kHopBlock], seen_ds[kHopBlock];
    Block block;
    this->see(hop.row, hop.k, 0, p.N, &block);
    const StoredRows in = this->rows_of(this->in_rows(group, hop.k, 0), block, &f.wide.in);
    T* const s = block.all ? p_to : seen_p;
    T* const ds = block.all ? ds_to : seen_ds;
    if (const T* saved = kept_weights(hop)) {
      if (block.all)
        read_row(saved, p.N, s);
      else
        for (int64_t i = 0; i < block.count; ++i) s[i] = saved[block.at[i]];
    } else if (block.count > 0) {
      this->weigh(f, hop, in, block, s);
    }
    if (block.count > 0) {
      const StoredRows out = this->rows_of(this->out_rows(group, hop.k, 0), block, &f.wide.out);
      this->derive_weights(f, hop, 0, out, block, ds);
    }
    T delta = this->estimated_delta(f, hop);
    if (this->corrects_delta(hop)) delta += sum_lanes<T>(this->missing(s, ds, block.count, delta));
    this->differentiate(s, ds, block.count, delta);
    weighted_sum(in, block.count, p.D, ds, false, T(1), f.o);
    if (!block.all) this->spread(block, p.N, ds, ds_to), this->spread(block, p.N, s, p_to);
    if (p.grad_scores != nullptr)
      write_row(ds_to, p.N, static_cast<T*>(p.grad_scores) + (hop.row * p.K + hop.k) * p.N);
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
