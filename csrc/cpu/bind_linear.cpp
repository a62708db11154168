// Python's view of a linear layer, and of self-attention between two linear layers: addresses,
// shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <memory>

#include "../arguments.h"
#include "kernel_table.h"

namespace py = pybind11;

namespace fastattn {
namespace {

void linear(int dtype, int threads, const py::tuple& sizes, uintptr_t x, const py::tuple& x_stride,
            uintptr_t w, int64_t w_stride, bool w_transposed, uintptr_t bias, uintptr_t y) {
  LinearParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[3];
  integers(sizes, n);
  p.M = n[0], p.N = n[1], p.K = n[2];
  p.x = reinterpret_cast<const void*>(x);
  integers(x_stride, p.x_stride);
  p.w = reinterpret_cast<const void*>(w);
  p.w_stride = w_stride;
  p.w_transposed = w_transposed;
  p.bias = reinterpret_cast<const void*>(bias);
  p.y = reinterpret_cast<void*>(y);
  p.y_stride = p.N;
  py::gil_scoped_release release;
  kernels(p.dtype).linear(p);
}

// A whole multi-head self-attention without gradients, for sizes at which calls cost more than
// arithmetic:
//
//   [q | k | v] = x W_in^T + b_in        out = attention(q, k, v) W_out^T + b_out
//
// x is [N, L, E] or [L, N, E], contiguous; position (n, l) is row n * row[0] + l * row[1].
// padding is [N, L] bool, true = ignored, null = none.
void self_attention(int dtype, int threads, const py::tuple& sizes, const py::tuple& row_steps,
                    uintptr_t x, uintptr_t w_in, int64_t w_in_stride, uintptr_t b_in,
                    uintptr_t w_out, int64_t w_out_stride, uintptr_t b_out, uintptr_t padding,
                    const py::tuple& padding_stride, bool causal, uintptr_t out) {
  int64_t n[4], row[2], pad[2];
  integers(sizes, n);
  integers(row_steps, row);
  integers(padding_stride, pad);
  const int64_t N = n[0], L = n[1], E = n[2], H = n[3];
  expect_multiple(H, E, "num_heads");
  const int64_t D = E / H, rows = N * L;
  const auto type = static_cast<DType>(dtype);
  const int64_t element = element_bytes(type);
  py::gil_scoped_release release;

  // qkv [rows, 3E], attended [rows, E], visible [N, L]
  const int64_t row_bytes = rows * E * element;
  const std::unique_ptr<char[]> memory(new char[static_cast<size_t>(4 * row_bytes + rows)]);
  char* const qkv = memory.get();
  char* const attended = qkv + 3 * row_bytes;
  bool* const visible = reinterpret_cast<bool*>(attended + row_bytes);

  LinearParams in{};
  in.dtype = type, in.threads = threads;
  in.M = rows, in.N = 3 * E, in.K = E;
  in.x = reinterpret_cast<const void*>(x), in.x_stride[0] = E, in.x_stride[1] = 1;
  in.w = reinterpret_cast<const void*>(w_in), in.w_stride = w_in_stride;
  in.bias = reinterpret_cast<const void*>(b_in);
  in.y = qkv, in.y_stride = 3 * E;
  kernels(type).linear(in);

  AttentionParams p{};
  p.dtype = type, p.threads = threads;
  p.B = N, p.Hq = p.Hkv = H, p.Lq = p.Lk = L, p.D = p.Dv = D;
  const auto heads = [&](char* data, int64_t width) {
    return Tensor4{data, {row[0] * width, D, row[1] * width, 1}};
  };
  p.q = heads(qkv, 3 * E);
  p.k = heads(qkv + E * element, 3 * E);
  p.v = heads(qkv + 2 * E * element, 3 * E);
  p.out = heads(attended, E);
  p.scale = 1.0 / std::sqrt(static_cast<double>(D));
  p.window_left = -1, p.window_right = causal ? 0 : -1;
  if (padding != 0) {
    const bool* ignored = reinterpret_cast<const bool*>(padding);
    for (int64_t b = 0; b < N; ++b)
      for (int64_t l = 0; l < L; ++l) visible[b * L + l] = !ignored[b * pad[0] + l * pad[1]];
    p.mask = {visible, {L, 0, 0, 1}};
    p.mask_dtype = DType::boolean;
  }
  kernels(type).attention_forward(p);

  LinearParams to = in;
  to.N = E;
  to.x = attended;
  to.w = reinterpret_cast<const void*>(w_out), to.w_stride = w_out_stride;
  to.bias = reinterpret_cast<const void*>(b_out);
  to.y = reinterpret_cast<void*>(out), to.y_stride = E;
  kernels(type).linear(to);
}

}  // namespace

void bind_linear(py::module_& m) {
  m.def("linear", &linear);
  m.def("self_attention", &self_attention);
}

}  // namespace fastattn
