// How the tensor cores use an element type: its storage, fragments and products. See ptx/mma.h for
// the layout of fragments. One step of a product takes kDepth columns of a and two neighbouring
// tiles of 8 columns of the result.
#pragma once
#include "../ptx/arithmetic.h"
#include "../ptx/mma.h"

namespace fastattn {
namespace cuda {

struct Bf16 {
  using Storage = uint16_t;
  static FASTATTN_DEVICE float widen(uint16_t x) { return float_of_bf16(x); }
  static FASTATTN_DEVICE uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  static FASTATTN_DEVICE void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_bf16_m16n8k16(d, a, b0, b1);
  }
};

struct F16 {
  using Storage = uint16_t;
  static FASTATTN_DEVICE float widen(uint16_t x) { return float_of_f16(x); }
  static FASTATTN_DEVICE uint32_t pack(float low, float high) { return pack_f16(low, high); }
  static FASTATTN_DEVICE void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_f16_m16n8k16(d, a, b0, b1);
  }
};

struct F32 {
  using Storage = float;
  static FASTATTN_DEVICE float widen(float x) { return x; }
};

// float32 whose factors are rounded to tf32 in every product.
struct Tf32 : F32 {};

template <class T>
struct Product {
  static constexpr int kDepth = 16;
  struct A {
    uint32_t x[4];
  };
  struct B {
    uint32_t x[4];
  };

  // x as rounded in a product.
  static FASTATTN_DEVICE float factor(float x) { return x; }

  static FASTATTN_DEVICE A a_of(const uint32_t (&r)[4]) { return {{r[0], r[1], r[2], r[3]}}; }
  static FASTATTN_DEVICE B b_of(const uint32_t (&r)[4]) { return {{r[0], r[1], r[2], r[3]}}; }

  // The accumulators of two neighbouring column tiles, rounded, as operand a of the next product.
  static FASTATTN_DEVICE A a_of_accumulators(const float* d) {
    return {{T::pack(d[0], d[1]), T::pack(d[2], d[3]), T::pack(d[4], d[5]), T::pack(d[6], d[7])}};
  }

  // d[0..3] += a b[.][0..7], d[4..7] += a b[.][8..15]
  template <bool kTransposed = false>
  static FASTATTN_DEVICE void add(float* d, const A& a, const B& b) {
    T::mma(d, a.x, b.x[0], b.x[1]);
    T::mma(d + 4, a.x, b.x[2], b.x[3]);
  }
};

// A float is the sum of two tf32 numbers, to 23 bits, and a product of floats is the sum of four
// products. The last of them, small by small, is only as large as the rounding of a float, but
// scores in an exponential need it.
template <>
struct Product<F32> {
  static constexpr int kDepth = 8;
  struct A {
    uint32_t big[4], small[4];
  };
  using B = A;

  static FASTATTN_DEVICE float factor(float x) { return x; }

  // x as the sum of two tf32 numbers.
  static FASTATTN_DEVICE void split(float x, uint32_t& big, uint32_t& small) {
    big = to_tf32(x);
    // For an infinity, x - big would be NaN.
    const float rest = x - float_of_bits(big);
    small = to_tf32(rest == rest ? rest : 0.0f);
  }

  // Operand a from four registers of floats.
  static FASTATTN_DEVICE A a_of(const uint32_t (&r)[4]) {
    A a;
    FASTATTN_UNROLL
    for (int n = 0; n < 4; ++n) split(float_of_bits(r[n]), a.big[n], a.small[n]);
    return a;
  }
  static FASTATTN_DEVICE B b_of(const uint32_t (&r)[4]) { return a_of(r); }

  // Column q of a is column 2q of the accumulators, and q + 4 is 2q + 1. The order of the sum in a
  // product is free, and the rows of b are read in the same order.
  static FASTATTN_DEVICE A a_of_accumulators(const float* d) {
    A a;
    split(d[0], a.big[0], a.small[0]);
    split(d[2], a.big[1], a.small[1]);
    split(d[1], a.big[2], a.small[2]);
    split(d[3], a.big[3], a.small[3]);
    return a;
  }

  // Transposed, the two middle products swap, so that y x^T is bitwise equal to x y^T. (A separate
  // sum of the four products would round less, but the forward pass has no registers left for it.)
  template <bool kTransposed = false>
  static FASTATTN_DEVICE void add(float* d, const A& a, const B& b) {
    FASTATTN_UNROLL
    for (int n = 0; n < 2; ++n) {
      mma_tf32_m16n8k8(d + 4 * n, a.small, b.small[2 * n], b.small[2 * n + 1]);
      if (kTransposed) mma_tf32_m16n8k8(d + 4 * n, a.big, b.small[2 * n], b.small[2 * n + 1]);
      mma_tf32_m16n8k8(d + 4 * n, a.small, b.big[2 * n], b.big[2 * n + 1]);
      if (!kTransposed) mma_tf32_m16n8k8(d + 4 * n, a.big, b.small[2 * n], b.small[2 * n + 1]);
      mma_tf32_m16n8k8(d + 4 * n, a.big, b.big[2 * n], b.big[2 * n + 1]);
    }
  }
};

template <>
struct Product<Tf32> {
  static constexpr int kDepth = 8;
  struct A {
    uint32_t x[4];
  };
  using B = A;

  static FASTATTN_DEVICE float factor(float x) { return float_of_bits(to_tf32(x)); }

  // Operand a from four registers of floats.
  static FASTATTN_DEVICE A a_of(const uint32_t (&r)[4]) {
    A a;
    FASTATTN_UNROLL
    for (int n = 0; n < 4; ++n) a.x[n] = to_tf32(float_of_bits(r[n]));
    return a;
  }
  static FASTATTN_DEVICE B b_of(const uint32_t (&r)[4]) { return a_of(r); }

  // In the column order of Product<F32>.
  static FASTATTN_DEVICE A a_of_accumulators(const float* d) {
    return {{to_tf32(d[0]), to_tf32(d[2]), to_tf32(d[1]), to_tf32(d[3])}};
  }

  // d += a b for two tiles of b. There is one product for each, so kTransposed changes no order.
  template <bool kTransposed = false>
  static FASTATTN_DEVICE void add(float* d, const A& a, const B& b) {
    mma_tf32_m16n8k8(d, a.x, b.x[0], b.x[1]);
    mma_tf32_m16n8k8(d + 4, a.x, b.x[2], b.x[3]);
  }
};

}  // namespace cuda
}  // namespace fastattn
