// Memory hops of a few queries per memory, with the width of a row across the lanes: the part that
// short memories (memory_hops_short.h) and long ones (memory_hops_stream.h) share.
//
// All hops of a query run one after the other, so a memory that fits in the caches comes from main
// memory once. Backward keeps p and ds of all hops (2 K numbers per row), and writes the gradient
// of each memory once, at the end: dM = sum_k ds_k u_k^T, dC = sum_k p_k g_k^T.
#pragma once
#include "../threads.h"
#include "memory_hops_blocks.h"
#include "team.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T>
class RowHops : protected HopBlocks<T> {
  typedef HopBlocks<T> Base;

 protected:
  typedef typename Base::Block Block;
  typedef typename Base::WideBlock WideBlock;
  typedef typename Base::WideBlocks WideBlocks;
  using Base::batch_of, Base::chunk, Base::chunks, Base::dp, Base::groups, Base::is_narrow, Base::p,
      Base::query_of, Base::R, Base::row_of, Base::stats, Base::trace, Base::W;
  // The time per element of a memory, query and hop, in operations at the peak rate.
  static constexpr double kForward = 16, kBackward = 56;
  const int64_t np = vectors_of<T>(this->p.N) * W;  // N in whole vectors

  explicit RowHops(const MemoryHopsParams& params) : Base(params) {}

  // Scratch of one group; indexed by chunk where the shape says so.
  struct Scratch {
    T* u;       // [dp]
    T* o;       // [dp]
    T* g;       // [dp]
    T* next;    // [dp]
    T* coef;    // [2K R][np]: ds and p of every hop and query
    T* vector;  // [2K R][dp]: scale u and g of every hop and query
    WideBlocks wide;
  };

  // Takes the buffers of a thread from an arena.
  Scratch allocate(Arena& a) const {
    const bool back = p.grad_query != nullptr;
    Scratch f;
    f.u = a.take<T>(dp + W), f.o = a.take<T>(dp + W);
    f.g = a.take<T>(dp + W), f.next = a.take<T>(dp + W);
    f.coef = a.take<T>(back ? 2 * p.K * R * np : 0);
    f.vector = a.take<T>(back ? 2 * p.K * R * dp : 0);
    f.wide = this->wide_at(a);
    return f;
  }

  // The bytes that an allocation takes.
  template <class Allocate>
  static size_t bytes_of(Allocate allocate) {
    Arena size(nullptr);
    allocate(size);
    return size.used();
  }

  // of_group(scratch, group) for every group, shared among the threads; scratch = allocate(arena).
  // A static schedule gives a thread the same memories in every call. Their gradients often reuse
  // the same allocation and are then still in that thread's cache.
  template <class Allocate, class F>
  void each_group(double flops, Allocate allocate, F of_group) const {
    const int team = team_size(p.threads, groups, flops);
    const auto make = [&] {
      Arena arena(thread_scratch(bytes_of(allocate)));
      return allocate(arena);
    };
    each_task(team, groups, kStatic, make, of_group);
  }

  // ---- rows

  // The scores of a block, in whole vectors.
  FASTATTN_INLINE void scores(const StoredRows& rows, const Block& block, const T* u, T* s) const {
    row_products(rows, block.count, p.D, u, s);
    const T scale = static_cast<T>(p.scale);
    if (scale == T(1) && !block.biased) return;
    for (int64_t i = 0; i < block.count; i += W) {
      Vec<T> x = load(s + i) * scale;
      if (block.biased) x += load(block.bias + i);
      store(s + i, x);
    }
  }

  // s <- e^(s - m) with the new maximum m, and zeros up to a whole vector; returns the factor for
  // the sums so far.
  static FASTATTN_INLINE T soften(T* s, int64_t count, T* m, T* l) {
    if (const int tail = static_cast<int>(count % W)) {
      T* const end = s + count - tail;
      store(end, select<T>(first_lanes<T>(tail), load(end), splat<T>(-kInf<T>)));
    }
    Vec<T> top = load(s);
    for (int64_t i = W; i < count; i += W) top = max_of(top, load(s + i));
    const T of_block = largest_lane<T>(top), after = *m > of_block ? *m : of_block;
    const T reference = after == -kInf<T> ? T(0) : after;
    const T alpha = *m == -kInf<T> ? T(0) : weight_of(splat<T>(*m - reference))[0];
    Vec<T> sum{};
    for (int64_t i = 0; i < count; i += W) {
      const Vec<T> e = weight_of(load(s + i) - reference);
      sum += e;
      store(s + i, e);
    }
    *l = *l * alpha + sum_lanes<T>(sum);
    *m = after;
    return alpha;
  }

