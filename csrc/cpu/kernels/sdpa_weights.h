// Attention weights from the log-sum-exp of a finished forward pass: W = softmax(scores) after
// dropout, tile by tile. Only the requested result is stored: [B, Hq, Lq, Lk], or its mean over the
// heads [B, Lq, Lk].
#pragma once
#include "../threads.h"
#include "blocks.h"
#include "content_terms.h"
#include "mask.h"
#include "score_program.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class WeightsPass {
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kLanesOfPanel = kPanelLanes<P>;
  static constexpr int kFew = kFewVectors<P>;
  static constexpr int64_t kQueries =
      4 * kLanesOfPanel;  // per task, so that several panels share staged keys

 public:
  // `own_sums`: lse is of scores that were rounded otherwise, so each row is normalised again.
  explicit WeightsPass(const Sequence& params, bool own_sums = false)
      : p(params),
        rule(make_rule<T>(params)),
        dropout(make_dropout(params)),
        Bk(key_block<P>(params.D, params.Dv)),
        averaged(params.weights == Weights::averaged),
        own_sums(own_sums),
        terms(params, Bk, kQueries) {}

  static FASTATTN_INLINE int64_t lanes_for(int64_t rows) {
    return rows <= kFew * W ? kFew * W : kLanesOfPanel;
  }

  struct Buffers {
    Word* q;           // [heads of a task][panels][words of D][lanes]
    T* s;              // [Bk][lanes]
    T* mean;           // [panels][Bk][lanes]
    RowScale<T> rows;  // [heads of a task][kQueries]
    T* bias;           // [Bk][lanes]
    uint32_t* keep;    // [Bk][lanes]
    Word* k;           // [Bk][words of D]
    Word* temp;        // [lanes][words of D]
    T* registers;      // of a score program
    typename ContentTerms<P>::Buffers terms;
    size_t bytes;
  };

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers buf;
    buf.q = a.take<Word>((averaged ? p.Hq : 1) * kQueries * words<P>(p.D));
    buf.s = a.take<T>(Bk * kLanesOfPanel);
    const int64_t rows = (averaged ? p.Hq : 1) * kQueries;
    buf.rows = {a.take<T>(rows), a.take<T>(rows), a.take<T>(rows)};
    buf.mean = a.take<T>(averaged ? Bk * kQueries : 0);
    buf.bias = a.take<T>(has_bias(p) ? Bk * kLanesOfPanel : 0);
    buf.keep = a.take<uint32_t>(p.dropout_p > 0 ? Bk * kLanesOfPanel : 0);
    buf.k = a.take<Word>(Bk * words<P>(p.D));
    buf.temp = a.take<Word>(kLanesOfPanel * words<P>(p.D));
    buf.registers = a.take<T>(ScoreMachine<T, kPanelVectors>::size(p));
    buf.terms = terms.allocate(a);
    buf.bytes = a.used();
    return buf;
  }

  // One task for each block of queries of a head, or of all heads if weights are averaged.
  void run() {
    const int64_t blocks = (p.Lq + kQueries - 1) / kQueries;
    const int64_t groups = p.B * (averaged ? 1 : p.Hq), tasks = groups * blocks;
    const double flops = 2.0 * p.B * p.Hq * p.Lq * p.Lk * p.D;
    const int team = team_size(p.threads, tasks, flops);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Buffers buf = allocate(thread_scratch(allocate(nullptr).bytes));
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < tasks; ++t) {
        const int64_t group = t / blocks, i0 = t % blocks * kQueries;
        if (averaged)
          task(buf, group, 0, p.Hq, i0);
        else
          task(buf, group / p.Hq, group % p.Hq, group % p.Hq + 1, i0);
      }
    }
  }

  // The row scales of queries [i0, i1). The log-sum-exp is enough unless it is too large, too
  // coarse (fp64) or of other scores. In these cases the maximum and the sum are recomputed,
  // from the packed panel that packed() returns, unless the rows have keys that are not here.
  template <class Packed>
  void scale_rows(Buffers& buf, int64_t b, int64_t h, int64_t i0, int64_t i1, Packed packed,
                  RowScale<T> rows) const {
    const double* lse = p.lse + (b * p.Hq + h) * p.lse_stride;
    bool again = kSame<T, double> || own_sums;
    for (int64_t l = 0; l < kLanesOfPanel; ++l) {
      const double x = i0 + l < i1 ? lse[i0 + l] : -kInf<double>;
      again |= x != -kInf<double> && (x > kHugeLse || x < -kHugeLse);
      scale_from_lse(rule, x, rows.at(l));
    }
    if (!again || p.partial) return;
    if (i1 - i0 <= kFew * W)
      recompute<kFew>(buf, b, h, i0, i1, packed(), rows);
    else
      recompute<kPanelVectors>(buf, b, h, i0, i1, packed(), rows);
  }

  // W of queries [i0, i1) and keys [j0, j1) of one head, written to buf.s[key][lane], or added to
  // `sum` of that layout if it is not null. Q is the packed panel, ks the staged keys.
  template <int NV>
  FASTATTN_INLINE void weights_tile(Buffers& buf, int64_t b, int64_t h, int64_t i0, int64_t i1,
                                    int64_t j0, int64_t j1, const Word* Q, const Word* ks,
                                    RowScale<T> rows, T* sum = nullptr) const {
    constexpr int64_t lanes = NV * W;
    const int64_t nk = j1 - j0;
    Vec<T> top[NV];
    scores_tile<NV>(buf, b, h, i0, i1, j0, j1, Q, ks, top);
    const bool drop = p.dropout_p > 0;
    const T keep_factor = drop ? static_cast<T>(dropout.factor) : T(1);
    if (drop) dropout_mask(dropout, i0, j0, nk, lanes, h, p.index + b, buf.keep);
    Vec<T> high[NV], low[NV], inverse[NV];
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      high[n] = load(rows.high + n * W), low[n] = load(rows.low + n * W);
      inverse[n] = load(rows.inverse + n * W) * keep_factor;
    }
    for (int64_t j = 0; j < nk; ++j) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const int64_t at = j * lanes + n * W;
        const Vec<T> x = load(buf.s + at) - high[n] - low[n];
        Vec<T> w = exponential<P::kCoarseExp>(rule, x) * inverse[n];
        if (drop) w = keep_lanes(w, buf.keep + at);
        if (sum != nullptr)
          store(sum + at, load(sum + at) + w);
        else
          store(buf.s + at, w);
      }
  }

 private:
  const Sequence& p;
  const ScoreRule<T> rule;
  const DropoutRule dropout;
  const int64_t Bk;
  const bool averaged, own_sums;
  const ContentTerms<P> terms;

  // Writes the scores of a tile to buf.s and finds their maximum over the keys.
  template <int NV>
  FASTATTN_INLINE void scores_tile(Buffers& buf, int64_t b, int64_t h, int64_t i0, int64_t i1,
                                   int64_t j0, int64_t j1, const Word* Q, const Word* ks,
                                   Vec<T>* top) const {
    Bias<T> bias;
    if (has_bias(p)) {
      const Coverage seen = pack_bias(p, b, h, i0, i1, j0, j1, NV * W, buf.bias, &bias.clear);
      if (seen == Coverage::none) {
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n) top[n] = splat<T>(-kInf<T>);
        for (int64_t x = 0; x < (j1 - j0) * NV * W; x += W) store(buf.s + x, top[0]);
        return;
      }
      if (seen == Coverage::some) bias.tile = buf.bias;
    }
    score_products<P, NV>(j1 - j0, ks, words<P>(p.D), Q, words<P>(p.D), longest_chain<T>(p), buf.s,
                          top);
    if (has_content_terms(p)) {
      terms.set_key_block(buf.terms, b, h, {j0, j1}, ks);
      terms.template add<NV>(buf.terms, i0, i1, {j0, j1}, buf.s, top);
    }
    if (p.score_program != nullptr)
      ScoreMachine<T, NV>(p, buf.registers, b, h, i0, i1).modify(buf.s, j1 - j0, j0, nullptr);
    if (rule.natural || rule.excludes)
      apply_rule<T, NV>(p, rule, buf.s, j1 - j0, i0, i1, j0, bias, alibi_slope<T>(p, b, h), nullptr,
                        top);
  }

  // Maximum and sum of the rows of a panel, computed as in the forward pass.
  template <int NV>
  __attribute__((noinline)) void recompute(Buffers& buf, int64_t b, int64_t h, int64_t i0,
                                           int64_t i1, const Word* Q, RowScale<T> rows) const {
    const int64_t hk = h / (p.Hq / p.Hkv);
    const Source k = P::elements(p.k.data, p.dtype) + b * p.k.stride[0] + hk * p.k.stride[1];
    const FirstState<T> first = first_state<T>(p, rule, b, h);
    Vec<T> m[NV], l[NV];
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      m[n] = splat<T>(first.maximum);
      l[n] = splat<T>(first.sum);
    }
    const Range seen = visible_to_any(p, i0, i1);
    for (int64_t j0 = seen.begin; j0 < seen.end; j0 += Bk) {
      const int64_t j1 = min_of(seen.end, j0 + Bk);
      const Word* ks =
          stage_keys<P>(k + j0 * p.k.stride[2], p.k.stride[2], p.k.stride[3], j1 - j0, p.D, buf.k);
      Vec<T> top[NV];
      scores_tile<NV>(buf, b, h, i0, i1, j0, j1, Q, ks, top);
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const Vec<T> after = max_of(m[n], top[n]),
                     reference = select<T>(after == -kInf<T>, Vec<T>{}, after);
        l[n] *= exponential(rule, m[n] - reference);
        for (int64_t j = 0; j < j1 - j0; ++j)
          l[n] += exponential(rule, load(buf.s + (j * NV + n) * W) - reference);
        m[n] = after;
      }
    }
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      const Mask<T> nothing = see_nothing<T>(m[n], l[n]);
      store(rows.high + n * W, select<T>(nothing, splat<T>(kInf<T>), m[n]));
      store(rows.low + n * W, Vec<T>{});
      store(rows.inverse + n * W, select<T>(nothing, splat<T>(T(1)), T(1) / l[n]));
    }
  }

  // Queries from i0 of one batch entry, heads [h0, h1).
  void task(Buffers& buf, int64_t b, int64_t h0, int64_t h1, int64_t i0) {
    const int64_t i1 = min_of(p.Lq, i0 + kQueries), dw = words<P>(p.D);
    for (int64_t h = h0; h < h1; ++h) {
      const Source q = P::elements(p.q.data, p.dtype) + b * p.q.stride[0] + h * p.q.stride[1];
      for (int64_t i = i0; i < i1; i += kLanesOfPanel) {
        const int64_t rows = min_of(kLanesOfPanel, i1 - i), lanes = lanes_for(rows);
        Word* Q = buf.q + ((h - h0) * kQueries + i - i0) * dw;
        pack_panel<P>(q + i * p.q.stride[2], p.q.stride[2], p.q.stride[3], rows, p.D, lanes, Q,
                      lanes, buf.temp);
        const auto packed = [&] { return Q; };
        scale_rows(buf, b, h, i, i + rows, packed, buf.rows.at((h - h0) * kQueries + i - i0));
      }
    }
    for (int64_t j0 = 0; j0 < p.Lk; j0 += Bk) {
      const int64_t j1 = min_of(p.Lk, j0 + Bk);
      if (averaged) __builtin_memset(buf.mean, 0, static_cast<size_t>(Bk * kQueries) * sizeof(T));
      for (int64_t h = h0; h < h1; ++h) {
        const int64_t hk = h / (p.Hq / p.Hkv);
        const Source k = P::elements(p.k.data, p.dtype) + b * p.k.stride[0] + hk * p.k.stride[1];
        const Word* ks = stage_keys<P>(k + j0 * p.k.stride[2], p.k.stride[2], p.k.stride[3],
                                       j1 - j0, p.D, buf.k);
        for (int64_t i = i0; i < i1; i += kLanesOfPanel) {
          const int64_t rows = min_of(kLanesOfPanel, i1 - i);
          const int64_t at = (h - h0) * kQueries + i - i0;
          T* const sum = averaged ? buf.mean + (i - i0) * Bk : nullptr;
          if (rows <= kFew * W)
            weights_tile<kFew>(buf, b, h, i, i + rows, j0, j1, buf.q + at * dw, ks, buf.rows.at(at),
                               sum);
          else
            weights_tile<kPanelVectors>(buf, b, h, i, i + rows, j0, j1, buf.q + at * dw, ks,
                                        buf.rows.at(at), sum);
          if (!averaged) write(buf.s, b, h, i, rows, j0, j1, T(1));
        }
      }
      if (!averaged) continue;
      for (int64_t i = i0; i < i1; i += kLanesOfPanel)
        write(buf.mean + (i - i0) * Bk, b, 0, i, min_of(kLanesOfPanel, i1 - i), j0, j1,
              T(1) / static_cast<T>(p.Hq));
    }
  }

  // Writes a tile of weights [keys][queries], times a factor, to rows i on and columns [j0, j1).
  void write(const T* tile, int64_t b, int64_t h, int64_t i, int64_t rows, int64_t j0, int64_t j1,
             T factor) {
    const int64_t* st = p.applied.stride;
    const Source dst =
        P::elements(p.applied.data, p.dtype) + b * st[0] + h * st[1] + i * st[2] + j0;
    T factors[kLanesOfPanel];
    for (T& f : factors) f = factor;
    unpack_transposed<T>(tile, lanes_for(rows), factors, rows, j1 - j0, dst, st[2]);
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
