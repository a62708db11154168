// One unit of the backward pass: a key head and a chunk of its keys, against all queries of its
// head group.
#pragma once
#include "blocks.h"
#include "content_terms.h"
#include "mask.h"
#include "sdpa_gradients.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// C[rows][vectors] += A B over K words, columns across lanes.
template <class P>
FASTATTN_INLINE void add_product(int64_t rows, const typename P::Word* A, int64_t lda,
                                 const typename P::Word* B, int64_t ldb, int64_t K,
                                 typename P::Acc* C, int64_t ldc, int64_t vectors) {
  typedef typename P::Acc T;
  product_rows<P, false>(rows, A, lda, B, ldb, K, vectors,
                         [&](int64_t r, int64_t v, Vec<T> x) __attribute__((always_inline)) {
                           T* c = C + r * ldc + v * kLanes<T>;
                           store(c, load(c) + x);
                         });
}

// A panel of queries is kVectors vectors wide.
template <class P, int kVectors = kPanelVectors>
class BackwardUnit {
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int NV = kVectors;
  static constexpr int64_t L = kVectors * W;

 public:
  explicit BackwardUnit(const Sequence& params)
      : p(params),
        rule(make_rule<T>(params)),
        // If one block holds all keys, each row is normalised, and its delta summed, exactly as in
        // plain PyTorch. Products with a table for keys are shared by fewer queries the longer it
        // is.
        Bk(params.Lk <= kWholeKeys && params.key_table.data == nullptr
               ? whole_key_block<P>(params.Lk)
               : key_block<P>(params.D, params.Dv) /
                     (params.key_table.data == nullptr ? 1 : P::kPerWord)),
        // At most eight chunks of at least 256 keys: enough to share among threads, few enough that
        // the partial dQs stay O(Lq D).
        chunk(round_up(max_of<int64_t>(256, (params.Lk + 7) / 8), Bk)),
        queries(round_up(params.Lq, L)),
        dw(words<P>(params.D)),
        dvw(words<P>(params.Dv)),
        dp(round_up(params.D, W)),
        dvp(round_up(params.Dv, W)),
        key_mask(is_key_mask(params)),
        whole(params.Lk <= Bk && !params.partial),
        dq_in_rows(whole && params.D % W == 0),
        direct(dq_in_rows && params.Dv % W == 0 && params.Hq == params.Hkv && !rule.excludes &&
               !rule.natural && params.score_program == nullptr && !has_content_terms(params)),
        gradients(params, whole),
        terms(params, Bk, 16 * kPanelLanes<P>) {}

  // All keys of the rows fit in one block. delta is then summed where it is used, from the same
  // products that it must cancel, minus an estimate of it. The terms are small, and so is their
  // rounding error.
  bool sums_delta() const { return whole; }
  // Whether the next task is the next head, read ahead.
  bool heads_follow() const {
    return whole && p.Hq == p.Hkv && p.grad_mask.data == nullptr && prefetches_next_head<P>(p);
  }
  static constexpr bool forward_scores() { return false; }
  int64_t chunks() const { return (p.Lk + chunk - 1) / chunk; }
  // Of a query head: dQ, [panels][D][lanes] or [queries][D], then the sums of the gradients of its
  // relative bias, of the bias of an image, and of its terms of content.
  int64_t dq_size() const { return own_size() + terms.sums_size(queries); }