  // The factor that turns e^(s - m) into p.
  FASTATTN_INLINE T normalizer(T m, T l) const {
    return !p.normalize ? T(1) : m == -kInf<T> ? T(0) : T(1) / l;
  }

  // ---- forward

  // hop(row, k) for all queries of a group, each to its end.
  template <class F>
  FASTATTN_INLINE void forward_alone(const Scratch& f, int64_t group, F hop) const {
    for (int64_t row = row_of(group, 0); row < row_of(group + 1, 0); ++row) {
      if (p.resume && !this->moves(row, 0)) continue;
      begin(f, row);
      for (int64_t k = 0; k < p.K && this->moves(row, k); ++k) hop(row, k);
      this->write_vector(p.out, row, f.u);
    }
  }

  // f.u = u_1; also written to the trace.
  FASTATTN_INLINE void begin(const Scratch& f, int64_t row) const {
    if (p.resume) return this->read_state(row, 0, f.u);
    this->read_vector(p.query, row, f.u);
    write_row(f.u, p.D, trace(row, 0));
  }

  // ---- backward

  struct Hop {
    int64_t row, k, r;
    T m, inverse;  // p = e^(s - m) inverse
  };

  // The rows of ds and p of hop k, and of their vectors. Rows that contribute to one gradient are
  // adjacent.
  int64_t ds_row(int64_t k, int64_t r) const { return (p.stack ? 2 * k : k) * R + r; }
  int64_t p_row(int64_t k, int64_t r) const { return (p.stack ? 2 * k + 1 : p.K + k) * R + r; }

  // Clears term `at` of the gradients of the memory: it adds nothing.
  void forget(const Scratch& f, int64_t at) const {
    __builtin_memset(f.coef + at * np, 0, static_cast<size_t>(p.N) * sizeof(T));
    __builtin_memset(f.vector + at * dp, 0, static_cast<size_t>(dp) * sizeof(T));
  }

  // derive(hop) leaves p and ds of a hop in f.coef, and M^T ds in f.o.
  template <class F>
  FASTATTN_INLINE void backward_query(const Scratch& f, int64_t group, int64_t r,
                                      F backward_hop) const {
    const int64_t row = row_of(group, r);
    const T scale = static_cast<T>(p.scale);
    if (p.grad_out.data != nullptr)
      this->read_vector(p.grad_out, row, f.g);
    else
      for (int64_t d = 0; d < dp; d += W) store(f.g + d, Vec<T>{});
    for (int64_t k = p.K - 1; k >= 0; --k) {
      if (!this->moves(row, k)) {
        forget(f, ds_row(k, r)), forget(f, p_row(k, r));
        continue;
      }
      if (p.activation != Activation::none) this->through_activation(trace(row, 2 * k + 2), f.g);
      this->keep_state(row, k, f.g);
      this->read_state(row, 2 * k, f.u);
      const T m = stats(row, k)[0], l = stats(row, k)[1];
      const bool nothing = p.normalize && m == -kInf<T>;
      T* u = f.vector + ds_row(k, r) * dp;
      T* g = f.vector + p_row(k, r) * dp;
      for (int64_t d = 0; d < dp; d += W) {
        store(u + d, nothing ? Vec<T>{} : load(f.u + d) * scale);
        store(g + d, load(f.g + d));
      }
      backward_hop(
          Hop{row, k, r, m == -kInf<T> ? T(0) : m, p.normalize && !nothing ? T(1) / l : T(1)});
      // g <- H^T g + scale M^T ds
      const T* through = f.g;
      if (p.proj.data != nullptr)
        weighted_sum(this->proj_rows(k), p.D, p.D, f.g, false, T(1), f.next), through = f.next;
      for (int64_t d = 0; d < dp; d += W) {
        const Vec<T> before =
            p.settles ? Vec<T>{} : load(through + d);  // a settling query has H = 0
        store(f.g + d, before + load(f.o + d) * scale);
      }
    }
    this->write_vector(p.grad_query, row, f.g);
  }

