// Packs blocks of a strided tensor into the layouts that the tiles read, and unpacks them.
//
// "Transposed" means [columns][rows of the tensor across lanes]: the layout of queries, their
// outputs and every tile of scores. "Staged" means row-major and contiguous: the layout of keys and
// values. Nothing outside the given rows and columns is read or written. The padding of a packed
// block is zero.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// dst[c * ld + r] = src[r * row_stride + c * col_stride] for r < rows <= ld, c < cols; zero for the
// other lanes up to `lanes`, a multiple of the vector. S is any storage type.
template <class T, class S>
FASTATTN_INLINE void pack_transposed(const S* src, int64_t row_stride, int64_t col_stride,
                                     int64_t rows, int64_t cols, int64_t lanes, T* dst,
                                     int64_t ld) {
  constexpr int W = kLanes<T>;
  if (col_stride != 1) {
    for (int64_t c = 0; c < cols; ++c)
      for (int64_t r = 0; r < lanes; ++r)
        dst[c * ld + r] =
            r < rows ? static_cast<T>(widen(src[r * row_stride + c * col_stride])) : T(0);
    return;
  }
  for (int64_t r0 = 0; r0 < lanes; r0 += W) {
    int64_t c0 = 0;
    if constexpr (kSame<S, Bf16> && kSame<T, float>) {
      // Two columns move as one word, which halves the time of the transposition.
      for (; c0 + 2 * W <= cols; c0 += 2 * W) {
        VecF v[W];
        FASTATTN_UNROLL for (int i = 0; i < W; ++i) v[i] =
            r0 + i < rows ? load(reinterpret_cast<const float*>(src + (r0 + i) * row_stride + c0))
                          : VecF{};
        transpose<float>(v);
        FASTATTN_UNROLL for (int i = 0; i < W; ++i) {
          T* to = dst + (c0 + 2 * i) * ld + r0;
          store(to, (VecF)((VecI)v[i] << 16));
          store(to + ld, (VecF)((VecI)v[i] & static_cast<int32_t>(0xffff0000)));
        }
      }
    }
    for (; c0 < cols; c0 += W) {
      const int count = static_cast<int>(min_of<int64_t>(W, cols - c0));
      Vec<T> v[W];
      FASTATTN_UNROLL for (int i = 0; i < W; ++i) v[i] =
          r0 + i < rows ? load_as<T>(src + (r0 + i) * row_stride + c0, count) : Vec<T>{};
      transpose<T>(v);
      FASTATTN_UNROLL for (int i = 0; i < W; ++i) {
        if (i < count) store(dst + (c0 + i) * ld + r0, v[i]);
      }
    }
  }
}

// The same for elements whose dtype is known at run time.
template <class T>
__attribute__((noinline)) void pack_transposed(Elements src, int64_t row_stride, int64_t col_stride,
                                               int64_t rows, int64_t cols, int64_t lanes, T* dst,
                                               int64_t ld) {
  with_elements(src, [&](const auto* from) __attribute__((always_inline)) {
    pack_transposed<T>(from, row_stride, col_stride, rows, cols, lanes, dst, ld);
  });
}

// The inverse: dst[r * row_stride + c] = src[c * ld + r] * factor[r], rounded to S. With `add`, the
// result is added to dst.
template <class T, class S>
FASTATTN_INLINE void unpack_transposed(const T* src, int64_t ld, const T* factor, int64_t rows,
                                       int64_t cols, S* dst, int64_t row_stride, bool add = false) {
  constexpr int W = kLanes<T>;
  for (int64_t r0 = 0; r0 < rows; r0 += W) {
    const Vec<T> f = load(factor + r0);
    for (int64_t c0 = 0; c0 < cols; c0 += W) {
      const int count = static_cast<int>(min_of<int64_t>(W, cols - c0));
      Vec<T> v[W];
      FASTATTN_UNROLL for (int i = 0; i < W; ++i) v[i] =
          i < count ? load(src + (c0 + i) * ld + r0) * f : Vec<T>{};
      transpose<T>(v);
      FASTATTN_UNROLL for (int i = 0; i < W; ++i) {
        if (r0 + i >= rows) continue;
        S* row = dst + (r0 + i) * row_stride + c0;
        store_as<T>(row, add ? v[i] + load_as<T>(row, count) : v[i], count);
      }
    }
  }
}

