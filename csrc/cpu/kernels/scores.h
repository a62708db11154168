// The operations on a block of scores between the two matrix products. A block is S[key][query],
// queries across lanes.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// ---- Keys visible by position: i + offset - left <= j <= i + offset + right, k_begin <= j -------

struct Range {
  int64_t begin, end;
};

// Keys visible to at least one of the queries [i0, i1), within [0, Lk).
FASTATTN_INLINE Range visible_to_any(const AttentionParams& p, int64_t i0, int64_t i1) {
  Range r{p.k_begin, p.Lk};
  if (p.window_left >= 0) r.begin = max_of(p.k_begin, i0 + p.offset - p.window_left);
  if (p.window_right >= 0) r.end = min_of<int64_t>(p.Lk, i1 + p.offset + p.window_right);
  if (r.end < r.begin) r.end = r.begin;
  return r;
}

// Keys visible to all of them; keys outside need a comparison per lane.
FASTATTN_INLINE Range visible_to_all(const AttentionParams& p, int64_t i0, int64_t i1) {
  Range r{p.k_begin, p.Lk};
  if (p.window_left >= 0) r.begin = max_of(p.k_begin, i1 - 1 + p.offset - p.window_left);
  if (p.window_right >= 0) r.end = i0 + p.offset + p.window_right + 1;
  return r;
}

// Queries that may see at least one of the keys [j0, j1), within [0, Lq).
FASTATTN_INLINE Range seeing_any(const AttentionParams& p, int64_t j0, int64_t j1) {
  Range r{0, p.Lq};
  if (p.window_right >= 0) r.begin = max_of<int64_t>(0, j0 - p.offset - p.window_right);
  if (p.window_left >= 0) r.end = min_of<int64_t>(p.Lq, j1 - p.offset + p.window_left);
  if (r.end < r.begin) r.end = r.begin;
  return r;
}

// ---- From products to scores --------------------------------------------------------------------

// As long as nothing is added to a score, it stays the raw product q.k, and `scale` enters only in
// the exponent: p = 2^((S - m) * exponent). With a mask, softcap, ALiBi or a scale that is not of
// moderate size, scores are converted to natural units first. Either way the row maximum is
// subtracted before the multiplication by log2(e), so that a row of finfo.min is uniform and not
// -inf.
template <class T>
struct ScoreRule {
  bool natural;
  bool excludes;  // some pairs may be excluded, so their NaN must not pass
  T scale;
  T softcap;
  T cap_unit;  // scale / softcap, in the unit of tanh_of_scaled
  T unit;      // natural score = unit * S
  T exponent;  // unit * log2(e)
};

// Whether a value is read for every key or pair, to be added to its score or to exclude it.
FASTATTN_INLINE bool has_bias(const AttentionParams& p) {
  return p.mask.data != nullptr || p.relative_bias != nullptr || p.mask_program != nullptr ||
         p.row_bias.data != nullptr;
}

// Whether the products have terms of relative attention (content_terms.h).
FASTATTN_INLINE bool has_content_terms(const AttentionParams& p) {
  return p.query_table.data != nullptr || p.key_table.data != nullptr;
}

// Which of the optional steps from a product to a score a call has.
template <class T>
FASTATTN_INLINE ScoreRule<T> make_rule(const AttentionParams& p) {
  ScoreRule<T> rule;
  const bool additive = (p.mask.data != nullptr && p.mask_dtype != DType::boolean) ||
                        p.relative_bias != nullptr || p.row_bias.data != nullptr;
  // fp64 too: no wider type can carry a maximum between the two units without rounding. Without a
  // scale of moderate size, a natural score divided by it, or the exponent, leaves the range of T.
  const bool moderate = p.scale >= 0x1p-64 && p.scale <= 0x1p64;
  const bool modified = p.score_program != nullptr;  // then S is scaled already, and may be -inf
  rule.natural =
      additive || p.softcap > 0 || p.alibi != nullptr || !moderate || modified || kSame<T, double>;
  rule.excludes =
      has_bias(p) || p.window_left >= 0 || p.window_right >= 0 || p.k_begin > 0 || modified;
  rule.scale = modified ? T(1) : static_cast<T>(p.scale);
  rule.softcap = static_cast<T>(p.softcap);
  rule.cap_unit = static_cast<T>((modified ? 1 : p.scale) / p.softcap * kTanhUnit<double>);
  rule.unit = rule.natural ? T(1) : rule.scale;
  rule.exponent = rule.unit * kLog2E<T>;
  return rule;
}

