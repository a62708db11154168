// Python's view of local attention.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "../arguments.h"
#include "kernel_table.h"
#include "named.h"
#include "tensors.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Without overflow for any reach.
int64_t rows_of_window(const LocalParams& p) {
  expect(p.reach > 0, "reach must be positive, got " + std::to_string(p.reach));
  return p.reach < p.Lk ? std::min(2 * p.reach + 1, p.Lk) : p.Lk;
}

// sizes: B, Lq, Lk, D, Dv; operands: query, key and value, and the addresses of positions, padding,
// factor and weights.
LocalParams read_common(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                        const py::dict& operands) {
  using P = LocalParams;
  static const auto fields =
      std::make_tuple(field("query", &P::query), field("key", &P::key), field("value", &P::value),
                      field("positions", &P::positions), field("padding", &P::padding),
                      field("factor", &P::factor), field("weights", &P::weights));
  LocalParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[5];
  integers(sizes, n);
  p.B = n[0], p.Lq = n[1], p.Lk = n[2], p.D = n[3], p.Dv = n[4];
  read_local_options(named(options), p);
  p.W = rows_of_window(p);
  named(operands).read(p, fields);
  return p;
}

// out: an address
void local_attention(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                     const py::dict& operands, uintptr_t out) {
  LocalParams p = read_common(dtype, threads, sizes, options, operands);
  p.out = reinterpret_cast<void*>(out);
  py::gil_scoped_release release;
  kernels(p.dtype).local_attention_forward(p);
}

// gradients: grad_out, and the addresses of grad_weights, the four gradients and coefficients.
void local_attention_backward(int dtype, int threads, const py::tuple& sizes,
                              const py::object& options, const py::dict& operands,
                              const py::dict& gradients) {
  using P = LocalParams;
  static const auto fields = std::make_tuple(
      field("grad_out", &P::grad_out), field("grad_weights", &P::grad_weights),
      field("grad_query", &P::grad_query), field("grad_key", &P::grad_key),
      field("grad_value", &P::grad_value), field("grad_positions", &P::grad_positions),
      field("coefficients", &P::coefficients));
  LocalParams p = read_common(dtype, threads, sizes, options, operands);
  named(gradients).read(p, fields);
  py::gil_scoped_release release;
  kernels(p.dtype).local_attention_backward(p);
}

// -- calls without dropout and returned weights, whose tensors are read here ------------------------

// Reads query [B, Lq, D], key [B, Lk, D] and value [B, Lk, Dv], with contiguous columns, positions
// [B, Lq] in the accumulator's dtype, and padding [B, Lk] or None, both contiguous; false if the general
// path has to see the call.
bool read_plain_call(py::handle query, py::handle key, py::handle value, py::handle positions,
                     py::handle padding, LocalParams& p) {
  TensorView q, k, v, at, hidden;
  if (!read_tensor(query, &q) || !read_tensor(key, &k) || !read_tensor(value, &v)) return false;
  if (q.rank != 3 || k.rank != 3 || v.rank != 3 || q.dtype == DType::boolean) return false;
  p.dtype = q.dtype;
  p.B = q.size[0], p.Lq = q.size[1], p.D = q.size[2], p.Lk = v.size[1], p.Dv = v.size[2];
  if (!k.has_sizes({p.B, p.Lk, p.D}) || v.size[0] != p.B) return false;
  const auto rows = [&](const TensorView& x, Tensor4* to) {
    *to = {x.data, {x.stride[0], x.stride[1], 1, 0}};
    return x.dtype == p.dtype && x.stride[2] == 1;
  };
  if (!rows(q, &p.query) || !rows(k, &p.key) || !rows(v, &p.value)) return false;
  if (!read_tensor(positions, &at) || at.dtype != accumulator(p.dtype) ||
      !at.has_sizes({p.B, p.Lq}) || !at.is_contiguous())
    return false;
  p.positions = at.data;
  if (padding.is_none()) return true;
  if (!read_tensor(padding, &hidden) || hidden.dtype != DType::boolean ||
      !hidden.has_sizes({p.B, p.Lk}) || !hidden.is_contiguous())
    return false;
  p.padding = static_cast<const uint8_t*>(hidden.data);
  return true;
}

