// Forward attention:  O = softmax(scale Q K^T + bias) V  by blocks of keys with a running maximum.
//
// Scores are computed transposed, S^T = K Q^T, with queries across the lanes. Keys and values are
// then read in place, by broadcast. Only queries and outputs are transposed, once. The softmax
// consists of vertical operations, and its result already has the layout of the second product. See
// the picture in docs/cpu-kernels.md.
#include "blocks.h"
#include "content_terms.h"
#include "mask.h"
#include "score_program.h"
#include "sdpa_rows.h"
#include "sdpa_schedule.h"
#include "sdpa_weights.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class Forward {
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kLanesOfPanel = kPanelLanes<P>;
  static constexpr int kFew = kFewVectors<P>;

 public:
  explicit Forward(const Sequence& params)
      : p(params),
        rule(make_rule<T>(params)),
        dropout(make_dropout(params)),
        weights(gives_weights(params) ? params.weights : Weights::none),
        Bk(weights != Weights::none ? whole_key_block<P>(params.Lk)
                                    : key_block<P>(params.D, params.Dv)),
        Bq(weights == Weights::averaged
               ? min_of(query_block<P>(params.D, params.Dv), averaged_queries())
               : query_block<P>(params.D, params.Dv)),
        key_mask(is_key_mask(params)),
        terms(params, Bk, Bq),
        bytes(allocate(nullptr).bytes) {}

  // If all keys of a row fit in one block, its probabilities are still stored, and its sum is
  // known, after the product with the values. The weights then need no second product Q K^T.
  static bool gives_weights(const Sequence& p) {
    return p.weights != Weights::none && p.Lk <= kWholeKeys;
  }

  int64_t tasks() const { return groups() * blocks(); }
  int64_t neighbours() const {
    if (heads_follow()) return kHeadsInOrder;
    return p.window_right >= 0 ? 1 : tasks() / (p.B * p.Hq);
  }

  // Task t. The blocks of a head share its keys in cache. Under a causal mask the longest blocks
  // come first, to balance the end. One task computes the mean of the weights over the heads.
  void run(int64_t t) const {
    Buffers buf = allocate(thread_scratch(bytes));
    if (heads_follow() && t + 1 < tasks()) read_ahead(buf, t + 1);
    const bool causal = p.window_right >= 0;
    const int64_t group = causal ? t % groups() : t / blocks();
    const int64_t q0 = (causal ? blocks() - 1 - t / groups() : t % blocks()) * Bq;
    if (weights != Weights::averaged) return task(buf, group / p.Hq, group % p.Hq, q0);
    __builtin_memset(buf.mean, 0, static_cast<size_t>(Bq * Bk) * sizeof(T));
    for (int64_t h = 0; h < p.Hq; ++h) task(buf, group, h, q0);
    write_mean(buf, group, q0);
  }

 private:
  const Sequence& p;
  const ScoreRule<T> rule;
  const DropoutRule dropout;
  const Weights weights;  // which weights to write
  const int64_t Bk, Bq;
  const bool key_mask;
  const ContentTerms<P> terms;
  const size_t bytes;

  // Queries per task that averages weights: as many as keep their weights in L2 over all heads, and
  // leave two tasks for each thread.
  int64_t averaged_queries() const {
    constexpr int64_t kBytes = 256 << 10;
    const int64_t panel = Bk * kLanesOfPanel * static_cast<int64_t>(sizeof(T));
    const int64_t share = p.B * p.Lq / (2 * p.threads * kLanesOfPanel);
    return max_of<int64_t>(1, min_of(kBytes / panel, share)) * kLanesOfPanel;
  }
  // Blocks of queries in a head.
  int64_t blocks() const { return (p.Lq + Bq - 1) / Bq; }
  // Whether the next task is the next head, read ahead.
  bool heads_follow() const {
    return blocks() == 1 && weights != Weights::averaged && prefetches_next_head<P>(p);
  }
  // Heads that are computed one by one, or batch entries whose heads are averaged.
  int64_t groups() const { return weights == Weights::averaged ? p.B : p.B * p.Hq; }

  struct Buffers {
    Word* q;         // [panels][words of D][lanes]
    T* o;            // [panels][Dv][lanes]
    T* m;            // [Bq] running maximum
    T* l;            // [Bq] running sum
    T* s;            // [Bk + 1][lanes] scores, then probabilities
    T* bias;         // [Bk][lanes]
    T* keys;         // [Lk] a mask of keys
    uint32_t* keep;  // [words of Bk][lanes]
    Word* k;         // [Bk][words of D]
    Word* v;         // [words of Bk][Dv]
    Word* temp;      // [lanes][words of D]
    T* w;            // [Bk][lanes] weights, where words are pairs
    T* mean;         // [panels][Bk][lanes] sum of the weights over the heads
    T* alpha;        // [lanes] the factors of a panel's outputs so far
    T* registers;    // of a score program
    typename ContentTerms<P>::Buffers terms;
    RowsAhead next;  // of the next head
    size_t bytes;
  };

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers buf;
    buf.q = a.take<Word>(Bq * words<P>(p.D));
    buf.o = a.take<T>(Bq * p.Dv);
    buf.m = a.take<T>(Bq);
    buf.l = a.take<T>(Bq);
    buf.s = a.take<T>((Bk + 1) * kLanesOfPanel);
    buf.bias = a.take<T>(has_bias_of_pairs(p) ? Bk * kLanesOfPanel : 0);
    buf.keys = a.take<T>(key_mask ? p.Lk : 0);
    buf.keep = a.take<uint32_t>(p.dropout_p > 0 ? words<P>(Bk) * kLanesOfPanel : 0);
    buf.k = a.take<Word>(Bk * words<P>(p.D));
    buf.v = a.take<Word>(words<P>(Bk) * p.Dv + kLanesOfPanel);
    buf.temp = a.take<Word>(kLanesOfPanel * words<P>(p.D));
    buf.w = a.take<T>(weights != Weights::none && P::kPerWord == 2 ? Bk * kLanesOfPanel : 0);
    buf.mean = a.take<T>(weights == Weights::averaged ? Bk * Bq : 0);
    buf.alpha = a.take<T>(kLanesOfPanel);
    buf.registers = a.take<T>(ScoreMachine<T, kPanelVectors>::size(p));
    buf.terms = terms.allocate(a);
    buf.bytes = a.used();
    return buf;
  }

  // Starts to read the operands of the next head into the cache.
  void read_ahead(Buffers& buf, int64_t head) const {
    const int64_t b = head / p.Hq, h = head % p.Hq, hk = h / (p.Hq / p.Hkv);
    buf.next.add(P::elements(p.q.data, p.dtype) + b * p.q.stride[0] + h * p.q.stride[1], p.q.stride,
                 p.Lq, p.D);
    buf.next.add(P::elements(p.k.data, p.dtype) + b * p.k.stride[0] + hk * p.k.stride[1],
                 p.k.stride, p.Lk, p.D);
    buf.next.add(P::elements(p.v.data, p.dtype) + b * p.v.stride[0] + hk * p.v.stride[1],
                 p.v.stride, p.Lk, p.Dv);
    const int64_t panels = (p.Lq + kLanesOfPanel - 1) / kLanesOfPanel, K = words<P>(p.D);
    buf.next.share(panels * (p.Lq <= kFew * W
                                 ? score_calls<P, kFew>(p.Lk, K, longest_chain<T>(p))
                                 : score_calls<P, kPanelVectors>(p.Lk, K, longest_chain<T>(p))));
  }

  // One block of queries of one head against all keys visible to it. Out of line, because every
  // schedule has it.
  __attribute__((noinline)) void task(Buffers& buf, int64_t b, int64_t h, int64_t q0) const {
    const int64_t hk = h / (p.Hq / p.Hkv), q1 = min_of(p.Lq, q0 + Bq);
    const Source q = P::elements(p.q.data, p.dtype) + b * p.q.stride[0] + h * p.q.stride[1];
    const Source k = P::elements(p.k.data, p.dtype) + b * p.k.stride[0] + hk * p.k.stride[1];
    const Source v = P::elements(p.v.data, p.dtype) + b * p.v.stride[0] + hk * p.v.stride[1];

    for (int64_t i = q0; i < q1; i += kLanesOfPanel) {
      const int64_t rows = min_of(kLanesOfPanel, q1 - i), lanes = lanes_for(rows);
      pack_panel<P>(q + i * p.q.stride[2], p.q.stride[2], p.q.stride[3], rows, p.D, lanes,
                    buf.q + (i - q0) * words<P>(p.D), lanes, buf.temp);
    }
    const int64_t queries = round_up(q1 - q0, kLanesOfPanel);
    const FirstState<T> first = first_state<T>(p, rule, b, h);
    for (int64_t i = 0; i < queries; ++i) buf.m[i] = first.maximum, buf.l[i] = first.sum;

    Range range = visible_to_any(p, q0, q1);
    if (key_mask) {
      read_mask_row(p, b, h, 0, 0, p.Lk, buf.keys);
      range = trim(buf.keys, range);
    }
    range = visible_by_program(p, b, h, q0, q1, range);
    range.begin = range.begin / P::kPerWord * P::kPerWord;  // pairs of keys begin at even ones
    // With all keys in one block, nothing is added to an output, so its rows are computed in their
    // own layout.
    const bool whole = range.end - range.begin / Bk * Bk <= Bk && p.Dv % W == 0;
    if (!whole) clear(buf.o, queries);
    bool seen = false, written = false;
    for (int64_t k0 = range.begin / Bk * Bk; k0 < range.end; k0 += Bk) {
      const Range block{max_of(k0, range.begin), min_of(range.end, k0 + Bk)};
      if (key_mask && all_excluded(buf.keys + block.begin, block.end - block.begin)) continue;
      const Range left = visible_by_program(p, b, h, q0, q1, block);
      if (left.begin >= left.end) continue;
      written =
          block_of_keys(buf, b, h, q0, q1, block, min_of(range.end - block.end, Bk), k, v, whole);
      seen = true;
    }
    if (weights == Weights::per_head && !seen) hide(b, h, q0, q1, {0, p.Lk});
    if (whole && !seen) clear(buf.o, queries);
    if (!written) finish(buf, b, h, q0, q1);
  }

  void clear(T* o, int64_t queries) const {
    __builtin_memset(o, 0, static_cast<size_t>(queries * p.Dv) * sizeof(T));
  }

  // The lanes of a panel with `rows` queries.
  static FASTATTN_INLINE int64_t lanes_for(int64_t rows) {
    return rows <= kFew * W ? kFew * W : kLanesOfPanel;
  }

  // `next` keys follow this block; `whole`: no other block is visible. Returns whether the outputs
  // are written, which is so for a whole block without values to keep out.
  bool block_of_keys(Buffers& buf, int64_t b, int64_t h, int64_t q0, int64_t q1, Range block,
                     int64_t next, const Source k, const Source v, bool whole) const {
    const int64_t nk = block.end - block.begin;
    const Source k_rows = k + block.begin * p.k.stride[2];
    const Source v_rows = v + block.begin * p.v.stride[2];
    const Word* ks = stage_keys<P>(k_rows, p.k.stride[2], p.k.stride[3], nk, p.D, buf.k);
    terms.set_key_block(buf.terms, b, h, block, ks);
    // If every key is visible to every query, no values need to be kept out.
    const Range all = visible_to_all(p, q0, q1);
    const bool excludes =
        has_bias(p) || p.score_program != nullptr || block.begin < all.begin || block.end > all.end;
    const bool leaky = excludes && !all_finite(v_rows, p.v.stride[2], p.v.stride[3], nk, p.Dv);
    // Values in words of two keys need an even first key in a panel.
    const Word* vs =
        leaky ? nullptr : stage_reduced<P>(v_rows, p.v.stride[2], p.v.stride[3], nk, p.Dv, buf.v);
    const bool direct = whole && !leaky;
    if (whole && leaky) clear(buf.o, round_up(q1 - q0, kLanesOfPanel));
    const int64_t share = (next * kLanesOfPanel + q1 - q0 - 1) / (q1 - q0);
    for (int64_t i = q0; i < q1; i += kLanesOfPanel) {
      const int64_t i1 = min_of(q1, i + kLanesOfPanel);
      // Each panel has a share of the next keys and values read while it is computed.
      const int64_t at = min_of(next, (i - q0) / kLanesOfPanel * share);
      const int64_t ahead = min_of(share, next - at), first = block.end + at;
      prefetch_rows(k + first * p.k.stride[2], p.k.stride[2], p.k.stride[3], ahead, p.D);
      prefetch_rows(v + first * p.v.stride[2], p.v.stride[2], p.v.stride[3], ahead, p.Dv);
      const Range seen = visible_to_any(p, i, i1);
      Range r{max_of(block.begin, seen.begin), min_of(block.end, seen.end)};
      r = visible_by_program(p, b, h, i, i1, r);
      r.begin = r.begin / P::kPerWord * P::kPerWord;
      const bool found =
          r.begin < r.end &&
          (i1 - i <= kFew * W
               ? panel<kFew>(buf, b, h, q0, i, i1, r, block.begin, ks, vs, v, direct)
               : panel<kPanelVectors>(buf, b, h, q0, i, i1, r, block.begin, ks, vs, v, direct));
      if (direct && !found) {
        clear(buf.o, kLanesOfPanel);
        finish(buf, b, h, i, i1, i - q0);
      }
      if (weights == Weights::none) continue;
      if (!found) r = {0, 0};
      if (i1 - i <= kFew * W)
        weigh<kFew>(buf, b, h, q0, i, i1, r);
      else
        weigh<kPanelVectors>(buf, b, h, q0, i, i1, r);
    }
    return direct;
  }

  // Queries [i0, i1) against keys [r.begin, r.end): scores, running softmax, O = alpha O + V^T P.
  // Returns false if a mask excludes all pairs. `direct`: these are all keys, and O is written.
  template <int NV>
  __attribute__((noinline)) bool panel(Buffers& buf, int64_t b, int64_t h, int64_t q0, int64_t i0,
                                       int64_t i1, Range r, int64_t block_begin, const Word* ks,
                                       const Word* vs, const Source v, bool direct) const {
    constexpr int64_t lanes = NV * W;
    const int64_t nk = r.end - r.begin, dw = words<P>(p.D), shift = r.begin - block_begin;
    T* S = buf.s;
    const Word* Q = buf.q + (i0 - q0) * dw;
    T* O = buf.o + (i0 - q0) * p.Dv;
    T* m = buf.m + (i0 - q0);
    T* l = buf.l + (i0 - q0);

    Bias<T> bias;
    if (key_mask) bias.keys = buf.keys + r.begin;
    if (has_bias_of_pairs(p)) {
      const Coverage seen =
          pack_bias(p, b, h, i0, i1, r.begin, r.end, lanes, buf.bias, &bias.clear);
      if (seen == Coverage::none) return false;
      if (seen == Coverage::some) bias.tile = buf.bias;
    }

    // S = K Q^T
    Vec<T> top[NV];
    score_products<P, NV>(nk, ks + shift * dw, dw, Q, dw, longest_chain<T>(p), S, top, i1 - i0,
                          [&] { buf.next.read_some(); });
    if (has_content_terms(p)) terms.template add<NV>(buf.terms, i0, i1, r, S, top);
    const Range all = visible_to_all(p, i0, i1);
    if (p.score_program != nullptr)
      ScoreMachine<T, NV>(p, buf.registers, b, h, i0, i1).modify(S, nk, r.begin, nullptr);
    if (rule.natural || bias.exists() || r.begin < all.begin || r.end > all.end)
      apply_rule<T, NV>(p, rule, S, nk, i0, i1, r.begin, bias, alibi_slope<T>(p, b, h), nullptr,
                        top);

    // m' = max(m, S);  alpha = 2^(m - m');  P = 2^(S - m');  l = alpha l + sum P
    Vec<T> reference[NV], sum[NV];
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      const Vec<T> before = load(m + n * W), after = max_of(before, top[n]);
      store(m + n * W, after);
      // A row without a visible key so far keeps m = -inf. Any finite reference then gives exact
      // zeros, not NaN.
      reference[n] = select<T>(after == -kInf<T>, Vec<T>{}, after);
      store(buf.alpha + n * W, exponential(rule, before - reference[n]));
      sum[n] = Vec<T>{};
    }
    if (p.dropout_p > 0)
      dropout_mask<P::kPerWord>(dropout, i0, r.begin, nk, lanes, h, p.index + b, buf.keep);
    const int64_t reduced = p.dropout_p > 0 ? probabilities<NV, true>(buf, nk, reference, sum)
                                            : probabilities<NV, false>(buf, nk, reference, sum);
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n)
        store(l + n * W, load(buf.alpha + n * W) * load(l + n * W) + sum[n]);

    if (direct) {
      finish_sums(p, rule, dropout, b, h, i0, i1 - i0, lanes, m, l, buf.alpha);
      write_outputs(buf, b, h, i0, i1, lanes, vs + shift / P::kPerWord * p.Dv, reduced);
      return true;
    }

    // O = alpha O + V^T P. The product is summed separately: shorter chains of additions, smaller
    // errors. alpha is read where it is used: 16 registers hold the sums of a tile and no more.
    if (vs != nullptr) {
      tile_rows<P, P::kOutputRows, NV, true>(
          p.Dv, vs + shift / P::kPerWord * p.Dv, p.Dv, reinterpret_cast<const Word*>(S), lanes,
          reduced, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t d, int n, Vec<T> x) __attribute__((always_inline)) {
            T* o = O + d * lanes + n * W;
            store(o, load(buf.alpha + n * W) * load(o) + x);
          });
    } else {
      for (int64_t d = 0; d < p.Dv; ++d) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
          T* o = O + d * lanes + n * W;
          store(o, load(buf.alpha + n * W) * load(o));
        }
      add_visible_only<P::kPerWord>(S, lanes, nk, v + r.begin * p.v.stride[2], p.v.stride[2],
                                    p.v.stride[3], p.Dv, O);
    }
    return true;
  }

  // O = P V / l with the columns of V across the lanes. alpha holds 1 / l.
  FASTATTN_INLINE void write_outputs(Buffers& buf, int64_t b, int64_t h, int64_t i0, int64_t i1,
                                     int64_t lanes, const Word* vs, int64_t reduced) const {
    const int64_t* st = p.out.stride;
    const Source out = P::elements(p.out.data, p.dtype) + b * st[0] + h * st[1] + i0 * st[2];
    T* const own = const_cast<T*>(in_place<T>(out));
    T* const to = own != nullptr ? own : buf.o;
    const int64_t ld = own != nullptr ? st[2] : p.Dv;
    product_rows<P, true>(
        i1 - i0, reinterpret_cast<const Word*>(buf.s), lanes, vs, p.Dv, reduced, p.Dv / W,
        [&](int64_t r, int64_t n, Vec<T> x)
            __attribute__((always_inline)) { store(to + r * ld + n * W, x * buf.alpha[r]); });
    if (own != nullptr) return;
    with_elements(out, [&](auto* rows) __attribute__((always_inline)) {
      for (int64_t r = 0; r < i1 - i0; ++r)
        for (int64_t d = 0; d < p.Dv; d += W)
          store_as<T>(rows + r * st[2] + d, load(to + r * ld + d), W);
    });
  }

  // W = P / l for a panel that has processed all its visible keys, [r.begin, r.end). Written to its
  // rows of the result, or added to their sum over the heads.
  template <int NV>
  __attribute__((noinline)) void weigh(Buffers& buf, int64_t b, int64_t h, int64_t q0, int64_t i0,
                                       int64_t i1, Range r) const {
    constexpr int64_t lanes = NV * W;
    const bool sums = weights == Weights::averaged;
    T* const sum = buf.mean + (i0 - q0) * Bk + r.begin * lanes;
    const T keep_factor = p.dropout_p > 0 ? static_cast<T>(dropout.factor) : T(1);
    T inverse[kLanesOfPanel];
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      const Vec<T> l = load(buf.l + (i0 - q0) + n * W);
      store(inverse + n * W, select<T>(l == T(0), Vec<T>{}, keep_factor / l));
    }
    const auto add = [&](int64_t j, int n, Vec<T> x) __attribute__((always_inline)) {
      T* const to = sum + j * lanes + n * W;
      store(to, load(to) + x * load(inverse + n * W));
    };
    const int64_t nk = r.end - r.begin;
    const T* tile = buf.s;
    if constexpr (P::kPerWord == 1) {
      for (int64_t j = 0; j < nk && sums; ++j)
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n) add(j, n, load(tile + j * lanes + n * W));
    } else {
      tile = buf.w;
      for (int64_t j = 0; j < nk; ++j) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
          const VecI pair = (VecI)load(buf.s + j / 2 * lanes + n * W);
          const Vec<T> x = (Vec<T>)(j % 2 ? pair & static_cast<int32_t>(0xffff0000) : pair << 16);
          if (sums)
            add(j, n, x);
          else
            store(buf.w + j * lanes + n * W, x);
        }
    }
    if (sums) return;
    hide(b, h, i0, i1, {0, r.begin});
    hide(b, h, i0, i1, {r.end, p.Lk});
    unpack_transposed<T>(tile, lanes, inverse, i1 - i0, nk, weights_row(b, h, i0) + r.begin,
                         p.applied.stride[2]);
  }

  // Row i of the stored weights of a head.
  Source weights_row(int64_t b, int64_t h, int64_t i) const {
    const int64_t* st = p.applied.stride;
    return P::elements(p.applied.data, p.dtype) + b * st[0] + h * st[1] + i * st[2];
  }
  // Writes zero weights for queries [i0, i1) and these keys.
  void hide(int64_t b, int64_t h, int64_t i0, int64_t i1, Range keys) const {
    if (keys.begin >= keys.end) return;
    for (int64_t i = i0; i < i1; ++i)
      with_elements(weights_row(b, h, i) + keys.begin, [&](auto* to) {
        __builtin_memset(to, 0, static_cast<size_t>(keys.end - keys.begin) * sizeof(*to));
      });
  }

  // Averages the weights of all heads.
  void write_mean(Buffers& buf, int64_t b, int64_t q0) const {
    T share[kLanesOfPanel];
    for (T& x : share) x = T(1) / static_cast<T>(p.Hq);
    for (int64_t i = q0; i < min_of(p.Lq, q0 + Bq); i += kLanesOfPanel) {
      const int64_t rows = min_of(kLanesOfPanel, p.Lq - i);
      unpack_transposed<T>(buf.mean + (i - q0) * Bk, lanes_for(rows), share, rows, p.Lk,
                           weights_row(b, 0, i), p.applied.stride[2]);
    }
  }

  // S -> P in place, as words; returns the number of rows of words. Dropped probabilities still
  // count in the sum.
  template <int NV, bool kDrop>
  FASTATTN_INLINE int64_t probabilities(Buffers& buf, int64_t nk, const Vec<T>* reference,
                                        Vec<T>* sum) const {
    constexpr int64_t lanes = NV * W;
    T* S = buf.s;
    const ScoreRule<T> rule = this->rule;  // a copy, because a store to S could change the member
    if constexpr (P::kPerWord == 1) {
      _Pragma("GCC unroll 4") for (int64_t j = 0; j < nk; ++j)
          FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        T* s = S + j * lanes + n * W;
        Vec<T> e = exponential<P::kCoarseExp>(rule, load(s) - reference[n]);
        sum[n] += e;
        if constexpr (kDrop) e = keep_lanes(e, buf.keep + j * lanes + n * W);
        store(s, e);
      }
      return nk;
    } else {
      // Pairs of keys, rounded to bf16. Their sum is not: it has the accuracy of a log-sum-exp in
      // float32, by which users merge results.
      if (nk % 2)
        FASTATTN_UNROLL for (int n = 0; n < NV; ++n)
            store(S + nk * lanes + n * W, splat<T>(-kInf<T>));
      _Pragma("GCC unroll 2") for (int64_t j = 0; j < nk; j += 2)
          FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const T* s = S + j * lanes + n * W;
        const VecF even = exponential<true>(rule, load(s) - reference[n]);
        const VecF odd = exponential<true>(rule, load(s + lanes) - reference[n]);
        VecI pair = pack_pair(even, odd);
        sum[n] += even + odd;
        if constexpr (kDrop) {
          const uint32_t* keep = buf.keep + j / 2 * lanes + n * W;
          pair &= (VecI)load(reinterpret_cast<const float*>(keep));
        }
        store(S + j / 2 * lanes + n * W, (VecF)pair);
      }
      return (nk + 1) / 2;
    }
  }

  // `row`: of m and l, the place of query q0.
  void finish(Buffers& buf, int64_t b, int64_t h, int64_t q0, int64_t q1, int64_t row = 0) const {
    for (int64_t i = q0; i < q1; i += kLanesOfPanel) {
      const int64_t at = i - q0, rows = min_of(kLanesOfPanel, q1 - i);
      finish_rows<P>(p, rule, dropout, b, h, i, rows, lanes_for(rows), buf.m + row + at,
                     buf.l + row + at, buf.o + at * p.Dv);
    }
  }
};

