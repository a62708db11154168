// Reads PyTorch's tensors and makes new ones without its headers, so that one build serves every
// version. Newer versions have DLPack's exchange interface, a table of functions: one of them
// returns the address, sizes and strides faster than Python returns one of the three. With older
// versions, the tensor's methods are called. Each module reads the tensors of one kind of device.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "params.h"

namespace fastattn {

// The dtypes of tensors that no kernel computes with: indices and random keys.
constexpr DType kInt32{5}, kInt64{6};
// The dtypes of quantised caches; the second is torch.float8_e4m3fn.
constexpr DType kInt8{7}, kFloat8{8};

// The sizes of a tensor of at most five dimensions. `kLeftOut` stands for a dimension it lacks.
constexpr int64_t kLeftOut = INT64_MIN;

struct Sizes {
  int rank = 0;
  int64_t size[5];

  Sizes(std::initializer_list<int64_t> sizes) {
    for (const int64_t each : sizes)
      if (each != kLeftOut) size[rank++] = each;
  }
  Sizes(const int64_t* sizes, int rank) : rank(rank) { std::copy_n(sizes, rank, size); }

  const int64_t* begin() const { return size; }
  const int64_t* end() const { return size + rank; }
};

// A tensor of at most five dimensions.
struct TensorView {
  void* data;
  DType dtype;
  int rank;
  int64_t size[5] = {};
  int64_t stride[5] = {};  // in elements

  Sizes sizes() const { return {size, rank}; }
  bool has_sizes(const Sizes& sizes) const;
  bool is_contiguous() const;
  bool has_strides_of_empty() const;  // as torch.empty(), even for dimensions of size 1
};

// Sets the module `torch` whose tensors are read from here on, and their `device`, "cpu" or "cuda".
// `interface` is a capsule of the exchange interface, or None; another major version of it is
// ignored. Returns whether it is used.
bool use_torch(const pybind11::module_& torch, const pybind11::object& interface,
               const char* device);
bool on_cpu();
const char* name_of(DType dtype);  // in torch
// Sets the GPU whose tensors this thread reads from here on; the caller has made it PyTorch's
// current device, so that new tensors are there. The CPU has the number 0.
void use_device(int index);

// Whether `from` is a tensor (no subclass but torch.nn.Parameter) in the memory of the device, of
// at most four dimensions and a dtype that the core reads. False for an address below 4 GiB, which
// may be the offset of a view whose storage was freed, unless the tensor is empty. Sets no error.
bool read_exact(pybind11::handle from, TensorView* to);
// As read_exact(), but accepts any subclass and five dimensions; throws an error that names the
// tensor.
TensorView view_of(const char* name, pybind11::handle from);
// Four dimensions: missing leading dimensions have stride 0.
Tensor4 operand_of(const TensorView& view);
bool is_negated(pybind11::handle tensor);  // lazily, which DLPack does not tell
bool requires_gradient(pybind11::handle tensor);
// 0 if one of these tensors (or None) is a lazy negation; else a number of the dtype, odd if one of
// them requires a gradient.
int64_t call_key(DType dtype, std::initializer_list<pybind11::handle> tensors);

int threads();  // torch.get_num_threads()

// tensor.contiguous()
pybind11::object contiguous(pybind11::handle tensor);
// torch.empty_like(tensor), and its view.
pybind11::object new_like(pybind11::handle tensor, TensorView* to);
// A contiguous new_like(), with the strides of torch.empty(tensor.shape).
pybind11::object new_contiguous_like(pybind11::handle tensor, void** data);
// torch.empty(sizes, dtype=dtype) on the device, and its address.
pybind11::object new_result(DType dtype, const Sizes& sizes, void** data);
// new_result() for float32, float64 or int64, faster where the exchange interface exists for the
// CPU; PyTorch cannot resize such a tensor.
pybind11::object new_buffer(DType dtype, const Sizes& sizes, void** data);

template <class T>
pybind11::object new_result(DType dtype, const Sizes& sizes, T** data) {
  void* made;
  pybind11::object result = new_result(dtype, sizes, &made);
  *data = static_cast<T*>(made);
  return result;
}
template <class T>
pybind11::object new_buffer(DType dtype, const Sizes& sizes, T** data) {
  void* made;
  pybind11::object result = new_buffer(dtype, sizes, &made);
  *data = static_cast<T*>(made);
  return result;
}
// tensor.to(dtype); the tensor itself if it has this dtype.
pybind11::object converted_to(const pybind11::object& tensor, DType dtype);

}  // namespace fastattn
