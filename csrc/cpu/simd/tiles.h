// The tiles of AMX: eight registers of 16 rows of 64 bytes, and products of two of them. As
// instructions, or emulated in plain C++ with the same bits, so that kernels can be tested without.
//
// All names have internal linkage, because each file compiles them with its own instructions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fastattn {
namespace {

// The operand of LDTILECFG, of palette 1: eight tiles of at most 16 rows of 64 bytes. A kernel pads
// its blocks with zeros and never uses smaller tiles.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // the upper eight must be 0
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
static_assert(offsetof(TileConfig, row_bytes) == 16 && offsetof(TileConfig, rows) == 48);

// The template arguments are numbers of tiles. Strides are in bytes.
//
// Inline asm, because GCC's intrinsics are macros that take only literals, and its _tile_loadd has
// no memory operand, so the compiler may move the stores of the loaded values after it.
struct HardwareTiles {
  static constexpr bool kEmulated = false;
  static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
  static void release() { asm volatile("tilerelease"); }
  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  // Loads data that is not read again soon: it does not displace other data from L1.
  template <int T>
  static void load_once(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  // C[16, 16] += A[16, 32] B[32, 16] in fp32. A has rows of 32 bf16; B has 16 rows of 16 pairs: row
  // k, pair n holds B[2k, n] and B[2k + 1, n].
  template <int C, int A, int B>
  static void multiply_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // The same product in fp16, which does not flush subnormals. Many assemblers do not know
  // TDPFP16PS: VEX.128.F2.0F38.W0 5C /r, where reg is the sum, rm is A, and vvvv, inverted, is B.
  // (TDPBF16PS has F3 in place of F2: 2 in the last two bits.)
  template <int C, int A, int B>
  static void multiply_f16() {
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"((~B & 15) << 3 | 3),
                 "i"(0xc0 | C << 3 | A));
  }
};

// The same interface in portable C++. It traps where the processor has an illegal instruction: for
// tiles that are not configured, or whose shapes do not match. It also traps at a second
// configure() without a release(), which is legal but means that a kernel kept its tiles too long.
class EmulatedTiles {
 public:
  static constexpr bool kEmulated = true;
  // As ldtilecfg.
  static void configure(const TileConfig& config) {
    Registers& r = registers();
    if (r.configured || config.palette != 1 || config.start_row != 0) __builtin_trap();
    for (int t = 0; t < 16; ++t) {
      const int most_rows = t < 8 ? 16 : 0, most_bytes = t < 8 ? 64 : 0;
      if (config.rows[t] > most_rows || config.row_bytes[t] > most_bytes) __builtin_trap();
    }
    r.config = config;
    r.configured = true;
    __builtin_memset(r.tile, 0, sizeof r.tile);
  }
  static void release() { registers().configured = false; }
  template <int T>
  static void zero() {
    __builtin_memset(in_use().tile[T], 0, sizeof(Tile));
  }

  // As tileloadd.
  template <int T>
  static void load(const void* from, int64_t stride) {
    Registers& r = in_use();
    zero<T>();  // including elements beyond the configured shape
    for (int row = 0; row < r.config.rows[T]; ++row)
      __builtin_memcpy(r.tile[T][row], static_cast<const char*>(from) + row * stride,
                       r.config.row_bytes[T]);
  }
  template <int T>
  static void load_once(const void* from, int64_t stride) {
    load<T>(from, stride);
  }

  // As tilestored.
  template <int T>
  static void store(void* to, int64_t stride) {
    Registers& r = in_use();
    for (int row = 0; row < r.config.rows[T]; ++row)
      __builtin_memcpy(static_cast<char*>(to) + row * stride, r.tile[T][row],
                       r.config.row_bytes[T]);
  }
  // Tile C += tile A x tile B, of pairs of bf16.
  template <int C, int A, int B>
  static void multiply_bf16() {
    multiply<C, A, B>([](uint32_t half) { return float_of(flushed(half << 16)); });
  }
  // Tile C += tile A x tile B, of pairs of fp16.
  template <int C, int A, int B>
  static void multiply_f16() {
    multiply<C, A, B>(float_of_f16);
  }

 private:
  typedef uint32_t Tile[16][16];
  struct Registers {
    TileConfig config;
    bool configured = false;
    alignas(64) Tile tile[8] = {};
  };
  static Registers& registers() {
    static thread_local Registers own;
    return own;
  }
  // The registers of this thread; the instruction traps on a thread that has not configured them.
  static Registers& in_use() {
    Registers& r = registers();
    if (!r.configured) __builtin_trap();
    return r;
  }

  static float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }
  // The bits of x, with subnormals flushed to zero: operands and results, whatever MXCSR says.
  static uint32_t flushed(uint32_t bits) {
    return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits;
  }
  static uint32_t flushed(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return flushed(bits);
  }
  // Also converts subnormals, whatever MXCSR says.
  static float float_of_f16(uint32_t half) {
    const uint32_t sign = (half & 0x8000) << 16, exponent = half & 0x7c00;
    if (exponent == 0) {
      const float size = static_cast<float>(half & 0x3ff) * 0x1p-24f;
      return sign != 0 ? -size : size;
    }
    // Exponents are biased by 15 and by 127; inf and NaN have all bits of the exponent set.
    const uint32_t rebias = exponent == 0x7c00 ? 2 * 112u << 23 : 112u << 23;
    return float_of(sign | (((half & 0x7fff) << 13) + rebias));
  }

  // C += A B, the elements widened by `widen`.
  template <int C, int A, int B, class Widen>
  static void multiply(Widen widen) {
    Registers& r = in_use();
    const TileConfig& c = r.config;
    if (c.rows[C] != c.rows[A] || c.row_bytes[C] != c.row_bytes[B] ||
        c.row_bytes[A] != 4 * c.rows[B])
      __builtin_trap();
    multiply_pairs(r.tile[A], r.tile[B], r.tile[C], widen);
  }
  // Two chains of fused multiply-adds from zero, over the even and the odd elements; then C gets
  // their sum. Everything rounds to nearest, ties to even.
  template <class Widen>
  __attribute__((noinline)) static void multiply_pairs(const Tile& a, const Tile& b, Tile& c,
                                                       Widen widen) {
    float of_b[16][2][16];  // [pair][even, odd][column]
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n) {
        of_b[k][0][n] = widen(b[k][n] & 0xffff);
        of_b[k][1][n] = widen(b[k][n] >> 16);
      }
    for (int m = 0; m < 16; ++m) {
      uint32_t chains[2][16] = {};
      for (int k = 0; k < 16; ++k) {
        const float of_a[2] = {widen(a[m][k] & 0xffff), widen(a[m][k] >> 16)};
        for (int i = 0; i < 2; ++i)
          for (int n = 0; n < 16; ++n)
            chains[i][n] = flushed(__builtin_fmaf(of_a[i], of_b[k][i][n], float_of(chains[i][n])));
      }
      for (int n = 0; n < 16; ++n) {
        const uint32_t sum = flushed(float_of(chains[0][n]) + float_of(chains[1][n]));
        c[m][n] = flushed(float_of(flushed(c[m][n])) + float_of(sum));
      }
    }
  }
};

#if FASTATTN_EMULATED_TILES
typedef EmulatedTiles Tiles;
#else
typedef HardwareTiles Tiles;
#endif

// This thread's tiles within a block. Threads in a parallel region each need their own, and no code
// of another library may run while they are held: without a release every context switch saves 8
// KiB, and that library may use tiles itself.
class TileScope {
 public:
  TileScope() { Tiles::configure(TileConfig{}); }
  ~TileScope() { Tiles::release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace
}  // namespace fastattn
