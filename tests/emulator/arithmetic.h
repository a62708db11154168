// The emulator's side of csrc/cuda/ptx/arithmetic.h.
#pragma once
#include <cmath>
#include <cstring>

#include "device.h"

namespace fastattn {
namespace cuda {

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float reciprocal_approx(float x) { return 1.0f / x; }

inline float float_of_bf16(uint16_t x) { return float_of_bits(static_cast<uint32_t>(x) << 16); }

inline uint16_t bf16_of_float(float x) {
  if (x != x) return 0x7FFF;
  const uint32_t bits = bits_of_float(x);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float float_of_f16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t exponent = x >> 10 & 31, fraction = x & 0x3FF;
  float y;
  if (exponent == 0)
    y = static_cast<float>(fraction) * 0x1p-24f;  // denormal
  else if (exponent == 31)
    y = fraction != 0 ? NAN : INFINITY;
  else
    y = float_of_bits((exponent + 112) << 23 | fraction << 13);
  return float_of_bits(bits_of_float(y) | sign);
}

inline uint16_t f16_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float size = std::fabs(x);
  if (x != x) return 0x7FFF;
  if (size >= 65520.0f) return sign | 0x7C00;
  if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f));
  const uint32_t rounded = (bits & 0x7FFFFFFF) + 0xFFF + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((rounded >> 13) - (112 << 10));
}

inline uint32_t pack_bf16(float low, float high) {
  return bf16_of_float(low) | static_cast<uint32_t>(bf16_of_float(high)) << 16;
}

inline uint32_t pack_f16(float low, float high) {
  return f16_of_float(low) | static_cast<uint32_t>(f16_of_float(high)) << 16;
}

inline uint32_t to_tf32(float x) {
  if (!std::isfinite(x)) return bits_of_float(x);
  return (bits_of_float(x) + 0x1000) & ~0x1FFFu;  // the sign is apart: this rounds away from zero
}

}  // namespace cuda
}  // namespace fastattn
