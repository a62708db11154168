// Additive attention on a GPU as Python calls it: tensors in, tensors out.
#include "../attention_arguments.h"
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// The arguments of a call, and what they point to.
struct AdditiveCall : AdditiveArguments {
  AdditiveVectors vectors;

  AdditiveCall(const py::object& options, const AdditiveTensors& from) : AdditiveArguments{} {
    AdditiveOptions asked;
    read_additive_options(Named(options), asked);
    window_right = asked.causal ? 0 : -1;
    dropout_p = asked.dropout_p;
    read_additive(*this, vectors, from);
    vector = static_cast<const float*>(vectors.v);
    AdditiveArguments::bias = static_cast<const float*>(vectors.bias);
    scale_float = 1.0f;
    set_window(*this);
    set_dropout(*this, from.seed);
  }
};

// (out, weights or None), new.
py::tuple additive_attention(uintptr_t stream, const py::object& options, py::handle query,
                             py::handle key, py::handle value, py::handle v, py::handle bias,
                             py::handle attn_mask, py::handle seed) {
  struct Asked {
    bool weights;
  } asked;
  static const auto fields = std::make_tuple(field("weights", &Asked::weights));
  Named(options).read(asked, fields);
  AdditiveCall p(options, {query, key, value, v, bias, attn_mask, seed});
  void* data;
  const py::object out = new_result(p.dtype, {p.B, p.Lq, p.Dv}, &data);
  p.out = headless(data, p.Lq, p.Dv);
  py::object weights = py::none();
  if (asked.weights) {
    weights = new_result(p.dtype, {p.B, p.Lq, p.Lk}, &data);
    p.applied = headless(data, p.Lq, p.Lk);
  }
  const py::object scores = new_floats({p.B, p.Lq, p.Lk}, &p.scores);
  with_element(p.dtype, [&](auto* element) { additive_forward(element, p, stream); });
  return py::make_tuple(out, weights);
}

// The gradients of query, key and value; the terms of those of v and bias [B, tiles, 2, A]; and the
// gradient of the scores [B, Tq, Tk]. New.
py::tuple additive_gradients(uintptr_t stream, const py::object& options, py::handle grad_out,
                             py::handle grad_weights, py::handle query, py::handle key,
                             py::handle value, py::handle v, py::handle bias, py::handle attn_mask,
                             py::handle seed) {
  const AdditiveTensors tensors{query, key, value, v, bias, attn_mask, seed};
  AdditiveCall p(options, tensors);
  read_additive_gradients(p, grad_out, grad_weights);
  const py::tuple grads = new_additive_gradients(p, tensors);
  const int64_t tiles = (p.Lq + kAdditiveTile - 1) / kAdditiveTile;
  const py::object parts = new_floats({p.B, tiles, 2, p.D}, &p.parts),
                   scores = new_floats({p.B, p.Lq, p.Lk}, &p.scores),
                   of_scores = new_floats({p.B, p.Lq, p.Lk}, &p.gradients);
  with_element(p.dtype, [&](auto* element) { additive_backward(element, p, stream); });
  return py::make_tuple(grads[0], grads[1], grads[2], parts, of_scores);
}

}  // namespace

void bind_additive(py::module_& m) {
  define(m, "additive_attention", &additive_attention);
  define(m, "additive_attention_backward", &additive_gradients);
}

}  // namespace cuda
}  // namespace fastattn
