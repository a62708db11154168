// Encodes sentences as memories, m_i = sum_j l_j o A[x_ij] + T_i, and computes the gradients of A
// and T. m_i is 0 for a sentence without words. Embeddings [B, N, J, D] are never stored, and no
// sum uses atomics.
#pragma once
#include "../params.h"
#include "columns.h"

namespace fastattn {
namespace cuda {

constexpr int kEncodeThreads = 128, kEncodeWarps = kEncodeThreads / 32;

// A token outside the table is skipped like padding, so it is never read.
FASTATTN_DEVICE bool is_word(const EncodeMemoryParams& p, int64_t token) {
  return token >= 0 && token < p.V && !(p.has_padding_idx && token == p.padding_idx);
}

// A thread owns a chunk of columns of one sentence, for one table.
template <class T, int kN>
__global__ void __launch_bounds__(kEncodeThreads, 4)
    encode_memory_kernel(const __grid_constant__ EncodeMemoryArguments p) {
  using Storage = typename T::Storage;
  using Chunk = Elements<T, kN>;
  const int thread = static_cast<int>(threadIdx.x);
  const int own = thread & ((1 << p.column_bits) - 1);
  const int64_t row = int64_t(blockIdx.x) * (kEncodeThreads >> p.column_bits) +
                      (thread >> p.column_bits);  // of out
  if (row >= p.R * p.B * p.G * p.N) return;
  const int64_t n = row % p.N, g = row / p.N % p.G, b = row / p.N / p.G % p.B,
                r = row / p.N / p.G / p.B;
  const int64_t* token =
      p.tokens + r * p.token_stride[0] + b * p.token_stride[1] + n * p.token_stride[2];
  const auto* table =
      static_cast<const Storage*>(p.weight.data) + r * p.weight.stride[0] + g * p.weight.stride[1];
  const auto* factors = static_cast<const float*>(p.factors);
  for (int64_t c = int64_t(own) * kN; c < p.D; c += int64_t(kN) << p.column_bits) {
    float sum[kN] = {};
    bool any = false;
    for (int64_t j = 0; j < p.J; ++j) {
      const int64_t word = token[j * p.token_stride[3]];
      if (!is_word(p, word)) continue;
      any = true;
      const Chunk embedding = Chunk::load(table + word * p.weight.stride[2] + c);
      FASTATTN_UNROLL
      for (int e = 0; e < kN; ++e) sum[e] += factors[j * p.factor_stride + c + e] * embedding[e];
    }
    if (p.temporal.data != nullptr && any) {
      const Chunk more =
          Chunk::load(static_cast<const Storage*>(p.temporal.data) + r * p.temporal.stride[0] +
                      g * p.temporal.stride[1] + n * p.temporal.stride[2] + c);
      FASTATTN_UNROLL
      for (int e = 0; e < kN; ++e) sum[e] += more[e];
    }
    Chunk result;
    FASTATTN_UNROLL
    for (int e = 0; e < kN; ++e) result.set(e, sum[e]);
    result.store(static_cast<Storage*>(p.out) + row * p.D + c);
  }
}

// A block owns one row of a gradient, for a word's embedding or a sentence's T, and sums its terms
// in a fixed order.
template <class T, int kN, bool kOfTemporal>
__global__ void __launch_bounds__(kEncodeThreads, 4)
    encode_memory_gradient_kernel(const __grid_constant__ EncodeMemoryArguments p) {
  using Storage = typename T::Storage;
  using Chunk = Elements<T, kN>;
  auto* sums = reinterpret_cast<float*>(dynamic_shared());  // [warps][D]
  const int64_t rows = kOfTemporal ? p.N : p.V;
  const int64_t v = blockIdx.x % rows, g = blockIdx.x / rows % p.G, r = blockIdx.x / rows / p.G;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int width = static_cast<int>(p.D), chunks = width / kN;
  const int64_t* starts = p.starts + r * (p.V + 1) + v;
  const int64_t* order = p.order + r * p.B * p.N * p.J;
  const uint8_t* sentences = p.sentences + r * p.B * p.N + v;
  const int64_t first = kOfTemporal ? 0 : starts[0], last = kOfTemporal ? p.B : starts[1];
  const auto* grad =
      static_cast<const Storage*>(p.grad) + r * p.grad_stride[0] + g * p.grad_stride[2];
  const auto* factors = static_cast<const float*>(p.factors);

  const int groups = 32 / p.lanes;
  for (int c0 = 0; c0 < chunks; c0 += p.lanes) {
    const int c = c0 + lane % p.lanes;
    float sum[kN] = {};
    FASTATTN_UNROLL_BY(4)
    for (int64_t i = first + warp * groups + lane / p.lanes; i < last; i += kEncodeWarps * groups) {
      if (c >= chunks) continue;
      int64_t b = i, n = v, j = 0;
      if (kOfTemporal) {
        if (sentences[b * p.N] == 0) continue;
      } else {
        const auto place = static_cast<uint64_t>(order[i]);
        j = place % p.J, n = place / p.J % p.N, b = place / p.J / p.N;
      }
      const Chunk x = Chunk::load(grad + b * p.grad_stride[1] + n * p.grad_stride[3] + c * kN);
      FASTATTN_UNROLL
      for (int e = 0; e < kN; ++e)
        sum[e] += kOfTemporal ? x[e] : factors[j * p.factor_stride + c * kN + e] * x[e];
    }
    sum_groups<kN>(sum, p.lanes, c, chunks, sums + warp * width);
  }
  __syncthreads();
  auto* result = static_cast<Storage*>(kOfTemporal ? p.grad_temporal : p.grad_weight) +
                 int64_t(blockIdx.x) * p.D;
  for (int d = static_cast<int>(threadIdx.x); d < width; d += kEncodeThreads) {
    float sum = 0.0f;
    FASTATTN_UNROLL
    for (int n = 0; n < kEncodeWarps; ++n) sum += sums[n * width + d];
    result[d] = narrow<T>(sum);
  }
}

}  // namespace cuda
}  // namespace fastattn
