// Shared by the kernels of memory hops: the steps of a hop that do not read the memory.
#pragma once
#include "blocks.h"
#include "memory_hops_storage.h"
#include "rows.h"
#include "softmax_state.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kHopBlock = 64;  // rows per block of scores

template <class T>
constexpr double kEpsilon = sizeof(T) == 8 ? 0x1p-52 : 0x1p-23;

// A row has most of a query's weight if its own weight, 1 / sum e^(s - maximum), is above this.
constexpr double kSharp = 0.5;

// The number of memory rows per chunk, the unit of merging and of sharing among threads. It depends
// only on N.
FASTATTN_INLINE int64_t hop_chunk(int64_t N) {
  const int64_t target = max_of<int64_t>(1024, (N + 63) / 64);
  return (target + kHopBlock - 1) / kHopBlock * kHopBlock;
}

// weight_of as an object that can be passed as an argument.
template <class T>
constexpr auto kWeight = [](Vec<T> x) __attribute__((always_inline)) { return weight_of(x); };

// As many doubles as a vector of T has elements.
template <class T>
struct InDoubles {
  typedef Vec<double> type;
};
template <>
struct InDoubles<float> {
  typedef double type __attribute__((vector_size(2 * kVectorBytes)));
};

template <class T>
struct HopPolicy {
  typedef Single type;
};
template <>
struct HopPolicy<double> {
  typedef Double type;
};

// to[i * ld + j] = element (i, j) of A^T B, [rows][vectors], reduced over `terms`; element i of
// term t of A is A[t * lda + i]. Columns go from right to left, and for each the rows from first to
// last. So ld may be less than whole vectors: values written past the end of a row are overwritten
// by the next row.
template <class T>
__attribute__((noinline)) void outer_products(int64_t rows, const T* A, int64_t lda, const T* B,
                                              int64_t ldb, int64_t vectors, int64_t terms, T* to,
                                              int64_t ld) {
  constexpr int W = kLanes<T>;
  for (int64_t left = vectors; left > 0;) {
    const auto columns = [&](auto width) __attribute__((always_inline)) {
      constexpr int kVectors = decltype(width)::value;
      left -= kVectors;
      tile_rows<typename HopPolicy<T>::type, 4, kVectors, true>(
          rows, A, lda, B + left * W, ldb, terms, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t i, int n, Vec<T> x)
              __attribute__((always_inline)) { store(to + i * ld + (left + n) * W, x); });
    };
    constexpr int kMost = kRegisters / 8;
    if (left >= kMost && left != 3)
      columns(Width<kMost>());
    else if (left == 3)
      columns(Width<3>());
    else if (left == 2)
      columns(Width<2>());
    else
      columns(Width<1>());
  }
}

// A call, and the steps of a hop that concern one query only. Arithmetic is in T.
template <class T>
class HopSteps {
 protected:
  static constexpr int W = kLanes<T>;

  const MemoryHopsParams& p;  // proj is of T
  const int64_t dp;           // D in whole vectors
  const int64_t R;            // queries per memory
  const int64_t groups;       // memories
  const int64_t chunk, chunks;
  const bool is_narrow;  // elements of 16 bits, widened where they are read, rounded where written

  explicit HopSteps(const MemoryHopsParams& params)
      : p(params),
        dp(vectors_of<T>(params.D) * W),
        R(params.shared ? params.B * params.Q : params.Q),
        groups(params.shared ? 1 : params.B),
        chunk(hop_chunk(params.N)),
        chunks((params.N + chunk - 1) / chunk),
        is_narrow(params.dtype != kStoredAs<T>) {}

  // Maps query r of a group to its flattened index [b][q].
  int64_t row_of(int64_t group, int64_t r) const { return group * R + r; }
  int64_t batch_of(int64_t row) const { return row / p.Q; }
  int64_t query_of(int64_t row) const { return row % p.Q; }

