// Interprets a score program on a tile of scores S[key][lane], and its derivative.
//
// A register holds a panel of queries, [lanes], or one for each of a few keys, [keys][lanes], if
// its number differs between keys. So the choice of an operation is paid once for all pairs of
// these keys, and what does not depend on the key is computed once a tile.
#pragma once
#include "../../score_program.h"
#include "score_math.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T, int kVectors>
class ScoreMachine {
  static constexpr int W = kLanes<T>;
  static constexpr int NV = kVectors;
  static constexpr int64_t L = kVectors * W;
  typedef Mask<T> Int;
  typedef typename IntOf<T>::Unsigned Unsigned;  // whose sums wrap

 public:
  // Elements of the registers.
  static int64_t size(const AttentionParams& p) {
    return p.score_program == nullptr ? 0 : p.score_program->panels * L;
  }

  ScoreMachine(const Sequence& params, T* registers, int64_t b, int64_t h, int64_t i0, int64_t i1)
      : p(params),
        program(*params.score_program),
        registers_(registers),
        entry_((params.index + b) % program.batch),
        head_(h),
        i0_(i0),
        i1_(i1) {}

  // S = program(scale S) for keys j0...; `raw`, if not null, gets scale S.
  __attribute__((noinline)) void modify(T* S, int64_t rows, int64_t j0, T* raw) {
    const T scale = static_cast<T>(p.scale);
    for (int64_t x = 0; x < rows * L; x += W) {
      const Vec<T> s = load(S + x) * scale;
      store(S + x, s);
      if (raw != nullptr) store(raw + x, s);
    }
    begin(S, S, rows, j0);
    run(program.value_before);
    groups(S, S, rows, j0, program.value_each, program.value, S);
  }

  // Turns dS from the gradient of the modified scores into the gradient of the raw scores. The
  // gradients of captured tensors are added to `sums`.
  __attribute__((noinline)) void differentiate(T* raw, T* dS, int64_t rows, int64_t j0,
                                               double* sums) {
    sums_ = sums;
    begin(raw, dS, rows, j0);
    run(program.before);
    groups(raw, dS, rows, j0, program.each, program.gradient, dS);
    begin(raw, dS, rows, j0);
    run(program.after);
  }

 private:
  const Sequence& p;
  const ScoreProgram& program;
  T* const registers_;
  const int64_t entry_, head_, i0_, i1_;
  T *score_ = nullptr, *seed_ = nullptr;
  int64_t rows_ = 0, j_ = 0;
  double* sums_ = nullptr;

  struct Register {
    T* at;
    int64_t step;  // from key to key
    int32_t level;
    FASTATTN_INLINE T* vector(int64_t r, int n) const { return at + r * step + n * W; }
    FASTATTN_INLINE Vec<T> value(int64_t r, int n) const { return load(vector(r, n)); }
    FASTATTN_INLINE Int bits(int64_t r, int n) const { return (Int)value(r, n); }
  };

  // Register n: the score, the gradient of the result, or one of the program.
  FASTATTN_INLINE Register at(int32_t n) const {
    const int32_t level = program.levels[n];
    T* const first = n == 0 ? score_ : n == 1 ? seed_ : registers_ + program.at[n] * L;
    return {first, (level & kVariesByKey) != 0 ? L : 0, level};
  }

  // The first keys of a tile.
  void begin(T* score, T* seed, int64_t rows, int64_t j0) {
    score_ = score, seed_ = seed, j_ = j0;
    rows_ = min_of(kScoreRows, rows);
  }

