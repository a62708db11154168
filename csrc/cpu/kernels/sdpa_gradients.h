// The backward pass between its products: from the products of a tile, S = K Q^T and dP = V dO^T,
// to the weights and the gradients of the scores. A tile is [key][lane], a panel of queries across
// the lanes.
#pragma once
#include "blocks.h"
#include "mask.h"
#include "score_program.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Per-query values, computed by a pass of their own, [B, Hq, Lq] each.
template <class T>
struct PreparedRows {
  RowScale<T> rows;
  T* center;  // an estimate of delta, subtracted from dP before summing
  T* delta;   // delta - center, as far as known before the main pass
};

// The sink's share of the rows of a vector, as `high` and `low` of exponential() are scaled.
template <class T>
FASTATTN_INLINE Vec<T> sink_weight(const ScoreRule<T>& rule, T sink, Vec<T> high, Vec<T> low,
                                   Vec<T> inverse) {
  return exponential(rule, sink - high - low) * inverse;
}

// Whether all keys that a query may see by its position are excluded.
template <class T>
__attribute__((noinline)) bool sees_no_key(const Sequence& p, int64_t b, int64_t h, int64_t i) {
  const Range seen = visible_to_any(p, i, i + 1);
  if (!has_bias(p)) return seen.begin >= seen.end;
  constexpr int64_t kPart = 64;
  T bias[kPart];
  for (int64_t j = seen.begin; j < seen.end; j += kPart) {
    const int64_t j1 = min_of(seen.end, j + kPart);
    read_bias_row(p, b, h, i, j, j1, bias);
    if (!all_excluded(bias, j1 - j)) return false;
  }
  return true;
}

// Whether all keys are excluded for query i, whose log-sum-exp is then the sink; so is it if the
// sink is inf. Reads the mask only if the log-sum-exp leaves a doubt.
template <class T>
FASTATTN_INLINE bool sees_only_sink(const Sequence& p, const ScoreRule<T>& rule, int64_t b,
                                    int64_t h, int64_t i) {
  const double lse = p.lse[(b * p.Hq + h) * p.lse_stride + i];
  if (lse == kInf<double>) return true;
  if (!rule.excludes) return false;
  const double sink = static_cast<const T*>(p.sinks)[b * p.sinks_stride[0] + h * p.sinks_stride[1]];
  return !(lse - sink > 1e-6 * __builtin_fabs(sink)) && sees_no_key<T>(p, b, h, i);
}

// What queries of a head add to d sink = sum_i w_i (0 - delta_i): the sink is a key whose value is
// 0, and w_i its weight, 1 where nothing else is visible. A sink of -inf has no weight. `rows`
// begin with the first query, have whole vectors, and are +inf where a lane has no query.
// `center`, if not null, is a part of delta.
template <class T>
__attribute__((noinline)) double sink_gradient(const Sequence& p, const ScoreRule<T>& rule,
                                               int64_t b, int64_t h, Range queries,
                                               RowScale<T> rows, const T* delta,
                                               const T* center = nullptr) {
  const T sink = first_state<T>(p, rule, b, h).maximum;
  const int64_t count = queries.end - queries.begin;
  double total = 0;
  if (sink == -kInf<T>) return total;
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> w =
        sink_weight(rule, sink, load(rows.high + i), load(rows.low + i), load(rows.inverse + i));
    const Vec<T> all = center == nullptr ? load(delta + i) : load(center + i) + load(delta + i);
    total -= static_cast<double>(sum_lanes<T>(w * all));
  }
  if (p.grad_lse == nullptr) return total;
  const double* grad_lse = p.grad_lse + (b * p.Hq + h) * p.lse_stride + queries.begin;
  for (int64_t i = 0; i < count; ++i)
    if (rows.high[i] == kInf<T>) total += grad_lse[i];
  return total;
}

