// Reads PyTorch's tensors without its headers, so that one build serves every version: by DLPack's
// exchange interface, a table of functions that newer versions have. One of them fills a record with a
// tensor's address, sizes and strides, in less time than Python takes for one of the three.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "../params.h"

namespace fastattn {

// A tensor as DLPack describes it: https://dmlc.github.io/dlpack/latest/c_api.html. `shape` and
// `strides` are those of the tensor itself, and live as long as it does.
struct TensorRecord {
  void* data;
  int32_t device_type, device_index;
  int32_t dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
};

// Uses the interface in a capsule, of exact instances of torch.Tensor; None: reads no tensors from
// here on. Returns whether tensors are read: not if the interface is of another major version or
// lacks what is needed.
bool use_exchange(const pybind11::object& interface, const pybind11::module_& torch);

// Whether `from` is an exact tensor of four dimensions in the memory of the CPU, of a dtype that the
// kernels have. It may be empty; others have an address. Sets no error.
bool read_tensor(pybind11::handle from, TensorRecord* to);
// Whether its memory is what it says: it is no lazy negation, which DLPack does not tell.
bool is_plain(pybind11::handle tensor);
// Of what read_tensor() has read.
DType dtype_of(const TensorRecord& record);
Tensor4 operand_of(const TensorRecord& record);

bool requires_grad(pybind11::handle tensor);
// Whether this is a tensor of torch.float64 and sizes (a, b, c), contiguous, and its address.
bool read_doubles(pybind11::handle tensor, int64_t a, int64_t b, int64_t c, double** to);

// torch.empty_like(tensor) and its operand; null if its columns are not contiguous.
pybind11::object new_like(pybind11::handle tensor, Tensor4* to);
// A new tensor of torch.float64 and sizes (a, b, c), contiguous, and its address. In a third less time
// than torch.empty(), but PyTorch cannot resize it: not for results.
pybind11::object new_doubles(int64_t a, int64_t b, int64_t c, double** to);

}  // namespace fastattn
