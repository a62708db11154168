// Python's view of the sinusoidal encoding: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>

#include "kernel_table.h"

namespace fastattn {
namespace {

Tensor4 operand(uintptr_t data, const std::array<int64_t, 4>& stride) {
  Tensor4 t;
  t.data = reinterpret_cast<void*>(data);
  for (int i = 0; i < 4; ++i) t.stride[i] = stride[i];
  return t;
}

void sinusoidal(int dtype, int threads, const std::array<int64_t, 4>& shape, uintptr_t x,
                const std::array<int64_t, 4>& x_stride, uintptr_t out, const std::array<int64_t, 4>& out_stride,
                uintptr_t positions, const std::array<int64_t, 3>& position_stride, int64_t offset,
                uintptr_t frequency, uintptr_t phase, double scale, std::optional<int64_t> padding_idx) {
  SinusoidalParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  p.B = shape[0];
  p.H = shape[1];
  p.L = shape[2];
  p.D = shape[3];
  p.x = operand(x, x_stride);
  p.out = operand(out, out_stride);
  p.positions = reinterpret_cast<const int64_t*>(positions);
  for (int i = 0; i < 3; ++i) p.position_stride[i] = position_stride[i];
  p.offset = offset;
  p.frequency = reinterpret_cast<const uint64_t*>(frequency);
  p.phase = reinterpret_cast<const uint64_t*>(phase);
  p.scale = scale;
  p.has_padding_idx = padding_idx.has_value();
  p.padding_idx = padding_idx.value_or(0);
  kernels().sinusoidal(p);
}

}  // namespace

void bind_sinusoidal(pybind11::module_& m) {
  m.def("sinusoidal", &sinusoidal, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace fastattn
