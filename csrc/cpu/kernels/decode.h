// Attention for a few queries over many keys (decoding). The bound is reading keys and values once.
//
// The query panel of the general kernel would leave most lanes empty. So here the head dim runs
// across the lanes, all query heads of a key head are served while its rows are in registers, and
// the keys are split into fixed-length chunks that run in parallel and are merged in order. The
// chunk length depends on neither the batch nor the threads, so the bits do not either.
//
// Keys and values are processed block by block, for a few rows of the group (R) at a time. Sixteen
// dot products run at once and are summed over their lanes together. Outputs stay in registers for
// a block.
//
// Quantised rows are widened in registers, or multiplied as integers (decode_integers.h). Their
// scales multiply one score and one weight a row, not its columns: q . (c k) = c (q . k), and
// p (c v) = (p c) v.
#pragma once
#include "../threads.h"
#include "blocks.h"
#include "decode_integers.h"
#include "mask.h"
#include "scales.h"
#include "softmax_state.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kMostDecodedRows = 64;  // query rows per pass over the keys

// Whether decoding is faster than a panel of queries: for queries that fill up to a quarter of a
// vector, or up to half of it where rows are wide and many and the call has no option but a window.
// Half of a vector is slower with narrow rows, few keys, a mask or a softcap (Zen 4), and was not
// measured with narrower vectors or on a processor with tiles.
template <class P>
bool has_few_queries(const Sequence& p) {
#if defined(FASTATTN_BASE)
  constexpr bool kTiles = true;
#else
  constexpr bool kTiles = false;
#endif
  constexpr int W = kLanes<typename P::Acc>;
  const bool measured = !kTiles && W == 16 && p.D >= 64 && p.Lk >= 64;
  const bool plain =
      p.weights == Weights::none && p.softcap == 0 && p.alibi == nullptr && !has_bias(p);
  return p.Lq * (measured && plain ? 2 : 4) <= W;
}

// Whether this kernel serves a sequence: few rows per key head and no option that is rare in
// decoding. No other kernel reads pages, so the caller has made sure that this one can.
template <class P>
bool is_decoded(const Sequence& p) {
  if (p.pages != nullptr) return true;
  if (p.score_program != nullptr) return false;
  const int64_t rows = p.Lq * (p.Hq / max_of<int64_t>(1, p.Hkv));
  return rows <= kMostDecodedRows && has_few_queries<P>(p) && p.dropout_p == 0 &&
         !has_content_terms(p) && p.k.stride[3] == 1 && p.v.stride[3] == 1 &&
         p.D <= kWidestCached && p.Dv <= kWidestCached;
}

// The elements of queries and outputs where keys and values have elements of this type.
template <class Cached>
struct QueryOf {
  typedef Cached type;
};
template <>
struct QueryOf<Int8> {
  typedef float type;
};
template <>
struct QueryOf<E4m3> {
  typedef float type;
};

// Cached: the elements of keys and values.
template <class P, class Cached>
class Decode {
  typedef typename QueryOf<Cached>::type Storage;
  static constexpr bool kScaled = !kSame<Cached, Storage>;
  static constexpr bool kReadsEvenRows = !kScaled && !kSame<Cached, double>;
  static constexpr bool kIntegers = kHasIntegers && kSame<Cached, Int8>;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int kPerWord = P::kPerWord;
  // Lanes of 32 bits hold pairs of bf16. Widening them as (even, odd) takes a shift and a mask.
  static constexpr bool kPaired = kSame<Cached, Bf16>;
  static constexpr int kPerLane = kPaired ? 2 : 1;  // elements of a row in a lane
  static constexpr int64_t kChunk = 512;            // keys per task
  static constexpr int64_t kBlock = kDecodeBlock;
  // Bytes of a row up to which several rows are read at a time. Wider rows defeat the processor's
  // prefetcher, which then no longer sees one stream (Zen 4).
  static constexpr int64_t kNarrow = 128;

 public:
  static bool serves(const Sequence& p) { return kScaled || is_decoded<P>(p); }

