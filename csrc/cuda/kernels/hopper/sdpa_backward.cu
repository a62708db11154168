#include <algorithm>
#include <type_traits>

#include "host.h"
#include "sdpa_backward_kv.h"
#include "sdpa_backward_q.h"

namespace fastattn {
namespace cuda {

namespace {

constexpr bool kIsF16 = std::is_same<FASTATTN_ELEMENT, F16>::value;

// Describes the operands to TMA. Tiles of queries have q_rows rows of q_heads heads, and tiles of
// keys k_rows rows. False if TMA cannot copy one.
bool describe(HopperArguments& p, int q_heads, int q_rows, int k_rows) {
  const int64_t batches = p.q_starts == nullptr ? p.B : 1;
  auto one = [&](const Tensor4& t, int64_t H, int64_t L, int64_t columns, int heads, int rows,
                 TensorOperand& operand) {
    return hopper::describe(t, kIsF16, batches, H, L, columns, heads, rows, operand);
  };
  return one(p.q, p.Hq, p.Lq, p.D, q_heads, q_rows, p.q_operand) &&
         one(p.grad_out, p.Hq, p.Lq, p.Dv, q_heads, q_rows, p.g_operand) &&
         one(p.k, p.Hkv, p.Lk, p.D, 1, k_rows, p.k_operand) &&
         one(p.v, p.Hkv, p.Lk, p.Dv, 1, k_rows, p.v_operand);
}

// Launches the kernels of dQ, then of dK and dV, for one pair of widths. False if a tensor has no
// map.
template <int kQ, int kV, bool kGeneral>
bool run(HopperArguments& p, int multiprocessors, uintptr_t stream) {
  using T = FASTATTN_ELEMENT;
  using OfQ = HopperBackwardQShape<kQ, kV, kGeneral>;
  using OfKv = HopperBackwardKvShape<kQ, kV, kGeneral>;
  p.group = static_cast<int>(p.Hq / p.Hkv);
  HopperArguments kv = p;
  p.tile_rows = hopper::kRows / p.group;
  kv.tile_rows = OfKv::kKeys;
  if (!describe(p, p.group, p.tile_rows, OfQ::kKeys) ||
      !describe(kv, 1, OfKv::kQueries, OfKv::kKeys))
    return false;
  hopper::cut(p, p.q_starts, p.Lq, p.Lk);
  hopper::cut(kv, p.k_starts, p.Lk, p.Lq * p.group);
  const int blocks = std::min(p.tiles, multiprocessors);
  if constexpr (kGeneral) {
    // Compiled for two widths only, because it computes one product less than the next kernel.
    constexpr int kWidth = kQ <= 128 ? 128 : 256;
    using OfDelta = HopperBackwardQShape<kWidth, kWidth, true>;
    HopperArguments delta = p;
    if (p.exact_delta) {
      if (!describe(delta, p.group, p.tile_rows, OfDelta::kKeys)) return false;
      launch({"attention_backward_delta_hopper", blocks, hopper::kThreads,
              sizeof(typename OfDelta::SharedStorage), stream, shapes(p)},
             attention_backward_delta_hopper_kernel<T, kWidth>, delta);
    }
  }
  launch({"attention_backward_q_hopper", blocks, hopper::kThreads,
          sizeof(typename OfQ::SharedStorage), stream, shapes(p)},
         attention_backward_q_hopper_kernel<T, kQ, kV, kGeneral>, p);
  launch({"attention_backward_kv_hopper", std::min(kv.tiles, multiprocessors), hopper::kThreads,
          sizeof(typename OfKv::SharedStorage), stream, shapes(p)},
         attention_backward_kv_hopper_kernel<T, kQ, kV, kGeneral>, kv);
  return true;
}

}  // namespace

// The backward pass on Hopper. False if it does not support the call: the general kernels then run.
bool attention_backward_hopper(const FASTATTN_ELEMENT*, const AttentionArguments& given,
                               uintptr_t stream) {
  const Hopper device = find_hopper();
  if (!hopper::takes(device, given)) return false;
  HopperArguments p{};
  static_cast<AttentionArguments&>(p) = given;
  const bool plain = is_plain(p) && !p.exact_delta;
  bool done = false;
  auto run_as = [&](auto general) {
    constexpr bool kGeneral = decltype(general)::value;
    hopper::with_widths<kGeneral>(p, [&](auto width, auto value_width) {
      constexpr int kQ = decltype(width)::value, kV = decltype(value_width)::value;
      done = run<kQ, kV, kGeneral>(p, device.multiprocessors, stream);
    });
  };
  plain ? run_as(std::false_type()) : run_as(std::true_type());
  return done;
}

}  // namespace cuda
}  // namespace fastattn