// The same for elements whose dtype is known at run time.
template <class T>
__attribute__((noinline)) void unpack_transposed(const T* src, int64_t ld, const T* factor,
                                                 int64_t rows, int64_t cols, Elements dst,
                                                 int64_t row_stride) {
  with_elements(dst, [&](auto* to) __attribute__((always_inline)) {
    unpack_transposed<T>(src, ld, factor, rows, cols, to, row_stride);
  });
}

// dst[r][c] = src[r * row_stride + c * col_stride], as T.
template <class T, class S>
FASTATTN_INLINE void stage_rows(const S* src, int64_t row_stride, int64_t col_stride, int64_t rows,
                                int64_t cols, T* dst, int64_t ld) {
  constexpr int W = kLanes<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const S* s = src + r * row_stride;
    T* d = dst + r * ld;
    if (col_stride != 1) {
      for (int64_t c = 0; c < cols; ++c) d[c] = static_cast<T>(widen(s[c * col_stride]));
      continue;
    }
    int64_t c = 0;
    for (; c + W <= cols; c += W) store(d + c, load_as<T>(s + c, W));
    if (c < cols)
      store_first(d + c, load_as<T>(s + c, static_cast<int>(cols - c)), static_cast<int>(cols - c));
  }
}

// The same for elements whose dtype is known at run time.
template <class T>
__attribute__((noinline)) void stage_rows(Elements src, int64_t row_stride, int64_t col_stride,
                                          int64_t rows, int64_t cols, T* dst, int64_t ld) {
  with_elements(src, [&](const auto* from) __attribute__((always_inline)) {
    stage_rows<T>(from, row_stride, col_stride, rows, cols, dst, ld);
  });
}

// Whether pairs can be loaded as aligned words.
FASTATTN_INLINE bool word_aligned(const Bf16* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(float) == 0;
}

constexpr int64_t kPairs = 2 * kLanes<float>;  // elements of a vector of bf16

// d = (x0 y0, x1 y1, ...), of two vectors of bf16.
FASTATTN_INLINE void interleave(VecF x, VecF y, float* d) {
#if FASTATTN_AVX512
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  store(d, (VecF)_mm512_permutex2var_epi16((__m512i)x, low, (__m512i)y));
  store(d + kLanes<float>, (VecF)_mm512_permutex2var_epi16((__m512i)x, high, (__m512i)y));
#else
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes)));
  alignas(kVectorBytes) Halves from[2] = {(Halves)x, (Halves)y};
  for (int64_t c = 0; c < kPairs; ++c)
    d[c] = float_of(static_cast<uint32_t>(from[0][c]) | static_cast<uint32_t>(from[1][c]) << 16);
#endif
}

// Stages rows as words of two consecutive columns, the last word padded with zero.
FASTATTN_INLINE void stage_pairs(const Bf16* src, int64_t row_stride, int64_t col_stride,
                                 int64_t rows, int64_t cols, float* dst, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    const Bf16* s = src + r * row_stride;
    Bf16* d = reinterpret_cast<Bf16*>(dst + r * ld);
    int64_t c = 0;
    if (col_stride == 1) {
      for (; c + kPairs <= cols; c += kPairs)
        store(reinterpret_cast<float*>(d + c), load(reinterpret_cast<const float*>(s + c)));
    }
    for (; c < cols; ++c) d[c] = s[c * col_stride];
    if (cols % 2) d[cols].bits = 0;
  }
}

