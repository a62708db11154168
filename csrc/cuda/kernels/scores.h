// All options of attention: the score of a dot product, and the keys that a query can see.
#pragma once
#include "../params.h"
#include "element.h"
#include "philox.h"
#include "varlen.h"

namespace fastattn {
namespace cuda {

constexpr float kLog2e = 1.4426950408889634f;

FASTATTN_DEVICE float minus_infinity() { return float_of_bits(0xff800000u); }

// A range of keys or queries, [begin, end).
struct Range {
  int begin, end;
  FASTATTN_DEVICE bool has(int n) const { return n >= begin && n < end; }
};

// The keys of query i in the window; none if the query does not exist.
FASTATTN_DEVICE Range visible_keys(const AttentionArguments& p, int i) {
  if (i >= p.Lq) return {0, 0};
  const int lk = static_cast<int>(p.Lk);
  return {clamp_int(i + p.window_begin, 0, lk), clamp_int(i + p.window_end, 0, lk)};
}

// The keys that at least one query of [first, last) can see.
FASTATTN_DEVICE Range keys_of_queries(const AttentionArguments& p, int first, int last) {
  return {visible_keys(p, first).begin, visible_keys(p, last - 1).end};
}

// The queries that can see at least one key of [first, last).
FASTATTN_DEVICE Range queries_of_keys(const AttentionArguments& p, int first, int last) {
  const int lq = static_cast<int>(p.Lq);
  return {clamp_int(int64_t(first) + 1 - p.window_end, 0, lq),
          clamp_int(int64_t(last) - p.window_begin, 0, lq)};
}

// The sink of a head: the score of one more key, whose value is 0. -inf without a sink, and for
// the rows after the last sequence.
FASTATTN_DEVICE float sink_of(const AttentionArguments& p, int b, int h) {
  if (p.sinks == nullptr || b >= p.B) return minus_infinity();
  return static_cast<const float*>(p.sinks)[b * p.sinks_stride[0] + h * p.sinks_stride[1]];
}

// The position of row n of the key axis, from which a relative bias counts distances.
FASTATTN_DEVICE int position(const AttentionArguments& p, int64_t n) {
  return p.positions == nullptr ? static_cast<int>(n) : p.positions[n];
}

// The distance of query i and key j in the table of a relative bias. It is clamped to the table,
// because the host checks neither the values of positions nor the lengths of cached sequences.
FASTATTN_DEVICE int distance(const AttentionArguments& p, int i, int j) {
  const int most = static_cast<int>(p.relative_bias_size / 2);
  return clamp_int(int64_t(position(p, i + p.offset)) - position(p, j), -most, most);
}

struct Score {
  float value;  // -inf if the pair is excluded
  float slope;  // its derivative by scale * q . k: 1 without softcap, 0 if excluded
};

// The options of one head.
struct Options {
  const AttentionArguments& p;
  int b, h;
  int64_t mask_offset;  // of [b, h], in elements
  float alibi;
  uint64_t seed;

  FASTATTN_DEVICE Options(const AttentionArguments& arguments, int b, int h)
      : p(arguments), b(b), h(h), mask_offset(0), alibi(0.0f), seed(0) {
    if (p.mask.data != nullptr) mask_offset = b * p.mask.stride[0] + h * p.mask.stride[1];
    if (p.alibi != nullptr && b < p.B)  // rows after the last sequence have no slope
      alibi = static_cast<const float*>(p.alibi)[b * p.alibi_stride[0] + h * p.alibi_stride[1]];
    if (p.seed_address != nullptr) seed = *p.seed_address;
  }

  // The mask at a visible pair: 0 or -inf if it is boolean, else the added value.
  FASTATTN_DEVICE float mask(int i, int j) const {
    const int64_t n = mask_offset + i * p.mask.stride[2] + j * p.mask.stride[3];
    switch (p.mask_dtype) {
      case DType::boolean:
        return static_cast<const uint8_t*>(p.mask.data)[n] != 0 ? 0.0f : minus_infinity();
      case DType::bf16:
        return float_of_bf16(static_cast<const uint16_t*>(p.mask.data)[n]);
      case DType::f16:
        return float_of_f16(static_cast<const uint16_t*>(p.mask.data)[n]);
      default:
        return static_cast<const float*>(p.mask.data)[n];
    }
  }

  // The sum of mask and relative bias for the score of a visible pair; -inf if one of them
  // excludes it.
  FASTATTN_DEVICE float bias(int i, int j) const {
    float sum = 0.0f;
    if (p.mask.data != nullptr) sum = mask(i, j);
    if (p.relative_bias != nullptr && sum != minus_infinity()) {
      const int64_t middle =
          b * p.relative_bias_stride[0] + h * p.relative_bias_stride[1] + p.relative_bias_size / 2;
      const float entry = static_cast<const float*>(p.relative_bias)[middle + distance(p, i, j)];
      sum = entry == minus_infinity() ? entry : sum + entry;
    }
    return sum;
  }

  // Excluded pairs are selected, so NaN or inf in a key that the query cannot see has no effect.
  FASTATTN_DEVICE Score score(float dot, int i, int j, const Range& visible) const {
    Score s{dot * p.scale_float, 1.0f};
    if (!visible.has(j)) return {minus_infinity(), 0.0f};
    if (p.softcap_float > 0.0f) {
      const float t = tanhf(s.value / p.softcap_float);
      s = {p.softcap_float * t, 1.0f - t * t};
    }
    if (has_bias(p)) {
      const float added = bias(i, j);
      if (added == minus_infinity()) return {added, 0.0f};
      s.value += added;
    }
    if (p.alibi != nullptr) {
      const int64_t d = i + p.offset - j;
      s.value -= alibi * static_cast<float>(d < 0 ? -d : d);
    }
    return s;
  }

  // Whether the call has dropout.
  FASTATTN_DEVICE bool drops() const { return p.seed_address != nullptr; }

  // The factor of the weight of (i, j): 0, or the inverse of the share of kept weights. `words`
  // holds the draws of (i, j / 8).
  FASTATTN_DEVICE Words words(int i, int j) const {
    return philox(static_cast<uint32_t>(i), static_cast<uint32_t>(j) / 8, static_cast<uint32_t>(h),
                  static_cast<uint32_t>(b), seed);
  }
  // The factor of a kept weight, 0 of a dropped one.
  FASTATTN_DEVICE float kept(const Words& words, int j) const {
    return draw_of(words, j) < p.keep_below ? p.keep_scale : 0.0f;
  }
};

}  // namespace cuda
}  // namespace fastattn
