// The sinusoidal encoding on a GPU as Python calls it: tensors in, a tensor out.
#include "../sinusoidal_arguments.h"
#include "binding.h"

namespace fastattn {
namespace cuda {
namespace {

// x * scale + PE(position), see read_encoding().
py::object encode_positions(const EncodedTensors& x, py::handle options, Stream stream,
                            py::handle columns, py::handle offset, py::handle out) {
  SinusoidalParams p{};
  py::object made = read_encoding(p, x, options, columns, offset, out);
  const bool aligned = are_aligned(p.dtype, {p.x, p.out});
  with_element(p.dtype, [&](auto* element) { sinusoidal(element, p, aligned, stream); });
  return made;
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