// Words of two consecutive *rows*: dst[r / 2][c] = (row r, row r + 1) of column c; a missing last
// row is zero.
FASTATTN_INLINE void stage_row_pairs(const Bf16* src, int64_t row_stride, int64_t col_stride,
                                     int64_t rows, int64_t cols, float* dst, int64_t ld) {
  for (int64_t r = 0; r < rows; r += 2) {
    const Bf16* a = src + r * row_stride;
    const Bf16* b = a + row_stride;
    const bool both = r + 1 < rows;
    float* d = dst + r / 2 * ld;
    int64_t c = 0;
    if (col_stride == 1) {
      for (; c + kPairs <= cols; c += kPairs)
        interleave(load(reinterpret_cast<const float*>(a + c)),
                   both ? load(reinterpret_cast<const float*>(b + c)) : VecF{}, d + c);
    }
    for (; c < cols; ++c) {
      const uint32_t pair =
          a[c * col_stride].bits | (both ? static_cast<uint32_t>(b[c * col_stride].bits) << 16 : 0);
      d[c] = float_of(pair);
    }
  }
}

// Queries (or output gradients) of a panel as the right-hand side of a score tile: dst[word][lane].
template <class P>
FASTATTN_INLINE void pack_panel(typename P::Source src, int64_t row_stride, int64_t col_stride,
                                int64_t rows, int64_t cols, int64_t lanes, typename P::Word* dst,
                                int64_t ld, [[maybe_unused]] typename P::Word* temp) {
  if constexpr (P::kPerWord == 1) {
    pack_transposed<typename P::Acc>(src, row_stride, col_stride, rows, cols, lanes, dst, ld);
  } else {
    // A row's pairs are its 32-bit words, so the transposition moves words.
    const float* from = reinterpret_cast<const float*>(src);
    int64_t stride = row_stride / 2;
    if (col_stride != 1 || cols % 2 || row_stride % 2 || !word_aligned(src)) {
      stride = words<P>(cols);
      stage_pairs(src, row_stride, col_stride, rows, cols, temp, stride);
      from = temp;
    }
    pack_transposed<float>(from, stride, int64_t(1), rows, words<P>(cols), lanes, dst, ld);
  }
}

// Keys (or values) as the broadcast rows of a tile. Returns their address: in place if they are
// contiguous words already, else dst.
template <class P>
FASTATTN_INLINE const typename P::Word* stage_keys(typename P::Source src, int64_t row_stride,
                                                   int64_t col_stride, int64_t rows, int64_t cols,
                                                   typename P::Word* dst) {
  if constexpr (P::kPerWord == 2) {
    if (col_stride == 1 && row_stride == cols && cols % 2 == 0 && word_aligned(src))
      return reinterpret_cast<const float*>(src);
    stage_pairs(src, row_stride, col_stride, rows, cols, dst, words<P>(cols));
    return dst;
  } else {
    const typename P::Word* const own = in_place<typename P::Word>(src);
    if (own != nullptr && col_stride == 1 && row_stride == cols) return own;
    stage_rows<typename P::Acc>(src, row_stride, col_stride, rows, cols, dst, cols);
    return dst;
  }
}

// Rows that a product reduces over (values under probabilities, keys under score gradients). Where
// a word is a pair, it holds two rows. One block of `rows` takes words<P>(rows) * cols words.
template <class P>
FASTATTN_INLINE const typename P::Word* stage_reduced(typename P::Source src, int64_t row_stride,
                                                      int64_t col_stride, int64_t rows,
                                                      int64_t cols, typename P::Word* dst) {
  if constexpr (P::kPerWord == 2) {
    stage_row_pairs(src, row_stride, col_stride, rows, cols, dst, cols);
    return dst;
  } else {
    return stage_keys<P>(src, row_stride, col_stride, rows, cols, dst);
  }
}