  // Runs `steps` for each group of kScoreRows keys, and writes the register `result` to `to`.
  void groups(T* score, T* seed, int64_t rows, int64_t j0, const ScoreSteps& steps, int32_t result,
              T* to) {
    for (int64_t r = 0; r < rows; r += kScoreRows) {
      begin(score + r * L, seed + r * L, rows - r, j0 + r);
      run(steps);
      T* const own = to + r * L;
      const Register from = at(result);
      if (from.at == own) continue;
      const bool selects = to == seed && seed != score;  // an excluded pair keeps its gradient 0
      for (int64_t k = 0; k < rows_; ++k) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
          const Vec<T> x = from.value(k, n);
          T* const s = own + k * L + n * W;
          store(s, selects ? select<T>(load(s) == T(0), Vec<T>{}, x) : x);
        }
    }
  }

  // to = f(key, vector) for the keys and vectors of a register.
  template <class F>
  FASTATTN_INLINE void each(const Register& to, F f) const {
    const int64_t rows = to.step != 0 ? rows_ : 1;
    if ((to.level & kVariesByQuery) == 0) {
      for (int64_t r = 0; r < rows; ++r) {
        const Vec<T> x = (Vec<T>)f(r, 0);
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n) store(to.vector(r, n), x);
      }
      return;
    }
    for (int64_t r = 0; r < rows; ++r)
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) store(to.vector(r, n), (Vec<T>)f(r, n));
  }

  // s.to = f(a, b) of floating registers.
  template <class F>
  FASTATTN_INLINE void floats(const ScoreStep& s, F f) const {
    const Register a = at(s.a), b = at(s.b);
    each(at(s.to), [&](int64_t r, int n)
                       __attribute__((always_inline)) { return f(a.value(r, n), b.value(r, n)); });
  }
  // s.to = f(a, b) of integer registers.
  template <class F>
  FASTATTN_INLINE void integers(const ScoreStep& s, F f) const {
    const Register a = at(s.a), b = at(s.b);
    each(at(s.to), [&](int64_t r, int n)
                       __attribute__((always_inline)) { return f(a.bits(r, n), b.bits(r, n)); });
  }
  // s.to = f(a) of a floating register.
  template <class F>
  FASTATTN_INLINE void unary(const ScoreStep& s, F f) const {
    const Register a = at(s.a);
    each(at(s.to),
         [&](int64_t r, int n) __attribute__((always_inline)) { return f(a.value(r, n)); });
  }
  // s.to = x in all lanes.
  FASTATTN_INLINE void fill(int32_t to, Vec<T> x) const {
    each(at(to), [&](int64_t, int) __attribute__((always_inline)) { return x; });
  }
  // A size or offset of the call, by its place in the program.
  FASTATTN_INLINE int64_t number(int32_t place) const { return program.numbers[place]; }
  // An integer in all lanes.
  FASTATTN_INLINE static Vec<T> integer(int64_t x) {
    return (Vec<T>)(Int{} + static_cast<typename IntOf<T>::type>(x));
  }

#define FASTATTN_BINARY(kind, expression) \
  return kind(s, [](auto a, auto b) __attribute__((always_inline)) { return expression; })