// 2^(x exponent) for the difference x <= 0 between a score and its row's maximum.
template <bool Coarse = false, class T>
FASTATTN_INLINE Vec<T> exponential(const ScoreRule<T>& rule, Vec<T> x) {
  if constexpr (kSame<T, double>)
    return exp_neg(x);  // scores of doubles are natural
  else
    return exp2_neg<Coarse>(x * rule.exponent);
}

// Whether a row has no visible key, from its maximum and sum. A visible NaN may leave the maximum
// at -inf, and makes the sum NaN.
template <class T>
FASTATTN_INLINE bool sees_nothing(T maximum, T sum) {
  return maximum == -kInf<T> && sum == sum;
}
// The same test for one row per lane.
template <class T>
FASTATTN_INLINE Mask<T> see_nothing(Vec<T> maximum, Vec<T> sum) {
  return (maximum == -kInf<T>)&(sum == sum);
}

// The natural logarithm of the sum of exponentials of some rows, from the row's maximum and the sum
// relative to it, which is at least 1.
template <class T>
FASTATTN_INLINE VecD log_sum_exp(const ScoreRule<T>& rule, VecD maximum, VecD sum) {
  const VecD lse = static_cast<double>(rule.unit) * maximum + log_of(sum);
  return select<double>(see_nothing<double>(maximum, sum), splat(-kInf<double>), lse);
}

// The initial maximum and sum of the rows of a query head: -inf and 0, or with a sink its score, in
// the unit of S, and 1. A sink of inf has the sum inf, so all other weights are 0.
template <class T>
struct FirstState {
  T maximum, sum;
};
// The state of a row before its first key: empty, or with the sink of its head.
template <class T>
FASTATTN_INLINE FirstState<T> first_state(const AttentionParams& p, const ScoreRule<T>& rule,
                                          int64_t b, int64_t h) {
  if (p.sinks == nullptr) return {-kInf<T>, T(0)};
  constexpr T kMost = kSame<T, double> ? static_cast<T>(__DBL_MAX__) : static_cast<T>(__FLT_MAX__);
  const T* sinks = static_cast<const T*>(p.sinks);
  const T sink = sinks[b * p.sinks_stride[0] + h * p.sinks_stride[1]] / rule.unit;
  if (sink > kMost) return {kMost, kInf<T>};
  return {sink, T(1)};
}

// Turns the scores of a row into probabilities: p = 2^((S - high - low) * exponent) * inverse.
template <class T>
struct RowScale {
  T* high;
  T* low;
  T* inverse;
  // The rows from i on.
  FASTATTN_INLINE RowScale at(int64_t i) const { return {high + i, low + i, inverse + i}; }
};

// From the log-sum-exp, in the units of S: high + low keep the precision of double. A fully masked
// row gets +inf, which makes all its probabilities 0.
template <class T>
FASTATTN_INLINE void scale_from_lse(const ScoreRule<T>& rule, double lse, RowScale<T> row) {
  const double exact = lse == -kInf<double> ? kInf<double> : lse / rule.unit;
  *row.high = static_cast<T>(exact);
  *row.low = exact - exact == 0 ? static_cast<T>(exact - *row.high) : T(0);
  *row.inverse = T(1);
}

// Beyond this, the rounding of a score changes its exponential by more than a percent, and in a row
// of finfo.min the maximum absorbs the logarithm of the sum. Such a row is normalised by its
// recomputed sum.
constexpr double kHugeLse = 1 << 16;
// Up to here, a double holds the maximum and the logarithm of the sum with 12 bits after the point.
constexpr double kAbsorbingLse = 0x1p40;

// The bias of a block: the value that a mask adds, or -inf where it excludes. One value per key if
// the mask is the same for all queries (padding), else a tile in the layout of S.
template <class T>
struct Bias {
  const T* tile = nullptr;  // [keys][lanes]
  const T* keys = nullptr;  // [keys], not used if there is a tile
  Range clear{0, 0};        // the keys that have no bias; their rows of the tile are not read
  // Whether the block has any bias.
  bool exists() const { return tile != nullptr || keys != nullptr; }
};

