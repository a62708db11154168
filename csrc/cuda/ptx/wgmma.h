// d (+)= a b on the tensor cores, asynchronously, by a warpgroup: four warps, the first of them a
// multiple of four. PTX ISA: wgmma; sm_90a. a is 64 x 16 in shared memory ("ss") or in registers
// ("rs"), b is 16 x N in shared memory, d is 64 x N floats in registers. Warp w of the four has
// rows 16 w to 16 w + 15. Within them, with g = lane / 4 and q = lane % 4,
//   d[4 n + 0..3]  (g, 8n + 2q) (g, 8n + 2q + 1) (g + 8, 8n + 2q) (g + 8, 8n + 2q + 1)
//   a[0..3]        rows g, g + 8, g, g + 8; columns 2q, 2q + 1, from a[2] on plus 8
// Order: write registers, wgmma_fence, wgmma..., wgmma_commit, wgmma_wait, wgmma_arrived. In this
// time nothing may access d, a, or the shared memory that is read.
#pragma once
#include "../device.h"

namespace fastattn {
namespace cuda {

struct Bf16;  // kernels/element.h
struct F16;

// The layout of an operand of 16-bit elements in shared memory, with the 128-byte swizzle of TMA.
// Blocks of 8 rows by 128 bytes are contiguous, aligned to 1024.
//   K-major (rows are m or n, columns are k): `stride` from 8 rows to the next 8; `leading` unused.
//   MN-major (rows are k, columns are m or n; "transposed"): `stride` from 8 k to the next 8,
//   `leading` from 64 columns to the next 64.
struct MatrixDescriptor {
  uint64_t bits;
};

// The descriptor of a swizzled matrix; `leading` and `stride` are bytes between groups of rows.
FASTATTN_DEVICE MatrixDescriptor describe_matrix(uint32_t shared_address, int leading, int stride) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return {(shared_address & 0x3FFFF) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
          static_cast<uint64_t>(stride >> 4) << 32 | kSwizzle128};
}

// The operand that starts `bytes` later.
FASTATTN_DEVICE MatrixDescriptor operator+(MatrixDescriptor d, int bytes) {
  return {d.bits + static_cast<uint32_t>(bytes >> 4)};
}

}  // namespace cuda
}  // namespace fastattn

#ifdef FASTATTN_EMULATED
#include "emulator/wgmma.h"
#else

namespace fastattn {
namespace cuda {

FASTATTN_DEVICE uint32_t shared_address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

FASTATTN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FASTATTN_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N groups are pending.
template <int N>
FASTATTN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Called between wgmma_wait and the first use of d. The compiler sees d written when the product is
// issued, and must not read it earlier.
template <int kCount>
FASTATTN_DEVICE void wgmma_arrived(float (&d)[kCount]) {
  FASTATTN_UNROLL
  for (int n = 0; n < kCount; ++n) asm volatile("" : "+f"(d[n])::"memory");
}

// d = a b + (accumulate ? d : 0). T is Bf16 or F16 of kernels/element.h; kTransposed: b is
// MN-major.
template <class T, int kN, bool kTransposed>
struct Wgmma;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "wgmma_instructions.h"
#endif

template <class T, int kN, bool kTransposed>
FASTATTN_DEVICE void wgmma_ss(float (&d)[kN / 2], MatrixDescriptor a, MatrixDescriptor b,
                              bool accumulate) {
  Wgmma<T, kN, kTransposed>::ss(d, a.bits, b.bits, accumulate);
}

template <class T, int kN, bool kTransposed>
FASTATTN_DEVICE void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], MatrixDescriptor b,
                              bool accumulate) {
  Wgmma<T, kN, kTransposed>::rs(d, a, b.bits, accumulate);
}

}  // namespace cuda
}  // namespace fastattn
#endif
