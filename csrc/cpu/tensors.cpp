#include "tensors.h"

#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace fastattn {
namespace {

// The parts of DLPack's table that are used here, in their places.
struct Exchange {
  uint32_t major, minor;
  void* previous;
  // All return 0, or another number and an error: of Python, or for the first passed to `fail`.
  int (*allocate)(const TensorRecord* like, void** managed, void* context,
                  void (*fail)(void* context, const char* kind, const char* message));
  int (*to_managed)(void* tensor, void** managed);
  int (*from_managed)(void* managed, void** tensor);
  int (*read)(void* tensor, TensorRecord* to);
};

constexpr int kCpu = 1;                    // DLPack's number of the device
constexpr uint8_t kFloat = 2, kBrain = 4;  // and of types

// They live as long as the process: a module that Python unloads must not release them.
struct Interface {
  const Exchange* exchange = nullptr;
  PyTypeObject* tensor = nullptr;
  PyObject* empty_like = nullptr;
  PyObject *is_neg = nullptr, *requires_grad = nullptr;  // names
};
Interface found;

PyObject* attribute(const py::handle& of, const char* name) {
  return py::object(of.attr(name)).release().ptr();
}

bool has_kernels_of(const TensorRecord& r) {
  if (r.type_lanes != 1) return false;
  if (r.type_code == kFloat) return r.type_bits == 16 || r.type_bits == 32 || r.type_bits == 64;
  return r.type_code == kBrain && r.type_bits == 16;
}

// Whether an attribute or a method without arguments of a tensor is true; an error counts as true.
bool is_true(PyObject* value) {
  const bool yes = value != Py_False;
  if (value == nullptr) PyErr_Clear();
  Py_XDECREF(value);
  return yes;
}

}  // namespace

bool use_exchange(const py::object& interface, const py::module_& torch) {
  constexpr uint32_t kMajor = 1;
  found.exchange = nullptr;
  if (interface.is_none()) return false;
  const auto* exchange =
      static_cast<const Exchange*>(PyCapsule_GetPointer(interface.ptr(), "dlpack_exchange_api"));
  if (exchange == nullptr) throw py::error_already_set();
  if (exchange->major != kMajor || exchange->read == nullptr) return false;
  found.tensor = reinterpret_cast<PyTypeObject*>(attribute(torch, "Tensor"));
  found.empty_like = attribute(torch, "empty_like");
  found.is_neg = PyUnicode_InternFromString("is_neg");
  found.requires_grad = PyUnicode_InternFromString("requires_grad");
  found.exchange = exchange;
  return true;
}

bool read_tensor(py::handle from, TensorRecord* to) {
  if (found.exchange == nullptr || Py_TYPE(from.ptr()) != found.tensor) return false;
  if (found.exchange->read(from.ptr(), to) != 0) {
    PyErr_Clear();
    return false;
  }
  const int64_t* const n = to->shape;
  return to->device_type == kCpu && to->dimensions == 4 &&
         (to->data != nullptr || n[0] * n[1] * n[2] * n[3] == 0) && to->byte_offset == 0 &&
         has_kernels_of(*to);
}

bool is_plain(py::handle tensor) {
  return !is_true(PyObject_CallMethodNoArgs(tensor.ptr(), found.is_neg));
}

DType dtype_of(const TensorRecord& r) {
  if (r.type_code == kBrain) return DType::bf16;
  return r.type_bits == 64 ? DType::f64 : r.type_bits == 32 ? DType::f32 : DType::f16;
}

Tensor4 operand_of(const TensorRecord& r) {
  return {r.data, {r.strides[0], r.strides[1], r.strides[2], r.strides[3]}};
}

bool requires_grad(py::handle tensor) {
  return is_true(PyObject_GetAttr(tensor.ptr(), found.requires_grad));
}

bool read_doubles(py::handle tensor, int64_t a, int64_t b, int64_t c, double** to) {
  TensorRecord r;
  if (found.exchange == nullptr || found.exchange->read(tensor.ptr(), &r) != 0) {
    PyErr_Clear();
    return false;
  }
  *to = static_cast<double*>(r.data);
  return r.dimensions == 3 && r.type_code == kFloat && r.type_bits == 64 && r.shape[0] == a &&
         r.shape[1] == b && r.shape[2] == c && r.strides[0] == b * c && r.strides[1] == c &&
         r.strides[2] == 1;
}

py::object new_like(py::handle tensor, Tensor4* to) {
  auto made =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(found.empty_like, tensor.ptr()));
  if (!made) throw py::error_already_set();
  TensorRecord record;
  if (!read_tensor(made, &record) || record.strides[3] != 1) return {};
  *to = operand_of(record);
  return made;
}

py::object new_doubles(int64_t a, int64_t b, int64_t c, double** to) {
  const int64_t shape[] = {a, b, c};
  TensorRecord like{};
  like.device_type = kCpu, like.dimensions = 3, like.shape = shape;
  like.type_code = kFloat, like.type_bits = 64, like.type_lanes = 1;
  void *managed = nullptr, *tensor = nullptr;
  const auto fail = [](void* said, const char*, const char* message) {
    *static_cast<std::string*>(said) = message;
  };
  std::string said;
  if (found.exchange->allocate(&like, &managed, &said, fail) != 0) throw std::runtime_error(said);
  if (found.exchange->from_managed(managed, &tensor) != 0) throw py::error_already_set();
  TensorRecord record;
  if (found.exchange->read(tensor, &record) != 0) throw py::error_already_set();
  *to = static_cast<double*>(record.data);
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(tensor));
}

}  // namespace fastattn
