// Memory hops of many queries on one memory, backward. A chunk owns its rows of dM and dC. The
// chunks' contributions to dU of a panel are summed in order.
#pragma once
#include "memory_hops_panels.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// C += A B, compiled once for all its callers.
template <class P>
__attribute__((noinline)) void add_to_rows(int64_t rows, const typename P::Word* A, int64_t lda,
                                           const typename P::Word* B, int64_t ldb, int64_t K,
                                           typename P::Acc* C) {
  add_product<P>(rows, A, lda, B, ldb, K, C, ldb, ldb / kLanes<typename P::Acc>);
}

template <class T, int kVectors>
class PanelBackward : public PanelSteps<T, kVectors> {
  typedef PanelSteps<T, kVectors> Base;
  typedef typename Base::P P;
  typedef typename Base::Group Group;
  typedef typename Base::Tiles Tiles;
  typedef typename Base::Block Block;
  using Base::add_transposed, Base::arrange, Base::Bk, Base::block_of, Base::chunk, Base::chunks,
      Base::D, Base::dp, Base::each, Base::excludes, Base::first_of, Base::groups, Base::is_narrow,
      Base::kChain, Base::L, Base::lanes_of, Base::NV, Base::p, Base::pack, Base::panels,
      Base::panels_of, Base::chunk_state, Base::R, Base::row_in, Base::row_of, Base::run,
      Base::spread, Base::stats, Base::trace, Base::W, Base::weigh;

 public:
  explicit PanelBackward(const MemoryHopsParams& params) : Base(params) {}

  void backward() {
    run(14.0 * groups * R * p.K * p.N * D,
        [&](const Group& f, int64_t group) __attribute__((noinline)) { of_group(f, group); });
  }

 private:
  // All hops of one group of queries, from the last to the first.
  void of_group(const Group& f, int64_t group) const {
    arrange(f, group);
    each(f, panels, [&](const Tiles&, int64_t i) { begin(f, group, i); });
    for (int64_t k = p.K - 1; k >= 0; --k) {
      while (f.moving[0] < R && this->moves(row_of(group, f.order[f.moving[0]]), k)) ++f.moving[0];
      const int64_t panels = panels_of(f);
      each(f, panels, [&](const Tiles& t, int64_t i) { prepare(f, t, group, k, i); });
      if (p.normalize && (weighted() || any_sharp(f, 0, panels))) {
        each(f, panels * chunks, [&](const Tiles& t, int64_t i) {
          delta_correction(f, t, group, k, i % panels, i / panels);
        });
        each(f, panels, [&](const Tiles&, int64_t i) { correct_delta(f, i); });
      }
      each(f, chunks, [&](const Tiles& t, int64_t c) { derive_chunk(f, t, group, k, c); });
      each(f, panels, [&](const Tiles& t, int64_t i) { collect(f, t, k, i); });
    }
    each(f, panels, [&](const Tiles&, int64_t i) {
      for (int64_t r = i * L; r < min_of(R, (i + 1) * L); ++r)
        this->write_vector(p.grad_query, row_of(group, f.order[r]), f.g_rows + r * dp);
    });
    if (is_narrow) each(f, chunks, [&](const Tiles&, int64_t c) { round(f, group, c); });
  }

  // Loads the gradient of the output for the queries of a panel; 0 past the last.
  void begin(const Group& f, int64_t group, int64_t panel) const {
    for (int64_t r = panel * L; r < (panel + 1) * L; ++r) {
      T* g = f.g_rows + r * dp;
      if (r < R && p.grad_out.data != nullptr)
        this->read_vector(p.grad_out, row_in(f, group, r), g);
      else
        for (int64_t d = 0; d < dp; ++d) g[d] = T(0);
    }
  }

