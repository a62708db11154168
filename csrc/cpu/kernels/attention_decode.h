// Attention for a few queries on many keys (decoding): bound by reading keys and values once.
//
// The query panel of the general kernel would leave most lanes empty, so here the head dim lies
// across the lanes, all query heads that share a key head are served while its rows are in
// registers, and the keys are split into chunks of a fixed length that run in parallel and are
// merged in order. The chunk never depends on batch or threads, so neither do the bits.
#pragma once
#include "../threads.h"
#include "blocks.h"
#include "mask.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class Decode {
  typedef typename P::Storage Storage;
  typedef typename P::Acc T;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kMaxRows = 8;  // query rows served by one pass over the keys
  static constexpr int64_t kChunk = 512;  // keys of a task
  static constexpr int64_t kBlock = 64;   // keys whose scores are held at once

 public:
  // Few rows a key head, and no option that is rare in decoding.
  static bool serves(const AttentionParams& p) {
    const int64_t rows = p.Lq * (p.Hq / max_of<int64_t>(1, p.Hkv));
    return rows <= kMaxRows && p.Lq * 4 <= W && p.dropout_p == 0 && p.k.stride[3] == 1 &&
           p.v.stride[3] == 1 && p.D <= 512 && p.Dv <= 512;
  }

  explicit Decode(const AttentionParams& params)
      : p(params),
        rule(make_rule<T>(params)),
        group(params.Hq / params.Hkv),
        rows(params.Lq * group),
        dim(round_up(params.D)),
        dim_v(round_up(params.Dv)),
        chunks((params.Lk + kChunk - 1) / kChunk) {}

  void run() {
    const int64_t heads = p.B * p.Hkv, tasks = heads * max_of<int64_t>(1, chunks);
    const double flops = 2.0 * heads * rows * p.Lk * (p.D + p.Dv);
    // Merging in the task that computes all chunks of a head needs no second parallel region.
    const bool split = chunks > 1 && heads < 4 * p.threads;
    const int team = team_size(p.threads, split ? tasks : heads, 4 * flops);
    const int64_t state = rows * (dim_v + 2);
    T* partial = static_cast<T*>(
        split ? __builtin_malloc(static_cast<size_t>(tasks * state) * sizeof(T)) : nullptr);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Arena measure(nullptr);
      buffers(measure);
      Arena arena(thread_scratch(measure.used()));
      Buffers buf = buffers(arena);
      if (split) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tasks; ++t) chunk(buf, t / chunks, t % chunks, partial + t * state);
