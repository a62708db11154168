// Python's view of the sinusoidal encoding on a GPU; positions and the tables are on the GPU, too.
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// operands: (x, out), each (address, strides); positions: (address, strides) or None; tables:
// addresses of frequency, phase, pair_frequency.
void sinusoidal_encoding(int dtype, uintptr_t stream, const py::tuple& sizes,
                         const py::tuple& operands, const py::object& positions,
                         const py::tuple& tables, bool interleaved, const py::object& options) {
  SinusoidalParams p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[4];
  integers(sizes, n);
  p.B = n[0], p.H = n[1], p.L = n[2], p.D = n[3];
  p.x = optional_operand(operands[0]);
  p.out = optional_operand(operands[1]);
  if (!positions.is_none()) {
    const auto given = positions.cast<py::tuple>();
    p.positions = reinterpret_cast<const int64_t*>(given[0].cast<uintptr_t>());
    integers(given[1].cast<py::tuple>(), p.position_stride);
  }
  p.frequency = reinterpret_cast<const uint64_t*>(tables[0].cast<uintptr_t>());
  p.phase = reinterpret_cast<const uint64_t*>(tables[1].cast<uintptr_t>());
  p.pair_frequency = reinterpret_cast<const uint64_t*>(tables[2].cast<uintptr_t>());
  p.interleaved = interleaved;
  read_sinusoidal_options(named(options), p);
  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  const bool aligned = is_aligned(p.x, bytes) && is_aligned(p.out, bytes);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { sinusoidal(element, p, aligned, stream); });
}

}  // namespace

void bind_sinusoidal(py::module_& m) { m.def("sinusoidal_encoding", &sinusoidal_encoding); }

}  // namespace cuda
}  // namespace fastattn
