// The sinusoidal encoding as Python calls it: tensors in, a tensor out.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "../sinusoidal_arguments.h"
#include "kernel_table.h"
#include "memory.h"

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
  Named(options).read(p, fields);
  if (offset < -kFarthestOffset || offset > kFarthestOffset)
    throw py::value_error("fastattn: offset must be within " + std::to_string(kFarthestOffset) +
                          " of 0, got " + std::to_string(offset));
  p.offset = offset;
  const TensorView of_x = read_encoded(p, x, positions);
  const Numbers columns[] = {Numbers(frequency), Numbers(phase), Numbers(pairs)};
  place_columns(columns[0], columns[1], columns[2], p);
  out = place_encoding(p, x, of_x, out);
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
