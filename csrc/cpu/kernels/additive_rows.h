// Shared by the forward and the backward pass of additive attention: a block of queries and its
// probabilities over all visible keys. Both passes compute whole rows with the same code, so their
// probabilities are equal.
#pragma once
#include "additive.h"
#include "blocks.h"
#include "mask.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kQueries = 64, kKeys = 64;  // per block: 64 KiB each at A = 256

template <class P>
class AdditiveRows {
 protected:
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  static constexpr int W = kLanes<T>;
  static constexpr int kScoreQueries = W == 16 ? 4 : W == 2 ? 1 : 2;
  static constexpr int kGradientQueries = kRegisters == 32 ? 4 : 2;
  static constexpr int kMostQueries = max_of(kScoreQueries, kGradientQueries);
  static constexpr int kVectors = 2;  // of the output tiles
  static constexpr int64_t kPanelRows = kQueries + 1;
  static constexpr int64_t kPanel = kPanelRows * W;
  static_assert(kQueries == kKeys, "one stride of panels");

  explicit AdditiveRows(const AdditiveParams& params)
      : x(params),
        p(params.attention),
        dropout(make_dropout(params.attention)),
        panels((p.D + W - 1) / W),
        columns(round_up(p.Dv, kVectors * W)),
        ld(leading(p.Lk)),
        excludes(p.mask.data != nullptr || p.window_right >= 0),
        key_mask(is_key_mask(p)),
        coarse(p.dtype == DType::bf16 || p.dtype == DType::f16) {}

  const AdditiveParams& x;
  const AttentionParams& p;
  const DropoutRule dropout;
  const int64_t panels, columns, ld;
  const bool excludes, key_mask, coarse;  // coarse: results are rounded to 16 bits

  // Queries [begin, end) of one batch entry.
  struct Block {
    int64_t b, begin, end;
  };