#define FASTATTN_UNARY(expression) \
  return unary(s, [](Vec<T> a) __attribute__((always_inline)) { return expression; })

  void run(const ScoreSteps& steps) const {
    for (int32_t n = 0; n < steps.count; ++n) run(steps.first[n]);
  }

  // Runs one step over all rows of a group.
  void run(const ScoreStep& s) const {
    switch (static_cast<ScoreOp>(s.op)) {
      case ScoreOp::constant: {
        const uint64_t low = static_cast<uint32_t>(s.a), high = static_cast<uint32_t>(s.b);
        const uint64_t bits = high << 32 | low;
        double x;
        __builtin_memcpy(&x, &bits, sizeof x);
        return fill(s.to, splat<T>(static_cast<T>(x)));
      }
      case ScoreOp::integer:
        return fill(s.to, integer(s.a));
      case ScoreOp::number:
        return fill(s.to, integer(number(s.a)));
      case ScoreOp::batch:
        return fill(s.to, integer(entry_));
      case ScoreOp::head:
        return fill(s.to, integer(head_));
      case ScoreOp::query: {
        Int lane{};
        FASTATTN_UNROLL for (int l = 0; l < W; ++l) lane[l] = l;
        return each(at(s.to), [&](int64_t, int n) __attribute__((always_inline)) {
          return (Int)integer(i0_ + n * W) + lane;
        });
      }
      case ScoreOp::key:
        return each(at(s.to),
                    [&](int64_t r, int) __attribute__((always_inline)) { return integer(j_ + r); });
      case ScoreOp::gather:
        return gather(s, static_cast<const T*>(program.data), [](T x) { return x; });
      case ScoreOp::gather_integer:
        return gather(s, program.integers, [](int32_t x) {
          const auto wide = static_cast<typename IntOf<T>::type>(x);
          T bits;
          __builtin_memcpy(&bits, &wide, sizeof bits);
          return bits;
        });
      case ScoreOp::index: {
        const Register a = at(s.a);
        const Int size = (Int)integer(number(s.b)), stride = (Int)integer(number(s.c));
        return each(at(s.to), [&](int64_t r, int n) __attribute__((always_inline)) {
          Int x = a.bits(r, n);
          x = x < 0 ? x + size : x;
          x = x < 0 ? Int{} : x;
          return (x < size ? x : size - 1) * stride;
        });
      }
      case ScoreOp::add:
        FASTATTN_BINARY(floats, a + b);
      case ScoreOp::subtract:
        FASTATTN_BINARY(floats, a - b);
      case ScoreOp::multiply:
        FASTATTN_BINARY(floats, a * b);
      case ScoreOp::divide:
        FASTATTN_BINARY(floats, a / b);
      case ScoreOp::negate:
        FASTATTN_UNARY(-a);
      case ScoreOp::absolute:
        FASTATTN_UNARY(select<T>(a < T(0), -a, a + T(0)));
      case ScoreOp::minimum:  // NaN in either is the result
        FASTATTN_BINARY(floats, select<T>((a < b) | (a != a), a, b));
      case ScoreOp::maximum:
        FASTATTN_BINARY(floats, select<T>((a > b) | (a != a), a, b));
      case ScoreOp::exponential:
        FASTATTN_UNARY(exp_of<T>(a));
      case ScoreOp::logarithm:
        FASTATTN_UNARY(log_of_any<T>(a));
      case ScoreOp::tanh:
        FASTATTN_UNARY(tanh_of<T>(a));
      case ScoreOp::sigmoid:
        FASTATTN_UNARY(T(1) / (T(1) + exp_of<T>(-a)));
      case ScoreOp::square_root:
        FASTATTN_UNARY(sqrt_of<T>(a));
      case ScoreOp::floor:
        FASTATTN_UNARY(floor_of<T>(a));
      case ScoreOp::less:
        FASTATTN_BINARY(floats, a < b);
      case ScoreOp::less_equal:
        FASTATTN_BINARY(floats, a <= b);
      case ScoreOp::equal:
        FASTATTN_BINARY(floats, a == b);
      case ScoreOp::add_integers:
        FASTATTN_BINARY(integers, (Unsigned)a + (Unsigned)b);
      case ScoreOp::subtract_integers:
        FASTATTN_BINARY(integers, (Unsigned)a - (Unsigned)b);
      case ScoreOp::multiply_integers:
        FASTATTN_BINARY(integers, (Unsigned)a * (Unsigned)b);
      case ScoreOp::divide_integers:
        return quotient(s, [](Int, Int, Int q) { return q; });
      case ScoreOp::remainder:
        return quotient(
            s, [](Int a, Int b, Int q) { return (Int)((Unsigned)a - (Unsigned)q * (Unsigned)b); });
      case ScoreOp::less_integers:
        FASTATTN_BINARY(integers, a < b);
      case ScoreOp::less_equal_integers:
        FASTATTN_BINARY(integers, a <= b);
      case ScoreOp::equal_integers:
        FASTATTN_BINARY(integers, a == b);
      case ScoreOp::both:
        FASTATTN_BINARY(integers, a & b);
      case ScoreOp::either:
        FASTATTN_BINARY(integers, a | b);
      case ScoreOp::one_of:
        FASTATTN_BINARY(integers, a ^ b);
      case ScoreOp::invert:
        FASTATTN_UNARY(~(Int)a);
      case ScoreOp::select: {
        const Register a = at(s.a), b = at(s.b), c = at(s.c);
        return each(at(s.to), [&](int64_t r, int n) __attribute__((always_inline)) {
          return select<T>(a.bits(r, n) != 0, b.value(r, n), c.value(r, n));
        });
      }
      case ScoreOp::to_float:
        FASTATTN_UNARY(converted((Int)a));
      case ScoreOp::to_integer:
        FASTATTN_UNARY(truncated<T>(a));
      case ScoreOp::reduce:
        return reduce(s);
      case ScoreOp::scatter:
        return scatter(s);
      case ScoreOp::absolute_integers:
        return unary(s, [](Vec<T> a) __attribute__((always_inline)) {
          const Int x = (Int)a;
          return x < 0 ? (Int)((Unsigned)Int{} - (Unsigned)x) : x;
        });
      case ScoreOp::sine:
        FASTATTN_UNARY(far_lanes<T>(a, waves_of_radians<T>(a).sine, __builtin_sin));
      case ScoreOp::cosine:
        FASTATTN_UNARY(far_lanes<T>(a, waves_of_radians<T>(a).cosine, __builtin_cos));
      case ScoreOp::exponential_of_two:
        FASTATTN_UNARY(exp2_of<T>(a));
      case ScoreOp::exponential_minus_one:
        FASTATTN_UNARY(expm1_of<T>(a));
      case ScoreOp::logarithm_of_one_plus:
        FASTATTN_UNARY(log1p_of_any<T>(a));
      case ScoreOp::error_function:
        return by_lane(s, s.a, [](double a, double) { return __builtin_erf(a); });
      case ScoreOp::power:
        return by_lane(s, s.b, [](double a, double b) { return __builtin_pow(a, b); });
      case ScoreOp::arctangent:
        return by_lane(s, s.b, [](double a, double b) { return __builtin_atan2(a, b); });
    }
  }