// 0 if the general path has to see a call; else a number that is the same for calls of the same dtype,
// and odd if a tensor requires a gradient.
int64_t plain_local_call(py::handle query, py::handle key, py::handle value, py::handle positions,
                         py::handle padding) {
  LocalParams p{};
  if (!read_plain_call(query, key, value, positions, padding, p)) return 0;
  if (p.B == 0 || p.Lq == 0 || p.Lk == 0 || p.D == 0 || p.Dv == 0) return 0;
  return number_of_call(p.dtype, {query, key, value, positions, padding});
}

void place_window(LocalParams& p, int64_t reach, bool bell, int threads) {
  p.reach = reach, p.bell = bell, p.threads = threads;
  p.W = rows_of_window(p);
}

// (out, weights), new.
py::tuple plain_local(py::handle query, py::handle key, py::handle value, py::handle positions,
                      py::handle padding, int64_t reach, bool bell, int threads) {
  LocalParams p{};
  if (!read_plain_call(query, key, value, positions, padding, p))
    throw py::type_error("fastattn: not a plain call of local attention");
  place_window(p, reach, bell, threads);
  const py::object out = p.D == p.Dv ? new_contiguous_like(query, &p.out)
                                     : new_result(p.dtype, {p.B, p.Lq, p.Dv}, &p.out);
  const py::object weights = new_buffer(accumulator(p.dtype), {p.B, p.Lq, p.W}, &p.weights);
  {
    py::gil_scoped_release release;
    kernels(p.dtype).local_attention_forward(p);
  }
  return py::make_tuple(out, weights);
}

// The gradients of query, key, value and positions, new; None if the general path has to see the call.
py::object plain_local_backward(py::handle grad_out, py::handle query, py::handle key,
                                py::handle value, py::handle positions, py::handle padding,
                                py::handle weights, int64_t reach, bool bell, int threads) {
  LocalParams p{};
  TensorView of_out, of_weights;
  if (!read_plain_call(query, key, value, positions, padding, p) ||
      !read_tensor(grad_out, &of_out) || !read_tensor(weights, &of_weights))
    return py::none();
  place_window(p, reach, bell, threads);
  if (of_out.dtype != p.dtype || !of_out.has_sizes({p.B, p.Lq, p.Dv}) || of_out.stride[2] != 1 ||
      of_weights.dtype != accumulator(p.dtype) || !of_weights.has_sizes({p.B, p.Lq, p.W}) ||
      !of_weights.is_contiguous())
    return py::none();
  p.grad_out = {of_out.data, {of_out.stride[0], of_out.stride[1], 1, 0}};
  p.weights = of_weights.data;
  const py::object grad_query = new_contiguous_like(query, &p.grad_query),
                   grad_key = new_contiguous_like(key, &p.grad_key),
                   grad_value = new_contiguous_like(value, &p.grad_value),
                   grad_positions = new_contiguous_like(positions, &p.grad_positions);
  const std::unique_ptr<char[]> coefficients(
      new char[static_cast<size_t>(2 * p.B * p.Lq * p.W * element_bytes(accumulator(p.dtype)))]);
  p.coefficients = coefficients.get();
  {
    py::gil_scoped_release release;
    kernels(p.dtype).local_attention_backward(p);
  }
  return py::make_tuple(grad_query, grad_key, grad_value, grad_positions);
}

}  // namespace

void bind_local_attention(py::module_& m) {
  m.def("plain_local_call", &plain_local_call);
  m.def("plain_local", &plain_local);
  m.def("plain_local_backward", &plain_local_backward);
  m.def("local_attention", &local_attention);
  m.def("local_attention_backward", &local_attention_backward);
}

}  // namespace fastattn
