// Evaluates a mask program, for a region of queries and keys at once or pair by pair.
//
// A region without a visible pair is skipped before its scores are computed. A fully visible region
// costs nothing extra, and neither do the keys of a region that all of its queries see. These
// answers are conservative: a region may be reported as partly visible, and its pairs then decide.
#pragma once
#include "scores.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

enum class Coverage : int { none, some, all };

// The visible part of a region: `keys` has all visible pairs, {0, 0} without any; `whole` has only
// keys that all queries see. It may be empty, and leaves out keys that are not in one range.
struct Region {
  Range keys, whole;
};

struct Extremes {
  int32_t min, max;
};

FASTATTN_INLINE VecI load_integers(const int32_t* x) {
  return (VecI)load(reinterpret_cast<const float*>(x));
}

// The least and the greatest of x[count].
FASTATTN_INLINE Extremes extremes(const int32_t* x, int64_t count) {
  constexpr int W = kLanes<float>;
  Extremes e{x[0], x[0]};
  int64_t n = 0;
  if (count >= W) {
    VecI min = load_integers(x), max = min;
    for (n = W; n + W <= count; n += W) {
      const VecI v = load_integers(x + n);
      min = v < min ? v : min;
      max = v > max ? v : max;
    }
    FASTATTN_UNROLL for (int l = 0; l < W; ++l) {
      e.min = min_of<int32_t>(e.min, min[l]);
      e.max = max_of<int32_t>(e.max, max[l]);
    }
  }
  for (; n < count; ++n) {
    e.min = min_of(e.min, x[n]);
    e.max = max_of(e.max, x[n]);
  }
  return e;
}

// Whether any element of x[kStride] is within the extremes.
constexpr int64_t kStride = 64;
FASTATTN_INLINE bool any_within(const int32_t* x, Extremes e) {
  constexpr int W = kLanes<float>;
  VecI inside{};
  FASTATTN_UNROLL for (int n = 0; n < kStride; n += W) {
    const VecI v = load_integers(x + n);
    inside |= (v >= e.min) & (v <= e.max);
  }
  int32_t any = 0;
  FASTATTN_UNROLL for (int l = 0; l < W; ++l) any |= inside[l];
  return any != 0;
}

// The program for one head of one batch entry.
class MaskProgram {
 public:
  MaskProgram(const Sequence& params, int64_t b, int64_t h) : p(params) {
    for (int n = 0; n < p.mask_steps; ++n) {
      const MaskStep& s = p.mask_program[n];
      if (s.kind == MaskKind::all_of || s.kind == MaskKind::any_of) continue;
      const int64_t entry = (p.index + b) % s.batch;
      if (s.kind == MaskKind::blocks) {
        data_[n] = s.data + (entry * s.heads + h % s.heads) * s.blocks_q * s.blocks_k;
        continue;
      }
      const int32_t* first = s.data + entry * s.stride;
      data_[n] = first + p.mask_query;
      second_[n] = first + s.second + (s.kind == MaskKind::ids ? p.mask_key : p.mask_query);
    }
  }

  // The visible part of queries [i0, i1) and these keys; neither is empty.
  Region region(int64_t i0, int64_t i1, Range keys) const {
    return evaluate<Region>([&](int n) { return region_of_leaf(n, i0, i1, keys); },
                            [](MaskKind kind, const Region& a, const Region& b) {
                              return kind == MaskKind::all_of ? both(a, b) : either(a, b);
                            });
  }

  // How many pairs of queries [i0, i1) and all of these keys are visible.
  Coverage coverage(int64_t i0, int64_t i1, Range keys) const {
    const Region r = region(i0, i1, keys);
    if (r.keys.begin >= r.keys.end) return Coverage::none;
    return same(r.whole, keys) ? Coverage::all : Coverage::some;
  }

  // Whether query i sees key j.
  bool sees(int64_t i, int64_t j) const {
    return evaluate<bool>(
        [&](int n) { return leaf_sees(n, i, j); },
        [](MaskKind kind, bool a, bool b) { return kind == MaskKind::all_of ? a && b : a || b; });
  }

  // tile[j - j0][lane] = -inf where key j is not visible to query i0 + lane; other values stay. For
  // queries [i0, i1); i0 is a multiple of the lanes. A few keys at a time: of a block on the edge
  // of a mask, most keys are visible to all queries or to none.
  template <class T>
  void exclude(int64_t i0, int64_t i1, int64_t j0, int64_t j1, int64_t lanes, T* tile) const {
    constexpr int64_t kKeys = 16;
    for (int64_t j = j0; j < j1; j += kKeys) {
      const int64_t end = min_of(j1, j + kKeys);
      T* rows = tile + (j - j0) * lanes;
      const Coverage coverage_of_keys =
          j1 - j0 <= kKeys ? Coverage::some : coverage(i0, i1, {j, end});
      if (coverage_of_keys == Coverage::some) exclude_pairs(i0, j, end, lanes, rows);
      if (coverage_of_keys != Coverage::none) continue;
      for (int64_t x = 0; x < (end - j) * lanes; x += kLanes<T>)
        store(rows + x, splat<T>(-kInf<T>));
    }
  }

