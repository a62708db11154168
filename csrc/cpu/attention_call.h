// Helpers of the CPU's bindings of attention, in addition to csrc/attention_arguments.h.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "../attention_arguments.h"
#include "isa.h"
#include "kernel_table.h"
#include "mask_program.h"

namespace fastattn {

// Whether products of float32 may round their factors to 16 bits. Only tiles do, so calls on
// vectors do not pay for reading PyTorch's settings.
inline bool reduces(const AttentionParams& p) {
  return p.dtype == DType::f32 && pays_on_tiles(p.dtype, p.Lq, p.Lk, p.D) && on_tiles(DType::f32) &&
         may_round();
}

inline void read_mask_program(py::handle program, AttentionParams& p, std::vector<MaskStep>& steps,
                              bool packed = false) {
  if (program.is_none()) return;
  int64_t count = 0;
  const int32_t* words = read_words("mask_program", program, &count);
  read_mask_program(words, count, p, steps, packed);
}

constexpr double kZero = 0;

// A missing gradient becomes a zero that kernels can read.
inline void complete(Tensor4& grad_out) {
  if (grad_out.data == nullptr) grad_out.data = const_cast<double*>(&kZero);
}

// The gradient of a sink from rows without keys, whose lse is the sink.
inline double from_rows_without_keys(const AttentionParams& p, int64_t b, int64_t h,
                                     const double* grad_lse, int64_t rows) {
  const int64_t at = b * p.sinks_stride[0] + h * p.sinks_stride[1];
  const double sink = p.dtype == DType::f64 ? static_cast<const double*>(p.sinks)[at]
                                            : static_cast<const float*>(p.sinks)[at];
  const bool is_none = sink == -std::numeric_limits<double>::infinity();
  return is_none ? 0.0 : std::accumulate(grad_lse, grad_lse + rows, 0.0);
}

// Allocates the gradient of sinks: the gradients of the sequences, [B, Hq], summed in order over
// the sequences that share a sink.
inline py::object summed_sink_gradients(const std::vector<double>& of_sequences, int64_t batch,
                                        py::handle sinks) {
  const TensorView x = view_of("sinks", sinks);
  const int64_t entries = x.rank == 2 ? x.size[0] : 1, heads = x.size[x.rank - 1];
  void* data;
  py::object made = new_zeros(x.dtype, x.sizes(), &data);
  const int64_t sharing = entries == 1 ? batch : 1;
  for (int64_t n = 0; n < entries * heads; ++n) {
    double sum = 0;
    for (int64_t b = 0; b < sharing; ++b) sum += of_sequences[static_cast<size_t>(b * heads + n)];
    if (x.dtype == DType::f64)
      static_cast<double*>(data)[n] = sum;
    else
      static_cast<float*>(data)[n] = static_cast<float>(sum);
  }
  return made;
}

}  // namespace fastattn
