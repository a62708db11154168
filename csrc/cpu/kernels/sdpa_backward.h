// One unit of the backward pass: a key head and a chunk of its keys, against all queries of its
// head group.
#pragma once
#include "blocks.h"
#include "mask.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// dst[key][lane] = the gradient of the weights of one head. Averaged weights share their gradient
// among the heads.
template <class P>
__attribute__((noinline)) void pack_grad_weights(const AttentionParams& p, int64_t b, int64_t h,
                                                 int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                                                 typename P::Acc* dst) {
  typedef typename P::Acc T;
  constexpr int64_t lanes = kPanelLanes<P>;
  const int64_t* st = p.grad_weights.stride;
  const bool averaged = p.weights == Weights::averaged;
  const auto* g = static_cast<const typename P::Storage*>(p.grad_weights.data) + b * st[0] +
                  (averaged ? 0 : h * st[1]);
  pack_transposed<T>(g + i0 * st[2] + j0 * st[3], st[2], st[3], i1 - i0, j1 - j0, lanes, dst,
                     lanes);
  if (!averaged) return;
  const T share = T(1) / static_cast<T>(p.Hq);
  for (int64_t i = 0; i < (j1 - j0) * lanes; i += kLanes<T>) store(dst + i, load(dst + i) * share);
}

// C[rows][vectors] += A B over K words, columns across lanes, with as many vectors at a time as the
// registers hold.
template <class P>
FASTATTN_INLINE void add_product(int64_t rows, const typename P::Word* A, int64_t lda,
                                 const typename P::Word* B, int64_t ldb, int64_t K,
                                 typename P::Acc* C, int64_t ldc, int64_t vectors) {
  typedef typename P::Acc T;
  constexpr int W = kLanes<T>;
  int64_t v = 0;
  const auto block = [&](auto width) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(width)::value;
    constexpr int kRows = 6;
    for (; v + kVectors <= vectors; v += kVectors)
      tile_rows<P, kRows, kVectors, false>(
          rows, A, lda, B + v * W, ldb, K, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t r, int n, Vec<T> x) __attribute__((always_inline)) {
            T* c = C + r * ldc + (v + n) * W;
            store(c, load(c) + x);
          });
  };
  if constexpr (kRegisters == 32) block(Width<4>());
  block(Width<2>());
  block(Width<1>());
}

// Per-query values, computed by a pass of their own, [B, Hq, Lq] each.
template <class T>
struct PreparedRows {
  RowScale<T> rows;
  T* center;  // an estimate of delta, subtracted from dP before summing
  T* delta;   // delta - center, as far as known before the main pass
};

template <class P>
class BackwardUnit {
  typedef typename P::Storage Storage;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int NV = kPanelVectors;
  static constexpr int64_t L = kPanelLanes<P>;

 public:
  explicit BackwardUnit(const Sequence& params)
      : p(params),
        rule(make_rule<T>(params)),
        dropout(make_dropout(params)),
        // If one block holds all keys, each row is normalised, and its delta summed, exactly as in
        // plain PyTorch.
        Bk(params.Lk <= kWholeKeys ? whole_key_block<P>(params.Lk)
                                   : key_block<P>(params.D, params.Dv)),
        // At most eight chunks of at least 256 keys: enough to share among threads, few enough that
        // the partial dQs stay O(Lq D).
        chunk(round_up(max_of<int64_t>(256, (params.Lk + 7) / 8), Bk)),
        queries(round_up(params.Lq, L)),
        dw(words<P>(params.D)),
        dvw(words<P>(params.Dv)),
        dp(round_up(params.D, W)),
        dvp(round_up(params.Dv, W)),
        key_mask(is_key_mask(params)),
        whole(params.Lk <= Bk) {}

  // All keys fit in one block. delta is then summed where it is used, from the same products that
  // it must cancel, minus an estimate of it. The terms are small, and so is their rounding error.
  bool sums_delta() const { return whole; }
  int64_t chunks() const { return (p.Lk + chunk - 1) / chunk; }
  int64_t dq_size() const { return queries * p.D; }

