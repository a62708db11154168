// Additive attention:  O = dropout(softmax(E + mask)) V  with the scores of additive.h.
//
// A block of queries computes its scores for all its keys before the softmax. A row of scores is
// then complete, so forward and backward compute the same probabilities the same way, and the
// backward pass needs only the operands. With D = dropout(dO V^T + dW):
//
//   G = P o (D - sum_j P D)           d mask = G             dV = W^T dO
//   h_ija = G_ij (1 - t_ija^2) / 4    dq = 4 v o sum_j h     dk = 4 v o sum_i h
//   dv = sum_ij G_ij t_ija            dbias = sum_i dq
//
// Rows of dq belong to one block of queries. dk, dV, dv and dbias are summed in order over the
// blocks of a chunk of queries, then in order over the chunks (see AdditiveParams), whichever
// thread computed them.
#include "../threads.h"
#include "additive_rows.h"
#include "rows.h"
#include "team.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kChain = 256;  // the longest chain of additions in a product

template <class P>
class Forward : AdditiveRows<P> {
  typedef AdditiveRows<P> Base;
  typedef typename Base::Source Source;
  typedef typename Base::T T;
  typedef typename Base::Block Block;
  typedef typename Base::Buffers Buffers;
  using Base::allocate, Base::clear, Base::columns, Base::drop, Base::excludes, Base::kVectors,
      Base::ld, Base::p, Base::prepare_vectors, Base::probabilities, Base::row, Base::visible,
      Base::W, Base::x;

 public:
  explicit Forward(const AdditiveParams& params) : Base(params) {}

  // Forward: one task for each block of queries.
  void run() {
    const int64_t blocks = (p.Lq + kQueries - 1) / kQueries, tasks = p.B * blocks;
    const int team = team_size(p.threads, tasks, 20.0 * p.B * p.Lq * p.Lk * (p.D + p.Dv));
    const auto make = [&] {
      Buffers f = allocate(thread_scratch(allocate(nullptr).bytes));
      prepare_vectors(f);
      return f;
    };
    each_task(team, tasks, 1, make, [&](Buffers& f, int64_t t) {
      const int64_t i0 = t % blocks * kQueries;
      forward_block(f, {t / blocks, i0, min_of(p.Lq, i0 + kQueries)});
    });
  }

 private:
  // Scores, softmax and weighted sum of one block of queries.
  void forward_block(Buffers& f, Block q) const {
    const int64_t rows = q.end - q.begin;
    const Range range = visible(f, q);
    probabilities(f, q, range);
    if (p.dropout_p > 0) drop(f, q, range, f.s);
    if (x.wants_weights) write_weights(f, q, range);
    clear(f.o, rows * columns);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys)
      add_values(f, q, j0, min_of(kKeys, range.end - j0));
    for (int64_t i = 0; i < rows; ++i) {
      write_row(f.o + i * columns, p.Dv, row(p.out, q.b, q.begin + i));
    }
  }

  // O += P V for a block of keys.
  void add_values(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    const Source v = row(p.v, q.b, j0);
    const int64_t* st = p.v.stride;
    const int64_t rows = q.end - q.begin;
    if (excludes && !all_finite(v, st[2], st[3], keys, p.Dv)) {  // 0 * NaN must not reach a query
      return with_elements(v, [&](const auto* from) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < keys; ++j) {
            const T weight = f.s[i * ld + j0 + j];
            if (weight == T(0)) continue;
            for (int64_t d = 0; d < p.Dv; ++d)
              f.o[i * columns + d] += weight * static_cast<T>(widen(from[j * st[2] + d * st[3]]));
          }
        }
      });
    }
    if (rows == 1 && st[3] == 1) return add_rows_of(v, st[2], nullptr, keys, p.Dv, f.s + j0, f.o);
    stage_rows<T>(v, st[2], st[3], keys, p.Dv, f.values, columns);
    for (int64_t d = 0; d < columns; d += kVectors * W)
      tile_rows<P, P::kOutputRows, kVectors, false>(
          rows, f.s + j0, ld, f.values + d, columns, keys, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t i, int n, Vec<T> sum) __attribute__((always_inline)) {
            T* const o = f.o + i * columns + d + n * W;
            store(o, load(o) + sum);
          });
  }

  // Writes the rows of the softmax to the weights, 0 outside the visible range.
  void write_weights(const Buffers& f, Block q, Range range) const {
    for (int64_t i = q.begin; i < q.end; ++i) {
      const T* const from = f.s + (i - q.begin) * ld;
      with_elements(row(p.applied, q.b, i), [&](auto* to) {
        for (int64_t j = 0; j < p.Lk; ++j)
          narrow(j >= range.begin && j < range.end ? from[j] : T(0), to + j);
      });
    }
  }
};

