// Memory hops on a long memory. The bound is reading it.
//
// A block of rows is read once per hop, as input and as output memory, with a running maximum.
// Backward recomputes the weights from the forward's maximum and sum.
//
// Rows are split into chunks that depend only on N. The chunks are merged in order, whichever
// thread computed them. So the bits depend on neither the batch nor the threads.
#pragma once
#include "memory_hops_rows.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T>
class StreamHops : RowHops<T> {
  typedef RowHops<T> Base;
  typedef typename Base::Block Block;
  typedef typename Base::Hop Hop;
  typedef typename Base::WideBlocks WideBlocks;
  using Base::chunk, Base::chunks, Base::dp, Base::ds_row, Base::groups, Base::np, Base::p,
      Base::p_row, Base::R, Base::row_of, Base::stats, Base::W;

  struct Scratch : RowHops<T>::Scratch {
    T* chunk_state;  // [chunks][dp + W]: a vector, then m and l
    T* hop_scores;   // [N] scores of a hop
    int team;        // of threads that share the chunks; 0 = the group has one thread
  };

 public:
  explicit StreamHops(const MemoryHopsParams& params) : Base(params) {}

  // One task for each group of queries that share a memory.
  void forward() const {
    const double flops = Base::kForward * groups * R * p.K * p.N * p.D;
    run(flops, [&](Scratch& f, int64_t group) __attribute__((noinline)) {
      if (p.search && p.together > 1) return forward_together(f, group);
      this->forward_alone(f, group, [&](int64_t row, int64_t k) { take_hop(f, group, row, k); });
    });
  }

  // One task for each group: the queries, then the gradients of the memory by chunks.
  void backward() const {
    const double flops = Base::kBackward * groups * R * p.K * p.N * p.D;
    run(flops, [&](Scratch& f, int64_t group) __attribute__((noinline)) {
      for (int64_t r = 0; r < R; ++r)
        this->backward_query(f, group, r, [&](const Hop& hop) { backward_hop(f, group, hop); });
      if (!this->differentiates_rows()) return;
      const bool finite = this->finite_vectors(f);
      each_chunk(f, [&](WideBlocks& wide, int64_t c) {
        this->write_gradients(f, wide, group, c, finite);
      });
    });
  }

 private:
  // Takes the buffers of a thread from an arena.
  Scratch allocate(Arena& arena) const {
    Scratch f{Base::allocate(arena), nullptr, nullptr, 0};
    f.chunk_state = arena.take<T>(max_of<int64_t>(1, chunks) * (dp + W));
    f.hop_scores = arena.take<T>(p.weights != nullptr && p.grad_query == nullptr ? p.N : 0);
    return f;
  }

  // of_group(scratch, group) for every group. Many groups are shared among the threads; otherwise
  // the chunks of each group are.
  template <class F>
  void run(double flops, F of_group) const {
    const auto make = [&](Arena& arena) { return allocate(arena); };
    if (chunks == 1 || groups >= 4 * p.threads) return this->each_group(flops, make, of_group);
    void* memory = __builtin_malloc(Base::bytes_of(make) + 64);
    const auto aligned = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    Arena arena(reinterpret_cast<void*>(aligned));
    Scratch f = allocate(arena);
    f.team = team_size(p.threads, chunks, flops / groups);
    for (int64_t group = 0; group < groups; ++group) of_group(f, group);
    __builtin_free(memory);
  }

  // of_chunk(wide, c) for every chunk c.
  template <class F>
  void each_chunk(Scratch& f, F of_chunk) const {
    if (f.team == 0) {
      for (int64_t c = 0; c < chunks; ++c) of_chunk(f.wide, c);
      return;
    }
    const auto make = [&] {
      const auto allocate = [&](Arena& arena) { return this->wide_at(arena); };
      Arena own(thread_scratch(Base::bytes_of(allocate)));
      return allocate(own);
    };
    each_task(f.team, chunks, 1, make, of_chunk);
  }

  // ---- forward