#undef FASTATTN_BINARY
#undef FASTATTN_UNARY

  // Lanes whose numbers differ: all, or one that is then copied.
  static FASTATTN_INLINE int lanes_of(const Register& x) {
    return (x.level & kVariesByQuery) != 0 ? W : 1;
  }

  // An index of one of `count` elements.
  static FASTATTN_INLINE Int within(Int x, Int last) {
    x = x < 0 ? Int{} : x;
    return x < last ? x : last;
  }

  // Lane by lane, because the elements of the same query are often next to each other.
  template <class S, class F>
  FASTATTN_INLINE void gather(const ScoreStep& s, const S* data, F convert) const {
    const Register index = at(s.a), to = at(s.to);
    const S* const from = data + number(s.b);
    const Int last = (Int)integer(number(s.c) - 1);
    if (lanes_of(index) == 1)
      return each(to, [&](int64_t r, int n) __attribute__((always_inline)) {
        return splat<T>(convert(from[within(index.bits(r, n), last)[0]]));
      });
    const int64_t rows = to.step != 0 ? rows_ : 1;
    typename IntOf<T>::type element[kScoreRows * L];
    Int lane{}, apart{}, unlike{};
    FASTATTN_UNROLL for (int l = 0; l < W; ++l) lane[l] = l;
    for (int64_t r = 0; r < rows; ++r) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const Int x = within(index.bits(r, n), last);
        unlike |= x - x[0];
        apart |= x - lane - x[0];
        store(reinterpret_cast<T*>(element + r * L + n * W), (Vec<T>)x);
      }
    bool alike = true;
    FASTATTN_UNROLL for (int l = 0; l < W; ++l) alike &= unlike[l] == 0;
    if (alike)  // of a block of queries
      return each(to, [&](int64_t r, int n) __attribute__((always_inline)) {
        return splat<T>(convert(from[element[r * L + n * W]]));
      });
    if constexpr (kSame<S, T>) {
      bool together = true;
      FASTATTN_UNROLL for (int l = 0; l < W; ++l) together &= apart[l] == 0;
      if (together)  // a bias of the distance
        return each(to, [&](int64_t r, int n) __attribute__((always_inline)) {
          return load(from + element[r * L + n * W]);
        });
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      if constexpr (kSame<S, T>)
        if (in_rows(element + n * W, rows)) {
          for (int64_t r = 0; r < rows; r += W) {
            Vec<T> x[W];
            FASTATTN_UNROLL for (int l = 0; l < W; ++l) x[l] =
                load(from + element[r * L + n * W + l]);
            transpose<T>(x);
            FASTATTN_UNROLL for (int k = 0; k < W; ++k) store(to.vector(r + k, n), x[k]);
          }
          continue;
        }
      for (int64_t l = n * W; l < (n + 1) * W; ++l)
        for (int64_t r = 0; r < rows; ++r) to.vector(r, 0)[l] = convert(from[element[r * L + l]]);
    }
  }

  // Whether the elements of each lane follow each other from key to key: a row of a matrix of
  // pairs.
  static FASTATTN_INLINE bool in_rows(const typename IntOf<T>::type* element, int64_t rows) {
    if (rows % W != 0) return false;
    Int apart{};
    const Int first = (Int)load(reinterpret_cast<const T*>(element));
    for (int64_t r = 1; r < rows; ++r) {
      const Int x = (Int)load(reinterpret_cast<const T*>(element + r * L));
      apart |= x - first - static_cast<typename IntOf<T>::type>(r);
    }
    bool found = true;
    FASTATTN_UNROLL for (int l = 0; l < W; ++l) found &= apart[l] == 0;
    return found;
  }

  // to = f(a, b) of the C library, in double.
  template <class F>
  void by_lane(const ScoreStep& s, int32_t second, F f) const {
    const Register a = at(s.a), b = at(second), to = at(s.to);
    const int lanes = lanes_of(to);
    each(to, [&](int64_t r, int n) __attribute__((always_inline)) {
      Vec<T> x = a.value(r, n);
      const Vec<T> y = b.value(r, n);
      for (int l = 0; l < lanes; ++l)
        x[l] = static_cast<T>(f(static_cast<double>(x[l]), static_cast<double>(y[l])));
      return lanes == 1 ? splat<T>(x[0]) : x;
    });
  }

  // An integer division or remainder: f(a, b, quotients of a and b).
  template <class F>
  FASTATTN_INLINE void quotient(const ScoreStep& s, F f) const {
    const Register a = at(s.a), b = at(s.b), to = at(s.to);
    const int lanes = lanes_of(to);
    each(to, [&](int64_t r, int n) __attribute__((always_inline)) {
      const Int x = a.bits(r, n), y = b.bits(r, n), found = f(x, y, quotients<T>(x, y, lanes));
      return lanes == 1 ? integer(found[0]) : (Vec<T>)found;
    });
  }

  // What counts in a sum: not the pairs without a gradient, whose derivative may be NaN, nor the
  // lanes past the last query.
  FASTATTN_INLINE Vec<T> counted(const Register& x, int64_t r, int n) const {
    if (x.level == 3)
      return select<T>(load(seed_ + r * L + n * W) == T(0), Vec<T>{}, x.value(r, n));
    if ((x.level & kVariesByQuery) == 0) return x.value(r, n);
    const int count = static_cast<int>(max_of<int64_t>(0, min_of<int64_t>(W, i1_ - i0_ - n * W)));
    return select<T>(first_lanes<T>(count), x.value(r, n), Vec<T>{});
  }

  // to += the sum of a over the queries or keys between which `to` does not differ; for a group of
  // keys it begins again.
  FASTATTN_INLINE void reduce(const ScoreStep& s) const {
    const Register a = at(s.a), to = at(s.to);
    const bool queries = (a.level & ~to.level & kVariesByQuery) != 0;
    const int64_t rows = a.step != 0 ? rows_ : 1;
    Vec<T> sum[NV] = {};
    const auto over_queries = [&]() __attribute__((always_inline)) {
      T total = T(0);
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) total += sum_lanes<T>(sum[n]);
      return splat<T>(total);
    };
    for (int64_t r = 0; r < rows; ++r) {
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) sum[n] += counted(a, r, n);
      if (to.step == 0) continue;
      const Vec<T> total = over_queries();
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) store(to.vector(r, n), total), sum[n] = Vec<T>{};
    }
    if (to.step != 0) return;
    const Vec<T> total = queries ? over_queries() : Vec<T>{};
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n)
        store(to.vector(0, n), to.value(0, n) + (queries ? total : sum[n]));
  }

  // Adds the gradient of a gathered element to the sums of its tensor.
  FASTATTN_INLINE void scatter(const ScoreStep& s) const {
    if (sums_ == nullptr) return;
    const Register value = at(s.to), index = at(s.a);
    double* const to = sums_ + number(s.b);
    const Int last = (Int)integer(number(s.c) - 1);
    const int64_t rows = value.step != 0 ? rows_ : 1;
    typename IntOf<T>::type element[kScoreRows * L];
    T gradient[kScoreRows * L];
    for (int64_t r = 0; r < rows; ++r) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const Int x = within(index.bits(r, n), last);
        store(reinterpret_cast<T*>(element + r * L + n * W), (Vec<T>)x);
        store(gradient + r * L + n * W, counted(value, r, n));
      }
    const int64_t lanes = lanes_of(value) != 1 ? L : 1;
    typedef double Row __attribute__((vector_size(W * 8), aligned(8), may_alias));
    for (int64_t n = 0; n * W < lanes; ++n) {
      if (lanes == L && in_rows(element + n * W, rows)) {
        for (int64_t r = 0; r < rows; r += W) {
          Vec<T> x[W];
          FASTATTN_UNROLL for (int k = 0; k < W; ++k) x[k] = load(gradient + (r + k) * L + n * W);
          transpose<T>(x);
          FASTATTN_UNROLL for (int l = 0; l < W; ++l) {
            Row* const row = reinterpret_cast<Row*>(to + element[r * L + n * W + l]);
            *row += __builtin_convertvector(x[l], Row);
          }
        }
        continue;
      }
      // Consecutive keys of one element are summed first: shorter chains of additions.
      for (int64_t l = n * W; l < min_of<int64_t>((n + 1) * W, lanes); ++l) {
        double sum = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const auto own = element[r * L + l];
          sum += static_cast<double>(gradient[r * L + l]);
          if (r + 1 < rows && element[(r + 1) * L + l] == own) continue;
          to[own] += sum;
          sum = 0;
        }
      }
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
