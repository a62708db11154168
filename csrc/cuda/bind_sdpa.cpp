// Python's view of attention on a GPU: addresses, shapes, strides and a stream in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../relative_bias_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// operands: query, key, value, out, the address of lse, see read_biases, how many positions there
// are, the address of seed or 0, tf32, and the addresses of q_starts and k_starts; see
// read_mask_program. For packed sequences options are VarlenOptions. Otherwise they are
// AttentionOptions, and both starts are 0.
AttentionArguments attention_arguments(int dtype, const py::tuple& sizes, const py::object& options,
                                       const py::dict& operands) {
  using P = AttentionArguments;
  static const auto fields = std::make_tuple(
      field("query", &P::q), field("key", &P::k), field("value", &P::v), field("out", &P::out),
      field("lse", &P::lse), field("seed", &P::seed_address), field("tf32", &P::tf32),
      field("q_starts", &P::q_starts), field("k_starts", &P::k_starts));
  struct Positions {
    int64_t count = 0;
  } positions;
  static const auto of_positions = std::make_tuple(field("positions_length", &Positions::count));
  AttentionArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[7];
  integers(sizes, n);
  p.B = n[0], p.Hq = n[1], p.Hkv = n[2], p.Lq = n[3], p.Lk = n[4], p.D = n[5], p.Dv = n[6];
  if (p.Hq > 0) expect_multiple(p.Hkv, p.Hq, "the number of heads of key");
  named(operands).read(p, fields);
  read_biases(named(operands), p);
  named(operands).read_given(positions, of_positions);
  read_mask_program(named(operands), p);
  if (p.q_starts == nullptr) {
    read_attention_options(named(options), p);
    check_relative_bias(p, positions.count);
    p.stats_stride[0] = p.Hq * p.Lq;
  } else {
    VarlenOptions asked;
    read_varlen_options(named(options), asked);
    static_cast<AttentionOptions&>(p) = asked;
    p.bottom_right = asked.bottom_right;
    expect_middle(p);
  }
  p.stats_stride[1] = p.Lq;
  p.scale_float = static_cast<float>(p.scale);
  p.softcap_float = static_cast<float>(p.softcap);
  p.tf32 = p.tf32 && p.dtype == DType::f32;
  set_dropout(p);
  set_window(p);

  const int64_t bytes = element_bytes(p.dtype);
  p.aligned = is_aligned(p.q, bytes) && is_aligned(p.k, bytes) && is_aligned(p.v, bytes) &&
              is_aligned(p.out, bytes);
  p.plain = p.aligned && p.scale_float > 0 && p.softcap_float == 0 && !excludes_pairs(p) &&
            p.alibi == nullptr && p.seed_address == nullptr;
  return p;
}

// Where the stride of the result is 0, it is a sum over the dimension.
PairsArguments pairs(const AttentionArguments& p, const Tensor4& result, bool gradient,
                     float factor) {
  PairsArguments pairs{};
  static_cast<AttentionArguments&>(pairs) = p;
  pairs.gradient = gradient;
  pairs.factor = factor;
  pairs.result = result.data;
  const int64_t sizes[4] = {p.B, p.Hq, p.Lq, p.Lk};
  for (int n = 0; n < 4; ++n) {
    pairs.result_stride[n] = result.stride[n];
    pairs.sizes[n] = result.stride[n] == 0 ? 1 : static_cast<int>(sizes[n]);
  }
  return pairs;
}

// weights: applied and the address of row_stats, or None
void launch_attention_forward(int dtype, uintptr_t stream, const py::tuple& sizes,
                              const py::object& options, const py::dict& operands,
                              const py::object& weights) {
  using P = AttentionArguments;
  static const auto written =
      std::make_tuple(field("applied", &P::applied), field("row_stats", &P::row_stats));
  AttentionArguments p = attention_arguments(dtype, sizes, options, operands);
  PairsArguments w{};
  if (!weights.is_none()) {
    named(weights).read(p, written);
    const bool averaged = p.weights == Weights::averaged && p.Hq > 0;
    w = pairs(p, p.applied, false, averaged ? static_cast<float>(1.0 / p.Hq) : 1.0f);
  }
  py::gil_scoped_release release;
  with_element_of_attention(p, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    if (!attention_forward_hopper(element, p, stream)) attention_forward(element, p, stream);
    if (w.result == nullptr) return;
    attention_rows(element, p, stream);
    attention_pairs(element, w, stream);
  });
}

// The gradient of a relative bias, which is summed over queries and keys: its strides there are 0.
PairsArguments distances(const AttentionArguments& p) {
  const bool packed = p.q_starts != nullptr;
  const int64_t size = packed ? p.Lq + p.Lk : p.relative_bias_size, batch = p.Hq * size;
  Tensor4 table{p.Lq > 0 && p.Lk > 0 ? p.grad_relative_bias : nullptr,
                {packed ? 0 : batch, size, 0, 0}};
  PairsArguments result = pairs(p, table, true, 1.0f);
  result.by_distance = true;
  result.odd_diagonals = packed ? batch : p.B * batch;
  return result;
}

// gradients: see read_gradients; the address of row_stats; grad_mask; for packed sequences with a
// relative bias the address of grad_table.
void launch_attention_backward(int dtype, uintptr_t stream, const py::tuple& sizes,
                               const py::object& options, const py::dict& operands,
                               const py::dict& gradients) {
  using P = AttentionArguments;
  static const auto own =
      std::make_tuple(field("row_stats", &P::row_stats), field("grad_mask", &P::grad_mask));
  static const auto of_packed = std::make_tuple(field("grad_table", &P::grad_table));
  AttentionArguments p = attention_arguments(dtype, sizes, options, operands);
  read_gradients(named(gradients), p);
  named(gradients).read(p, own);
  named(gradients).read_given(p, of_packed);
  const int64_t bytes = element_bytes(p.dtype);
  for (const Tensor4& t : {p.grad_out, p.grad_q, p.grad_k, p.grad_v})
    p.aligned = p.aligned && is_aligned(t, bytes);
  // The row sums of the gradient of a mask equal the gradient of lse, to the eps of the mask's
  // dtype, which may be float32, as that of a relative bias is. And dO . O does not include a
  // gradient of the weights.
  p.exact_delta = p.dtype == DType::f32 || p.grad_weights.data != nullptr ||
                  p.grad_mask.data != nullptr || p.grad_relative_bias != nullptr;
  const PairsArguments mask = pairs(p, p.grad_mask, true, 1.0f), table = distances(p);
  py::gil_scoped_release release;
  with_element_of_attention(p, [&](auto* element) {
    if (p.mask_table != nullptr) attention_mask(element, p, stream);
    attention_rows(element, p, stream);
    if (!attention_backward_hopper(element, p, stream)) attention_backward(element, p, stream);
    if (mask.result != nullptr) attention_pairs(element, mask, stream);
    if (table.result != nullptr) attention_pairs(element, table, stream);
    if (table.result != nullptr && p.grad_table != nullptr) attention_table(element, table, stream);
  });
}

}  // namespace

void bind_sdpa(py::module_& m) {
  m.def("mask_workspace",
        [](int64_t batch, int64_t heads, int64_t queries, int64_t keys, bool packed) {
          return int64_t(sizeof(MaskTable)) +
                 mask_rows_of(packed, batch, heads, queries) * mask_tiles_of(keys);
        });
  m.def("attention_forward", &launch_attention_forward);
  m.def("attention_backward", &launch_attention_backward);
}

}  // namespace cuda
}  // namespace fastattn
