// Transposes cache lines of a few rows, read once.
//
// pack.h transposes squares as large as a vector. This reads each row in pieces of 128 bits and
// combines the pieces of several rows into one vector, so half of the exchanges are loads.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Vectors of at most 256 bits, made of pieces of 128: wider ones take longer to put together.
constexpr int kSquareBytes = min_of(kVectorBytes, 32);
// The rows of a square of elements E.
template <class E>
constexpr int kSquareRows = kSquareBytes / static_cast<int>(sizeof(E));
template <class E>
struct SquareOf {
  typedef E type __attribute__((vector_size(kSquareBytes), may_alias));
  typedef typename CountTo<kSquareRows<E>>::type Lanes;
};
template <class E>
using Square = typename SquareOf<E>::type;

// Interleaves the lower (High = 0) or upper halves of each piece of a and b, element by element.
template <class E, int High>
constexpr int unpack_index(int i) {
  constexpr int n = 16 / sizeof(E);
  return i / n * n + High * n / 2 + i % n / 2 + i % 2 * kSquareRows<E>;
}

// Interleaves the low or high halves of the elements of two squares.
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
  const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(p));
  const __m128 high = _mm_loadu_ps(reinterpret_cast<const float*>(second));
  return (Square<E>)_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
#else
  Square<E> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
#endif
}

// dst[column][row] = one line of each of kSquareRows<E> rows of S, columns of E: an element, or
// two.
template <class E, class S>
FASTATTN_INLINE void transpose_lines(const S* rows, int64_t stride, E* dst, int64_t ld) {
  constexpr int n = 16 / sizeof(E), kPerColumn = sizeof(E) / sizeof(S), kColumns = 64 / sizeof(E);

  // x86 addresses base + {1, 2} * stride, so one base register serves three rows.
  constexpr int kBases = (kSquareRows<E> + 2) / 3;
  const S* base[kBases];
  FASTATTN_UNROLL for (int g = 0; g < kBases; ++g) base[g] = rows + 3 * g * stride;
  const auto row = [&](int i) __attribute__((always_inline)) {
    const int r = i % kSquareRows<E>;
    return base[r / 3] + r % 3 * stride;
  };

  // Rows that are a multiple of 4 KiB apart share one set of L1, and more than 8 lines evict each
  // other. So the pieces of a line are loaded together.
  constexpr int kSquares = kColumns / n;
  Square<E> v[kSquares][n];
  FASTATTN_UNROLL for (int i = 0; i < n; ++i) FASTATTN_UNROLL for (int q = 0; q < kSquares; ++q) {
    const int at = q * n * kPerColumn;
    v[q][i] = load_pieces<E>(row(i) + at, row(i + n) + at);
  }
  FASTATTN_UNROLL for (int q = 0; q < kSquares; ++q) {
    transpose_pieces<E>(v[q]);
    FASTATTN_UNROLL for (int i = 0; i < n; ++i)
        __builtin_memcpy(dst + (q * n + i) * ld, &v[q][i], kSquareBytes);
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
