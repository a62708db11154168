// Additive attention:  O = dropout(softmax(E + mask)) V  with the scores of additive_attention.h.
//
// A block of queries meets all its keys before the softmax: a row of scores is complete, so that
// forward and backward compute the same probabilities the same way, and nothing has to be kept for
// the backward pass but the operands. With D = dropout(dO V^T + dW):
//
//   G = P o (D - sum_j P D)           d mask = G             dV = W^T dO
//   h_ija = G_ij (1 - t_ija^2) / 4    dq = 4 v o sum_j h     dk = 4 v o sum_i h
//   dv = sum_ij G_ij t_ija            dbias = sum_i dq
//
// Rows of dq belong to a block of queries. dk, dV, dv and dbias are summed over the blocks of a
// chunk of queries in order, and over the chunks (see AdditiveParams) in order, whoever ran them.
#include "additive_attention.h"

#include "../threads.h"
#include "blocks.h"
#include "mask.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kQueries = 64, kKeys = 64;  // of a block: 64 KiB each at A = 256
constexpr int64_t kChain = 256;               // the longest chain of additions in a product

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

template <class P>
class Additive {
  typedef typename P::Storage Storage;
  typedef typename P::Acc T;
  static constexpr int W = kLanes<T>;
  static constexpr bool kCoarse = sizeof(Storage) == 2;
  static constexpr int kScoreQueries = W == 16 ? 4 : W == 2 ? 1 : 2;
  static constexpr int kGradientQueries = kRegisters == 32 ? 4 : 2;
  static constexpr int kMostQueries = max_of(kScoreQueries, kGradientQueries);
  static constexpr int kVectors = 2;  // of the output tiles
  static constexpr int64_t kPanelRows = kQueries + 1;
  static constexpr int64_t kPanel = kPanelRows * W;
  static_assert(kQueries == kKeys, "one stride of panels");

 public:
  explicit Additive(const AdditiveParams& params)
      : x(params),
        p(params.attention),
        dropout(make_dropout(params.attention)),
        panels((p.D + W - 1) / W),
        columns(round_up(p.Dv, kVectors * W)),
        ld(leading(p.Lk)),
        excludes(p.mask.data != nullptr || p.window_right >= 0),
        key_mask(is_key_mask(p)) {}