  // All queries of a group, hop by hop, because they stop together.
  void forward_together(Scratch& f, int64_t group) const {
    for (int64_t r = 0; r < R; ++r) this->begin(f, row_of(group, r));
    bool moving = true;
    for (int64_t k = 0; k < p.K && moving; ++k) {
      moving = false;
      for (int64_t r = 0; r < R; ++r) {
        const int64_t row = row_of(group, r);
        if (!this->moves(row, k)) continue;
        this->read_state(row, 2 * k, f.u);
        take_hop(f, group, row, k);
        moving = true;
      }
      this->count_joint_step(group);
    }
    for (int64_t r = 0; r < R; ++r) {
      this->read_state(row_of(group, r), 0, f.u);
      this->write_vector(p.out, row_of(group, r), f.u);
    }
  }

  // One hop of one query: the states of all chunks, merged in order.
  __attribute__((noinline)) void take_hop(Scratch& f, int64_t group, int64_t row, int64_t k) const {
    each_chunk(f, [&](WideBlocks& wide, int64_t c) { read_chunk(f, wide, group, row, k, c); });
    // o = sum_c part_c e^(m_c - m) / l
    T m = -kInf<T>, l = T(0), *o = f.o;
    if (chunks == 1) {
      o = f.chunk_state;
      m = o[dp], l = o[dp + 1];
    } else {
      for (int64_t d = 0; d < dp; ++d) o[d] = T(0);
      for (int64_t c = 0; c < chunks; ++c) merge(f.chunk_state + c * (dp + W), o, &m, &l);
    }
    const T inverse = this->normalizer(m, l);
    for (int64_t d = 0; p.normalize && d < dp; d += W) store(o + d, load(o + d) * inverse);
    stats(row, k)[0] = m, stats(row, k)[1] = l;
    if (p.weights != nullptr) write_weights(f, row, k, m, l);
    this->step(row, k, f.u, o, f.next);
  }

  // Merges the state of a chunk into (o, m, l), or adds it if the weights are not normalised.
  void merge(const T* chunk_state, T* o, T* m, T* l) const {
    Shares<T> share = {splat<T>(T(1)), splat<T>(T(1))};
    if (p.normalize) share = merge_sums<T>(m, l, chunk_state[dp], chunk_state[dp + 1], kWeight<T>);
    merge_outputs<T>(share, o, chunk_state, dp);
  }

