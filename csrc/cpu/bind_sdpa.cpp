// Python's view of attention: addresses, shapes and strides.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../relative_bias_arguments.h"
#include "kernel_table.h"
#include "mask_program.h"
#include "memory.h"
#include "sdpa_arguments.h"
#include "tensors.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// The arguments of a call, and the memory that they point to.
struct Arguments : AttentionParams {
  int64_t positions_length = 0;
  std::vector<MaskStep> steps;
};

// The distances of positions, which are in the memory of the host here.
void check_positions(const AttentionParams& p) {
  if (!reads_relative_bias(p) || p.positions == nullptr) return;
  const auto queries = std::minmax_element(p.positions + p.offset, p.positions + p.offset + p.Lq);
  const auto keys = std::minmax_element(p.positions, p.positions + p.Lk);
  expect_distances(p, int64_t{*queries.first} - *keys.second,
                   int64_t{*queries.second} - *keys.first);
}

// operands: see optional_arguments and read_mask_program; and applied, the weights; how many positions
// there are.
Arguments arguments(const AttentionParams& common, const py::object& options,
                    const py::object& operands) {
  static const auto others =
      std::make_tuple(field("applied", &AttentionParams::applied),
                      field("positions_length", &Arguments::positions_length));
  Arguments p{common, 0, {}};
  read_attention_options(named(options), p);
  if (!optional_arguments(p, operands)) return p;
  named(operands).read_given(p, others);
  check_relative_bias(p, p.positions_length);
  check_positions(p);
  read_mask_program(named(operands), p, p.steps);
  return p;
}

void attention_forward(int dtype, const py::object& may_reduce, int threads, const py::tuple& sizes,
                       uintptr_t q, const py::tuple& q_stride, uintptr_t k,
                       const py::tuple& k_stride, uintptr_t v, const py::tuple& v_stride,
                       uintptr_t out, const py::tuple& out_stride, uintptr_t lse,
                       const py::object& options, const py::object& operands) {
  Arguments p = arguments(common_arguments(dtype, may_reduce, threads, sizes, q, q_stride, k,
                                           k_stride, v, v_stride, out, out_stride, lse),
                          options, operands);
  py::gil_scoped_release release;
  const int64_t weights =
      p.B * (p.weights == Weights::per_head ? p.Hq : 1) * p.Lq * p.Lk * element_bytes(p.dtype);
  if (p.weights != Weights::none) expect_to_fill(p.applied.data, static_cast<size_t>(weights));
  kernels(p.dtype).attention_forward(p);
}

// Of a small call: the address and the strides of grad_out, grad_query, grad_key and grad_value, in
// this order, in one tuple; nothing is then read by name.
bool plain_gradients(const py::object& from, AttentionParams& p) {
  if (!PyTuple_CheckExact(from.ptr())) return false;
  constexpr int kOperands = 4;
  if (PyTuple_GET_SIZE(from.ptr()) != 2 * kOperands)
    throw py::value_error(
        "fastattn: expected an address and strides for each of 4 gradients, got " +
        std::to_string(PyTuple_GET_SIZE(from.ptr())) + " values");
  Tensor4* const to[kOperands] = {&p.grad_out, &p.grad_q, &p.grad_k, &p.grad_v};
  for (int n = 0; n < kOperands; ++n)
    *to[n] = operand(static_cast<uintptr_t>(integer(PyTuple_GET_ITEM(from.ptr(), 2 * n))),
                     py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(from.ptr(), 2 * n + 1)));
  return true;
}

// gradients: see plain_gradients; or, by name, see read_gradients and SinkGradients; grad_mask; and
// partial, if it is.
void attention_backward(int dtype, const py::object& may_reduce, int threads,
                        const py::tuple& sizes, uintptr_t q, const py::tuple& q_stride, uintptr_t k,
                        const py::tuple& k_stride, uintptr_t v, const py::tuple& v_stride,
                        uintptr_t out, const py::tuple& out_stride, uintptr_t lse,
                        const py::object& options, const py::object& operands,
                        const py::object& gradients) {
  static const auto mask = std::make_tuple(field("grad_mask", &AttentionParams::grad_mask));
  static const auto partial = std::make_tuple(field("partial", &AttentionParams::partial));
  Arguments p = arguments(common_arguments(dtype, may_reduce, threads, sizes, q, q_stride, k,
                                           k_stride, v, v_stride, out, out_stride, lse),
                          options, operands);
  if (plain_gradients(gradients, p)) {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_backward(p);
    return;
  }
  read_gradients(named(gradients), p);
  named(gradients).read(p, mask);
  named(gradients).read_given(p, partial);
  const SinkGradients of_sinks(named(gradients), p);
  py::gil_scoped_release release;
  kernels(p.dtype).attention_backward(p);
  of_sinks.write();
}

// -- calls without a mask or other options, whose tensors are read here ---------------------------
//
// plain_attention_call() looks at the tensors of a call once; the caller has done so for the others, and for
// grad_out.

