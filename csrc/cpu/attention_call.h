// What the CPU's bindings of attention share beside csrc/attention_arguments.h.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "../attention_arguments.h"
#include "isa.h"
#include "kernel_table.h"
#include "mask_program.h"

namespace fastattn {

// Whether products of float32 may round their factors to 16 bits. Only tiles do, so that the question
// to PyTorch's settings costs calls on vectors nothing.
inline bool reduces(const AttentionParams& p) {
  return p.dtype == DType::f32 && pays_on_tiles(p.dtype, p.Lq, p.Lk, p.D) && on_tiles(DType::f32) &&
         rule_of_rounding()().cast<bool>();
}

inline void read_mask_program(py::handle program, AttentionParams& p, std::vector<MaskStep>& steps,
                              bool packed = false) {
  if (program.is_none()) return;
  int64_t count = 0;
  const int32_t* words = read_words("mask_program", program, &count);
  read_mask_program(words, count, p, steps, packed);
}

// The gradient of sinks, new, of their sizes, from those of the sequences [B, Hq]: the sum over the
// sequences that share one, in their order.
inline py::object summed_sink_gradients(const std::vector<double>& of_sequences, int64_t batch,
                                        py::handle sinks) {
  const TensorView x = view_of("sinks", sinks);
  const int64_t entries = x.rank == 2 ? x.size[0] : 1, heads = x.size[x.rank - 1];
  void* data;
  py::object made = x.rank == 2 ? new_zeros(x.dtype, {entries, heads}, &data)
                                : new_zeros(x.dtype, {heads}, &data);
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
