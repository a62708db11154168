// Attention as Python calls it: tensors in, tensors out.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "../operands.h"
#include "../options.h"
#include "attention_call.h"
#include "kernel_table.h"
#include "mask_program.h"

namespace fastattn {
namespace {

// Checks the distances of positions; the CPU can read their values.
void check_positions(const AttentionParams& p) {
  if (!reads_relative_bias(p) || p.positions == nullptr) return;
  const auto queries = std::minmax_element(p.positions + p.offset, p.positions + p.offset + p.Lq);
  const auto keys = std::minmax_element(p.positions, p.positions + p.Lk);
  expect_distances(p, int64_t{*queries.first} - *keys.second,
                   int64_t{*queries.second} - *keys.first);
}

// The bias of an image whose tokens are the keys.
template <class Tensors>
void read_image_bias(AttentionParams& p, const Tensors& x) {
  expect(x.row_bias.is_none() == x.column_bias.is_none(),
         "row_bias and column_bias must be given together");
  if (x.row_bias.is_none()) return;
  const auto read = [&](const char* name, py::handle from, Tensor4& to) {
    const TensorView view = view_of(name, from);
    expect(view.rank == 4, std::string(name) + " must have four dimensions");
    expect_sizes(name, view, accumulator(p.dtype), {p.B, p.Hq, p.Lq, view.size[3]});
    to = operand_of(view);
    return view.size[3];
  };
  p.image_height = read("row_bias", x.row_bias, p.row_bias);
  p.image_width = read("column_bias", x.column_bias, p.column_bias);
  expect(p.image_height * p.image_width == p.Lk, [&] {
    return "row_bias and column_bias must be of " + std::to_string(p.Lk) + " keys, got " +
           std::to_string(p.image_height) + " x " + std::to_string(p.image_width);
  });
}

// The record of options, read once: the parsed values are cached in the Python record.
struct Options : AttentionOptions {
  bool needs_mask_grad = false, partial = false;  // of the backward pass

  explicit Options(py::handle record) {
    const Named from(record);
    read_attention_options(from, *this);
    if (!py::hasattr(record, "partial")) return;
    from.read<&Options::needs_mask_grad>("needs_mask_grad", *this);
    from.read<&Options::partial>("partial", *this);
  }

  // `owners` owns the result.
  static const Options& of(py::handle record, py::object* owners) {
    static PyObject* const name = PyUnicode_InternFromString("core");
    if (PyObject* attribute = PyObject_GetAttr(record.ptr(), name)) {
      *owners = py::reinterpret_steal<py::object>(attribute);
    } else {
      PyErr_Clear();
      *owners = py::capsule(new Options(record), [](void* x) { delete static_cast<Options*>(x); });
      // Not by the record's own __setattr__: the record is frozen.
      if (PyObject_GenericSetAttr(record.ptr(), name, owners->ptr()) != 0)
        throw py::error_already_set();
    }
    return *static_cast<const Options*>(PyCapsule_GetPointer(owners->ptr(), nullptr));
  }
};

// The arguments of a call, and the memory that they point to.
struct Call : AttentionParams {
  std::vector<MaskStep> steps;
  std::vector<double> sink_gradients;    // [B, Hq]
  py::object options, table, owners[3];  // see read_biases and read_results

  template <class Tensors>
  Call(py::handle record, const Tensors& from) : AttentionParams{} {
    static_cast<AttentionOptions&>(*this) = Options::of(record, &options);
    read_attention(*this, from, dense);
    threads = fastattn::threads();
    reduced = reduces(*this);
    read_dense_biases(*this, from, &table);
    read_content_terms(*this, from, dense, std::max(Lk - 1 - offset, offset + Lq - 1));
    read_image_bias(*this, from);
    seed = read_seed(from.seed);
    check_positions(*this);
    read_mask_program(from.mask_program, *this, steps);
  }
};

// Returns (out, lse or None, weights or None); `only_first`: out alone, for a call without a
// gradient.
py::object attention(const AttentionTensors& x, py::handle options, bool only_first) {
  Call p(options, x);
  const py::object out = new_rows(x.query, p.Dv, dense, &p.out);
  py::object lse = none();
  if (!only_first || p.weights != Weights::none)
    lse = new_buffer(DType::f64, {p.B, p.Hq, p.Lq}, &p.lse);
  // Without heads the kernel writes nothing.
  const py::object weights = new_weights(p, p.Hq > 0 ? static_cast<Make>(new_result) : new_zeros);
  without_gil([&] { kernels(p.dtype).attention_forward(p); });
  if (only_first) return out;
  return py::make_tuple(out, lse, weights);
}

// Returns the gradients of query, key and value, and of attn_mask (where the options ask for it),
// sinks, relative_bias, position_query, query_table, key_table, row_bias and column_bias; an absent
// tensor has None.
py::tuple attention_backward(const AttentionGradTensors& x, py::handle options) {
  Call p(options, x);
  const Options& asked = Options::of(options, &p.options);
  p.partial = asked.partial;
  read_results(p, x, dense, p.B, {p.B, p.Hq, p.Lq}, p.owners);
  complete(p.grad_out);
  read_grad_weights(p, x.grad_weights);

  const bool nothing = p.Hq == 0 || p.Lq == 0 || p.Lk == 0;  // the kernels write nothing then
  py::tuple gradients = new_row_gradients(p, x, dense, nothing, 8);
  py::object of_mask, of_table;
  if (asked.needs_mask_grad && !x.attn_mask.is_none())
    of_mask = new_grad_mask(p, x.attn_mask, new_zeros, accumulator(p.dtype), DType::f64);
  if (p.sinks != nullptr) {
    p.sink_gradients.resize(static_cast<size_t>(p.B * p.Hq));
    p.grad_sinks = p.sink_gradients.data();
  }
  if (!x.relative_bias.is_none())
    of_table =
        new_zeros(accumulator(p.dtype), {p.B, p.Hq, p.relative_bias_size}, &p.grad_relative_bias);
  const TermGradients terms(p, x, dense, nothing);
  if (!x.row_bias.is_none()) {
    gradients[9] =
        new_zeros(accumulator(p.dtype), {p.B, p.Hq, p.Lq, p.image_height}, &p.grad_row_bias);
    gradients[10] =
        new_zeros(accumulator(p.dtype), {p.B, p.Hq, p.Lq, p.image_width}, &p.grad_column_bias);
  }
  without_gil([&] { kernels(p.dtype).attention_backward(p); });
  terms.place(gradients, 6, x);
  if (of_mask) gradients[3] = gradient_of(x.attn_mask, of_mask);
  if (p.sinks != nullptr) {
    if (p.Lk == 0 && p.grad_lse != nullptr)
      for (int64_t n = 0; n < p.B * p.Hq; ++n)
        p.grad_sinks[n] +=
            from_rows_without_keys(p, n / p.Hq, n % p.Hq, p.grad_lse + n * p.Lq, p.Lq);
    gradients[4] = summed_sink_gradients(p.sink_gradients, p.B, x.sinks);
  }
  if (of_table) gradients[5] = gradient_of(x.relative_bias, of_table);
  return gradients;
}

}  // namespace
}  // namespace fastattn
