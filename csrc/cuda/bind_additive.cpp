// Python's view of additive attention on a GPU: one head, a window of -1 or 0 to the right.
#include "binding.h"

namespace py = pybind11;

namespace fastattn {
namespace cuda {

namespace {

// sizes: (B, Tq, Tk, A, Dv); operands: query, key, value, the addresses of vector and bias, mask,
// mask_dtype, the address of seed.
AdditiveArguments additive_arguments(int dtype, const py::tuple& sizes, const py::object& options,
                                     const py::dict& operands) {
  using P = AdditiveArguments;
  static const auto fields =
      std::make_tuple(field("query", &P::q), field("key", &P::k), field("value", &P::v),
                      field("vector", &P::vector), field("bias", &P::bias), field("mask", &P::mask),
                      field("mask_dtype", &P::mask_dtype), field("seed", &P::seed_address));
  AdditiveArguments p{};
  p.dtype = static_cast<DType>(dtype);
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Hq = p.Hkv = 1, p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4];
  named(operands).read(p, fields);
  AdditiveOptions asked;
  read_additive_options(named(options), asked);
  p.window_right = asked.causal ? 0 : -1;
  p.dropout_p = asked.dropout_p;
  p.scale_float = 1.0f;
  set_window(p);
  set_dropout(p);
  return p;
}

// results: out, applied, the address of scores.
void launch_additive_forward(int dtype, uintptr_t stream, const py::tuple& sizes,
                             const py::object& options, const py::dict& operands,
                             const py::dict& results) {
  using P = AdditiveArguments;
  static const auto written = std::make_tuple(field("out", &P::out), field("applied", &P::applied),
                                              field("scores", &P::scores));
  AdditiveArguments p = additive_arguments(dtype, sizes, options, operands);
  named(results).read(p, written);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { additive_forward(element, p, stream); });
}

// gradients: see read_gradients, then the addresses of scores, gradients and parts.
void launch_additive_backward(int dtype, uintptr_t stream, const py::tuple& sizes,
                              const py::object& options, const py::dict& operands,
                              const py::dict& gradients) {
  using P = AdditiveArguments;
  static const auto own = std::make_tuple(
      field("scores", &P::scores), field("gradients", &P::gradients), field("parts", &P::parts));
  AdditiveArguments p = additive_arguments(dtype, sizes, options, operands);
  read_gradients(named(gradients), p);
  named(gradients).read(p, own);
  py::gil_scoped_release release;
  with_element(p.dtype, [&](auto* element) { additive_backward(element, p, stream); });
}

}  // namespace

void bind_additive(py::module_& m) {
  m.def("additive_forward", &launch_additive_forward);
  m.def("additive_backward", &launch_additive_backward);
  m.attr("additive_tile") = kAdditiveTile;
}

}  // namespace cuda
}  // namespace fastattn