// Only decoding reads keys and values as they are stored.
template <class P>
void run_schedule(const Sequences& sequences) {
  with_stored<P>(sequences.all().dtype, [&](auto stored) {
    Schedule<P, Forward<P>, Decode<P, decltype(stored)>>(sequences).run();
  });
}

}  // namespace

// Forward of a batch, on vectors.
void attention_forward(const AttentionParams& p) {
  if (p.B == 0 || p.Hq == 0 || p.Lq == 0) return;
  with_policy(p.dtype, [&](auto policy) {
    typedef decltype(policy) P;
    const Sequences sequences(p);
    run_schedule<P>(sequences);
    if (p.weights == Weights::none) return;
    const Sequence all = sequences.at(0);
    if (is_decoded<P>(all) || !Forward<P>::gives_weights(all)) WeightsPass<P>(all).run();
  });
}

namespace {
// All sequences of a quantised cache are decoded.
struct NoForward {
  explicit NoForward(const Sequence&) {}
  int64_t tasks() const { return 0; }
  int64_t neighbours() const { return 1; }
  void run(int64_t) const {}
};
}  // namespace

bool multiplies_integers(int64_t columns) { return multiplies_bytes(columns); }

// The most query rows of a key head that are decoded by reading the keys in order. With more, each
// key is read often enough that packing the rows into a panel is faster. The limits were measured
// on Zen 4 (docs/cpu-kernels.md); fp16 and fp64 gain nothing, narrower vectors were not measured.
int64_t most_streamed_rows(DType dtype) {
  constexpr bool kMeasured = kLanes<float> == 16;
  if (kMeasured && dtype == DType::bf16) return 24;
  if (kMeasured && dtype == DType::f32) return 40;
  return kMostDecodedRows;
}

// Forward of packed sequences or of a cache.
void attention_sequences_forward(const SequencesParams& p) {
  const AttentionParams& all = p.attention;
  if (all.B == 0 || all.Hq == 0) return;
  if (all.k_scales.data != nullptr) {
    typedef Single P;
    const Sequences sequences(p);
    if constexpr (has_kernels(DType::f32)) {
      if (all.float8)
        Schedule<P, NoForward, Decode<P, E4m3>>(sequences).run();
      else
        Schedule<P, NoForward, Decode<P, Int8>>(sequences).run();
    }
    return;
  }
  with_policy(all.dtype, [&](auto policy) { run_schedule<decltype(policy)>(Sequences(p)); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
