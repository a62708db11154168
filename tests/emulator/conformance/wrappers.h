// One kernel for each PTX wrapper of csrc/cuda/ptx: it puts what `in` holds through the wrapper and
// writes down what every thread got. tests/cuda/test_emulator.py knows what that must be.
#pragma once
#include "../../../csrc/cuda/ptx/arithmetic.h"
#include "../../../csrc/cuda/ptx/copy.h"
#include "../../../csrc/cuda/ptx/matrix.h"
#include "../../../csrc/cuda/ptx/mma.h"

namespace fastattn {
namespace cuda {

struct Probe {
  const uint32_t* in;
  uint32_t* out;
};

// [n] words in, [n] words out.
template <class F>
FASTATTN_DEVICE void each_word(const Probe& probe, F f) {
  probe.out[threadIdx.x] = f(probe.in[threadIdx.x]);
}

__global__ void probe_exp2_approx(const Probe probe) {
  each_word(probe, [](uint32_t x) { return bits_of_float(exp2_approx(float_of_bits(x))); });
}

__global__ void probe_reciprocal_approx(const Probe probe) {
  each_word(probe, [](uint32_t x) { return bits_of_float(reciprocal_approx(float_of_bits(x))); });
}

__global__ void probe_to_tf32(const Probe probe) {
  each_word(probe, [](uint32_t x) { return to_tf32(float_of_bits(x)); });
}

__global__ void probe_float_of_bf16(const Probe probe) {
  each_word(probe,
            [](uint32_t x) { return bits_of_float(float_of_bf16(static_cast<uint16_t>(x))); });
}

__global__ void probe_float_of_f16(const Probe probe) {
  each_word(probe,
            [](uint32_t x) { return bits_of_float(float_of_f16(static_cast<uint16_t>(x))); });
}

// The word and its successor, packed: out[n] = (in[n], in[n ^ 1]).
__global__ void probe_pack_bf16(const Probe probe) {
  const uint32_t other = probe.in[threadIdx.x ^ 1];
  each_word(probe, [=](uint32_t x) { return pack_bf16(float_of_bits(x), float_of_bits(other)); });
}

__global__ void probe_pack_f16(const Probe probe) {
  const uint32_t other = probe.in[threadIdx.x ^ 1];
  each_word(probe, [=](uint32_t x) { return pack_f16(float_of_bits(x), float_of_bits(other)); });
}

// Thread t copies t % 17 bytes of its 16 and all threads' chunks come out, other bytes as zeros.
// Two groups: the even threads' words are waited for first.
__global__ void probe_cp_async(const Probe probe) {
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int t = static_cast<int>(threadIdx.x);
  cp_async_16(shared + 4 * t, probe.in + 4 * t, t % 17);
  cp_async_commit();
  cp_async_16(shared + 128 + 4 * t, probe.in + 4 * t, 16);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  for (int n = 0; n < 4; ++n) probe.out[4 * t + n] = shared[4 * (31 - t) + n];
  cp_async_wait<0>();
  __syncthreads();
  for (int n = 0; n < 4; ++n) probe.out[128 + 4 * t + n] = shared[128 + 4 * (31 - t) + n];
}

// in: four 8 x 8 matrices of 16 bits. out: [thread][4] registers.
template <bool kTransposed>
__global__ void probe_ldmatrix(const Probe probe) {
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int t = static_cast<int>(threadIdx.x);
  for (int n = 0; n < 4; ++n) shared[4 * t + n] = probe.in[4 * t + n];
  __syncthreads();
  uint32_t r[4];
  if (kTransposed)
    ldmatrix_x4_transposed(r, shared + 4 * t);
  else
    ldmatrix_x4(r, shared + 4 * t);
  for (int n = 0; n < 4; ++n) probe.out[4 * t + n] = r[n];
}

// in: [thread][4] registers. out: four 8 x 8 matrices.
template <bool kTransposed>
__global__ void probe_stmatrix(const Probe probe) {
#if defined(FASTATTN_EMULATED) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int t = static_cast<int>(threadIdx.x);
  uint32_t r[4];
  for (int n = 0; n < 4; ++n) r[n] = probe.in[4 * t + n];
  if (kTransposed)
    stmatrix_x4_transposed(shared + 4 * t, r);
  else
    stmatrix_x4(shared + 4 * t, r);
  __syncthreads();
  for (int n = 0; n < 4; ++n) probe.out[4 * t + n] = shared[4 * t + n];
#endif
}

// in: [thread][a 4, b 2, d 4]; out: [thread][d 4].
template <int kKind>
__global__ void probe_mma(const Probe probe) {
  const uint32_t* in = probe.in + 10 * threadIdx.x;
  uint32_t a[4];
  float d[4];
  for (int n = 0; n < 4; ++n) {
    a[n] = in[n];
    d[n] = float_of_bits(in[6 + n]);
  }
  if (kKind == 0) mma_bf16_m16n8k16(d, a, in[4], in[5]);
  if (kKind == 1) mma_f16_m16n8k16(d, a, in[4], in[5]);
  if (kKind == 2) mma_tf32_m16n8k8(d, a, in[4], in[5]);
  for (int n = 0; n < 4; ++n) probe.out[4 * threadIdx.x + n] = bits_of_float(d[n]);
}

}  // namespace cuda
}  // namespace fastattn
