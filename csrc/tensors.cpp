// tensors.h describes the functions that are declared there.
#include "tensors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace fastattn {
namespace {

// A tensor as DLPack describes it: https://dmlc.github.io/dlpack/latest/c_api.html. The tensor owns
// `shape` and `strides`.
struct Record {
  void* data;
  int32_t device_type, device_index;
  int32_t dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
};

// The used entries of DLPack's table, at their offsets.
struct Exchange {
  uint32_t major, minor;
  void* previous;
  // All return 0, or another number and set an error: in Python, or through `fail` for the first.
  int (*allocate)(const Record* like, void** managed, void* context,
                  void (*fail)(void* context, const char* kind, const char* message));
  int (*to_managed)(void* tensor, void** managed);
  int (*from_managed)(void* managed, void** tensor);
  int (*read)(void* tensor, Record* to);
};

constexpr int kMostDimensions = 5;
constexpr int32_t kCpu = 1, kCuda = 2;  // DLPack's numbers of devices
constexpr uint8_t kInteger = 0, kFloat = 2, kBrain = 4, kBool = 6, kE4m3 = 10;  // and of types

// The dtypes of torch, in the order of DType.
struct Kind {
  const char* name;
  uint8_t code, bits;
};
constexpr Kind kKinds[] = {
    {"float32", kFloat, 32}, {"float64", kFloat, 64}, {"bfloat16", kBrain, 16},
    {"float16", kFloat, 16}, {"bool", kBool, 8},      {"int32", kInteger, 32},
    {"int64", kInteger, 64}, {"int8", kInteger, 8},   {"float8_e4m3fn", kE4m3, 8},
};
constexpr int kDTypes = static_cast<int>(std::size(kKinds));

// They live as long as the process: a module that Python unloads must not release them.
struct Interface {
  const Exchange* exchange = nullptr;
  PyTypeObject *tensor = nullptr, *parameter = nullptr;
  PyObject *empty = nullptr, *empty_like = nullptr, *get_num_threads = nullptr;
  PyObject* contiguous_format = nullptr;
  PyObject* dtypes[kDTypes] = {};
  int32_t device_type = kCpu;
  // names
  PyObject *is_neg, *requires_grad, *is_here, *dtype, *shape, *stride, *data_ptr, *contiguous;
  PyObject* get_device;
  PyObject *of_dtype_and_device, *of_format;  // tuples of the names of arguments
  PyObject* device;                           // its name
};
Interface found;
thread_local int device_index = 0;

// An attribute that lives as long as the process.
PyObject* attribute(const py::handle& of, const char* name) {
  return py::object(of.attr(name)).release().ptr();
}

// Whether the value of an attribute or method is true; an error counts as true.
bool is_true(PyObject* value) {
  const bool yes = value != Py_False;
  if (value == nullptr) PyErr_Clear();
  Py_XDECREF(value);
  return yes;
}

// The dtype of an exchange record; false if the core does not have it.
bool read_dtype(const Record& r, DType* to) {
  const auto* const at = std::find_if(kKinds, kKinds + kDTypes, [&](const Kind& kind) {
    return kind.code == r.type_code && kind.bits == r.type_bits;
  });
  *to = static_cast<DType>(at - kKinds);
  return at != kKinds + kDTypes && r.type_lanes == 1;
}

// Reads a tensor by DLPack's exchange interface.
bool read_by_interface(PyObject* from, TensorView* to) {
  Record r;
  if (found.exchange->read(from, &r) != 0) return false;
  if (r.device_type != found.device_type || r.byte_offset != 0 || r.dimensions > kMostDimensions)
    return false;
  if ((on_cpu() ? 0 : r.device_index) != device_index) return false;  // PyTorch numbers no CPU
  to->data = r.data, to->rank = r.dimensions;
  std::copy_n(r.shape, to->rank, to->size);
  std::copy_n(r.strides, to->rank, to->stride);
  return read_dtype(r, &to->dtype);
}

// A tuple of integers; returns how many, or -1.
int read_integers(const py::object& from, int64_t* to) {
  if (!from || !PyTuple_Check(from.ptr())) return -1;
  const auto count = static_cast<int>(PyTuple_GET_SIZE(from.ptr()));
  if (count > kMostDimensions) return -1;
  for (int n = 0; n < count; ++n) {
    to[n] = PyLong_AsLongLong(PyTuple_GET_ITEM(from.ptr(), n));
    if (to[n] == -1 && PyErr_Occurred()) return -1;
  }
  return count;
}

// Calls a method; null with Python's error if it fails.
py::object call(PyObject* of, PyObject* method) {
  return py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(of, method));
}

py::object get(PyObject* of, PyObject* name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(of, name));
}

