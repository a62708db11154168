// Memory hops of a few queries on a memory of their own. The bound is reading the memory.
//
// The width of a row runs across the lanes. A block of rows is read once per hop, as input and as
// output memory, with a running maximum. All hops of a query run one after the other, so a memory
// that fits in the caches comes from main memory once. Backward recomputes the weights from the
// forward's maximum and sum, unless the forward kept them. It keeps p and ds of all hops (2 K
// numbers per row), and writes the gradient of each memory once, at the end:
// dM = sum_k ds_k u_k^T, dC = sum_k p_k g_k^T.
//
// Rows are split into chunks that depend on N alone. The chunks are merged in order, whichever
// thread computed them. So the bits depend on neither the batch nor the threads.
#pragma once
#include "../threads.h"
#include "memory_hops.h"
#include "team.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class S>
class StreamHops : HopSteps<S> {
  typedef HopSteps<S> Base;
  typedef typename Base::T T;
  using Base::batch_of, Base::chunk, Base::chunks, Base::dp, Base::groups, Base::p, Base::query_of,
      Base::R, Base::row_of, Base::stats, Base::trace, Base::W;
  static constexpr int64_t kCached = 1 << 20;  // elements that fit in the caches
  static constexpr double kPerFlop = 4;        // cost relative to full-register arithmetic

 public:
  explicit StreamHops(const MemoryHopsParams& params) : Base(params) {}

  void forward() {
    const double flops = kPerFlop * 4 * groups * R * p.K * p.N * p.D;
    run(flops, [&](const Scratch& f, int64_t group, auto each_chunk) {
      if (p.search && p.together > 1) return forward_together(f, group, each_chunk);
      for (int64_t r = 0; r < R; ++r) forward_query(f, group, this->row_of(group, r), each_chunk);
    });
  }

  void backward() {
    const double flops = kPerFlop * 14 * groups * R * p.K * p.N * p.D;
    run(flops, [&](const Scratch& f, int64_t group, auto each_chunk) {
      for (int64_t r = 0; r < R; ++r) backward_query(f, group, r, each_chunk);
      write_gradients(f, group, each_chunk);
    });
  }

 private:
  // Scratch of one group; indexed by chunk where the shape says so.
  struct Scratch {
    T* u;       // [dp]
    T* o;       // [dp]
    T* g;       // [dp]
    T* next;    // [dp]
    T* part;    // [chunks][dp + W]: a vector, then m and l
    T* kept;    // [N] scores of a hop
    T* coef;    // [2K R][N]: ds and p of every hop and query
    T* vector;  // [2K R][dp]: scale u and g of every hop and query
  };

  Scratch allocate(Arena& a) const {
    const bool back = p.grad_query != nullptr;
    Scratch f;
    f.u = a.take<T>(dp + W), f.o = a.take<T>(dp + W);
    f.g = a.take<T>(dp + W), f.next = a.take<T>(dp + W);
    f.part = a.take<T>(max_of<int64_t>(1, chunks) * (dp + W));
    f.kept = a.take<T>(p.weights != nullptr && !back ? p.N : 0);
    f.coef = a.take<T>(back ? 2 * p.K * R * p.N : 0);
    f.vector = a.take<T>(back ? 2 * p.K * R * dp : 0);
    return f;
  }

  // Calls of_group(scratch, group, each_chunk) for every group. Many groups are shared among the
  // threads; otherwise the chunks of each group are.
  template <class F>
  void run(double flops, F of_group) {
    Arena size(nullptr);
    allocate(size);
    const bool split = chunks > 1 && groups < 4 * p.threads;
    if (split) {
      const int team = team_size(p.threads, chunks, flops / groups);
      void* memory = __builtin_malloc(size.used() + 64);
      const auto aligned = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
      Arena arena(reinterpret_cast<void*>(aligned));
      const Scratch f = allocate(arena);
      for (int64_t group = 0; group < groups; ++group)
        of_group(f, group, [&](auto of_chunk) {
#pragma omp parallel for num_threads(team) if (team > 1) schedule(dynamic, 1)
          for (int64_t c = 0; c < chunks; ++c) of_chunk(c);
        });
      __builtin_free(memory);
      return;
    }
    const int team = team_size(p.threads, groups, flops);
    const auto make = [&] {
      Arena arena(thread_scratch(size.used()));
      return allocate(arena);
    };
    // A static schedule gives a thread the same memories in every call. Their gradients often reuse
    // the same allocation and are then still in that thread's cache. At bAbI's size this saves a
    // third of the time.
    each_task(team, groups, kStatic, make, [&](const Scratch& f, int64_t group) {
      of_group(f, group, [&](auto of_chunk) {
        for (int64_t c = 0; c < chunks; ++c) of_chunk(c);
      });
    });
  }

