// Python's view of the encoding of memories. The tokens are row indices of a table, so they are
// checked here, before a kernel reads anything.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "../arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// Whether all tokens are in [0, V) or the padding; if not, `place` is the position of the first
// other one.
bool tokens_are_rows(const EncodeMemoryParams& p, int64_t (&place)[4]) {
  const uint64_t rows = static_cast<uint64_t>(p.V);
  const int64_t models = p.token_stride[0] == 0 && p.R > 0 ? 1 : p.R;  // all models share one batch
  for (int64_t r = 0; r < models; ++r) {
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t n = 0; n < p.N; ++n) {
        const int64_t* const sentence =
            p.tokens + r * p.token_stride[0] + b * p.token_stride[1] + n * p.token_stride[2];
        for (int64_t j = 0; j < p.J; ++j) {
          const int64_t token = sentence[j * p.token_stride[3]];
          if (static_cast<uint64_t>(token) < rows) continue;
          if (p.has_padding_idx && token == p.padding_idx) continue;
          place[0] = r, place[1] = b, place[2] = n, place[3] = j;
          return false;
        }
      }
    }
  }
  return true;
}

void check_tokens(const EncodeMemoryParams& p) {
  int64_t at[4];
  if (tokens_are_rows(p, at)) return;
  int64_t offset = 0;
  for (int i = 0; i < 4; ++i) offset += at[i] * p.token_stride[i];
  throw py::index_error("tokens[" + std::to_string(at[1]) + ", " + std::to_string(at[2]) + ", " +
                        std::to_string(at[3]) + "] is " + std::to_string(p.tokens[offset]) +
                        ", but weight has " + std::to_string(p.V) + " rows");
}

// sizes: R, G, B, N, J, V, D
EncodeMemoryParams read_common(int dtype, int threads, const py::tuple& sizes, uintptr_t tokens,
                               const py::tuple& token_stride, const py::object& options,
                               uintptr_t factors, int64_t factor_stride) {
  EncodeMemoryParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.threads = threads;
  int64_t n[7];
  integers(sizes, n);
  p.R = n[0], p.G = n[1], p.B = n[2], p.N = n[3], p.J = n[4], p.V = n[5], p.D = n[6];
  p.tokens = reinterpret_cast<const int64_t*>(tokens);
  integers(token_stride, p.token_stride);
  read_encode_memory_options(named(options), p);
  p.factors = reinterpret_cast<const void*>(factors);
  p.factor_stride = factor_stride;
  return p;
}

void encode_memory(int dtype, int threads, const py::tuple& sizes, uintptr_t tokens,
                   const py::tuple& token_stride, const py::object& options, uintptr_t factors,
                   int64_t factor_stride, uintptr_t weight, const py::tuple& weight_stride,
                   uintptr_t temporal, const py::tuple& temporal_stride, uintptr_t out) {
  EncodeMemoryParams p =
      read_common(dtype, threads, sizes, tokens, token_stride, options, factors, factor_stride);
  p.weight = operand(weight, weight_stride);
  p.temporal = operand(temporal, temporal_stride);
  p.out = reinterpret_cast<void*>(out);
  py::gil_scoped_release release;
  check_tokens(p);
  const size_t element = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
  expect_to_fill(p.out, static_cast<size_t>(p.R * p.B * p.G * p.N * p.D) * element);
  kernels(p.dtype).encode_memory(p);
}

void encode_memory_backward(int dtype, int threads, const py::tuple& sizes, uintptr_t tokens,
                            const py::tuple& token_stride, const py::object& options,
                            uintptr_t factors, int64_t factor_stride, uintptr_t grad,
                            const py::tuple& grad_stride, uintptr_t grad_weight,
                            uintptr_t grad_temporal) {
  EncodeMemoryParams p =
      read_common(dtype, threads, sizes, tokens, token_stride, options, factors, factor_stride);
  p.grad = reinterpret_cast<const void*>(grad);
  integers(grad_stride, p.grad_stride);
  p.grad_weight = reinterpret_cast<void*>(grad_weight);
  p.grad_temporal = reinterpret_cast<void*>(grad_temporal);
  py::gil_scoped_release release;
  check_tokens(p);
  kernels(p.dtype).encode_memory_backward(p);
}

}  // namespace

void bind_encode_memory(py::module_& m) {
  m.def("encode_memory", &encode_memory);
  m.def("encode_memory_backward", &encode_memory_backward);
}

}  // namespace fastattn
