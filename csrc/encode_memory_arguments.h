// Reading the arguments of memory encoding: addresses, strides of tokens and grad, and the tables as
// (address, strides).
#pragma once
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "options.h"

namespace fastattn {

// sizes: R, G, B, N, J, V, D. operands: factors, factor_stride.
inline void read_encoding(int dtype, const pybind11::tuple& sizes, const Named& options,
                          const Named& operands, EncodeMemoryParams& p) {
  using P = EncodeMemoryParams;
  static const auto fields =
      std::make_tuple(field("factors", &P::factors), field("factor_stride", &P::factor_stride));
  p.dtype = static_cast<DType>(dtype);
  int64_t n[7];
  integers(sizes, n);
  p.R = n[0], p.G = n[1], p.B = n[2], p.N = n[3], p.J = n[4], p.V = n[5], p.D = n[6];
  read_encode_memory_options(options, p);
  operands.read(p, fields);
}

inline void read_tokens(const Named& operands, EncodeMemoryParams& to) {
  using P = EncodeMemoryParams;
  static const auto fields =
      std::make_tuple(field("tokens", &P::tokens), field("token_stride", &P::token_stride));
  operands.read(to, fields);
}

inline void read_tables(const Named& operands, EncodeMemoryParams& to) {
  using P = EncodeMemoryParams;
  static const auto fields =
      std::make_tuple(field("weight", &P::weight), field("temporal", &P::temporal));
  operands.read(to, fields);
}

inline void read_gradients(const Named& gradients, EncodeMemoryParams& to) {
  using P = EncodeMemoryParams;
  static const auto fields = std::make_tuple(
      field("grad", &P::grad), field("grad_stride", &P::grad_stride),
      field("grad_weight", &P::grad_weight), field("grad_temporal", &P::grad_temporal));
  gradients.read(to, fields);
}

}  // namespace fastattn
