// The sinusoidal encoding as Python calls it: tensors in, a tensor out.
#include <cstdint>

#include "../sinusoidal_arguments.h"
#include "kernel_table.h"
#include "memory.h"

namespace fastattn {
namespace {

// x * scale + PE(position), see read_encoding().
py::object sinusoidal_encoding(const EncodedTensors& x, py::handle options, py::handle columns,
                               py::handle offset, py::handle out) {
  SinusoidalParams p{};
  py::object result = read_encoding(p, x, options, columns, offset, out);
  p.threads = threads();
  without_gil([&] {
    const int64_t elements = p.B * p.H * p.L * p.D;
    expect_to_fill(p.out.data, static_cast<size_t>(elements * element_bytes(p.dtype)));  // dense
    kernels(p.dtype).sinusoidal(p);
  });
  return result;
}

}  // namespace
}  // namespace fastattn
