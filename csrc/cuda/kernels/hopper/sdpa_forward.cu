#include "sdpa_forward.h"

#include <algorithm>
#include <type_traits>

#include "host.h"

namespace fastattn {
namespace cuda {

namespace {

constexpr bool kIsF16 = std::is_same<FASTATTN_ELEMENT, F16>::value;

// False if TMA cannot copy an operand.
template <class Shape, bool kGeneral>
bool run(HopperArguments& p, int multiprocessors, uintptr_t stream) {
  p.group = static_cast<int>(p.Hq / p.Hkv);
  p.tile_rows = hopper::kRows / p.group;
  const int64_t batches = p.q_starts == nullptr ? p.B : 1;
  auto describe = [&](const Tensor4& t, int64_t H, int64_t L, int64_t columns, int heads, int rows,
                      TensorOperand& operand) {
    return hopper::describe(t, kIsF16, batches, H, L, columns, heads, rows, operand);
  };
  if (!describe(p.q, p.Hq, p.Lq, p.D, p.group, p.tile_rows, p.q_operand) ||
      !describe(p.k, p.Hkv, p.Lk, p.D, 1, Shape::kKeys, p.k_operand) ||
      !describe(p.v, p.Hkv, p.Lk, p.Dv, 1, Shape::kKeys, p.v_operand))
    return false;
  hopper::cut(p, p.q_starts, p.Lq, p.Lk);
  launch({"attention_forward_hopper", std::min(p.tiles, multiprocessors), hopper::kThreads,
          sizeof(typename Shape::SharedStorage), stream, shapes(p)},
         attention_forward_hopper_kernel<FASTATTN_ELEMENT, Shape::kQ, Shape::kV, kGeneral>, p);
  return true;
}

}  // namespace

// The forward pass on Hopper. False if it does not support the call: the general kernel then runs.
bool attention_forward_hopper(const FASTATTN_ELEMENT*, const AttentionArguments& given,
                              uintptr_t stream) {
  const Hopper device = find_hopper();
  if (!hopper::takes(device, given)) return false;
  HopperArguments p{};
  static_cast<AttentionArguments&>(p) = given;
  bool done = false;
  auto run_as = [&](auto general) {
    constexpr bool kGeneral = decltype(general)::value;
    hopper::with_widths<kGeneral>(p, [&](auto width, auto value_width) {
      using Shape =
          HopperForwardShape<decltype(width)::value, decltype(value_width)::value, kGeneral>;
      done = run<Shape, kGeneral>(p, device.multiprocessors, stream);
    });
  };
  is_plain(p) ? run_as(std::false_type()) : run_as(std::true_type());
  return done;
}

}  // namespace cuda
}  // namespace fastattn
