// The encoding of memories as Python calls it: tensors in, tensors out. The tokens are row indices
// of a table, so they are checked here, before a kernel reads anything.
#include <cstdint>
#include <string>

#include "../encode_memory_arguments.h"
#include "kernel_table.h"
#include "memory.h"

namespace fastattn {
namespace {

// Whether all tokens are in [0, V) or padding; if not, `place` is the position of the first that is
// neither.
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

// Raises IndexError for the first token that is neither a row of the table nor the padding.
void check_tokens(const EncodeMemoryParams& p) {
  int64_t at[4];
  if (tokens_are_rows(p, at)) return;
  int64_t offset = 0;
  for (int i = 0; i < 4; ++i) offset += at[i] * p.token_stride[i];
  throw py::index_error("tokens[" + std::to_string(at[1]) + ", " + std::to_string(at[2]) + ", " +
                        std::to_string(at[3]) + "] is " + std::to_string(p.tokens[offset]) +
                        ", but weight has " + std::to_string(p.V) + " rows");
}

struct EncodeMemoryCall : EncodeMemoryParams, EncodingCall {};

// Returns the memories [R, B, G, N, D]; [B, G, N, D] if tokens [B, N, J] and the tables are without
// R, [B, N, D] if the tables are without G, too.
py::object encode_memory(const EncodingTensors& x, py::handle options) {
  EncodeMemoryCall p{};
  read_encoding(p, p, options, x);
  p.threads = threads();
  const py::object out = new_result(p.dtype, {p.models, p.B, p.tables, p.N, p.D}, &p.out);
  without_gil([&] {
    check_tokens(p);
    const int64_t elements = p.R * p.B * p.G * p.N * p.D;
    expect_to_fill(p.out, static_cast<size_t>(elements * element_bytes(p.dtype)));
    kernels(p.dtype).encode_memory(p);
  });
  return out;
}

// Returns the gradients of weight, and of temporal or None. grad_out has the sizes of the memories.
py::tuple encode_memory_backward(const EncodingGradTensors& x, py::handle options) {
  EncodeMemoryCall p{};
  read_encoding_gradient(p, p, options, x);
  p.threads = threads();
  const auto new_table = [&](int64_t rows, void** data) {
    return new_result(accumulator(p.dtype), {p.models, p.tables, rows, p.D}, data);
  };
  const py::object of_weight = new_table(p.V, &p.grad_weight);
  py::object of_temporal = none();
  if (p.has_temporal) of_temporal = new_table(p.N, &p.grad_temporal);
  without_gil([&] {
    check_tokens(p);
    kernels(p.dtype).encode_memory_backward(p);
  });
  if (p.has_temporal) of_temporal = converted_to(of_temporal, p.dtype);
  return py::make_tuple(converted_to(of_weight, p.dtype), of_temporal);
}

}  // namespace
}  // namespace fastattn
