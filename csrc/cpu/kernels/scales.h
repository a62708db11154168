// The rows in a cache of one key head of one sequence, and their scales if they are quantised.
#pragma once
#include "../../params.h"
#include "../simd/simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class X>
struct HeadRows {
  const X* head;         // of the entry, or of page 0
  int64_t page_stride;   // between pages
  int64_t row_stride;    // between rows
  const int32_t* pages;  // null = not paged
  int64_t page_size;
};
typedef HeadRows<float> ScaleRows;

// The rows of one key head of a cache: of entry `entry`, or of the pages of a sequence.
template <class X>
FASTATTN_INLINE HeadRows<X> head_rows(const Tensor4& x, int64_t entry, int64_t hk,
                                      const int32_t* pages, int64_t page_size) {
  const X* const head = static_cast<const X*>(x.data) + hk * x.stride[1];
  return {head + (pages == nullptr ? entry * x.stride[0] : 0), x.stride[0], x.stride[2], pages,
          page_size};
}

// The scales of the same rows.
FASTATTN_INLINE ScaleRows scale_rows(const Tensor4& x, int64_t entry, int64_t hk,
                                     const int32_t* pages, int64_t page_size) {
  return head_rows<float>(x, entry, hk, pages, page_size);
}

// Calls f(address of row j, j, count) for the rows [j0, j1), page by page.
template <class X, class F>
FASTATTN_INLINE void each_run(const HeadRows<X>& x, int64_t j0, int64_t j1, F f) {
  for (int64_t j = j0; j < j1;) {
    const int64_t page = x.pages == nullptr ? 0 : j / x.page_size, begin = page * x.page_size;
    const int64_t end = x.pages == nullptr ? j1 : min_of(j1, begin + x.page_size);
    const int64_t at = x.pages == nullptr ? 0 : x.pages[page] * x.page_stride;
    f(x.head + at + (j - begin) * x.row_stride, j, end - j);
    j = end;
  }
}

// to[j - j0] = the scale of row j
FASTATTN_INLINE void read_scales(const ScaleRows& x, int64_t j0, int64_t j1, float* to) {
  constexpr int W = kLanes<float>;
  each_run(x, j0, j1,
           [&](const float* from, int64_t j, int64_t count) __attribute__((always_inline)) {
             float* const at = to + (j - j0);
             int64_t n = 0;
             if (x.row_stride == 1)
               for (; n + W <= count; n += W) store(at + n, load(from + n));
             for (; n < count; ++n) at[n] = from[n * x.row_stride];
           });
}

// Whether a scale is not positive, infinite or NaN, for `count` scales, a multiple of the lanes.
FASTATTN_INLINE bool any_wrong(const float* scales, int64_t count) {
  constexpr int W = kLanes<float>;
  VecI right = VecI{} - 1;
  for (int64_t n = 0; n < count; n += W) {
    const VecF x = load(scales + n);
    right &= (x > 0.0f) & (x <= __FLT_MAX__);
  }
  int32_t all = -1;
  FASTATTN_UNROLL for (int l = 0; l < W; ++l) all &= right[l];
  return all == 0;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