  StoredRows in_rows(int64_t group, int64_t k, int64_t n) const {
    return memory(p.in_memory, group, k, n);
  }
  StoredRows out_rows(int64_t group, int64_t k, int64_t n) const {
    return memory(p.out_memory, group, k, n);
  }
  StoredRows proj_rows(int64_t k) const {
    const T* const first = static_cast<const T*>(p.proj.data) + k * p.proj.stride[1];
    return {first, p.proj.stride[2], nullptr, kStoredAs<T>};
  }

  // A search keeps only the last two states, unless the call asks for all.
  bool forgets() const { return p.search && !p.keep; }

  // u_k+1 is at 2 k and o_k+1 at 2 k + 1. If `settles`, o_k+1 is u_k+2.
  T* trace(int64_t row, int64_t at) const {
    int64_t states = 2 * p.K + 1;
    if (forgets())
      states = 2, at = 1;
    else if (p.settles)
      states = p.K + 1, at = (at + 1) / 2;
    return static_cast<T*>(p.trace) + (row * states + at) * p.D;
  }
  // m and l of a query in hop k.
  T* stats(int64_t row, int64_t k) const {
    return static_cast<T*>(p.stats) + (forgets() ? row : row * p.K + k) * 2;
  }

  // x[dp] = the D elements of a query in query or grad_out, then zeros.
  void read_vector(const Tensor4& from, int64_t row, T* x) const {
    const int64_t* st = from.stride;
    const int64_t first = batch_of(row) * st[0] + query_of(row) * st[1];
    read_elements(from.data, p.dtype, first, st[3], p.D, x);
    for (int64_t d = p.D; d < dp; ++d) x[d] = T(0);
  }
  // x[dp] = a state of the trace, then zeros.
  FASTATTN_INLINE void read_state(int64_t row, int64_t at, T* x) const {
    read_row(trace(row, at), p.D, x);
  }

  // Whether this query takes hop k.
  bool moves(int64_t row, int64_t k) const {
    if (!p.settles) return true;
    return p.search ? p.taken[row] <= 0 : k < p.taken[row];
  }

  // u <- o; a search also records the length of the step.
  void move_state(int64_t row, int64_t k, T* u, const T* o) const {
    if (p.search) {
      const Length moved_by = step_length(u, o);
      if (forgets()) __builtin_memcpy(trace(row, 0) - p.D, u, static_cast<size_t>(p.D) * sizeof(T));
      if (p.together == 1)
        count_step(row, moved_by);
      else
        p.moved[2 * row] = moved_by.step, p.moved[2 * row + 1] = moved_by.state;
    }
    for (int64_t d = 0; d < dp; d += W) store(u + d, load(o + d));
    for (int64_t d = p.D; d < dp; ++d) u[d] = T(0);
    __builtin_memcpy(trace(row, 2 * k + 2), u, static_cast<size_t>(p.D) * sizeof(T));
  }

  // Squares of the lengths of a step and of the state that it leads to.
  struct Length {
    double step, state;
  };
  Length step_length(const T* u, const T* o) const {
    // Several sums hide the latency of an addition; float64, because squares may overflow float32.
    typedef typename InDoubles<T>::type Wide;
    Wide step{}, state{};
    const int64_t whole = p.D / W * W;
    for (int64_t d = 0; d < whole; d += W) {
      const Wide x = __builtin_convertvector(load(o + d), Wide);
      const Wide moved_by = x - __builtin_convertvector(load(u + d), Wide);
      step += moved_by * moved_by, state += x * x;
    }
    Length sum{0, 0};
    for (int i = 0; i < W; ++i) sum.step += step[i], sum.state += state[i];
    for (int64_t d = whole; d < p.D; ++d) {
      const double x = static_cast<double>(o[d]), moved_by = x - static_cast<double>(u[d]);
      sum.step += moved_by * moved_by, sum.state += x * x;
    }
    return sum;
  }

