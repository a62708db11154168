// A stand-in for a tile unit that runs the loop of csrc/cpu/peaks/tiles.h and counts: what the
// configuration says a product is, which tiles it took, and whether they held anything.
#include "../../csrc/cpu/peaks/tiles.h"

#include <cstring>

namespace {

struct Count {
  uint8_t config[64];      // the operand of LDTILECFG, as bytes
  int64_t operations;      // multiplications and additions of all products
  int64_t accumulated[8];  // products into each tile
  int64_t read[8];         // products out of each
  int64_t from_nothing;    // products of a tile that was not loaded
  int64_t loads;
  int64_t released;  // products that had been made when the tiles were given back
};

struct CountingUnit {
  Count* count;
  bool* loaded;
  fastattn::TileConfig* config;

  void configure(const fastattn::TileConfig& given) {
    std::memcpy(count->config, &given, sizeof given);
    *config = given;
  }
  template <int T>
  void load(const void* from, int64_t) {
    // Values, or the unit would multiply zeros.
    bool any = false;
    for (int i = 0; i < config->rows[T] * config->row_bytes[T]; ++i)
      any |= static_cast<const char*>(from)[i] != 0;
    loaded[T] = any;
    ++count->loads;
  }
  template <int C, int A, int B>
  void product() {
    // C[m, n] += sum over k of A[m, k] B[k, n], pairs of two bytes: the shapes are the tiles' own.
    const int64_t m = config->rows[C], n = config->row_bytes[C] / 4,
                  pairs = config->row_bytes[A] / 4;
    if (m != config->rows[A] || pairs != config->rows[B] || n != config->row_bytes[B] / 4)
      count->operations = -1;
    count->operations += 2 * m * n * pairs * 2;
    ++count->accumulated[C];
    ++count->read[A];
    ++count->read[B];
    count->from_nothing += !loaded[A] || !loaded[B];
  }
  void release() {
    for (int64_t products : count->accumulated) count->released += products;
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) double count_tiles(Count* count, int looks) {
  bool loaded[8] = {};
  fastattn::TileConfig config;
  // The clock: as many looks at it, and the time is over.
  int seen = 0;
  return fastattn::tile_operations(CountingUnit{count, loaded, &config}, 1.0,
                                   [&] { return seen++ < looks ? 0.0 : 2.0; });
}
