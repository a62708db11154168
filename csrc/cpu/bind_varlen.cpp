// Python's view of attention over packed sequences: addresses, shapes and strides in, nothing out.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "kernel_table.h"
#include "mask_program.h"
#include "sdpa_arguments.h"
#include "sequences.h"

namespace py = pybind11;

namespace fastattn {
namespace {

void check_starts(const int64_t* starts, int64_t count, int64_t rows, const std::string& name) {
  expect(starts[0] == 0, name + " must begin with 0, got " + std::to_string(starts[0]));
  for (int64_t b = 0; b < count; ++b)
    expect(starts[b] <= starts[b + 1], name + " must not decrease, got " +
                                           std::to_string(starts[b]) + " before " +
                                           std::to_string(starts[b + 1]));
  expect(starts[count] <= rows, name + " must end within the " + std::to_string(rows) +
                                    " rows there are, got " + std::to_string(starts[count]));
}

// operands: see optional_arguments and read_mask_program. gradients: see read_gradients and
// SinkGradients; and bias_starts; None for the forward pass.
void varlen_attention(int dtype, const py::object& may_reduce, int threads, const py::tuple& sizes,
                      uintptr_t q, const py::tuple& q_stride, uintptr_t k,
                      const py::tuple& k_stride, uintptr_t v, const py::tuple& v_stride,
                      uintptr_t out, const py::tuple& out_stride, uintptr_t lse,
                      const py::object& options, const py::dict& operands, uintptr_t q_starts,
                      uintptr_t k_starts, const py::object& gradients) {
  SequencesParams t{};
  AttentionParams& all = t.attention;
  all = common_arguments(dtype, may_reduce, threads, sizes, q, q_stride, k, k_stride, v, v_stride,
                         out, out_stride, lse);
  VarlenOptions asked;
  read_varlen_options(named(options), asked);
  static_cast<AttentionOptions&>(all) = asked;
  optional_arguments(all, operands);
  t.bottom_right = asked.bottom_right;
  t.q_starts = reinterpret_cast<const int64_t*>(q_starts);
  t.k_starts = reinterpret_cast<const int64_t*>(k_starts);
  t.lse_stride = all.Lq;
  check_starts(t.q_starts, all.B, all.Lq, "cu_seqlens_q");
  check_starts(t.k_starts, all.B, all.Lk, "cu_seqlens_k");
  check_table(t);
  std::vector<MaskStep> steps;
  read_mask_program(named(operands), all, steps, true);
  static const auto bias_starts =
      std::make_tuple(field("bias_starts", &SequencesParams::bias_starts));
  const auto order = order_of_work(t);
  t.order = order.data();
  if (gradients.is_none()) {
    py::gil_scoped_release release;
    kernels(all.dtype).attention_sequences_forward(t);
    return;
  }
  read_gradients(named(gradients), all);
  named(gradients).read_given(t, bias_starts);
  const SinkGradients of_sinks(named(gradients), all);
  py::gil_scoped_release release;
  kernels(all.dtype).attention_sequences_backward(t);
  of_sinks.write();
}

}  // namespace

void bind_varlen(py::module_& m) { m.def("varlen_attention", &varlen_attention); }

}  // namespace fastattn
