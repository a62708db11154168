#include "operands.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "arguments.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// They live as long as the process.
PyObject* make_rows = nullptr;
PyObject* may_round_factors = nullptr;

const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float64", "bfloat16", "float16",      "bool",
                                    "int32",   "int64",   "int8",     "float8_e4m3fn"};
  return kNames[static_cast<int>(dtype)];
}

std::string text_of(const int64_t* sizes, size_t count) {
  std::string text = "(";
  for (size_t n = 0; n < count; ++n) text += (n > 0 ? ", " : "") + std::to_string(sizes[n]);
  return text + ")";
}

[[noreturn]] void refuse(const char* name, const std::string& needed, const TensorView& got) {
  throw py::value_error(std::string("fastattn: ") + name + " is not valid: it must " + needed +
                        ", got " + name_of(got.dtype) + " " +
                        text_of(got.size, static_cast<size_t>(got.rank)));
}

// Whether a new tensor would have the same strides, dimensions of size 1 included.
bool in_order(const TensorView& x) {
  int64_t expected = 1;
  for (int n = x.rank - 1; n >= 0; --n) {
    if (x.size[n] == 0 || x.stride[n] != expected) return false;
    expected *= x.size[n];
  }
  return true;
}

}  // namespace

void expect_sizes(const char* name, const TensorView& view, DType dtype, Sizes sizes) {
  expect_sizes(name, view, dtype, sizes.begin(), static_cast<int>(sizes.size()));
}

void expect_sizes(const char* name, const TensorView& view, DType dtype, const int64_t* sizes,
                  int rank) {
  if (view.dtype == dtype && view.rank == rank && std::equal(sizes, sizes + rank, view.size))
    return;
  const auto count = static_cast<size_t>(rank);
  refuse(name, std::string("be ") + name_of(dtype) + " " + text_of(sizes, count), view);
}

TensorView read_sizes(const char* name, py::handle from, DType dtype, Sizes sizes) {
  const TensorView view = view_of(name, from);
  expect_sizes(name, view, dtype, sizes);
  return view;
}

TensorView read_broadcast(const char* name, py::handle from, Sizes sizes, int64_t* strides) {
  TensorView view = view_of(name, from);
  const int count = static_cast<int>(sizes.size()), missing = count - view.rank;
  bool fits = missing >= 0;
  for (int n = 0; n < count && fits; ++n) {
    const int64_t size = n < missing ? 1 : view.size[n - missing];
    fits = size == 1 || size == sizes.begin()[n];
    strides[n] = size == 1 ? 0 : view.stride[n - missing];
  }
  if (!fits) refuse(name, "broadcast to " + text_of(sizes.begin(), sizes.size()), view);
  return view;
}

const int32_t* read_words(const char* name, py::handle from, int64_t* count) {
  const TensorView view = view_of(name, from);
  if (view.dtype != kInt32 || view.rank != 1 || view.size[0] == 0 || !view.is_contiguous())
    refuse(name, "be contiguous, of int32 and not empty", view);
  *count = view.size[0];
  return static_cast<const int32_t*>(view.data);
}

uint64_t read_seed(py::handle from) {
  if (from.is_none()) return 0;
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Long(from.ptr()));
  if (!number) throw py::error_already_set();
  return PyLong_AsUnsignedLongLongMask(number.ptr());
}

void use_rules(const py::object& new_rows, const py::object& may_round) {
  make_rows = py::object(new_rows).release().ptr();
  may_round_factors = py::object(may_round).release().ptr();
}

py::object rule_of_rounding() { return py::reinterpret_borrow<py::object>(may_round_factors); }

void* read_flat(const char* name, py::handle from, DType dtype, Sizes sizes, py::object* kept) {
  TensorView x = view_of(name, from);
  if (x.dtype != dtype && (dtype == DType::f32 || dtype == DType::f64)) {
    *kept = from.attr(dtype == DType::f64 ? "double" : "float")();
    x = view_of(name, *kept);
  }
  expect_sizes(name, x, dtype, sizes);
  if (x.is_contiguous()) return x.data;
  *kept = contiguous(*kept ? *kept : from);
  return view_of(name, *kept).data;
}

TensorView read_columns_together(const char* name, py::handle from, DType dtype, Sizes sizes,
                                 py::object* kept) {
  const TensorView x = read_sizes(name, from, dtype, sizes);
  const int last = x.rank - 1;
  if (x.stride[last] == 1 || x.size[last] == 1) return x;
  *kept = contiguous(from);
  return view_of(name, *kept);
}

py::object new_rows(py::handle like, int64_t width, TensorView* to) {
  const TensorView x = view_of("a tensor", like);
  const int last = x.rank - 1;
  const auto by_rule = [&] { return py::reinterpret_borrow<py::object>(make_rows)(like, width); };
  void* data;
  py::object made = x.size[last] == width ? new_like(like, to)
                    : x.rank == 4 && width > 0 && in_order(x)
                        ? new_result(x.dtype, {x.size[0], x.size[1], x.size[2], width}, &data)
                        : py::object(by_rule());
  *to = view_of("a new tensor", made);
  if (to->stride[last] == 1) return made;
  made = by_rule();
  *to = view_of("a new tensor", made);
  return made;
}

py::object new_rows(py::handle like, int64_t width, Tensor4* to) {
  TensorView view;
  py::object made = new_rows(like, width, &view);
  *to = operand_of(view);
  return made;
}

py::object new_zeros(DType dtype, Sizes sizes, void** data) {
  py::object made = new_result(dtype, sizes, data);
  if (!on_cpu()) return made.attr("zero_")();
  int64_t bytes = element_bytes(dtype);
  for (const int64_t size : sizes) bytes *= size;
  if (bytes > 0) std::memset(*data, 0, static_cast<size_t>(bytes));
  return made;
}

void expect_dtype(const char* name, const TensorView& view, std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), view.dtype) != allowed.end()) return;
  std::string names;
  for (const DType dtype : allowed)
    names += (names.empty() ? "" : " or ") + std::string(name_of(dtype));
  refuse(name, "be " + names, view);
}

}  // namespace fastattn