// Reads a tensor by its Python methods, for versions of PyTorch without the exchange interface.
bool read_by_methods(PyObject* from, TensorView* to) {
  const py::object dtype = get(from, found.dtype);
  const auto* const at = std::find(found.dtypes, found.dtypes + kDTypes, dtype.ptr());
  if (at == found.dtypes + kDTypes || get(from, found.is_here).ptr() != Py_True) return false;
  const py::object index = on_cpu() ? py::int_(0) : call(from, found.get_device);
  if (!index || PyLong_AsLong(index.ptr()) != device_index) return false;
  to->dtype = static_cast<DType>(at - found.dtypes);
  to->rank = read_integers(get(from, found.shape), to->size);
  if (to->rank < 0 || read_integers(call(from, found.stride), to->stride) != to->rank) return false;
  const py::object address = call(from, found.data_ptr);  // an error if it has none
  if (!address) return false;
  to->data = PyLong_AsVoidPtr(address.ptr());
  return !PyErr_Occurred();
}

// The number of elements.
int64_t elements(const TensorView& x) {
  int64_t count = 1;
  for (int n = 0; n < x.rank; ++n) count *= x.size[n];
  return count;
}

// Calls f(first, keyword arguments).
template <int N>
py::object call_named(PyObject* f, PyObject* const (&arguments)[N], PyObject* names) {
  auto made = py::reinterpret_steal<py::object>(PyObject_Vectorcall(f, arguments, 1, names));
  if (!made) throw py::error_already_set();
  return made;
}

// A tuple of interned names, for calls with keywords.
template <class... Names>
PyObject* tuple_of(Names... names) {
  const auto interned = [](const char* name) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
  };
  return py::make_tuple(interned(names)...).release().ptr();
}

// A tensor whose storage was freed has the address 0, or, if it is a view, its offset in bytes.
bool has_memory(const TensorView& x) {
  constexpr uintptr_t kLow = uintptr_t{1} << 32;
  return reinterpret_cast<uintptr_t>(x.data) >= kLow || elements(x) == 0;
}

// Reads a tensor; false if it is not strided memory on this module's device.
bool read(PyObject* from, TensorView* to) {
  const bool read =
      found.exchange != nullptr ? read_by_interface(from, to) : read_by_methods(from, to);
  if (!read) PyErr_Clear();
  return read;
}

}  // namespace

bool use_torch(const py::module_& torch, const py::object& interface, const char* device) {
  constexpr uint32_t kMajor = 1;
  found.device_type = std::string(device) == "cpu" ? kCpu : kCuda;
  found.tensor = reinterpret_cast<PyTypeObject*>(attribute(torch, "Tensor"));
  found.parameter = reinterpret_cast<PyTypeObject*>(attribute(torch.attr("nn"), "Parameter"));
  found.empty = attribute(torch, "empty");
  found.empty_like = attribute(torch, "empty_like");
  found.get_num_threads = attribute(torch, "get_num_threads");
  found.contiguous_format = attribute(torch, "contiguous_format");
  for (int n = 0; n < kDTypes; ++n) found.dtypes[n] = attribute(torch, kKinds[n].name);
  const auto name = PyUnicode_InternFromString;
  found.is_neg = name("is_neg"), found.requires_grad = name("requires_grad");
  found.is_here = name(on_cpu() ? "is_cpu" : "is_cuda"), found.get_device = name("get_device");
  found.dtype = name("dtype"), found.shape = name("shape");
  found.stride = name("stride"), found.data_ptr = name("data_ptr");
  found.contiguous = name("contiguous");
  found.of_dtype_and_device = tuple_of("dtype", "device"), found.device = name(device);
  found.of_format = tuple_of("memory_format");

  found.exchange = nullptr;
  if (interface.is_none()) return false;
  const auto* exchange =
      static_cast<const Exchange*>(PyCapsule_GetPointer(interface.ptr(), "dlpack_exchange_api"));
  if (exchange == nullptr) throw py::error_already_set();
  if (exchange->major != kMajor || exchange->read == nullptr) return false;
  found.exchange = exchange;
  return true;
}

bool on_cpu() { return found.device_type == kCpu; }

const char* name_of(DType dtype) { return kKinds[static_cast<int>(dtype)].name; }

void use_device(int index) { device_index = index; }

bool TensorView::has_sizes(const Sizes& sizes) const {
  return rank == sizes.rank && std::equal(sizes.begin(), sizes.end(), size);
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (int n = rank - 1; n >= 0; --n) {
    if (size[n] != 1 && stride[n] != expected) return false;
    expected *= size[n];
  }
  return true;
}

bool TensorView::has_strides_of_empty() const {
  int64_t expected = 1;
  for (int n = rank - 1; n >= 0; --n) {
    if (stride[n] != expected) return false;
    expected *= std::max(size[n], int64_t{1});
  }
  return true;
}

bool read_exact(py::handle from, TensorView* to) {
  PyTypeObject* const type = Py_TYPE(from.ptr());
  if (found.tensor == nullptr || (type != found.tensor && type != found.parameter)) return false;
  return read(from.ptr(), to) && to->rank <= 4 && has_memory(*to);
}