  explicit Decode(const Sequence& params)
      : p(params),
        rule(make_rule<T>(params)),
        group(params.Hq / params.Hkv),
        rows(params.Lq * group),
        integers(kIntegers && params.sixteen_bits && rows >= kFewestIntegerRows &&
                 multiplies_bytes(params.D)),
        dim(integers ? round_up(params.D, kBytes) : round_up(params.D, W * kPerLane) / kPerWord),
        dim_v(round_up(params.Dv, integers ? kBytes : W * kPerLane)),
        chunks_((params.Lk + kChunk - 1) / kChunk) {}

  int64_t chunks() const { return chunks_; }
  int64_t state_size() const { return rows * (dim_v + 2); }

  // A whole key head, chunk by chunk.
  void run_head(int64_t head) const {
    Buffers buf = scratch();
    begin_total(buf.total, head);
    for (int64_t c = 0; c < chunks_; ++c) {
      chunk(buf, head, c, buf.chunk_state);
      merge(buf.total, buf.chunk_state);
    }
    finish(buf.total, head);
  }

  // Writes the state of chunk t % chunks of key head t / chunks.
  void run_chunk(int64_t t, T* states) const {
    Buffers buf = scratch();
    chunk(buf, t / chunks_, t % chunks_, states + t * state_size());
  }

  // Merges the states of all chunks of a head, in order, and writes its result.
  void merge_head(int64_t head, T* states) const {
    Buffers buf = scratch();
    begin_total(buf.total, head);
    for (int64_t c = 0; c < chunks_; ++c)
      merge(buf.total, states + (head * chunks_ + c) * state_size());
    finish(buf.total, head);
  }

 private:
  const Sequence& p;
  const ScoreRule<T> rule;
  const int64_t group, rows;
  const bool integers;  // multiplies rows as integers
  const int64_t dim, dim_v, chunks_;

  // A state is {o [rows][dim_v], m [rows], l [rows]}: the output, the maximum, and the sum of
  // exponentials. With kPaired, the first of two vectors of o holds the even columns, and so does
  // the first of two vectors of q unless words are pairs. With `integers`, the columns of o are in
  // the order of join_values().
  struct Buffers {
    Word* q;         // [rows][dim], zero beyond D
    T* s;            // [rows][kBlock]
    T* alpha;        // [rows]
    T* k_scales;     // [kBlock] of quantised rows
    T* v_scales;     // [kBlock]
    T* total;        // a state
    T* chunk_state;  // a state
    IntegerQueries queries;
    IntegerWeights weights;
    int8_t* joined;  // [kBlock][dim or dim_v], see join_keys() and join_values()
  };

  // The buffers of this thread.
  Buffers scratch() const {
    Arena measure(nullptr);
    buffers(measure);
    Arena arena(thread_scratch(measure.used()));
    return buffers(arena);
  }

  // Takes the buffers of a thread from an arena.
  Buffers buffers(Arena& a) const {
    Buffers buf;
    buf.q = a.take<Word>(integers ? 0 : rows * dim);
    buf.s = a.take<T>(rows * kBlock);
    buf.alpha = a.take<T>(rows);
    buf.k_scales = a.take<T>(kScaled ? kBlock : 0);
    buf.v_scales = a.take<T>(kScaled ? kBlock : 0);
    buf.total = a.take<T>(rows * (dim_v + 2));
    buf.chunk_state = a.take<T>(rows * (dim_v + 2));
    if constexpr (kIntegers) {
      const int64_t count = integers ? rows : 0;
      buf.queries = {a.take<int8_t>(2 * count * dim), a.take<float>(count), a.take<int32_t>(count),
                     dim};
      buf.weights = {a.take<uint8_t>(2 * count * kBlock), a.take<float>(count)};
      buf.joined = a.take<int8_t>(integers ? kBlock * max_of(dim, dim_v) : 0);
    }
    return buf;
  }
  // The parts of a state: [rows][dim_v] outputs, [rows] maxima, [rows] sums.
  T* maxima(T* state) const { return state + rows * dim_v; }
  T* sums(T* state) const { return state + rows * (dim_v + 1); }

  // The state of no keys: o = 0, m = -inf, l = 0.
  void begin(T* state) const {
    for (int64_t i = 0; i < rows * dim_v; ++i) state[i] = T(0);
    for (int64_t r = 0; r < rows; ++r) maxima(state)[r] = -kInf<T>, sums(state)[r] = T(0);
  }

