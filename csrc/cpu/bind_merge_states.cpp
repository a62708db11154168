// Merged states of attention as Python calls them: tensors in, tensors out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "../arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "operands.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Outputs [..., L, D] of at most four dimensions, and lse [..., L], as [B, H, L, D] and [B, H, L, -].
class MergedStates {
 public:
  MergeStatesParams params{};

  MergedStates(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b) {
    MergeStatesParams& p = params;
    out_ = view_of("out_a", out_a), lse_ = view_of("lse_a", lse_a);
    expect_dtype("out_a", out_, {DType::f32, DType::f64, DType::bf16, DType::f16});
    expect_dtype("lse_a", lse_, {DType::f32, DType::f64});
    if (out_.rank < 2) throw py::value_error("fastattn: out_a must have at least two dimensions");
    int64_t sizes[4] = {1, 1, 1, 1};
    std::copy_n(out_.size, out_.rank, sizes + 4 - out_.rank);
    p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.D = sizes[3];
    p.dtype = out_.dtype, p.lse_dtype = lse_.dtype;
    p.threads = threads();
    p.out_a = operand(out_), p.lse_a = rows("lse_a", lse_a);
    p.out_b = output("out_b", out_b), p.lse_b = rows("lse_b", lse_b);
  }

  // Of the sizes and the dtype of out_a, and of lse_a.
  Tensor4 output(const char* name, py::handle from) const {
    return operand(checked(name, from, out_, out_.rank));
  }
  Tensor4 rows(const char* name, py::handle from) const {
    return of_rows(checked(name, from, lse_, out_.rank - 1));
  }

  static py::object new_output(py::handle like, Tensor4* to) {
    TensorView made;
    py::object result = new_like(like, &made);
    *to = operand(made);
    return result;
  }
  static py::object new_rows_of_lse(py::handle like, Tensor4* to) {
    TensorView made;
    py::object result = new_like(like, &made);
    *to = of_rows(made);
    return result;
  }

  // Expects that a dense result with the sizes of the outputs is filled.
  void expect_filled(const Tensor4& result) const {
    const MergeStatesParams& p = params;
    const int64_t elements = p.B * p.H * p.L * p.D;
    expect_to_fill(result.data, static_cast<size_t>(elements * element_bytes(p.dtype)));
  }

 private:
  TensorView out_, lse_;

  TensorView checked(const char* name, py::handle from, const TensorView& like, int rank) const {
    const TensorView x = view_of(name, from);
    expect_sizes(name, x, like.dtype, out_.size, rank);
    return x;
  }

  static Tensor4 operand(const TensorView& x) {
    Tensor4 found{x.data, {}};
    std::copy_n(x.stride, x.rank, found.stride + 4 - x.rank);
    return found;
  }
  static Tensor4 of_rows(const TensorView& x) {
    Tensor4 found{x.data, {0, 0, 0, 1}};
    std::copy_n(x.stride, x.rank, found.stride + 3 - x.rank);
    return found;
  }
};

// (out, lse), new.
py::tuple merge_states(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b) {
  MergedStates states(out_a, lse_a, out_b, lse_b);
  MergeStatesParams& p = states.params;
  const py::object out = MergedStates::new_output(out_a, &p.out),
                   lse = MergedStates::new_rows_of_lse(lse_a, &p.lse);
  {
    py::gil_scoped_release release;
    states.expect_filled(p.out);
    kernels(p.dtype).merge_states_forward(p);
  }
  return py::make_tuple(out, lse);
}

// The gradients of the four, new.
py::tuple merge_states_backward(py::handle grad_out, py::handle grad_lse, py::handle out_a,
                                py::handle lse_a, py::handle out_b, py::handle lse_b) {
  MergedStates states(out_a, lse_a, out_b, lse_b);
  MergeStatesParams& p = states.params;
  if (!grad_out.is_none()) p.grad_out = states.output("grad_out", grad_out);
  if (!grad_lse.is_none()) p.grad_lse = states.rows("grad_lse", grad_lse);
  const py::object of_out_a = MergedStates::new_output(out_a, &p.grad_out_a),
                   of_lse_a = MergedStates::new_rows_of_lse(lse_a, &p.grad_lse_a),
                   of_out_b = MergedStates::new_output(out_b, &p.grad_out_b),
                   of_lse_b = MergedStates::new_rows_of_lse(lse_b, &p.grad_lse_b);
  {
    py::gil_scoped_release release;
    states.expect_filled(p.grad_out_a);
    states.expect_filled(p.grad_out_b);
    kernels(p.dtype).merge_states_backward(p);
  }
  return py::make_tuple(of_out_a, of_lse_a, of_out_b, of_lse_b);
}

}  // namespace

void bind_merge_states(py::module_& m) {
  m.def("merge_states", &merge_states);
  m.def("merge_states_backward", &merge_states_backward);
}

}  // namespace fastattn