 private:
  const Sequence& p;
  const int32_t* data_[kMaskSteps];    // of the leaves: low, or the ids of the queries, or states
  const int32_t* second_[kMaskSteps];  // high, or the ids of the keys

  // The value of the program, from the values of its leaves.
  template <class Value, class Leaf, class Combine>
  FASTATTN_INLINE Value evaluate(Leaf leaf, Combine combine) const {
    if (p.mask_steps == 1) return leaf(0);
    Value stack[kMaskSteps / 2 + 1];
    int top = -1;
    for (int n = 0; n < p.mask_steps; ++n) {
      const MaskKind kind = p.mask_program[n].kind;
      if (kind == MaskKind::all_of || kind == MaskKind::any_of) {
        --top;
        stack[top] = combine(kind, stack[top], stack[top + 1]);
      } else {
        stack[++top] = leaf(n);
      }
    }
    return stack[0];
  }

  // ---- Regions ----------------------------------------------------------------------------------

  static bool same(Range a, Range b) { return a.begin == b.begin && a.end == b.end; }
  static Range common(Range a, Range b) { return {max_of(a.begin, b.begin), min_of(a.end, b.end)}; }
  static Range longer(Range a, Range b) { return a.end - a.begin < b.end - b.begin ? b : a; }

  // A region from the keys that may have a visible pair, and a range of keys that all queries see.
  static Region of(Range keys, Range whole) {
    if (keys.begin >= keys.end) return {{0, 0}, {0, 0}};
    return {keys, common(keys, whole)};
  }

  // The region of two operands that must both see a pair.
  static Region both(const Region& a, const Region& b) {
    return of(common(a.keys, b.keys), common(a.whole, b.whole));
  }

  // The region of either of two leaves.
  static Region either(const Region& a, const Region& b) {
    if (a.keys.begin >= a.keys.end) return b;
    if (b.keys.begin >= b.keys.end) return a;
    const Range keys{min_of(a.keys.begin, b.keys.begin), max_of(a.keys.end, b.keys.end)};
    const Range all{min_of(a.whole.begin, b.whole.begin), max_of(a.whole.end, b.whole.end)};
    const bool together = a.whole.begin < a.whole.end && b.whole.begin < b.whole.end &&
                          max_of(a.whole.begin, b.whole.begin) <= min_of(a.whole.end, b.whole.end);
    return of(keys, together ? all : longer(a.whole, b.whole));
  }

  // The region of leaf n.
  Region region_of_leaf(int n, int64_t i0, int64_t i1, Range keys) const {
    const MaskStep& s = p.mask_program[n];
    if (s.kind == MaskKind::interval) {
      return region_of_interval(s.negated, extremes(data_[n] + i0, i1 - i0),
                                extremes(second_[n] + i0, i1 - i0), keys);
    }
    if (s.kind == MaskKind::ids)
      return region_of_ids(s.negated, extremes(data_[n] + i0, i1 - i0), second_[n], keys);
    return region_of_blocks(s, data_[n], i0, i1, keys);
  }

  // The region of low[i] <= j < high[i], from the extremes of both bounds.
  static Region region_of_interval(bool negated, Extremes low, Extremes high, Range keys) {
    if (!negated) {
      return of(common(keys, {low.min, high.max}), {low.max, high.min});
    }
    // j < low or high <= j. Where no key is below any low, only keys from the least high on are
    // visible, and the other way round.
    const Range before{keys.begin, min_of<int64_t>(keys.end, low.min)},
        after{max_of<int64_t>(keys.begin, high.max), keys.end};
    if (low.max <= keys.begin) keys.begin = max_of<int64_t>(keys.begin, high.min);
    if (high.min >= keys.end) keys.end = min_of<int64_t>(keys.end, low.max);
    return of(keys, before.end >= after.begin ? keys : longer(before, after));
  }