  struct Buffers {
    Word *q,
        *g;  // [panels][words of D | Dv][lanes]: queries and output gradients, right-hand sides
    // [words of queries][dp | dvp]: the same as rows to be reduced over
    const Word *q_rows, *g_rows;
    Word *own_q_rows, *own_g_rows;  // where they cannot be read in place
    RowScale<T> rows;               // [queries]
    T *center, *delta;              // [queries]
    T *s, *ds;                      // [Bk + 1][lanes]
    Word *w_rows, *ds_rows;  // [Bk][words of lanes], pairs of queries (used where a word is a pair)
    T* bias;                 // [Bk][lanes]
    T* keys;                 // [Lk]
    Word *k, *v;             // [Bk][words of D | Dv]
    Word* k_reduced;         // [words of Bk][D]
    T *dk, *dv;              // [chunk][dp | dvp]
    Word* temp;              // [lanes][words]
    typename ScoreGradients<P, kVectors>::Buffers gradients;
    typename ContentTerms<P>::Buffers terms;
    RowsAhead next;  // of the next head
    size_t bytes;
  };

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers f;
    f.q = a.take<Word>(queries * dw), f.g = a.take<Word>(queries * dvw);
    f.own_q_rows = a.take<Word>(words<P>(queries) * dp),
    f.own_g_rows = a.take<Word>(words<P>(queries) * dvp);
    f.rows = {a.take<T>(queries), a.take<T>(queries), a.take<T>(queries)};
    f.center = a.take<T>(queries), f.delta = a.take<T>(queries);
    f.s = a.take<T>((Bk + 1) * L), f.ds = a.take<T>((Bk + 1) * L);
    const int64_t pairs = P::kPerWord == 2 ? Bk * L : 0;
    f.w_rows = a.take<Word>(pairs), f.ds_rows = a.take<Word>(pairs);
    f.bias = a.take<T>(has_bias_of_pairs(p) ? Bk * L : 0);
    f.keys = a.take<T>(key_mask ? p.Lk : 0);
    f.k = a.take<Word>(Bk * dw), f.v = a.take<Word>(Bk * dvw);
    f.k_reduced = a.take<Word>(words<P>(Bk) * p.D + L);
    f.dk = a.take<T>(chunk * dp), f.dv = a.take<T>(chunk * dvp);
    f.temp = a.take<Word>(L * max_of(dw, dvw));
    f.gradients = gradients.allocate(a, Bk);
    f.gradients.s = f.s, f.gradients.ds = f.ds;
    f.terms = terms.allocate(a, true);
    f.bytes = a.used();
    return f;
  }

  // dK and dV of chunk c of key head `head`, and its partial dQ, [query head of the
  // group][dq_size].
  void run(Buffers& f, int64_t head, int64_t c, const PreparedRows<T>& prepared, T* dq) const {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv, group = p.Hq / p.Hkv;
    f.next = RowsAhead();
    if (heads_follow() && head + 1 < p.B * p.Hkv) read_ahead(f, head + 1);
    const Range keys{c * chunk, min_of(p.Lk, (c + 1) * chunk)};
    if (!direct) {
      __builtin_memset(f.dk, 0, static_cast<size_t>((keys.end - keys.begin) * dp) * sizeof(T));
      __builtin_memset(f.dv, 0, static_cast<size_t>((keys.end - keys.begin) * dvp) * sizeof(T));
      __builtin_memset(dq, 0, static_cast<size_t>(group * dq_size()) * sizeof(T));
    }
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
        f.gradients.relative = dq + g * dq_size() + queries * p.D;
        f.gradients.image = dq + g * dq_size() + own_size() - image_sums(p, queries);
        f.terms.sums = dq + g * dq_size() + own_size();
        block_of_keys(f, b, h, hk, block, keys.begin, dq + g * dq_size());
      }
      if (c == 0 && p.grad_sinks != nullptr)
        p.grad_sinks[(p.index + b) * p.Hq + h] =
            sink_gradient(p, rule, b, h, Range{0, p.Lq}, f.rows, f.delta, f.center);
    }
    if (direct && stores_sums()) return;
    write_rows(f.dk, dp, p.D, static_cast<T>(p.scale), p.grad_k, b, hk, keys);
    write_rows(f.dv, dvp, p.Dv, T(1), p.grad_v, b, hk, keys);
  }

  // Writes dQ of query head g of a group, scaled and rounded, and the gradient of its relative
  // bias, from their sums.
  void write_dq(int64_t head, int64_t g, const T* dq) const {
    const int64_t b = head / p.Hkv, h = head % p.Hkv * (p.Hq / p.Hkv) + g;
    if (direct && stores_sums()) return;
    if (dq_in_rows)
      write_rows(dq, p.D, p.D, static_cast<T>(p.scale), p.grad_q, b, h, {0, p.Lq});
    else
      write_query_gradients<P, kVectors>(p, b, h, dq, p.D);
    write_relative_gradient(p, b, h, dq + queries * p.D);
    write_image_gradient<T, NV>(p, b, h, dq + own_size() - image_sums(p, queries));
    terms.write(dq + own_size(), b, h);
  }

 private:
  // Starts to read the operands of the next head into the cache.
  void read_ahead(Buffers& f, int64_t head) const {
    const auto add = [&](const Tensor4& x, int64_t rows, int64_t columns) {
      f.next.add(
          P::elements(x.data, p.dtype) + head / p.Hkv * x.stride[0] + head % p.Hkv * x.stride[1],
          x.stride, rows, columns);
    };
    add(p.out, p.Lq, p.Dv), add(p.grad_out, p.Lq, p.Dv), add(p.q, p.Lq, p.D);
    add(p.k, p.Lk, p.D), add(p.v, p.Lk, p.Dv);
    add(p.grad_q, p.Lq, p.D), add(p.grad_k, p.Lk, p.D), add(p.grad_v, p.Lk, p.Dv);
    f.next.share(2 * queries / L * score_calls<P, NV>(p.Lk, dw, longest_chain<T>(p)));
  }

  const Sequence& p;
  const ScoreRule<T> rule;
  const int64_t Bk, chunk, queries, dw, dvw, dp, dvp;
  const bool key_mask, whole;
  const bool dq_in_rows;  // one block of keys adds to dQ, so it has the layout of its result
  // Every panel of queries adds to all dK and dV, and nothing else does: the first begins the sums,
  // and the last writes them.
  const bool direct;
  const ScoreGradients<P, kVectors> gradients;
  const ContentTerms<P> terms;

  // Elements of the sums that a query head needs for itself.
  int64_t own_size() const {
    return queries * p.D + relative_sums<T>(p, L) + image_sums(p, queries);
  }

  // Packs all data of one query head that does not depend on the keys.
  void pack_queries(Buffers& f, int64_t b, int64_t h, const PreparedRows<T>& prepared) const {
    const int64_t *sq = p.q.stride, *sg = p.grad_out.stride;
    const Source q = P::elements(p.q.data, p.dtype) + b * sq[0] + h * sq[1];
    const Source g = P::elements(p.grad_out.data, p.dtype) + b * sg[0] + h * sg[1];
    for (int64_t i = 0; i < p.Lq; i += L) {
      const int64_t rows = min_of(L, p.Lq - i);
      pack_panel<P>(q + i * sq[2], sq[2], sq[3], rows, p.D, L, f.q + i * dw, L, f.temp);
      pack_panel<P>(g + i * sg[2], sg[2], sg[3], rows, p.Dv, L, f.g + i * dvw, L, f.temp);
    }
    const int64_t row = (b * p.Hq + h) * p.Lq;
    const auto copy = [&](T* to, const T* from, T rest) {
      __builtin_memcpy(to, from + row, static_cast<size_t>(p.Lq) * sizeof(T));
      for (int64_t i = p.Lq; i < queries; ++i) to[i] = rest;
    };
    copy(f.rows.high, prepared.rows.high, kInf<T>);  // past the end: probability 0
    copy(f.rows.low, prepared.rows.low, T(0));
    copy(f.rows.inverse, prepared.rows.inverse, T(1));
    copy(f.center, prepared.center, T(0));
    copy(f.delta, prepared.delta, T(0));
    bool masked = false;
    for (int64_t i = 0; i < p.Lq; ++i) {
      if (p.sinks != nullptr && sees_only_sink(p, rule, b, h, i))
        scale_from_lse(rule, -kInf<double>, f.rows.at(i));
      masked |= f.rows.high[i] == kInf<T>;
    }
    f.q_rows = rows_of(q, sq, p.D, dp, masked, f.own_q_rows);
    f.g_rows = rows_of(g, sg, p.Dv, dvp, masked, f.own_g_rows);
    for (int64_t i = 0; i < p.Lq && masked; ++i) {
      if (f.rows.high[i] != kInf<T>) continue;
      clear_query(f, i);
      f.center[i] = f.delta[i] = T(0);
    }
  }

  // A fully masked query passes no gradient, not even NaN times zero.
  __attribute__((noinline)) void clear_query(Buffers& f, int64_t i) const {
    const int64_t panel = i / L * L, lane = i % L;
    for (int64_t k = 0; k < dw; ++k) f.q[panel * dw + k * L + lane] = Word(0);
    for (int64_t k = 0; k < dvw; ++k) f.g[panel * dvw + k * L + lane] = Word(0);
    clear_row<P>(f.own_q_rows, i, dp);
    clear_row<P>(f.own_g_rows, i, dvp);
  }

  // Rows of queries as words to reduce over, columns padded with zero to whole vectors. In place if
  // they are that already and none will be cleared, else in dst.
  const Word* rows_of(const Source src, const int64_t* stride, int64_t cols, int64_t padded,
                      bool masked, Word* dst) const {
    const Word* const own = in_place<Word>(src);
    if (own != nullptr && !masked && stride[3] == 1 && stride[2] == padded && cols == padded)
      return own;
    stage_padded<P>(src, stride[2], stride[3], p.Lq, cols, dst, padded);
    return dst;
  }

  // Adds one block of keys to the gradients of a query head: dQ of all queries, dK and dV of its
  // keys.
  void block_of_keys(Buffers& f, int64_t b, int64_t h, int64_t hk, Range block, int64_t chunk_begin,
                     T* dq) const {
    const int64_t nk = block.end - block.begin, *sk = p.k.stride, *sv = p.v.stride;
    const Source k = P::elements(p.k.data, p.dtype) + b * sk[0] + hk * sk[1] + block.begin * sk[2];
    const Source v = P::elements(p.v.data, p.dtype) + b * sv[0] + hk * sv[1] + block.begin * sv[2];
    const Word* ks = stage_keys<P>(k, sk[2], sk[3], nk, p.D, f.k);
    const Word* vs = stage_keys<P>(v, sv[2], sv[3], nk, p.Dv, f.v);
    const bool leaky = rule.excludes && !all_finite(k, sk[2], sk[3], nk, p.D);
    const Word* kr =
        P::kPerWord == 1 ? ks : stage_reduced<P>(k, sk[2], sk[3], nk, p.D, f.k_reduced);
    T* dk = f.dk + (block.begin - chunk_begin) * dp;
    T* dv = f.dv + (block.begin - chunk_begin) * dvp;
    f.terms.dk = dk;
    terms.set_key_block(f.terms, b, h, block, ks);

    const Range seeing = seeing_any(p, block.begin, block.end);
    for (int64_t i = seeing.begin / L * L; i < seeing.end; i += L) {
      const int64_t i1 = min_of(p.Lq, i + L);
      const Range seen = visible_to_any(p, i, i1);
      Range r{max_of(block.begin, seen.begin), min_of(block.end, seen.end)};
      r = visible_by_program(p, b, h, i, i1, r);
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
      const Word *g_rows = f.g_rows + i / P::kPerWord * dvp,
                 *q_rows = f.q_rows + i / P::kPerWord * dp;
      T* dq_panel = dq + i * p.D;
      if (direct) {
        const bool last = i1 == p.Lq;
        add_or_write<false>(nk, W_, ld, g_rows, dvp, reduced, i > 0, last, T(1), dv, p.grad_v, b,
                            hk);
        add_or_write<false>(nk, dS, ld, q_rows, dp, reduced, i > 0, last, static_cast<T>(p.scale),
                            dk, p.grad_k, b, hk);
      } else {
        add_product<P>(nk_seen, W_, ld, g_rows, dvp, reduced, dv + shift * dvp, dvp, dvp / W);
        add_product<P>(nk_seen, dS, ld, q_rows, dp, reduced, dk + shift * dp, dp, dp / W);
      }
      // dQ += dS K, or dQ^T += K^T dS^T
      if (leaky) {
        add_nonzero(f.ds, nk_seen, k + shift * sk[2], dq_panel);
        continue;
      }
      const int64_t pairs = words<P>(nk_seen), chain = 4 * longest_chain<T>(p);
      const Word* keys = kr + shift / P::kPerWord * p.D;
      for (int64_t j = 0; j < pairs && direct; j += chain)
        add_or_write<true>(i1 - i, reinterpret_cast<const Word*>(f.ds) + j * L, L, keys + j * p.D,
                           p.D, min_of(pairs - j, chain), j > 0, j + chain >= pairs,
                           static_cast<T>(p.scale), dq_panel, p.grad_q, b, h, i);
      for (int64_t j = 0; j < pairs && dq_in_rows && !direct; j += chain)
        product_rows<P, true>(i1 - i, reinterpret_cast<const Word*>(f.ds) + j * L, L,
                              keys + j * p.D, p.D, min_of(pairs - j, chain), p.D / W,
                              [&](int64_t r, int64_t v, Vec<T> x) __attribute__((always_inline)) {
                                T* sum = dq_panel + r * p.D + v * W;
                                store(sum, load(sum) + x);
                              });
      for (int64_t j = 0; j < pairs && !dq_in_rows; j += chain)
        tile_rows<P, P::kOutputRows, NV, true>(
            p.D, keys + j * p.D, p.D, reinterpret_cast<const Word*>(f.ds) + j * L, L,
            min_of(pairs - j, chain), [](int64_t, int) { return Vec<T>{}; },
            [&](int64_t d, int n, Vec<T> x) __attribute__((always_inline)) {
              T* sum = dq_panel + d * L + n * W;
              store(sum, load(sum) + x);
            });
    }
    terms.close(f.terms);
  }

  // Whether results have the type of their sums.
  bool stores_sums() const { return in_place<T>(P::elements(p.grad_q.data, p.dtype)) != nullptr; }

  // sums = A B, added to what they are if `adds`; the last writes them, times `factor`, to rows of
  // the result from `row` on, unless these have another type.
  template <bool kColumns>
  FASTATTN_INLINE void add_or_write(int64_t rows, const Word* A, int64_t lda, const Word* B,
                                    int64_t ldb, int64_t K, bool adds, bool last, T factor, T* sums,
                                    const Tensor4& to, int64_t b, int64_t h,
                                    int64_t row = 0) const {
    const Source first =
        P::elements(to.data, p.dtype) + b * to.stride[0] + h * to.stride[1] + row * to.stride[2];
    T* const out = last ? const_cast<T*>(in_place<T>(first)) : nullptr;
    product_rows<P, kColumns>(rows, A, lda, B, ldb, K, ldb / W,
                              [&](int64_t r, int64_t v, Vec<T> x) __attribute__((always_inline)) {
                                T* const sum = sums + r * ldb + v * W;
                                if (adds) x = load(sum) + x;
                                if (out != nullptr)
                                  store(out + r * to.stride[2] + v * W, x * factor);
                                else
                                  store(sum, x);
                              });
  }

  // The tiles of W and dS of queries [i0, i1) and keys r, in every layout that the products need.
  // Returns false if no pair is visible.
  bool scores(Buffers& f, int64_t b, int64_t h, int64_t i0, int64_t i1, Range r, const Word* ks,
              const Word* vs) const {
    const int64_t nk = r.end - r.begin;
    Bias<T> bias;
    if (key_mask) bias.keys = f.keys + r.begin;
    if (has_bias_of_pairs(p)) {
      const Coverage seen = pack_bias(p, b, h, i0, i1, r.begin, r.end, L, f.bias, &bias.clear);
      if (seen == Coverage::none) return false;
      if (seen == Coverage::some) bias.tile = f.bias;
    }
    Vec<T> top[NV];
    const int64_t chain = longest_chain<T>(p);
    const auto read_ahead = [&] { f.next.read_some(); };
    score_products<P, NV>(nk, ks, dw, f.q + i0 * dw, dw, chain, f.s, top, i1 - i0,
                          read_ahead);  // S = K Q^T
    if (has_content_terms(p)) terms.template add<NV>(f.terms, i0, i1, r, f.s, top);
    score_products<P, NV>(nk, vs, dvw, f.g + i0 * dvw, dvw, chain, f.ds, top, i1 - i0,
                          read_ahead);  // dP = V dO^T
    gradients.run(f.gradients, b, h, i0, i1, r, bias, {f.rows.at(i0), f.center + i0, f.delta + i0});
    if (has_content_terms(p)) terms.template add_gradients<NV>(f.terms, i0, i1, r, f.ds);
    pair_up(f, nk);
    return true;
  }

  // Packs words for the products: pairs of queries in the rows (w_rows, ds_rows), pairs of keys
  // across lanes (ds in place).
  void pair_up(Buffers& f, int64_t nk) const {
    if constexpr (P::kPerWord == 2) {
      if (nk % 2) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) store(f.ds + nk * L + n * W, VecF{});
      for (int64_t j = 0; j < nk; ++j) {
        const auto row_pairs = [&](const T* from, Word* to) __attribute__((always_inline)) {
          store(to + j * (L / 2), P::as_bf16(load(from + j * L), load(from + j * L + W)));
        };
        row_pairs(f.s, f.w_rows);
        row_pairs(f.ds, f.ds_rows);
      }
      for (int64_t j = 0; j < nk; j += 2) FASTATTN_UNROLL for (int n = 0; n < NV; ++n) {
          const VecF even = load(f.ds + j * L + n * W), odd = load(f.ds + (j + 1) * L + n * W);
          store(f.ds + j / 2 * L + n * W, P::as_pairs(even, odd));
        }
    }
    (void)f, (void)nk;
  }

  // dQ^T += K^T dS^T pair by pair, skipping zeros: for blocks with non-finite keys.
  __attribute__((noinline)) void add_nonzero(const T* ds, int64_t nk, Source k, T* dq) const {
    with_elements(k, [&](const auto* rows) { add_nonzero_of(ds, nk, rows, dq); });
  }

  // dq += ds k, without keys whose ds is 0 for all queries: they may hold NaN.
  template <class S>
  void add_nonzero_of(const T* ds, int64_t nk, const S* k, T* dq) const {
    for (int64_t j = 0; j < nk; ++j) {
      for (int64_t i = 0; i < L; ++i) {
        T weight = ds[j * L + i];
        if constexpr (P::kPerWord == 2) {
          const uint32_t pair = bits_of(static_cast<float>(ds[j / 2 * L + i]));
          weight = float_of(j % 2 ? pair & 0xffff0000u : pair << 16);
        }
        if (weight == T(0)) continue;
        for (int64_t d = 0; d < p.D; ++d)
          dq[dq_in_rows ? i * p.D + d : d * L + i] +=
              weight * static_cast<T>(widen(k[j * p.k.stride[2] + d * p.k.stride[3]]));
      }
    }
  }

  // to[keys] = factor rows[0, 1, ...], rows that are ld apart.
  __attribute__((noinline)) void write_rows(const T* rows, int64_t ld, int64_t cols, T factor,
                                            const Tensor4& to, int64_t b, int64_t hk,
                                            Range keys) const {
    const Source first = P::elements(to.data, p.dtype) + b * to.stride[0] + hk * to.stride[1];
    with_elements(first, [&](auto* dst) __attribute__((always_inline)) {
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        const T* row = rows + (j - keys.begin) * ld;
        for (int64_t d = 0; d < cols; d += W)
          store_as<T>(dst + j * to.stride[2] + d, load(row + d) * factor,
                      static_cast<int>(min_of<int64_t>(W, cols - d)));
      }
    });
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
