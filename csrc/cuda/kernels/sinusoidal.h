// out = x * scale + PE(position): see SinusoidalParams for the angles and docs/sinusoidal.md for
// their accuracy.
//
// The kernel is memory bound. A thread owns one chunk of columns of one row l. It computes the
// encoding once and adds it to that row of every batch row that has the same position there.
#pragma once
#include "../params.h"
#include "vector.h"

namespace fastattn {
namespace cuda {

constexpr int kSinusoidalThreads = 256;
// Batch rows that a thread loads at once.
constexpr int kSinusoidalRows = 4;

struct Waves {
  float sine, cosine;
};

// Sine and cosine of an angle given as a 64-bit fraction of a turn. After adding an eighth of a
// turn, the two top bits are the nearest quadrant, and the other bits are the distance t from it
// plus that eighth, |t| <= 1/8:
//   sin(2 pi t) = t P(t^2), its leading coefficient in two parts, relative error 3e-9
//   cos(2 pi t) = 1 + t^2 Q(t^2), error 2e-10
// The sines of the quadrants are sin t, cos t, -sin t, -cos t; the cosines are one quadrant ahead.
FASTATTN_DEVICE Waves waves_of(uint64_t angle) {
  angle += uint64_t{1} << 61;
  const auto high = static_cast<uint32_t>(angle >> 32);
  const auto distance = static_cast<int32_t>(high & 0x3fffffffu) - 0x20000000;
  // Both words, so that small angles keep their relative accuracy.
  const float t = static_cast<float>(distance) * 0x1p-32f +
                  static_cast<float>(static_cast<uint32_t>(angle)) * 0x1p-64f;
  const float tt = t * t;
  const float rest = (tt * -75.3935628f + 81.5923536f) * tt - 41.3416615f;
  const float s = t * 6.28318548f + t * (rest * tt - 1.95191750e-7f);
  const float c = (((tt * 59.4217088f - 85.4487638f) * tt + 64.9393687f) * tt - 19.7392088f) * tt;
  const bool odd = high & 0x40000000u;
  const uint32_t sign = high & 0x80000000u;
  const uint32_t ahead = sign ^ (odd ? 0x80000000u : 0u);
  return {float_of_bits(bits_of_float(odd ? 1.0f + c : s) ^ sign),
          float_of_bits(bits_of_float(odd ? s : 1.0f + c) ^ ahead)};
}

// PE of columns c0..+kN; zeros at the padding position.
template <int kN>
FASTATTN_DEVICE void encode(float (&pe)[kN], const SinusoidalArguments& p, int64_t position,
                            int64_t c0) {
  const auto turns = static_cast<uint64_t>(position);
  const bool padding = p.has_padding_idx && position == p.padding_idx;
  if (kN > 1 && p.interleaved) {  // D is a multiple of kN: every column has its partner
    FASTATTN_UNROLL
    for (int i = 0; i < kN / 2; ++i) {
      const Waves w = waves_of(turns * p.pair_frequency[c0 / 2 + i]);
      pe[2 * i] = padding ? 0.0f : w.sine;
      pe[2 * i + 1] = padding ? 0.0f : w.cosine;
    }
    return;
  }
  FASTATTN_UNROLL
  for (int i = 0; i < kN; ++i) {
    const float sine = waves_of(turns * p.frequency[c0 + i] + p.phase[c0 + i]).sine;
    pe[i] = padding ? 0.0f : sine;
  }
}

// A block of threads covers 2^column_bits chunks of columns, rows_per_block rows and one group of
// batch rows.
template <class T, int kN>
__global__ void __launch_bounds__(kSinusoidalThreads)
    sinusoidal_kernel(const __grid_constant__ SinusoidalArguments p) {
  using Storage = typename T::Storage;
  using Chunk = Elements<T, kN>;
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned tile = blockIdx.x % p.tiles, group = blockIdx.x / p.tiles;
  const int64_t c0 =
      (int64_t(tile % p.column_blocks) << p.column_bits) + (thread & ((1 << p.column_bits) - 1));
  const int64_t l = int64_t(tile / p.column_blocks) * p.rows_per_block + (thread >> p.column_bits);
  const int64_t first = int64_t(group) * p.group_rows;
  const int64_t last = first + p.group_rows < p.B * p.H ? first + p.group_rows : p.B * p.H;
  if (c0 * kN >= p.D || l >= p.L) return;

  const Storage* x =
      static_cast<const Storage*>(p.x.data) + l * p.x.stride[2] + c0 * kN * p.x.stride[3];
  Storage* out =
      static_cast<Storage*>(p.out.data) + l * p.out.stride[2] + c0 * kN * p.out.stride[3];
  const int64_t* positions = p.positions;
  if (positions != nullptr) positions += l * p.position_stride[2];
  int64_t b = first / p.H, h = first % p.H;
  float pe[kN];

  auto add = [&](const Chunk& from, int64_t to) {
    Chunk sum;
    FASTATTN_UNROLL
    for (int i = 0; i < kN; ++i) sum.set(i, from[i] * p.scale_float + pe[i]);
    sum.store(out + to);
  };
  auto step = [&] {
    if (++h == p.H) h = 0, ++b;
  };

  if (positions == nullptr || (p.position_stride[0] == 0 && p.position_stride[1] == 0)) {
    encode<kN>(pe, p, positions == nullptr ? p.offset + l : *positions, c0 * kN);
    for (int64_t n = first; n < last; n += kSinusoidalRows) {
      Chunk chunk[kSinusoidalRows];
      int64_t to[kSinusoidalRows];
      FASTATTN_UNROLL
      for (int r = 0; r < kSinusoidalRows; ++r) {
        if (n + r >= last) continue;
        chunk[r] = Chunk::load(x + b * p.x.stride[0] + h * p.x.stride[1]);
        to[r] = b * p.out.stride[0] + h * p.out.stride[1];
        step();
      }
      FASTATTN_UNROLL
      for (int r = 0; r < kSinusoidalRows; ++r)
        if (n + r < last) add(chunk[r], to[r]);
    }
    return;
  }
  for (int64_t n = first; n < last; ++n, step()) {
    const int64_t position = positions[b * p.position_stride[0] + h * p.position_stride[1]];
    encode<kN>(pe, p, position, c0 * kN);
    add(Chunk::load(x + b * p.x.stride[0] + h * p.x.stride[1]),
        b * p.out.stride[0] + h * p.out.stride[1]);
  }
}

}  // namespace cuda
}  // namespace fastattn