  // The region of equal ids.
  static Region region_of_ids(bool negated, Extremes queries, const int32_t* ids, Range keys) {
    const bool one = queries.min == queries.max;
    const Range none{0, 0};
    if (negated) {
      const Extremes e = extremes(ids + keys.begin, keys.end - keys.begin);
      if (one && e.min == e.max && e.min == queries.min) return of(none, none);
      return of(keys, e.max < queries.min || e.min > queries.max ? keys : none);
    }
    const auto outside = [&](int64_t j) { return ids[j] < queries.min || ids[j] > queries.max; };
    while (keys.begin + kStride <= keys.end && !any_within(ids + keys.begin, queries))
      keys.begin += kStride;
    while (keys.begin < keys.end && outside(keys.begin)) ++keys.begin;
    while (keys.begin + kStride <= keys.end && !any_within(ids + keys.end - kStride, queries))
      keys.end -= kStride;
    while (keys.begin < keys.end && outside(keys.end - 1)) --keys.end;
    if (!one || keys.begin >= keys.end) return of(keys, none);
    const Extremes e = extremes(ids + keys.begin, keys.end - keys.begin);
    return of(keys, e.min == e.max ? keys : none);
  }

  // The region of a leaf of blocks: the keys of its nonempty columns, and the longest run of full
  // ones.
  static Region region_of_blocks(const MaskStep& s, const int32_t* states, int64_t i0, int64_t i1,
                                 Range keys) {
    const int64_t row_end = (i1 - 1) / s.block_q + 1, column_end = (keys.end - 1) / s.block_k + 1;
    Range nonempty{0, 0}, run{0, 0},
        full_run{0, 0};  // columns; a run and the longest of whole ones
    for (int64_t c = keys.begin / s.block_k; c < column_end; ++c) {
      bool any = false, every = true;
      for (int64_t r = i0 / s.block_q; r < row_end; ++r) {
        const int32_t state = states[r * s.blocks_k + c];
        any |= state != (s.negated ? 1 : 0);
        every &= state == (s.negated ? 0 : 1);
      }
      run = {every && run.end == c ? run.begin : c, every ? c + 1 : c};
      full_run = longer(full_run, run);
      if (any) nonempty = {nonempty.end == 0 ? c : nonempty.begin, c + 1};
    }
    const auto keys_of = [&](Range columns) -> Range {
      return {columns.begin * s.block_k, columns.end * s.block_k};
    };
    keys = common(keys, keys_of(nonempty));
    Range all = common(keys, keys_of(full_run));
    if (i0 / s.block_q + 1 != row_end) return of(keys, all);
    // A diagonal crosses partial blocks: many of their keys are seen by none or by all of these few
    // queries.
    const int32_t* row = states + i0 / s.block_q * s.blocks_k;
    const auto coverage_of = [&](int64_t j) { return coverage_of_key(s, row, i0, i1, j); };
    while (keys.begin < keys.end && coverage_of(keys.begin) == Coverage::none) ++keys.begin;
    while (keys.begin < keys.end && coverage_of(keys.end - 1) == Coverage::none) --keys.end;
    if (all.begin >= all.end) all = {keys.begin, keys.begin};
    while (all.begin > keys.begin && coverage_of(all.begin - 1) == Coverage::all) --all.begin;
    while (all.end < keys.end && coverage_of(all.end) == Coverage::all) ++all.end;
    return of(keys, all);
  }

  // How many of the queries [i0, i1), which are in one row of blocks, see key j.
  static Coverage coverage_of_key(const MaskStep& s, const int32_t* row, int64_t i0, int64_t i1,
                                  int64_t j) {
    const int32_t state = row[j / s.block_k];
    if (state < 2) return (state == 1) != s.negated ? Coverage::all : Coverage::none;
    const int64_t first = i0 % s.block_q, last = first + (i1 - i0) - 1, key = j % s.block_k;
    const uint32_t* words = s.bits + ((state - 2) * s.block_k + key) * words_of(s);
    bool any = false, every = true;
    for (int64_t w = first / 32; w <= last / 32; ++w) {
      uint32_t mask = ~0u;  // the bits of these queries
      if (w == first / 32) mask &= ~0u << first % 32;
      if (w == last / 32) mask &= ~0u >> (31 - last % 32);
      const uint32_t bits = (s.negated ? ~words[w] : words[w]) & mask;
      any |= bits != 0;
      every &= bits == mask;
    }
    return every ? Coverage::all : any ? Coverage::some : Coverage::none;
  }

  // ---- Pairs ------------------------------------------------------------------------------------

  // The words of bits for a column of a block.
  static int64_t words_of(const MaskStep& s) { return (s.block_q + 31) / 32; }

  // Whether a leaf of blocks has the pair (i, j), before negation.
  static bool bit_of(const MaskStep& s, const int32_t* states, int64_t i, int64_t j) {
    const int64_t r = i / s.block_q, c = j / s.block_k;
    const int32_t state = states[r * s.blocks_k + c];
    if (state < 2) return state == 1;
    const int64_t lane = i - r * s.block_q, key = j - c * s.block_k;
    const uint32_t word = s.bits[((state - 2) * s.block_k + key) * words_of(s) + lane / 32];
    return word >> lane % 32 & 1;
  }

