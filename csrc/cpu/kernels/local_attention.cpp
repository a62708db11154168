// Local attention: query i reads the window of rows around its position p_i,
//
//   w = softmax(q . k_j),  out = sum_j w_j z_j v_j,      |j - p_i| <= D,
//
// where z_j = exp(-2 ((j - p_i) / D)^2) times a factor of the caller, and backward, with g the
// gradient of out,
//
//   dw_j = z_j (g . v_j) + dweights_j,  ds_j = w_j (dw_j - sum w dw),  dq = sum_j ds_j k_j
//   dk_j = sum_i ds_i(j) q_i,  dv_j = sum_i w_i(j) z_i(j) g_i
//   dp = sum_j w_j z_j (g . v_j) 4 (j - p) / D^2
//
// Nothing outside a window is computed, and padding is not read. A query at NaN is lost: any key
// that is no padding may be in its window, so its results are NaN, and the gradients of all these
// keys. The first pass over the queries stores ds and w z. The gradients of the rows are sums over
// queries in order, by blocks of rows that one task owns, so the bits do not depend on the number
// of threads.
#include "../../params.h"
#include "../threads.h"
#include "blocks.h"
#include "rows.h"
#include "team.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class LocalAttention {
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kRows = 32;  // of keys and values, per task of the second pass

 public:
  explicit LocalAttention(const LocalParams& params)
      : p(params),
        dp(vectors_of<T>(p.D) * W),
        dvp(vectors_of<T>(p.Dv) * W),
        queries(p.B * p.Lq),
        flops(2.0 * static_cast<double>(queries * p.W * (p.D + p.Dv))) {}

  void forward() const {
    each<Scratch>(queries, flops, [&](const Scratch& f, int64_t i) { attend(f, i); });
  }

  // dq of each query, then dk and dv of each block of keys.
  void backward() const {
    each<Scratch>(queries, 2 * flops, [&](const Scratch& f, int64_t i) { backward_query(f, i); });
    const int64_t blocks = (p.Lk + kRows - 1) / kRows;
    each<Sums>(p.B * blocks, 2 * flops, [&](const Sums& f, int64_t t) {
      const int64_t j0 = t % blocks * kRows;
      collect(f, t / blocks, j0, min_of(p.Lk, j0 + kRows));
    });
  }

 private:
  const LocalParams& p;
  const int64_t dp, dvp;  // D and Dv in whole vectors
  const int64_t queries;
  const double flops;

  struct Scratch {
    T *x, *g, *y;  // [dp], [dvp], [dp | dvp]
    T *s, *d, *z;  // [W], of the visible rows
    T* off;        // [W], j - p
    int64_t* row;  // [W], their index in key and value
    int64_t* at;   // [W], their position in the window
    Scratch(const LocalAttention& l, Arena& a)
        : x(a.take<T>(l.dp)),
          g(a.take<T>(l.dvp)),
          y(a.take<T>(max_of(l.dp, l.dvp))),
          s(a.take<T>(l.p.W + W)),
          d(a.take<T>(l.p.W + W)),
          z(a.take<T>(l.p.W + W)),
          off(a.take<T>(l.p.W + W)),
          row(a.take<int64_t>(l.p.W)),
          at(a.take<int64_t>(l.p.W)) {}
  };
  struct Sums {
    T *x, *g;    // [dp], [dvp]
    T *dk, *dv;  // [kRows][dp], [kRows][dvp]
    Sums(const LocalAttention& l, Arena& a)
        : x(a.take<T>(l.dp)),
          g(a.take<T>(l.dvp)),
          dk(a.take<T>(kRows * l.dp)),
          dv(a.take<T>(kRows * l.dvp)) {}
  };

  // Runs the tasks in parallel, each thread with its own buffers.
  template <class Buffers, class F>
  void each(int64_t tasks, double work, F task) const {
    Arena size(nullptr);
    Buffers(*this, size);
    const int team = team_size(p.threads, tasks, work);
    const auto make = [&] {
      Arena arena(thread_scratch(size.used()));
      return Buffers(*this, arena);
    };
    each_task(team, tasks, kStatic, make, task);
  }

  // Row i of batch entry b.
  Source row_of(const Tensor4& t, int64_t b, int64_t i) const {
    return P::elements(t.data, p.dtype) + b * t.stride[0] + i * t.stride[1];
  }
  // Row i of a contiguous result.
  Source result(void* data, int64_t i, int64_t columns) const {
    return P::elements(data, p.dtype) + i * columns;
  }
  // The window of query i in a result [queries][W].
  const T* of_query(const void* data, int64_t i) const {
    return data == nullptr ? nullptr : static_cast<const T*>(data) + i * p.W;
  }
  T* of_query(void* data, int64_t i) const {
    return data == nullptr ? nullptr : static_cast<T*>(data) + i * p.W;
  }

  static void fill(T* x, int64_t count, T value) {
    for (int64_t d = 0; d < count; d += W) store(x + d, splat<T>(value));
  }

  T position(int64_t i) const { return static_cast<const T*>(p.positions)[i]; }
  const uint8_t* padding_of(int64_t b) const {
    return p.padding == nullptr ? nullptr : p.padding + b * p.Lk;
  }

  // Whether query i is at NaN, and has a key.
  bool is_lost(int64_t i) const {
    if (position(i) == position(i)) return false;
    const uint8_t* const padding = padding_of(i / p.Lq);
    int64_t j = 0;
    while (padding != nullptr && j < p.Lk && padding[j] != 0) ++j;
    return j < p.Lk;
  }

  // The first key of the window of query i; Lk if it sees none, or is lost.
  int64_t first_of(int64_t i) const {
    const T at = position(i), reach = static_cast<T>(p.reach);
    const T low = max_of(T(0), at - reach);
    if (!(at + reach >= T(0) && low < static_cast<T>(p.Lk))) return p.Lk;
    const int64_t truncated = static_cast<int64_t>(low);
    return truncated + (static_cast<T>(truncated) < low);
  }

  // Lists the visible rows in the window of query i, with their z; returns their number.
  int64_t find_window(const Scratch& f, int64_t i) const {
    const T at = position(i), reach = static_cast<T>(p.reach);
    const uint8_t* const padding = padding_of(i / p.Lq);
    const int64_t first = first_of(i), end = min_of(p.Lk, first + p.W);
    int64_t count = 0;
    for (int64_t j = max_of<int64_t>(0, first); j < end && static_cast<T>(j) <= at + reach; ++j) {
      if (padding != nullptr && padding[j] != 0) continue;
      f.off[count] = static_cast<T>(j) - at;
      f.row[count] = j;
      f.at[count++] = j - first;
    }
    for (int64_t n = count; n < (count + W - 1) / W * W; ++n) f.off[n] = T(0);
    for (int64_t n = 0; n < count; n += W) {
      const Vec<T> x = load(f.off + n) / reach;
      store(f.z + n, p.bell ? exp_neg(T(-2) * (x * x)) : splat<T>(T(1)));
    }
    if (p.factor != nullptr)
      for (int64_t n = 0; n < count; ++n) f.z[n] *= of_query(p.factor, i)[f.at[n]];
    return count;
  }

  // out and weights of query i.
  void attend(const Scratch& f, int64_t i) const {
    const int64_t b = i / p.Lq, count = find_window(f, i);
    T* const weights = of_query(p.weights, i);
    const T none = is_lost(i) ? position(i) : T(0);
    for (int64_t w = 0; w < p.W; ++w) weights[w] = none;
    fill(f.y, dvp, none);
    if (count > 0) {
      read_row(row_of(p.query, b, i % p.Lq), p.D, f.x);
      products(p.key, b, f.row, count, p.D, f.x, f.s);
      soften(f.s, count);
      for (int64_t n = 0; n < count; ++n) {
        weights[f.at[n]] = f.s[n];
        f.s[n] *= f.z[n];
      }
      add_rows_of(row_of(p.value, b, 0), p.value.stride[1], f.row, count, p.Dv, f.s, f.y);
    }
    write_row(f.y, p.Dv, result(p.out, i, p.Dv));
  }

  // s[n] = (row at[n] of t) . x, written in whole vectors.
  void products(const Tensor4& t, int64_t b, const int64_t* at, int64_t count, int64_t columns,
                const T* x, T* s) const {
    if (columns > 0) return products_of(row_of(t, b, 0), t.stride[1], at, count, columns, x, s);
    for (int64_t n = 0; n < count; ++n) s[n] = T(0);
  }

  // s <- e^(s - max) / sum. If every score is -inf, or one is NaN, the weights are NaN, as in
  // PyTorch.
  static void soften(T* s, int64_t count) {
    for (int64_t n = count; n < (count + W - 1) / W * W; ++n) s[n] = -kInf<T>;
    Vec<T> top = load(s), sum{};
    for (int64_t n = W; n < count; n += W) top = max_of(top, load(s + n));
    const T largest = largest_lane<T>(top);
    for (int64_t n = 0; n < count; n += W) {
      const Vec<T> e = exp_neg(load(s + n) - largest);
      sum += e;
      store(s + n, e);
    }
    const T inverse = T(1) / sum_lanes<T>(sum);
    for (int64_t n = 0; n < count; n += W) store(s + n, load(s + n) * inverse);
  }

  // dq, and the gradients of the scores that the keys need, of query i.
  void backward_query(const Scratch& f, int64_t i) const {
    const int64_t b = i / p.Lq, count = find_window(f, i);
    const T* const weights = of_query(p.weights, i);
    const T* const grad_weights = of_query(p.grad_weights, i);
    T* const of_keys = of_query(p.coefficients, i);
    T* const of_values = of_query(p.coefficients, queries + i);
    const T none = is_lost(i) ? position(i) : T(0);
    T grad_position = p.bell && p.grad_out.data != nullptr ? none : T(0);
    for (int64_t w = 0; w < p.W; ++w) of_keys[w] = of_values[w] = T(0);
    fill(f.y, dp, none);
    if (count > 0) {
      for (int64_t n = 0; n < count; ++n) f.d[n] = T(0);
      if (p.grad_out.data != nullptr) {
        read_row(row_of(p.grad_out, b, i % p.Lq), p.Dv, f.g);
        products(p.value, b, f.row, count, p.Dv, f.g, f.d);
      }
      for (int64_t n = 0; n < count; ++n) {
        const int64_t w = f.at[n];
        of_values[w] = weights[w] * f.z[n];
        if (p.bell) grad_position += f.d[n] * of_values[w] * f.off[n];
        f.d[n] = f.d[n] * f.z[n] + (grad_weights == nullptr ? T(0) : grad_weights[w]);
      }
      // Twice: the first pass leaves a small residue, and the rounding error of the second is small
      // too.
      center(f, weights, count);
      center(f, weights, count);
      for (int64_t n = 0; n < count; ++n) of_keys[f.at[n]] = f.s[n] = weights[f.at[n]] * f.d[n];
      add_rows_of(row_of(p.key, b, 0), p.key.stride[1], f.row, count, p.D, f.s, f.y);
    }
    const T reach = static_cast<T>(p.reach);
    static_cast<T*>(p.grad_positions)[i] = T(4) * grad_position / (reach * reach);
    write_row(f.y, p.D, result(p.grad_query, i, p.D));
  }

  // d -= sum p d
  static void center(const Scratch& f, const T* weights, int64_t count) {
    T mean = T(0);
    for (int64_t n = 0; n < count; ++n) mean += weights[f.at[n]] * f.d[n];
    for (int64_t n = 0; n < count; ++n) f.d[n] -= mean;
  }

  // The gradients of rows [j0, j1) of one batch entry.
  void collect(const Sums& f, int64_t b, int64_t j0, int64_t j1) const {
    fill(f.dk, kRows * dp, T(0));
    fill(f.dv, kRows * dvp, T(0));
    const uint8_t* const padding = padding_of(b);
    for (int64_t i = b * p.Lq; i < (b + 1) * p.Lq; ++i) {
      const bool lost = is_lost(i);
      const int64_t first = first_of(i);
      if (!lost && (first >= j1 || first <= j0 - p.W)) continue;
      read_row(row_of(p.query, b, i % p.Lq), p.D, f.x);
      if (p.grad_out.data != nullptr) read_row(row_of(p.grad_out, b, i % p.Lq), p.Dv, f.g);
      const T* const of_keys = of_query(p.coefficients, i);
      const T* const of_values = of_query(p.coefficients, queries + i);
      for (int64_t j = max_of(j0, first); j < min_of(j1, first + p.W); ++j) {
        add(of_keys[j - first], f.x, dp, f.dk + (j - j0) * dp);
        if (p.grad_out.data != nullptr) add(of_values[j - first], f.g, dvp, f.dv + (j - j0) * dvp);
      }
      for (int64_t j = j0; lost && j < j1; ++j) {
        if (padding != nullptr && padding[j] != 0) continue;
        add(position(i), f.x, dp, f.dk + (j - j0) * dp);
        if (p.grad_out.data != nullptr) add(position(i), f.g, dvp, f.dv + (j - j0) * dvp);
      }
    }
    for (int64_t j = j0; j < j1; ++j) {
      write_row(f.dk + (j - j0) * dp, p.D, result(p.grad_key, b * p.Lk + j, p.D));
      write_row(f.dv + (j - j0) * dvp, p.Dv, result(p.grad_value, b * p.Lk + j, p.Dv));
    }
  }
  // y += c x. A masked row (c = 0) adds nothing, not even NaN.
  static FASTATTN_INLINE void add(T c, const T* x, int64_t padded, T* y) {
    if (c == T(0)) return;
    for (int64_t d = 0; d < padded; d += W) store(y + d, load(y + d) + c * load(x + d));
  }
};

}  // namespace

// The forward pass: out and the weights.
void local_attention_forward(const LocalParams& p) {
  with_arithmetic(p.dtype, [&](auto policy) { LocalAttention<decltype(policy)>(p).forward(); });
}

// The backward pass: the gradients of query, key, value and positions.
void local_attention_backward(const LocalParams& p) {
  with_arithmetic(p.dtype, [&](auto policy) { LocalAttention<decltype(policy)>(p).backward(); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