  void forward() {
    const int64_t blocks = (p.Lq + kQueries - 1) / kQueries, tasks = p.B * blocks;
    const int team = team_size(p.threads, tasks, 20.0 * p.B * p.Lq * p.Lk * (p.D + p.Dv));
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Buffers f = allocate(thread_scratch(allocate(nullptr).bytes));
      prepare_vectors(f);
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < tasks; ++t) {
        const int64_t i0 = t % blocks * kQueries;
        forward_block(f, {t / blocks, i0, min_of(p.Lq, i0 + kQueries)});
      }
    }
  }

  void backward() {
    const int64_t tasks = p.B * x.chunks;
    const int team = team_size(p.threads, max_of(tasks, p.B * p.Lk / kKeys),
                               40.0 * p.B * p.Lq * p.Lk * (p.D + p.Dv));
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Buffers f = allocate(thread_scratch(allocate(nullptr).bytes));
      prepare_vectors(f);
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < tasks; ++t) chunk(f, t / x.chunks, t % x.chunks);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < (x.direct ? 0 : p.B * p.Lk); ++row)
        finish_key(row / p.Lk, row % p.Lk);
    }
    finish_vectors();
    if (p.grad_mask.data != nullptr) sum_grad_mask();
  }

 private:
  const AdditiveParams& x;
  const AttentionParams& p;
  const DropoutRule dropout;
  const int64_t panels, columns, ld;
  const bool excludes, key_mask;

  // Queries [begin, end) of one batch entry.
  struct Block {
    int64_t b, begin, end;
  };

  struct Buffers {
    T* v;            // [panels][lanes], zero beyond A
    T* b;            // [panels][lanes] the bias, zero beyond A
    T limit;         // of max|q| + max|k| for the factored form
    T* q;            // [panels][kQueries + 1][lanes] queries
    T* eq;           // e^2(q + b)
    T* k;            // [panels][kKeys + 1][lanes] keys, or e^2k
    T* s;            // [kQueries][ld] scores, probabilities, weights
    T* o;            // [kQueries][columns] outputs; in the backward pass their gradients
    T* values;       // [kKeys][columns], or [Dv][kKeys]
    T* keys;         // [ld] a mask of keys
    T* bias;         // [ld] a row of a mask
    uint32_t* keep;  // [kKeys][kQueries]
    // backward only
    T* d;   // [kQueries][ld] gradients of probabilities, then of scores
    T* dq;  // as q
    T* dk;  // as k
    T* dv;  // [panels][lanes]
    T query_top;
    size_t bytes;
  };

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

  // Rows of scores: whole blocks of keys, and not a multiple of the page size apart.
  static int64_t leading(int64_t keys) {
    const int64_t n = round_up(keys, kKeys);
    return n * static_cast<int64_t>(sizeof(T)) % 4096 == 0 ? n + 16 : n;
  }

  const Storage* row(const Tensor4& t, int64_t b, int64_t i) const {
    return static_cast<const Storage*>(t.data) + b * t.stride[0] + i * t.stride[2];
  }

  // ---- Staging ---------------------------------------------------------------------------------

  // v and the bias, padded, and what of the limit they leave to queries and keys.
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

  // `rows` rows, and zeros up to `to` of them, which tiles read -> panels
  // dst[a / lanes][row][a % lanes]; returns the largest magnitude, inf if one is not finite.
  T stage(const Storage* src, const int64_t* stride, int64_t rows, int64_t to, T* dst) const {
    Vec<T> top{}, finite{};
    for (int64_t r = 0; r < to; ++r) {
      const Storage* from = src + r * stride[2];
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
        store(dst + n * kPanel + r * W, u);
        top = max_of(top, max_of(u, -u));
        finite += u - u;  // NaN from here on if u is not finite
      }
    }
    return sum_lanes<T>(finite) == T(0) ? max_lanes<T>(top) : kInf<T>;
  }

  void exponentials(const T* from, int64_t rows, T* to) const {
    for (int64_t n = 0; n < panels * kPanel; n += kPanel)
      for (int64_t r = 0; r < rows; ++r)
        store(to + n + r * W, exp_twice<T>(load(from + n + r * W)));
  }

  void stage_queries(Buffers& f, Block q) const {
    const int64_t rows = q.end - q.begin, to = rows == 1 ? 1 : round_up(rows, kMostQueries);
    f.query_top = stage(row(p.q, q.b, q.begin), p.q.stride, rows, to, f.q);
    if (!(f.query_top <= f.limit)) return;
    exponentials(f.q, to, f.eq);
    if (x.bias == nullptr) return;
    // e^2(q + b) as a product: a sum of large q and b would be rounded before it meets k.
    for (int64_t n = 0; n < panels; ++n) {
      const Vec<T> eb = exp_twice<T>(load(f.b + n * W));
      for (int64_t r = 0; r < to; ++r) {
        T* const e = f.eq + n * kPanel + r * W;
        store(e, load(e) * eb);
      }
    }
  }

  // Whether the block is in its factored form, e^2k.
  bool stage_keys_block(Buffers& f, int64_t b, int64_t j0, int64_t rows) const {
    const int64_t to = round_up(rows, W);
    const T top = stage(row(p.k, b, j0), p.k.stride, rows, to, f.k);
    if (!(f.query_top + top <= f.limit)) return false;
    exponentials(f.k, to, f.k);
    return true;
  }

  // ---- Probabilities ---------------------------------------------------------------------------

  // The keys that any of the queries may see, their beginning rounded down to a block.
  Range visible(Buffers& f, Block q) const {
    Range range = visible_to_any(p, q.begin, q.end);
    if (key_mask) {
      read_mask_row(p, q.b, 0, 0, 0, p.Lk, f.keys);
      range = trim(f.keys, range);
    }
    return {range.begin / kKeys * kKeys, range.end};
  }

  // S = P over the range, zero from there to the end of the last block.
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

  // The last of the rows may lie beyond the queries, and the last columns beyond the keys: they are
  // computed from zeros.
  template <int kQ>
  __attribute__((noinline)) void scores(Buffers& f, Block q, int64_t j0, int64_t j1) const {
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

  __attribute__((noinline)) void exact_scores(Buffers& f, Block q, int64_t j0, int64_t j1) const {
    for (int64_t i = q.begin; i < q.end; ++i) {
      const int64_t end = min_of(j1, visible_to_any(p, i, i + 1).end);
      for (int64_t j = j0; j < end; ++j)
        f.s[(i - q.begin) * ld + j] = score_exactly<T>(
            f.q + (i - q.begin) * W, kPanel, f.k + (j - j0) * W, kPanel, f.b, f.v, panels);
    }
  }

  // P_ij = exp(S_ij + mask_ij - max) / sum; a row that sees nothing is 0.
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
        const Vec<T> b = load_first(bias + j, count);  // selected: an excluded NaN must not survive
        store(s + j, select<T>(b == minus_inf, minus_inf, load(s + j) + b));
      }
    }
    // The maximum may miss a NaN, the sum does not.
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

  // M = M where kept, times the factor, else 0, for rows of the queries.
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

  // ---- Forward ---------------------------------------------------------------------------------

  void forward_block(Buffers& f, Block q) const {
    const int64_t rows = q.end - q.begin;
    const Range range = visible(f, q);
    probabilities(f, q, range);
    if (p.dropout_p > 0) drop(f, q, range, f.s);
    if (x.wants_weights) write_weights(f, q, range);
    clear(f.o, rows * columns);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys)
      add_values(f, q, j0, min_of(kKeys, range.end - j0));
    for (int64_t i = 0; i < rows; ++i) {
      Storage* const out = const_cast<Storage*>(row(p.out, q.b, q.begin + i));
      for (int64_t d = 0; d < p.Dv; d += W)
        store_as<T>(out + d, load(f.o + i * columns + d),
                    static_cast<int>(min_of<int64_t>(W, p.Dv - d)));
    }
  }

  // O += P V of a block of keys.
  void add_values(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    const Storage* v = row(p.v, q.b, j0);
    const int64_t* st = p.v.stride;
    const int64_t rows = q.end - q.begin;
    if (excludes && !all_finite(v, st[2], st[3], keys, p.Dv)) {  // 0 * NaN must not reach a query
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < keys; ++j) {
          const T weight = f.s[i * ld + j0 + j];
          if (weight == T(0)) continue;
          for (int64_t d = 0; d < p.Dv; ++d)
            f.o[i * columns + d] += weight * static_cast<T>(widen(v[j * st[2] + d * st[3]]));
        }
      }
      return;
    }
    stage_rows<T>(v, st[2], st[3], keys, p.Dv, f.values, columns);
    for (int64_t d = 0; d < columns; d += kVectors * W)
      tile_rows<P, P::kOutputRows, kVectors, false>(
          rows, f.s + j0, ld, f.values + d, columns, keys, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t i, int n, Vec<T> sum) __attribute__((always_inline)) {
            T* const o = f.o + i * columns + d + n * W;
            store(o, load(o) + sum);
          });
  }

  void write_weights(const Buffers& f, Block q, Range range) const {
    for (int64_t i = q.begin; i < q.end; ++i) {
      Storage* const to = const_cast<Storage*>(row(p.weights, q.b, i));
      const T* const from = f.s + (i - q.begin) * ld;
      for (int64_t j = 0; j < p.Lk; ++j)
        narrow(j >= range.begin && j < range.end ? from[j] : T(0), to + j);
    }
  }

  // ---- Backward --------------------------------------------------------------------------------

  struct Part {
    T *dk, *dvalue, *vector, *bias;  // [Lk][D], [Lk][Dv], [D], [D]
  };
  Part part(int64_t b, int64_t c) const {
    const int64_t n = b * x.chunks + c, keys = p.Lk * p.D, values = p.Lk * p.Dv;
    Part to;
    to.vector = static_cast<T*>(x.parts) + n * 2 * p.D;
    to.bias = to.vector + p.D;
    to.dk = static_cast<T*>(x.parts) + p.B * x.chunks * 2 * p.D + n * (keys + values);
    to.dvalue = to.dk + keys;
    if (x.direct) {  // both are contiguous
      to.dk = static_cast<T*>(p.grad_k.data) + b * keys;
      to.dvalue = static_cast<T*>(p.grad_v.data) + b * values;
    }
    return to;
  }

  static void clear(T* to, int64_t count) {
    __builtin_memset(to, 0, static_cast<size_t>(count) * sizeof(T));
  }

  void chunk(Buffers& f, int64_t b, int64_t c) const {
    const Part to = part(b, c);
    clear(to.dk, p.Lk * p.D);
    clear(to.dvalue, p.Lk * p.Dv);
    clear(to.vector, 2 * p.D);
    const int64_t end = min_of(p.Lq, (c + 1) * x.chunk_rows);
    for (int64_t i0 = c * x.chunk_rows; i0 < end; i0 += kQueries)
      backward_block(f, {b, i0, min_of(end, i0 + kQueries)}, to);
  }

  void backward_block(Buffers& f, Block q, const Part& to) const {
    const int64_t rows = q.end - q.begin;
    const Range range = visible(f, q);
    probabilities(f, q, range);
    stage_rows<T>(row(p.grad_out, q.b, q.begin), p.grad_out.stride[2], p.grad_out.stride[3], rows,
                  p.Dv, f.o, columns);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys)
      grad_probabilities(f, q, j0, min_of(kKeys, range.end - j0));
    if (p.dropout_p > 0) drop(f, q, range, f.d);
    const int64_t padded = range.begin + round_up(range.end - range.begin, kKeys);
    for (int64_t i = 0; i < rows; ++i) grad_scores(f.s + i * ld, f.d + i * ld, range);
    for (int64_t i = rows; i < round_up(rows, kGradientQueries); ++i)
      for (int64_t j = range.begin; j < padded; ++j) f.d[i * ld + j] = T(0);
    if (x.grad_scores != nullptr) write_grad_scores(f, q, range);
    if (p.dropout_p > 0) drop(f, q, range, f.s);  // P -> W

    clear(f.dq, panels * kPanel);
    clear(f.dv, panels * W);
    const bool leaky = excludes && !all_finite(f.o, columns, 1, rows, p.Dv);
    for (int64_t j0 = range.begin; j0 < range.end; j0 += kKeys) {
      const int64_t keys = min_of(kKeys, range.end - j0);
      clear(f.dk, panels * kPanel);
      if (!stage_keys_block(f, q.b, j0, keys))
        exact_gradients(f, q, j0, keys);
      else if (rows == 1)
        gradients<1>(f, q, j0, keys);
      else
        gradients<kGradientQueries>(f, q, j0, keys);
      add_panels(f.dk, keys, to.dk + j0 * p.D);
      add_grad_values(f, rows, j0, keys, leaky, to.dvalue + j0 * p.Dv);
    }
    finish_queries(f, q, to);
  }

  // D = dO V^T + dW of a block of keys.
  void grad_probabilities(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    const int64_t rows = q.end - q.begin, *st = p.v.stride;
    pack_transposed<T>(row(p.v, q.b, j0), st[2], st[3], keys, p.Dv, kKeys, f.values, kKeys);
    for (int64_t j = 0; j < kKeys; j += kVectors * W) {
      const auto to = [&](int64_t i, int n)
                          __attribute__((always_inline)) { return f.d + i * ld + j0 + j + n * W; };
      const auto zero = [](int64_t, int) { return Vec<T>{}; };
      const auto put = [&](int64_t i, int n, Vec<T> sum)
                           __attribute__((always_inline)) { store(to(i, n), sum); };
      const auto add = [&](int64_t i, int n, Vec<T> sum) __attribute__((always_inline)) {
        store(to(i, n), load(to(i, n)) + sum);
      };
      tile_rows<P, P::kOutputRows, kVectors, false>(rows, f.o, columns, f.values + j, kKeys,
                                                    min_of(p.Dv, kChain), zero, put);
      for (int64_t c = kChain; c < p.Dv; c += kChain)
        tile_rows<P, P::kOutputRows, kVectors, false>(rows, f.o + c, columns,
                                                      f.values + c * kKeys + j, kKeys,
                                                      min_of(p.Dv - c, kChain), zero, add);
    }
    if (p.grad_weights.data == nullptr) return;
    for (int64_t i = 0; i < rows; ++i) {
      const Storage* dw = row(p.grad_weights, q.b, q.begin + i) + j0 * p.grad_weights.stride[3];
      for (int64_t j = 0; j < keys; ++j)
        f.d[i * ld + j0 + j] += static_cast<T>(widen(dw[j * p.grad_weights.stride[3]]));
    }
  }

  // D -> G of one row, 0 where P is 0.
  static void grad_scores(const T* s, T* d, Range range) {
    const int64_t end = range.begin + round_up(range.end - range.begin, kKeys);
    Vec<T> delta{};
    for (int64_t j = range.begin; j < end; j += W) {
      const Vec<T> w = load(s + j);
      delta += select<T>(w == T(0), Vec<T>{}, w * load(d + j));
    }
    const T mean = sum_lanes<T>(delta);
    for (int64_t j = range.begin; j < end; j += W) {
      const Vec<T> w = load(s + j);
      store(d + j, select<T>(w == T(0), Vec<T>{}, w * (load(d + j) - mean)));
    }
  }

  void write_grad_scores(const Buffers& f, Block q, Range range) const {
    for (int64_t i = q.begin; i < q.end; ++i) {
      T* const to = static_cast<T*>(x.grad_scores) + (q.b * p.Lq + i) * p.Lk;
      for (int64_t j = 0; j < p.Lk; ++j)
        to[j] = j >= range.begin && j < range.end ? f.d[(i - q.begin) * ld + j] : T(0);
    }
  }

  template <int kQ>
  __attribute__((noinline)) void gradients(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    for (int64_t n = 0; n < panels; ++n) {
      for (int64_t i = q.begin; i < q.end; i += kQ) {
        const int64_t seen = visible_to_any(p, i, min_of(q.end, i + kQ)).end;
        const int64_t count = round_up(max_of<int64_t>(0, min_of(keys, seen - j0)), 2);
        const int64_t at = n * kPanel + (i - q.begin) * W;
        gradient_tile<T, kCoarse, kQ>(f.eq + at, f.k + n * kPanel, f.d + (i - q.begin) * ld + j0,
                                      ld, count, f.dq + at, f.dk + n * kPanel, f.dv + n * W);
      }
    }
  }

  void exact_gradients(Buffers& f, Block q, int64_t j0, int64_t keys) const {
    for (int64_t n = 0; n < panels; ++n) {
      for (int64_t i = q.begin; i < q.end; ++i) {
        const int64_t at = n * kPanel + (i - q.begin) * W;
        gradient_exactly<T>(f.q + at, f.k + n * kPanel, f.b + n * W, f.d + (i - q.begin) * ld + j0,
                            keys, f.dq + at, f.dk + n * kPanel, f.dv + n * W);
      }
    }
  }

  // to[row][a] += 4 v_a from[panel][row][lane]
  void add_panels(const T* from, int64_t rows, T* to) const {
    const T* v = static_cast<const T*>(x.vector);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < panels; ++n) {
        const int count = static_cast<int>(min_of<int64_t>(W, p.D - n * W));
        T* const at = to + r * p.D + n * W;
        const Vec<T> h = load(from + n * kPanel + r * W);
        store_first(at, load_first(at, count) + T(4) * load_first(v + n * W, count) * h, count);
      }
    }
  }

  // dV += W^T dO of a block of keys.
  void add_grad_values(const Buffers& f, int64_t rows, int64_t j0, int64_t keys, bool leaky,
                       T* to) const {
    if (leaky) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < keys; ++j) {
          const T weight = f.s[i * ld + j0 + j];
          if (weight == T(0)) continue;
          for (int64_t d = 0; d < p.Dv; ++d) to[j * p.Dv + d] += weight * f.o[i * columns + d];
        }
      }
      return;
    }
    for (int64_t d = 0; d < columns; d += kVectors * W)
      tile_rows<P, P::kOutputRows, kVectors, true>(
          keys, f.s + j0, ld, f.o + d, columns, rows, [](int64_t, int) { return Vec<T>{}; },
          [&](int64_t j, int n, Vec<T> sum) __attribute__((always_inline)) {
            const int count = static_cast<int>(min_of<int64_t>(W, p.Dv - d - n * W));
            if (count <= 0) return;
            T* const at = to + j * p.Dv + d + n * W;
            store_first(at, load_first(at, count) + sum, count);
          });
  }

  // dq of the block, and what it gives to dv and dbias.
  void finish_queries(const Buffers& f, Block q, const Part& to) const {
    for (int64_t n = 0; n < panels; ++n) {
      const int count = static_cast<int>(min_of<int64_t>(W, p.D - n * W));
      const Vec<T> factor = T(4) * load(f.v + n * W);
      Vec<T> sum[4] = {};  // short chains of additions: errors do not cancel as the terms do
      for (int64_t i = q.begin; i < q.end; ++i) {
        const Vec<T> g = factor * load(f.dq + n * kPanel + (i - q.begin) * W);
        store_as<T>(const_cast<Storage*>(row(p.grad_q, q.b, i)) + n * W, g, count);
        sum[i % 4] += g;
      }
      T *const bias = to.bias + n * W, *const vector = to.vector + n * W;
      store_first(bias, load_first(bias, count) + ((sum[0] + sum[1]) + (sum[2] + sum[3])), count);
      store_first(vector, load_first(vector, count) + load(f.dv + n * W), count);
    }
  }

  // The chunks' parts of one key's gradients, in order.
  void finish_key(int64_t b, int64_t j) const {
    const auto sum = [&](T* Part::* which, int64_t width, const Tensor4& grad) {
      Storage* const to = const_cast<Storage*>(row(grad, b, j));
      for (int64_t d = 0; d < width; d += W) {
        const int count = static_cast<int>(min_of<int64_t>(W, width - d));
        Vec<T> g{};
        for (int64_t c = 0; c < x.chunks; ++c)
          g += load_first(part(b, c).*which + j * width + d, count);
        store_as<T>(to + d, g, count);
      }
    };
    sum(&Part::dk, p.D, p.grad_k);
    sum(&Part::dvalue, p.Dv, p.grad_v);
  }

  void finish_vectors() const {
    T *vector = static_cast<T*>(x.grad_vector), *bias = static_cast<T*>(x.grad_bias);
    for (int64_t a = 0; a < p.D; ++a) {
      double to_vector = 0, to_bias = 0;
      for (int64_t b = 0; b < p.B; ++b) {
        for (int64_t c = 0; c < x.chunks; ++c) {
          const Part from = part(b, c);
          to_vector += from.vector[a];
          to_bias += from.bias[a];
        }
      }
      vector[a] = static_cast<T>(to_vector);
      bias[a] = static_cast<T>(to_bias);
    }
  }

  // The gradient of a broadcast mask, in one order for any number of threads.
  void sum_grad_mask() const {
    const T* g = static_cast<const T*>(x.grad_scores);
    const int64_t* st = p.grad_mask.stride;
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t i = 0; i < p.Lq; ++i, g += p.Lk) {
        double* const to = static_cast<double*>(p.grad_mask.data) + b * st[0] + i * st[2];
        for (int64_t j = 0; j < p.Lk; ++j) to[j * st[3]] += g[j];
      }
    }
  }
};

// Scores are no product of matrices: pairs of bf16 are of no use.
template <class F>
FASTATTN_INLINE void with_arithmetic(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(Single<float>());
    case DType::f64:
      return f(Double());
    case DType::bf16:
      return f(Single<Bf16>());
    case DType::f16:
      return f(Single<F16>());
    case DType::boolean:
      return;
  }
}

}  // namespace

void additive_forward(const AdditiveParams& x) {
  if (x.attention.B == 0 || x.attention.Lq == 0) return;
  with_arithmetic(x.attention.dtype, [&](auto policy) { Additive<decltype(policy)>(x).forward(); });
}

void additive_backward(const AdditiveParams& x) {
  with_arithmetic(x.attention.dtype,
                  [&](auto policy) { Additive<decltype(policy)>(x).backward(); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
