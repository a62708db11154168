// Creates the tensor maps that TMA needs, without linking the driver's library.
#pragma once
#include <stdexcept>
#include <string>

#include "ptx/tma.h"

#ifndef FASTATTN_EMULATED
#include <cuda_runtime.h>
#endif

namespace fastattn {
namespace cuda {

enum class TensorElement { bf16, f16, f32 };

// A tensor of four dimensions, the innermost one first and contiguous. Strides count bytes and are
// multiples of 16, `base` is aligned to 16 bytes, and a row of the box has at most 128 bytes.
struct TensorDescription {
  void* base;
  TensorElement element;
  int64_t size[4];
  int64_t stride[3];  // of dimensions 1 to 3
  int box[4];
};

// Uses the 128-byte swizzle: bits 4 to 6 of an address in shared memory are XORed with bits 7 to 9.
inline TensorMap make_tensor_map(const TensorDescription& t) {
#ifdef FASTATTN_EMULATED
  TensorMap map;
  map.base = static_cast<char*>(t.base);
  map.element_bytes = t.element == TensorElement::f32 ? 4 : 2;
  map.is_float32 = t.element == TensorElement::f32;
  map.swizzle = 128;
  map.stride[0] = map.element_bytes;
  for (int n = 0; n < 4; ++n) {
    map.size[n] = t.size[n];
    map.box[n] = t.box[n];
    if (n > 0) map.stride[n] = t.stride[n - 1];
  }
  return map;
#else
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess)
      throw std::runtime_error("fastattn: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  const CUtensorMapDataType types[] = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                       CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                       CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
  cuuint64_t size[4], stride[3];
  cuuint32_t box[4], step[4] = {1, 1, 1, 1};
  for (int n = 0; n < 4; ++n) {
    size[n] = static_cast<cuuint64_t>(t.size[n]);
    box[n] = static_cast<cuuint32_t>(t.box[n]);
    if (n > 0) stride[n - 1] = static_cast<cuuint64_t>(t.stride[n - 1]);
  }
  TensorMap map;
  const CUresult result =
      encode(&map, types[static_cast<int>(t.element)], 4, t.base, size, stride, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("fastattn: cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(result)));
  return map;
#endif
}

}  // namespace cuda
}  // namespace fastattn
