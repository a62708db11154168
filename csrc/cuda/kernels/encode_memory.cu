#include "encode_memory.h"

#include "../launch.h"
#include "choose.h"

namespace fastattn {
namespace cuda {

namespace {

using T = FASTATTN_ELEMENT;

// The launch of a kernel, with the sizes of the call for its error.
Launch launch_of(const char* name, const EncodeMemoryArguments& p, int64_t blocks, int64_t shared,
                 uintptr_t stream) {
  auto text = [](int64_t n) { return std::to_string(n); };
  return {name,
          blocks,
          kEncodeThreads,
          static_cast<int>(shared),
          stream,
          "R=" + text(p.R) + " G=" + text(p.G) + " B=" + text(p.B) + " N=" + text(p.N) +
              " J=" + text(p.J) + " V=" + text(p.V) + " D=" + text(p.D)};
}

// A thread encodes kN columns of a sentence.
template <int kN>
void forward(EncodeMemoryArguments p, uintptr_t stream) {
  while (1 << p.column_bits < kEncodeThreads && int64_t{kN} << p.column_bits < p.D) ++p.column_bits;
  const int64_t blocks = blocks_of(p.R * p.B * p.G * p.N, kEncodeThreads >> p.column_bits);
  launch(launch_of("encode_memory", p, blocks, 0, stream), encode_memory_kernel<T, kN>, p);
}

// One kernel for the gradient of the embeddings, and one for the temporal encoding if it is wanted.
template <int kN>
void backward(EncodeMemoryArguments p, uintptr_t stream) {
  p.lanes = lanes_of_row<kN>(p.D);
  const int64_t shared = 4 * kEncodeWarps * p.D;
  launch(launch_of("encode_memory_gradient", p, p.R * p.G * p.V, shared, stream),
         encode_memory_gradient_kernel<T, kN, false>, p);
  if (p.grad_temporal == nullptr) return;
  launch(launch_of("encode_memory_temporal_gradient", p, p.R * p.G * p.N, shared, stream),
         encode_memory_gradient_kernel<T, kN, true>, p);
}

}  // namespace

// Launches the kernel of the memory, [R, B, G, N, D]. Aligned rows are read in whole chunks.
void encode_memory_forward(const FASTATTN_ELEMENT*, const EncodeMemoryArguments& p, bool aligned,
                           uintptr_t stream) {
  if (p.D == 0) return;
  constexpr int kN = kChunk<T>;
  aligned ? forward<kN>(p, stream) : forward<1>(p, stream);
}

// Launches the kernels of the gradients.
void encode_memory_backward(const FASTATTN_ELEMENT*, const EncodeMemoryArguments& p, bool aligned,
                            uintptr_t stream) {
  if (p.D == 0) return;
  constexpr int kN = kChunk<T>;
  aligned ? backward<kN>(p, stream) : backward<1>(p, stream);
}

}  // namespace cuda
}  // namespace fastattn
