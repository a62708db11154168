// Python's view of the sinusoidal encoding on a GPU; positions and the tables are on the GPU, too.
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// sizes: B, H, L, D; operands: see read_sinusoidal_operands; columns: see read_columns.
void sinusoidal_encoding(int dtype, uintptr_t stream, const py::tuple& sizes,
                         const py::object& options, const py::dict& operands,
                         const py::dict& columns) {
  SinusoidalParams p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[4];
  integers(sizes, n);
  p.B = n[0], p.H = n[1], p.L = n[2], p.D = n[3];
  read_sinusoidal_options(named(options), p);
  read_sinusoidal_operands(named(operands), p);
  read_columns(named(columns), p);
  const int64_t bytes = element_bytes(p.dtype);
  const bool aligned = is_aligned(p.x, bytes) && is_aligned(p.out, bytes);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { sinusoidal(element, p, aligned, stream); });
}

}  // namespace

void bind_sinusoidal(py::module_& m) { m.def("sinusoidal_encoding", &sinusoidal_encoding); }

}  // namespace cuda
}  // namespace fastattn
