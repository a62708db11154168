// What the kernels for Hopper (sm_90a) share: tiles that TMA fills and wgmma reads, the pipeline
// between them, and which tile of queries or keys a block of threads takes next.
//
// One warpgroup, the producer, gives most of its registers to two others, the consumers. Its first
// warp loads; its second clears what must not be read. See docs/hopper.md.
#pragma once
#include "../../ptx/barrier.h"
#include "../../ptx/registers.h"
#include "../../ptx/tma.h"
#include "../../ptx/wgmma.h"
#include "../scores.h"
#include "../sdpa_pairs.h"
#include "../softmax.h"
#include "../varlen.h"

namespace fastattn {
namespace cuda {

namespace hopper {

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kRows = 64 * kConsumers;  // of the tile that stays: queries, or keys

// Those of bar.sync; 0 is __syncthreads.
enum NamedBarrier {
  kTurnBarrier = 1,                           // + c: consumer c may begin products
  kClearBarrier = kTurnBarrier + kConsumers,  // the consumers meet before and after clearing rows
};

// A block is launched with so many registers a thread, of 64 Ki, and shares them out anew: what
// consumers take the producer must have given, or they wait for ever.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                  (1 + kConsumers) * kLaunchRegisters,
              "more registers than a block has");
// What a consumer needs beside its sums and scores: addresses, indices, the softmax.
constexpr int kSpareRegisters = 40;
constexpr int kMaxSharedBytes = 227 << 10;  // of a block

// [rows, 64] elements of 16 bits, 128 bytes a row, swizzled by TMA; `columns` of them side by side.
constexpr int panels_of(int columns) { return (columns + 63) / 64; }

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
  int tiles_of_head;                                         // of one batch entry, packed: of all
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

  // The swizzle is a pattern of 1024 bytes, and a tile begins where one does.
  struct alignas(1024) Storage {
    char data[kBytes];
  };

  char* data;

  // The offset has 32 bits: with 64 nvcc peels the loops of the producer.
  static FASTATTN_DEVICE SwizzledTile nth(Storage* tiles, int n) {
    return {tiles->data + n * kBytes};
  }

  // Columns 16 step, ... of its rows as a, or as b of x tile^T, from of_rows() on.
  // Rows 16 step, ... of all columns as b of x tile, from of_columns() on.
  FASTATTN_DEVICE MatrixDescriptor of_rows() const {
    return describe_matrix(shared_address_of(data), 16, 1024);
  }
  FASTATTN_DEVICE MatrixDescriptor of_columns() const {
    return describe_matrix(shared_address_of(data), kPanelBytes, 1024);
  }
  static FASTATTN_DEVICE int columns_at(int step) { return step / 4 * kPanelBytes + step % 4 * 32; }
  static FASTATTN_DEVICE int rows_at(int step) { return step * 2048; }

  // By one warp, all of which has waited for the tile to be empty; `rows` of the box, all of which
  // are announced.
  FASTATTN_DEVICE void load(const TensorMap& map, uint64_t* barrier, int rows, int c1, int c2,
                            int c3) const {
    // A lane that still looks for the tile to be empty would miss it: the next phase begins here.
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      mbarrier_arrive_expect(barrier, rows * 128 * kPanels);
      FASTATTN_UNROLL
      for (int n = 0; n < kPanels; ++n)
        tma_load(data + n * kPanelBytes, map, barrier, 64 * n, c1, c2, c3);
    }
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

// A tile of queries that stays while keys pass, kKeys in a step.
template <int kKeys>
struct QueryTile {
  AttentionArguments p;
  int b, h_kv, i0, last_query;
  Range keys;        // that some query sees
  int begin, count;  // the first key of the first step, and steps