// S = softcap tanh(scale S / softcap) for S[rows][kVectors], and its maximum over the rows.
// slope_out, if not null, takes its derivative by scale S. The loop does nothing else: tanh is a
// long dependency chain, and only short loop bodies overlap many of them.
template <class T, int kVectors>
FASTATTN_INLINE void cap_scores(const ScoreRule<T>& rule, T* S, int64_t rows, T* slope_out,
                                Vec<T>* maximum) {
  constexpr int W = kLanes<T>;
  for (int64_t r = 0; r < rows; ++r) FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const int64_t at = (r * kVectors + n) * W;
      const Vec<T> t = tanh_of_scaled<T>(load(S + at) * rule.cap_unit), s = rule.softcap * t;
      if (slope_out != nullptr) store(slope_out + at, T(1) - t * t);
      store(S + at, s);
      maximum[n] = max_of(maximum[n], s);
    }
}

// Which queries are across the lanes: i0, i0 + 1, ... of one head, up to i1.
template <class T>
struct LanesOfHead {
  int64_t i0, i1;
  T alibi;
  FASTATTN_INLINE bool sloped() const { return alibi != T(0); }
  FASTATTN_INLINE T slope(int) const { return alibi; }
  // Of vector n, less i0.
  FASTATTN_INLINE Vec<T> queries(int n) const { return iota<T>() + T(n * kLanes<T>); }
};

// Turns the products S[rows][kVectors] of keys j0... and the queries of `lanes` into scores, -inf
// where excluded, and finds their maximum over the keys. With softcap, slope_out (if not null)
// takes d score / d (scale q.k).
template <class T, int kVectors, class Lanes>
FASTATTN_INLINE void apply_rule(const AttentionParams& p, const ScoreRule<T>& rule, T* S,
                                int64_t rows, const Lanes& lanes, int64_t j0, Bias<T> bias,
                                T* slope_out, Vec<T>* maximum) {
  constexpr int W = kLanes<T>;
  const int64_t i0 = lanes.i0;
  const Range all = visible_to_all(p, i0, lanes.i1);
  const Vec<T> minus_inf = splat<T>(-kInf<T>);
  const bool capped = rule.softcap > 0;
  FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) maximum[n] = minus_inf;
  if (capped) {
    cap_scores<T, kVectors>(rule, S, rows, slope_out, maximum);
    const bool edges = j0 < all.begin || j0 + rows > all.end;
    if (!edges && !bias.exists() && !lanes.sloped()) return;
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) maximum[n] = minus_inf;
  }
  const T scale = rule.natural && !capped ? rule.scale : T(1);
  const bool all_change = scale != T(1) || bias.keys != nullptr || lanes.sloped();
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t j = j0 + r;
    const bool edge = j < all.begin || j >= all.end;
    const bool biased = bias.tile != nullptr && (j < bias.clear.begin || j >= bias.clear.end);
    T* row = S + r * kVectors * W;
    if (!all_change && !edge && !biased) {
      FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) maximum[n] =
          max_of(maximum[n], load(row + n * W));
      continue;
    }
    // Lane l is query i0 + l; key j is visible to it iff low <= l <= high.
    const T low = j < p.k_begin         ? kInf<T>
                  : p.window_right >= 0 ? static_cast<T>(j - p.offset - p.window_right - i0)
                                        : -kInf<T>;
    const T high = p.window_left >= 0 ? static_cast<T>(j - p.offset + p.window_left - i0) : kInf<T>;
    const T distance = static_cast<T>(i0 + p.offset - j);
    FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) {
      const Vec<T> lane = lanes.queries(n);
      Vec<T> s = load(row + n * W) * scale;
      if (biased) {  // select, not only add: an excluded NaN must not survive
        const Vec<T> b = load(bias.tile + r * kVectors * W + n * W);
        s = select<T>(b == minus_inf, minus_inf, rule.natural ? s + b : s);
      } else if (bias.keys != nullptr) {
        const Vec<T> b = splat<T>(bias.keys[r]);
        s = select<T>(b == minus_inf, minus_inf, rule.natural ? s + b : s);
      }
      if (lanes.sloped()) {  // s -= slope * |i + offset - j|
        const Vec<T> d = lane + distance;
        s -= lanes.slope(n) * select<T>(d < T(0), -d, d);
      }
      if (edge) s = select<T>((lane >= low) & (lane <= high), s, minus_inf);
      store(row + n * W, s);
      maximum[n] = max_of(maximum[n], s);
    }
  }
}