  // o . g, an estimate of delta = sum_i p_i dp_i, dp = C g + dweights.
  //
  // If one row has all the weight, o is that row, and p (dp - delta) must be exactly 0 rather than
  // a rounding residue times the scale. So o . g is summed in the same order as dp.
  FASTATTN_INLINE T estimated_delta(const Scratch& f, const Hop& hop) const {
    if (!p.normalize || stats(hop.row, hop.k)[0] == -kInf<T>) return T(0);
    return row_product<T>(trace(hop.row, 2 * hop.k + 1), p.D, f.g);
  }
  // Whether p (dp - delta) must be added to the estimate. If one row has most of the weight, dp -
  // delta is small but the rounding error of o is not. Then the missing part is summed from the
  // same p and dp that it must cancel. The gradient of the weights enters there too.
  FASTATTN_INLINE bool corrects_delta(const Hop& hop) const {
    return p.normalize && stats(hop.row, hop.k)[0] != -kInf<T> &&
           (p.grad_weights.data != nullptr || hop.inverse > T(kSharp));
  }

  // dp of a block, C g + dweights.
  FASTATTN_INLINE void derive_weights(const Scratch& f, const Hop& hop, int64_t n0,
                                      const StoredRows& out, const Block& block, T* dp_of) const {
    row_products(out, block.count, p.D, f.g, dp_of);
    if (p.grad_weights.data != nullptr) add_grad_weights(hop, n0, block, dp_of);
  }
  // Adds the gradients of the weights of a block to dP.
  __attribute__((noinline)) void add_grad_weights(const Hop& hop, int64_t n0, const Block& block,
                                                  T* dp_of) const {
    T all[kHopBlock];
    const int64_t* st = p.grad_weights.stride;
    const int64_t first =
        batch_of(hop.row) * st[0] + query_of(hop.row) * st[1] + hop.k * st[2] + n0 * st[3];
    read_elements(p.grad_weights.data, p.dtype, first, st[3], min_of(p.N - n0, kHopBlock), all);
    for (int64_t i = 0; i < block.count; ++i) dp_of[i] += all[block.all ? i : block.at[i]];
  }
  // s = p of a block, from the scores.
  FASTATTN_INLINE void weigh(const Scratch& f, const Hop& hop, const StoredRows& in,
                             const Block& block, T* s) const {
    scores(in, block, f.u, s);
    for (int64_t i = 0; p.normalize && i < block.count; i += W)
      store(s + i, weight_of(load(s + i) - hop.m) * hop.inverse);
  }
  // sum_i p_i (dp_i - delta)
  static FASTATTN_INLINE Vec<T> missing(const T* s, const T* dp_of, int64_t count, T delta) {
    Vec<T> sum{};
    for (int64_t i = 0; i < count; i += W) {
      const int lanes = static_cast<int>(min_of<int64_t>(W, count - i));
      sum += load_first(s + i, lanes) * (load_first(dp_of + i, lanes) - delta);
    }
    return sum;
  }

  // ds = p (dp - delta) in the place of dp, from s = p.
  FASTATTN_INLINE void differentiate(const T* s, T* ds, int64_t count, T delta) const {
    for (int64_t i = 0; i < count; i += W) {
      const Vec<T> centered = load(ds + i) - delta;
      store(ds + i, p.normalize ? load(s + i) * centered : centered);
    }
  }
  // Spreads the values of a block's visible rows to to[rows], with zeros for the other rows.
  static void spread(const Block& block, int64_t rows, const T* from, T* to) {
    if (block.all) return write_row(from, rows, to);
    for (int64_t n = 0; n < rows; ++n) to[n] = T(0);
    for (int64_t i = 0; i < block.count; ++i) to[block.at[i]] = from[i];
  }