TensorView view_of(const char* name, py::handle from) {
  if (found.tensor == nullptr || !PyObject_TypeCheck(from.ptr(), found.tensor))
    throw py::type_error(std::string("fastattn: ") + name + " must be a tensor, got " +
                         Py_TYPE(from.ptr())->tp_name);
  TensorView view;
  if (!read(from.ptr(), &view))
    throw py::type_error(
        std::string("fastattn: ") + name + " must be a tensor in the memory of " +
        (device_index == 0 && on_cpu() ? "the CPU" : "GPU " + std::to_string(device_index)) +
        ", of at most 5 dimensions and a dtype that the kernels have");
  if (!has_memory(view))
    throw std::runtime_error(std::string("fastattn: ") + name +
                             " has no memory: its storage was freed, or never allocated");
  return view;
}

int threads() {
  const auto count = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(found.get_num_threads));
  if (!count) throw py::error_already_set();
  return count.cast<int>();
}

Tensor4 operand_of(const TensorView& x) {
  Tensor4 made{x.data, {}};
  std::copy_n(x.stride, x.rank, made.stride + 4 - x.rank);
  return made;
}

bool is_negated(py::handle x) { return is_true(PyObject_CallMethodNoArgs(x.ptr(), found.is_neg)); }

bool requires_gradient(py::handle x) {
  return is_true(PyObject_GetAttr(x.ptr(), found.requires_grad));
}

int64_t call_key(DType dtype, std::initializer_list<py::handle> tensors) {
  bool wants = false;
  for (const py::handle x : tensors) {
    if (x.is_none()) continue;
    if (is_negated(x)) return 0;
    wants = wants || requires_gradient(x);
  }
  return 2 * (static_cast<int64_t>(dtype) + 1) + wants;
}

py::object contiguous(py::handle tensor) {
  py::object made = call(tensor.ptr(), found.contiguous);
  if (!made) throw py::error_already_set();
  return made;
}

py::object converted_to(const py::object& tensor, DType dtype) {
  if (view_of("a tensor", tensor).dtype == dtype) return tensor;
  return tensor.attr("to")(py::handle(found.dtypes[static_cast<int>(dtype)]));
}

namespace {

// Has Linux map a large new tensor by huge pages, as NumPy does. A kernel is the first to write it,
// and would wait for a page fault every 4 KB. From 4 MB on, the tensor has a whole huge page
// wherever it is.
void ask_for_huge_pages(const TensorView& x) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096, kLeast = 4 << 20;
  if (!on_cpu()) return;
  const int bits = kKinds[static_cast<int>(x.dtype)].bits;
  const auto begin = (reinterpret_cast<uintptr_t>(x.data) + kPage - 1) / kPage * kPage;
  const auto bytes = static_cast<uintptr_t>(elements(x) * bits / 8);
  if (bytes >= kLeast) madvise(reinterpret_cast<void*>(begin), bytes - kPage, MADV_HUGEPAGE);
#else
  static_cast<void>(x);
#endif
}

}  // namespace

py::object new_like(py::handle tensor, TensorView* to) {
  auto made =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(found.empty_like, tensor.ptr()));
  if (!made) throw py::error_already_set();
  *to = view_of("a new tensor", made);
  ask_for_huge_pages(*to);
  return made;
}

py::object new_contiguous_like(py::handle tensor, void** data) {
  TensorView view;
  py::object made = new_like(tensor, &view);
  if (!view.has_strides_of_empty()) {
    PyObject* const arguments[] = {tensor.ptr(), found.contiguous_format};
    made = call_named(found.empty_like, arguments, found.of_format);
    view = view_of("a new tensor", made);
  }
  *data = view.data;
  return made;
}

py::object new_result(DType dtype, const Sizes& sizes, void** data) {
  py::tuple shape(static_cast<size_t>(sizes.rank));
  size_t place = 0;
  for (const int64_t size : sizes) shape[place++] = size;
  // Names the device, because torch.set_default_device() may have set another default.
  PyObject* const arguments[] = {shape.ptr(), found.dtypes[static_cast<int>(dtype)], found.device};
  py::object made = call_named(found.empty, arguments, found.of_dtype_and_device);
  const TensorView view = view_of("a new tensor", made);
  ask_for_huge_pages(view);
  *data = view.data;
  return made;
}

py::object new_buffer(DType dtype, const Sizes& sizes, void** data) {
  if (found.exchange == nullptr || !on_cpu()) return new_result(dtype, sizes, data);
  Record like{};
  like.device_type = kCpu, like.dimensions = sizes.rank;
  like.shape = sizes.begin();
  const Kind& kind = kKinds[static_cast<int>(dtype)];
  like.type_code = kind.code, like.type_bits = kind.bits, like.type_lanes = 1;
  void *managed = nullptr, *tensor = nullptr;
  const auto fail = [](void* said, const char*, const char* message) {
    *static_cast<std::string*>(said) = message;
  };
  std::string said;
  if (found.exchange->allocate(&like, &managed, &said, fail) != 0) throw std::runtime_error(said);
  if (found.exchange->from_managed(managed, &tensor) != 0) throw py::error_already_set();
  Record record;
  if (found.exchange->read(tensor, &record) != 0) throw py::error_already_set();
  *data = record.data;
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(tensor));
}

}  // namespace fastattn
