// Shared by the bindings of all operators: arguments that the host derives, and the element type.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "../function.h"
#include "../options.h"
#include "kernels/table.h"
#include "params.h"

namespace fastattn {
namespace cuda {

// Where a call runs: the number of PyTorch's current device, whose tensors are read from here on,
// and its current stream, a cudaStream_t.
struct Stream {
  uintptr_t value;

  explicit Stream(PyObject* place) {
    const auto [device, stream] = py::cast<std::pair<int, uintptr_t>>(place);
    use_device(device);
    value = stream;
  }
  operator uintptr_t() const { return value; }
};

// Defines a function that launches kernels: it also takes the keyword `place`.
template <auto f>
void define_on_stream(py::module_& m, const char* name, size_t taken = SIZE_MAX,
                      const char* named = "options, place") {
  define<f>(m, name, named, taken);
}

// Derives the dropout parameters from dropout_p, and reads the address of the random key.
inline void set_dropout(AttentionArguments& p, py::handle seed) {
  // Halves are rounded to even, as in every backend.
  p.keep_below = static_cast<uint32_t>(std::nearbyint((1.0 - p.dropout_p) * 65536.0));
  p.keep_scale = p.keep_below == 0 ? 0.0f : static_cast<float>(65536.0 / p.keep_below);
  if (seed.is_none()) return;
  const TensorView x = view_of("seed", seed);
  expect_dtype("seed", x, {kInt64});
  p.seed_address = static_cast<const uint64_t*>(x.data);
}

// `workspace` owns the memory into which kernels parse the program.
inline void read_mask_program(AttentionArguments& p, py::handle program, bool packed,
                              py::object* workspace) {
  p.mask_columns = mask_tiles_of(p.Lk);
  if (program.is_none()) return;
  p.mask_words = read_words("mask_program", program, &p.mask_length);
  *workspace = new_result(kInt8,
                          {static_cast<int64_t>(sizeof(MaskTable)) +
                           mask_rows_of(packed, p.B, p.Hq, p.Lq) * p.mask_columns},
                          &p.mask_table);
}

// Workspace or a result of floats.
inline py::object new_floats(const Sizes& sizes, float** data) {
  return new_result(DType::f32, sizes, data);
}

// Whether rows of these tensors can be copied 16 bytes at a time: their beginnings, and with
// `width` also their ends. Tensors without data are left out.
inline bool are_aligned(DType dtype, std::initializer_list<Tensor4> tensors, int64_t width = 0) {
  const auto multiple = [&](int64_t n) { return n * element_bytes(dtype) % 16 == 0; };
  return multiple(width) && std::all_of(tensors.begin(), tensors.end(), [&](const Tensor4& t) {
           return t.data == nullptr ||
                  (reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[3] == 1 &&
                   std::all_of(t.stride, t.stride + 3, multiple));
         });
}

// Calls f with a null pointer to the element type: the kernels of an operator are overloads.
template <class F>
void with_element(DType dtype, F f) {
  py::gil_scoped_release release;
  switch (dtype) {
    case DType::bf16:
      return f(static_cast<Bf16*>(nullptr));
    case DType::f16:
      return f(static_cast<F16*>(nullptr));
    case DType::f32:
      return f(static_cast<F32*>(nullptr));
    default:
      throw py::value_error("fastattn._cuda: the dtype must be float32, bfloat16 or float16");
  }
}

}  // namespace cuda
}  // namespace fastattn