  // The rows of a block that a query can see in a hop: their positions in the memory, from n0 on.
  struct Block {
    int64_t count;
    bool all;  // at[i] = i
    bool biased;
    int64_t at[kHopBlock];
    T bias[kHopBlock];
    FASTATTN_INLINE Rows<S> of(Rows<S> rows) const {
      return {rows.base, rows.stride, all ? nullptr : at};
    }
  };

  void see(int64_t row, int64_t k, int64_t n0, int64_t n1, Block* block) const {
    const int64_t b = batch_of(row), q = query_of(row);
    block->all = true;
    block->biased = p.bias.data != nullptr;
    block->count = n1 - n0;
    if (p.mask.data == nullptr && p.bias.data == nullptr) return;
    const int64_t *sm = p.mask.stride, *sb = p.bias.stride;
    const Bool* mask =
        static_cast<const Bool*>(p.mask.data) + b * sm[0] + q * sm[1] + k * sm[2] + n0 * sm[3];
    T bias[kHopBlock] = {};
    if (block->biased)
      with_storage(p.bias.data, p.bias_dtype, [&](const auto* data) {
        const auto* from = data + b * sb[0] + q * sb[1] + k * sb[2] + n0 * sb[3];
        for (int64_t i = 0; i < n1 - n0; ++i) bias[i] = static_cast<T>(widen(from[i * sb[3]]));
      });
    int64_t count = 0;
    for (int64_t i = 0; i < n1 - n0; ++i) {
      const bool seen = (p.mask.data == nullptr || mask[i * sm[3]].bits) && bias[i] != -kInf<T>;
      block->at[count] = i;
      block->bias[count] = bias[i];
      count += seen;
    }
    block->all = count == n1 - n0;
    block->count = count;
  }

