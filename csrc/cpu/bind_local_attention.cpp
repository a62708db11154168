// Python's view of local attention.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"
#include "named.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// sizes: B, Lq, Lk, D, Dv; operands: query, key and value, and the addresses of positions, padding,
// factor and weights.
LocalParams read_common(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                        const py::dict& operands) {
  using P = LocalParams;
  static const auto fields =
      std::make_tuple(field("query", &P::query), field("key", &P::key), field("value", &P::value),
                      field("positions", &P::positions), field("padding", &P::padding),
                      field("factor", &P::factor), field("weights", &P::weights));
  LocalParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4];
  read_local_options(named(options), p);
  p.W = 2 * p.reach + 1;
  named(operands).read(p, fields);
  return p;
}

// out: an address
void local_attention(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                     const py::dict& operands, uintptr_t out) {
  LocalParams p = read_common(dtype, threads, sizes, options, operands);
  p.out = reinterpret_cast<void*>(out);
  py::gil_scoped_release release;
  kernels(p.dtype).local_attention_forward(p);
}

// gradients: grad_out, and the addresses of grad_weights, the four gradients and coefficients.
void local_attention_backward(int dtype, int threads, const py::tuple& sizes,
                              const py::object& options, const py::dict& operands,
                              const py::dict& gradients) {
  using P = LocalParams;
  static const auto fields = std::make_tuple(
      field("grad_out", &P::grad_out), field("grad_weights", &P::grad_weights),
      field("grad_query", &P::grad_query), field("grad_key", &P::grad_key),
      field("grad_value", &P::grad_value), field("grad_positions", &P::grad_positions),
      field("coefficients", &P::coefficients));
  LocalParams p = read_common(dtype, threads, sizes, options, operands);
  named(gradients).read(p, fields);
  py::gil_scoped_release release;
  kernels(p.dtype).local_attention_backward(p);
}

}  // namespace

void bind_local_attention(py::module_& m) {
  m.def("local_attention", &local_attention);
  m.def("local_attention_backward", &local_attention_backward);
}

}  // namespace fastattn