  // Whether leaf n makes the pair (i, j) visible.
  bool leaf_sees(int n, int64_t i, int64_t j) const {
    const MaskStep& s = p.mask_program[n];
    const int32_t* x = data_[n];
    bool visible;
    if (s.kind == MaskKind::interval)
      visible = x[i] <= j && j < second_[n][i];
    else if (s.kind == MaskKind::ids)
      visible = x[i] == second_[n][j];
    else
      visible = bit_of(s, x, i, j);
    return visible != s.negated;
  }

  // A column of blocks, for the keys up to its end.
  struct Cursor {
    int64_t end;
    int32_t state;
    int shift;
    const uint32_t* word;  // of the key
  };

  // exclude(), pair by pair.
  template <class T>
  void exclude_pairs(int64_t i0, int64_t j0, int64_t j1, int64_t lanes, T* tile) const {
    constexpr int W = kLanes<float>;
    for (int64_t l = 0; l < lanes; l += W) {
      Cursor cursors[kMaskSteps];
      for (int n = 0; n < p.mask_steps; ++n) cursors[n].end = j0;
      const int count = static_cast<int>(min_of<int64_t>(W, lanes - l));
      for (int64_t j = j0; j < j1; ++j) {
        const VecI visible = evaluate<VecI>(
            [&](int n) { return lanes_of_leaf(n, i0 + l, j, cursors[n]); },
            [](MaskKind kind, VecI a, VecI b) { return kind == MaskKind::all_of ? a & b : a | b; });
        T* row = tile + (j - j0) * lanes + l;
        if constexpr (kSame<T, float>) {
          store(row, select<float>(visible, load(row), splat(-kInf<float>)));
        } else {
          for (int x = 0; x < count; ++x)
            if (!visible[x]) row[x] = -kInf<T>;
        }
      }
    }
  }

  // All ones in the lanes of queries i... that see key j.
  FASTATTN_INLINE VecI lanes_of_leaf(int n, int64_t i, int64_t j, Cursor& cursor) const {
    const MaskStep& s = p.mask_program[n];
    const int32_t* x = data_[n];
    VecI visible;
    if (s.kind == MaskKind::interval) {
      const VecI key = VecI{} + static_cast<int32_t>(j);
      visible = (load_integers(x + i) <= key) & (key < load_integers(second_[n] + i));
    } else if (s.kind == MaskKind::ids) {
      visible = load_integers(x + i) == second_[n][j];
    } else {
      visible = lanes_of_blocks(s, x, i, j, cursor);
    }
    return s.negated ? ~visible : visible;
  }

  // Which of the queries in the lanes from i on see key j, by a leaf of blocks.
  FASTATTN_INLINE VecI lanes_of_blocks(const MaskStep& s, const int32_t* states, int64_t i,
                                       int64_t j, Cursor& cursor) const {
    constexpr int W = kLanes<float>;
    VecI visible{};
    if (s.block_q % 32 != 0) {  // the lanes may belong to several blocks
      for (int l = 0; l < W && i + l < p.Lq; ++l) visible[l] = bit_of(s, states, i + l, j) ? -1 : 0;
      return visible;
    }
    if (i >= p.Lq) return visible;
    if (j >= cursor.end) {
      const int64_t r = i / s.block_q, c = j / s.block_k, lane = i - r * s.block_q;
      cursor.end = (c + 1) * s.block_k;
      cursor.state = states[r * s.blocks_k + c];
      cursor.shift = static_cast<int>(lane % 32);
      const int64_t block = max_of(cursor.state - 2, 0), key = j - c * s.block_k;
      cursor.word = s.bits + (block * s.block_k + key) * words_of(s) + lane / 32;
    }
    if (cursor.state < 2) return visible - (cursor.state == 1 ? 1 : 0);
    const uint32_t word = *cursor.word >> cursor.shift;
    cursor.word += words_of(s);
    FASTATTN_UNROLL for (int l = 0; l < W; ++l) visible[l] = 1 << l;
    return ((visible & static_cast<int32_t>(word)) != 0);
  }
};

// The keys of a range that a mask program makes visible to the queries [i0, i1), which are not
// empty.
FASTATTN_INLINE Range visible_by_program(const Sequence& p, int64_t b, int64_t h, int64_t i0,
                                         int64_t i1, Range keys) {
  if (p.mask_program == nullptr || keys.begin >= keys.end) return keys;
  return MaskProgram(p, b, h).region(i0, i1, keys).keys;
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
