#include "mma.h"

#include "arithmetic.h"

namespace emulator {

namespace {

struct Argument {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// The elements of a register: two of 16 bits, or one tf32, whose lower 13 bits do not count.
template <Format format>
void widen(uint32_t x, float* to) {
  using namespace fastattn::cuda;
  if (format == Format::tf32) {
    to[0] = float_of_bits(x & ~0x1FFFu);
  } else {
    for (int half = 0; half < 2; ++half) {
      const auto bits = static_cast<uint16_t>(x >> 16 * half);
      to[half] = format == Format::bf16 ? float_of_bf16(bits) : float_of_f16(bits);
    }
  }
}

template <Format format>
void execute(void** arguments) {
  constexpr int each = format == Format::tf32 ? 1 : 2;  // elements in a register
  constexpr int depth = 8 * each;
  float a[16][depth], b[depth][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* x = static_cast<Argument*>(arguments[lane]);
    const int g = lane / 4, q = lane % 4;
    for (int n = 0; n < 4; ++n) {
      widen<format>(x->a[n], &a[g + n % 2 * 8][(q + n / 2 * 4) * each]);
      d[g + n / 2 * 8][2 * q + n % 2] = x->d[n];
    }
    for (int n = 0; n < 2; ++n) {
      float column[each];
      widen<format>(x->b[n], column);
      for (int k = 0; k < each; ++k) b[(q + n * 4) * each + k][g] = column[k];
    }
  }
  // The columns are innermost, so that the compiler makes vectors of them; each sums over k in order.
  for (int m = 0; m < 16; ++m) {
    float sums[8] = {};
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < 8; ++n) sums[n] += a[m][k] * b[k][n];
    for (int n = 0; n < 8; ++n) d[m][n] += sums[n];
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < 4; ++n)
      static_cast<Argument*>(arguments[lane])->d[n] = d[lane / 4 + n / 2 * 8][lane % 4 * 2 + n % 2];
}

}  // namespace

void multiply(Format format, float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Place place) {
  Argument mine{d, a, {b0, b1}};
  warp_together("mma.sync", &mine, place, [=](void** arguments) {
    if (format == Format::bf16) return execute<Format::bf16>(arguments);
    if (format == Format::f16) return execute<Format::f16>(arguments);
    execute<Format::tf32>(arguments);
  });
}

}  // namespace emulator
