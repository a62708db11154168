// The sinusoidal encoding on a GPU as Python calls it: tensors in, a tensor out.
#include "../sinusoidal_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

const uint64_t* read_column(const char* name, py::handle from, int64_t least) {
  const TensorView x = view_of(name, from);
  expect_sizes(name, x, kInt64, {x.size[0]});
  expect(x.is_contiguous() && x.size[0] >= least,
         std::string(name) + " must be contiguous and long");
  return static_cast<const uint64_t*>(x.data);
}

// In `out`, a dense tensor of x's sizes and dtype, or in a new one for None. The columns of
// fastattn/sinusoids.py are int64 with the bits of their numbers.
py::object encode_positions(uintptr_t stream, const py::object& options, py::handle x,
                            py::handle positions, py::handle frequency, py::handle phase,
                            py::handle pairs, int64_t pair_count, bool interleaved,
                            py::object out) {
  SinusoidalParams p{};
  read_sinusoidal_options(Named(options), p);
  const TensorView of_x = read_encoded(p, x, positions);
  p.frequency = read_column("frequency", frequency, p.D);
  p.phase = read_column("phase", phase, p.D);
  p.pair_frequency = read_column("pairs", pairs, pair_count);
  p.pairs = pair_count, p.interleaved = interleaved;
  out = place_encoding(p, x, of_x, out);
  const int64_t bytes = element_bytes(p.dtype);
  const bool aligned = is_aligned(p.x, bytes) && is_aligned(p.out, bytes);
  with_element(p.dtype, [&](auto* element) { sinusoidal(element, p, aligned, stream); });
  return out;
}

}  // namespace

void bind_sinusoidal(py::module_& m) { define(m, "sinusoidal_encoding", &encode_positions); }

}  // namespace cuda
}  // namespace fastattn