// Reads the operands and the sizes; false if the general path has to see them.
bool read_plain_call(py::handle query, py::handle key, py::handle value, AttentionParams& p) {
  TensorView q, k, v;
  if (!read_tensor(query, &q) || !read_tensor(key, &k) || !read_tensor(value, &v)) return false;
  if (q.rank != 4 || k.rank != 4 || v.rank != 4) return false;
  if (q.dtype == DType::boolean || k.dtype != q.dtype || v.dtype != q.dtype) return false;
  p.dtype = q.dtype;
  p.B = q.size[0], p.Hq = q.size[1], p.Lq = q.size[2], p.D = q.size[3];
  p.Hkv = k.size[1], p.Lk = k.size[2], p.Dv = v.size[3];
  p.q = operand_of(q), p.k = operand_of(k), p.v = operand_of(v);
  return k.has_sizes({p.B, p.Hkv, p.Lk, p.D}) && v.has_sizes({p.B, p.Hkv, p.Lk, p.Dv});
}

// 0 if the general path has to see a call; else a number that is the same for calls of the same dtype and
// columns, and odd if a tensor requires a gradient.
int64_t plain_attention_call(py::handle query, py::handle key, py::handle value, bool grouped) {
  constexpr int64_t kWidest = 1 << 24;
  AttentionParams p{};
  if (!read_plain_call(query, key, value, p)) return 0;
  if (p.B == 0 || p.Hq == 0 || p.Hkv == 0 || p.Lq == 0 || p.Lk == 0) return 0;
  if (p.D == 0 || p.Dv == 0 || p.D > kWidest || p.Dv > kWidest) return 0;
  if (p.Hq != p.Hkv && !(grouped && p.Hq % p.Hkv == 0)) return 0;
  const int64_t number = number_of_call(p.dtype, {query, key, value});
  return number == 0 ? 0 : (p.D * kWidest + p.Dv) * 16 + number;
}

void plain_options(AttentionParams& p, double scale, bool causal, int threads,
                   const py::object& may_reduce) {
  p.scale = scale;
  if (causal) p.window_right = 0;
  p.threads = threads;
  p.reduced = reduces(p, may_reduce);
}

// torch.empty_like(tensor) and its operand; null if its columns are not contiguous.
py::object new_rows_like(py::handle tensor, Tensor4* to) {
  TensorView view;
  py::object made = new_like(tensor, &view);
  if (view.stride[3] != 1) return {};
  *to = operand_of(view);
  return made;
}

// (out, lse or None), new; None if the general path has to see the call.
py::object plain_attention(py::handle query, py::handle key, py::handle value, double scale,
                           bool causal, bool needs_lse, int threads, const py::object& may_reduce) {
  AttentionParams p{};
  if (!read_plain_call(query, key, value, p) || p.D != p.Dv) return py::none();
  plain_options(p, scale, causal, threads, may_reduce);
  const py::object out = new_rows_like(query, &p.out);
  if (!out) return py::none();
  py::object lse = py::none();
  if (needs_lse) {
    void* data;
    lse = new_buffer(DType::f64, {p.B, p.Hq, p.Lq}, &data);
    p.lse = static_cast<double*>(data);
  }
  {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_forward(p);
  }
  return py::make_tuple(out, lse);
}

// The gradients of query, key and value, new; None if the general path has to see the call.
py::object plain_attention_backward(py::handle grad_out, py::handle query, py::handle key,
                                    py::handle value, py::handle out, py::handle lse, double scale,
                                    bool causal, int threads, const py::object& may_reduce) {
  AttentionParams p{};
  TensorView of_out, of_grad, of_lse;
  if (!read_plain_call(query, key, value, p) || !read_tensor(out, &of_out) ||
      !read_tensor(grad_out, &of_grad) || !read_tensor(lse, &of_lse))
    return py::none();
  for (const TensorView* x : {&of_out, &of_grad})
    if (x->dtype != p.dtype || !x->has_sizes({p.B, p.Hq, p.Lq, p.Dv})) return py::none();
  if (of_lse.dtype != DType::f64 || !of_lse.has_sizes({p.B, p.Hq, p.Lq}) || !of_lse.is_contiguous())
    return py::none();
  p.out = operand_of(of_out), p.grad_out = operand_of(of_grad);
  p.lse = static_cast<double*>(of_lse.data);
  plain_options(p, scale, causal, threads, may_reduce);
  const py::object grad_query = new_rows_like(query, &p.grad_q),
                   grad_key = new_rows_like(key, &p.grad_k),
                   grad_value = new_rows_like(value, &p.grad_v);
  if (!grad_query || !grad_key || !grad_value) return py::none();
  {
    py::gil_scoped_release release;
    kernels(p.dtype).attention_backward(p);
  }
  return py::make_tuple(grad_query, grad_key, grad_value);
}

}  // namespace

void bind_sdpa(py::module_& m) {
  m.def("attention_forward", &attention_forward);
  m.def("attention_backward", &attention_backward);
  m.def("plain_attention_call", &plain_attention_call);
  m.def("plain_attention", &plain_attention);
  m.def("plain_attention_backward", &plain_attention_backward);
}

}  // namespace fastattn
