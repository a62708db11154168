// Vectors of one instruction set: types, loads and stores, conversions, transposition.
//
// All code uses the compiler's vector extensions, which are the same source for SSE2, AVX2, AVX-512
// and NEON. Intrinsics appear only for instructions that the extensions cannot express (convert.h,
// math.h). A new instruction set is a vector width here and, where it pays, a few lines there.
//
// All code is in the namespace of the instruction set and is force-inlined: see docs/design.md on
// weak symbols.
#pragma once
#if defined(__x86_64__)
// GCC's own headers pass an undefined vector where a mask selects none of it, and warn about it
// when inlined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <cstddef>
#include <cstdint>

#define FASTATTN_INLINE inline __attribute__((always_inline))
// g++ keeps an array of accumulators in registers only if every loop over it is unrolled away.
#define FASTATTN_UNROLL _Pragma("GCC unroll 64")
// A vector that an asm statement reads and writes.
#if FASTATTN_EMULATED_AVX512
#define FASTATTN_OPERAND "+m"  // no register holds it
#elif defined(__x86_64__)
#define FASTATTN_OPERAND "+v"
#else
#define FASTATTN_OPERAND "+w"
#endif

// AVX-512 means x86-64-v4: F, BW, CD, DQ and VL. Its emulation needs AVX2.
#if FASTATTN_EMULATED_AVX512
#include "emulated_avx512.h"
#define FASTATTN_AVX512 1
#define FASTATTN_AVX512_BF16 1
#elif defined(__AVX512BW__)
#define FASTATTN_AVX512 1
#if defined(__AVX512BF16__)
#define FASTATTN_AVX512_BF16 1
#endif
#endif

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

#if FASTATTN_AVX512
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif

typedef float VecF __attribute__((vector_size(kVectorBytes), may_alias));
typedef double VecD __attribute__((vector_size(kVectorBytes), may_alias));
typedef int32_t VecI __attribute__((vector_size(kVectorBytes), may_alias));
typedef uint32_t VecU __attribute__((vector_size(kVectorBytes), may_alias));
typedef int64_t VecL __attribute__((vector_size(kVectorBytes), may_alias));

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  typedef VecF type;
  typedef VecI bits;
};
template <>
struct VecOf<double> {
  typedef VecD type;
  typedef VecL bits;
};

template <class T>
using Vec = typename VecOf<T>::type;
// The result of a comparison: all ones or all zeros in each lane.
template <class T>
using Mask = typename VecOf<T>::bits;

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <int... I>
struct Indices {};
template <int N, int... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <int... I>
struct CountTo<0, I...> {
  typedef Indices<I...> type;
};

// x in every lane. Written as a list, because a sum with zero would be computed and would change -0
// and a pair of bf16.
template <class T, int... I>
FASTATTN_INLINE Vec<T> splat_lanes(T x, Indices<I...>) {
  return Vec<T>{((void)I, x)...};
}
// x in all lanes.
template <class T>
FASTATTN_INLINE Vec<T> splat(T x) {
  return splat_lanes<T>(x, typename CountTo<kLanes<T>>::type());
}

template <class T>
constexpr T kInf = static_cast<T>(__builtin_inff());

template <class T>
FASTATTN_INLINE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FASTATTN_INLINE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
// The smallest multiple of `step` that is >= n.
FASTATTN_INLINE constexpr int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

// Loads from any address: a word of two bf16 may start at an odd element.
template <class T>
FASTATTN_INLINE Vec<T> load(const T* p) {
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  return *reinterpret_cast<const Unaligned*>(p);
}
// Stores a vector at any address.
template <class T>
FASTATTN_INLINE void store(T* p, Vec<T> v) {
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  *reinterpret_cast<Unaligned*>(p) = v;
}

// Half of a vector. One of AVX-512 has the lanes of AVX2, and many processors compute two at a
// time.
typedef float HalfF __attribute__((vector_size(kVectorBytes / 2), may_alias));
// Loads half a vector from any address.
FASTATTN_INLINE HalfF load_half(const float* p) {
  typedef float Unaligned __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));
  return *reinterpret_cast<const Unaligned*>(p);
}
// x in all lanes of half a vector.
template <int... I>
FASTATTN_INLINE HalfF splat_half(float x, Indices<I...>) {
  return HalfF{((void)I, x)...};
}
// A half, then zeros.
FASTATTN_INLINE VecF padded_half(HalfF x) {
#if FASTATTN_AVX512 && !FASTATTN_EMULATED_AVX512
  return (VecF)_mm512_zextps256_ps512((__m256)x);
#else
  VecF whole{};
  __builtin_memcpy(&whole, &x, sizeof(x));
  return whole;
#endif
}

// All ones in the first n lanes.
template <class T>
FASTATTN_INLINE Mask<T> first_lanes(int n) {
  Mask<T> lane{};
  FASTATTN_UNROLL for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < n;
}

