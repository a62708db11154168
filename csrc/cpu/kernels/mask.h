// Reading masks. Three shapes matter: none, one row for all queries (padding), and a full matrix.
#pragma once
#include "image_bias.h"
#include "mask_program.h"
#include "pack.h"
#include "relative_bias.h"
#include "scores.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// f(typed pointer) for a floating or boolean operand of any dtype.
template <class F>
FASTATTN_INLINE void with_storage(const void* data, DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(static_cast<const float*>(data));
    case DType::f64:
      return f(static_cast<const double*>(data));
    case DType::bf16:
      return f(static_cast<const Bf16*>(data));
    case DType::f16:
      return f(static_cast<const F16*>(data));
    case DType::boolean:
      return f(static_cast<const Bool*>(data));
  }
}

// True if load_as converts S to T with vector operations. Conversions between float and double go
// element by element.
template <class T, class S>
constexpr bool kVectorConvertible = kSame<T, S> || (sizeof(T) == 4 && !kSame<S, double>);

// dst[j - j0][lane] = mask[i0 + lane][j] for keys [j0, j1); 0 in the lanes past the last query.
template <class T>
__attribute__((noinline)) void pack_mask(const AttentionParams& p, int64_t b, int64_t h, int64_t i0,
                                         int64_t i1, int64_t j0, int64_t j1, int64_t lanes,
                                         T* dst) {
  with_storage(p.mask.data, p.mask_dtype, [&](const auto* data) {
    typedef typename ElementOf<decltype(data)>::type S;
    const int64_t* st = p.mask.stride;
    const S* from = data + b * st[0] + h * st[1] + i0 * st[2] + j0 * st[3];
    if constexpr (kVectorConvertible<T, S>) {
      pack_transposed<T>(from, st[2], st[3], i1 - i0, j1 - j0, lanes, dst, lanes);
    } else {
      for (int64_t j = 0; j < j1 - j0; ++j)
        for (int64_t l = 0; l < lanes; ++l)
          dst[j * lanes + l] =
              l < i1 - i0 ? static_cast<T>(widen(from[l * st[2] + j * st[3]])) : T(0);
    }
  });
}

// dst[j - j0] = mask[i][j], one query's row.
template <class T>
__attribute__((noinline)) void read_mask_row(const AttentionParams& p, int64_t b, int64_t h,
                                             int64_t i, int64_t j0, int64_t j1, T* dst) {
  with_storage(p.mask.data, p.mask_dtype, [&](const auto* data) {
    const int64_t* st = p.mask.stride;
    const auto* from = data + b * st[0] + h * st[1] + i * st[2];
    for (int64_t j = j0; j < j1; ++j) dst[j - j0] = static_cast<T>(widen(from[j * st[3]]));
  });
}

// Whether all queries share one row of the mask.
FASTATTN_INLINE bool is_key_mask(const AttentionParams& p) {
  return p.mask.data != nullptr && (p.mask.stride[2] == 0 || p.Lq == 1);
}

// Whether all `count` biases are -inf.
template <class T>
FASTATTN_INLINE bool all_excluded(const T* bias, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>)
    if (max_lanes<T>(load(bias + i)) != -kInf<T>) return false;
  for (; i < count; ++i)
    if (bias[i] != -kInf<T>) return false;
  return true;
}

// Whether the bias differs from query to query, so that a block needs a tile of it.
FASTATTN_INLINE bool has_bias_of_pairs(const AttentionParams& p) {
  return p.mask_program != nullptr || p.relative_bias != nullptr || has_image_bias(p) ||
         (p.mask.data != nullptr && !is_key_mask(p));
}

