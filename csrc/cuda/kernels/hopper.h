// What the kernels for Hopper (sm_90a) share: tiles that TMA fills and wgmma reads, the pipeline
// between them, and which tile of queries or keys a block of threads takes next.
//
// One warpgroup, the producer, gives most of its registers to two others, the consumers. Its first
// warp loads; its second clears what must not be read. See docs/hopper.md.
#pragma once
#include "../ptx/barrier.h"
#include "../ptx/registers.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "scores.h"
#include "sequence.h"

namespace fastattn {
namespace cuda {

namespace hopper {

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRows = 64 * kConsumers;  // of the tile that stays: queries, or keys

// 64 Ki registers a multiprocessor: launched with 168 a thread, then shared out anew.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / 128,
              "more registers than a multiprocessor has");
// What a consumer needs beside its sums and scores: addresses, indices, the softmax.
constexpr int kSpareRegisters = 40;
constexpr int kMaxSharedBytes = 227 << 10;  // of a block

// [rows, 64] elements of 16 bits, 128 bytes a row, swizzled by TMA; `columns` of them side by side.
constexpr int panels_of(int columns) { return (columns + 63) / 64; }
constexpr int tile_bytes(int rows, int columns) { return rows * 128 * panels_of(columns); }

}  // namespace hopper

// A pair of tensor dimensions that TMA leaves out where their stride is 0.
struct TensorOperand {
  TensorMap map;              // [B, H, L, columns]
  int head_step, batch_step;  // 0 where all heads, or batch entries, are the same one
};

// What a kernel for Hopper is given beside the operands themselves. Heads that share keys are
// packed: row n of a tile of queries is query n / group of head n % group.
struct HopperArguments : AttentionArguments {
  TensorOperand q_operand, k_operand, v_operand, g_operand;  // g: the gradient of the output
  int group;                                                 // Hq / Hkv
  int tile_rows;                                             // queries, or keys, of a tile
  int heads;                                                 // Hkv, of all batch entries
  int tiles_of_head;                                         //
  int section_heads;  // heads whose keys and values fit in the L2 cache
  int tiles;          // in all
};

namespace hopper {

// [kTileRows, kColumns] in shared memory, and as an operand of wgmma.
template <int kTileRows, int kColumns>
struct SwizzledTile {
  static constexpr int kPanels = panels_of(kColumns), kPanelBytes = kTileRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kTileRows % 8 == 0, "the pattern of the swizzle has 8 rows");

  char* data;  // aligned to 1024

  // Columns 16 step, ... of its rows as a, or as b of x tile^T, from of_rows() on; and rows 16
  // step,
  // ... of all columns as b of x tile, from of_columns() on.
  FASTATTN_DEVICE MatrixDescriptor of_rows() const {
    return describe_matrix(shared_address_of(data), 16, 1024);
  }
  FASTATTN_DEVICE MatrixDescriptor of_columns() const {
    return describe_matrix(shared_address_of(data), kPanelBytes, 1024);
  }
  static FASTATTN_DEVICE int columns_at(int step) { return step / 4 * kPanelBytes + step % 4 * 32; }
  static FASTATTN_DEVICE int rows_at(int step) { return step * 2048; }

  // By one warp; `rows` of the box, all of which are announced.
  FASTATTN_DEVICE void load(const TensorMap& map, uint64_t* barrier, int rows, int c1, int c2,
                            int c3) const {
    if ((threadIdx.x & 31) == 0) {
      mbarrier_arrive_expect(barrier, rows * 128 * kPanels);
      FASTATTN_UNROLL
      for (int n = 0; n < kPanels; ++n)
        tma_load(data + n * kPanelBytes, map, barrier, 64 * n, c1, c2, c3);
    }
    __syncwarp();  // no lane may be phases behind
  }

  // Rows outside of [first, last), or whose flag is 0, become zeros. By kCount threads, the first
  // of which is `thread` 0; then fence_proxy_async.
  template <int kCount, class Keep>
  FASTATTN_DEVICE void clear_rows(int thread, Keep keep) const {
    struct alignas(16) Chunk {
      uint32_t x[4];
    };
    for (int n = thread; n < kTileRows * 8; n += kCount) {
      if (keep(n / 8)) continue;
      FASTATTN_UNROLL
      for (int panel = 0; panel < kPanels; ++panel)
        *reinterpret_cast<Chunk*>(data + panel * kPanelBytes + n * 16) = {{0, 0, 0, 0}};
    }
  }
};

// The buffer that is next in a ring of kStages of them, and the parity of its barriers.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;
  FASTATTN_DEVICE void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  FASTATTN_DEVICE int previous() const { return (stage == 0 ? kStages : stage) - 1; }
};

// x, which is the same in all threads of a warp, and known to be so: what follows from it is kept
// once for the warp.
FASTATTN_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The n-th tile of a block of threads, of all tiles: in turn forth and back over the blocks, so
// that tiles that are ordered by their work are divided evenly. From `tiles` on there is none.
FASTATTN_DEVICE int tile_of_round(int round) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + (round & 1 ? blocks - 1 - block : block);
}

// By whole warps. The tile's batch entry, head of keys and first row; false if there are no such
// rows. Heads go section by section, so that their keys and values stay in the L2 cache, and within
// a section the last queries come first: with a causal mask theirs is the most work.
template <bool kOfQueries>
FASTATTN_DEVICE bool enter_tile(const HopperArguments& given, int tile, AttentionArguments& p,
                                Block& block) {
  const int tiles = given.tiles_of_head, rows = given.tile_rows;
  const int first = tile / (tiles * given.section_heads) * given.section_heads;
  const int left = given.heads - first;
  const int heads = left < given.section_heads ? left : given.section_heads;
  const int rest = tile - first * tiles, head = first + rest % heads;
  const int n = kOfQueries ? tiles - 1 - rest / heads : rest / heads;
  const int64_t* starts = kOfQueries ? p.q_starts : p.k_starts;
  if (starts == nullptr) {
    const int kv_heads = static_cast<int>(p.Hkv);
    block = {head / kv_heads, head % kv_heads, n * rows};
    return true;
  }
  const int64_t all = kOfQueries ? p.Lq : p.Lk;
  auto begin = [&](int64_t b) { return start_of(starts, b, all) / rows + b; };
  const int b = uniform(last_sequence(p.B, n, begin));
  block = {b, head, uniform(static_cast<int>(n - begin(b)) * rows)};
  enter_sequence(p, b);
  p.Lq = uniform(static_cast<int>(p.Lq));
  p.Lk = uniform(static_cast<int>(p.Lk));
  p.q_row = uniform(p.q_row);
  p.k_row = uniform(p.k_row);
  if (b == p.B) (kOfQueries ? p.Lk : p.Lq) = 0;
  return block.row < (kOfQueries ? p.Lq : p.Lk);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace fastattn
