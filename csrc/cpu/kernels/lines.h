// Transposes cache lines of a few rows, read once.
//
// pack.h transposes squares as large as a vector. This reads each row in pieces of 128 bits and
// puts those of several rows into one vector, so half of the exchanges are loads.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Vectors of at most 256 bits, made of pieces of 128: wider ones take longer to put together. 16-bit
// elements are in one piece, because they are widened afterwards.
template <class E>
constexpr int kSquareBytes = sizeof(E) == 2 ? 16 : min_of(kVectorBytes, 32);
template <class E>
constexpr int kSquareLanes = kSquareBytes<E> / static_cast<int>(sizeof(E));
template <class E>
struct SquareOf {
  typedef E type __attribute__((vector_size(kSquareBytes<E>), may_alias));
  typedef typename CountTo<kSquareLanes<E>>::type Lanes;
};
template <class E>
using Square = typename SquareOf<E>::type;

// What is moved: a word, two 16-bit elements that are widened later, or one fp16.
template <class P, class S>
struct MovedOf {
  typedef typename P::Acc type;
};
template <>
struct MovedOf<Single, F16> {
  typedef uint16_t type;
};

// The rows that transpose_lines transposes.
template <class P, class S>
constexpr int kSquareRows = kSquareLanes<typename MovedOf<P, S>::type>;

// Interleaves the lower (High = 0) or upper halves of each piece of a and b, element by element.
template <class E, int High>
constexpr int unpack_index(int i) {
  constexpr int n = 16 / sizeof(E);
  return i / n * n + High * n / 2 + i % n / 2 + i % 2 * kSquareLanes<E>;
}
template <class E, int High, int... I>
FASTATTN_INLINE Square<E> unpack(Square<E> a, Square<E> b, Indices<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, unpack_index<E, High>(I)...);
#else
  typedef decltype(a < b) Index;
  return __builtin_shuffle(a, b, Index{unpack_index<E, High>(I)...});
#endif
}

// Piece j of v[i] has the n elements of row j * n + i; afterwards v[i] has element i of every row.
template <class E, int kRounds = 16 / sizeof(E)>
FASTATTN_INLINE void transpose_pieces(Square<E>* v) {
  constexpr int n = 16 / sizeof(E);
  typedef typename SquareOf<E>::Lanes All;
  Square<E> to[n];
  FASTATTN_UNROLL for (int i = 0; i < n / 2; ++i) {
    to[2 * i] = unpack<E, 0>(v[i], v[i + n / 2], All());
    to[2 * i + 1] = unpack<E, 1>(v[i], v[i + n / 2], All());
  }
  FASTATTN_UNROLL for (int i = 0; i < n; ++i) v[i] = to[i];
  if constexpr (kRounds > 2) transpose_pieces<E, kRounds / 2>(v);
}

// 128 bits at p, and where a vector has two pieces, 128 bits at `second`.
template <class E, class S>
FASTATTN_INLINE Square<E> load_pieces(const S* p, [[maybe_unused]] const S* second) {
#if defined(__AVX2__)
  if constexpr (kSquareBytes<E> == 32) {
    const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(p));
    const __m128 high = _mm_loadu_ps(reinterpret_cast<const float*>(second));
    return (Square<E>)_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
  }
#endif
  Square<E> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

// Eight fp16, as floats.
FASTATTN_INLINE void store_widened(float* to, Square<uint16_t> raw) {
#if defined(__AVX2__)
  _mm256_storeu_ps(to, _mm256_cvtph_ps((__m128i)raw));
#elif defined(__aarch64__)
  store(to, (VecF)vcvt_f32_f16(vget_low_f16((float16x8_t)raw)));
  store(to + 4, (VecF)vcvt_f32_f16(vget_high_f16((float16x8_t)raw)));
#else
  for (int i = 0; i < 8; ++i) to[i] = widen(F16{raw[i]});
#endif
}
template <class T>
FASTATTN_INLINE void store_square(T* to, Square<T> v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

// dst[word][row] = one line of each of kSquareRows rows.
template <class P, class S>
FASTATTN_INLINE void transpose_lines(const S* rows, int64_t stride, typename P::Word* dst,
                                     int64_t ld) {
  typedef typename MovedOf<P, S>::type E;
  constexpr int n = 16 / sizeof(E), kPerLane = sizeof(E) / sizeof(S), kLine = 64 / sizeof(S);
  constexpr int kColumns = n * kPerLane;  // of one square

  // x86 addresses base + {1, 2} * stride, so one base register serves three rows.
  constexpr int kBases = (kSquareRows<P, S> + 2) / 3;
  const S* base[kBases];
  FASTATTN_UNROLL for (int g = 0; g < kBases; ++g) base[g] = rows + 3 * g * stride;
  const auto row = [&](int i) __attribute__((always_inline)) {
    const int r = i % kSquareRows<P, S>;
    return base[r / 3] + r % 3 * stride;
  };

  // Rows that are a multiple of 4 KiB apart share one set of L1, and more than 8 lines evict each
  // other. So the pieces of a line are loaded together.
  constexpr int kSquares = min_of(kLine / kColumns, kRegisters / n);
  FASTATTN_UNROLL for (int c = 0; c < kLine; c += kSquares * kColumns) {
    Square<E> v[kSquares][n];
    FASTATTN_UNROLL for (int i = 0; i < n; ++i) FASTATTN_UNROLL for (int q = 0; q < kSquares; ++q) {
      v[q][i] = load_pieces<E>(row(i) + c + q * kColumns, row(i + n) + c + q * kColumns);
    }
    FASTATTN_UNROLL for (int q = 0; q < kSquares; ++q) {
      transpose_pieces<E>(v[q]);
      FASTATTN_UNROLL for (int i = 0; i < n; ++i) {
        typename P::Word* to = dst + (c + q * kColumns + i * kPerLane) / P::kPerWord * ld;
        if constexpr (kSame<E, uint16_t>) {
          store_widened(to, v[q][i]);
        } else if constexpr (kPerLane == P::kPerWord) {
          store_square(to, v[q][i]);
        } else {  // the two bf16 of each lane
          typedef Square<int32_t> Bits;
          store_square(to, (Square<float>)((Bits)v[q][i] << 16));
          store_square(to + ld, (Square<float>)((Bits)v[q][i] & static_cast<int32_t>(0xffff0000)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
