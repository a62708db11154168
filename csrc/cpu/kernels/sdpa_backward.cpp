// Backward attention. With P = softmax(S), recomputed from the log-sum-exp, and W = dropout(P):
//
//   dP = dO V^T + dW
//   delta_i = sum_d dO_id O_id + sum_j W_ij dW_ij - dlse_i
//   dS = P o (dropout(dP) - delta)
//   dQ = scale dS K,   dK = scale dS^T Q,   dV = W^T dO,   dmask = dS
//
// One pass over pairs of a block of keys and a panel of queries, with scores transposed as in the
// forward pass: S^T and dS^T are the right-hand side of dQ^T, and their rows are the broadcast
// left-hand side of dK and dV.
#include "sdpa_backward.h"

#include "sdpa_backward_schedule.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// The unit of a sequence. Only the kernels that compute in float32 have panels of one vector: each
// is compiled once more.
//
// Queries that fit one vector take two thirds of the time of panels of two (16 queries and keys, 8
// heads of 64, Zen 4), 33 to 56 take 0.86 to 1 of it: fewer lanes are empty where the last panel
// may be half a vector. 17 to 24 queries take 1.05.
template <class P>
struct Units {
  // Calls use(unit) with the unit of a sequence: panels one vector wide where wider ones would be
  // mostly empty.
  template <class Use>
  static auto with(const Sequence& s, Use use) {
    constexpr int64_t W = kLanes<float>;
    if constexpr (kSame<P, Single> && P::kHasVariants)
      if (s.Lq <= W || (P::kHalves && 2 * W < s.Lq && s.Lq <= 3 * W + W / 2))
        return use(BackwardUnit<P, 1>(s));
    return use(BackwardUnit<P>(s));
  }
};

}  // namespace

// Without pairs there is nothing to add: the caller passed zeros.
void attention_backward(const AttentionParams& p) {
  if (p.B == 0 || p.Hq == 0 || p.Lq == 0 || p.Lk == 0) return;
  with_policy(p.dtype, [&](auto policy) {
    const Sequences sequences(p);
    typedef decltype(policy) P;
    Backward<P, Units<P>>(sequences).run();
  });
}

// The backward pass of packed sequences.
void attention_sequences_backward(const SequencesParams& p) {
  if (p.attention.B == 0 || p.attention.Hq == 0) return;
  with_policy(p.attention.dtype, [&](auto policy) {
    const Sequences sequences(p);
    typedef decltype(policy) P;
    Backward<P, Units<P>>(sequences).run();
  });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
