// The sinusoidal encoding as Python calls it: tensors in, a tensor out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "../arguments.h"
#include "kernel_table.h"
#include "memory.h"
#include "named.h"
#include "operands.h"

namespace py = pybind11;

namespace fastattn {
namespace {

enum class Layout : int { interleaved = 0 };  // the only one whose pairs are neighbours

struct Encoding : SinusoidalParams {
  Layout layout;
};

// 64-bit unsigned integers of an object with Python's buffer protocol, such as array("Q").
class Numbers {
 public:
  explicit Numbers(py::handle from) {
    if (PyObject_GetBuffer(from.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  ~Numbers() { PyBuffer_Release(&view_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  const uint64_t* data() const { return static_cast<const uint64_t*>(view_.buf); }
  int64_t size() const { return view_.len / static_cast<int64_t>(sizeof(uint64_t)); }

 private:
  Py_buffer view_;
};

void place_columns(const Numbers& frequency, const Numbers& phase, const Numbers& pairs,
                   Encoding& p) {
  constexpr int64_t kMultiple = 16;  // the kernels read whole vectors
  const int64_t readable = (p.D + kMultiple - 1) / kMultiple * kMultiple;
  if (frequency.size() < readable || phase.size() < readable || 2 * pairs.size() > p.D + 1)
    throw py::value_error("fastattn: the frequencies are not those of " + std::to_string(p.D) +
                          " columns");
  p.frequency = frequency.data(), p.phase = phase.data();
  p.pairs = pairs.size(), p.pair_frequency = pairs.data();
  p.interleaved = p.layout == Layout::interleaved;
}

// [..., L, D] as an operand of four dimensions.
Tensor4 operand_of_rows(const TensorView& x) {
  Tensor4 found{x.data, {}};
  std::copy_n(x.stride, x.rank, found.stride + 4 - x.rank);
  return found;
}

void read_rows_of_x(const TensorView& x, Encoding& p) {
  expect_dtype("x", x, {DType::f32, DType::f64, DType::bf16, DType::f16});
  if (x.rank < 2) throw py::value_error("fastattn: x must have at least two dimensions");
  int64_t sizes[4] = {1, 1, 1, 1};
  std::copy_n(x.size, x.rank, sizes + 4 - x.rank);
  p.dtype = x.dtype;
  p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.D = sizes[3];
  p.x = operand_of_rows(x);
}

// x * scale + PE(position): in `out`, a dense tensor of x's sizes and dtype, or in a new one for None.
// positions: int64, broadcasts to [..., L]; None: offset + l. The columns come from Sinusoids.
py::object sinusoidal_encoding(const py::object& options, int64_t offset, py::handle x,
                               py::handle positions, py::handle frequency, py::handle phase,
                               py::handle pairs, py::object out) {
  using P = Encoding;
  static const auto fields = std::make_tuple(
      choice("layout", &P::layout, "interleaved", "tensor2tensor", "marian", "split_exponent"),
      field("scale", &P::scale), field("padding_idx", &P::has_padding_idx, &P::padding_idx));
  Encoding p{};
  named(options).read(p, fields);
  if (offset < -kFarthestOffset || offset > kFarthestOffset)
    throw py::value_error("fastattn: offset must be within " + std::to_string(kFarthestOffset) +
                          " of 0, got " + std::to_string(offset));
  p.offset = offset;
  const TensorView of_x = view_of("x", x);
  read_rows_of_x(of_x, p);
  if (!positions.is_none()) {
    const TensorView at =
        read_broadcast("positions", positions, {p.B, p.H, p.L}, p.position_stride);
    expect_dtype("positions", at, {kInt64});
    p.positions = static_cast<const int64_t*>(at.data);
  }
  const Numbers columns[] = {Numbers(frequency), Numbers(phase), Numbers(pairs)};
  place_columns(columns[0], columns[1], columns[2], p);
  TensorView of_out;
  if (out.is_none()) {
    out = new_like(x, &of_out);
  } else {
    of_out = view_of("out", out);
    expect_sizes("out", of_out, of_x.dtype, of_x.size, of_x.rank);
  }
  p.out = operand_of_rows(of_out);
  p.threads = threads();
  {
    py::gil_scoped_release release;
    const int64_t elements = p.B * p.H * p.L * p.D;
    expect_to_fill(p.out.data, static_cast<size_t>(elements * element_bytes(p.dtype)));  // dense
    kernels(p.dtype).sinusoidal(p);
  }
  return out;
}

}  // namespace

void bind_sinusoidal(py::module_& m) { m.def("sinusoidal_encoding", &sinusoidal_encoding); }

}  // namespace fastattn
