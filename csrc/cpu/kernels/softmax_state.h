// The state of an online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867):
// m, the greatest score so far, l, the sum of e^(s - m), and o, the sum of e^(s - m) v. These
// functions merge the states of two disjoint sets of keys, for decoding, memory hops and
// merge_states.
#pragma once
#include "../simd/simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// The factors that rescale the sums of two states to their common maximum; 0 for a state without a
// key.
template <class T>
struct Shares {
  Vec<T> first, second;
};

// Merges m and l, one pair of states in each lane. weight(x) is e^x of x <= 0 in the unit of the
// scores.
template <class T, class Weight>
FASTATTN_INLINE Shares<T> merge_sums(Vec<T>* m, Vec<T>* l, Vec<T> second_m, Vec<T> second_l,
                                     Weight weight) {
  const Vec<T> to = max_of(*m, second_m);
  const Vec<T> reference = select<T>(to == -kInf<T>, Vec<T>{}, to);
  // A maximum of inf, as of a sink, has the whole weight: inf - inf would be NaN.
  const auto below = [&](Vec<T> x) __attribute__((always_inline)) {
    return select<T>(x == reference, Vec<T>{}, x - reference);
  };
  const Shares<T> share = {weight(below(*m)), weight(below(second_m))};
  *l = *l * share.first + second_l * share.second;
  *m = to;
  return share;
}

// Merges one pair of states; their shares are in all lanes.
template <class T, class Weight>
FASTATTN_INLINE Shares<T> merge_sums(T* m, T* l, T second_m, T second_l, Weight weight) {
  Vec<T> all_m = splat<T>(*m), all_l = splat<T>(*l);
  const Shares<T> share =
      merge_sums<T>(&all_m, &all_l, splat<T>(second_m), splat<T>(second_l), weight);
  *m = all_m[0], *l = all_l[0];
  return share;
}

// Merges o, [columns] in whole vectors.
template <class T>
FASTATTN_INLINE void merge_outputs(Shares<T> share, T* o, const T* second, int64_t columns) {
  for (int64_t d = 0; d < columns; d += kLanes<T>)
    store(o + d, load(o + d) * share.first + load(second + d) * share.second);
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