  struct Buffers {
    T* v;               // [panels][lanes], zero beyond A
    T* b;               // [panels][lanes] the bias, zero beyond A
    T limit;            // of max|q| + max|k| for the factored form
    T* q;               // [panels][kQueries + 1][lanes] queries
    T* eq;              // e^2(q + b)
    T* k;               // [panels][kKeys + 1][lanes] keys, or e^2k:
    const void* held;   // the first of these rows,
    int64_t held_rows;  // their number,
    T held_top;         // their largest magnitude,
    bool factored;      // and whether they are e^2k
    T* s;               // [kQueries][ld] scores, probabilities, weights
    T* o;               // [kQueries][columns] outputs; in the backward pass their gradients
    T* values;          // [kKeys][columns], or [Dv][kKeys]
    T* keys;            // [ld] a mask of keys
    T* bias;            // [ld] a row of a mask
    uint32_t* keep;     // [kKeys][kQueries]
    // backward only
    T* d;   // [kQueries][ld] gradients of probabilities, then of scores
    T* dq;  // as q
    T* dk;  // as k
    T* dv;  // [panels][lanes]
    T query_top;
    size_t bytes;
  };

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers f{};
    const bool backward = x.parts != nullptr;
    f.v = a.take<T>(panels * W);
    f.b = a.take<T>(panels * W);
    f.q = a.take<T>(panels * kPanel);
    f.eq = a.take<T>(panels * kPanel);
    f.k = a.take<T>(panels * kPanel);
    f.s = a.take<T>(kQueries * ld);
    f.o = a.take<T>(kQueries * columns);
    f.values = a.take<T>(kKeys * columns);
    f.keys = a.take<T>(key_mask ? ld : 0);
    f.bias = a.take<T>(p.mask.data != nullptr ? ld : 0);
    f.keep = a.take<uint32_t>(p.dropout_p > 0 ? kKeys * kQueries : 0);
    f.d = a.take<T>(backward ? kQueries * ld : 0);
    f.dq = a.take<T>(backward ? panels * kPanel : 0);
    f.dk = a.take<T>(backward ? panels * kPanel : 0);
    f.dv = a.take<T>(backward ? panels * W : 0);
    f.bytes = a.used();
    return f;
  }

  // The row stride of the scores: whole blocks of keys, never a multiple of the page size.
  static int64_t leading(int64_t keys) {
    const int64_t n = round_up(keys, kKeys);
    return n * static_cast<int64_t>(sizeof(T)) % 4096 == 0 ? n + 16 : n;
  }

  // Row i of batch entry b.
  Source row(const Tensor4& t, int64_t b, int64_t i) const {
    return P::elements(t.data, p.dtype) + b * t.stride[0] + i * t.stride[2];
  }

  // ---- Staging ---------------------------------------------------------------------------------

  // Pads v and the bias, and sets the limit that remains for queries and keys.
  void prepare_vectors(Buffers& f) const {
    const T *v = static_cast<const T*>(x.vector), *bias = static_cast<const T*>(x.bias);
    const auto magnitude = [](T u) { return u < T(0) ? -u : u; };
    bool small = true;
    T top = T(0);
    for (int64_t a = 0; a < panels * W; ++a) {
      f.v[a] = a < p.D ? v[a] : T(0);
      f.b[a] = a < p.D && bias != nullptr ? bias[a] : T(0);
      small &= magnitude(f.v[a]) <= kLargestVector<T> && magnitude(f.b[a]) <= kFactoredLimit<T>;
      top = max_of(top, magnitude(f.b[a]));
    }
    f.limit = small ? kFactoredLimit<T> - top : -kInf<T>;
  }

  // Writes f(x) of `rows` rows as panels, dst[a / lanes][row][a % lanes]; the rows from there up to
  // `to`, which the tiles read too, are f(0). Returns the largest magnitude of an element, or inf if
  // one is not finite.
  template <class F>
  T stage(Source src, const int64_t* stride, int64_t rows, int64_t to, T* dst, F f) const {
    T top = T(0);
    with_elements(src,
                  [&](const auto* first) { top = stage_rows_of(first, stride, rows, to, dst, f); });
    return top;
  }
  // stage() for one type of elements.
  template <class S, class F>
  T stage_rows_of(const S* src, const int64_t* stride, int64_t rows, int64_t to, T* dst,
                  F f) const {
    Vec<T> top{}, finite{};
    for (int64_t r = 0; r < to; ++r) {
      const S* from = src + r * stride[2];
      for (int64_t n = 0; n < panels; ++n) {
        const int count = static_cast<int>(min_of<int64_t>(W, p.D - n * W));
        Vec<T> u{};
        if (r < rows && stride[3] == 1) {
          u = load_as<T>(from + n * W, count);
        } else if (r < rows) {
          alignas(kVectorBytes) T lanes[W] = {};
          for (int l = 0; l < count; ++l)
            lanes[l] = static_cast<T>(widen(from[(n * W + l) * stride[3]]));
          u = load(lanes);
        }
        store(dst + n * kPanel + r * W, f(u));
        top = max_of(top, max_of(u, -u));
        finite += u - u;  // NaN from here on if u is not finite
      }
    }
    return sum_lanes<T>(finite) == T(0) ? max_lanes<T>(top) : kInf<T>;
  }
  struct Itself {
    FASTATTN_INLINE Vec<T> operator()(Vec<T> u) const { return u; }
  };
  struct Exponential {
    FASTATTN_INLINE Vec<T> operator()(Vec<T> u) const { return exp_twice<T>(u); }
  };

  // to = e^(2 from), for rows in panels.
  void exponentials(const T* from, int64_t rows, T* to) const {
    for (int64_t n = 0; n < panels * kPanel; n += kPanel)
      for (int64_t r = 0; r < rows; ++r)
        store(to + n + r * W, exp_twice<T>(load(from + n + r * W)));
  }

  // Copies a block of queries into panels, transformed to exponentials.
  void stage_queries(Buffers& f, Block q) const {
    const int64_t rows = q.end - q.begin, to = rows == 1 ? 1 : round_up(rows, kMostQueries);
    f.query_top = stage(row(p.q, q.b, q.begin), p.q.stride, rows, to, f.q, Itself());
    if (!(f.query_top <= f.limit)) return;
    exponentials(f.q, to, f.eq);
    if (x.bias == nullptr) return;
    // e^2(q + b) as a product: a sum of large q and b would be rounded before k is added.
    for (int64_t n = 0; n < panels; ++n) {
      const Vec<T> eb = exp_twice<T>(load(f.b + n * W));
      for (int64_t r = 0; r < to; ++r) {
        T* const e = f.eq + n * kPanel + r * W;
        store(e, load(e) * eb);
      }
    }
  }

  // Returns whether the block is stored in the factored form, e^2k. A block that is staged already
  // is reused, as in the backward pass of a few keys.
  bool stage_keys_block(Buffers& f, int64_t b, int64_t j0, int64_t rows) const {
    const Source from = row(p.k, b, j0);
    const int64_t to = round_up(rows, W), *stride = p.k.stride;
    if (address_of(from) != f.held || rows != f.held_rows) {
      f.held_top = stage(from, stride, rows, to, f.k, Exponential());
      f.held = address_of(from), f.held_rows = rows, f.factored = true;
    }
    const bool factored = f.query_top + f.held_top <= f.limit;
    if (factored && !f.factored) stage(from, stride, rows, to, f.k, Exponential());
    if (!factored && f.factored) stage(from, stride, rows, to, f.k, Itself());
    return f.factored = factored;
  }

  // ---- Probabilities ---------------------------------------------------------------------------

  // The range of keys visible to at least one of the queries; begin is rounded down to a block.
  Range visible(Buffers& f, Block q) const {
    Range range = visible_to_any(p, q.begin, q.end);
    if (key_mask) {
      read_mask_row(p, q.b, 0, 0, 0, p.Lk, f.keys);
      range = trim(f.keys, range);
    }
    return {range.begin / kKeys * kKeys, range.end};
  }

  // S = P over the range, and zero up to the end of the last block.
  void probabilities(Buffers& f, Block q, Range range) const {
    stage_queries(f, q);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys) {
      const int64_t j1 = min_of(range.end, j0 + kKeys);
      if (!stage_keys_block(f, q.b, j0, j1 - j0))
        exact_scores(f, q, j0, j1);
      else if (q.end - q.begin == 1)
        scores<1>(f, q, j0, j1);
      else
        scores<kScoreQueries>(f, q, j0, j1);
    }
    for (int64_t i = q.begin; i < q.end; ++i) softmax(f, q, i, range);
  }

  // The scores of a block of queries and keys [j0, j1), into f.s. The last rows may be past the
  // queries and the last columns past the keys: they are computed from zeros.
  template <int kQ>
  void scores(Buffers& f, Block q, int64_t j0, int64_t j1) const {
    if (kHasCoarse<T> && coarse) return scores_of<kQ, kHasCoarse<T>>(f, q, j0, j1);
    scores_of<kQ, false>(f, q, j0, j1);
  }

  // The scores of kQ queries at a time, from exponentials that were computed once.
  template <int kQ, bool kCoarse>
  __attribute__((noinline)) void scores_of(Buffers& f, Block q, int64_t j0, int64_t j1) const {
    constexpr int kK = W / kQ;
    for (int64_t i = q.begin; i < q.end; i += kQ) {
      const int64_t end = min_of(j1, visible_to_any(p, i, min_of(q.end, i + kQ)).end);
      for (int64_t j = j0; j < end; j += kK) {
        const Vec<T> e = score_tile<T, kCoarse, kQ>(f.eq + (i - q.begin) * W, kPanel,
                                                    f.k + (j - j0) * W, kPanel, f.v, panels);
        alignas(kVectorBytes) T lanes[W];
        store(lanes, e);
        T* const to = f.s + (i - q.begin) * ld + j;
        FASTATTN_UNROLL for (int r = 0; r < kQ; ++r)
            __builtin_memcpy(to + r * ld, lanes + r * kK, kK * sizeof(T));
      }
    }
  }

  // As scores_of, with one tanh for each pair, where the exponentials would overflow.
  __attribute__((noinline)) void exact_scores(Buffers& f, Block q, int64_t j0, int64_t j1) const {
    for (int64_t i = q.begin; i < q.end; ++i) {
      const int64_t end = min_of(j1, visible_to_any(p, i, i + 1).end);
      for (int64_t j = j0; j < end; ++j)
        f.s[(i - q.begin) * ld + j] = score_exactly<T>(
            f.q + (i - q.begin) * W, kPanel, f.k + (j - j0) * W, kPanel, f.b, f.v, panels);
    }
  }

  // P_ij = exp(S_ij + mask_ij - max) / sum; a fully masked row is 0.
  void softmax(Buffers& f, Block q, int64_t i, Range range) const {
    T* const s = f.s + (i - q.begin) * ld;
    const int64_t end = max_of(range.begin, min_of(range.end, visible_to_any(p, i, i + 1).end));
    const int64_t padded = range.begin + round_up(range.end - range.begin, kKeys);
    const Vec<T> minus_inf = splat<T>(-kInf<T>);
    for (int64_t j = end; j < round_up(end, W); ++j) s[j] = -kInf<T>;
    const T* bias = key_mask ? f.keys : f.bias;
    if (p.mask.data != nullptr) {
      if (!key_mask) read_mask_row(p, q.b, 0, i, range.begin, end, f.bias + range.begin);
      for (int64_t j = range.begin; j < end; j += W) {
        const int count = static_cast<int>(min_of<int64_t>(W, end - j));
        const Vec<T> b = load_first(bias + j, count);  // select: an excluded NaN must not survive
        store(s + j, select<T>(b == minus_inf, minus_inf, load(s + j) + b));
      }
    }
    // max() may drop a NaN; the sum keeps it.
    Vec<T> top = minus_inf, sum{};
    for (int64_t j = range.begin; j < end; j += W) top = max_of(top, load(s + j));
    const T m = max_lanes<T>(top), reference = m == -kInf<T> ? T(0) : m;
    for (int64_t j = range.begin; j < end; j += W) {
      const Vec<T> e = exp2_neg((load(s + j) - reference) * kLog2E<T>);
      sum += e;
      store(s + j, e);
    }
    const T total = sum_lanes<T>(sum), inverse = total == T(0) ? T(0) : T(1) / total;
    for (int64_t j = range.begin; j < end; j += W) store(s + j, load(s + j) * inverse);
    for (int64_t j = round_up(end, W); j < padded; ++j) s[j] = T(0);
  }

  // M = factor * M where kept, else 0.
  void drop(Buffers& f, Block q, Range range, T* m) const {
    const T factor = static_cast<T>(dropout.factor);
    const int64_t lanes = round_up(q.end - q.begin, kLanes<float>);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys) {
      const int64_t rows = min_of(kKeys, range.end - j0);
      dropout_mask(dropout, q.begin, j0, rows, lanes, 0, q.b, f.keep);
      for (int64_t i = 0; i < q.end - q.begin; ++i) {
        T* const to = m + i * ld + j0;
        for (int64_t j = 0; j < rows; ++j)
          to[j] = f.keep[j * lanes + i] != 0 ? to[j] * factor : T(0);
      }
    }
  }

  // The first rows of every panel.
  void clear_panels(T* to, int64_t rows) const {
    for (int64_t n = 0; n < panels; ++n) clear(to + n * kPanel, rows * W);
  }

  static void clear(T* to, int64_t count) {
    if (count > 0) __builtin_memset(to, 0, static_cast<size_t>(count) * sizeof(T));
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
