// Decoding on int8 caches by sums of integers, for queries and results of 16 bits.
//
// A query row is rounded to 16 bits of its largest element, and so are the weights of a block of
// keys, each a high and a low byte. Then the products with int8 rows are integers, and their sums
// are exact:
//   q = a (256 q1 + q0)    q . k = a (256 q1 . k + q0 . k)        q1, q0 signed
//   w = b (256 w1 + w0)    w^T V = b (256 w1^T V + w0^T V)        w1, w0 unsigned
// One instruction (VNNI) multiplies 64 bytes, where a multiply-add has 16 floats, which must be
// widened first.
#pragma once
#include "../processor.h"
#include "decode_rows.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr bool kHasIntegers = kVectorBytes == 64;

constexpr int64_t kBytes = kVectorBytes;  // elements of a vector of bytes
constexpr int kQuads = kLanes<float>;     // groups of four bytes in a vector
// |q . k| <= 128 * 32639 * 512 < 2^31
constexpr int64_t kWidestInteger = 512;

// Whether this processor has the instruction and sums over this many columns cannot overflow. Where
// AVX-512 is emulated, so is the instruction.
FASTATTN_INLINE bool multiplies_bytes(int64_t columns) {
#if FASTATTN_EMULATED_AVX512
  return columns <= kWidestInteger;
#else
  static const bool supported = has_feature("avx512_vnni");
  return kHasIntegers && supported && columns <= kWidestInteger;
#endif
}

// With fewer query rows, reordering the cached rows takes longer than the integer products save
// (Zen 5).
constexpr int64_t kFewestIntegerRows = 3;

// sum[l] += a[4 l] b[4 l] + ... + a[4 l + 3] b[4 l + 3], a unsigned, b signed
FASTATTN_INLINE VecI add_bytes(VecI sum, VecI a, VecI b) {
#if FASTATTN_EMULATED_AVX512
  return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif FASTATTN_AVX512
  // Inline assembly, because the kernels are compiled without VNNI, which the intrinsic requires.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  (void)a, (void)b;
  return sum;
#endif
}

// The nearest integers of numbers up to 2^22: adding 1.5 * 2^23 leaves them in the low bits.
FASTATTN_INLINE VecI nearest(VecF x) { return (VecI)(x + 12582912.0f) - 0x4b400000; }

FASTATTN_INLINE VecF magnitude(VecF x) { return (VecF)((VecI)x & 0x7fffffff); }

// The factor that makes `top`, the largest of some numbers, the largest integer. Far below the
// range of float32 all become 0.
struct Unit {
  float inverse, value;
};
FASTATTN_INLINE Unit unit_of(float top, float limit) {
  top = max_of(top, 0x1p-110f);
  return {limit / top, top / limit};
}

// Stores the low byte of each lane.
FASTATTN_INLINE void store_bytes(int8_t* to, VecI x) {
  typedef int8_t Bytes __attribute__((vector_size(kQuads), aligned(1), may_alias));
  *reinterpret_cast<Bytes*>(to) = __builtin_convertvector(x, Bytes);
}

// The first `count` bytes at p, zero beyond.
FASTATTN_INLINE VecI load_bytes(const Int8* p, int64_t count) {
#if FASTATTN_AVX512
  if (count < kBytes) return (VecI)_mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, p);
#else
  (void)count;
#endif
  return (VecI)load(reinterpret_cast<const float*>(p));
}

// Query rows as bytes.
struct IntegerQueries {
  int8_t* bytes;  // [rows][2][dim]: high, low; zero beyond D
  float* unit;    // [rows] NaN where an element is not finite
  int32_t* bias;  // [rows] the excess of q . (k + 128) over q . k, in units
  int64_t dim;    // a multiple of kBytes

  // The high and the low bytes of row r.
  FASTATTN_INLINE const int8_t* high(int64_t r) const { return bytes + 2 * r * dim; }
  FASTATTN_INLINE const int8_t* low(int64_t r) const { return bytes + (2 * r + 1) * dim; }

  // Row r from D floats.
  FASTATTN_INLINE void pack(int64_t r, const float* q, int64_t D) const {
    // Bytes are signed, so 127 * 256 + 127 is the largest number.
    constexpr float kMost = 32639;
    VecF top{}, poison{};
    const auto scaled = [&](int64_t d) __attribute__((always_inline)) {
      return load_first(q + d, static_cast<int>(max_of<int64_t>(0, min_of<int64_t>(W, D - d))));
    };
    for (int64_t d = 0; d < D; d += W) {
      const VecF x = scaled(d);
      top = max_of(top, magnitude(x));
      poison += x - x;
    }
    const Unit u = unit_of(max_lanes<float>(top), kMost);
    VecI sum{};
    for (int64_t d = 0; d < dim; d += W) {
      const VecI x = nearest(scaled(d) * u.inverse), upper = (x + 128) >> 8;
      store_bytes(bytes + 2 * r * dim + d, upper);
      store_bytes(bytes + (2 * r + 1) * dim + d, x - upper * 256);
      sum += x;
    }
    int32_t total = 0;
    FASTATTN_UNROLL for (int l = 0; l < W; ++l) total += sum[l];
    bias[r] = 128 * total;
    unit[r] = u.value + sum_lanes<float>(poison);
  }