  // The initial state: empty, or a sink, a key whose value is 0.
  void begin_total(T* total, int64_t head) const {
    begin(total);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = head % p.Hkv * group + r / p.Lq;
      const FirstState<T> first = first_state<T>(p, rule, head / p.Hkv, h);
      maxima(total)[r] = first.maximum, sums(total)[r] = first.sum;
    }
  }

  // The factor that rescales a sum from one maximum to another; the old one may be -inf.
  T decay(T from, T to) const {
    if (from == -kInf<T>) return T(0);
    return exponential(rule, splat<T>(from - to))[0];
  }

  // Merges part into total. They cover disjoint sets of keys.
  void merge(T* total, T* chunk_state) const {
    for (int64_t r = 0; r < rows; ++r) {
      const Shares<T> share = merge_sums<T>(
          maxima(total) + r, sums(total) + r, maxima(chunk_state)[r], sums(chunk_state)[r],
          [&](Vec<T> x) __attribute__((always_inline)) { return exponential(rule, x); });
      merge_outputs<T>(share, total + r * dim_v, chunk_state + r * dim_v, dim_v);
    }
  }

  // Row r of a key head is query r % Lq of its query head r / Lq.
  void chunk(Buffers& buf, int64_t head, int64_t c, T* state) const {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv;
    begin(state);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = hk * group + r / p.Lq, i = r % p.Lq;
      const Storage* q = static_cast<const Storage*>(p.q.data) + b * p.q.stride[0] +
                         h * p.q.stride[1] + i * p.q.stride[2];
      if constexpr (kIntegers) {
        if (integers) {
          pack_integers(q, buf, r);
          continue;
        }
      }
      load_query(q, buf.q + r * dim);
    }
    const Range visible = visible_to_any(p, 0, p.Lq);
    const int64_t begin_key = max_of(c * kChunk, visible.begin),
                  end_key = min_of((c + 1) * kChunk, visible.end);
    const auto end_of = [&](int64_t j0) { return min_of(end_key, j0 + kBlock); };
    const bool prefetches = kPrefetchesInOrder || p.pages != nullptr;
    if constexpr (kReadsEvenRows) {
      if (p.pages == nullptr) {
        const int64_t k_stride = p.k.stride[2], v_stride = p.v.stride[2];
        for (int64_t j0 = begin_key; j0 < end_key; j0 += kBlock) {
          const int64_t j1 = end_of(j0);
          if (excluded_for_all(b, hk, j0, j1)) continue;
          const EvenRows<Cached> k{row_of(p.k, b, hk, j0), k_stride},
              v{row_of(p.v, b, hk, j0), v_stride}, next{row_of(p.k, b, hk, j1), k_stride};
          attend<EvenRows<Cached>>(buf, {k, v, prefetches ? j1 - j0 : 0},
                                   {v, next, prefetches ? end_of(j1) - j1 : 0}, b, hk, j0, j1,
                                   state);
        }
        return;
      }
    }
    BlockRows<Cached> k, v, next;
    locate(p.k, b, hk, begin_key, end_of(begin_key), next);
    for (int64_t j0 = begin_key; j0 < end_key; j0 += kBlock) {
      const int64_t j1 = end_of(j0);
      k = next;
      locate(p.v, b, hk, j0, j1, v);
      locate(p.k, b, hk, j1, end_of(j1), next);
      if (excluded_for_all(b, hk, j0, j1)) continue;
      attend<AnyRows<Cached>>(buf, {{k.at}, {v.at}, prefetches ? v.count : 0},
                              {{v.at}, {next.at}, prefetches ? next.count : 0}, b, hk, j0, j1,
                              state);
    }
  }

  // Quantises query row r to bytes.
  void pack_integers(const float* q, const Buffers& buf, int64_t r) const {
    if (p.q.stride[3] == 1) return buf.queries.pack(r, q, p.D);
    float dense[kWidestInteger];
    for (int64_t d = 0; d < p.D; ++d) dense[d] = q[d * p.q.stride[3]];
    buf.queries.pack(r, dense, p.D);
  }

  // Packs one query row [D] into words.
  void load_query(const Storage* q, Word* to) const {
    if constexpr (kPerWord == 1 && kPerLane == 1) {
      if (p.q.stride[3] == 1) {
        for (int64_t d = 0; d < dim; d += W)
          store(to + d, load_as<T>(q + d, static_cast<int>(min_of<int64_t>(W, p.D - d))));
        return;
      }
    }
    for (int64_t d = 0; d < dim * kPerWord; ++d) {
      if constexpr (kPerWord == 1) {
        const int64_t lane = d / kPerLane % W, at = d / (kPerLane * W) * kPerLane * W;
        to[at + d % kPerLane * W + lane] =
            d < p.D ? static_cast<T>(widen(q[d * p.q.stride[3]])) : T(0);
      } else {
        reinterpret_cast<Storage*>(to)[d] = d < p.D ? q[d * p.q.stride[3]] : Storage{0};
      }
    }
  }

  // The words of a vector of a row of keys, `count` elements of which are left: one vector, or two
  // where pairs are widened.
  FASTATTN_INLINE void key_words(const Cached* k, int64_t count, Vec<T>* x) const {
    if constexpr (!kPaired) {
      x[0] = load_as<T>(k, static_cast<int>(min_of<int64_t>(W, count)));
    } else if constexpr (kPerWord == 2) {
      x[0] = raw_words(k, count);
    } else {
      widen_pairs(raw_words(k, count), x);
    }
  }
  // Pairs of bf16 as two vectors of floats: the even elements, the odd ones.
  static FASTATTN_INLINE void widen_pairs(Vec<T> pairs, Vec<T>* x) {
    x[0] = (Vec<T>)((VecI)pairs << 16);
    x[1] = (Vec<T>)((VecI)pairs & static_cast<int32_t>(0xffff0000));
  }
  // The first `count` elements at p as pairs, zero beyond.
  static FASTATTN_INLINE Vec<T> raw_words(const Cached* p, int64_t count) {
    if (count >= 2 * W) return load(reinterpret_cast<const T*>(p));
#if FASTATTN_AVX512
    return (Vec<T>)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
#else
    alignas(kVectorBytes) Cached lanes[2 * W] = {};
    __builtin_memcpy(lanes, p, static_cast<size_t>(count) * sizeof(Cached));
    return load(reinterpret_cast<const T*>(lanes));
#endif
  }

  // Calls f(Width<R>(), r) for the rows of the group from r on, with R = 4, then 2, then 1.
  template <int kMost, class F>
  FASTATTN_INLINE void by_rows(F f) const {
    int64_t r = 0;
    if constexpr (kMost == 4 && W >= 4 && P::kHasVariants) {
      for (; r + 4 <= rows; r += 4) f(Width<4>(), r);
    }
    for (; r + 2 <= rows; r += 2) f(Width<2>(), r);
    if (r < rows) f(Width<1>(), r);
  }

  // Row j of key head hk in a cache.
  const Cached* row_of(const Tensor4& x, int64_t b, int64_t hk, int64_t j) const {
    return static_cast<const Cached*>(x.data) + b * x.stride[0] + hk * x.stride[1] +
           j * x.stride[2];
  }

  // Adds keys [j0, j1), at most one block, to the state of a head: scores, online softmax, values.
  template <class Rows>
  void attend(Buffers& buf, Stream<Rows> k, Stream<Rows> v, int64_t b, int64_t hk, int64_t j0,
              int64_t j1, T* state) const {
    const bool narrow = max_of(p.D, p.Dv) * static_cast<int64_t>(sizeof(Cached)) <= kNarrow;
    if constexpr (kIntegers) {
      if (integers) {
        attend_integers(buf, k, v, b, hk, j0, j1, state);
        return;
      }
    }
    by_rows<4>([&](auto width, int64_t r) __attribute__((always_inline)) {
      constexpr int R = decltype(width)::value;
      const Stream<Rows> keys = k.in_pass(r, 4, rows);
      if (narrow && P::kHasVariants)
        products<R, P::kHasVariants ? min_of(4, W / R) : 1>(buf.q + r * dim, keys, j1 - j0,
                                                            buf.s + r * kBlock);
      else
        products<R, 1>(buf.q + r * dim, keys, j1 - j0, buf.s + r * kBlock);
    });
    weigh(buf, b, hk, j0, j1, state);
    const auto add_values = [&](auto max_rows) __attribute__((always_inline)) {
      constexpr int kMost = decltype(max_rows)::value;
      by_rows<kMost>([&](auto width, int64_t r) __attribute__((always_inline)) {
        accumulate<decltype(width)::value>(buf.s + r * kBlock, buf.alpha + r,
                                           v.in_pass(r, kMost, rows), j1 - j0, state + r * dim_v);
      });
    };
    // Four rows share a value, if registers hold their sums of enough columns.
    if (kRegisters == 32 && narrow)
      add_values(Width<kRegisters == 32 ? 4 : 2>());
    else
      add_values(Width<2>());
  }

  // The same with both products in integers.
  template <class Rows>
  void attend_integers(Buffers& buf, Stream<Rows> k, Stream<Rows> v, int64_t b, int64_t hk,
                       int64_t j0, int64_t j1, T* state) const {
    const int64_t nk = j1 - j0;
    join_keys(k.now.at, nk, p.D, buf.joined);
    by_rows<4>([&](auto width, int64_t r) __attribute__((always_inline)) {
      integer_products<decltype(width)::value>(buf.queries, r, buf.joined, nk, p.D,
                                               k.in_pass(r, 4, rows), p.Dv, buf.s + r * kBlock);
    });
    weigh(buf, b, hk, j0, j1, state);
    for (int64_t r = 0; r < rows; ++r) buf.weights.pack(r, buf.s + r * kBlock);
    join_values(v.now.at, nk, p.Dv, buf.joined);
    by_rows<4>([&](auto width, int64_t r) __attribute__((always_inline)) {
      integer_values<decltype(width)::value>(buf.weights, r, buf.alpha + r, buf.joined, nk,
                                             dim_v / W, v.in_pass(r, 4, rows), p.D,
                                             state + r * dim_v);
    });
  }

  // Turns the products of a block into the weights of its values, in place.
  void weigh(Buffers& buf, int64_t b, int64_t hk, int64_t j0, int64_t j1, T* state) const {
    if constexpr (kScaled) {
      scales_of(p.k_scales, b, hk, j0, j1, buf.k_scales);
      scales_of(p.v_scales, b, hk, j0, j1, buf.v_scales);
    }
    for (int64_t r = 0; r < rows; ++r) {
      T* const s = buf.s + r * kBlock;
      if constexpr (kScaled) multiply_block(buf.k_scales, s);
      softmax(buf, b, hk, r, j0, j1, state);
      if constexpr (kScaled) multiply_block(buf.v_scales, s);
    }
  }

  // The scales of rows [j0, j1), and 1 up to the end of the block, where rows are not visible.
  void scales_of(const Tensor4& x, int64_t b, int64_t hk, int64_t j0, int64_t j1, float* to) const {
    read_scales(scale_rows(x, b, hk, p.pages, p.page_size), j0, j1, to);
    for (int64_t j = j1; j < j0 + kBlock; ++j) to[j - j0] = 1.0f;
    if constexpr (kSame<Cached, E4m3>)
      for (int64_t n = 0; n < kBlock; n += W) store(to + n, load(to + n) * kE4m3Unit);
    if (any_wrong(to, kBlock)) __atomic_store_n(p.wrong_scales, 1, __ATOMIC_RELAXED);
  }
  // x *= factors, elements of one block.
  static FASTATTN_INLINE void multiply_block(const T* factors, T* x) {
    FASTATTN_UNROLL for (int64_t n = 0; n < kBlock; n += W)
        store(x + n, load(x + n) * load(factors + n));
  }

  // The addresses of keys [j0, j1), page by page. Paging changes only addresses, so the bits are
  // the same.
  void locate(const Tensor4& x, int64_t b, int64_t hk, int64_t j0, int64_t j1,
              BlockRows<Cached>& rows) const {
    rows.count = max_of<int64_t>(0, j1 - j0);
    if (p.pages == nullptr) {
      const Cached* const first = row_of(x, b, hk, j0);
      for (int64_t n = 0; n < rows.count; ++n) rows.at[n] = first + n * x.stride[2];
      return;
    }
    const Cached* base = static_cast<const Cached*>(x.data) + hk * x.stride[1];
    for (int64_t j = j0; j < j1;) {
      const int64_t page = j / p.page_size, begin = page * p.page_size;
      const Cached* at = base + p.pages[page] * x.stride[0];
      for (; j < min_of(j1, begin + p.page_size); ++j)
        rows.at[j - j0] = at + (j - begin) * x.stride[2];
    }
  }

  // Keys that padding or a mask program excludes for every row are not read.
  bool excluded_for_all(int64_t b, int64_t hk, int64_t j0, int64_t j1) const {
    return padded_for_all(b, j0, j1) ||
           (p.mask_program != nullptr && hidden_from_all(b, hk, j0, j1));
  }

  // Whether the mask program hides all keys [j0, j1) from every query of a key head.
  bool hidden_from_all(int64_t b, int64_t hk, int64_t j0, int64_t j1) const {
    for (int64_t g = 0; g < group; ++g) {
      const MaskProgram program(p, b, hk * group + g);
      for (int64_t i = 0; i < p.Lq; ++i)
        if (program.coverage(i, i + 1, {j0, j1}) != Coverage::none) return false;
    }
    return true;
  }

  // Whether all keys [j0, j1) are padding.
  bool padded_for_all(int64_t b, int64_t j0, int64_t j1) const {
    if (p.mask.data == nullptr || p.mask_dtype != DType::boolean || p.mask.stride[1] != 0 ||
        !is_key_mask(p))
      return false;
    const Bool* mask = static_cast<const Bool*>(p.mask.data) + b * p.mask.stride[0];
    for (int64_t j = j0; j < j1; ++j)
      if (mask[j * p.mask.stride[3]].bits) return false;
    return true;
  }

  // s[r][j] = q_r . k_j for R rows. Keys are read in memory order, kTogether of them at a time, for
  // which a vector of a query is loaded once. Lanes are summed as soon as there is a vector of
  // sums. Past the last key, the last key is read again; the results stay within the block of
  // scores.
  template <int R, int kTogether, class Rows>
  __attribute__((noinline)) void products(const Word* q, Stream<Rows> k, int64_t nk, T* s) const {
    constexpr int kKeys = W / R;
    const int64_t bytes = p.Dv * static_cast<int64_t>(sizeof(Cached));
    for (int64_t j0 = 0; j0 < nk; j0 += kKeys) {
      Vec<T> sum[W];
      FASTATTN_UNROLL for (int t = 0; t < kKeys; t += kTogether) {
        const Cached* key[kTogether];
        FASTATTN_UNROLL for (int n = 0; n < kTogether; ++n) {
          key[n] = k.row(min_of(nk - 1, j0 + t + n));
          k.prefetch(j0 + t + n, 0, bytes);
        }
        dot<R, kTogether>(q, key, sum + t, kKeys);
      }
      alignas(kVectorBytes) T sums[W];
      store(sums, sum_each<T>(sum));
      FASTATTN_UNROLL for (int r = 0; r < R; ++r)
          __builtin_memcpy(s + r * kBlock + j0, sums + r * kKeys, kKeys * sizeof(T));
    }
  }

  // sum[r * stride + n] = the products of query r and key n, not yet summed over the lanes
  template <int R, int N>
  FASTATTN_INLINE void dot(const Word* q, const Cached* const* key, Vec<T>* sum, int stride) const {
    constexpr int kWords = kPerLane / kPerWord;  // vectors of words in a vector of a row
    constexpr int64_t kStep = W * kPerLane;
    Vec<T> acc[R][N];
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int n = 0; n < N; ++n)
        acc[r][n] = Vec<T>{};
    const auto multiply = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
      Vec<T> x[N][kWords];
      FASTATTN_UNROLL for (int n = 0; n < N; ++n) key_words(key[n] + d, count, x[n]);
      FASTATTN_UNROLL for (int w = 0; w < kWords; ++w) FASTATTN_UNROLL for (int r = 0; r < R; ++r) {
        const Vec<T> of_query = load(q + r * dim + d / kPerWord + w * W);
        FASTATTN_UNROLL for (int n = 0; n < N; ++n) acc[r][n] =
            P::multiply_add(x[n][w], of_query, acc[r][n]);
      }
    };
    int64_t d = 0;
    for (; d + kStep <= p.D; d += kStep) multiply(d, kStep);
    if (d < p.D) multiply(d, p.D - d);
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int n = 0; n < N; ++n)
        sum[r * stride + n] = acc[r][n];
  }

  // Scores of one row, keys across lanes: applies the rule, updates the maximum, and replaces the
  // scores by probabilities. alpha is the factor for the row's output so far.
  void softmax(Buffers& buf, int64_t b, int64_t hk, int64_t r, int64_t j0, int64_t j1,
               T* state) const {
    const int64_t h = hk * group + r / p.Lq, i = r % p.Lq;
    T* s = buf.s + r * kBlock;
    for (int64_t x = j1 - j0; x < kBlock; ++x) s[x] = -kInf<T>;
    if (rule.natural || rule.excludes) score_row(s, b, h, i, j0, j1);
    Vec<T> top = load(s);
    FASTATTN_UNROLL for (int64_t x = W; x < kBlock; x += W) top = max_of(top, load(s + x));
    T &m = maxima(state)[r], &l = sums(state)[r];
    const T block_max = largest_lane<T>(top);
    const T after = m > block_max ? m : block_max;
    const T reference = after == -kInf<T> ? T(0) : after;
    const T alpha = decay(m, reference);
    Vec<T> sum{};
    FASTATTN_UNROLL for (int64_t x = 0; x < kBlock; x += W) {
      const Vec<T> e = exponential(rule, load(s + x) - reference);
      sum += e;
      store(s + x, e);
    }
    l = l * alpha + sum_lanes<T>(sum);
    m = after;
    buf.alpha[r] = alpha;
  }

  // Applies window, mask and biases to the scores s[j1 - j0] of query i.
  void score_row(T* s, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t j1) const {
    const Range visible = visible_to_any(p, i, i + 1);
    if (!rule.natural && !has_bias(p)) {
      for (int64_t j = j0; j < min_of(j1, visible.begin); ++j) s[j - j0] = -kInf<T>;
      for (int64_t j = max_of(j0, visible.end); j < j1; ++j) s[j - j0] = -kInf<T>;
      return;
    }
    T bias[kBlock];
    if (has_bias(p)) read_bias_row(p, b, h, i, j0, j1, bias);
    const T slope = alibi_slope<T>(p, b, h);
    for (int64_t j = j0; j < j1; ++j) {
      T x = s[j - j0];
      if (rule.softcap > 0)
        x = rule.softcap * tanh_of_scaled<T>(splat<T>(x * rule.cap_unit))[0];
      else if (rule.natural)
        x *= rule.scale;
      if (has_bias(p)) {
        const T add = bias[j - j0];
        x = add == -kInf<T> ? -kInf<T> : (rule.natural ? x + add : x);
      }
      const int64_t distance = i + p.offset - j;
      if (slope != T(0)) x -= slope * static_cast<T>(distance < 0 ? -distance : distance);
      s[j - j0] = j >= visible.begin && j < visible.end ? x : -kInf<T>;
    }
  }

  // o_r = alpha_r o_r + sum_j p_rj v_j for R rows, as many columns at a time as registers hold.
  template <int R, class Rows>
  __attribute__((noinline)) void accumulate(const T* s, const T* alpha, Stream<Rows> v, int64_t nk,
                                            T* o) const {
    constexpr int kColumns = min_of(8, (kRegisters == 32 ? 16 : 8) / R);
    int64_t d = 0;
    for (; d + kColumns * W <= p.Dv; d += kColumns * W)
      columns<R, kColumns, true>(s, alpha, v, nk, d, o);
    for (; d < dim_v; d += kPerLane * W) columns<R, kPerLane, false>(s, alpha, v, nk, d, o);
  }

  // The same for C vectors of columns from d0 on, whose sums stay in registers.
  template <int R, int C, bool kWhole, class Rows>
  FASTATTN_INLINE void columns(const T* s, const T* alpha, Stream<Rows> v, int64_t nk, int64_t d0,
                               T* o) const {
    const int64_t width = kWhole ? C * W : min_of<int64_t>(C * W, p.D - d0);
    Vec<T> acc[R][C], poison{};
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int c = 0; c < C; ++c)
        acc[r][c] = Vec<T>{};
    for (int64_t j = 0; j < nk; ++j) {
      v.prefetch(j, d0, width * static_cast<int64_t>(sizeof(Cached)));
      Vec<T> x[C];
      value_columns<C, kWhole>(v.row(j) + d0, p.Dv - d0, x);
      FASTATTN_UNROLL for (int r = 0; r < R; ++r) {
        const Vec<T> weight = splat<T>(s[r * kBlock + j]);
        FASTATTN_UNROLL for (int c = 0; c < C; ++c) acc[r][c] += weight * x[c];
      }
    }
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int c = 0; c < C; ++c)
        poison += acc[r][c] - acc[r][c];
    if (rule.excludes && sum_lanes<T>(poison) != T(0)) {
      visible_only<R, C, kWhole>(s, v, nk, d0, &acc[0][0]);
    }
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int c = 0; c < C; ++c) {
      T* to = o + r * dim_v + d0 + c * W;
      store(to, alpha[r] * load(to) + acc[r][c]);
    }
  }

  // Weighted sums of a block with NaN or inf values: a weight of zero adds nothing.
  template <int R, int C, bool kWhole, class Rows>
  __attribute__((noinline)) void visible_only(const T* s, Stream<Rows> v, int64_t nk, int64_t d0,
                                              Vec<T>* acc) const {
    for (int i = 0; i < R * C; ++i) acc[i] = Vec<T>{};
    for (int64_t j = 0; j < nk; ++j) {
      Vec<T> x[C];
      value_columns<C, kWhole>(v.row(j) + d0, p.Dv - d0, x);
      for (int r = 0; r < R; ++r)
        if (s[r * kBlock + j] != T(0))
          for (int c = 0; c < C; ++c) acc[r * C + c] += s[r * kBlock + j] * x[c];
    }
  }

  // C vectors of a row of values, with `count` columns left. Pairs are split into even and odd
  // columns, which needs no shuffle; finish() restores the order.
  template <int C, bool kWhole>
  FASTATTN_INLINE void value_columns(const Cached* v, int64_t count, Vec<T>* x) const {
    if constexpr (!kPaired) {
      FASTATTN_UNROLL for (int c = 0; c < C; ++c) x[c] =
          load_as<T>(v + c * W, kWhole ? W : static_cast<int>(min_of<int64_t>(W, count - c * W)));
    } else {
      FASTATTN_UNROLL for (int c = 0; c < C; c += 2)
          widen_pairs(kWhole ? load(reinterpret_cast<const T*>(v + c * W))
                             : raw_words(v + c * W, count - c * W),
                      x + c);
    }
  }

  // Interleaves a and b from lane `First` on.
  template <int First, int... I>
  static FASTATTN_INLINE Vec<T> zip(Vec<T> a, Vec<T> b, Indices<I...>) {
    return __builtin_shuffle(a, b, Mask<T>{(First + I / 2 + (I % 2 ? W : 0))...});
  }

  // Writes out and lse of a head from its merged state.
  void finish(T* state, int64_t head) const {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = hk * group + r / p.Lq, i = r % p.Lq;
      const T m = maxima(state)[r], l = sums(state)[r];
      if (p.lse != nullptr)
        p.lse[(b * p.Hq + h) * p.lse_stride + i] =
            log_sum_exp(rule, splat<double>(m), splat<double>(l))[0];
      const T inverse = sees_nothing(m, l) ? T(0) : T(1) / l;
      Storage* out = static_cast<Storage*>(p.out.data) + b * p.out.stride[0] + h * p.out.stride[1] +
                     i * p.out.stride[2];
      const T* o = state + r * dim_v;
      alignas(kVectorBytes) T ordered[kIntegers ? round_up(kWidestCached, kBytes) : 1];
      if constexpr (kIntegers) {
        if (integers) {
          reorder_columns(o, dim_v, ordered);
          o = ordered;
        }
      }
      for (int64_t d = 0; d < p.Dv; d += kPerLane * W) {
        Vec<T> x[2] = {load(o + d) * inverse};
        if constexpr (kPaired) {
          typedef typename CountTo<W>::type All;
          const Vec<T> even = x[0], odd = load(o + d + W) * inverse;
          x[0] = zip<0>(even, odd, All()), x[1] = zip<W / 2>(even, odd, All());
        }
        FASTATTN_UNROLL for (int n = 0; n < kPerLane; ++n) {
          const int64_t left = p.Dv - d - n * W;
          if (left > 0)
            store_as<T>(out + d + n * W, x[n], static_cast<int>(min_of<int64_t>(W, left)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
