// Conversions and functions of a single register. PTX ISA: cvt, ex2, rcp.
#pragma once
#include "../device.h"

#ifdef FASTATTN_EMULATED
#include "emulator/arithmetic.h"
#else

namespace fastattn {
namespace cuda {

// 2^x to about 2 ulp; denormal results are 0.
FASTATTN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp, for normal x and 1 / x.
FASTATTN_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats, rounded to nearest even, in one register: `low` in the lower half.
FASTATTN_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Two floats, rounded to fp16.
FASTATTN_DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

FASTATTN_DEVICE float float_of_bf16(uint16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x) << 16);
}

// An fp16 as a float.
FASTATTN_DEVICE float float_of_f16(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// x rounded to a fraction of 10 bits, ties away from zero, in the bits of a float.
FASTATTN_DEVICE uint32_t to_tf32(float x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

FASTATTN_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
FASTATTN_DEVICE uint32_t bits_of_float(float x) { return __float_as_uint(x); }

}  // namespace cuda
}  // namespace fastattn
#endif
