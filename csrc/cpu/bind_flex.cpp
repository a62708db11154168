// Attention with a modified score as Python calls it: tensors in, tensors out.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../operands.h"
#include "../options.h"
#include "../score_program.h"
#include "attention_call.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

struct FlexTensors {
  // [B, Hq, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv], [size] int32, [n] acc; the last two may be
  // None
  FASTATTN_TENSORS(query, key, value, score_program, score_data, mask_program)
};

struct FlexGradTensors {
  FASTATTN_TENSORS(grad_out, grad_lse, query, key, value, score_program, out, lse, score_data,
                   mask_program)
};

// The arguments of a call, and the memory that they point to.
struct FlexCall : AttentionParams {
  std::vector<MaskStep> steps;
  ScoreProgram program;
  py::object data, owners[3];

  // Reads the tensors, the options and the score program of a call.
  template <class Tensors>
  FlexCall(py::handle record, const Tensors& from) : AttentionParams{}, program{} {
    Named(record).read<&AttentionOptions::scale>("scale", *this);
    read_attention(*this, from, dense);
    threads = fastattn::threads();
    read_mask_program(from.mask_program, *this, steps);
    if (!from.score_data.is_none()) {
      const TensorView x = view_of("score_data", from.score_data);
      expect(x.rank == 1, "score_data must have one dimension");
      program.size = x.size[0];
      program.data =
          read_flat("score_data", from.score_data, accumulator(dtype), {x.size[0]}, &data);
    }
    int64_t count = 0;
    const int32_t* words = read_words("score_program", from.score_program, &count);
    if (const char* wrong = ScoreProgramReader(words, count, B, Hq, program).read())
      throw py::value_error(std::string("fastattn: score_program is not valid: ") + wrong);
    score_program = &program;
  }
};

// (out, lse), new; out alone, if a call without a gradient needs `only_first`.
py::object flex_attention(const FlexTensors& x, py::handle options, bool only_first) {
  FlexCall p(options, x);
  const py::object out = new_rows(x.query, p.Dv, dense, &p.out);
  py::object lse = none();
  if (!only_first) lse = new_buffer(DType::f64, {p.B, p.Hq, p.Lq}, &p.lse);
  without_gil([&] { kernels(p.dtype).attention_forward(p); });
  if (only_first) return out;
  return py::make_tuple(out, lse);
}

// How many sums of the gradient of data there are: one where the units of the backward pass do not
// share its elements, else up to 64 in 64 MiB. They depend on the sizes alone, and so do the bits.
int64_t buffers_of_sums(const FlexCall& p) {
  const ScoreProgram& program = p.program;
  const int64_t apart = (program.own_batch ? p.B : 1) * (program.own_head ? p.Hkv : 1);
  const int64_t heads = p.B * p.Hkv;
  if (apart == heads || apart >= 8) return 1;
  const int64_t max_chunks = (int64_t{64} << 20) / (std::max<int64_t>(program.size, 1) * 8);
  return std::max<int64_t>(1, std::min({max_chunks, heads, int64_t{64}}));
}

// The gradients, new: of query, key, value and score_data, or None without a gradient of it.
py::tuple flex_attention_backward(const FlexGradTensors& x, py::handle options) {
  FlexCall p(options, x);
  read_results(p, x, dense, p.B, {p.B, p.Hq, p.Lq}, p.owners);
  complete(p.grad_out);
  const bool nothing =
      p.B == 0 || p.Hq == 0 || p.Lq == 0 || p.Lk == 0;  // kernels write nothing then
  py::tuple gradients = new_row_gradients(p, x, dense, nothing, 1);
  ScoreProgram& program = p.program;
  py::object of_data, sums;
  void* to = nullptr;
  if (program.scatters && program.data != nullptr) {
    of_data =
        (nothing ? Make{new_zeros} : Make{new_result})(accumulator(p.dtype), {program.size}, &to);
    if (!nothing) {
      program.buffers = buffers_of_sums(p);
      void* to_sums;
      sums = new_zeros(DType::f64, {program.buffers, program.size}, &to_sums);
      program.sums = static_cast<double*>(to_sums);
    }
  }
  without_gil([&] {
    kernels(p.dtype).attention_backward(p);
    if (program.buffers == 0) return;
    for (int64_t k = 1; k < program.buffers; ++k)
      for (int64_t n = 0; n < program.size; ++n)
        program.sums[n] += program.sums[k * program.size + n];
    if (p.dtype == DType::f64)
      std::copy_n(program.sums, program.size, static_cast<double*>(to));
    else
      std::copy_n(program.sums, program.size, static_cast<float*>(to));
  });
  if (of_data) gradients[3] = of_data;
  return gradients;
}

}  // namespace
}  // namespace fastattn