 private:
  static constexpr int W = kLanes<float>;
};

// Prefetches the rows that are read next, of `bytes` bytes each, spread over `steps` steps of the
// products, so that the memory is never idle.
class Ahead {
 public:
  FASTATTN_INLINE Ahead(const Stream<AnyRows<Int8>>& rows, int64_t bytes, int64_t steps)
      : rows_(rows), bytes_(bytes), each_((kDecodeBlock + steps - 1) / steps) {}
  FASTATTN_INLINE void step() {
    for (const int64_t end = at_ + each_; at_ < end; ++at_) rows_.prefetch(at_, 0, bytes_);
  }

 private:
  const Stream<AnyRows<Int8>> rows_;
  const int64_t bytes_, each_;
  int64_t at_ = 0;
};

// Reorders the keys of a block, with keys across the lanes: of each sixteen keys, vector d has the
// four columns from 4 d on, as k + 128, because the instruction takes signed bytes on one side
// only. Lanes past the last key repeat it.
__attribute__((noinline)) inline void join_keys(const Int8* const* k, int64_t nk, int64_t D,
                                                int8_t* to) {
  const int64_t dim = round_up(D, kBytes);
  for (int64_t j = 0; j < nk; j += kQuads) {
    const Int8* row[kQuads];
    FASTATTN_UNROLL for (int n = 0; n < kQuads; ++n) row[n] = k[min_of(nk - 1, j + n)];
    for (int64_t d = 0; d < dim; d += kBytes) {
      VecF x[kQuads];
      FASTATTN_UNROLL for (int n = 0; n < kQuads; ++n) x[n] =
          (VecF)(load_bytes(row[n] + d, D - d) ^ static_cast<int32_t>(0x80808080));
      transpose<float>(x);
      FASTATTN_UNROLL for (int n = 0; n < kQuads; ++n, to += kBytes)
          store(reinterpret_cast<float*>(to), x[n]);
    }
  }
}

// Four bytes in every lane.
FASTATTN_INLINE VecI splat_bytes(const void* p) {
  float quad;
  __builtin_memcpy(&quad, p, sizeof quad);
  return (VecI)splat(quad);
}

// s[r][j] = q_r . k_j for R rows, keys [0, nk) of a block from join_keys(). C vectors of keys at a
// time.
template <int R>
__attribute__((noinline)) void integer_products(const IntegerQueries& q, int64_t r0,
                                                const int8_t* k, int64_t nk, int64_t D,
                                                Stream<AnyRows<Int8>> next, int64_t bytes,
                                                float* s) {
  constexpr int C = min_of(4, 8 / R), W = kQuads;
  const int64_t quads = (D + 3) / 4, group = q.dim * kQuads;
  Ahead ahead(next, bytes, (nk + C * W - 1) / (C * W) * quads);
  for (int64_t j = 0; j < nk; j += C * W, k += C * group) {
    VecI high[R][C], low[R][C];
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int c = 0; c < C; ++c)
        high[r][c] = low[r][c] = VecI{};
    for (int64_t d = 0; d < quads; ++d) {
      ahead.step();
      VecI x[C];
      FASTATTN_UNROLL for (int c = 0; c < C; ++c) x[c] =
          (VecI)load(reinterpret_cast<const float*>(k + c * group + d * kBytes));
      FASTATTN_UNROLL for (int r = 0; r < R; ++r) {
        const VecI upper = splat_bytes(q.high(r0 + r) + 4 * d);
        const VecI lower = splat_bytes(q.low(r0 + r) + 4 * d);
        FASTATTN_UNROLL for (int c = 0; c < C; ++c) {
          high[r][c] = add_bytes(high[r][c], x[c], upper);
          low[r][c] = add_bytes(low[r][c], x[c], lower);
        }
      }
    }
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int c = 0; c < C; ++c) {
      const VecI sum = (high[r][c] << 8) + low[r][c] - q.bias[r0 + r];
      store(s + r * kDecodeBlock + j + c * W, __builtin_convertvector(sum, VecF) * q.unit[r0 + r]);
    }
  }
}

// The weights of a block as bytes.
struct IntegerWeights {
  uint8_t* bytes;  // [rows][2][kDecodeBlock]: high, low
  float* unit;     // [rows]

  FASTATTN_INLINE const uint8_t* high(int64_t r) const { return bytes + 2 * r * kDecodeBlock; }

  // Row r from kDecodeBlock weights, none of them negative.
  FASTATTN_INLINE void pack(int64_t r, const float* w) const {
    constexpr int W = kLanes<float>;
    VecF top = load(w);
    FASTATTN_UNROLL for (int64_t j = W; j < kDecodeBlock; j += W) top = max_of(top, load(w + j));
    const Unit u = unit_of(max_lanes<float>(top), 65535);
    unit[r] = u.value;
    int8_t* const to = reinterpret_cast<int8_t*>(bytes + 2 * r * kDecodeBlock);
    FASTATTN_UNROLL for (int64_t j = 0; j < kDecodeBlock; j += W) {
      const VecI x = nearest(load(w + j) * u.inverse);
      store_bytes(to + j, x >> 8);
      store_bytes(to + kDecodeBlock + j, x);
    }
  }
};

