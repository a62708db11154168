// The tiles of csrc/cpu/simd/tiles.h, real and emulated, for tests/cpu/test_tiles.py. It compares
// their products, and uses the emulated ones wrongly.
#include "../../csrc/cpu/simd/tiles.h"

namespace {

using fastattn::TileConfig;

// A shape of C[m, n] += A[m, 2 k] B[2 k, n] in tiles 3, 5 and 6.
TileConfig shaped(int m, int n, int k) {
  TileConfig config;
  config.rows[3] = config.rows[5] = static_cast<uint8_t>(m);
  config.rows[6] = static_cast<uint8_t>(k);
  config.row_bytes[3] = config.row_bytes[6] = static_cast<uint16_t>(4 * n);
  config.row_bytes[5] = static_cast<uint16_t>(4 * k);
  return config;
}

// c += a b for each of the products, all in rows of 64 bytes.
template <class Tiles>
void multiply(bool f16, const TileConfig& config, const char* a, const char* b, char* c,
              int products) {
  Tiles::configure(config);
  for (int i = 0; i < products; ++i, a += 1024, b += 1024, c += 1024) {
    Tiles::template load<3>(c, 64);
    Tiles::template load<5>(a, 64);
    Tiles::template load_once<6>(b, 64);
    if (f16)
      Tiles::template multiply_f16<3, 5, 6>();
    else
      Tiles::template multiply_bf16<3, 5, 6>();
    Tiles::template store<3>(c, 64);
    Tiles::template zero<3>();
  }
  Tiles::release();
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void emulated(int f16, int m, int n, int k, const char* a, const char* b, char* c,
                     int products) {
  multiply<fastattn::EmulatedTiles>(f16, shaped(m, n, k), a, b, c, products);
}
EXPORT void real(int f16, int m, int n, int k, const char* a, const char* b, char* c,
                 int products) {
  multiply<fastattn::HardwareTiles>(f16, shaped(m, n, k), a, b, c, products);
}
