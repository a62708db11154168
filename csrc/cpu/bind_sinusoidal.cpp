// Python's view of the sinusoidal encoding: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"

namespace py = pybind11;

namespace fastattn {
namespace {

void sinusoidal(int dtype, int threads, const py::tuple& sizes, uintptr_t x,
                const py::tuple& x_stride, uintptr_t out, const py::tuple& out_stride,
                uintptr_t positions, const py::tuple& position_stride, uintptr_t frequency,
                uintptr_t phase, int64_t pairs, bool interleaved, uintptr_t pair_frequency,
                const py::object& options) {
  SinusoidalParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[4];
  integers(sizes, n);
  p.B = n[0], p.H = n[1], p.L = n[2], p.D = n[3];
  p.x = operand(x, x_stride);
  p.out = operand(out, out_stride);
  p.positions = reinterpret_cast<const int64_t*>(positions);
  integers(position_stride, p.position_stride);
  p.frequency = reinterpret_cast<const uint64_t*>(frequency);
  p.phase = reinterpret_cast<const uint64_t*>(phase);
  p.pairs = pairs;
  p.interleaved = interleaved;
  p.pair_frequency = reinterpret_cast<const uint64_t*>(pair_frequency);
  read_sinusoidal_options(named(options), p);
  py::gil_scoped_release release;
  const size_t element = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
  expect_to_fill(p.out.data, static_cast<size_t>(p.B * p.H * p.L * p.D) * element);  // out is dense
  kernels(p.dtype).sinusoidal(p);
}

}  // namespace

void bind_sinusoidal(py::module_& m) { m.def("sinusoidal", &sinusoidal); }

}  // namespace fastattn