// Fills the tile of bias [keys j0 to j1][lanes] of queries [i0, i1), of which there are at most
// `lanes`, unless none or all of their pairs are visible and have no bias. `clear`, if it is not
// null, gets the keys whose rows are not filled, because all pairs are visible and have no bias.
template <class T>
FASTATTN_INLINE Coverage pack_bias(const Sequence& p, int64_t b, int64_t h, int64_t i0, int64_t i1,
                                   int64_t j0, int64_t j1, int64_t lanes, T* tile,
                                   Range* clear = nullptr) {
  const bool masked = p.mask.data != nullptr, by_distance = p.relative_bias != nullptr,
             adds = masked || by_distance || has_image_bias(p);
  const MaskProgram program(p, b, h);
  Range whole{j0, j1};
  if (p.mask_program != nullptr) {
    const Region region = program.region(i0, i1, whole);
    if (region.keys.begin >= region.keys.end) return Coverage::none;
    whole = region.whole;
    if (whole.begin >= whole.end) whole = {j0, j0};
    if (!adds && whole.begin == j0 && whole.end == j1) return Coverage::all;
  }
  const Range edges[] = {{j0, whole.begin}, {whole.end, j1}};
  const auto row = [&](int64_t j) { return tile + (j - j0) * lanes; };
  if (masked) pack_mask(p, b, h, i0, i1, j0, j1, lanes, tile);
  if (by_distance) pack_relative_bias(p, b, h, i0, i1, j0, j1, lanes, masked, tile);
  if (has_image_bias(p))
    pack_image_bias(p, b, h, i0, i1, j0, j1, lanes, masked || by_distance, tile);
  if (!adds) {
    if (clear != nullptr) *clear = whole;
    const auto zero = [&](Range keys) {
      __builtin_memset(row(keys.begin), 0,
                       static_cast<size_t>((keys.end - keys.begin) * lanes) * sizeof(T));
    };
    if (clear == nullptr) zero(whole);
    for (const Range edge : edges) zero(edge);
  }
  for (const Range edge : edges)
    program.exclude(i0, i1, edge.begin, edge.end, lanes, row(edge.begin));
  const bool some = !adds && whole.begin < whole.end;
  return some || !all_excluded(tile, (j1 - j0) * lanes) ? Coverage::some : Coverage::none;
}

// bias[j - j0] = the bias of query i and key j, for one query.
template <class T>
FASTATTN_INLINE void read_bias_row(const Sequence& p, int64_t b, int64_t h, int64_t i, int64_t j0,
                                   int64_t j1, T* bias) {
  const bool masked = p.mask.data != nullptr, by_distance = p.relative_bias != nullptr;
  if (masked)
    read_mask_row(p, b, h, i, j0, j1, bias);
  else if (!by_distance && !has_image_bias(p))
    __builtin_memset(bias, 0, static_cast<size_t>(j1 - j0) * sizeof(T));
  if (by_distance) read_relative_bias_row(p, b, h, i, j0, j1, masked, bias);
  if (has_image_bias(p)) read_image_bias_row(p, b, h, i, j0, j1, masked || by_distance, bias);
  if (p.mask_program == nullptr) return;
  const MaskProgram program(p, b, h);
  if (program.coverage(i, i + 1, {j0, j1}) == Coverage::all) return;
  for (int64_t j = j0; j < j1; ++j)
    if (!program.sees(i, j)) bias[j - j0] = -kInf<T>;
}

// [begin, end) without the excluded keys at either end, so that padding is skipped instead of
// computed and masked.
template <class T>
FASTATTN_INLINE Range trim(const T* keys, Range r) {
  while (r.begin < r.end && keys[r.end - 1] == -kInf<T>) --r.end;
  while (r.begin < r.end && keys[r.begin] == -kInf<T>) ++r.begin;
  return r;
}

// The ALiBi slope of a query head, 0 without ALiBi.
template <class T>
FASTATTN_INLINE T alibi_slope(const AttentionParams& p, int64_t b, int64_t h) {
  if (p.alibi == nullptr) return T(0);
  return static_cast<const T*>(p.alibi)[b * p.alibi_stride[0] + h * p.alibi_stride[1]];
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
