// Python's view of memory encoding on a GPU.
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

template <class T>
const T* pointer(const py::handle& address) {
  return reinterpret_cast<const T*>(address.cast<uintptr_t>());
}

// sizes: (R, G, B, N, J, V, D); factors: (address, row stride).
EncodeMemoryArguments arguments(int dtype, const py::tuple& sizes, const py::object& options,
                                const py::tuple& factors) {
  EncodeMemoryArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[7];
  integers(sizes, n);
  p.R = n[0], p.G = n[1], p.B = n[2], p.N = n[3], p.J = n[4], p.V = n[5], p.D = n[6];
  read_encode_memory_options(named(options), p);
  p.factors = pointer<float>(factors[0]);
  p.factor_stride = factors[1].cast<int64_t>();
  return p;
}

// tokens, weight and temporal (or None): (address, strides); out: an address.
void forward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::object& options,
             const py::tuple& factors, const py::tuple& tokens, const py::tuple& weight,
             const py::object& temporal, uintptr_t out) {
  EncodeMemoryArguments p = arguments(dtype, sizes, options, factors);
  p.tokens = pointer<int64_t>(tokens[0]);
  integers(tokens[1].cast<py::tuple>(), p.token_stride);
  p.weight = optional_operand(weight);
  p.temporal = optional_operand(temporal);
  p.out = reinterpret_cast<void*>(out);
  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  const bool aligned = p.D * bytes % 16 == 0 && out % 16 == 0 && is_aligned(p.weight, bytes) &&
                       (p.temporal.data == nullptr || is_aligned(p.temporal, bytes));
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { encode_memory_forward(element, p, aligned, stream); });
}

// grad: (address, strides of R, B, G, N); words: addresses of (order, starts, sentences); results:
// of (grad_weight, grad_temporal or 0).
void backward(int dtype, uintptr_t stream, const py::tuple& sizes, const py::object& options,
              const py::tuple& factors, const py::tuple& grad, const py::tuple& words,
              const py::tuple& results) {
  EncodeMemoryArguments p = arguments(dtype, sizes, options, factors);
  Tensor4 given = optional_operand(grad);
  p.grad = given.data;
  for (int n = 0; n < 4; ++n) p.grad_stride[n] = given.stride[n];
  p.order = pointer<int64_t>(words[0]);
  p.starts = pointer<int64_t>(words[1]);
  p.sentences = pointer<uint8_t>(words[2]);
  p.grad_weight = reinterpret_cast<void*>(results[0].cast<uintptr_t>());
  p.grad_temporal = reinterpret_cast<void*>(results[1].cast<uintptr_t>());
  const int64_t bytes = p.dtype == DType::f32 ? 4 : 2;
  bool aligned = p.D * bytes % 16 == 0 && reinterpret_cast<uintptr_t>(p.grad) % 16 == 0;
  for (const int64_t stride : p.grad_stride) aligned = aligned && stride * bytes % 16 == 0;
  py::gil_scoped_release release;
  with_element(p.dtype,
               [&](auto* element) { encode_memory_backward(element, p, aligned, stream); });
}

}  // namespace

void bind_encode_memory(py::module_& m) {
  m.def("encode_memory_forward", &forward);
  m.def("encode_memory_backward", &backward);
}

}  // namespace cuda
}  // namespace fastattn