// Loads the first n lanes (0 <= n <= lanes). The other lanes are zero, and their memory is not
// read.
template <class T>
FASTATTN_INLINE Vec<T> load_first(const T* p, int n) {
  if (n >= kLanes<T>) return load(p);
#if FASTATTN_AVX512
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_loadu_ps((1u << n) - 1, p);
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm512_maskz_loadu_pd((1u << n) - 1, p);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_maskload_ps(p, (__m256i)first_lanes<T>(n));
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm256_maskload_pd(p, (__m256i)first_lanes<T>(n));
#endif
  alignas(kVectorBytes) T lanes[kLanes<T>] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

// Stores the first n lanes.
template <class T>
FASTATTN_INLINE void store_first(T* p, Vec<T> v, int n) {
  if (n >= kLanes<T>) return store(p, v);
#if FASTATTN_AVX512
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, (1u << n) - 1, (__m512)v);
  if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_pd(p, (1u << n) - 1, (__m512d)v);
#endif
  // In pieces of half a vector, a quarter, ...: AVX2's masked store is slow on Zen 3.
  alignas(kVectorBytes) T lanes[kLanes<T>];
  store(lanes, v);
  int at = 0;
  FASTATTN_UNROLL for (int width = kLanes<T> / 2; width >= 1; width /= 2) {
    if ((n & width) == 0) continue;
    __builtin_memcpy(p + at, lanes + at, static_cast<size_t>(width) * sizeof(T));
    at += width;
  }
}

// The first 128 bits of a vector: the end of a row that needs no more takes a half or a quarter of
// the work of a vector. Without AVX2 they are a vector.
template <class T>
struct PieceOf {
  typedef T type __attribute__((vector_size(16), may_alias));
};
template <class T>
using Piece = typename PieceOf<T>::type;
template <class T>
constexpr int kPiece = 16 / static_cast<int>(sizeof(T));

// As load_first, for 1 <= n <= kPiece.
template <class T>
FASTATTN_INLINE Piece<T> load_piece(const T* p, int n) {
  typedef T Unaligned __attribute__((vector_size(16), aligned(1), may_alias));
  if (n >= kPiece<T>) return *reinterpret_cast<const Unaligned*>(p);
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 8) return (Piece<T>)_mm_load_sd(p);
#endif
#if FASTATTN_AVX512
  if constexpr (sizeof(T) == 4) return (Piece<T>)_mm_maskz_loadu_ps((1u << n) - 1, p);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const __m128i lane = _mm_setr_epi32(0, 1, 2, 3);
    return (Piece<T>)_mm_maskload_ps(p, _mm_cmpgt_epi32(_mm_set1_epi32(n), lane));
  }