  FASTATTN_DEVICE int key(int j) const { return begin + j * kKeys; }
  // Do keys that no query sees come with step j? Those outside of the tensor are zeros.
  FASTATTN_DEVICE bool is_edge(int j, int64_t tensor_rows) const {
    const int first = key(j), last = first + kKeys;
    return first < keys.begin || (keys.end < last && keys.end < tensor_rows - p.k_row);
  }
};

// f(tile) for each of this block of threads that has keys to see, or for each at all. By whole
// warps.
template <int kKeys, bool kAll, class F>
FASTATTN_DEVICE void for_each_query_tile(const HopperArguments& given, F f) {
  for (int round = 0;; ++round) {
    const int n = tile_of_round(round);
    if (n >= given.tiles) break;
    QueryTile<kKeys> tile{};
    tile.p = given;
    Block block;
    if (!enter_tile<true>(given, n, tile.p, block)) continue;
    tile.b = block.b;
    tile.h_kv = block.h;
    tile.i0 = block.row;
    const int rows = static_cast<int>(tile.p.Lq);
    tile.last_query = rows < tile.i0 + given.tile_rows ? rows : tile.i0 + given.tile_rows;
    tile.keys = keys_of_queries(tile.p, tile.i0, tile.last_query);
    tile.begin = tile.keys.begin / kKeys * kKeys;
    const int length = tile.keys.end - tile.begin;
    tile.count = tile.keys.end <= tile.keys.begin ? 0 : (length + kKeys - 1) / kKeys;
    if (kAll || tile.count > 0) f(tile);
  }
}

// Of a consumer's thread: row r of its two, among the rows of the tile.
FASTATTN_DEVICE int row_of_thread(int r) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  return thread / 32 * 16 + 8 * r + thread % 32 / 4;
}

// Row n of a tile is query n / group of head n % group; rows that are left over are none.
template <class Tile>
FASTATTN_DEVICE int query_of_row(const HopperArguments& given, const Tile& tile, int row) {
  return row < given.tile_rows * given.group ? tile.i0 + row / given.group
                                             : static_cast<int>(tile.p.Lq);
}
template <class Tile>
FASTATTN_DEVICE int head_of_row(const HopperArguments& given, const Tile& tile, int row) {
  return tile.h_kv * given.group + row % given.group;
}

// Steps all of whose keys all queries of a consumer see, if only the window counts.
template <int kKeys>
FASTATTN_DEVICE Range all_seen(const HopperArguments& given, const QueryTile<kKeys>& tile,
                               int consumer) {
  const int first = tile.i0 + 64 * consumer / given.group;
  const int last = tile.i0 + (64 * consumer + 63) / given.group;
  const Range of_first = visible_keys(tile.p, first);
  const Range of_last = visible_keys(tile.p, last < tile.last_query ? last : tile.last_query - 1);
  return {(of_last.begin - tile.begin + kKeys - 1) / kKeys, (of_first.end - tile.begin) / kKeys};
}

// x[4 n + 0, 1] * factor, of a row's kColumns columns, to row `row` of head (b, h), if it is there.
// The four lanes of a row exchange what they have, so that each writes 16 bytes, and all 64 in a
// line.
template <class T, int kColumns>
FASTATTN_DEVICE void store_row(const float* x, float factor, const Tensor4& out, int b, int h,
                               int64_t row, int64_t columns, bool there) {
  struct alignas(16) Chunk {
    uint32_t x[4];
  };
  const int lane = static_cast<int>(threadIdx.x) & 3;
  auto* to = static_cast<uint16_t*>(out.data) + b * out.stride[0] + h * out.stride[1] +
             row * out.stride[2];
  FASTATTN_UNROLL
  for (int n = 0; n < kColumns / 8; n += 4) {
    uint32_t pairs[4];  // of tiles n..n + 3; then of tile n + lane, its four
    FASTATTN_UNROLL
    for (int t = 0; t < 4; ++t)
      pairs[t] = T::pack(x[4 * (n + t)] * factor, x[4 * (n + t) + 1] * factor);
    exchange_in_fours(pairs, lane);
    const int column = 8 * (n + lane);
    if (!there) continue;
    if (column + 8 <= columns) {
      *reinterpret_cast<Chunk*>(to + column) = {{pairs[0], pairs[1], pairs[2], pairs[3]}};
    } else {
      FASTATTN_UNROLL
      for (int e = 0; e < 8; ++e)
        if (column + e < columns)
          to[column + e] = static_cast<uint16_t>(pairs[e / 2] >> 16 * (e % 2));
    }
  }
}

// The rows of a tile whose keys the mask hides from all queries become zeros: 0 times what they
// hold may be NaN. any[2 n + e]: does this thread see key 8 n + 2 (lane % 4) + e? By all consumers.
// Flags, [2, kKeys], have two buffers: those of the next call are cleared while these are read.
template <int kKeys, class Tile>
FASTATTN_DEVICE void clear_unseen(int* flags, int buffer, const bool (&any)[kKeys / 4],
                                  const Tile& tile) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  int* mine = flags + buffer * kKeys;
  int* next = flags + (1 - buffer) * kKeys;
  FASTATTN_UNROLL
  for (int n = 0; n < kKeys / 4; ++n)  // from several threads, but always 1
    if (any[n]) mine[n / 2 * 8 + thread % 4 * 2 + n % 2] = 1;
  barrier_sync(kClearBarrier, kConsumerThreads);
  for (int key = thread; key < kKeys; key += kConsumerThreads) next[key] = 0;
  tile.template clear_rows<kConsumerThreads>(thread, [&](int row) { return mine[row] != 0; });
  fence_proxy_async();
  barrier_sync(kClearBarrier, kConsumerThreads);
}

// Without options the stats of a query are kept in the units of the exponent, so that
// p = 2^(unit q . k - hi) and ds = p (dp - delta). `unit` is the forward pass's own. A low word of
// the lse would be no more than the rounding of q . k.
FASTATTN_DEVICE float exponent_unit(const AttentionArguments& p) { return p.scale_float * kLog2e; }

template <bool kGeneral>
FASTATTN_DEVICE RowStats prepared(const RowStats& row) {
  if (kGeneral) return row;
  constexpr double kLog2eDouble = 1.4426950408889634;
  const double lse = (static_cast<double>(row.hi) + static_cast<double>(row.lo)) * kLog2eDouble;
  return {static_cast<float>(lse), 0.0f, row.delta + row.rest, 0.0f};
}

FASTATTN_DEVICE float weight_of(float dot, float unit, const RowStats& row) {
  return exp2_approx(fmaf(dot, unit, -row.hi));
}

}  // namespace hopper
}  // namespace cuda
}  // namespace fastattn