  // part = {o, m, l} of the rows of one chunk.
  void read_chunk(const Scratch& f, WideBlocks& wide, int64_t group, int64_t row, int64_t k,
                  int64_t c) const {
    T* chunk_state = f.chunk_state + c * (dp + W);
    T m = -kInf<T>, l = T(0);
    for (int64_t d = 0; d < dp; d += W) store(chunk_state + d, Vec<T>{});
    T s[kHopBlock];
    Block block;
    const bool keeps = p.weights != nullptr,
               prefetches = this->prefetches_next_group(group, row, k);
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += kHopBlock) {
      const int64_t n1 = min_of(end, n0 + kHopBlock);
      this->see(row, k, n0, n1, &block);
      if (prefetches) this->prefetch_next(group, n0, n1);
      if (block.count > 0) {
        const StoredRows in = this->in_rows(group, k, n0), out = this->out_rows(group, k, n0);
        StoredRows rows = this->rows_of(in, block, &wide.in);
        this->scores(rows, block, f.u, s);
        if (keeps) keep(f, block, n0, n1, s);
        const T alpha = p.normalize ? this->soften(s, block.count, &m, &l) : T(1);
        if (!out.is(in)) rows = this->rows_of(out, block, &wide.out);
        weighted_sum(rows, block.count, p.D, s, true, alpha, chunk_state);
      } else if (keeps) {
        keep(f, block, n0, n1, s);
      }
    }
    chunk_state[dp] = m, chunk_state[dp + 1] = l;
  }

  // Keeps the scores of rows [n0, n1), from which the weights are computed at the end of the hop. A
  // row that is not in the block gets the weight 0.
  void keep(const Scratch& f, const Block& block, int64_t n0, int64_t n1, const T* s) const {
    for (int64_t n = n0; n < n1; ++n) f.hop_scores[n] = p.normalize ? -kInf<T> : T(0);
    for (int64_t i = 0; i < block.count; ++i)
      f.hop_scores[n0 + (block.all ? i : block.at[i])] = s[i];
  }

  // Writes the weights of a hop from its stored scores.
  void write_weights(const Scratch& f, int64_t row, int64_t k, T m, T l) const {
    const T reference = m == -kInf<T> ? T(0) : m, inverse = this->normalizer(m, l);
    for (int64_t n = 0; p.normalize && n < p.N; n += W) {
      const int count = static_cast<int>(min_of<int64_t>(W, p.N - n));
      const Vec<T> s = load_first(f.hop_scores + n, count);
      store_first(f.hop_scores + n, weight_of(s - reference) * inverse, count);
    }
    write_elements(f.hop_scores, p.N, p.weights, p.dtype, (row * p.K + k) * p.N);
  }

  // ---- backward

  // p, ds = p (dp - delta) and f.o = M^T ds.
  __attribute__((noinline)) void backward_hop(Scratch& f, int64_t group, const Hop& hop) const {
    T delta = this->estimated_delta(f, hop);
    if (this->corrects_delta(hop)) {
      each_chunk(f, [&](WideBlocks& wide, int64_t c) {
        f.chunk_state[c * (dp + W)] = missing_of(f, wide, group, hop, delta, c);
      });
      for (int64_t c = 0; c < chunks; ++c) delta += f.chunk_state[c * (dp + W)];
    }
    each_chunk(f,
               [&](WideBlocks& wide, int64_t c) { derive_chunk(f, wide, group, hop, delta, c); });
    for (int64_t d = 0; d < dp; d += W) {
      Vec<T> sum = load(f.chunk_state + d);
      for (int64_t c = 1; c < chunks; ++c) sum += load(f.chunk_state + c * (dp + W) + d);
      store(f.o + d, sum);
    }
  }

  // sum_i p_i (dp_i - delta) of a chunk.
  T missing_of(const Scratch& f, WideBlocks& wide, int64_t group, const Hop& hop, T delta,
               int64_t c) const {
    T s[kHopBlock], ds[kHopBlock];
    Block block;
    Vec<T> sum{};
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += kHopBlock) {
      this->see(hop.row, hop.k, n0, min_of(end, n0 + kHopBlock), &block);
      if (block.count == 0) continue;
      weigh_block(f, wide, group, hop, n0, block, s, ds);
      sum += this->missing(s, ds, block.count, delta);
    }
    return sum_lanes<T>(sum);
  }

  // s = p and dp_of = dp of a block; returns its rows of the input memory.
  StoredRows weigh_block(const Scratch& f, WideBlocks& wide, int64_t group, const Hop& hop,
                         int64_t n0, const Block& block, T* s, T* dp_of) const {
    const StoredRows in = this->in_rows(group, hop.k, n0), out = this->out_rows(group, hop.k, n0);
    const StoredRows rows = this->rows_of(in, block, &wide.in);
    this->weigh(f, hop, rows, block, s);
    const StoredRows of_out = out.is(in) ? rows : this->rows_of(out, block, &wide.out);
    this->derive_weights(f, hop, n0, of_out, block, dp_of);
    return rows;
  }

  // p and ds of a chunk, and its contribution to M^T ds.
  void derive_chunk(const Scratch& f, WideBlocks& wide, int64_t group, const Hop& hop, T delta,
                    int64_t c) const {
    T* chunk_state = f.chunk_state + c * (dp + W);
    T* ds_to = f.coef + ds_row(hop.k, hop.r) * np;
    T* p_to = f.coef + p_row(hop.k, hop.r) * np;
    for (int64_t d = 0; d < dp; ++d) chunk_state[d] = T(0);
    T s[kHopBlock], ds[kHopBlock];
    Block block;
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += kHopBlock) {
      const int64_t n1 = min_of(end, n0 + kHopBlock);
      this->see(hop.row, hop.k, n0, n1, &block);
      if (block.count > 0) {
        const StoredRows in = weigh_block(f, wide, group, hop, n0, block, s, ds);
        this->differentiate(s, ds, block.count, delta);
        weighted_sum(in, block.count, p.D, ds, true, T(1), chunk_state);
      }
      this->spread(block, n1 - n0, ds, ds_to + n0);
      this->spread(block, n1 - n0, s, p_to + n0);
    }
    if (p.grad_scores != nullptr) {
      T* to = static_cast<T*>(p.grad_scores) + (hop.row * p.K + hop.k) * p.N;
      for (int64_t n = c * chunk; n < end; ++n) to[n] = ds_to[n];
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
