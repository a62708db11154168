// operands.h describes the functions that are declared there.
#include "operands.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace py = pybind11;

namespace fastattn {
namespace {

// They live as long as the process.
PyObject *make_rows = nullptr, *sum_to = nullptr, *may_round_factors = nullptr;

// Sizes as text, such as "(2, 3)".
std::string text_of(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

// Throws: the tensor `name` must `needed`, and is `got`.
[[noreturn]] void refuse(const char* name, const std::string& needed, const TensorView& got) {
  throw py::value_error(std::string("fastattn: ") + name + " is not valid: it must " + needed +
                        ", got " + name_of(got.dtype) + " " + text_of(got.sizes()));
}

}  // namespace

void expect_sizes(const char* name, const TensorView& view, DType dtype, const Sizes& sizes) {
  if (view.dtype != dtype || !view.has_sizes(sizes))
    refuse(name, std::string("be ") + name_of(dtype) + " " + text_of(sizes), view);
}

TensorView read_sizes(const char* name, py::handle from, DType dtype, const Sizes& sizes) {
  const TensorView view = view_of(name, from);
  expect_sizes(name, view, dtype, sizes);
  return view;
}

TensorView read_if_given(const char* name, py::handle from, DType dtype, const Sizes& sizes) {
  return from.is_none() ? TensorView{} : read_sizes(name, from, dtype, sizes);
}

TensorView permuted(const char* name, const TensorView& view, const char* order) {
  TensorView made{view.data, view.dtype, 0};
  int given = 0;
  for (const char* at = order; *at != '\0'; ++at, ++made.rank) {
    const bool is_added = *at == '.';
    given += !is_added;
    made.size[made.rank] = is_added ? 1 : view.size[*at - '0'];
    made.stride[made.rank] = is_added ? 0 : view.stride[*at - '0'];
  }
  if (view.rank != given) refuse(name, "have " + std::to_string(given) + " dimensions", view);
  return made;
}

TensorView filled(const char* name, const TensorView& view) {
  static const char* const orders[] = {"....", "...0", "..01", ".012"};
  return permuted(name, view, view.rank < 4 ? orders[view.rank] : "0123");
}

void expect_broadcast(const char* name, const TensorView& view, const Sizes& sizes,
                      int64_t* strides) {
  const int count = sizes.rank, missing = count - view.rank;
  bool fits = missing >= 0;
  for (int n = 0; n < count && fits; ++n) {
    const int64_t size = n < missing ? 1 : view.size[n - missing];
    fits = size == 1 || size == sizes.size[n];
    strides[n] = size == 1 ? 0 : view.stride[n - missing];
  }
  if (!fits) refuse(name, "broadcast to " + text_of(sizes), view);
}

TensorView read_broadcast(const char* name, py::handle from, const Sizes& sizes, int64_t* strides) {
  const TensorView view = view_of(name, from);
  expect_broadcast(name, view, sizes, strides);
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

void use_rules(const py::object& new_rows, const py::object& summed_to,
               const py::object& may_round) {
  make_rows = py::object(new_rows).release().ptr();
  sum_to = py::object(summed_to).release().ptr();
  may_round_factors = py::object(may_round).release().ptr();
}

bool may_round() { return py::handle(may_round_factors)().cast<bool>(); }

py::object gradient_of(py::handle tensor, const py::object& made) {
  const TensorView x = view_of("a tensor", tensor), grad = view_of("a gradient", made);
  if (x.dtype == grad.dtype && grad.has_sizes(x.sizes())) return made;
  return py::handle(sum_to)(tensor, made);
}

void* read_flat(const char* name, py::handle from, DType dtype, const Sizes& sizes,
                py::object* owners) {
  TensorView x = view_of(name, from);
  if (x.dtype != dtype && (dtype == DType::f32 || dtype == DType::f64)) {
    *owners = from.attr(dtype == DType::f64 ? "double" : "float")();
    x = view_of(name, *owners);
  }
  expect_sizes(name, x, dtype, sizes);
  if (x.is_contiguous()) return x.data;
  *owners = contiguous(*owners ? *owners : from);
  return view_of(name, *owners).data;
}

void* read_flat_if_given(const char* name, py::handle from, DType dtype, const Sizes& sizes,
                         py::object* owners) {
  return from.is_none() ? nullptr : read_flat(name, from, dtype, sizes, owners);
}

TensorView with_rows(const char* name, py::handle from, py::object* owners) {
  const TensorView x = view_of(name, from);
  const int last = x.rank - 1;
  if (last < 0 || x.stride[last] == 1 || x.size[last] <= 1) return x;
  const bool shares = x.rank > 2 && x.stride[0] == 0;
  *owners =
      contiguous(shares ? from.attr("narrow")(0, 0, 1) : py::reinterpret_borrow<py::object>(from));
  TensorView made = view_of(name, *owners);
  if (shares) made.size[0] = x.size[0], made.stride[0] = 0;
  return made;
}

py::object new_rows(py::handle like, int64_t width, TensorView* to) {
  const TensorView x = view_of("a tensor", like);
  const int last = x.rank - 1;
  if (x.size[last] == width) {
    py::object made = new_like(like, to);
    if (to->stride[last] == 1) return made;
  }
  const bool is_empty = width == 0 || std::count(x.size, x.size + x.rank, 0) > 0;
  void* data;
  const py::object made = x.rank == 4 && x.has_strides_of_empty() && !is_empty
                              ? new_result(x.dtype, {x.size[0], x.size[1], x.size[2], width}, &data)
                              : py::handle(make_rows)(like, width);
  *to = view_of("a new tensor", made);
  return made;
}

py::object new_zeros(DType dtype, const Sizes& sizes, void** data) {
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
