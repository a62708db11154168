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

// sizes: B, H, L, D; operands: see read_sinusoidal_operands; columns: see read_columns.
void sinusoidal(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                const py::dict& operands, const py::dict& columns) {
  SinusoidalParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[4];
  integers(sizes, n);
  p.B = n[0], p.H = n[1], p.L = n[2], p.D = n[3];
  read_sinusoidal_options(named(options), p);
  read_sinusoidal_operands(named(operands), p);
  read_columns(named(columns), p);
  py::gil_scoped_release release;
  const int64_t elements = p.B * p.H * p.L * p.D;
  expect_to_fill(p.out.data, static_cast<size_t>(elements * element_bytes(p.dtype)));  // dense
  kernels(p.dtype).sinusoidal(p);
}

}  // namespace

void bind_sinusoidal(py::module_& m) { m.def("sinusoidal", &sinusoidal); }

}  // namespace fastattn