// Turns products into scores for queries i0... of one head.
template <class T, int kVectors>
FASTATTN_INLINE void apply_rule(const AttentionParams& p, const ScoreRule<T>& rule, T* S,
                                int64_t rows, int64_t i0, int64_t i1, int64_t j0, Bias<T> bias,
                                T alibi, T* slope_out, Vec<T>* maximum) {
  const LanesOfHead<T> lanes{i0, i1, alibi};
  apply_rule<T, kVectors>(p, rule, S, rows, lanes, j0, bias, slope_out, maximum);
}

// ---- Dropout: Philox4x32-10, counter (i, j / 8, query head, batch), key = seed ------------------

struct DropoutRule {
  uint32_t threshold;  // keep iff a 16-bit draw is below it
  uint32_t key[2];
  double factor;                               // of kept values; 0 if none is kept
  int64_t first_query, first_key, first_head;  // of the draws
};

// The threshold, factor and key of dropout.
FASTATTN_INLINE DropoutRule make_dropout(const AttentionParams& p) {
  DropoutRule d;
  d.threshold = static_cast<uint32_t>(__builtin_rint((1.0 - p.dropout_p) * 65536.0));
  d.key[0] = static_cast<uint32_t>(p.seed);
  d.key[1] = static_cast<uint32_t>(p.seed >> 32);
  d.factor = d.threshold == 0 ? 0.0 : 65536.0 / d.threshold;
  d.first_query = p.first_query, d.first_key = p.first_key, d.first_head = p.first_head;
  return d;
}

// Philox4x32-10 for a vector of queries: for each group of eight keys, each query gets eight 16-bit
// draws in four words, low half first. Head and batch are the same in all lanes, and the queries
// are the same in all groups. So a quarter of the products is hoisted or scalar:
//   round 0: c0 = i, c1 = group, c2 = head, c3 = batch; then c2, c3 do not depend on the group
//   round 1: then c0, c1 do not depend on the group; the other half is scalar
//   round 2: c2 and c3 depend on both
class Philox {
 public:
  // The generator of the rows from i0 on, one query in each lane.
  FASTATTN_INLINE Philox(const DropoutRule& d, int64_t i0, int64_t head, int64_t batch)
      : key_{d.key[0], d.key[1]} {
    VecU query = VecU{} + static_cast<uint32_t>(i0), high, low;
    FASTATTN_UNROLL for (int l = 0; l < kLanes<float>; ++l) query[l] += static_cast<uint32_t>(l);
    const uint64_t product = uint64_t{kM1} * static_cast<uint32_t>(head);
    first_ = static_cast<uint32_t>(product >> 32) ^ key_[0];
    multiply_wide(query, kM0, &high, &low);
    in2_ = low ^ (key_[1] + kW1);
    multiply_wide(high ^ static_cast<uint32_t>(batch) ^ key_[1], kM1, &high, &low);
    out0_ = low ^ (key_[0] + 2 * kW0);
    multiply_wide(high ^ static_cast<uint32_t>(product) ^ (key_[0] + kW0), kM0, &high, &out3_);
    out2_ = high ^ (key_[1] + 2 * kW1);
  }

