// Python's view of memory encoding on a GPU.
#include "../encode_memory_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// operands: see read_encoding, read_tokens and read_tables; out: an address.
void launch_encode_memory_forward(int dtype, uintptr_t stream, const py::tuple& sizes,
                                  const py::object& options, const py::dict& operands,
                                  uintptr_t out) {
  EncodeMemoryArguments p{};
  read_encoding(dtype, sizes, named(options), named(operands), p);
  read_tokens(named(operands), p);
  read_tables(named(operands), p);
  p.out = reinterpret_cast<void*>(out);
  const int64_t bytes = element_bytes(p.dtype);
  const bool aligned = p.D * bytes % 16 == 0 && out % 16 == 0 && is_aligned(p.weight, bytes) &&
                       (p.temporal.data == nullptr || is_aligned(p.temporal, bytes));
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { encode_memory_forward(element, p, aligned, stream); });
}

// operands: see read_encoding; and the addresses of order, starts and sentences. gradients: see
// read_gradients.
void launch_encode_memory_backward(int dtype, uintptr_t stream, const py::tuple& sizes,
                                   const py::object& options, const py::dict& operands,
                                   const py::dict& gradients) {
  using P = EncodeMemoryArguments;
  static const auto words = std::make_tuple(field("order", &P::order), field("starts", &P::starts),
                                            field("sentences", &P::sentences));
  EncodeMemoryArguments p{};
  read_encoding(dtype, sizes, named(options), named(operands), p);
  named(operands).read(p, words);
  read_gradients(named(gradients), p);
  const int64_t bytes = element_bytes(p.dtype);
  bool aligned = p.D * bytes % 16 == 0 && reinterpret_cast<uintptr_t>(p.grad) % 16 == 0;
  for (const int64_t stride : p.grad_stride) aligned = aligned && stride * bytes % 16 == 0;
  py::gil_scoped_release release;
  with_element(p.dtype,
               [&](auto* element) { encode_memory_backward(element, p, aligned, stream); });
}

}  // namespace

void bind_encode_memory(py::module_& m) {
  m.def("encode_memory_forward", &launch_encode_memory_forward);
  m.def("encode_memory_backward", &launch_encode_memory_backward);
}

}  // namespace cuda
}  // namespace fastattn