  struct Buffers {
    Word *q,
        *g;  // [panels][words of D | Dv][lanes]: queries and output gradients, right-hand sides
    Word *q_rows, *g_rows;   // [words of queries][dp | dvp]: the same as rows to be reduced over
    RowScale<T> rows;        // [queries]
    T *center, *delta;       // [queries]
    T *s, *ds;               // [Bk + 1][lanes]
    Word *w_rows, *ds_rows;  // [Bk][words of lanes], pairs of queries (used where a word is a pair)
    T *cap, *grad_w, *bias;  // [Bk][lanes]
    T* keys;                 // [Lk]
    uint32_t* keep;          // [Bk][lanes]
    Word *k, *v;             // [Bk][words of D | Dv]
    Word* k_reduced;         // [words of Bk][D]
    T *dk, *dv;              // [chunk][dp | dvp]
    Word* temp;              // [lanes][words]
    T* ones;                 // [lanes]
    size_t bytes;
  };

  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers f;
    f.q = a.take<Word>(queries * dw), f.g = a.take<Word>(queries * dvw);
    f.q_rows = a.take<Word>(words<P>(queries) * dp),
    f.g_rows = a.take<Word>(words<P>(queries) * dvp);
    f.rows = {a.take<T>(queries), a.take<T>(queries), a.take<T>(queries)};
    f.center = a.take<T>(queries), f.delta = a.take<T>(queries);
    f.s = a.take<T>((Bk + 1) * L), f.ds = a.take<T>((Bk + 1) * L);
    const int64_t pairs = P::kPerWord == 2 ? Bk * L : 0;
    f.w_rows = a.take<Word>(pairs), f.ds_rows = a.take<Word>(pairs);
    f.cap = a.take<T>(rule.softcap > 0 ? Bk * L : 0);
    f.grad_w = a.take<T>(p.grad_weights.data != nullptr ? Bk * L : 0);
    f.bias = a.take<T>(p.mask.data != nullptr && !key_mask ? Bk * L : 0);
    f.keys = a.take<T>(key_mask ? p.Lk : 0);
    f.keep = a.take<uint32_t>(p.dropout_p > 0 ? Bk * L : 0);
    f.k = a.take<Word>(Bk * dw), f.v = a.take<Word>(Bk * dvw);
    f.k_reduced = a.take<Word>(words<P>(Bk) * p.D + L);
    f.dk = a.take<T>(chunk * dp), f.dv = a.take<T>(chunk * dvp);
    f.temp = a.take<Word>(L * max_of(dw, dvw));
    f.ones = a.take<T>(L);
    f.bytes = a.used();
    return f;
  }

  // dK and dV of chunk c of key head `head`, and its partial dQ, [query head of the
  // group][panels][D][lanes].
  void run(Buffers& f, int64_t head, int64_t c, const PreparedRows<T>& prepared, T* dq) const {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv, group = p.Hq / p.Hkv;
    const Range keys{c * chunk, min_of(p.Lk, (c + 1) * chunk)};
    __builtin_memset(f.dk, 0, static_cast<size_t>((keys.end - keys.begin) * dp) * sizeof(T));
    __builtin_memset(f.dv, 0, static_cast<size_t>((keys.end - keys.begin) * dvp) * sizeof(T));
    __builtin_memset(dq, 0, static_cast<size_t>(group * dq_size()) * sizeof(T));
    for (int64_t g = 0; g < group; ++g) {
      const int64_t h = hk * group + g;
      pack_queries(f, b, h, prepared);
      Range seen = keys;
      if (key_mask) {
        read_mask_row(p, b, h, 0, 0, p.Lk, f.keys);
        seen = trim(f.keys, keys);
      }
      for (int64_t k0 = keys.begin; k0 < seen.end; k0 += Bk) {
        const Range block{max_of(k0, seen.begin), min_of(seen.end, k0 + Bk)};
        if (block.begin >= block.end) continue;
        if (key_mask && all_excluded(f.keys + block.begin, block.end - block.begin)) continue;
        block_of_keys(f, b, h, hk, block, keys.begin, dq + g * dq_size());
      }
      if (c == 0 && p.grad_sinks != nullptr)
        p.grad_sinks[(p.index + b) * p.Hq + h] = sink_gradient(f, b, h);
    }
    write_rows(f.dk, dp, p.D, static_cast<T>(p.scale), p.grad_k, b, hk, keys);
    write_rows(f.dv, dvp, p.Dv, T(1), p.grad_v, b, hk, keys);
  }

  // Writes dQ of query head g of a group, scaled and rounded, from its sum [panels][D][lanes].
  void write_dq(int64_t head, int64_t g, const T* dq) const {
    const int64_t b = head / p.Hkv, h = head % p.Hkv * (p.Hq / p.Hkv) + g;
    Storage* out =
        static_cast<Storage*>(p.grad_q.data) + b * p.grad_q.stride[0] + h * p.grad_q.stride[1];
    T factor[L];
    for (T& x : factor) x = static_cast<T>(p.scale);
    for (int64_t i = 0; i < p.Lq; i += L)
      unpack_transposed<T>(dq + i * p.D, L, factor, min_of(L, p.Lq - i), p.D,
                           out + i * p.grad_q.stride[2], p.grad_q.stride[2]);
  }

 private:
  const Sequence& p;
  const ScoreRule<T> rule;
  const DropoutRule dropout;
  const int64_t Bk, chunk, queries, dw, dvw, dp, dvp;
  const bool key_mask, whole;

  // Packs all data of one query head that does not depend on the keys.
  void pack_queries(Buffers& f, int64_t b, int64_t h, const PreparedRows<T>& prepared) const {
    const int64_t *sq = p.q.stride, *sg = p.grad_out.stride;
    const Storage* q = static_cast<const Storage*>(p.q.data) + b * sq[0] + h * sq[1];
    const Storage* g = static_cast<const Storage*>(p.grad_out.data) + b * sg[0] + h * sg[1];
    for (int64_t i = 0; i < p.Lq; i += L) {
      const int64_t rows = min_of(L, p.Lq - i);
      pack_panel<P>(q + i * sq[2], sq[2], sq[3], rows, p.D, L, f.q + i * dw, L, f.temp);
      pack_panel<P>(g + i * sg[2], sg[2], sg[3], rows, p.Dv, L, f.g + i * dvw, L, f.temp);
    }
    pack_rows(q, sq, p.D, dp, f.q_rows);
    pack_rows(g, sg, p.Dv, dvp, f.g_rows);
    const int64_t row = (b * p.Hq + h) * p.Lq;
    const RowScale<T> from = prepared.rows.at(row);
    for (int64_t i = 0; i < queries; ++i) {
      scale_from_lse(rule, -kInf<double>, f.rows.at(i));  // past the end: probability 0
      f.center[i] = f.delta[i] = T(0);
      if (i >= p.Lq) continue;
      f.rows.high[i] = from.high[i], f.rows.low[i] = from.low[i],
      f.rows.inverse[i] = from.inverse[i];
      if (p.sinks != nullptr && sees_only_sink(b, h, i))
        scale_from_lse(rule, -kInf<double>, f.rows.at(i));
      if (f.rows.high[i] == kInf<T>)
        clear_query(f, i);
      else
        f.center[i] = prepared.center[row + i], f.delta[i] = prepared.delta[row + i];
    }
  }

  // Whether all keys are excluded for query i, whose log-sum-exp is then the sink; so is it if the
  // sink is inf. Reads the mask only if the log-sum-exp leaves a doubt.
  bool sees_only_sink(int64_t b, int64_t h, int64_t i) const {
    const double sink =
        static_cast<const T*>(p.sinks)[b * p.sinks_stride[0] + h * p.sinks_stride[1]];
    const double lse = p.lse[(b * p.Hq + h) * p.lse_stride + i];
    if (lse == kInf<double>) return true;
    if (!rule.excludes || lse - sink > 1e-6 * __builtin_fabs(sink)) return false;
    const Range seen = visible_to_any(p, i, i + 1);
    if (p.mask.data == nullptr) return seen.begin >= seen.end;
    constexpr int64_t kPart = 64;
    T bias[kPart];
    for (int64_t j = seen.begin; j < seen.end; j += kPart) {
      const int64_t j1 = min_of(seen.end, j + kPart);
      read_mask_row(p, b, h, i, j, j1, bias);
      if (!all_excluded(bias, j1 - j)) return false;
    }
    return true;
  }

  // The sink's share of the rows of a vector, as `high` and `low` of exponential() are scaled.
  FASTATTN_INLINE Vec<T> sink_weight(T sink, Vec<T> high, Vec<T> low, Vec<T> inverse) const {
    return exponential(rule, sink - high - low) * inverse;
  }

  // d sink = sum_i w_i (0 - delta_i) over all queries of a head: the sink is a key whose value is
  // 0, and w_i its weight, 1 where nothing else is visible.
  double sink_gradient(const Buffers& f, int64_t b, int64_t h) const {
    const T sink = first_state<T>(p, rule, b, h).maximum;
    double total = 0;
    for (int64_t i = 0; i < queries; i += W) {
      const Vec<T> w = sink_weight(sink, load(f.rows.high + i), load(f.rows.low + i),
                                   load(f.rows.inverse + i)),
                   delta = load(f.center + i) + load(f.delta + i);
      total -= static_cast<double>(sum_lanes<T>(w * delta));
    }
    if (p.grad_lse == nullptr) return total;
    const double* grad_lse = p.grad_lse + (b * p.Hq + h) * p.lse_stride;
    for (int64_t i = 0; i < p.Lq; ++i)
      if (f.rows.high[i] == kInf<T>) total += grad_lse[i];
    return total;
  }

  // A fully masked query passes no gradient, not even NaN times zero.
  __attribute__((noinline)) void clear_query(Buffers& f, int64_t i) const {
    const int64_t panel = i / L * L, lane = i % L;
    for (int64_t k = 0; k < dw; ++k) f.q[panel * dw + k * L + lane] = Word(0);
    for (int64_t k = 0; k < dvw; ++k) f.g[panel * dvw + k * L + lane] = Word(0);
    const auto clear_row = [&](Word* rows, int64_t padded) {
      for (int64_t d = 0; d < padded; ++d) {
        Word& word = rows[i / P::kPerWord * padded + d];
        if constexpr (P::kPerWord == 1)
          word = Word(0);
        else
          word = float_of(bits_of(word) & (i % 2 ? 0x0000ffffu : 0xffff0000u));
      }
    };
    clear_row(f.q_rows, dp);
    clear_row(f.g_rows, dvp);
  }

  // Rows of queries as words to reduce over, columns padded with zero to whole vectors.
  void pack_rows(const Storage* src, const int64_t* stride, int64_t cols, int64_t padded,
                 Word* dst) const {
    if (padded != cols)
      __builtin_memset(dst, 0, static_cast<size_t>(words<P>(p.Lq) * padded) * sizeof(Word));
    if constexpr (P::kPerWord == 1) {
      stage_rows<T>(src, stride[2], stride[3], p.Lq, cols, dst, padded);
    } else {
#if defined(__AVX512BF16__)
      stage_row_pairs(src, stride[2], stride[3], p.Lq, cols, dst, padded);
#endif
    }
  }

  void block_of_keys(Buffers& f, int64_t b, int64_t h, int64_t hk, Range block, int64_t chunk_begin,
                     T* dq) const {
    const int64_t nk = block.end - block.begin, *sk = p.k.stride, *sv = p.v.stride;
    const Storage* k =
        static_cast<const Storage*>(p.k.data) + b * sk[0] + hk * sk[1] + block.begin * sk[2];
    const Storage* v =
        static_cast<const Storage*>(p.v.data) + b * sv[0] + hk * sv[1] + block.begin * sv[2];
    const Word* ks = stage_keys<P>(k, sk[2], sk[3], nk, p.D, f.k);
    const Word* vs = stage_keys<P>(v, sv[2], sv[3], nk, p.Dv, f.v);
    const bool leaky = rule.excludes && !all_finite(k, sk[2], sk[3], nk, p.D);
    const Word* kr =
        P::kPerWord == 1 ? ks : stage_reduced<P>(k, sk[2], sk[3], nk, p.D, f.k_reduced);
    T* dk = f.dk + (block.begin - chunk_begin) * dp;
    T* dv = f.dv + (block.begin - chunk_begin) * dvp;

    const Range seeing = seeing_any(p, block.begin, block.end);
    for (int64_t i = seeing.begin / L * L; i < seeing.end; i += L) {
      const int64_t i1 = min_of(p.Lq, i + L);
      const Range seen = visible_to_any(p, i, i1);
      Range r{max_of(block.begin, seen.begin), min_of(block.end, seen.end)};
      if (r.begin >= r.end) continue;
      r.begin = block.begin + (r.begin - block.begin) / P::kPerWord * P::kPerWord;
      const int64_t shift = r.begin - block.begin;
      if (!scores(f, b, h, i, i1, r, ks + shift * dw, vs + shift * dvw)) continue;
      const int64_t nk_seen = r.end - r.begin;
      const Word* W_ = P::kPerWord == 2 ? f.w_rows : reinterpret_cast<const Word*>(f.s);
      const Word* dS = P::kPerWord == 2 ? f.ds_rows : reinterpret_cast<const Word*>(f.ds);
      constexpr int64_t ld = L / P::kPerWord;
      const int64_t reduced = words<P>(i1 - i);
      // dV += W^T dO, dK += dS^T Q
      add_product<P>(nk_seen, W_, ld, f.g_rows + i / P::kPerWord * dvp, dvp, reduced,
                     dv + shift * dvp, dvp, dvp / W);
      add_product<P>(nk_seen, dS, ld, f.q_rows + i / P::kPerWord * dp, dp, reduced, dk + shift * dp,
                     dp, dp / W);
      // dQ^T += K^T dS^T
      T* dq_panel = dq + i * p.D;
      if (leaky) {
        add_nonzero(f.ds, nk_seen, k + shift * sk[2], dq_panel);
        continue;
      }
      const int64_t pairs = words<P>(nk_seen), chain = 4 * longest_chain<T>(p);
      const Word* keys = kr + shift / P::kPerWord * p.D;
      for (int64_t j = 0; j < pairs; j += chain)
        tile_rows<P, P::kOutputRows, NV, true>(
            p.D, keys + j * p.D, p.D, reinterpret_cast<const Word*>(f.ds) + j * L, L,
            min_of(pairs - j, chain), [](int64_t, int) { return Vec<T>{}; },
            [&](int64_t d, int n, Vec<T> x) __attribute__((always_inline)) {
              T* sum = dq_panel + d * L + n * W;
              store(sum, load(sum) + x);
            });
    }
  }

  // The tiles of W and dS of queries [i0, i1) and keys r, in every layout that the products need.
  // Returns false if no pair is visible.
  bool scores(Buffers& f, int64_t b, int64_t h, int64_t i0, int64_t i1, Range r, const Word* ks,
              const Word* vs) const {
    const int64_t nk = r.end - r.begin;
    Bias<T> bias;
    if (key_mask) bias.keys = f.keys + r.begin;
    if (p.mask.data != nullptr && !key_mask) {
      pack_mask(p, b, h, i0, i1, r.begin, r.end, L, f.bias);
      if (all_excluded(f.bias, nk * L)) return false;
      bias.tile = f.bias;
    }
    Vec<T> top[NV];
    const int64_t chain = longest_chain<T>(p);
    score_products<P, NV>(nk, ks, f.q + i0 * dw, dw, chain, f.s, top);     // S = K Q^T
    score_products<P, NV>(nk, vs, f.g + i0 * dvw, dvw, chain, f.ds, top);  // dP = V dO^T
    const Range all = visible_to_all(p, i0, i1);
    if (rule.natural || p.mask.data != nullptr || r.begin < all.begin || r.end > all.end)
      apply_rule<T, NV>(p, rule, f.s, nk, i0, i1, r.begin, bias, alibi_slope<T>(p, b, h),
                        rule.softcap > 0 ? f.cap : nullptr, top);
    if (p.grad_weights.data != nullptr) {
      pack_grad_weights<P>(p, b, h, i0, i1, r.begin, r.end, f.grad_w);
      for (int64_t x = 0; x < nk * L; x += W) store(f.ds + x, load(f.ds + x) + load(f.grad_w + x));
    }
    if (p.dropout_p > 0) dropout_mask(dropout, i0, r.begin, nk, L, h, p.index + b, f.keep);
    gradients(f, b, h, i0, nk);
    if (p.grad_mask.data != nullptr) add_mask_gradient(f, b, h, i0, i1, r);
    if (rule.softcap > 0) {  // backward of softcap; an excluded pair keeps its 0
      for (int64_t x = 0; x < nk * L; x += W) {
        const Vec<T> d = load(f.ds + x);
        store(f.ds + x, select<T>(d == T(0), d, d * load(f.cap + x)));
      }
    }
    pair_up(f, nk);
    return true;
  }

  // s = W = dropout(P), P = exp(S - lse); ds = dS = P o (dropout(dP) - delta).
  void gradients(Buffers& f, int64_t b, int64_t h, int64_t i0, int64_t nk) const {
    Vec<T> high[NV], low[NV], inverse[NV], center[NV], delta[NV], rows[NV] = {}, sums[NV] = {};
    FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
      high[n] = load(f.rows.high + i0 + n * W);
      low[n] = load(f.rows.low + i0 + n * W);
      inverse[n] = load(f.rows.inverse + i0 + n * W);
      center[n] = load(f.center + i0 + n * W);
      delta[n] = load(f.delta + i0 + n * W);
    }
    const bool drop = p.dropout_p > 0;
    const T kept = static_cast<T>(dropout.factor);
    const auto probability = [&](int64_t at, int n) __attribute__((always_inline)) {
      const Vec<T> e =
          exponential<P::kCoarseExp>(rule, load(f.s + at) - high[n] - low[n]) * inverse[n];
      // A lane without a query, or with a fully masked one, may hold NaN.
      return rule.excludes ? select<T>(high[n] == kInf<T>, Vec<T>{}, e) : e;
    };
    const auto dropped = [&](Vec<T> x, int64_t at) __attribute__((always_inline)) {
      return drop ? keep_lanes(x, f.keep + at) * kept : x;
    };
    const auto finish = [&](Vec<T> e, Vec<T> d, int64_t at, int n) __attribute__((always_inline)) {
      d = e * (d - delta[n]);
      // An excluded value may be NaN, and 0 * NaN must not pass.
      if (rule.excludes) d = select<T>(e == T(0), Vec<T>{}, d);
      store(f.s + at, dropped(e, at));
      store(f.ds + at, d);
    };
    if (!whole) {
      _Pragma("GCC unroll 2") for (int64_t j = 0; j < nk; ++j)
          FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const int64_t at = j * L + n * W;
        finish(probability(at, n), dropped(load(f.ds + at), at), at, n);
      }
      return;
    }
    if (p.sinks != nullptr) {
      const T sink = first_state<T>(p, rule, b, h).maximum;
      FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        rows[n] = sink_weight(sink, high[n], low[n], inverse[n]);
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
          const Vec<T> e = probability(at, n), d = dropped(load(f.ds + at), at) - center[n],
                       product = e * d;
          part_rows[n] += e;
          part_sums[n] += rule.excludes ? select<T>(e == T(0), Vec<T>{}, product) : product;
          store(f.s + at, e);
          store(f.ds + at, d);
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
      store(f.delta + i0 + n * W, delta[n]);  // for sink_gradient
      store(f.rows.inverse + i0 + n * W, inverse[n] * rows[n]);
    }
    for (int64_t j = 0; j < nk; ++j) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
        const int64_t at = j * L + n * W;
        finish(load(f.s + at) * rows[n], load(f.ds + at), at, n);
      }
  }

  // Packs words for the products: pairs of queries in the rows (w_rows, ds_rows), pairs of keys
  // across lanes (ds in place).
  void pair_up(Buffers& f, int64_t nk) const {
#if defined(__AVX512BF16__)
    if constexpr (P::kPerWord == 2) {
      if (nk % 2) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) store(f.ds + nk * L + n * W, VecF{});
      for (int64_t j = 0; j < nk; ++j) {
        const auto row_pairs = [&](const T* from, Word* to) __attribute__((always_inline)) {
          const __m512 low = (__m512)load(from + j * L), high = (__m512)load(from + j * L + W);
          _mm512_storeu_si512(to + j * (L / 2), (__m512i)_mm512_cvtne2ps_pbh(high, low));
        };
        row_pairs(f.s, f.w_rows);
        row_pairs(f.ds, f.ds_rows);
      }
      for (int64_t j = 0; j < nk; j += 2) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
          const VecF even = load(f.ds + j * L + n * W), odd = load(f.ds + (j + 1) * L + n * W);
          const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
          store(f.ds + j / 2 * L + n * W, (VecF)interleave_halves(both));
        }
    }
