// Python's view of attention on a GPU: addresses, shapes, strides and a stream in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// operands: (q, k, v, out), each (address, strides); options: (offset, window_left, window_right,
// softcap, mask, mask_dtype, alibi, dropout_p, seed address, weights_mode, tf32, packed), where
// packed is None or (address of q_starts, of k_starts, bottom_right).
AttentionArguments arguments(int dtype, const py::tuple& sizes, const py::tuple& operands,
                             uintptr_t lse, double scale, const py::tuple& options) {
  AttentionArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[7];
  integers(sizes, n);
  p.B = n[0], p.Hq = n[1], p.Hkv = n[2], p.Lq = n[3], p.Lk = n[4], p.D = n[5], p.Dv = n[6];
  p.q = optional_operand(operands[0]);
  p.k = optional_operand(operands[1]);
  p.v = optional_operand(operands[2]);
  p.out = optional_operand(operands[3]);
  p.lse = reinterpret_cast<double*>(lse);
  p.scale = scale;
  p.scale_float = static_cast<float>(scale);

  p.offset = options[0].cast<int64_t>();
  p.window_left = options[1].cast<int64_t>();
  p.window_right = options[2].cast<int64_t>();
  p.softcap = options[3].cast<double>();
  p.softcap_float = static_cast<float>(p.softcap);
  p.mask = optional_operand(options[4]);
  p.mask_dtype = static_cast<DType>(options[5].cast<int>());
  if (!options[6].is_none()) {
    const auto alibi = options[6].cast<py::tuple>();
    p.alibi = reinterpret_cast<const void*>(alibi[0].cast<uintptr_t>());
    integers(alibi[1].cast<py::tuple>(), p.alibi_stride);
  }
  set_dropout(p, options[7].cast<double>(), options[8].cast<uintptr_t>());
  p.weights_mode = static_cast<Weights>(options[9].cast<int>());
  p.stats_stride[0] = p.Hq * p.Lq;
  p.stats_stride[1] = p.Lq;
  p.tf32 = p.dtype == DType::f32 && options[10].cast<bool>();
  if (!options[11].is_none()) {
    const auto packed = options[11].cast<py::tuple>();
    p.q_starts = reinterpret_cast<const int64_t*>(packed[0].cast<uintptr_t>());
    p.k_starts = reinterpret_cast<const int64_t*>(packed[1].cast<uintptr_t>());
    p.bottom_right = packed[2].cast<bool>();
    p.stats_stride[0] = 0;
  }
  set_window(p);

  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  p.aligned = is_aligned(p.q, bytes) && is_aligned(p.k, bytes) && is_aligned(p.v, bytes) &&
              is_aligned(p.out, bytes);
  return p;
}

// A result of attention_pairs, (address, strides, sizes): sizes are those of [B, Hq, Lq, Lk], or 1
// where the result is a sum over the dimension.
PairsArguments pairs(const AttentionArguments& p, const py::tuple& result, bool gradient,
                     float factor) {
  PairsArguments pairs{};
  static_cast<AttentionArguments&>(pairs) = p;
  pairs.gradient = gradient;
  pairs.factor = factor;
  pairs.result = reinterpret_cast<void*>(result[0].cast<uintptr_t>());
  integers(result[1].cast<py::tuple>(), pairs.result_stride);
  int64_t sizes[4];
  integers(result[2].cast<py::tuple>(), sizes);
  for (int n = 0; n < 4; ++n) pairs.sizes[n] = static_cast<int>(sizes[n]);
  return pairs;
}

// weights: None, or (result of attention_pairs, row_stats, factor)
void forward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& operands,
             uintptr_t lse, double scale, const py::tuple& options, const py::object& weights) {
  AttentionArguments p = arguments(dtype, sizes, operands, lse, scale, options);
  PairsArguments w{};
  if (!weights.is_none()) {
    const auto given = weights.cast<py::tuple>();
    p.row_stats = reinterpret_cast<float*>(given[1].cast<uintptr_t>());
    w = pairs(p, given[0].cast<py::tuple>(), false, given[2].cast<float>());
  }
  py::gil_scoped_release release;
  with_element_of_attention(p, [&](auto* element) {
    if (!attention_forward_hopper(element, p, stream)) attention_forward(element, p, stream);
    if (w.result == nullptr) return;
    attention_rows(element, p, stream);
    attention_pairs(element, w, stream);
  });
}

// gradients: (grad_out, grad_lse, grad_weights, grad_q, grad_k, grad_v, row_stats, grad_mask), the
// operands as (address, strides) or None, grad_lse and row_stats addresses, grad_mask a result of
// attention_pairs or None.
void backward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::tuple& operands,
              uintptr_t lse, double scale, const py::tuple& options, const py::tuple& gradients) {
  AttentionArguments p = arguments(dtype, sizes, operands, lse, scale, options);
  p.grad_out = optional_operand(gradients[0]);
  p.grad_lse = reinterpret_cast<const double*>(gradients[1].cast<uintptr_t>());
  p.grad_weights = optional_operand(gradients[2]);
  p.grad_q = optional_operand(gradients[3]);
  p.grad_k = optional_operand(gradients[4]);
  p.grad_v = optional_operand(gradients[5]);
  p.row_stats = reinterpret_cast<float*>(gradients[6].cast<uintptr_t>());
  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  for (const Tensor4& t : {p.grad_out, p.grad_q, p.grad_k, p.grad_v})
    p.aligned = p.aligned && is_aligned(t, bytes);
  // The gradient of a mask has row sums that are those of lse's gradient, to the eps of the mask's
  // dtype, which may be float32; and dO . O knows nothing of a gradient of the weights.
  p.exact_delta =
      p.dtype == DType::f32 || p.grad_weights.data != nullptr || !gradients[7].is_none();
  PairsArguments mask{};
  if (!gradients[7].is_none()) mask = pairs(p, gradients[7].cast<py::tuple>(), true, 1.0f);
  py::gil_scoped_release release;
  with_element_of_attention(p, [&](auto* element) {
    attention_rows(element, p, stream);
    if (!attention_backward_hopper(element, p, stream)) attention_backward(element, p, stream);
    if (mask.result != nullptr) attention_pairs(element, mask, stream);
  });
}

}  // namespace

void bind_sdpa(py::module_& m) {
  m.def("attention_forward", &forward);
  m.def("attention_backward", &backward);
}

}  // namespace cuda
}  // namespace fastattn
