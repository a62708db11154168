// Attention as Python calls it: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "../operands.h"
#include "../options.h"
#include "../relative_bias_arguments.h"
#include "attention_call.h"
#include "kernel_table.h"
#include "mask_program.h"
#include "memory.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// The arguments of a call, and the memory that they point to.
struct Call : AttentionParams {
  std::vector<MaskStep> steps;
  std::vector<double> sink_gradients;  // [B, Hq]
  py::object table;                    // see read_biases
};

// The distances of positions, which are in the memory of the host here.
void check_positions(const AttentionParams& p) {
  if (!reads_relative_bias(p) || p.positions == nullptr) return;
  const auto queries = std::minmax_element(p.positions + p.offset, p.positions + p.offset + p.Lq);
  const auto keys = std::minmax_element(p.positions, p.positions + p.Lk);
  expect_distances(p, int64_t{*queries.first} - *keys.second,
                   int64_t{*queries.second} - *keys.first);
}

// The record of options, read once: what was read is kept in the record.
struct Options : AttentionOptions {
  bool needs_mask_grad = false, partial = false;  // of the backward pass

  explicit Options(const py::object& record) {
    static const auto of_backward = std::make_tuple(
        field("needs_mask_grad", &Options::needs_mask_grad), field("partial", &Options::partial));
    read_attention_options(Named(record), *this);
    if (py::hasattr(record, "partial")) Named(record).read(*this, of_backward);
  }

  static py::object of(const py::object& record) {
    static PyObject* const name = PyUnicode_InternFromString("core");
    if (PyObject* kept = PyObject_GetAttr(record.ptr(), name))
      return py::reinterpret_steal<py::object>(kept);
    PyErr_Clear();
    py::object made = py::cast(Options(record));
    // Not by the record's own method: it is frozen.
    if (PyObject_GenericSetAttr(record.ptr(), name, made.ptr()) != 0) throw py::error_already_set();
    return made;
  }
};

void read_call(Call& p, const Options& options, py::handle query, py::handle key, py::handle value,
               const Biases& biases) {
  static_cast<AttentionOptions&>(p) = options;
  read_attention(p, query, key, value);
  p.threads = threads();
  p.reduced = reduces(p);
  int64_t positions = 0;
  read_biases(p, biases, &positions, &p.table);
  p.seed = read_seed(biases.seed);
  check_relative_bias(p, positions);
  check_positions(p);
  read_mask_program(biases.mask_program, p, p.steps);
}

// (out, lse or None, weights or None), new. A call without a gradient needs no lse.
py::tuple attention(const py::object& record, py::handle query, py::handle key, py::handle value,
                    py::handle attn_mask, py::handle alibi_slopes, py::handle seed,
                    py::handle sinks, py::handle relative_bias, py::handle positions,
                    py::handle mask_program, bool needs_lse) {
  Call p{};
  const py::object options = Options::of(record);
  read_call(p, options.cast<const Options&>(), query, key, value,
            {attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program});
  const py::object out = new_rows(query, p.Dv, &p.out);
  py::object lse = py::none(), weights = py::none();
  if (needs_lse || p.weights != Weights::none) {
    void* data;
    lse = new_buffer(DType::f64, {p.B, p.Hq, p.Lq}, &data);
    p.lse = static_cast<double*>(data);
  }
  if (p.weights != Weights::none) {
    const auto make = p.Hq > 0 ? new_result : new_zeros;  // without heads the kernel writes nothing
    weights = p.weights == Weights::per_head
                  ? make(p.dtype, {p.B, p.Hq, p.Lq, p.Lk}, &p.applied.data)
                  : make(p.dtype, {p.B, p.Lq, p.Lk}, &p.applied.data);
    const int64_t heads = p.weights == Weights::per_head ? p.Hq : 1;
    const int64_t stride[] = {heads * p.Lq * p.Lk, heads > 1 ? p.Lq * p.Lk : 0, p.Lk, 1};
    std::copy_n(stride, 4, p.applied.stride);
  }
  {
    py::gil_scoped_release release;
    if (p.weights != Weights::none)
      expect_to_fill(p.applied.data,
                     static_cast<size_t>(p.B * p.applied.stride[0] * element_bytes(p.dtype)));
    kernels(p.dtype).attention_forward(p);
  }
  return py::make_tuple(out, lse, weights);
}

