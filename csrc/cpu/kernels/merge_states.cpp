// Merges two states of attention, row by row, with p_a = e^(lse_a - lse) and p_b = e^(lse_b - lse):
//
//   lse = log(e^lse_a + e^lse_b),  out = p_a out_a + p_b out_b
//
// and backward, with g and h the gradients of out and lse,
//
//   d = sum g (out_a - out_b)
//   dout_a = p_a g,  dlse_a = p_a h + p_a p_b d
//   dout_b = p_b g,  dlse_b = p_b h - p_a p_b d
//
// The work is bound by memory. The shares of a block of rows are computed together, rows across the
// lanes, then each row is read and written once, columns across the lanes. The output of an empty
// state, lse = -inf, is not read.
#include "../../params.h"
#include "../simd/convert.h"
#include "../simd/math.h"
#include "../simd/stream.h"
#include "../threads.h"
#include "rows.h"
#include "softmax_state.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class MergeStates {
  typedef typename P::Acc T;  // the type of columns
  typedef double R;           // the type of lse
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kRows = 64;            // per block
  static constexpr double kFlopsPerElement = 20;  // the time of one element, in flops

 public:
  explicit MergeStates(const MergeStatesParams& params)
      : p(params), rows(p.B * p.H * p.L), streams(rows * p.D > kStreamBytes / bytes_of(p.dtype)) {}

  // lse of each row, and its output by the shares of both states.
  void forward() const {
    each_block(1, [&](const Block& block, int64_t r, Place at) {
      write_lse(p.lse, at, block.lse[r]);
      with_stored<P>(p.dtype, [&](auto stored) { merge_row<decltype(stored)>(block, r, at); });
    });
  }

  // The gradients of both states, see the equations above.
  void backward() const {
    each_block(2, [&](const Block& block, int64_t r, Place at) {
      T d = T(0);
      with_stored<P>(p.dtype, [&](auto stored) {
        typedef decltype(stored) S;
        d = p.grad_out.data == nullptr ? no_gradient<S>(at) : derive_row<S>(block, r, at);
      });
      const R a = block.share_a[r], b = block.share_b[r], both = a * b * static_cast<R>(d);
      const R h = p.grad_lse.data == nullptr ? R(0) : read_lse(p.grad_lse, at);
      write_lse(p.grad_lse_a, at, block.is_empty_a(r) ? R(0) : a * h + both);
      write_lse(p.grad_lse_b, at, block.is_empty_b(r) ? R(0) : b * h - both);
    });
  }

 private:
  const MergeStatesParams& p;
  const int64_t rows;
  const bool streams;

  struct Place {
    int64_t b, h, l;
    Place(const MergeStatesParams& p, int64_t row)
        : b(row / (p.H * p.L)), h(row / p.L % p.H), l(row % p.L) {}
    void step(const MergeStatesParams& p) {
      if (++l < p.L) return;
      l = 0;
      if (++h == p.H) h = 0, ++b;
    }
    template <class E>
    FASTATTN_INLINE E* of(const Tensor4& t) const {
      return static_cast<E*>(t.data) + b * t.stride[0] + h * t.stride[1] + l * t.stride[2];
    }
  };

  // The log-sum-exp of a row, float32 or float64.
  R read_lse(const Tensor4& t, Place at) const {
    return p.lse_dtype == DType::f64 ? *at.of<double>(t) : R(*at.of<float>(t));
  }

  // Writes one element of an lse, in its dtype.
  void write_lse(const Tensor4& t, Place at, R x) const {
    if (p.lse_dtype == DType::f64)
      *at.of<double>(t) = x;
    else
      *at.of<float>(t) = static_cast<float>(x);
  }

  // A block of rows: their lse, and the factors of their outputs.
  struct Block {
    alignas(kVectorBytes) R lse_a[kRows];
    alignas(kVectorBytes) R lse_b[kRows];
    alignas(kVectorBytes) R lse[kRows];
    alignas(kVectorBytes) R share_a[kRows];
    alignas(kVectorBytes) R share_b[kRows];
    bool is_empty_a(int64_t r) const { return lse_a[r] == -kInf<R>; }
    bool is_empty_b(int64_t r) const { return lse_b[r] == -kInf<R>; }
  };

  // of_row(block, its row r, where that is) for all rows.
  template <class F>
  void each_block(int results, F of_row) const {
    const int64_t blocks = (rows + kRows - 1) / kRows;
    const double flops = kFlopsPerElement * results * static_cast<double>(rows * (p.D + W));
    const int team = team_size(p.threads, blocks, flops);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t n = 0; n < blocks; ++n) {
      const int64_t count = min_of(kRows, rows - n * kRows);
      const Place first(p, n * kRows);
      Block block;
      Place at = first;
      for (int64_t r = 0; r < count; ++r, at.step(p)) {
        block.lse_a[r] = read_lse(p.lse_a, at);
        block.lse_b[r] = read_lse(p.lse_b, at);
      }
      weigh(&block, count);
      at = first;
      for (int64_t r = 0; r < count; ++r, at.step(p)) of_row(block, r, at);
      if (streams) stream_fence();
    }
  }

  // The joint lse and the shares of both states, for `count` rows.
  static void weigh(Block* block, int64_t count) {
    for (int64_t r = count; r < round_up(count, kLanes<R>); ++r)
      block->lse_a[r] = block->lse_b[r] = R(0);
    for (int64_t r = 0; r < count; r += kLanes<R>) {
      Vec<R> m = load(block->lse_a + r), l = splat<R>(1);
      const Shares<R> share =
          merge_sums<R>(&m, &l, load(block->lse_b + r), splat<R>(1),
                        [](Vec<R> x) __attribute__((always_inline)) { return exp_neg(x); });
      // The larger of the two shares is 1, so their product is the smaller share.
      store(block->lse + r, m + log1p_of(share.first * share.second));
      const Vec<R> inverse = select<R>(l == R(0), Vec<R>{}, R(1) / l);
      store(block->share_a + r, share.first * inverse);
      store(block->share_b + r, share.second * inverse);
    }
  }

  // n <= W columns of a row from d on.
  template <class S>
  static FASTATTN_INLINE Vec<T> read(const S* row, const Tensor4& t, int64_t d, int n) {
    if (t.stride[3] == 1) return load_as<T>(row + d, n);
    alignas(kVectorBytes) T lanes[W] = {};
    for (int i = 0; i < n; ++i) lanes[i] = static_cast<T>(widen(row[(d + i) * t.stride[3]]));
    return load(lanes);
  }

  // Writes n columns of a row, from column d on.
  template <class S>
  FASTATTN_INLINE void write(S* row, const Tensor4& t, int64_t d, int n, Vec<T> x) const {
    if (t.stride[3] == 1) {
      if (streams && n == W && reinterpret_cast<uintptr_t>(row + d) % (W * sizeof(S)) == 0)
        return stream_as<T>(row + d, x);
      return store_as<T>(row + d, x, n);
    }
    alignas(kVectorBytes) T lanes[W];
    store(lanes, x);
    for (int i = 0; i < n; ++i) narrow(lanes[i], row + (d + i) * t.stride[3]);
  }
  // of_columns(d, n) for all columns, W of them at a time and then the rest.
  template <class F>
  FASTATTN_INLINE void each_vector(F of_columns) const {
    int64_t d = 0;
    for (; d + W <= p.D; d += W) of_columns(d, W);
    if (d < p.D) of_columns(d, static_cast<int>(p.D - d));
  }

  // out = share_a out_a + share_b out_b for one row.
  template <class S>
  __attribute__((noinline)) void merge_row(const Block& block, int64_t r, Place at) const {
    const S *const a = at.of<S>(p.out_a), *const b = at.of<S>(p.out_b);
    S* const out = at.of<S>(p.out);
    if (block.is_empty_a(r) || block.is_empty_b(r)) {
      const bool of_a = block.is_empty_b(r), nothing = of_a && block.is_empty_a(r);
      return each_vector([&](int64_t d, int n) __attribute__((always_inline)) {
        const Vec<T> x = nothing ? Vec<T>{}
                         : of_a  ? read(a, p.out_a, d, n)
                                 : read(b, p.out_b, d, n);
        write(out, p.out, d, n, x);
      });
    }
    const T share_a = static_cast<T>(block.share_a[r]), share_b = static_cast<T>(block.share_b[r]);
    each_vector([&](int64_t d, int n) __attribute__((always_inline)) {
      write(out, p.out, d, n, read(a, p.out_a, d, n) * share_a + read(b, p.out_b, d, n) * share_b);
    });
  }

  // The gradients of both outputs; returns d, which is 0 if one of the states is empty.
  template <class S>
  __attribute__((noinline)) T derive_row(const Block& block, int64_t r, Place at) const {
    const S* const g = at.of<S>(p.grad_out);
    S* const da = at.of<S>(p.grad_out_a);
    S* const db = at.of<S>(p.grad_out_b);
    if (block.is_empty_a(r) || block.is_empty_b(r)) {
      each_vector([&](int64_t d, int n) __attribute__((always_inline)) {
        const Vec<T> x = read(g, p.grad_out, d, n);
        write(da, p.grad_out_a, d, n, block.is_empty_a(r) ? Vec<T>{} : x);
        write(db, p.grad_out_b, d, n, block.is_empty_b(r) ? Vec<T>{} : x);
      });
      return T(0);
    }
    const S *const a = at.of<S>(p.out_a), *const b = at.of<S>(p.out_b);
    const T share_a = static_cast<T>(block.share_a[r]), share_b = static_cast<T>(block.share_b[r]);
    Vec<T> sum{};
    each_vector([&](int64_t d, int n) __attribute__((always_inline)) {
      const Vec<T> x = read(g, p.grad_out, d, n);
      sum += x * (read(a, p.out_a, d, n) - read(b, p.out_b, d, n));
      write(da, p.grad_out_a, d, n, x * share_a);
      write(db, p.grad_out_b, d, n, x * share_b);
    });
    return sum_lanes<T>(sum);
  }

  // Clears the gradients of both outputs of a row; returns d = 0.
  template <class S>
  __attribute__((noinline)) T no_gradient(Place at) const {
    S* const da = at.of<S>(p.grad_out_a);
    S* const db = at.of<S>(p.grad_out_b);
    each_vector([&](int64_t d, int n) __attribute__((always_inline)) {
      write(da, p.grad_out_a, d, n, Vec<T>{});
      write(db, p.grad_out_b, d, n, Vec<T>{});
    });
    return T(0);
  }
};

// Calls f(kernel) with the kernel of the dtype.
template <class F>
void with_types(const MergeStatesParams& p, F f) {
  with_arithmetic(p.dtype, [&](auto policy) { f(MergeStates<decltype(policy)>(p)); });
}

}  // namespace

// The merge of two states, and its gradients.
void merge_states_forward(const MergeStatesParams& p) {
  with_types(p, [](const auto& states) { states.forward(); });
}

void merge_states_backward(const MergeStatesParams& p) {
  with_types(p, [](const auto& states) { states.backward(); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