  bool differentiates_rows() const { return p.grad_in != nullptr || p.grad_out_memory != nullptr; }
  // Whether the vectors of all hops of a group are finite.
  bool finite_vectors(const Scratch& f) const {
    Vec<T> non_finite{};  // 0, or NaN in a lane with a non-finite element
    for (int64_t x = 0; x < 2 * p.K * R * dp; x += W) {
      const Vec<T> v = load(f.vector + x);
      non_finite += v - v;
    }
    return sum_lanes<T>(non_finite) == T(0);
  }
  // The gradients of the memories of a group, the rows of a chunk. Each is written once.
  void write_gradients(const Scratch& f, WideBlocks& wide, int64_t group, int64_t c,
                       bool finite) const {
    const int64_t n0 = c * chunk, n1 = min_of(p.N, n0 + chunk), K = p.K;
    const auto write = [&](void* to, int64_t slots, int64_t slot, int64_t first, int64_t last) {
      write_rows(f, wide.in, to, (group * slots + slot) * p.N * p.D, n0, n1, first * R, last * R,
                 finite);
    };
    for (int64_t slot = 0; p.grad_in != nullptr && slot < p.in_slots; ++slot) {
      if (p.stack)
        write(p.grad_in, K + 1, slot, max_of<int64_t>(0, 2 * slot - 1),
              min_of<int64_t>(2 * K, 2 * slot + 1));
      else if (p.same_rows)
        write(p.grad_in, 1, 0, 0, 2 * K);
      else if (p.in_slots == 1)
        write(p.grad_in, 1, 0, 0, K);
      else
        write(p.grad_in, K, slot, slot, slot + 1);
    }
    for (int64_t slot = 0; p.grad_out_memory != nullptr && slot < p.out_slots; ++slot) {
      if (p.out_slots == 1)
        write(p.grad_out_memory, 1, 0, K, 2 * K);
      else
        write(p.grad_out_memory, K, slot, K + slot, K + slot + 1);
    }
  }

 private:
  // Rows n of the result, [N][D] from element `start` on: sum_t coef[t][n] vector[t] for t in
  // [first, last)
  __attribute__((noinline)) void write_rows(const Scratch& f, WideBlock& wide, void* result,
                                            int64_t start, int64_t n0, int64_t n1, int64_t first,
                                            int64_t last, bool finite) const {
    const T *const coef = f.coef + first * np, *const vector = f.vector + first * dp;
    const int64_t terms = last - first;
    const auto sum = [&](int64_t n, int64_t rows, T* to) {
      if (finite)
        outer_products(rows, coef + n, np, vector, dp, dp / W, terms, to, p.D);
      else
        add_nonzero(rows, coef + n, vector, terms, to);
    };
    if (!is_narrow) {
      // The end of a row is written as a whole vector, which reaches into the next rows; these are
      // written after it. Rows that would reach past the last row go through a buffer.
      const int64_t reached = finite ? (dp - 1) / p.D : 0, whole = max_of(n0, n1 - reached);
      T* const to = static_cast<T*>(result) + start;
      sum(n0, whole - n0, to + n0 * p.D);
      for (int64_t n = whole; n < n1; ++n) {
        sum(n, 1, wide.rows);
        write_row(wide.rows, p.D, to + n * p.D);
      }
      return;
    }
    wide.from = nullptr;
    for (int64_t n = n0; n < n1; n += kHopBlock) {
      const int64_t rows = min_of(kHopBlock, n1 - n);
      sum(n, rows, wide.rows);
      write_elements(wide.rows, rows * p.D, result, p.dtype, start + n * p.D);
    }
  }

  // outer_products() without the terms whose coefficient is 0: an excluded row adds nothing, even
  // where a query is not finite.
  __attribute__((noinline)) void add_nonzero(int64_t rows, const T* coef, const T* vector,
                                             int64_t terms, T* to) const {
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t d = 0; d < p.D; ++d) {
        T x = T(0);
        for (int64_t t = 0; t < terms; ++t)
          if (coef[t * np + n] != T(0)) x += coef[t * np + n] * vector[t * dp + d];
        to[n * p.D + d] = x;
      }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