  // Prefetches rows [n0, n1) of the next group. This happens in the last hop of a group: its own
  // rows then come from the cache, and main memory is idle. Inline, because the compiler removes
  // calls of a function that only prefetches.
  FASTATTN_INLINE void fetch_next(int64_t group, int64_t n0, int64_t n1) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(S));
    const Rows<S> in = this->in_rows(group + 1, 0, n0), out = this->out_rows(group + 1, 0, n0);
    for (int64_t n = 0; n < n1 - n0; ++n)
      for (int64_t d = 0; d < p.D; d += kLine) {
        __builtin_prefetch(in.base + n * in.stride + d, 0, 2);
        __builtin_prefetch(out.base + n * out.stride + d, 0, 2);
      }
  }
  // Whether prefetching helps: one memory fits in the caches, all of them do not, and no row is
  // masked.
  bool fetches() const {
    return p.mask.data == nullptr && p.N * p.D <= kCached / 2 && groups * p.N * p.D > kCached;
  }

  // The scores of a block [kHopBlock + W], -inf past its rows up to a whole vector.
  void scores(Rows<S> rows, const Block& block, const T* u, T* s) const {
    row_products<T>(block.of(rows), block.count, p.D, u, s);
    const T scale = static_cast<T>(p.scale);
    const bool raw = scale == T(1) && !block.biased;
    for (int64_t i = 0; i < (raw ? 0 : block.count); i += W) {
      Vec<T> x = load(s + i) * scale;
      if (block.biased) x += load(block.bias + i);
      store(s + i, x);
    }
    store(s + block.count, splat<T>(-kInf<T>));
  }

  // ---- forward

  template <class Each>
  void forward_query(const Scratch& f, int64_t group, int64_t row, Each each_chunk) const {
    if (p.resume && !this->moves(row, 0)) return;
    begin(f, row);
    for (int64_t k = 0; k < p.K && this->moves(row, k); ++k) hop(f, group, row, k, each_chunk);
    this->write_vector(p.out, row, f.u);
  }

  // The same hop by hop, for queries that stop together.
  template <class Each>
  void forward_together(const Scratch& f, int64_t group, Each each_chunk) const {
    for (int64_t r = 0; r < R; ++r) begin(f, row_of(group, r));
    bool moving = true;
    for (int64_t k = 0; k < p.K && moving; ++k) {
      moving = false;
      for (int64_t r = 0; r < R; ++r) {
        const int64_t row = row_of(group, r);
        if (!this->moves(row, k)) continue;
        this->read_vector(trace(row, 2 * k), 1, f.u);
        hop(f, group, row, k, each_chunk);
        moving = true;
      }
      this->rest_together(group);
    }
    for (int64_t r = 0; r < R; ++r) {
      this->read_vector(trace(row_of(group, r), 0), 1, f.u);
      this->write_vector(p.out, row_of(group, r), f.u);
    }
  }

  // f.u = u_1; also written to the trace.
  void begin(const Scratch& f, int64_t row) const {
    if (p.resume) return this->read_vector(trace(row, 0), 1, f.u);
    this->read_query(row, f.u);
    __builtin_memcpy(trace(row, 0), f.u, static_cast<size_t>(p.D) * sizeof(T));
  }

  template <class Each>
  void hop(const Scratch& f, int64_t group, int64_t row, int64_t k, Each each_chunk) const {
    each_chunk([&](int64_t c) { read_chunk(f, group, row, k, c); });
    // o = sum_c part_c e^(m_c - m) / l
    T m = -kInf<T>, l = T(0), *o = f.o;
    if (chunks == 1) {
      o = f.part;
      m = o[dp], l = o[dp + 1];
    } else {
      for (int64_t d = 0; d < dp; ++d) o[d] = T(0);
      for (int64_t c = 0; c < chunks; ++c) merge(f.part + c * (dp + W), o, &m, &l);
    }
    const T inverse = normalizer(m, l);
    for (int64_t d = 0; p.normalize && d < dp; d += W) store(o + d, load(o + d) * inverse);
    stats(row, k)[0] = m, stats(row, k)[1] = l;
    if (p.weights != nullptr && !is_short()) write_weights(f, row, k, m, l);
    this->step(row, k, f.u, o, f.next);
  }

  // What e^(s - m) is multiplied by to be p.
  T normalizer(T m, T l) const { return !p.normalize ? T(1) : m == -kInf<T> ? T(0) : T(1) / l; }

  // One block holds the memory, so its scores are at hand when their sum is known.
  bool is_short() const { return p.N <= kHopBlock; }

  static T decay(T from, T to) {
    return from == -kInf<T> ? T(0) : weight_of(splat<T>(from - to))[0];
  }

  void merge(const T* part, T* o, T* m, T* l) const {
    Shares<T> share = {splat<T>(T(1)), splat<T>(T(1))};
    if (p.normalize) share = merge_sums<T>(m, l, part[dp], part[dp + 1], kWeight<T>);
    merge_outputs<T>(share, o, part, dp);
  }

  // part = {o, m, l} of the rows of one chunk.
  void read_chunk(const Scratch& f, int64_t group, int64_t row, int64_t k, int64_t c) const {
    T* part = f.part + c * (dp + W);
    T m = -kInf<T>, l = T(0);
    for (int64_t d = 0; d < dp; d += W) store(part + d, Vec<T>{});
    T s[kHopBlock + W];
    Block block;
    const bool keeps = p.weights != nullptr && !is_short();
    const bool ahead =
        fetches() && group + 1 < groups && k == p.K - 1 && row + 1 == row_of(group + 1, 0);
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += kHopBlock) {
      const int64_t n1 = min_of(end, n0 + kHopBlock);
      see(row, k, n0, n1, &block);
      if (ahead) fetch_next(group, n0, n1);
      if (block.count > 0) {
        scores(this->in_rows(group, k, n0), block, f.u, s);
        if (keeps) keep(f, block, n0, n1, s);
        const T alpha = p.normalize ? soften(s, block.count, &m, &l) : T(1);
        add_rows<T>(block.of(this->out_rows(group, k, n0)), block.count, p.D, s, alpha, part);
      } else if (keeps) {
        keep(f, block, n0, n1, s);
      }
    }
    part[dp] = m, part[dp + 1] = l;
    if (p.weights != nullptr && is_short()) write_short(row, k, block, s, normalizer(m, l));
  }

  // s <- e^(s - m) with the new maximum m; returns the factor for the sums so far.
  static T soften(T* s, int64_t count, T* m, T* l) {
    Vec<T> top = load(s);
    for (int64_t i = W; i < count; i += W) top = max_of(top, load(s + i));
    const T of_block = largest_lane<T>(top), after = *m > of_block ? *m : of_block;
    const T reference = after == -kInf<T> ? T(0) : after;
    const T alpha = decay(*m, reference);
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

  void keep(const Scratch& f, const Block& block, int64_t n0, int64_t n1, const T* s) const {
    for (int64_t n = n0; n < n1; ++n) f.kept[n] = p.normalize ? -kInf<T> : T(0);
    for (int64_t i = 0; i < block.count; ++i) f.kept[n0 + (block.all ? i : block.at[i])] = s[i];
  }

  // p of a short memory, from e^(s - m).
  void write_short(int64_t row, int64_t k, const Block& block, T* s, T inverse) const {
    S* to = static_cast<S*>(p.weights) + (row * p.K + k) * p.N;
    for (int64_t i = 0; i < block.count; i += W) store(s + i, load(s + i) * inverse);
    if (block.all) return write_row(s, p.N, to);
    for (int64_t n = 0; n < p.N; ++n) narrow(T(0), to + n);
    for (int64_t i = 0; i < block.count; ++i) narrow(s[i], to + block.at[i]);
  }

  void write_weights(const Scratch& f, int64_t row, int64_t k, T m, T l) const {
    S* to = static_cast<S*>(p.weights) + (row * p.K + k) * p.N;
    const T reference = m == -kInf<T> ? T(0) : m, inverse = normalizer(m, l);
    for (int64_t n = 0; n < p.N; n += W) {
      const int count = static_cast<int>(min_of<int64_t>(W, p.N - n));
      Vec<T> x = load_first(f.kept + n, count);
      if (p.normalize) x = weight_of(x - reference) * inverse;
      store_as<T>(to + n, x, count);
    }
  }

  // ---- backward

  // The rows of ds and p of hop k, and of their vectors. Rows that contribute to one gradient are
  // adjacent.
  int64_t ds_row(int64_t k, int64_t r) const { return (p.stack ? 2 * k : k) * R + r; }
  int64_t p_row(int64_t k, int64_t r) const { return (p.stack ? 2 * k + 1 : p.K + k) * R + r; }

  template <class Each>
  void backward_query(const Scratch& f, int64_t group, int64_t r, Each each_chunk) const {
    const int64_t row = row_of(group, r);
    const T scale = static_cast<T>(p.scale);
    const int64_t* st = p.grad_out.stride;
    if (p.grad_out.data != nullptr) {
      this->read_vector(
          static_cast<const S*>(p.grad_out.data) + batch_of(row) * st[0] + query_of(row) * st[1],
          st[3], f.g);
    } else {
      for (int64_t d = 0; d < dp; ++d) f.g[d] = T(0);
    }
    for (int64_t k = p.K - 1; k >= 0; --k) {
      if (!this->moves(row, k)) {
        forget(f, ds_row(k, r)), forget(f, p_row(k, r));
        continue;
      }
      this->through_activation(trace(row, 2 * k + 2), f.g);
      this->keep_state(row, k, f.g);
      this->read_vector(trace(row, 2 * k), 1, f.u);
      const T m = stats(row, k)[0], l = stats(row, k)[1];
      const bool nothing = p.normalize && m == -kInf<T>;
      T* u = f.vector + ds_row(k, r) * dp;
      T* g = f.vector + p_row(k, r) * dp;
      for (int64_t d = 0; d < dp; d += W) {
        store(u + d, nothing ? Vec<T>{} : load(f.u + d) * scale);
        store(g + d, load(f.g + d));
      }
      const T inverse = p.normalize && !nothing ? T(1) / l : T(1);
      Hop hop{row, k, r, m == -kInf<T> ? T(0) : m, inverse, T(0)};
      hop.delta = delta(f, group, hop, each_chunk);
      each_chunk([&](int64_t c) { derive_chunk(f, group, hop, c); });
      // g <- H^T g + scale M^T ds
      if (p.proj.data != nullptr) {
        for (int64_t d = 0; d < dp; ++d) f.next[d] = T(0);
        add_rows<T>(this->proj_rows(k), p.D, p.D, f.g, T(1), f.next);
        __builtin_memcpy(f.g, f.next, static_cast<size_t>(dp) * sizeof(T));
      } else if (p.settles) {  // H = 0
        for (int64_t d = 0; d < dp; ++d) f.g[d] = T(0);
      }
      for (int64_t d = 0; d < dp; ++d) f.o[d] = T(0);
      for (int64_t c = 0; c < chunks; ++c) {
        const T* part = f.part + c * (dp + W);
        for (int64_t d = 0; d < dp; d += W) store(f.o + d, load(f.o + d) + load(part + d));
      }
      for (int64_t d = 0; d < dp; d += W) store(f.g + d, load(f.g + d) + load(f.o + d) * scale);
    }
    this->write_vector(p.grad_query, row, f.g);
  }

  void forget(const Scratch& f, int64_t at) const {
    __builtin_memset(f.coef + at * p.N, 0, static_cast<size_t>(p.N) * sizeof(T));
    __builtin_memset(f.vector + at * dp, 0, static_cast<size_t>(dp) * sizeof(T));
  }

  struct Hop {
    int64_t row, k, r;
    T m, inverse;  // p = e^(s - m) inverse
    T delta;
  };

  // p of a hop [N] as the forward kept it, null if it did not.
  const T* kept_weights(int64_t row, int64_t k) const {
    if (!kSame<S, T> || p.weights == nullptr) return nullptr;
    return static_cast<const T*>(p.weights) + (row * p.K + k) * p.N;
  }

  // s = the visible elements of a row from n0 on, and zeros up to a whole vector.
  static void gather(const T* from, const Block& block, T* s) {
    if (block.all) return read_row(from, block.count, s);
    for (int64_t i = 0; i < (block.count + W - 1) / W * W; ++i)
      s[i] = i < block.count ? from[block.at[i]] : T(0);
  }

  // For one block: s = p = softmax(s) and rest = dp - delta, dp = C g + dweights. `dw` is scratch,
  // zero where the weights have no gradient.
  void weigh(const Scratch& f, int64_t group, const Hop& hop, int64_t n0, const Block& block, T* s,
             T* rest, T* dw) const {
    if (const T* kept = kept_weights(hop.row, hop.k)) {
      gather(kept + n0, block, s);
    } else {
      scores(this->in_rows(group, hop.k, n0), block, f.u, s);
      for (int64_t i = 0; p.normalize && i < block.count; i += W)
        store(s + i, weight_of(load(s + i) - hop.m) * hop.inverse);
    }
    if (p.grad_weights.data != nullptr) {
      const int64_t* st = p.grad_weights.stride;
      const S* from = static_cast<const S*>(p.grad_weights.data) + batch_of(hop.row) * st[0] +
                      query_of(hop.row) * st[1] + hop.k * st[2] + n0 * st[3];
      for (int64_t i = 0; i < block.count; ++i)
        dw[i] = static_cast<T>(widen(from[(block.all ? i : block.at[i]) * st[3]]));
    }
    row_products<T>(block.of(this->out_rows(group, hop.k, n0)), block.count, p.D, f.g, rest);
    for (int64_t i = 0; i < block.count; i += W)
      store(rest + i, load(rest + i) + load(dw + i) - hop.delta);
  }

  // delta = sum_i p_i dp_i, dp = C g + dweights. It starts from an estimate, o . g.
  //
  // If one row has all the weight, o is that row, and p (dp - delta) must be exactly 0 rather than
  // a rounding residue times the scale. So o . g is summed in the same order as dp. If one row has
  // most of the weight, dp - delta is small but the rounding error of o is not. Then the missing
  // part is summed from the same p and dp that it must cancel. The gradient of the weights enters
  // there too.
  template <class Each>
  T delta(const Scratch& f, int64_t group, Hop hop, Each each_chunk) const {
    if (!p.normalize || stats(hop.row, hop.k)[0] == -kInf<T>) return T(0);
    T products[W];
    row_products<T>(Rows<T>{trace(hop.row, 2 * hop.k + 1), 0, nullptr}, 1, p.D, f.g, products);
    hop.delta = products[0];
    if (p.grad_weights.data == nullptr && hop.inverse <= T(kSharp)) return hop.delta;
    each_chunk([&](int64_t c) {
      T s[kHopBlock + W], rest[kHopBlock], dw[kHopBlock] = {};
      Block block;
      Vec<T> sum{};
      const int64_t end = min_of(p.N, (c + 1) * chunk);
      for (int64_t n0 = c * chunk; n0 < end; n0 += kHopBlock) {
        see(hop.row, hop.k, n0, min_of(end, n0 + kHopBlock), &block);
        if (block.count == 0) continue;
        weigh(f, group, hop, n0, block, s, rest, dw);
        for (int64_t i = 0; i < block.count; i += W) {
          const int count = static_cast<int>(min_of<int64_t>(W, block.count - i));
          sum += load(s + i) * load_first(rest + i, count);
        }
      }
      f.part[c * (dp + W)] = sum_lanes<T>(sum);
    });
    for (int64_t c = 0; c < chunks; ++c) hop.delta += f.part[c * (dp + W)];
    return hop.delta;
  }

  // p and ds of a chunk, and its contribution to M^T ds.
  void derive_chunk(const Scratch& f, int64_t group, const Hop& hop, int64_t c) const {
    T* part = f.part + c * (dp + W);
    T* ds_to = f.coef + ds_row(hop.k, hop.r) * p.N;
    T* p_to = f.coef + p_row(hop.k, hop.r) * p.N;
    for (int64_t d = 0; d < dp; ++d) part[d] = T(0);
    T s[kHopBlock + W], ds[kHopBlock], dw[kHopBlock] = {};
    Block block;
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += kHopBlock) {
      const int64_t n1 = min_of(end, n0 + kHopBlock);
      see(hop.row, hop.k, n0, n1, &block);
      if (!block.all)
        for (int64_t n = n0; n < n1; ++n) ds_to[n] = p_to[n] = T(0);
      if (block.count == 0) continue;
      weigh(f, group, hop, n0, block, s, ds, dw);
      for (int64_t i = 0; p.normalize && i < block.count; i += W)
        store(ds + i, load(s + i) * load(ds + i));
      add_rows<T>(block.of(this->in_rows(group, hop.k, n0)), block.count, p.D, ds, T(1), part);
      if (block.all) {
        for (int64_t i = 0; i < block.count; i += W) {
          const int count = static_cast<int>(min_of<int64_t>(W, block.count - i));
          store_first(ds_to + n0 + i, load(ds + i), count);
          store_first(p_to + n0 + i, load(s + i), count);
        }
        continue;
      }
      for (int64_t i = 0; i < block.count; ++i)
        ds_to[n0 + block.at[i]] = ds[i], p_to[n0 + block.at[i]] = s[i];
    }
    if (p.grad_scores != nullptr) {
      T* to = static_cast<T*>(p.grad_scores) + (hop.row * p.K + hop.k) * p.N;
      for (int64_t n = c * chunk; n < end; ++n) to[n] = ds_to[n];
    }
  }

  // The gradients of the memories of a group, each written once.
  template <class Each>
  void write_gradients(const Scratch& f, int64_t group, Each each_chunk) const {
    if (p.grad_in == nullptr && p.grad_out_memory == nullptr) return;
    Vec<T> rest{};  // 0, or NaN in a lane with a non-finite element
    for (int64_t x = 0; x < 2 * p.K * R * dp; x += W) {
      const Vec<T> v = load(f.vector + x);
      rest += v - v;
    }
    const bool finite = sum_lanes<T>(rest) == T(0);
    each_chunk([&](int64_t c) {
      const int64_t n0 = c * chunk, n1 = min_of(p.N, n0 + chunk);
      const auto write = [&](void* to, int64_t slots, int64_t slot, int64_t first, int64_t last) {
        S* dst = static_cast<S*>(to) + (group * slots + slot) * p.N * p.D;
        write_rows(f, dst, n0, n1, first * R, last * R, finite);
      };
      const int64_t K = p.K;
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
    });
  }

  // dst[n] = sum_t coef[t][n] vector[t] for t in [first, last)
  void write_rows(const Scratch& f, S* dst, int64_t n0, int64_t n1, int64_t first, int64_t last,
                  bool finite) const {
    const T* coef = f.coef + first * p.N;
    const T* vector = f.vector + first * dp;
    const int64_t vectors = dp / W, terms = last - first;
    if (!finite) return write_nonzero(coef, vector, terms, dst, n0, n1);
    const int rest = last_lanes<T>(p.D);
    const auto write = [&](int64_t n, int64_t rows, auto end_row) __attribute__((always_inline)) {
      outer_products<T>(rows, coef + n, p.N, vector, dp, vectors, terms,
                        [&](int64_t i, int64_t v, Vec<T> x) __attribute__((always_inline)) {
                          S* const to = dst + (n + i) * p.D + v * W;
                          if (v == vectors - 1)
                            end_row(to, x);
                          else
                            store_as<T>(to, x, W);
                        });
    };
    // The end of a row is a whole vector, or less if that is enough. It may reach into the next
    // rows, which are written after it; rows that would reach past the last one end exactly.
    const auto write_all = [&](auto width) __attribute__((always_inline)) {
      constexpr int kWidth = decltype(width)::value;
      const int64_t reached = (dp - kLanes<T> + kWidth - 1) / p.D;
      const int64_t whole = max_of(n0, n1 - reached);
      write(n0, whole - n0,
            [](S* to, Vec<T> x) __attribute__((always_inline)) { store_part<kWidth, T>(to, x); });
      const auto exactly = [&](S* to, Vec<T> x)
                               __attribute__((always_inline)) { store_as<T>(to, x, rest); };
      for (int64_t n = whole; n < n1; ++n) write(n, 1, exactly);
    };
    constexpr int kQuarter = max_of(1, W / 4);
    if (kSame<S, T> && rest <= kQuarter)
      write_all(Width<kQuarter>());
    else if (kSame<S, T> && rest <= W / 2)
      write_all(Width<W / 2>());
    else
      write_all(Width<W>());
  }

  // The same without the zeros: an excluded row adds nothing, even where a query is not finite.
  __attribute__((noinline)) void write_nonzero(const T* coef, const T* vector, int64_t terms,
                                               S* dst, int64_t n0, int64_t n1) const {
    for (int64_t n = n0; n < n1; ++n)
      for (int64_t d = 0; d < p.D; ++d) {
        T x = T(0);
        for (int64_t t = 0; t < terms; ++t)
          if (coef[t * p.N + n] != T(0)) x += coef[t * p.N + n] * vector[t * dp + d];
        narrow(x, dst + n * p.D + d);
      }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