#endif
    (void)f, (void)nk;
  }

#if defined(__AVX512BF16__)
  // (a0 .. a15, b0 .. b15) -> (a0 b0, a1 b1, ...)
  static FASTATTN_INLINE __m512i interleave_halves(__m512i x) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
  }
#endif

  // dQ^T += K^T dS^T pair by pair, skipping zeros: for blocks with non-finite keys.
  __attribute__((noinline)) void add_nonzero(const T* ds, int64_t nk, const Storage* k,
                                             T* dq) const {
    for (int64_t j = 0; j < nk; ++j) {
      for (int64_t i = 0; i < L; ++i) {
        T weight = ds[j * L + i];
        if constexpr (P::kPerWord == 2) {
          const uint32_t pair = bits_of(static_cast<float>(ds[j / 2 * L + i]));
          weight = float_of(j % 2 ? pair & 0xffff0000u : pair << 16);
        }
        if (weight == T(0)) continue;
        for (int64_t d = 0; d < p.D; ++d)
          dq[d * L + i] += weight * static_cast<T>(widen(k[j * p.k.stride[2] + d * p.k.stride[3]]));
      }
    }
  }

  // d mask += dS. If the mask is broadcast over queries or keys, thousands of terms add to one
  // element: they are summed within the tile first, into a buffer of doubles. Otherwise the buffer
  // has the accumulator type.
  __attribute__((noinline)) void add_mask_gradient(Buffers& f, int64_t b, int64_t h, int64_t i0,
                                                   int64_t i1, Range r) const {
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

  void write_rows(const T* rows, int64_t ld, int64_t cols, T factor, const Tensor4& to, int64_t b,
                  int64_t hk, Range keys) const {
    Storage* dst = static_cast<Storage*>(to.data) + b * to.stride[0] + hk * to.stride[1];
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const T* row = rows + (j - keys.begin) * ld;
      for (int64_t d = 0; d < cols; d += W)
        store_as<T>(dst + j * to.stride[2] + d, load(row + d) * factor,
                    static_cast<int>(min_of<int64_t>(W, cols - d)));
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
