// Additive attention on a GPU as Python calls it: tensors in, tensors out.
#include "../attention_arguments.h"
#include "binding.h"

namespace fastattn {
namespace cuda {
namespace {

// The arguments of a call, and the memory that they point to.
struct AdditiveCall : AdditiveArguments {
  AdditiveVectors vectors;

  template <class Tensors>
  AdditiveCall(py::handle options, const Tensors& from) : AdditiveArguments{} {
    read_additive(*this, vectors, options, from);
    vector = static_cast<const float*>(vectors.v);
    AdditiveArguments::bias = static_cast<const float*>(vectors.bias);
    scale_float = 1.0f;
    set_window(*this);
    set_dropout(*this, from.seed);
  }
};

// Returns (out, weights or None).
py::tuple additive_attention(const AdditiveTensors& x, py::handle options, Stream stream) {
  AdditiveCall p(options, x);
  py::tuple results = new_additive_results(p, p.vectors.returns_weights, x.query);
  const py::object scores = new_floats({p.B, p.Lq, p.Lk}, &p.scores);
  with_element(p.dtype, [&](auto* element) { additive_forward(element, p, stream); });
  return results;
}

// Returns the gradients of query, key, value, v, bias and attn_mask. An absent tensor has None, and
// so has the mask unless the options ask for its gradient.
py::tuple additive_gradients(const AdditiveGradTensors& x, py::handle options, Stream stream) {
  AdditiveCall p(options, x);
  read_additive_gradients(p, x);
  py::object zero;
  if (x.grad_out.is_none()) zero = new_zeros(p.dtype, {1}, &p.grad_out.data);
  py::tuple made = new_additive_gradients(p, x);
  const int64_t tiles = (p.Lq + kAdditiveTile - 1) / kAdditiveTile;
  const py::object parts = new_floats({p.B, tiles, 2, p.D}, &p.parts),
                   scores = new_floats({p.B, p.Lq, p.Lk}, &p.scores),
                   of_scores = new_floats({p.B, p.Lq, p.Lk}, &p.gradients);
  with_element(p.dtype, [&](auto* element) { additive_backward(element, p, stream); });
  const auto summed = [&](py::handle of, int n) {
    return gradient_of(of, parts.attr("select")(2, n));
  };
  made[3] = summed(x.v, 0);
  if (!x.bias.is_none()) made[4] = summed(x.bias, 1);
  if (Named(options).read<bool>("needs_mask_grad")) made[5] = gradient_of(x.attn_mask, of_scores);
  return made;
}

}  // namespace
}  // namespace cuda
}  // namespace fastattn
