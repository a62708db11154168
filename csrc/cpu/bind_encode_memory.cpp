// Python's view of the encoding of memories. The tokens are row indices of a table, so they are
// checked here, before a kernel reads anything.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "../encode_memory_arguments.h"
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

// operands: see read_encoding and read_tokens.
EncodeMemoryParams embedding_arguments(int dtype, int threads, const py::tuple& sizes,
                                       const py::object& options, const py::dict& operands) {
  EncodeMemoryParams p{};
  read_encoding(dtype, sizes, named(options), named(operands), p);
  read_tokens(named(operands), p);
  p.threads = threads;
  return p;
}

// operands: also see read_tables. out: an address.
void encode_memory(int dtype, int threads, const py::tuple& sizes, const py::object& options,
                   const py::dict& operands, uintptr_t out) {
  EncodeMemoryParams p = embedding_arguments(dtype, threads, sizes, options, operands);
  read_tables(named(operands), p);
  p.out = reinterpret_cast<void*>(out);
  py::gil_scoped_release release;
  check_tokens(p);
  const int64_t elements = p.R * p.B * p.G * p.N * p.D;
  expect_to_fill(p.out, static_cast<size_t>(elements * element_bytes(p.dtype)));
  kernels(p.dtype).encode_memory(p);
}

// gradients: see read_gradients.
void encode_memory_backward(int dtype, int threads, const py::tuple& sizes,
                            const py::object& options, const py::dict& operands,
                            const py::dict& gradients) {
  EncodeMemoryParams p = embedding_arguments(dtype, threads, sizes, options, operands);
  read_gradients(named(gradients), p);
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