// dst[key][lane] = the gradient of the weights of one head. Averaged weights share their gradient
// among the heads.
template <class P, int kVectors>
__attribute__((noinline)) void pack_grad_weights(const AttentionParams& p, int64_t b, int64_t h,
                                                 int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                                                 typename P::Acc* dst) {
  typedef typename P::Acc T;
  constexpr int64_t lanes = kVectors * kLanes<T>;
  const int64_t* st = p.grad_weights.stride;
  const bool averaged = p.weights == Weights::averaged;
  const auto g = P::elements(p.grad_weights.data, p.dtype) + b * st[0] + (averaged ? 0 : h * st[1]);
  pack_transposed<T>(g + i0 * st[2] + j0 * st[3], st[2], st[3], i1 - i0, j1 - j0, lanes, dst,
                     lanes);
  if (!averaged) return;
  const T share = T(1) / static_cast<T>(p.Hq);
  for (int64_t i = 0; i < (j1 - j0) * lanes; i += kLanes<T>) store(dst + i, load(dst + i) * share);
}

// Writes dQ of one query head, scaled and rounded, from its sum [panels][channels][lanes].
template <class P, int kVectors = kPanelVectors>
FASTATTN_INLINE void write_query_gradients(const AttentionParams& p, int64_t b, int64_t h,
                                           const typename P::Acc* dq, int64_t channels) {
  typedef typename P::Acc T;
  constexpr int64_t lanes = kVectors * kLanes<T>;
  const int64_t* st = p.grad_q.stride;
  const auto out = P::elements(p.grad_q.data, p.dtype) + b * st[0] + h * st[1];
  T factor[lanes];
  for (T& x : factor) x = static_cast<T>(p.scale);
  for (int64_t i = 0; i < p.Lq; i += lanes)
    unpack_transposed<T>(dq + i * channels, lanes, factor, min_of(lanes, p.Lq - i), p.D,
                         out + i * st[2], st[2]);
}

// On tiles no call has a score program.
template <class P, int kVectors = kPanelVectors, bool kPrograms = true>
class ScoreGradients {
  typedef typename P::Acc T;
  static constexpr int W = kLanes<T>;
  static constexpr int NV = kVectors;
  static constexpr int64_t L = kVectors * W;

 public:
  // `whole`: a tile has all keys. Then rows are normalised, and their delta is summed, here.
  ScoreGradients(const Sequence& params, bool whole)
      : p(params), rule(make_rule<T>(params)), dropout(make_dropout(params)), whole(whole) {}

  struct Buffers {
    T *s, *ds;        // [keys][lanes], set by the caller
    T *cap, *grad_w;  // [keys][lanes]
    uint32_t* keep;   // [keys][lanes]
    T* ones;          // [lanes]
    T* relative;      // sums of the gradient of a relative bias, set by the caller
    T* raw;           // [keys][lanes], of a score program
    T* registers;     // the same
    T* image;         // the same of the bias of an image
  };

  // Takes the buffers of a thread from an arena.
  Buffers allocate(Arena& a, int64_t keys) const {
    Buffers f{};
    f.cap = a.take<T>(rule.softcap > 0 ? keys * L : 0);
    f.grad_w = a.take<T>(p.grad_weights.data != nullptr ? keys * L : 0);
    f.keep = a.take<uint32_t>(p.dropout_p > 0 ? keys * L : 0);
    f.ones = a.take<T>(L);
    f.raw = a.take<T>(p.score_program != nullptr && p.score_program->derives ? keys * L : 0);
    if constexpr (kPrograms) f.registers = a.take<T>(ScoreMachine<T, NV>::size(p));
    return f;
  }