#endif
  Piece<T> lanes{};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return lanes;
}
// A piece, then zeros.
template <class T>
FASTATTN_INLINE Vec<T> padded(Piece<T> x) {
#if FASTATTN_AVX512
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_zextps128_ps512((__m128)x);
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm512_zextpd128_pd512((__m128d)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_zextps128_ps256((__m128)x);
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm256_zextpd128_pd256((__m128d)x);
#else
  return (Vec<T>)x;
#endif
}

// The first lanes of a vector.
template <class T>
FASTATTN_INLINE Piece<T> piece_of(Vec<T> x) {
  Piece<T> first;
  __builtin_memcpy(&first, &x, sizeof(first));
  return first;
}

// yes where m is true, else no.
template <class T>
FASTATTN_INLINE Vec<T> select(Mask<T> m, Vec<T> yes, Vec<T> no) {
  return m ? yes : no;
}

// The larger of the two; where one is NaN the result is the second argument.
FASTATTN_INLINE VecF max_of(VecF a, VecF b) {
#if FASTATTN_AVX512
  return (VecF)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (VecF)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (VecF)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}
FASTATTN_INLINE VecD max_of(VecD a, VecD b) {
#if FASTATTN_AVX512
  return (VecD)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  return (VecD)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  return (VecD)_mm_max_pd((__m128d)a, (__m128d)b);
#else
  return a > b ? a : b;
#endif
}

// Lane i of the result is lane i ^ by.
template <class T, int by, int... I>
FASTATTN_INLINE Vec<T> exchanged(Vec<T> v, Indices<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(v, v, (I ^ by)...);
#else
  return __builtin_shuffle(v, Mask<T>{(I ^ by)...});
#endif
}

// combine(combine(v0, v4), combine(v2, v6)), ... in every lane: by halves, within registers.
template <class T, int by = kLanes<T> / 2, class Combine>
FASTATTN_INLINE Vec<T> over_lanes(Vec<T> v, Combine combine) {
  v = combine(v, exchanged<T, by>(v, typename CountTo<kLanes<T>>::type()));
  if constexpr (by > 1) return over_lanes<T, by / 2>(v, combine);
  return v;
}

// Sum and maximum over the lanes, always in the same order.
template <class T>
FASTATTN_INLINE T sum_lanes(Vec<T> v) {
  return over_lanes<T>(v,
                       [](Vec<T> a, Vec<T> b) __attribute__((always_inline)) { return a + b; })[0];
}

// The maximum of all lanes.
template <class T>
FASTATTN_INLINE T max_lanes(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  T m = lanes[0];
  FASTATTN_UNROLL for (int i = 1; i < kLanes<T>; ++i) m = lanes[i] > m ? lanes[i] : m;
  return m;
}

// The maximum by halves, which has half the latency; a NaN may hide other lanes.
template <class T>
FASTATTN_INLINE T largest_lane(Vec<T> v) {
  return over_lanes<T>(
      v, [](Vec<T> a, Vec<T> b) __attribute__((always_inline)) { return max_of(a, b); })[0];
}

// 0, 1, 2, ...
template <class T>
FASTATTN_INLINE Vec<T> iota() {
  Vec<T> v{};
  FASTATTN_UNROLL for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class P>
struct ElementOf;
template <class S>
struct ElementOf<const S*> {
  typedef S type;
};
template <class S>
struct ElementOf<S*> {
  typedef S type;
};

template <int N>
struct Width {
  static constexpr int value = N;
};

// Interleaves blocks of `Step` lanes of a and b: the lower (High = 0) or upper half of each pair of
// blocks.
template <int Step, int High, int N>
constexpr int interleave_index(int i) {
  const int block = i / Step, within = i % Step;
  // Output block 2t takes a's block 2t + High, output block 2t + 1 takes b's.
  const int source = (block / 2) * 2 + High;
  return source * Step + within + (block % 2 ? N : 0);
}

// Interleaves segments of Step lanes from the low or high halves of a and b.
template <class T, int Step, int High, int... I>
FASTATTN_INLINE Vec<T> interleave(Vec<T> a, Vec<T> b, Indices<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, interleave_index<Step, High, kLanes<T>>(I)...);
#else
  return __builtin_shuffle(a, b, Mask<T>{interleave_index<Step, High, kLanes<T>>(I)...});
#endif
}

// rows[i][j] <-> rows[j][i] for a square of vectors, in log2(lanes) rounds that exchange
// off-diagonal blocks.
template <class T, int Step>
FASTATTN_INLINE void transpose_round(Vec<T>* rows) {
  typedef typename CountTo<kLanes<T>>::type All;
  FASTATTN_UNROLL for (int i = 0; i < kLanes<T>; ++i) {
    if (i & Step) continue;
    const Vec<T> a = rows[i], b = rows[i + Step];
    rows[i] = interleave<T, Step, 0>(a, b, All());
    rows[i + Step] = interleave<T, Step, 1>(a, b, All());
  }
}

// Transposes a square of kLanes rows, in place.
template <class T>
FASTATTN_INLINE void transpose(Vec<T>* rows) {
  transpose_round<T, 1>(rows);
  if constexpr (kLanes<T> > 2) transpose_round<T, 2>(rows);
  if constexpr (kLanes<T> > 4) transpose_round<T, 4>(rows);
  if constexpr (kLanes<T> > 8) transpose_round<T, 8>(rows);
}

// Within every segment of lanes, the units with an even (Odd = 0) or odd index, units of a first.
template <int Segment, int Unit, int Odd, int N>
constexpr int picked_index(int i) {
  constexpr int half = Segment / Unit / 2;
  const int segment = i / Segment * Segment, unit = i % Segment / Unit;
  return (unit < half ? 0 : N) + segment + (2 * (unit % half) + Odd) * Unit + i % Unit;
}

// Every second unit of a and b, the even or odd ones.
template <class T, int Segment, int Unit, int Odd, int... I>
FASTATTN_INLINE Vec<T> picked(Vec<T> a, Vec<T> b, Indices<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, picked_index<Segment, Unit, Odd, kLanes<T>>(I)...);
#else
  return __builtin_shuffle(a, b, Mask<T>{picked_index<Segment, Unit, Odd, kLanes<T>>(I)...});
#endif
}

// Lane i of the result is the sum over the lanes of x[i], for kRows vectors; other lanes repeat
// these sums. x is overwritten. Every sum has the same order of additions: neighbours first. Rounds
// within 128 bits come first, because these shuffles of x86 are the cheapest.
template <class T, int kRows = kLanes<T>, int kCount = kLanes<T>>
FASTATTN_INLINE Vec<T> sum_each(Vec<T>* x) {
  constexpr int W = kLanes<T>, kLane = 16 / static_cast<int>(sizeof(T)), kSums = (kRows + 1) / 2;
  constexpr bool kWithin = W / kCount * 2 <= kLane;
  constexpr int kSegment = kWithin ? kLane : W, kUnit = kWithin ? 1 : kLane;
  typedef typename CountTo<W>::type All;
  FASTATTN_UNROLL for (int i = 0; i < kSums; ++i) {
    const Vec<T> a = x[2 * i], b = x[2 * i + 1 < kRows ? 2 * i + 1 : 2 * i];
    x[i] = picked<T, kSegment, kUnit, 0>(a, b, All()) + picked<T, kSegment, kUnit, 1>(a, b, All());
  }
  if constexpr (kCount > 2) return sum_each<T, kSums, kCount / 2>(x);
  return x[0];
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
