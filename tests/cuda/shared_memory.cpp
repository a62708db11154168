// Prints the dynamic shared memory of the plain kernels in bfloat16, which no cubin tells: name, width
// and bytes. For tests/support/machine_code.py.
#include <cstdio>

#include "../../csrc/cuda/kernels/decode.h"
#include "../../csrc/cuda/kernels/hopper/sdpa_backward_kv.h"
#include "../../csrc/cuda/kernels/hopper/sdpa_backward_q.h"
#include "../../csrc/cuda/kernels/hopper/sdpa_forward.h"
#include "../../csrc/cuda/kernels/sdpa_backward.h"
#include "../../csrc/cuda/kernels/sdpa_forward.h"

using namespace fastattn::cuda;

template <int kD>
void print() {
  std::printf("attention_forward %d %d\n", kD, ForwardShape<Bf16, kD, false>::kSharedBytes);
  const int of_backward = BackwardShape<Bf16, kD>::kBits;
  std::printf("attention_backward_q %d %d\n", kD, of_backward);
  std::printf("attention_backward_kv %d %d\n", kD, of_backward);
  std::printf("decode_split %d %d\n", kD, DecodeShape<Bf16, kD>::kSharedBytes);
}

template <int kQ, int kV>
void print_hopper() {
  auto one = [](const char* name, size_t bytes) {
    std::printf("attention_%s_hopper %d/%d %zu\n", name, kQ, kV, bytes);
  };
  one("forward", sizeof(typename HopperForwardShape<kQ, kV, false>::SharedStorage));
  one("backward_q", sizeof(typename HopperBackwardQShape<kQ, kV, false>::SharedStorage));
  one("backward_kv", sizeof(typename HopperBackwardKvShape<kQ, kV, false>::SharedStorage));
}

int main() {
  print<64>();
  print<128>();
  print<256>();
  print_hopper<64, 64>();
  print_hopper<96, 96>();
  print_hopper<128, 128>();
  print_hopper<192, 128>();
  print_hopper<192, 192>();
  print_hopper<256, 256>();
}
