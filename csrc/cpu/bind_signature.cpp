// The signature of a call: everything that the choice of its kernel and the checks of its arguments
// depend on, as bytes. Calls with the same signature share a plan (fastattn/call.py).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "../function.h"
#include "../tensors.h"

namespace fastattn {
namespace {

class Signature {
 public:
  // Lengths and batch sizes change from call to call, so the key holds only their relations:
  // whether a size is 1, which earlier size of the call it equals, and whether a batch is one
  // expanded entry. The numbers of heads and columns of the first `rows` tensors are part of the
  // key. Returns false for a tensor that is empty or without strided memory on the CPU.
  bool add_tensor(py::handle from, bool is_rows) {
    if (from.is_none()) return put('-');
    TensorView x;
    if (!read_exact(from, &x)) return false;
    const int64_t key = call_key(x.dtype, {from});  // odd if it requires a gradient
    if (key == 0) return false;
    bool fits = put(static_cast<char>('a' + key)) && put(static_cast<char>('0' + x.rank));
    if (x.rank > 0 && x.stride[0] == 0 && x.size[0] > 1) fits = fits && put('=');
    for (int n = 0; n < x.rank; ++n) {
      const bool exact = is_rows && (n == x.rank - 1 || (x.rank >= 3 && n == 1));
      fits = fits && x.size[n] > 0 && put_relation(x.size[n]) &&
             (!exact || put_bytes(&x.size[n], sizeof x.size[n]));
    }
    return fits;
  }

  // Accepts None, a bool, an int, a float except NaN, a string, or a tuple of these. The type is
  // part of the key.
  bool add_option(PyObject* value) {
    if (value == Py_None) return put('N');
    if (value == Py_True || value == Py_False) return put(value == Py_True ? 'T' : 'F');
    if (PyFloat_CheckExact(value)) {
      const double number = PyFloat_AS_DOUBLE(value);
      return !std::isnan(number) && put('f') && put_bytes(&number, sizeof number);
    }
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      return overflow == 0 && put('i') && put_bytes(&number, sizeof number);
    }
    if (PyUnicode_CheckExact(value)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(value, &size);
      if (text == nullptr) return PyErr_Clear(), false;
      return put('s') && put_bytes(&size, sizeof size) &&
             put_bytes(text, static_cast<size_t>(size));
    }
    if (!PyTuple_CheckExact(value)) return false;
    if (!put('(')) return false;
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(value); ++n)
      if (!add_option(PyTuple_GET_ITEM(value, n))) return false;
    return put(')');
  }

  // The key so far.
  py::bytes bytes() const { return {text_, length_}; }

 private:
  static constexpr size_t kLongest = 512;
  static constexpr int kMostSizes = 64;
  char text_[kLongest];
  size_t length_ = 0;
  int64_t sizes_[kMostSizes];
  int count_ = 0;

  // Appends to the key; false if it is full.
  bool put(char c) { return put_bytes(&c, 1); }

  // Appends bytes; false if the signature would be too long.
  bool put_bytes(const void* from, size_t size) {
    if (length_ + size > kLongest) return false;
    std::copy_n(static_cast<const char*>(from), size, text_ + length_);
    length_ += size;
    return true;
  }

  // Appends which earlier size this one equals: a signature holds no sizes, only their equality.
  bool put_relation(int64_t size) {
    if (size == 1) return put('1');
    const auto same = std::find(sizes_, sizes_ + count_, size) - sizes_;
    if (same == count_) {
      if (count_ == kMostSizes) return false;
      sizes_[count_++] = size;
    }
    return put(static_cast<char>('A' + same));
  }
};

struct CallToSign {
  FASTATTN_TENSORS(tensors, rows, options)  // two tuples; `rows` is an integer
};

// Returns the signature of a call, or None if the call needs the general path.
py::object signature(const CallToSign& x) {
  Signature signature;
  if (!PyTuple_Check(x.tensors.ptr())) throw py::type_error("signature: tensors must be a tuple");
  const Py_ssize_t rows = integer(x.rows.ptr()), count = PyTuple_GET_SIZE(x.tensors.ptr());
  for (Py_ssize_t n = 0; n < count; ++n)
    if (!signature.add_tensor(PyTuple_GET_ITEM(x.tensors.ptr(), n), n < rows)) return none();
  if (!signature.add_option(x.options.ptr())) return none();
  return signature.bytes();
}

struct FewTensors {
  FASTATTN_TENSORS(first, second, third, fourth)
};

// Whether each is None or has strided memory that read_exact() accepts, without a lazy negation.
py::object are_plain(const FewTensors& x) {
  for (const py::handle each : {x.first, x.second, x.third, x.fourth}) {
    TensorView view;
    if (!each.is_none() && (!read_exact(each, &view) || call_key(view.dtype, {each}) == 0))
      return py::bool_(false);
  }
  return py::bool_(true);
}

struct OneTensor {
  FASTATTN_TENSORS(x)
};

// 64 bits that change with any bit of a tensor, so that what was computed from it can be kept until
// it changes: version counters miss what is written through `data`. None if it is no dense, plain
// memory.
py::object fingerprint(const OneTensor& argument) {
  TensorView x;
  if (!read_exact(argument.x, &x) || !x.is_contiguous() || call_key(x.dtype, {argument.x}) == 0)
    return none();
  int64_t bytes = element_bytes(x.dtype);
  for (int n = 0; n < x.rank; ++n) bytes *= x.size[n];
  const char* const from = static_cast<const char*>(x.data);
  // For each word a bijection of the sum. The rotation brings high bits, as signs are, to low ones.
  const auto add = [](uint64_t sum, uint64_t word) {
    sum ^= word;
    return (sum << 29 | sum >> 35) * 0x9e3779b97f4a7c15u;
  };
  uint64_t a = static_cast<uint64_t>(x.dtype) + 1, b = 2, c = 3, d = 4;  // latencies overlap
  without_gil([&] {
    int64_t at = 0;
    for (uint64_t words[4]; at + 32 <= bytes; at += 32) {
      std::memcpy(words, from + at, sizeof words);
      a = add(a, words[0]), b = add(b, words[1]), c = add(c, words[2]), d = add(d, words[3]);
    }
    for (; at < bytes; ++at) a = add(a, static_cast<unsigned char>(from[at]));
  });
  return py::int_(add(add(add(a, b), c), d));
}

}  // namespace
}  // namespace fastattn
