// The elements of tensors of any dtype, read and written as T, the type of the arithmetic. These
// are functions, so that the kernels of memory hops are templates of only T.
#pragma once
#include "mask.h"
#include "rows.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class T>
constexpr DType kStoredAs = sizeof(T) == 8 ? DType::f64 : DType::f32;

// to[i] = element first + i * stride of data
template <class T>
__attribute__((noinline)) void read_elements(const void* data, DType dtype, int64_t first,
                                             int64_t stride, int64_t count, T* to) {
  with_storage(data, dtype, [&](const auto* all) __attribute__((always_inline)) {
    typedef typename ElementOf<decltype(all)>::type S;
    if constexpr (kVectorConvertible<T, S>) {
      stage_rows<T>(all + first, int64_t(0), stride, int64_t(1), count, to, count);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(widen(all[first + i * stride]));
    }
  });
}

// Rows in their storage type.
struct StoredRows {
  const void* base;
  int64_t stride;     // in elements
  const int64_t* at;  // as in Rows
  DType dtype;
  // Whether these are the same rows: two views of a memory may begin at one address.
  FASTATTN_INLINE bool is(const StoredRows& other) const {
    return base == other.base && stride == other.stride;
  }
  // The rows, for a known element type.
  template <class S>
  FASTATTN_INLINE Rows<S> as() const {
    return {static_cast<const S*>(base), stride, at};
  }
};

// to [count][D] = rows of bf16 or fp16
template <class S>
__attribute__((noinline)) void widen_rows(const Rows<S>& rows, int64_t count, int64_t D,
                                          float* to) {
  if (rows.at == nullptr && rows.stride == D) D *= count, count = 1;
  for (int64_t i = 0; i < count; ++i)
    stage_rows<float>(rows[i], int64_t(0), int64_t(1), int64_t(1), D, to + i * D, D);
}

// Rows [count, D] of any stored dtype, converted to T.
template <class T>
FASTATTN_INLINE void widen(const StoredRows& rows, int64_t count, int64_t D, T* to) {
  if constexpr (kSame<T, float>) {
    if (rows.dtype == DType::bf16)
      widen_rows(rows.as<Bf16>(), count, D, to);
    else
      widen_rows(rows.as<F16>(), count, D, to);
  }
}

// s[i] = rows[i] . x, see rows.h; narrow rows have whole vectors.
template <class T>
FASTATTN_INLINE void row_products(const StoredRows& rows, int64_t count, int64_t D, const T* x,
                                  T* s) {
  if (rows.dtype == kStoredAs<T>) return row_products<T>(rows.as<T>(), count, D, x, s);
  if constexpr (kSame<T, float>) {
    if (rows.dtype == DType::bf16)
      row_products<T, true>(rows.as<Bf16>(), count, D, x, s);
    else
      row_products<T, true>(rows.as<F16>(), count, D, x, s);
  }
}
// y = factor sum_i w[i] rows[i], or if it adds, factor y + sum_i w[i] rows[i]
template <class T>
FASTATTN_INLINE void weighted_sum(const StoredRows& rows, int64_t count, int64_t D, const T* w,
                                  bool adds, T factor, T* y) {
  if (rows.dtype == kStoredAs<T>)
    return weighted_sum<T>(rows.as<T>(), count, D, w, adds, factor, y);
  if constexpr (kSame<T, float>) {
    if (rows.dtype == DType::bf16)
      weighted_sum<T, true>(rows.as<Bf16>(), count, D, w, adds, factor, y);
    else
      weighted_sum<T, true>(rows.as<F16>(), count, D, w, adds, factor, y);
  }
}

// Elements first, first + 1, ... of data = x, rounded.
template <class T>
__attribute__((noinline)) void write_elements(const T* x, int64_t count, void* data, DType dtype,
                                              int64_t first) {
  if (dtype == kStoredAs<T>) return write_row(x, count, static_cast<T*>(data) + first);
  if constexpr (kSame<T, float>) {
    if (dtype == DType::bf16) return write_row(x, count, static_cast<Bf16*>(data) + first);
    if (dtype == DType::f16) return write_row(x, count, static_cast<F16*>(data) + first);
  }
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
