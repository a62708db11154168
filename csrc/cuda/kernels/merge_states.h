// Merges two states of attention, with p_a = e^(lse_a - lse) and p_b = e^(lse_b - lse):
//
//   lse = log(e^lse_a + e^lse_b),  out = p_a out_a + p_b out_b
//
// and backward, with g and h the gradients of out and lse,
//
//   d = sum g (out_a - out_b)
//   dout_a = p_a g,  dlse_a = p_a h + p_a p_b d
//   dout_b = p_b g,  dlse_b = p_b h - p_a p_b d
//
// The work is bound by memory. A row takes one lane of a warp for each chunk of columns, at most
// the whole warp. The output of an empty state, lse = -inf, is not read.
#pragma once
#include "columns.h"
#include "softmax_state.h"

namespace fastattn {
namespace cuda {

constexpr int kStatesThreads = 256;

template <class Lse>
struct JointState {
  Lse lse, share_a, share_b;
  bool has_a, has_b;

  FASTATTN_DEVICE JointState(Lse a, Lse b)
      : has_a(a != Lse(minus_infinity())), has_b(b != Lse(minus_infinity())) {
    const Lse most = a > b ? a : b;
    const Lse x = shrink_to(a, most), y = shrink_to(b, most), sum = x + y;
    const Lse inverse = sum == 0 ? Lse(0) : 1 / sum;
    share_a = x * inverse;
    share_b = y * inverse;
    // The larger of the two shares is 1, so their product is the smaller share.
    if constexpr (sizeof(Lse) == 8)
      lse = most + log1p(x * y);
    else
      lse = most + log1pf(x * y);
  }
};

// A row, and this thread's chunks of it.
template <class T, int kN>
struct StateRow {
  using Storage = typename T::Storage;
  using Chunk = Elements<T, kN>;
  const MergeStatesArguments& p;
  int64_t b, h, l;
  bool exists;
  int lane, chunks;

  FASTATTN_DEVICE explicit StateRow(const MergeStatesArguments& arguments)
      : p(arguments),
        lane(static_cast<int>(threadIdx.x) % arguments.lanes),
        chunks(static_cast<int>((arguments.D + kN - 1) / kN)) {
    int64_t row =
        int64_t(blockIdx.x) * (kStatesThreads / p.lanes) + static_cast<int>(threadIdx.x) / p.lanes;
    const int64_t rows = p.B * p.H * p.L;
    exists = row < rows;
    if (!exists) row = rows - 1;
    l = row % p.L, h = row / p.L % p.H, b = row / p.L / p.H;
  }

  template <class E>
  FASTATTN_DEVICE E* of(const Tensor4& t) const {
    return static_cast<E*>(t.data) + b * t.stride[0] + h * t.stride[1] + l * t.stride[2];
  }
  FASTATTN_DEVICE Chunk load(const Tensor4& t, int c) const {
    return Chunk::load(of<Storage>(t) + int64_t(c) * kN * t.stride[3]);
  }
  FASTATTN_DEVICE void store(const Tensor4& t, int c, const Chunk& x) const {
    x.store(of<Storage>(t) + int64_t(c) * kN * t.stride[3]);
  }
  template <class Lse>
  FASTATTN_DEVICE JointState<Lse> joint() const {
    return {*of<Lse>(p.lse_a), *of<Lse>(p.lse_b)};
  }

  // out = share_a out_a + share_b out_b, and its lse.
  template <class Lse>
  FASTATTN_DEVICE void merge() const {
    if (!exists) return;
    const JointState<Lse> state = joint<Lse>();
    if (lane == 0) *of<Lse>(p.lse) = state.lse;
    const float share_a = static_cast<float>(state.share_a);
    const float share_b = static_cast<float>(state.share_b);
    for (int c = lane; c < chunks; c += p.lanes) {
      Chunk x{}, y{}, sum;
      if (state.has_a) x = load(p.out_a, c);
      if (state.has_b) y = load(p.out_b, c);
      FASTATTN_UNROLL
      for (int n = 0; n < kN; ++n) sum.set(n, share_a * x[n] + share_b * y[n]);
      store(p.out, c, sum);
    }
  }

  // The gradients of both states, see the equations above.
  template <class Lse>
  FASTATTN_DEVICE void derive() const {
    const JointState<Lse> state = joint<Lse>();
    const float share_a = static_cast<float>(state.share_a);
    const float share_b = static_cast<float>(state.share_b);
    const bool both = state.has_a && state.has_b;
    float d = 0.0f;
    for (int c = lane; c < chunks && exists; c += p.lanes) {
      Chunk g{}, x{}, y{}, of_a{}, of_b{};
      if (p.grad_out.data != nullptr) g = load(p.grad_out, c);
      if (both) x = load(p.out_a, c), y = load(p.out_b, c);
      FASTATTN_UNROLL
      for (int n = 0; n < kN; ++n) {
        if (both) d += g[n] * (x[n] - y[n]);
        if (state.has_a) of_a.set(n, share_a * g[n]);
        if (state.has_b) of_b.set(n, share_b * g[n]);
      }
      store(p.grad_out_a, c, of_a);
      store(p.grad_out_b, c, of_b);
    }
    for (int m = p.lanes / 2; m > 0; m /= 2) d += __shfl_xor_sync(0xffffffffu, d, m);
    if (!exists || lane != 0) return;
    const Lse h_lse = p.grad_lse.data == nullptr ? Lse(0) : *of<Lse>(p.grad_lse);
    const Lse rest = state.share_a * state.share_b * d;
    *of<Lse>(p.grad_lse_a) = state.has_a ? state.share_a * h_lse + rest : Lse(0);
    *of<Lse>(p.grad_lse_b) = state.has_b ? state.share_b * h_lse - rest : Lse(0);
  }
};

// The merged states, a few lanes for each row.
template <class T, int kN>
__global__ void __launch_bounds__(kStatesThreads)
    merge_states_kernel(const __grid_constant__ MergeStatesArguments p) {
  const StateRow<T, kN> row(p);
  p.lse_dtype == DType::f64 ? row.template merge<double>() : row.template merge<float>();
}

// Without a minimum number of blocks ptxas limits itself to 64 registers, and spills.
template <class T, int kN>
__global__ void __launch_bounds__(kStatesThreads, 2)
    merge_states_gradient_kernel(const __grid_constant__ MergeStatesArguments p) {
  const StateRow<T, kN> row(p);
  p.lse_dtype == DType::f64 ? row.template derive<double>() : row.template derive<float>();
}

}  // namespace cuda
}  // namespace fastattn
