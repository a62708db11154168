// 8 x 8 matrices of 16-bit elements between shared memory and the registers of a warp. PTX ISA:
// ldmatrix, stmatrix. Thread 8 i + r gives the address of row r (16 bytes, aligned) of matrix i;
// register i of a thread holds elements 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4, of
// column lane / 4 if transposed.
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/matrix.h"
#else

namespace fastattn {
namespace cuda {

FASTATTN_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

FASTATTN_DEVICE void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// sm_90 and up.
FASTATTN_DEVICE void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

FASTATTN_DEVICE void stmatrix_x4_transposed(void* row, const uint32_t (&r)[4]) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace cuda
}  // namespace fastattn
#endif