  // g <- g o phi', and all values of a panel that do not depend on the rows.
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
      const T* from = trace(row, 2 * k);
      for (int64_t d = 0; d < D; ++d) u[d] = from[d] * scale;
      if (!p.normalize) {
        f.inverse[r] = T(1);
        continue;
      }
      f.m[r] = m, f.inverse[r] = T(1) / stats(row, k)[1];
    }
    pack(f, t, group, 2 * k, panel);
    pack_rows(f.g_rows + panel * L * dp, dp, L, D, L, f.g + panel * L * D);
    // A fully masked query passes no gradient, not even NaN times zero.
    for (int64_t r = panel * L; r < min_of(R, (panel + 1) * L); ++r) {
      if (f.inverse[r] != T(0)) continue;
      for (int64_t d = 0; d < D; ++d)
        f.u[(panel * D + d) * L + r % L] = f.g[(panel * D + d) * L + r % L] = T(0);
    }
    if (p.normalize) set_delta(f, group, k, panel);
  }

  // delta = sum_i p_i dp_i, dp = C g + dw. This computes an estimate of it, o . g.
  //
  // If one row has all the weight, o is that row, and p (dp - delta) must be exactly 0 rather than
  // a rounding residue times the scale. So o . g is summed in the same order as dp. If one row has
  // most of the weight, dp - delta is small but the rounding error of o is not. Then sum_rest()
  // adds the missing part, from the same p and dp that it must cancel. The gradient of the weights
  // enters there too.
  void set_delta(const Group& f, int64_t group, int64_t k, int64_t panel) const {
    T* o = chunk_state(f, panel, 0);  // [D][L], free at this point
    for (int64_t r = panel * L; r < (panel + 1) * L; ++r) {
      const T* from = f.inverse[r] != T(0) ? trace(row_in(f, group, r), 2 * k + 1) : nullptr;
      for (int64_t d = 0; d < D; ++d) o[d * L + r % L] = from != nullptr ? from[d] : T(0);
    }
    const T* g = f.g + panel * D * L;
    for (int64_t x = 0; x < L; x += W) {
      Vec<T> delta{};
      for (int64_t first = 0; first < D; first += kChain) {
        Vec<T> sum{};
        for (int64_t d = first; d < min_of(D, first + kChain); ++d)
          sum = P::multiply_add(load(o + d * L + x), load(g + d * L + x), sum);
        delta = first == 0 ? sum : delta + sum;
      }
      store(f.delta + panel * L + x, delta);
    }
  }

  // For a panel and a block: t.s = p and t.ds = dp = C g + dw.
  __attribute__((noinline)) void differentiate(const Group& f, const Tiles& t, int64_t group,
                                               int64_t k, int64_t panel, const Block& block) const {
    Vec<T> top[NV];
    weigh(f, t, group, k, panel, block);
    products_of_panel<P, NV>(block.count, block.out, f.g + panel * L * D, D, kChain, t.ds, top);
    if (!weighted() || block.count == 0) return;
    const int64_t queries = min_of(L, R - panel * L);
    const int64_t rows = block.all ? block.count : t.at[block.count - 1] + 1;
    for (int64_t l = 0; l < queries; ++l) {
      const int64_t first = first_of(p.grad_weights, row_of(group, panel * L + l), k, block.n0);
      read_elements(p.grad_weights.data, p.dtype, first, p.grad_weights.stride[3], rows, t.row);
      for (int64_t i = 0; i < block.count; ++i) t.ds[i * L + l] += t.row[block.all ? i : t.at[i]];
    }
  }

  bool weighted() const { return p.grad_weights.data != nullptr; }
  // Whether some query of these panels has nearly all weight on one row.
  bool any_sharp(const Group& f, int64_t first_panel, int64_t panels) const {
    const T* inverse = f.inverse + first_panel * L;
    for (int64_t r = 0; r < panels * L; ++r)
      if (inverse[r] > T(kSharp)) return true;
    return false;
  }

  // The part of a chunk that the estimate of delta lacks: sum_i p_i (dp_i - delta). Computed only
  // for the queries that need it, so that no query depends on its neighbours in the panel.
  void delta_correction(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                        int64_t c) const {
    Vec<T> sum[NV] = {};
    const bool needed = weighted() || any_sharp(f, panel, 1);
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; needed && n0 < end; n0 += Bk) {
      const Block block = block_of(t, group, k, n0, min_of(end, n0 + Bk));
      if (block.count == 0) continue;
      differentiate(f, t, group, k, panel, block);
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const Vec<T> delta = load(f.delta + panel * L + n * W);
        for (int64_t i = 0; i < block.count; ++i) {
          const int64_t at = i * L + n * W;
          const Vec<T> w = load(t.s + at);
          sum[n] += select<T>(w == T(0), Vec<T>{}, w * (load(t.ds + at) - delta));
        }
      }
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      const Vec<T> inverse = load(f.inverse + panel * L + n * W);
      const Vec<T> correction =
          weighted() ? sum[n] : select<T>(inverse > T(kSharp), sum[n], Vec<T>{});
      store(chunk_state(f, panel, c) + n * W, correction);
    }
  }

  // Adds the corrections of all chunks to delta.
  void correct_delta(const Group& f, int64_t panel) const {
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t x = 0; x < L; x += W) {
        T* delta = f.delta + panel * L + x;
        store(delta, load(delta) + load(chunk_state(f, panel, c) + x));
      }
  }

  // The gradients of one chunk of rows, for all panels of queries.
  void derive_chunk(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t c) const {
    const int64_t panels = panels_of(f);
    for (int64_t i = 0; i < panels; ++i)
      for (int64_t x = 0; x < D * L; x += W) store(chunk_state(f, i, c) + x, Vec<T>{});
    const int64_t end = min_of(p.N, (c + 1) * chunk);
    for (int64_t n0 = c * chunk; n0 < end; n0 += Bk) {
      const int64_t n1 = min_of(end, n0 + Bk);
      const Block block = block_of(t, group, k, n0, n1);
      __builtin_memset(t.d_in, 0, static_cast<size_t>(Bk * dp) * sizeof(T));
      __builtin_memset(t.d_out, 0, static_cast<size_t>(Bk * dp) * sizeof(T));
      for (int64_t i = 0; i < panels; ++i) {
        if (block.count > 0) derive_block(f, t, group, k, i, block, chunk_state(f, i, c));
        if (p.grad_scores != nullptr) write_scores(f, t, group, k, i, block, n1 - n0);
      }
      add_gradients(f, t, group, k, block, n1);
    }
  }

  // t.s = p and t.ds = ds of a panel and a block, and their contributions to the gradients.
  void derive_block(const Group& f, const Tiles& t, int64_t group, int64_t k, int64_t panel,
                    const Block& block, T* du) const {
    Vec<T> one[NV];
    differentiate(f, t, group, k, panel, block);
    const bool tile = excludes() && !block.by_row;
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      one[n] = splat<T>(T(1));
      const Vec<T> delta = load(f.delta + panel * L + n * W);
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t at = i * L + n * W;
        const Vec<T> weight = load(t.s + at);
        Vec<T> ds = load(t.ds + at);
        if (p.normalize) ds = weight * (ds - delta);
        // An excluded element may be NaN, and 0 * NaN must not pass.
        if (tile)
          ds = p.normalize ? select<T>(weight == T(0), Vec<T>{}, ds)
                           : select<T>(load(t.bias + at) == -kInf<T>, Vec<T>{}, ds);
        store(t.ds + at, ds);
      }
    }
    const int64_t queries = lanes_of(f, panel);
    if (p.grad_in != nullptr || p.grad_out_memory != nullptr) {
      T* d_out = p.same_rows ? t.d_in : t.d_out;
      add_to_rows<P>(block.count, t.s, L, f.g_rows + panel * L * dp, dp, queries, d_out);
      add_to_rows<P>(block.count, t.ds, L, f.u_rows + panel * L * dp, dp, queries, t.d_in);
    }
    add_transposed(block.in, t.ds, block, one, du);
  }

  // Writes the gradients of the bias of a block: dS, with 0 for rows that take no part.
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
      return unpack_rows(t.ds, L, ones, lanes, rows, place(row_of(group, panel * L)), p.K * p.N);
    for (int64_t x = 0; x < lanes; ++x) {
      T* to = place(row_in(f, group, panel * L + x));
      for (int64_t n = 0; n < rows; ++n) to[n] = t.ds[n * L + x];
    }
  }

  // Adds a block's gradients to the gradients of the memories. The first hop overwrites.
  void add_gradients(const Group& f, const Tiles& t, int64_t group, int64_t k, const Block& block,
                     int64_t n1) const {
    spread_rows(t.d_in, block, t.at, n1 - block.n0);
    spread_rows(t.d_out, block, t.at, n1 - block.n0);
    const bool last = k == p.K - 1;
    const auto add = [&](T* all, int64_t slot, const T* from, bool first) {
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
    };
    T* in = gradient(f.grad_in, p.grad_in, group, p.in_slots);
    T* out = gradient(f.grad_out_memory, p.grad_out_memory, group, p.out_slots);
    if (p.stack) {
      add(in, k + 1, t.d_out, last);
      add(in, k, t.d_in, true);
      return;
    }
    const bool own_in = p.in_slots > 1, own_out = p.out_slots > 1;
    add(in, own_in ? k : 0, t.d_in, own_in || last);
    add(out, own_out ? k : 0, t.d_out, own_out || last);
  }

  // The inverse of gathering: puts the visible rows of a block back, 0 in between.
  void spread_rows(T* rows, const Block& block, const int64_t* at, int64_t count) const {
    if (block.all) return;
    int64_t i = block.count - 1;
    for (int64_t n = count - 1; n >= 0; --n) {
      const bool is_moved = i >= 0 && at[i] == n;
      for (int64_t d = 0; d < dp; d += W)
        store(rows + n * dp + d, is_moved ? load(rows + i * dp + d) : Vec<T>{});
      i -= is_moved;
    }
  }

  // The buffer where a memory's gradient is summed: the result itself, or one of T that is rounded
  // at the end.
  T* gradient(T* wide, void* result, int64_t group, int64_t slots) const {
    if (result == nullptr) return nullptr;
    return is_narrow ? wide : static_cast<T*>(result) + group * slots * p.N * D;
  }

  // Rounds the gradients of a chunk of rows to the dtype of the memory.
  void round(const Group& f, int64_t group, int64_t c) const {
    const int64_t n0 = c * chunk, n1 = min_of(p.N, n0 + chunk);
    const auto all = [&](const T* from, void* to, int64_t slots) {
      for (int64_t slot = 0; to != nullptr && slot < slots; ++slot)
        write_elements(from + (slot * p.N + n0) * D, (n1 - n0) * D, to, p.dtype,
                       ((group * slots + slot) * p.N + n0) * D);
    };
    all(f.grad_in, p.grad_in, p.in_slots);
    all(f.grad_out_memory, p.grad_out_memory, p.out_slots);
  }

  // g <- H^T g + scale M^T ds of a panel, summed over its chunks.
  void collect(const Group& f, const Tiles& t, int64_t k, int64_t panel) const {
    T* total = chunk_state(f, panel, 0);
    if (chunks == 0) __builtin_memset(total, 0, static_cast<size_t>(D * L) * sizeof(T));
    for (int64_t c = 1; c < chunks; ++c) {
      const T* other = chunk_state(f, panel, c);
      for (int64_t x = 0; x < D * L; x += W) store(total + x, load(total + x) + load(other + x));
    }
    T factor[L];
    for (T& x : factor) x = static_cast<T>(p.scale);
    const int64_t queries = lanes_of(f, panel);
    T* next = t.vectors;
    for (int64_t r = panel * L; r < panel * L + queries && p.proj.data != nullptr; ++r) {
      T* g = f.g_rows + r * dp;
      weighted_sum(this->proj_rows(k), D, D, g, false, T(1), next);
      __builtin_memcpy(g, next, static_cast<size_t>(dp) * sizeof(T));
    }
    if (p.settles)  // H = 0
      __builtin_memset(f.g_rows + panel * L * dp, 0, static_cast<size_t>(queries * dp) * sizeof(T));
    unpack_rows(total, L, factor, queries, D, f.g_rows + panel * L * dp, dp, true);
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