  // s: S -> dropout(P). ds: dP -> dS, the gradient of scale S; gradients of the biases are added
  // meanwhile. For queries [i0, i1) and keys r; `rows` begins with query i0. With sinks and a whole
  // tile, `rows` gets the delta and the scale that sink_gradient needs.
  void run(const Buffers& f, int64_t b, int64_t h, int64_t i0, int64_t i1, Range r, Bias<T> bias,
           const PreparedRows<T>& rows) const {
    const int64_t nk = r.end - r.begin;
    const Range all = visible_to_all(p, i0, i1);
    Vec<T> top[NV];
    const ScoreProgram* const program = p.score_program;
    const bool derives = program != nullptr && program->derives;
    if constexpr (kPrograms)
      if (program != nullptr)
        ScoreMachine<T, NV>(p, f.registers, b, h, i0, i1)
            .modify(f.s, nk, r.begin, derives ? f.raw : nullptr);
    if (rule.natural || bias.exists() || r.begin < all.begin || r.end > all.end)
      apply_rule<T, NV>(p, rule, f.s, nk, i0, i1, r.begin, bias, alibi_slope<T>(p, b, h),
                        rule.softcap > 0 ? f.cap : nullptr, top);
    if (p.grad_weights.data != nullptr) {
      pack_grad_weights<P, kVectors>(p, b, h, i0, i1, r.begin, r.end, f.grad_w);
      for (int64_t x = 0; x < nk * L; x += W) store(f.ds + x, load(f.ds + x) + load(f.grad_w + x));
    }
    if (p.dropout_p > 0) {
      dropout_mask(dropout, i0, r.begin, nk, L, h, p.index + b, f.keep);
      gradients<true>(f, b, h, nk, rows);
    } else {
      gradients<false>(f, b, h, nk, rows);
    }
    if (p.grad_mask.data != nullptr) add_mask_gradient(f, b, h, i0, i1, r);
    if (p.grad_relative_bias != nullptr)
      add_relative_gradient<T, NV>(p, i0, i1, r.begin, r.end, f.ds, f.relative);
    if (p.grad_row_bias != nullptr) add_image_gradient<T, NV>(p, i0, r.begin, r.end, f.ds, f.image);
    if (rule.softcap > 0) {  // backward of softcap; an excluded pair keeps its 0
      for (int64_t x = 0; x < nk * L; x += W) {
        const Vec<T> d = load(f.ds + x);
        store(f.ds + x, select<T>(d == T(0), d, d * load(f.cap + x)));
      }
    }
    if constexpr (kPrograms)
      if (derives)
        ScoreMachine<T, NV>(p, f.registers, b, h, i0, i1)
            .differentiate(f.raw, f.ds, nk, r.begin, p.score_sums);
  }

 private:
  const Sequence& p;
  const ScoreRule<T> rule;
  const DropoutRule dropout;
  const bool whole;