  // Counts the step of the `together` queries from `row` on. They stop when the step is at most
  // eps, or within the rounding error; NaN stops too.
  void count_step(int64_t row, Length moved_by) const {
    const double unit = 4 * kEpsilon<T>,
                 limit = max_of(p.eps * p.eps, unit * unit * moved_by.state);
    const bool at_rest = !(moved_by.step > limit);
    for (int64_t i = row; i < row + p.together; ++i)
      p.taken[i] = at_rest ? 1 - p.taken[i] : p.taken[i] - 1;
  }
  // Called after hop k where several queries stop together.
  void count_joint_step(int64_t group) const {
    if (!p.search || p.together == 1) return;
    for (int64_t first = row_of(group, 0), row = first; row < first + R; row += p.together) {
      if (!moves(row, 0)) continue;
      Length moved_by{0, 0};
      for (int64_t i = row; i < row + p.together; ++i)
        moved_by.step += p.moved[2 * i], moved_by.state += p.moved[2 * i + 1];
      count_step(row, moved_by);
    }
  }

  // u <- phi(H u + o); both are kept in the trace. `next` is scratch [dp, and D in whole vectors].
  __attribute__((noinline)) void step(int64_t row, int64_t k, T* u, const T* o, T* next) const {
    if (p.settles) return move_state(row, k, u, o);
    const T* before = u;
    if (p.proj.data != nullptr) project(k, u, next), before = next;
    T *const trace_o = trace(row, 2 * k + 1), *const trace_u = trace(row, 2 * k + 2);
    for (int64_t d = 0; d < p.D; d += W) {
      const int lanes = static_cast<int>(min_of<int64_t>(W, p.D - d));
      const Vec<T> y = load(o + d);
      Vec<T> x = load(before + d) + y;
      if (p.activation != Activation::none) x = activate(x);
      if (lanes < W) x = select<T>(first_lanes<T>(lanes), x, Vec<T>{});  // sigmoid(0) is not 0
      store(u + d, x);
      store_first(trace_o + d, y, lanes);
      store_first(trace_u + d, x, lanes);
    }
  }
  // to = H u.
  void project(int64_t k, const T* u, T* to) const { row_products(proj_rows(k), p.D, p.D, u, to); }

  // phi(x).
  Vec<T> activate(Vec<T> x) const {
    switch (p.activation) {
      case Activation::none:
        return x;
      case Activation::relu:
        return select<T>(x < T(0), Vec<T>{}, x);
      case Activation::tanh:
        return tanh_of<T>(x);
      case Activation::sigmoid: {  // of e^-|x|, so that small results keep their accuracy
        const Mask<T> negative = x < T(0);
        const Vec<T> e = exp2_neg(select<T>(negative, x, -x) * kLog2E<T>);
        return select<T>(negative, e, Vec<T>{} + T(1)) / (T(1) + e);
      }
    }
    return x;
  }

  // g <- g o phi'(.), by the activation's value y.
  __attribute__((noinline)) void through_activation(const T* y, T* g) const {
    for (int64_t d = 0; d < p.D; ++d) {
      const T v = y[d];
      switch (p.activation) {
        case Activation::none:
          return;
        case Activation::relu:
          g[d] = v <= T(0) ? T(0) : g[d];
          break;
        case Activation::tanh:
          g[d] *= T(1) - v * v;
          break;
        case Activation::sigmoid:
          g[d] *= v * (T(1) - v);
          break;
      }
    }
  }

  void keep_state(int64_t row, int64_t k, const T* g) const {
    if (p.grad_states != nullptr)
      __builtin_memcpy(static_cast<T*>(p.grad_states) + (row * p.K + k) * p.D, g,
                       static_cast<size_t>(p.D) * sizeof(T));
  }

  // out[D] = the last u, rounded.
  void write_vector(void* to, int64_t row, const T* x) const {
    write_elements(x, p.D, to, p.dtype, row * p.D);
  }

 private:
  // The rows from n on of the memory of hop k.
  FASTATTN_INLINE StoredRows memory(const Tensor4& m, int64_t group, int64_t k, int64_t n) const {
    const int64_t* st = m.stride;
    const int64_t first = group * st[0] + k * st[1] + n * st[2];
    const char* const data = static_cast<const char*>(m.data);
    return {data + first * bytes_of(p.dtype), st[2], nullptr, p.dtype};
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