template <class P>
class Backward : AdditiveRows<P> {
  typedef AdditiveRows<P> Base;
  typedef typename Base::Source Source;
  typedef typename Base::T T;
  typedef typename Base::Block Block;
  typedef typename Base::Buffers Buffers;
  using Base::allocate, Base::clear, Base::clear_panels, Base::columns, Base::drop, Base::excludes,
      Base::coarse, Base::kGradientQueries, Base::kPanel, Base::kVectors, Base::ld, Base::p,
      Base::panels, Base::prepare_vectors, Base::probabilities, Base::row, Base::stage_keys_block,
      Base::visible, Base::W, Base::x;

 public:
  explicit Backward(const AdditiveParams& params) : Base(params) {}

  // Backward: tasks of several blocks of queries, then the sums over tasks.
  void run() {
    const int64_t tasks = p.B * x.chunks;
    const int team = team_size(p.threads, max_of(tasks, p.B * p.Lk / kKeys),
                               40.0 * p.B * p.Lq * p.Lk * (p.D + p.Dv));
    const int64_t keys = x.direct ? 0 : p.B * p.Lk;
    const auto run_task = [&](Buffers& f, int64_t t)
                              __attribute__((noinline)) { chunk(f, t / x.chunks, t % x.chunks); };
    if (team == 1) {  // without OpenMP, whose overhead matters for a small call
      Buffers f = allocate(thread_scratch(allocate(nullptr).bytes));
      prepare_vectors(f);
      for (int64_t t = 0; t < tasks; ++t) run_task(f, t);
      for (int64_t row = 0; row < keys; ++row) finish_key(row / p.Lk, row % p.Lk);
    } else {
#pragma omp parallel num_threads(team)
      {
        Buffers f = allocate(thread_scratch(allocate(nullptr).bytes));
        prepare_vectors(f);
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tasks; ++t) run_task(f, t);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < keys; ++row) finish_key(row / p.Lk, row % p.Lk);
      }
    }
    finish_vectors();
    if (p.grad_mask.data != nullptr) sum_grad_mask();
  }

 private:
  struct Part {
    T *dk, *dvalue, *vector, *bias;  // [Lk][D], [Lk][Dv], [D], [D]
  };

  // The buffers where task c of batch entry b sums its gradients.
  Part part(int64_t b, int64_t c) const {
    const int64_t n = b * x.chunks + c, keys = p.Lk * p.D, values = p.Lk * p.Dv;
    Part to;
    to.vector = static_cast<T*>(x.parts) + n * 2 * p.D;
    to.bias = to.vector + p.D;
    to.dk = static_cast<T*>(x.parts) + p.B * x.chunks * 2 * p.D + n * (keys + values);
    to.dvalue = to.dk + keys;
    if (x.direct) {  // both are contiguous
      to.dk = static_cast<T*>(p.grad_k.data) + b * keys;
      to.dvalue = static_cast<T*>(p.grad_v.data) + b * values;
    }
    return to;
  }

  // One task: sums the gradients of its blocks of queries.
  void chunk(Buffers& f, int64_t b, int64_t c) const {
    const Part to = part(b, c);
    clear(to.dk, p.Lk * p.D);
    clear(to.dvalue, p.Lk * p.Dv);
    clear(to.vector, 2 * p.D);
    const int64_t end = min_of(p.Lq, (c + 1) * x.chunk_rows);
    for (int64_t i0 = c * x.chunk_rows; i0 < end; i0 += kQueries)
      backward_block(f, {b, i0, min_of(end, i0 + kQueries)}, to);
  }

  // The gradients of one block of queries, added to the task's sums.
  void backward_block(Buffers& f, Block q, const Part& to) const {
    const int64_t rows = q.end - q.begin;
    const Range range = visible(f, q);
    probabilities(f, q, range);
    stage_rows<T>(row(p.grad_out, q.b, q.begin), p.grad_out.stride[2], p.grad_out.stride[3], rows,
                  p.Dv, f.o, columns);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys)
      grad_probabilities(f, q, j0, min_of(kKeys, range.end - j0));
    if (p.dropout_p > 0) drop(f, q, range, f.d);
    const int64_t padded = range.begin + round_up(range.end - range.begin, kKeys);
    for (int64_t i = 0; i < rows; ++i) grad_scores(f.s + i * ld, f.d + i * ld, range);
    for (int64_t i = rows; i < round_up(rows, kGradientQueries); ++i)
      for (int64_t j = range.begin; j < padded; ++j) f.d[i * ld + j] = T(0);
    if (x.grad_scores != nullptr) write_grad_scores(f, q, range);
    if (p.dropout_p > 0) drop(f, q, range, f.s);  // P -> W

    clear_panels(f.dq, round_up(rows, kGradientQueries));
    clear(f.dv, panels * W);
    const bool leaky = excludes && !all_finite(f.o, columns, 1, rows, p.Dv);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys) {
      const int64_t keys = min_of(kKeys, range.end - j0);
      clear_panels(f.dk, round_up(keys, 2));
      if (!stage_keys_block(f, q.b, j0, keys))
        exact_gradients(f, q, j0, keys);
      else if (rows == 1)
        gradients<1>(f, q, j0, keys);
      else
        gradients<kGradientQueries>(f, q, j0, keys);
      add_panels(f.dk, keys, to.dk + j0 * p.D);
      add_grad_values(f, rows, j0, keys, leaky, to.dvalue + j0 * p.Dv);
    }
    finish_queries(f, q, to);
  }

  // D = dO V^T + dW for a block of keys.
  void grad_probabilities(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    const int64_t rows = q.end - q.begin, *st = p.v.stride;
    if (rows == 1 && st[3] == 1 && p.Dv > 0) {
      for (int64_t d = p.Dv; d < columns; ++d) f.o[d] = T(0);
      clear(f.d + j0 + keys, kKeys - keys);
      products_of(row(p.v, q.b, j0), st[2], nullptr, keys, p.Dv, f.o, f.d + j0);
      return add_grad_weights(f, q, j0, keys);
    }
    pack_transposed<T>(row(p.v, q.b, j0), st[2], st[3], keys, p.Dv, kKeys, f.values, kKeys);
    for (int64_t j = 0; j < kKeys; j += kVectors * W) {
      const auto to = [&](int64_t i, int n)
                          __attribute__((always_inline)) { return f.d + i * ld + j0 + j + n * W; };
      const auto zero = [](int64_t, int) { return Vec<T>{}; };
      const auto put = [&](int64_t i, int n, Vec<T> sum)
                           __attribute__((always_inline)) { store(to(i, n), sum); };
      const auto add = [&](int64_t i, int n, Vec<T> sum) __attribute__((always_inline)) {
        store(to(i, n), load(to(i, n)) + sum);
      };
      tile_rows<P, P::kOutputRows, kVectors, false>(rows, f.o, columns, f.values + j, kKeys,
                                                    min_of(p.Dv, kChain), zero, put);
      for (int64_t c = kChain; c < p.Dv; c += kChain)
        tile_rows<P, P::kOutputRows, kVectors, false>(rows, f.o + c, columns,
                                                      f.values + c * kKeys + j, kKeys,
                                                      min_of(p.Dv - c, kChain), zero, add);
    }
    add_grad_weights(f, q, j0, keys);
  }

  // dp += the gradient of the weights.
  void add_grad_weights(const Buffers& f, Block q, int64_t j0, int64_t keys) const {
    if (p.grad_weights.data == nullptr) return;
    for (int64_t i = 0; i < q.end - q.begin; ++i) {
      const Source first = row(p.grad_weights, q.b, q.begin + i) + j0 * p.grad_weights.stride[3];
      with_elements(first, [&](const auto* dw) {
        for (int64_t j = 0; j < keys; ++j)
          f.d[i * ld + j0 + j] += static_cast<T>(widen(dw[j * p.grad_weights.stride[3]]));
      });
    }
  }

  // Replaces D by G in one row, 0 where P is 0.
  static void grad_scores(const T* s, T* d, Range range) {
    const int64_t end = range.begin + round_up(range.end - range.begin, kKeys);
    Vec<T> delta{};
    for (int64_t j = range.begin; j < end; j += W) {
      const Vec<T> w = load(s + j);
      delta += select<T>(w == T(0), Vec<T>{}, w * load(d + j));
    }
    const T mean = sum_lanes<T>(delta);
    for (int64_t j = range.begin; j < end; j += W) {
      const Vec<T> w = load(s + j);
      store(d + j, select<T>(w == T(0), Vec<T>{}, w * (load(d + j) - mean)));
    }
  }

  // Writes ds, from which the gradient of the mask is summed.
  void write_grad_scores(const Buffers& f, Block q, Range range) const {
    for (int64_t i = q.begin; i < q.end; ++i) {
      T* const to = static_cast<T*>(x.grad_scores) + (q.b * p.Lq + i) * p.Lk;
      for (int64_t j = 0; j < p.Lk; ++j)
        to[j] = j >= range.begin && j < range.end ? f.d[(i - q.begin) * ld + j] : T(0);
    }
  }

  // gradients_of() with coarse reciprocals where the results are rounded to 16 bits.
  template <int kQ>
  void gradients(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    if (kHasCoarse<T> && coarse) return gradients_of<kQ, kHasCoarse<T>>(f, q, j0, keys);
    gradients_of<kQ, false>(f, q, j0, keys);
  }

  // The gradients of kQ queries at a time, from exponentials that were computed once.
  template <int kQ, bool kCoarse>
  __attribute__((noinline)) void gradients_of(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    for (int64_t n = 0; n < panels; ++n) {
      for (int64_t i = q.begin; i < q.end; i += kQ) {
        const int64_t visible_end = visible_to_any(p, i, min_of(q.end, i + kQ)).end;
        const int64_t count = round_up(max_of<int64_t>(0, min_of(keys, visible_end - j0)), 2);
        const int64_t at = n * kPanel + (i - q.begin) * W;
        gradient_tile<T, kCoarse, kQ>(f.eq + at, f.k + n * kPanel, f.d + (i - q.begin) * ld + j0,
                                      ld, count, f.dq + at, f.dk + n * kPanel, f.dv + n * W);
      }
    }
  }

  // As gradients_of, with one tanh for each pair, where the exponentials would overflow.
  void exact_gradients(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    for (int64_t n = 0; n < panels; ++n) {
      for (int64_t i = q.begin; i < q.end; ++i) {
        const int64_t at = n * kPanel + (i - q.begin) * W;
        gradient_exactly<T>(f.q + at, f.k + n * kPanel, f.b + n * W, f.d + (i - q.begin) * ld + j0,
                            keys, f.dq + at, f.dk + n * kPanel, f.dv + n * W);
      }
    }
  }

  // to[row][a] += 4 v_a from[panel][row][lane]
  void add_panels(const T* from, int64_t rows, T* to) const {
    const T* v = static_cast<const T*>(x.vector);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < panels; ++n) {
        const int count = static_cast<int>(min_of<int64_t>(W, p.D - n * W));
        T* const at = to + r * p.D + n * W;
        const Vec<T> h = load(from + n * kPanel + r * W);
        store_first(at, load_first(at, count) + T(4) * load_first(v + n * W, count) * h, count);
      }
    }
  }

  // dV += W^T dO for a block of keys.
  void add_grad_values(const Buffers& f, int64_t rows, int64_t j0, int64_t keys, bool leaky,
                       T* to) const {
    if (leaky) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < keys; ++j) {
          const T weight = f.s[i * ld + j0 + j];
          if (weight == T(0)) continue;
          for (int64_t d = 0; d < p.Dv; ++d) to[j * p.Dv + d] += weight * f.o[i * columns + d];
        }
      }
      return;
    }
    for (int64_t d = 0; d < columns; d += kVectors * W)
      tile_rows<P, P::kOutputRows, kVectors, true>(
          keys, f.s + j0, ld, f.o + d, columns, rows, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t j, int n, Vec<T> sum) __attribute__((always_inline)) {
            const int count = static_cast<int>(min_of<int64_t>(W, p.Dv - d - n * W));
            if (count <= 0) return;
            T* const at = to + j * p.Dv + d + n * W;
            store_first(at, load_first(at, count) + sum, count);
          });
  }

  // dq of the block, and its contribution to dv and dbias.
  void finish_queries(const Buffers& f, Block q, const Part& to) const {
    for (int64_t n = 0; n < panels; ++n) {
      const int count = static_cast<int>(min_of<int64_t>(W, p.D - n * W));
      const Vec<T> factor = T(4) * load(f.v + n * W);
      Vec<T> sum[4] = {};  // short chains: the terms cancel, their rounding errors do not
      for (int64_t i = q.begin; i < q.end; ++i) {
        const Vec<T> g = factor * load(f.dq + n * kPanel + (i - q.begin) * W);
        with_elements(row(p.grad_q, q.b, i) + n * W,
                      [&](auto* to) __attribute__((always_inline)) { store_as<T>(to, g, count); });
        sum[i % 4] += g;
      }
      T *const bias = to.bias + n * W, *const vector = to.vector + n * W;
      store_first(bias, load_first(bias, count) + ((sum[0] + sum[1]) + (sum[2] + sum[3])), count);
      store_first(vector, load_first(vector, count) + load(f.dv + n * W), count);
    }
  }

  // Sums the chunks' parts of one key's gradients, in order.
  void finish_key(int64_t b, int64_t j) const {
    const auto sum = [&](T* Part::* which, int64_t width, const Tensor4& grad) {
      const Source to = row(grad, b, j);
      for (int64_t d = 0; d < width; d += W) {
        const int count = static_cast<int>(min_of<int64_t>(W, width - d));
        Vec<T> g{};
        for (int64_t c = 0; c < x.chunks; ++c)
          g += load_first(part(b, c).*which + j * width + d, count);
        with_elements(to + d,
                      [&](auto* at) __attribute__((always_inline)) { store_as<T>(at, g, count); });
      }
    };
    sum(&Part::dk, p.D, p.grad_k);
    sum(&Part::dvalue, p.Dv, p.grad_v);
  }

  // Sums the gradients of v and of the bias over all tasks, in their order.
  void finish_vectors() const {
    T *vector = static_cast<T*>(x.grad_vector), *bias = static_cast<T*>(x.grad_bias);
    for (int64_t a = 0; a < p.D; ++a) {
      double to_vector = 0, to_bias = 0;
      for (int64_t b = 0; b < p.B; ++b) {
        for (int64_t c = 0; c < x.chunks; ++c) {
          const Part from = part(b, c);
          to_vector += from.vector[a];
          to_bias += from.bias[a];
        }
      }
      vector[a] = static_cast<T>(to_vector);
      if (bias != nullptr) bias[a] = static_cast<T>(to_bias);
    }
  }

  // The gradient of a broadcast mask, in one order for any number of threads.
  void sum_grad_mask() const {
    const T* g = static_cast<const T*>(x.grad_scores);
    const int64_t* st = p.grad_mask.stride;
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t i = 0; i < p.Lq; ++i, g += p.Lk) {
        double* const to = static_cast<double*>(p.grad_mask.data) + b * st[0] + i * st[2];
        for (int64_t j = 0; j < p.Lk; ++j) to[j * st[3]] += g[j];
      }
    }
  }
};

}  // namespace

// The forward pass of a batch: out, and the weights if wanted.
void additive_forward(const AdditiveParams& x) {
  if (x.attention.B == 0 || x.attention.Lq == 0) return;
  with_arithmetic(x.attention.dtype, [&](auto policy) { Forward<decltype(policy)>(x).run(); });
}

// The backward pass of a batch: all gradients.
void additive_backward(const AdditiveParams& x) {
  with_arithmetic(x.attention.dtype, [&](auto policy) { Backward<decltype(policy)>(x).run(); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