  // s = W = dropout(P), P = exp(S - lse); ds = dS = P o (dropout(dP) - delta).
  template <bool kDrop>
  void gradients(const Buffers& f, int64_t b, int64_t h, int64_t nk,
                 const PreparedRows<T>& prepared) const {
    // Copies, because a store to a tile could change the members.
    const ScoreRule<T> rule = this->rule;
    T *const s = f.s, *const ds = f.ds;
    Vec<T> high[NV], low[NV], inverse[NV], center[NV], delta[NV], rows[NV] = {}, sums[NV] = {};
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      high[n] = load(prepared.rows.high + n * W);
      low[n] = load(prepared.rows.low + n * W);
      inverse[n] = load(prepared.rows.inverse + n * W);
      center[n] = load(prepared.center + n * W);
      delta[n] = load(prepared.delta + n * W);
    }
    const T keep_factor = static_cast<T>(dropout.factor);
    const auto probability = [&](int64_t at, int n) __attribute__((always_inline)) {
      const Vec<T> e =
          exponential<P::kCoarseExp>(rule, load(s + at) - high[n] - low[n]) * inverse[n];
      // A lane without a query, or with a fully masked one, may hold NaN.
      return rule.excludes ? select<T>(high[n] == kInf<T>, Vec<T>{}, e) : e;
    };
    const auto dropped = [&](Vec<T> x, int64_t at) __attribute__((always_inline)) {
      if constexpr (kDrop) x = keep_lanes(x, f.keep + at) * keep_factor;
      return x;
    };
    const auto finish = [&](Vec<T> e, Vec<T> d, int64_t at, int n) __attribute__((always_inline)) {
      d = e * (d - delta[n]);
      // An excluded value may be NaN, and 0 * NaN must not pass.
      if (rule.excludes) d = select<T>(e == T(0), Vec<T>{}, d);
      store(s + at, dropped(e, at));
      store(ds + at, d);
    };
    if (!whole) {
      _Pragma("GCC unroll 2") for (int64_t j = 0; j < nk; ++j)
          FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const int64_t at = j * L + n * W;
        finish(probability(at, n), dropped(load(ds + at), at), at, n);
      }
      return;
    }
    if (p.sinks != nullptr) {
      const T sink = first_state<T>(p, rule, b, h).maximum;
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        rows[n] = sink_weight(rule, sink, high[n], low[n], inverse[n]);
        sums[n] = -rows[n] * center[n];
      }
    }
    constexpr int64_t kPart =
        16;  // terms of a partial sum: a chain over all keys would round more than PyTorch's sum
    for (int64_t j0 = 0; j0 < nk; j0 += kPart) {
      Vec<T> part_rows[NV] = {}, part_sums[NV] = {};
      for (int64_t j = j0; j < min_of(nk, j0 + kPart); ++j)
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
          const int64_t at = j * L + n * W;
          const Vec<T> e = probability(at, n), d = dropped(load(ds + at), at) - center[n],
                       product = e * d;
          part_rows[n] += e;
          part_sums[n] += rule.excludes ? select<T>(e == T(0), Vec<T>{}, product) : product;
          store(s + at, e);
          store(ds + at, d);
        }
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        rows[n] += part_rows[n];
        sums[n] += part_sums[n];
      }
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      rows[n] = select<T>(rows[n] == T(0), Vec<T>{}, T(1) / rows[n]);
      delta[n] += sums[n] * rows[n];
      if (p.sinks == nullptr) continue;
      store(prepared.delta + n * W, delta[n]);  // for sink_gradient
      store(prepared.rows.inverse + n * W, inverse[n] * rows[n]);
    }
    for (int64_t j = 0; j < nk; ++j) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const int64_t at = j * L + n * W;
        finish(load(s + at) * rows[n], load(ds + at), at, n);
      }
  }

  // d mask += dS. If the mask is broadcast over queries or keys, thousands of terms add to one
  // element: they are summed within the tile first, into a buffer of doubles. Otherwise the buffer
  // has the accumulator type.
  __attribute__((noinline)) void add_mask_gradient(const Buffers& f, int64_t b, int64_t h,
                                                   int64_t i0, int64_t i1, Range r) const {
    const int64_t *st = p.grad_mask.stride, nk = r.end - r.begin, rows = i1 - i0;
    const int64_t at = b * st[0] + h * st[1] + i0 * st[2] + r.begin * st[3];
    if (st[2] != 0 && st[3] != 0) {
      for (int64_t i = 0; i < L; ++i) f.ones[i] = T(1);
      unpack_transposed<T>(f.ds, L, f.ones, rows, nk, static_cast<T*>(p.grad_mask.data) + at, st[2],
                           true);
      return;
    }
    double* g = static_cast<double*>(p.grad_mask.data) + at;
    const auto row_part = [&](int64_t j, int n) __attribute__((always_inline)) {
      const int count = static_cast<int>(max_of<int64_t>(0, min_of<int64_t>(W, rows - n * W)));
      return load_first(f.ds + j * L + n * W, count);
    };
    if (st[3] != 0) {  // summed over the queries
      for (int64_t j = 0; j < nk; ++j)
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n) g[j * st[3]] += sum_lanes<T>(row_part(j, n));
      return;
    }
    Vec<T> sum[NV] = {};
    for (int64_t j = 0; j < nk; ++j)
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) sum[n] += row_part(j, n);
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      if (st[2] == 0) {
        g[0] += sum_lanes<T>(sum[n]);
        continue;
      }
      for (int64_t i = n * W; i < min_of<int64_t>(rows, (n + 1) * W); ++i)
        g[i * st[2]] += sum[n][i - n * W];
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
