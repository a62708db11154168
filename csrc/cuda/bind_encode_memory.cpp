// Memory encoding on a GPU as Python calls it: tensors in, tensors out.
#include "../encode_memory_arguments.h"
#include "binding.h"

namespace fastattn {
namespace cuda {
namespace {

struct EncodeMemoryCall : EncodeMemoryArguments, EncodingCall {};

struct SortedGradTensors {
  // order [R, B N J] sorts the words by their rows of the table, starts [R, V + 1] has the first
  // word of each row, sentences [R, B, N] the sentences that have a word.
  FASTATTN_TENSORS(grad_out, tokens, factors, order, starts, sentences)
};

// Returns the memories [R, B, G, N, D].
py::object encode_memory(const EncodingTensors& x, py::handle options, Stream stream) {
  EncodeMemoryCall p{};
  read_encoding(p, p, options, x);
  const py::object out = new_result(p.dtype, {p.R, p.B, p.G, p.N, p.D}, &p.out);
  const Tensor4 of_out{p.out, {0, 0, p.D, 1}};
  const bool aligned = are_aligned(p.dtype, {of_out, p.weight, p.temporal}, p.D);
  with_element(p.dtype, [&](auto* element) { encode_memory_forward(element, p, aligned, stream); });
  return out;
}

// Returns the gradients of weight, and of temporal or None.
py::tuple encoding_gradients(const SortedGradTensors& x, py::handle options, Stream stream) {
  EncodeMemoryCall p{};
  read_encoding_gradient(p, p, options, {x.grad_out, x.tokens, x.factors});
  const auto read = [&p](const char* name, py::handle from, DType dtype, const Sizes& sizes) {
    const TensorView x = read_sizes(name, from, dtype, sizes);
    expect(x.is_contiguous(), std::string(name) + " must be contiguous");
    return x.data;
  };
  p.order = static_cast<const int64_t*>(read("order", x.order, kInt64, {p.R, p.B * p.N * p.J}));
  p.starts = static_cast<const int64_t*>(read("starts", x.starts, kInt64, {p.R, p.V + 1}));
  p.sentences =
      static_cast<const uint8_t*>(read("sentences", x.sentences, DType::boolean, {p.R, p.B, p.N}));
  const py::object of_weight = new_result(p.dtype, {p.R, p.G, p.V, p.D}, &p.grad_weight);
  py::object of_temporal = none();
  if (p.has_temporal) of_temporal = new_result(p.dtype, {p.R, p.G, p.N, p.D}, &p.grad_temporal);
  const int64_t* s = p.grad_stride;
  const Tensor4 of_model{const_cast<void*>(p.grad), {s[1], s[2], s[3], 1}};
  const bool aligned =
      are_aligned(p.dtype, {of_model}, p.D) && s[0] * element_bytes(p.dtype) % 16 == 0;
  with_element(p.dtype,
               [&](auto* element) { encode_memory_backward(element, p, aligned, stream); });
  return py::make_tuple(of_weight, of_temporal);
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
