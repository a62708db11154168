// Python's view of the sinusoidal encoding.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"
#include "tensors.h"

namespace py = pybind11;

namespace fastattn {
namespace {

void run(const SinusoidalParams& p) {
  py::gil_scoped_release release;
  const int64_t elements = p.B * p.H * p.L * p.D;
  expect_to_fill(p.out.data, static_cast<size_t>(elements * element_bytes(p.dtype)));  // dense
  kernels(p.dtype).sinusoidal(p);
}

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
  run(p);
}

// -- calls of one offset without padding, whose tensors are read here -------------------------------

// [..., L, D] as an operand of four dimensions.
Tensor4 operand_of_rows(const TensorView& x) {
  Tensor4 found{x.data, {}};
  std::copy_n(x.stride, x.rank, found.stride + 4 - x.rank);
  return found;
}

// Reads x [..., L, D] of two to four dimensions; false if the general path has to see the call.
bool read_x(py::handle from, TensorView* x, SinusoidalParams& p) {
  if (!read_tensor(from, x) || x->rank < 2 || x->dtype == DType::boolean) return false;
  int64_t sizes[4] = {1, 1, 1, 1};
  std::copy_n(x->size, x->rank, sizes + 4 - x->rank);
  p.dtype = x->dtype;
  p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.D = sizes[3];
  p.x = operand_of_rows(*x);
  return true;
}

// 0 if the general path has to see a call; else a number that is the same for calls of the same dtype,
// and odd if x requires a gradient.
int64_t plain_sinusoidal_call(py::handle x) {
  SinusoidalParams p{};
  TensorView view;
  if (!read_x(x, &view, p) || p.B * p.H * p.L * p.D == 0) return 0;
  return number_of_call(p.dtype, {x});
}

// x * scale + PE(offset + l) in `out`, a dense tensor of x's sizes and dtype, or in a new one for None.
py::object plain_sinusoidal(py::handle x, py::object out, int64_t offset, double scale,
                            const py::dict& columns, int threads) {
  SinusoidalParams p{};
  TensorView given, written;
  if (out.is_none()) out = new_like(x, &written);
  if (!read_x(x, &given, p) || !read_tensor(out, &written) || written.dtype != given.dtype ||
      written.rank != given.rank || !std::equal(given.size, given.size + given.rank, written.size))
    throw py::type_error("fastattn: not a plain call of the sinusoidal encoding");
  p.out = operand_of_rows(written);
  p.offset = offset, p.scale = scale, p.threads = threads;
  read_columns(named(columns), p);
  run(p);
  return out;
}

}  // namespace

void bind_sinusoidal(py::module_& m) {
  m.def("plain_sinusoidal_call", &plain_sinusoidal_call);
  m.def("plain_sinusoidal", &plain_sinusoidal);
  m.def("sinusoidal", &sinusoidal);
}

}  // namespace fastattn