// Rows as words to reduce over, dst[words of rows][padded], where columns past `cols` are zero.
template <class P>
FASTATTN_INLINE void stage_padded(typename P::Source src, int64_t row_stride, int64_t col_stride,
                                  int64_t rows, int64_t cols, typename P::Word* dst,
                                  int64_t padded) {
  if (padded != cols)
    __builtin_memset(dst, 0,
                     static_cast<size_t>(words<P>(rows) * padded) * sizeof(typename P::Word));
  if constexpr (P::kPerWord == 1)
    stage_rows<typename P::Acc>(src, row_stride, col_stride, rows, cols, dst, padded);
  else
    stage_row_pairs(src, row_stride, col_stride, rows, cols, dst, padded);
}

// Clears row i of what stage_padded() wrote.
template <class P>
FASTATTN_INLINE void clear_row(typename P::Word* dst, int64_t i, int64_t padded) {
  for (int64_t d = 0; d < padded; ++d) {
    typename P::Word& word = dst[i / P::kPerWord * padded + d];
    if constexpr (P::kPerWord == 1)
      word = 0;
    else
      word = float_of(bits_of(word) & (i % 2 ? 0x0000ffffu : 0xffff0000u));
  }
}

// Rows of up to eight tensors that the processor is to read into its L2 cache, a few lines at a
// time between products: a burst of more than its L1 has buffers for would wait for memory.
class RowsAhead {
 public:
  // Adds rows to read ahead.
  template <class S>
  FASTATTN_INLINE void add(const S* first, const int64_t* stride, int64_t rows, int64_t columns) {
    const int64_t size = static_cast<int64_t>(sizeof(S)), bytes = columns * size;
    if (stride[3] != 1 || rows == 0 || columns == 0) return;
    const bool dense = stride[2] == columns;
    part_[count_++] = {reinterpret_cast<const char*>(first), stride[2] * size,
                       dense ? rows * bytes : bytes, dense ? 1 : rows};
    lines_ += rows * ((bytes + kLine - 1) / kLine);
  }
  FASTATTN_INLINE void add(Elements first, const int64_t* stride, int64_t rows, int64_t columns) {
    with_elements(first, [&](const auto* from) { add(from, stride, rows, columns); });
  }
  // Has read_some() called this many times read all.
  FASTATTN_INLINE void share(int64_t calls) {
    share_ = calls == 0 ? 0 : (lines_ + calls - 1) / calls;
  }

  // Prefetches the next share of the added rows.
  FASTATTN_INLINE void read_some() {
    for (int64_t left = share_; left > 0;) {
      if (from_ >= end_ && !next_row()) return;
      const char *from = from_, *const to = min_of(end_, from + left * kLine);
      left -= (to - from + kLine - 1) / kLine;
      for (; from < to; from += kLine) __builtin_prefetch(from, 0, 2);
      from_ = from;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Part {
    const char* row;
    int64_t stride, bytes, rows;
  };
  Part part_[8];
  int count_ = 0, at_ = 0;
  int64_t lines_ = 0, share_ = 0;
  const char *from_ = nullptr, *end_ = nullptr;

  // Goes to the next row; false after the last.
  bool next_row() {
    if (at_ == count_) return false;
    Part& part = part_[at_];
    from_ = part.row, end_ = from_ + part.bytes;
    part.row += part.stride;
    if (--part.rows == 0) ++at_;
    return true;
  }
};

// Has the processor read rows into its L2 cache, before their first use. Only where they are
// contiguous: others are staged row by row, and the staging waits for each.
template <class S>
FASTATTN_INLINE void prefetch_rows(const S* src, int64_t row_stride, int64_t col_stride,
                                   int64_t rows, int64_t cols) {
  constexpr int64_t kLine = 64 / sizeof(S);
  if (col_stride != 1) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; c += kLine) __builtin_prefetch(src + r * row_stride + c, 0, 2);
}
// The same for elements whose dtype is known at run time.
FASTATTN_INLINE void prefetch_rows(Elements src, int64_t row_stride, int64_t col_stride,
                                   int64_t rows, int64_t cols) {
  with_elements(src, [&](const auto* from) __attribute__((always_inline)) {
    prefetch_rows(from, row_stride, col_stride, rows, cols);
  });
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
