// The backward pass on tiles between its products: from the products of a square, S = K Q^T and
// dP = V dO^T, to its weights and the gradients of its scores, as operands of the sums.
//
//   P = 2^(S - lse)     dS = P o (dP - delta)
//
// P and dS are left sides of dV and dK row by row, lse and delta are vectors, and two rows of dS,
// joined, are a right side of dQ^T.
#pragma once
#include "../sdpa_gradients.h"
#include "exp2.h"
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class TileGradients {
  typedef typename P::Acc T;
  typedef typename P::Format Format;
  typedef typename P::GradFormat GradFormat;
  static constexpr bool kExact = Format::kParts > 1;  // the operands are parts of floats
  static constexpr int W = kLanes<T>;
  // Beyond this, rounding a score in units of log2 could show in a weight in bf16.
  static constexpr T kDirectLse = 1 << 10;

 public:
  static constexpr int kSide = 32;
  static constexpr int kSquare = kSide * kSide;  // floats row by row, or elements of two tiles
  template <class Of>
  static constexpr int64_t kTiles = kTileElements * Of::kParts;  // elements of all parts of a tile
  // Squares of a block: of keys, of queries. Blocks of parts are smaller: a square is several
  // products for each load of a sum, and its P and dS take several times the cache.
  static constexpr int kRows = Format::kParts > 1 ? 2 : 4, kColumns = Format::kParts > 1 ? 4 : 8;
  static constexpr int kKeysOfBlock = kSide * kRows, kQueriesOfBlock = kSide * kColumns;
  static_assert(kPanelLanes<P> == kSide && W == 16);

  const T weight_scale;  // of the stored weights: a power of two in fp16

  explicit TileGradients(const Sequence& params)
      : weight_scale(Format::kNarrow ? scale_of_weights(params) : T(1)),
        p(params),
        rule(make_rule<T>(params)),
        key_mask(is_key_mask(params)),
        plain(!rule.natural && params.dropout_p == 0 && params.grad_weights.data == nullptr),
        gradients(params, false) {}

  // How the weights of a square are computed: all pairs as 2^(exponent S - lse), the visible pairs
  // as that, or pair by pair with all options.
  enum class Method { direct, masked, options };
  struct Square {
    alignas(64) T s[kSquare], dp[kSquare];  // [key][query]
    alignas(64) T bias[kSquare];            // [key][query]
    bool biased;                            // some pairs have a bias, or are excluded by one
    uint32_t visible[kSide];                // per key, the queries that see it, as bits
    Method method;
    int row, column;
  };

  // A block of keys and queries of one head, and where it is added to.
  struct Block {
    int64_t b, h, hk;
    int64_t j0, j1;         // its keys
    int64_t i0, i1, first;  // its queries, and the first of them within the panel
    bool direct;            // weights are 2^(exponent S - lse)
    bool keys_apart;        // k_t has some keys as zeros
    Range columns[kRows];   // per row of squares, the columns whose queries may see its keys
    T *dk, *dv, *dq;

    // The keys of a row of squares, and the end of the queries of a column.
    Range keys(int64_t row) const {
      return {min_of(j1, j0 + kSide * row), min_of(j1, j0 + kSide * (row + 1))};
    }
    int64_t end_of(int64_t column) const { return min_of(i1, i0 + kSide * (column + 1)); }
    bool has(int64_t row, int64_t column) const {
      return columns[row].begin <= column && column < columns[row].end;
    }
  };

  struct Buffers {
    RowScale<T> rows;      // [panel]
    T *minus_lse, *delta;  // [panel]; the log-sum-exp in units of log2, in fp32 what rows.low has
    T* keys;               // [Lk], the row of a key mask
    Element *w_left, *ds_left;  // [kRows][2][kColumns][part] left tiles: keys, over queries
    Element* ds_right;          // [kColumns][2][kRows][part] right tiles: queries, over keys
    typename ScoreGradients<P, kPanelVectors, false>::Buffers scores;
  };

  // For panels of this many queries.
  Buffers allocate(Arena& a, int64_t queries) const {
    Buffers f;
    constexpr int64_t kPairs = kKeysOfBlock * kQueriesOfBlock;
    f.w_left = a.take<Element>(kPairs * Format::kParts);
    f.ds_left = a.take<Element>(kPairs * GradFormat::kParts);
    f.ds_right = a.take<Element>(kPairs * GradFormat::kParts);
    f.rows = {a.take<T>(queries), a.take<T>(queries), a.take<T>(queries)};
    f.minus_lse = a.take<T>(queries), f.delta = a.take<T>(queries);
    f.keys = a.take<T>(key_mask ? p.Lk : 0);
    f.scores = gradients.allocate(a, kSide);
    return f;
  }

  // Elements before the first of two tiles of a square, in w_left and ds_left, and in ds_right.
  template <class Of>
  static int64_t left_of(int64_t row, int64_t column) {
    return (2 * row * kColumns + column) * kTiles<Of>;
  }
  static int64_t right_of(int64_t row, int64_t column) {
    return (2 * column * kRows + row) * kTiles<GradFormat>;
  }

  // Reads the row scales and delta of queries [i0, i1) of a head; rows past the end get weight 0.
  // True if the weights of all queries are 2^(exponent S - lse).
  bool take_rows(Buffers& f, int64_t b, int64_t h, int64_t i0, int64_t i1,
                 const PreparedRows<T>& prepared) const {
    const int64_t row = (b * p.Hq + h) * p.Lq;
    const RowScale<T> from = prepared.rows.at(row);
    bool direct = plain;
    for (int64_t n = 0; n < round_up(i1 - i0, kSide); ++n) {
      scale_from_lse(rule, -kInf<double>, f.rows.at(n));  // past the end: weight 0
      f.delta[n] = T(0), f.minus_lse[n] = -kInf<T>;
      const int64_t i = i0 + n;
      if (i >= i1 || from.high[i] == kInf<T>) continue;
      if (p.sinks != nullptr && sees_only_sink(p, rule, b, h, i)) continue;
      f.rows.high[n] = from.high[i], f.rows.low[n] = from.low[i];
      f.rows.inverse[n] = from.inverse[i];
      f.delta[n] = prepared.delta[row + i];
      const double lse = static_cast<double>(from.high[i]) + from.low[i];
      f.minus_lse[n] = kExact ? -from.low[i] * rule.exponent : static_cast<T>(-lse * rule.exponent);
      const T size = from.high[i] * rule.unit;
      direct = direct && -kDirectLse < size && size < kDirectLse && f.delta[n] - f.delta[n] == 0;
    }
    return direct;
  }
  // What the queries of a panel add to the gradient of their head's sink.
  double of_sink(const Buffers& f, int64_t b, int64_t h, Range queries) const {
    return sink_gradient(p, rule, b, h, queries, f.rows, f.delta);
  }

  // The keys of a range that some query of a head may see, by its mask of keys.
  Range seen_keys(Buffers& f, int64_t b, int64_t h, Range keys) const {
    if (!key_mask) return keys;
    read_mask_row(p, b, h, 0, 0, p.Lk, f.keys);
    return trim(f.keys, keys);
  }
  // Whether the key mask excludes all keys of a range.
  bool excludes(const Buffers& f, Range keys) const {
    return key_mask && all_excluded(f.keys + keys.begin, keys.end - keys.begin);
  }

  // Clears w and ds of a square, whose pairs are all hidden.
  void clear(Buffers& f, int row, int column) const {
    const Operands to = operands_of(f, row, column);
    for (int half = 0; half < 2; ++half) {
      __builtin_memset(to.w + half * kColumns * kTiles<Format>, 0, bytes_of<Format>());
      __builtin_memset(to.ds + half * kColumns * kTiles<GradFormat>, 0, bytes_of<GradFormat>());
      __builtin_memset(to.ds_right + half * kRows * kTiles<GradFormat>, 0, bytes_of<GradFormat>());
    }
  }

  // Chooses the method of a square, and its visible pairs. False if the mask excludes all of them.
  bool choose_method(Buffers& f, const Block& x, Square& s) const {
    const Range keys = x.keys(s.row);
    const int64_t i = x.i0 + kSide * s.column, end = x.end_of(s.column);
    const int64_t nk = keys.end - keys.begin;
    Coverage pairs = Coverage::all;
    if (has_bias_of_pairs(p))
      pairs = pack_bias(p, x.b, x.h, i, end, keys.begin, keys.end, kSide, s.bias);
    if (pairs == Coverage::none || excludes(f, keys)) return false;
    s.biased = pairs == Coverage::some;
    s.method = Method::options;
    if (!x.direct) return true;
    const Range all = visible_to_all(p, i, end);
    const bool edge = nk < kSide || end - i < kSide || keys.begin < all.begin || keys.end > all.end;
    s.method = edge || key_mask || s.biased ? Method::masked : Method::direct;
    if (s.method == Method::direct) return true;
    uint32_t any = 0;
    for (int64_t r = 0; r < kSide; ++r) {
      const int64_t j = keys.begin + r;
      s.visible[r] = 0;
      if (r >= nk || (key_mask && f.keys[j] == -kInf<T>)) continue;
      const Range seeing = seeing_any(p, j, j + 1);
      s.visible[r] = first_bits(min_of(end, seeing.end) - i) & ~first_bits(seeing.begin - i);
      if (s.biased) s.visible[r] &= not_excluded(s.bias + r * kSide);
      any |= s.visible[r];
    }
    return any != 0;
  }

  // From S and dP of a square to its tiles of W and dS.
  void weigh(Buffers& f, const Block& x, Square& s) const {
    if (s.method == Method::direct) return weigh_directly<false>(f, x, s);
    if (s.method == Method::masked) return weigh_directly<true>(f, x, s);
    const Range keys = x.keys(s.row);
    const int64_t nk = keys.end - keys.begin, n = x.first + kSide * s.column;
    Bias<T> bias;
    if (key_mask) bias.keys = f.keys + keys.begin;
    if (s.biased) bias.tile = s.bias;
    f.scores.s = s.s, f.scores.ds = s.dp;
    gradients.run(f.scores, x.b, x.h, x.i0 + kSide * s.column, x.end_of(s.column), keys, bias,
                  {f.rows.at(n), f.delta + n, f.delta + n});
    for (int64_t at = nk * kSide; at < kSquare; at += W) {
      store(s.s + at, VecF{});
      store(s.dp + at, VecF{});
    }
    // A lane past the last query may be NaN where K is not finite, and the sums are over all lanes.
    const T queries = static_cast<T>(x.end_of(s.column) - (x.i0 + kSide * s.column));
    const auto quiet = [&](const T* from,
                           int c) __attribute__((always_inline)) {  // see rounded_above
      const VecF v = select<T>(iota<T>() + T(16 * c) < queries, load(from), VecF{});
      return select<T>(v == v, v, splat<T>(__builtin_nanf("")));
    };
    const Operands to = operands_of(f, s.row, s.column);
    for (int i = 0; i < 16; ++i) {
      VecF w[2][2], ds[2][2];
      FASTATTN_UNROLL for (int r = 0; r < 2; ++r) FASTATTN_UNROLL for (int c = 0; c < 2; ++c) {
        const int64_t at = (16 * r + i) * kSide + 16 * c;
        w[r][c] = quiet(s.s + at, c), ds[r][c] = quiet(s.dp + at, c);
      }
      keep(to, i, w, ds);
    }
  }

 private:
  const Sequence& p;
  const ScoreRule<T> rule;
  const bool key_mask, plain;
  const ScoreGradients<P, kPanelVectors, false> gradients;

  // The largest weight, of a row with a single kept pair, is stored below 2^15.
  static T scale_of_weights(const Sequence& p) {
    int exponent;
    __builtin_frexp(make_dropout(p).factor, &exponent);
    return static_cast<T>(__builtin_ldexp(1.0, 15 - exponent));
  }

  // The queries whose bias is not -inf, as bits.
  static FASTATTN_INLINE uint32_t not_excluded(const T* bias) {
    const __m512 excluded = _mm512_set1_ps(-kInf<T>);
    const uint32_t low = _mm512_cmp_ps_mask((__m512)load(bias), excluded, _CMP_NEQ_UQ);
    const uint32_t high = _mm512_cmp_ps_mask((__m512)load(bias + W), excluded, _CMP_NEQ_UQ);
    return low | high << 16;
  }

  // P = 2^(exponent S - lse), dS = P o (dP - delta). In fp32 the log-sum-exp is two numbers,
  // because the rounding of one would be an error of the weights.
  template <bool kMasked>
  __attribute__((noinline)) void weigh_directly(Buffers& f, const Block& x, const Square& s) const {
    const int64_t n = x.first + kSide * s.column;
    const Operands to = operands_of(f, s.row, s.column);
    const T exponent = rule.exponent;
    const VecF minus_lse[2] = {load(f.minus_lse + n), load(f.minus_lse + n + W)};
    const VecF delta[2] = {load(f.delta + n), load(f.delta + n + W)};
    VecF high[2] = {};
    if constexpr (kExact) high[0] = load(f.rows.high + n), high[1] = load(f.rows.high + n + W);
    _Pragma("GCC unroll 2") for (int i = 0; i < 16; ++i) {
      VecF w[2][2], ds[2][2];
      FASTATTN_UNROLL for (int r = 0; r < 2; ++r) FASTATTN_UNROLL for (int c = 0; c < 2; ++c) {
        const int64_t at = (16 * r + i) * kSide + 16 * c;
        w[r][c] = exp2_any<P::kCoarseExp>((load(s.s + at) - high[c]) * exponent + minus_lse[c]);
        ds[r][c] = w[r][c] * (load(s.dp + at) - delta[c]);
        if constexpr (kMasked) {  // an excluded value may be NaN, and 0 * NaN must not pass
          const __mmask16 visible = static_cast<__mmask16>(s.visible[16 * r + i] >> 16 * c);
          w[r][c] = (VecF)_mm512_maskz_mov_ps(visible, (__m512)w[r][c]);
          ds[r][c] = (VecF)_mm512_maskz_mov_ps(visible, (__m512)ds[r][c]);
        }
      }
      keep(to, i, w, ds);
    }
  }

  // Where a square's W and dS are operands: in w_left, ds_left and ds_right. Copied from the
  // buffers, because the compiler reads these again after every store.
  struct Operands {
    Element *w, *ds, *ds_right;
  };
  static FASTATTN_INLINE Operands operands_of(const Buffers& f, int64_t row, int64_t column) {
    return {f.w_left + left_of<Format>(row, column), f.ds_left + left_of<GradFormat>(row, column),
            f.ds_right + right_of(row, column)};
  }
  template <class Of>
  static constexpr size_t bytes_of() {
    return static_cast<size_t>(kTiles<Of>) * sizeof(Element);
  }
  // Stores the rows i and i + 16 of W and dS, w[half of the keys][half of the queries].
  FASTATTN_INLINE void keep(const Operands& to, int64_t i, const VecF (&w)[2][2],
                            const VecF (&ds)[2][2]) const {
    FASTATTN_UNROLL for (int64_t half = 0; half < 2; ++half) {
      const int64_t left = half * kColumns;
      const auto stored = [&](VecF x) __attribute__((always_inline)) {
        return Format::kNarrow ? x * weight_scale : x;
      };
      keep_parts<Format>(stored(w[half][0]), stored(w[half][1]),
                         to.w + left * kTiles<Format> + i * kStep);
      keep_parts<GradFormat>(ds[half][0], ds[half][1],
                             to.ds + left * kTiles<GradFormat> + i * kStep);
      keep_parts<GradFormat>(ds[0][half], ds[1][half],
                             to.ds_right + half * kRows * kTiles<GradFormat> + i * kStep);
    }
  }

  // Splits two vectors into bf16 parts and stores them.
  template <class Of>
  static FASTATTN_INLINE void keep_parts(VecF a, VecF b, Element* to) {
    __m512i parts[Of::kParts];
    Of::split_pairs(a, b, parts);
    FASTATTN_UNROLL for (int part = 0; part < Of::kParts; ++part)
        _mm512_storeu_si512(to + part * kTileElements, parts[part]);
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
