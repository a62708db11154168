// d += a b on the tensor cores, by one warp: a row-major, b column-major, d in float. PTX ISA:
// mma.sync. With g = lane / 4 and q = lane % 4, a thread holds
//   d[0..3]  (g, 2q) (g, 2q+1) (g+8, 2q) (g+8, 2q+1)
//   a[0..3]  rows g, g+8, g, g+8; columns 2q, 2q+1, from a[2] on plus 8 (tf32: q, plus 4)
//   b[0..1]  column g; rows 2q, 2q+1, in b[1] plus 8 (tf32: q, plus 4)
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/mma.h"
#else

namespace fastattn {
namespace cuda {

// d += a b with a [16, 16] and b [16, 8] of bf16.
FASTATTN_DEVICE void mma_bf16_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b with a [16, 16] and b [16, 8] of fp16.
FASTATTN_DEVICE void mma_f16_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b with a [16, 8] and b [8, 8] of tf32.
FASTATTN_DEVICE void mma_tf32_m16n8k8(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cuda
}  // namespace fastattn
#endif