#pragma omp for schedule(static)
        for (int64_t head = 0; head < heads; ++head) {
          begin(buf.total);
          for (int64_t c = 0; c < chunks; ++c)
            merge(buf.total, partial + (head * chunks + c) * state);
          finish(buf.total, head);
        }
      } else {
#pragma omp for schedule(dynamic, 1)
        for (int64_t head = 0; head < heads; ++head) {
          begin(buf.total);
          for (int64_t c = 0; c < chunks; ++c) {
            chunk(buf, head, c, buf.part);
            merge(buf.total, buf.part);
          }
          finish(buf.total, head);
        }
      }
    }
    __builtin_free(partial);
  }

 private:
  const AttentionParams& p;
  const ScoreRule<T> rule;
  const int64_t group, rows, dim, dim_v, chunks;

  // {o [rows][dim_v], m [rows], l [rows]} is a state: O, the maximum and the sum of its
  // exponentials.
  struct Buffers {
    T* q;      // [rows][dim], zero beyond D
    T* s;      // [rows][kBlock]
    T* total;  // a state
    T* part;   // a state
  };
  Buffers buffers(Arena& a) const {
    Buffers buf;
    buf.q = a.take<T>(rows * dim);
    buf.s = a.take<T>(rows * kBlock);
    buf.total = a.take<T>(rows * (dim_v + 2));
    buf.part = a.take<T>(rows * (dim_v + 2));
    return buf;
  }
  static int64_t round_up(int64_t n) { return (n + W - 1) / W * W; }
  T* maxima(T* state) const { return state + rows * dim_v; }
  T* sums(T* state) const { return state + rows * (dim_v + 1); }

  void begin(T* state) const {
    for (int64_t i = 0; i < rows * dim_v; ++i) state[i] = T(0);
    for (int64_t r = 0; r < rows; ++r) maxima(state)[r] = -kInf<T>, sums(state)[r] = T(0);
  }

  // exponent of 2 for a maximum that may still be -inf
  T decay(T from, T to) const {
    if (from == -kInf<T>) return T(0);
    return exp2_neg(splat<T>((from - to) * rule.exponent))[0];
  }

  // total <- total and part, of two disjoint sets of keys
  void merge(T* total, T* part) const {
    for (int64_t r = 0; r < rows; ++r) {
      T &m = maxima(total)[r], &l = sums(total)[r];
      const T mp = maxima(part)[r];
      const T to = m > mp ? m : mp;
      const T a = decay(m, to), b = decay(mp, to);
      for (int64_t d = 0; d < dim_v; d += W) {
        T* o = total + r * dim_v + d;
        store(o, load(o) * a + load(part + r * dim_v + d) * b);
      }
      l = l * a + sums(part)[r] * b;
      m = to;
    }
  }

  // Row r of a key head is query r % Lq of its query head r / Lq.
  void chunk(Buffers& buf, int64_t head, int64_t c, T* state) {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv;
    begin(state);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = hk * group + r / p.Lq, i = r % p.Lq;
      const Storage* q = static_cast<const Storage*>(p.q.data) + b * p.q.stride[0] +
                         h * p.q.stride[1] + i * p.q.stride[2];
      for (int64_t d = 0; d < dim; ++d)
        buf.q[r * dim + d] = d < p.D ? static_cast<T>(widen(q[d * p.q.stride[3]])) : T(0);
    }
    const Range seen = visible_to_any(p, 0, p.Lq);
    const int64_t begin_key = max_of(c * kChunk, seen.begin),
                  end_key = min_of((c + 1) * kChunk, seen.end);
    for (int64_t j0 = begin_key; j0 < end_key; j0 += kBlock)
      block(buf, b, hk, j0, min_of(end_key, j0 + kBlock), state);
  }

  void block(Buffers& buf, int64_t b, int64_t hk, int64_t j0, int64_t j1, T* state) {
    const Storage* k =
        static_cast<const Storage*>(p.k.data) + b * p.k.stride[0] + hk * p.k.stride[1];
    const Storage* v =
        static_cast<const Storage*>(p.v.data) + b * p.v.stride[0] + hk * p.v.stride[1];
    for (int64_t j = j0; j < j1; ++j) {
      if (excluded_for_all(b, j)) {
        for (int64_t r = 0; r < rows; ++r) buf.s[r * kBlock + j - j0] = -kInf<T>;
        continue;
      }
      products(buf, k + j * p.k.stride[2], j - j0);
    }
    for (int64_t r = 0; r < rows; ++r) softmax(buf, b, hk, r, j0, j1, state);
    for (int64_t j = j0; j < j1; ++j) accumulate(buf, v + j * p.v.stride[2], j - j0, state);
  }

  // A key that padding hides from every row is not even read.
  bool excluded_for_all(int64_t b, int64_t j) const {
    if (p.mask.data == nullptr || p.mask_dtype != DType::boolean || p.mask.stride[1] != 0 ||
        !is_key_mask(p))
      return false;
    return !static_cast<const Bool*>(p.mask.data)[b * p.mask.stride[0] + j * p.mask.stride[3]].bits;
  }

  // s[r][j] = q_r . k_j, kMaxRows accumulators at a time so that a key row is loaded once
  void products(Buffers& buf, const Storage* k, int64_t j) const {
    switch (rows) {
      case 1:
        return products_of<1>(buf, k, j, 0);
      case 2:
        return products_of<2>(buf, k, j, 0);
      case 4:
        return products_of<4>(buf, k, j, 0);
      case 8:
        return products_of<8>(buf, k, j, 0);
      default:
        for (int64_t r = 0; r < rows; ++r) products_of<1>(buf, k, j, r);
    }
  }
  template <int R>
  FASTATTN_INLINE void products_of(Buffers& buf, const Storage* k, int64_t j, int64_t r0) const {
    Vec<T> acc[R], tail[R];
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) acc[r] = tail[r] = Vec<T>{};
    int64_t d = 0;
    for (; d + 2 * W <= p.D; d += 2 * W) {
      const Vec<T> x = load_as<T>(k + d, W), y = load_as<T>(k + d + W, W);
      FASTATTN_UNROLL for (int r = 0; r < R; ++r) {
        acc[r] += load(buf.q + (r0 + r) * dim + d) * x;
        tail[r] += load(buf.q + (r0 + r) * dim + d + W) * y;
      }
    }
    for (; d < p.D; d += W) {
      const Vec<T> x = load_as<T>(k + d, static_cast<int>(min_of<int64_t>(W, p.D - d)));
      FASTATTN_UNROLL for (int r = 0; r < R; ++r) acc[r] += load(buf.q + (r0 + r) * dim + d) * x;
    }
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) buf.s[(r0 + r) * kBlock + j] =
        sum_lanes<T>(acc[r] + tail[r]);
  }

  // Scores of one row, keys across lanes: the rule, the new maximum, the probabilities in place.
  void softmax(Buffers& buf, int64_t b, int64_t hk, int64_t r, int64_t j0, int64_t j1,
               T* state) const {
    const int64_t h = hk * group + r / p.Lq, i = r % p.Lq;
    T* s = buf.s + r * kBlock;
    for (int64_t x = j1 - j0; x < kBlock; ++x) s[x] = -kInf<T>;
    if (rule.natural || rule.excludes) score_row(s, b, h, i, j0, j1);
    Vec<T> top = load(s);
    FASTATTN_UNROLL for (int64_t x = W; x < kBlock; x += W) top = max_of(top, load(s + x));
    T &m = maxima(state)[r], &l = sums(state)[r];
    const T block_max = max_lanes<T>(top);
    const T after = m > block_max ? m : block_max;
    const T reference = after == -kInf<T> ? T(0) : after;
    const T alpha = decay(m, reference);
    Vec<T> sum{};
    FASTATTN_UNROLL for (int64_t x = 0; x < kBlock; x += W) {
      const Vec<T> e = exp2_neg((load(s + x) - reference) * rule.exponent);
      sum += e;
      store(s + x, e);
    }
    l = l * alpha + sum_lanes<T>(sum);
    m = after;
    if (alpha == T(1)) return;
    T* o = state + r * dim_v;
    for (int64_t d = 0; d < dim_v; d += W) store(o + d, load(o + d) * alpha);
  }

  void score_row(T* s, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t j1) const {
    const Range seen = visible_to_any(p, i, i + 1);
    T bias[kBlock];
    if (p.mask.data != nullptr) read_mask_row(p, b, h, i, j0, j1, bias);
    const T slope = alibi_slope<T>(p, b, h);
    for (int64_t j = j0; j < j1; ++j) {
      T x = s[j - j0];
      if (rule.natural) x *= rule.scale;
      if (rule.softcap > 0) x = rule.softcap * tanh_of<T>(splat<T>(x / rule.softcap))[0];
      if (p.mask.data != nullptr) {
        const T add = bias[j - j0];
        x = add == -kInf<T> ? -kInf<T> : (rule.natural ? x + add : x);
      }
      const int64_t distance = i + p.offset - j;
      if (slope != T(0)) x -= slope * static_cast<T>(distance < 0 ? -distance : distance);
      s[j - j0] = j >= seen.begin && j < seen.end ? x : -kInf<T>;
    }
  }

  // o_r += p_rj v_j; a weight of zero adds nothing, whatever the value
  void accumulate(Buffers& buf, const Storage* v, int64_t j, T* state) const {
    bool any = false;
    for (int64_t r = 0; r < rows; ++r) any |= buf.s[r * kBlock + j] != T(0);
    if (!any) return;
    for (int64_t d = 0; d < p.Dv; d += W) {
      const Vec<T> x = load_as<T>(v + d, static_cast<int>(min_of<int64_t>(W, p.Dv - d)));
      for (int64_t r = 0; r < rows; ++r) {
        const T weight = buf.s[r * kBlock + j];
        if (rule.excludes && weight == T(0)) continue;
        T* o = state + r * dim_v + d;
        store(o, load(o) + x * weight);
      }
    }
  }

  void finish(T* state, int64_t head) const {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = hk * group + r / p.Lq, i = r % p.Lq;
      const T m = maxima(state)[r], l = sums(state)[r];
      const bool nothing = m == -kInf<T>;
      p.lse[(b * p.Hq + h) * p.Lq + i] = log_sum_exp(rule, m, l);
      const T inverse = nothing ? T(0) : T(1) / l;
      Storage* out = static_cast<Storage*>(p.out.data) + b * p.out.stride[0] + h * p.out.stride[1] +
                     i * p.out.stride[2];
      for (int64_t d = 0; d < p.Dv; d += W)
        store_as<T>(out + d, load(state + r * dim_v + d) * inverse,
                    static_cast<int>(min_of<int64_t>(W, p.Dv - d)));
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