// Reorders the values of a block for the products, four keys in each 32 bits. Each 64 columns are
// four vectors, and lane 4 n + m of vector i has column 16 n + 4 i + m. Past the last key it is
// repeated, with a weight of 0.
__attribute__((noinline)) inline void join_values(const Int8* const* v, int64_t nk, int64_t Dv,
                                                  int8_t* to) {
#if FASTATTN_AVX512
  for (int64_t j = 0; j < nk; j += 4) {
    const Int8* row[4];
    FASTATTN_UNROLL for (int n = 0; n < 4; ++n) row[n] = v[min_of(nk - 1, j + n)];
    for (int64_t d = 0; d < Dv; d += kBytes, to += 4 * kBytes) {
      __m512i x[4];
      FASTATTN_UNROLL for (int n = 0; n < 4; ++n) x[n] = (__m512i)load_bytes(row[n] + d, Dv - d);
      const __m512i low[2] = {_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3])};
      const __m512i high[2] = {_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3])};
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low[0], low[1]));
      _mm512_storeu_si512(to + kBytes, _mm512_unpackhi_epi16(low[0], low[1]));
      _mm512_storeu_si512(to + 2 * kBytes, _mm512_unpacklo_epi16(high[0], high[1]));
      _mm512_storeu_si512(to + 3 * kBytes, _mm512_unpackhi_epi16(high[0], high[1]));
    }
  }
#else
  (void)v, (void)nk, (void)Dv, (void)to;
#endif
}

// Restores the order of the columns of an output that was summed in the order of join_values().
FASTATTN_INLINE void reorder_columns(const float* from, int64_t count, float* to) {
  for (int64_t d = 0; d < count; d += kBytes)
    FASTATTN_UNROLL for (int n = 0; n < 4; ++n) FASTATTN_UNROLL for (int i = 0; i < 4; ++i)
        __builtin_memcpy(to + d + 16 * n + 4 * i, from + d + 16 * i + 4 * n, 4 * sizeof(float));
}

// o_r = alpha_r o_r + sum_j w_rj v_j for R rows, C vectors of columns at a time; `vectors` in all.
template <int R, int C>
FASTATTN_INLINE int64_t integer_columns(const IntegerWeights& w, int64_t r0, const float* alpha,
                                        const int8_t* v, int64_t nk, int64_t from, int64_t vectors,
                                        Ahead& ahead, float* o) {
  constexpr int W = kLanes<float>;
  for (; from + C <= vectors; from += C) {
    VecI high[R][C], low[R][C];
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int c = 0; c < C; ++c)
        high[r][c] = low[r][c] = VecI{};
    for (int64_t j = 0; j < nk; j += 4) {
      ahead.step();
      VecI x[C];
      FASTATTN_UNROLL for (int c = 0; c < C; ++c) x[c] =
          (VecI)load(reinterpret_cast<const float*>(v + (j / 4 * vectors + from + c) * kBytes));
      FASTATTN_UNROLL for (int r = 0; r < R; ++r) {
        const VecI upper = splat_bytes(w.high(r0 + r) + j);
        const VecI lower = splat_bytes(w.high(r0 + r) + kDecodeBlock + j);
        FASTATTN_UNROLL for (int c = 0; c < C; ++c) {
          high[r][c] = add_bytes(high[r][c], upper, x[c]);
          low[r][c] = add_bytes(low[r][c], lower, x[c]);
        }
      }
    }
    FASTATTN_UNROLL for (int r = 0; r < R; ++r) FASTATTN_UNROLL for (int c = 0; c < C; ++c) {
      float* to = o + r * vectors * W + (from + c) * W;
      const VecF sum = __builtin_convertvector((high[r][c] << 8) + low[r][c], VecF);
      store(to, alpha[r] * load(to) + w.unit[r0 + r] * sum);
    }
  }
  return from;
}

// o_r = alpha_r o_r + sum_j w_rj v_j for R rows, from r0 on, of `vectors` vectors. Prefetches the
// rows of `next` meanwhile.
template <int R>
__attribute__((noinline)) void integer_values(const IntegerWeights& w, int64_t r0,
                                              const float* alpha, const int8_t* v, int64_t nk,
                                              int64_t vectors, Stream<AnyRows<Int8>> next,
                                              int64_t bytes, float* o) {
  constexpr int C = 8 / R;
  if (vectors == 0) return;  // without columns there are no steps
  Ahead ahead(next, bytes, (vectors + C - 1) / C * ((nk + 3) / 4));
  const int64_t from = integer_columns<R, C>(w, r0, alpha, v, nk, 0, vectors, ahead, o);
  if constexpr (R == 1) integer_columns<R, 4>(w, r0, alpha, v, nk, from, vectors, ahead, o);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