// New, of the mask's sizes: f64 where one element sums those of many queries or keys.
py::object new_grad_mask(Call& p, py::handle mask) {
  const TensorView x = view_of("attn_mask", mask);
  if (x.rank != 4) throw py::value_error("fastattn: attn_mask must have four dimensions");
  const DType wide = x.size[2] == 1 || x.size[3] == 1 ? DType::f64 : accumulator(p.dtype);
  const int64_t* n = x.size;
  py::object made = new_zeros(wide, {n[0], n[1], n[2], n[3]}, &p.grad_mask.data);
  int64_t stride = 1;
  for (int d = 3; d >= 0; --d) {
    p.grad_mask.stride[d] = n[d] == 1 ? 0 : stride;
    stride *= n[d];
  }
  return made;
}

// The gradients, new: of query, key and value, and of attn_mask, sinks and relative_bias, or None
// without them. That of the mask only where the options ask for it, in the type that sums it; that of
// the table [B, Hq, relative_bias_size].
py::tuple attention_backward(const py::object& record, py::handle grad_out, py::handle grad_lse,
                             py::handle grad_weights, py::handle query, py::handle key,
                             py::handle value, py::handle attn_mask, py::handle alibi_slopes,
                             py::handle seed, py::handle out, py::handle lse, py::handle sinks,
                             py::handle relative_bias, py::handle positions,
                             py::handle mask_program) {
  static constexpr double kZero = 0;
  Call p{};
  const py::object kept_options = Options::of(record);
  const auto& options = kept_options.cast<const Options&>();
  read_call(p, options, query, key, value,
            {attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program});
  p.partial = options.partial;
  TensorView of_out = read_sizes("out", out, p.dtype, {p.B, p.Hq, p.Lq, p.Dv});
  py::object kept[3];
  if (of_out.stride[3] != 1) of_out = view_of("out", kept[0] = contiguous(out));
  p.out = operand_of(of_out);
  p.grad_out.data = const_cast<double*>(&kZero);
  if (!grad_out.is_none())
    p.grad_out = operand_of(read_sizes("grad_out", grad_out, p.dtype, {p.B, p.Hq, p.Lq, p.Dv}));
  if (!grad_lse.is_none())
    p.grad_lse = read_rows("grad_lse", grad_lse, {p.B, p.Hq, p.Lq}, &kept[1]);
  p.lse = read_rows("lse", lse, {p.B, p.Hq, p.Lq}, &kept[2]);
  read_grad_weights(p, grad_weights);

  const bool nothing = p.Hq == 0 || p.Lq == 0 || p.Lk == 0;  // the kernels write nothing then
  const auto new_gradient = [&](py::handle of, int64_t width, Tensor4* to) {
    py::object made = new_rows(of, width, to);
    if (nothing) made.attr("zero_")();
    return made;
  };
  const py::object of_query = new_gradient(query, p.D, &p.grad_q),
                   of_key = new_gradient(key, p.D, &p.grad_k),
                   of_value = new_gradient(value, p.Dv, &p.grad_v);
  py::object of_mask = py::none(), of_sinks = py::none(), of_table = py::none();
  if (options.needs_mask_grad && !attn_mask.is_none()) of_mask = new_grad_mask(p, attn_mask);
  if (p.sinks != nullptr) {
    p.sink_gradients.resize(static_cast<size_t>(p.B * p.Hq));
    p.grad_sinks = p.sink_gradients.data();
  }
  if (!relative_bias.is_none())
    of_table =
        new_zeros(accumulator(p.dtype), {p.B, p.Hq, p.relative_bias_size}, &p.grad_relative_bias);
  {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_backward(p);
  }
  if (p.sinks != nullptr) of_sinks = summed_sink_gradients(p.sink_gradients, p.B, sinks);
  return py::make_tuple(of_query, of_key, of_value, of_mask, of_sinks, of_table);
}

}  // namespace

void bind_sdpa(py::module_& m) {
  py::class_<Options>(m, "AttentionOptions");
  m.def("attention", &attention);
  m.def("attention_backward", &attention_backward);
}

}  // namespace fastattn
