// Python's view of local attention.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// [B, rows, columns] as (address, strides of batch and row); the columns are contiguous.
Tensor4 rows_of(const py::handle& item) {
  if (item.is_none()) return {};
  const py::tuple pair = py::cast<py::tuple>(item);
  int64_t stride[2];
  integers(py::cast<py::tuple>(pair[1]), stride);
  Tensor4 t;
  t.data = reinterpret_cast<void*>(py::cast<uintptr_t>(pair[0]));
  t.stride[0] = stride[0], t.stride[1] = stride[1], t.stride[2] = 1;
  return t;
}

template <class T>
T* address(uintptr_t data) {
  return reinterpret_cast<T*>(data);
}

// sizes: B, Lq, Lk, D, Dv, W; operands: query, key, value
LocalParams read_common(int dtype, int threads, const py::tuple& sizes, const py::tuple& operands,
                        uintptr_t first, uintptr_t seen, uintptr_t factor, uintptr_t weights) {
  LocalParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[6];
  integers(sizes, n);
  p.B = n[0], p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4], p.W = n[5];
  p.query = rows_of(operands[0]), p.key = rows_of(operands[1]), p.value = rows_of(operands[2]);
  p.first = address<const int64_t>(first);
  p.seen = address<const uint8_t>(seen);
  p.factor = address<const void>(factor);
  p.weights = address<void>(weights);
  return p;
}

void local_attention(int dtype, int threads, const py::tuple& sizes, const py::tuple& operands,
                     uintptr_t first, uintptr_t seen, uintptr_t factor, uintptr_t weights,
                     uintptr_t out) {
  LocalParams p = read_common(dtype, threads, sizes, operands, first, seen, factor, weights);
  p.out = address<void>(out);
  py::gil_scoped_release release;
  kernels(p.dtype).local_attention_forward(p);
}

// grads: of query, key, value and factor (0: not wanted)
void local_attention_backward(int dtype, int threads, const py::tuple& sizes,
                              const py::tuple& operands, uintptr_t first, uintptr_t seen,
                              uintptr_t factor, uintptr_t weights, const py::object& grad_out,
                              uintptr_t grad_weights, const py::tuple& grads,
                              uintptr_t coefficients) {
  LocalParams p = read_common(dtype, threads, sizes, operands, first, seen, factor, weights);
  p.grad_out = rows_of(grad_out);
  p.grad_weights = address<const void>(grad_weights);
  int64_t to[4];
  integers(grads, to);
  p.grad_query = address<void>(static_cast<uintptr_t>(to[0]));
  p.grad_key = address<void>(static_cast<uintptr_t>(to[1]));
  p.grad_value = address<void>(static_cast<uintptr_t>(to[2]));
  p.grad_factor = address<void>(static_cast<uintptr_t>(to[3]));
  p.coefficients = address<void>(coefficients);
  py::gil_scoped_release release;
  kernels(p.dtype).local_attention_backward(p);
}

}  // namespace

void bind_local_attention(py::module_& m) {
  m.def("local_attention", &local_attention);
  m.def("local_attention_backward", &local_attention_backward);
}

}  // namespace fastattn
