// Memory hops on a short memory: its rows are one block, all of whose scores are in scratch before
// the softmax.
//
// A hop waits for the one before, and what it waits for is a vector of few elements. So the hops of
// a query are one piece of code, without calls unless rows are excluded: at bAbI's size (50 rows of
// 20) it takes 0.8 of the time of the kernel for long memories. Backward recomputes the weights,
// unless the forward kept them.
#pragma once
#include "memory_hops_rows.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class S>
class ShortHops : RowHops<S> {
  typedef RowHops<S> Base;
  typedef typename Base::T T;
  typedef typename Base::Block Block;
  typedef typename Base::Hop Hop;
  typedef typename Base::Scratch Scratch;
  using Base::ds_row, Base::groups, Base::np, Base::p, Base::p_row, Base::R, Base::stats, Base::W;

 public:
  explicit ShortHops(const MemoryHopsParams& params) : Base(params) {}

  static bool serves(const MemoryHopsParams& p) { return p.N <= kHopBlock; }

  void forward() const {
    const double flops = Base::kForward * groups * R * p.K * p.N * p.D;
    run(flops, [&](const Scratch& f, int64_t group) {
      this->forward_group(f, group, [&](int64_t row, int64_t k) __attribute__((always_inline)) {
        take_hop(f, group, row, k);
      });
    });
  }

  void backward() const {
    const double flops = Base::kBackward * groups * R * p.K * p.N * p.D;
    run(flops, [&](const Scratch& f, int64_t group) {
      for (int64_t r = 0; r < R; ++r)
        this->backward_query(f, group, r, [&](const Hop& hop) __attribute__((always_inline)) {
          derive(f, group, hop);
        });
      this->write_gradients(f, group, [](auto of_chunk) { of_chunk(0); });
    });
  }

 private:
  template <class F>
  void run(double flops, F of_group) const {
    this->each_group(flops, [&](Arena& arena) { return this->allocate(arena); }, of_group);
  }

  FASTATTN_INLINE void take_hop(const Scratch& f, int64_t group, int64_t row, int64_t k) const {
    alignas(64) T s[kHopBlock];
    Block block;
    this->see(row, k, 0, p.N, &block);
    if (this->reads_ahead(group, row, k)) this->fetch_next(group, 0, p.N);
    T m = -kInf<T>, l = T(0);
    if (block.count > 0) {
      this->scores(this->in_rows(group, k, 0), block, f.u, s);
      if (p.normalize) this->soften(s, block.count, &m, &l);
    }
    const T inverse = this->normalizer(m, l);
    sum_rows<T>(block.of(this->out_rows(group, k, 0)), block.count, p.D, s, inverse, f.o);
    stats(row, k)[0] = m, stats(row, k)[1] = l;
    if (p.weights != nullptr) write_weights(row, k, block, s, inverse);
    this->step(row, k, f.u, f.o, f.next);
  }

  // p, from e^(s - m).
  FASTATTN_INLINE void write_weights(int64_t row, int64_t k, const Block& block, const T* s,
                                     T inverse) const {
    S* to = static_cast<S*>(p.weights) + (row * p.K + k) * p.N;
    if (block.all) {
      int64_t n = 0;
      for (; n + W <= p.N; n += W) store_as<T>(to + n, load(s + n) * inverse, W);
      if (n < p.N) store_as<T>(to + n, load(s + n) * inverse, static_cast<int>(p.N - n));
      return;
    }
    for (int64_t n = 0; n < p.N; ++n) narrow(T(0), to + n);
    for (int64_t i = 0; i < block.count; ++i) narrow(s[i] * inverse, to + block.at[i]);
  }

  // p of a hop [N] as the forward kept it, null if it did not.
  FASTATTN_INLINE const T* kept_weights(const Hop& hop) const {
    if (!kSame<S, T> || p.weights == nullptr) return nullptr;
    return static_cast<const T*>(p.weights) + (hop.row * p.K + hop.k) * p.N;
  }

  // p, ds = p (dp - delta) and f.o = M^T ds.
  FASTATTN_INLINE void derive(const Scratch& f, int64_t group, const Hop& hop) const {
    T* const ds_to = f.coef + ds_row(hop.k, hop.r) * np;
    T* const p_to = f.coef + p_row(hop.k, hop.r) * np;
    alignas(64) T seen_p[kHopBlock], seen_ds[kHopBlock];
    Block block;
    this->see(hop.row, hop.k, 0, p.N, &block);
    T* const s = block.all ? p_to : seen_p;
    T* const ds = block.all ? ds_to : seen_ds;
    if (const T* kept = kept_weights(hop)) {
      if (block.all)
        read_row(kept, p.N, s);
      else
        for (int64_t i = 0; i < block.count; ++i) s[i] = kept[block.at[i]];
    } else if (block.count > 0) {
      this->weigh(f, group, hop, 0, block, s);
    }
    if (block.count > 0) this->derive_weights(f, group, hop, 0, block, ds);
    T delta = this->estimated_delta(f, hop);
    if (this->corrects_delta(hop)) delta += sum_lanes<T>(this->missing(s, ds, block.count, delta));
    this->differentiate(s, ds, block.count, delta);
    sum_rows<T>(block.of(this->in_rows(group, hop.k, 0)), block.count, p.D, ds, T(1), f.o);
    if (!block.all) this->spread(block, p.N, ds, ds_to), this->spread(block, p.N, s, p_to);
    if (p.grad_scores != nullptr)
      write_row(ds_to, p.N, static_cast<T*>(p.grad_scores) + (hop.row * p.K + hop.k) * p.N);
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