  // Draws `group` of eight keys: four words of each lane's query.
  FASTATTN_INLINE void draw(int64_t group, VecU* word) const {
    const uint64_t product = uint64_t{kM0} * (first_ ^ static_cast<uint32_t>(group));
    VecU high0, low0, high2, low2;
    multiply_wide(in2_ ^ static_cast<uint32_t>(product >> 32), kM1, &high2, &low2);
    VecU c0 = high2 ^ out0_, c1 = low2, c2 = out2_ ^ static_cast<uint32_t>(product), c3 = out3_;
    FASTATTN_UNROLL for (uint32_t round = 3; round < 10; ++round) {
      multiply_wide(c0, kM0, &high0, &low0);
      multiply_wide(c2, kM1, &high2, &low2);
      c0 = high2 ^ c1 ^ (key_[0] + round * kW0);
      c1 = low2;
      c2 = high0 ^ c3 ^ (key_[1] + round * kW1);
      c3 = low0;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
  }

 private:
  static constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u;  // the multipliers
  static constexpr uint32_t kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;  // the keys' steps
  uint32_t key_[2];
  uint32_t first_;           // c0 after round 0, without the group
  VecU in2_;                 // c2 after round 1, without the group
  VecU out0_, out2_, out3_;  // c0, c2, c3 after round 2, without the group
};

// keep[r][lane]: all ones where the pair (query i0 + lane, key j0 + r) is kept, else zero. `lanes`
// is a multiple of the float vector, or of its half (fp64 panels). With words of two keys the
// layout is [r / 2][lane], half of the bits for each key, and j0 is even.
template <int kPerWord = 1>
FASTATTN_INLINE void dropout_mask(const DropoutRule& d, int64_t i0, int64_t j0, int64_t rows,
                                  int64_t lanes, int64_t head, int64_t batch, uint32_t* keep) {
  constexpr int W = kLanes<float>;
  j0 += d.first_key;
  // Pairs of keys that begin at an odd draw are in two words.
  const int odd = kPerWord == 2 ? static_cast<int>(j0 % 2) : 0;
  for (int64_t l = 0; l < lanes; l += W) {
    const Philox philox(d, d.first_query + i0 + l, d.first_head + head, batch);
    const int count = static_cast<int>(min_of<int64_t>(W, lanes - l));
    VecU before{};
    for (int64_t group = j0 / 8; group * 8 < j0 + rows + odd; ++group) {
      VecU word[4];
      philox.draw(group, word);
      if (odd != 0) {
        FASTATTN_UNROLL for (int n = 0; n < 4; ++n) {
          const VecU own = word[n];
          word[n] = before >> 16 | own << 16;
          before = own;
        }
      }
      FASTATTN_UNROLL for (int t = 0; t < 8; t += kPerWord) {
        const int64_t r = group * 8 + t - odd - j0;
        if (r < 0 || r >= rows) continue;
        VecI kept;
        if constexpr (kPerWord == 2) {
          kept = smaller_halves(word[t / 2], d.threshold);
        } else {
          const VecI draw = (VecI)(t % 2 ? word[t / 2] >> 16 : word[t / 2] & 0xffffu);
          kept = draw < static_cast<int32_t>(d.threshold);
        }
        store_first(reinterpret_cast<float*>(keep + r / kPerWord * lanes + l), (VecF)kept, count);
      }
    }
  }
}

// x where kept, else 0.
FASTATTN_INLINE VecF keep_lanes(VecF x, const uint32_t* keep) {
  return (VecF)((VecI)x & (VecI)load(reinterpret_cast<const float*>(keep)));
}
// The same in float64.
FASTATTN_INLINE VecD keep_lanes(VecD x, const uint32_t* keep) {
  VecD y = x;
  FASTATTN_UNROLL for (int i = 0; i < kLanes<double>; ++i) y[i] = keep[i] ? x[i] : 0.0;
  return y;
}

// ---- Non-finite values and keys -----------------------------------------------------------------

// In a block with exclusions, 0 * NaN must not reach a query that cannot see the row. Rows with
// NaN or inf are rare: they are zeroed in the staged copy, and their products are added pair by
// pair where the weight is not zero.
template <class S>
FASTATTN_INLINE bool all_finite(const S* src, int64_t row_stride, int64_t col_stride, int64_t rows,
                                int64_t cols) {
  // x - x is 0 for a finite x and NaN otherwise; NaN survives a sum.
  typedef decltype(widen(S())) T;
  constexpr int W = kLanes<T>;
  Vec<T> sum{};
  for (int64_t r = 0; r < rows; ++r) {
    if (col_stride == 1) {
      for (int64_t c = 0; c < cols; c += W) {
        const Vec<T> x =
            load_as<T>(src + r * row_stride + c, static_cast<int>(min_of<int64_t>(W, cols - c)));
        sum += x - x;
      }
    } else {
      for (int64_t c = 0; c < cols; ++c) {
        const auto x = widen(src[r * row_stride + c * col_stride]);
        if (x - x != 0) return false;
      }
    }
  }
  return sum_lanes<T>(sum) == 0;
}
// The same for elements whose dtype is known at run time.
__attribute__((noinline)) inline bool all_finite(Elements src, int64_t row_stride,
                                                 int64_t col_stride, int64_t rows, int64_t cols) {
  bool finite = true;
  with_elements(src, [&](const auto* from) __attribute__((always_inline)) {
    finite = all_finite(from, row_stride, col_stride, rows, cols);
  });
  return finite;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
