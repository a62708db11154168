// Shared by the kernels for Hopper (sm_90a): tiles that TMA fills and wgmma reads, the pipeline
// between them, and the order in which blocks of threads take tiles of queries or keys.
//
// One warpgroup, the producer, gives most of its registers to the two others, the consumers. Its
// first warp loads; its second warp clears rows that must not be read. See docs/gpu-kernels.md.
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
constexpr int kRows = 64 * kConsumers;  // of the tile that stays: queries or keys

// The barriers of bar.sync; 0 is __syncthreads.
enum NamedBarrier {
  kTurnBarrier = 1,                           // + c: consumer c may issue products
  kClearBarrier = kTurnBarrier + kConsumers,  // joins the consumers before and after clearing
};

// A block is launched with this many registers per thread, of 64 Ki, and redistributes them. The
// producer must release as many as the consumers take; otherwise the consumers deadlock.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                  (1 + kConsumers) * kLaunchRegisters,
              "more registers than a block has");
// Registers of a consumer in addition to its sums and scores: addresses, indices, the softmax.
constexpr int kSpareRegisters = 40;
constexpr int kMaxSharedBytes = 227 << 10;  // per block

// The number of panels for `columns` columns. A panel is [rows, 64] elements of 16 bits, 128 bytes
// per row, swizzled by TMA.
constexpr int panels_of(int columns) { return (columns + 63) / 64; }

}  // namespace hopper

// An operand as TMA reads it. A dimension whose stride is 0 has size 1 in the map and step 0.
struct TensorOperand {
  TensorMap map;              // [B, H, L, columns]
  int head_step, batch_step;  // 0 if all heads, or batch entries, are the same data
};

// The arguments of a kernel for Hopper. Heads that share keys are packed: row n of a tile of
// queries is query n / group of head n % group.
struct HopperArguments : AttentionArguments {
  TensorOperand q_operand, k_operand, v_operand, g_operand;  // g: the gradient of the output
  int group;                                                 // Hq / Hkv
  int tile_rows;                                             // queries or keys of a tile
  int heads;                                                 // Hkv, times B if not packed
  int tiles_of_head;                                         // of one batch entry, packed: of all
  int section_heads;  // heads whose keys and values fit in the L2 cache
  int tiles;          // in total
};

namespace hopper {

// A tile [kTileRows, kColumns] in shared memory, as an operand of wgmma.
template <int kTileRows, int kColumns>
struct SwizzledTile {
  static constexpr int kPanels = panels_of(kColumns), kPanelBytes = kTileRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kTileRows % 8 == 0, "the swizzle pattern has 8 rows");

  // The swizzle pattern repeats every 1024 bytes, and a tile begins at such a boundary.
  struct alignas(1024) Storage {
    char data[kBytes];
  };

  char* data;

  // The offset has 32 bits: with 64 nvcc peels the loops of the producer.
  static FASTATTN_DEVICE SwizzledTile nth(Storage* tiles, int n) {
    return {tiles->data + n * kBytes};
  }

  // of_rows(): columns 16 step, ... of its rows, as operand a, or as b of x tile^T.
  // of_columns(): rows 16 step, ... of all columns, as b of x tile.
  FASTATTN_DEVICE MatrixDescriptor of_rows() const {
    return describe_matrix(shared_address_of(data), 16, 1024);
  }
  FASTATTN_DEVICE MatrixDescriptor of_columns() const {
    return describe_matrix(shared_address_of(data), kPanelBytes, 1024);
  }
  // Bytes to the operand of a step, for each of the two.
  static FASTATTN_DEVICE int columns_at(int step) { return step / 4 * kPanelBytes + step % 4 * 32; }
  static FASTATTN_DEVICE int rows_at(int step) { return step * 2048; }

  // Called by one warp whose lanes have all waited for the empty tile. Announces the bytes of all
  // `rows` rows of the box to the barrier.
  FASTATTN_DEVICE void load(const TensorMap& map, uint64_t* barrier, int rows, int c1, int c2,
                            int c3) const {
    // A lane that still polls for the empty tile would miss its phase, because the next phase
    // begins here.
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      mbarrier_arrive_expect(barrier, rows * 128 * kPanels);
      FASTATTN_UNROLL
      for (int n = 0; n < kPanels; ++n)
        tma_load(data + n * kPanelBytes, map, barrier, 64 * n, c1, c2, c3);
    }
  }

  // Zeroes the rows that `keep` rejects. Called by kCount threads, numbered from 0 by `thread`;
  // then fence_proxy_async.
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

// The next buffer in a ring of kStages buffers, and the parity of its barriers.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;
  // Moves to the next buffer; the parity changes after each round.
  FASTATTN_DEVICE void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  FASTATTN_DEVICE int previous() const { return (stage == 0 ? kStages : stage) - 1; }
};

// Returns x, which must be equal in all threads of a warp. The compiler then knows that it is, and
// keeps values computed from it once per warp.
FASTATTN_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The tile of this block of threads in its n-th round. Rounds go alternately forwards and backwards
// over the blocks, so that tiles ordered by their work are divided evenly. There is no tile from
// `tiles` on.
FASTATTN_DEVICE int tile_of_round(int round) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + (round & 1 ? blocks - 1 - block : block);
}

// Finds the tile's batch entry, head of keys and first row; false if there are no such rows. Called
// by whole warps. Heads are processed section by section, so that their keys and values stay in the
// L2 cache. Within a section the last queries come first, because with a causal mask they have the
// most work.
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

// A tile of queries that stays while keys are streamed, kKeys per step.
template <int kKeys>
struct QueryTile {
  AttentionArguments p;
  int b, h_kv, i0, last_query;
  Range keys;        // visible to at least one query
  int begin, count;  // the first key, and the number of steps

  // The first key of step j.
  FASTATTN_DEVICE int key(int j) const { return begin + j * kKeys; }
  // Does step j load keys that no query can see? Keys outside of the tensor are loaded as zeros and
  // do not count.
  FASTATTN_DEVICE bool is_edge(int j, int64_t tensor_rows) const {
    const int first = key(j), last = first + kKeys;
    return first < keys.begin || (keys.end < last && keys.end < tensor_rows - p.k_row);
  }
};

// Calls f(tile) for each tile of this block of threads that has visible keys, or with kAll for each
// tile. Called by whole warps.
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

// Zeroes the rows of keys that no query can see, because 0 times NaN or inf would be NaN. Of each
// stage, tile(stage) is the buffer; landed[stage] completes when rows to clear have arrived, and
// full[stage] when they are cleared. Called by one warp.
template <int kKeys, int kStages, class Tile>
FASTATTN_DEVICE void clear_edges(const HopperArguments& given, uint64_t* landed, uint64_t* full,
                                 Tile tile) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  Ring<kStages> ring;
  int parities = 0;  // of `landed`, one bit per stage
  for_each_query_tile<kKeys, false>(given, [&](const QueryTile<kKeys>& work) {
    for (int j = 0; j < work.count; ++j) {
      if (work.is_edge(j, given.Lk)) {
        mbarrier_wait(landed + ring.stage, parities >> ring.stage & 1);
        parities ^= 1 << ring.stage;
        tile(ring.stage).template clear_rows<32>(lane, [&](int row) {
          return work.keys.has(work.key(j) + row);
        });
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full + ring.stage);
      }
      ring.advance();
    }
  });
}

// The row in the tile of row r, 0 or 1, of a consumer's thread.
FASTATTN_DEVICE int row_of_thread(int r) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  return thread / 32 * 16 + 8 * r + thread % 32 / 4;
}

// Row n of a tile is query n / group of head n % group. Rows left over are no queries.
template <class Tile>
FASTATTN_DEVICE int query_of_row(const HopperArguments& given, const Tile& tile, int row) {
  return row < given.tile_rows * given.group ? tile.i0 + row / given.group
                                             : static_cast<int>(tile.p.Lq);
}
// The head of a row, see query_of_row().
template <class Tile>
FASTATTN_DEVICE int head_of_row(const HopperArguments& given, const Tile& tile, int row) {
  return tile.h_kv * given.group + row % given.group;
}

// The steps whose keys are all visible to all queries of a consumer, as far as the window decides.
template <int kKeys>
FASTATTN_DEVICE Range all_seen(const HopperArguments& given, const QueryTile<kKeys>& tile,
                               int consumer) {
  const int first = tile.i0 + 64 * consumer / given.group;
  const int last = tile.i0 + (64 * consumer + 63) / given.group;
  const Range of_first = visible_keys(tile.p, first);
  const Range of_last = visible_keys(tile.p, last < tile.last_query ? last : tile.last_query - 1);
  return {(of_last.begin - tile.begin + kKeys - 1) / kKeys, (of_first.end - tile.begin) / kKeys};
}

// Stores x[4 n + 0, 1] * factor, a row of kColumns columns, to row `row` of head (b, h), if
// `there`. The four lanes of a row exchange elements, so that each writes 16 bytes and all four
// write 64 contiguous bytes.
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
    uint32_t pairs[4];  // of tiles n..n + 3; after the exchange the four of tile n + lane
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

// Zeroes the rows of a tile whose keys the options hide from all queries, because 0 times NaN or
// inf would be NaN. any[2 n + e]: can a query of this thread see key 8 n + 2 (lane % 4) + e? Called
// by all consumers. The flags, [2, kKeys], have two buffers: the flags of the next call are cleared
// while the flags of this call are read.
template <int kKeys, class Tile>
FASTATTN_DEVICE void clear_unseen(int* flags, int buffer, const bool (&any)[kKeys / 4],
                                  const Tile& tile) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  int* mine = flags + buffer * kKeys;
  int* next = flags + (1 - buffer) * kKeys;
  FASTATTN_UNROLL
  for (int n = 0; n < kKeys / 4; ++n)  // written by several threads, but always 1
    if (any[n]) mine[n / 2 * 8 + thread % 4 * 2 + n % 2] = 1;
  barrier_sync(kClearBarrier, kConsumerThreads);
  for (int key = thread; key < kKeys; key += kConsumerThreads) next[key] = 0;
  tile.template clear_rows<kConsumerThreads>(thread, [&](int row) { return mine[row] != 0; });
  fence_proxy_async();
  barrier_sync(kClearBarrier, kConsumerThreads);
}

// Without options the stats of a query are kept in units of the exponent, so that
// p = 2^((unit q . k - hi) - lo) and ds = p (dp - delta), with the `unit` of the forward pass. The
// low word matters although the rounding error of q . k is as large, because q . k has the same
// error in the forward pass.
FASTATTN_DEVICE float exponent_unit(const AttentionArguments& p) { return p.scale_float * kLog2e; }

// The stats of a row in these units; with options they are left as they are.
template <bool kGeneral>
FASTATTN_DEVICE RowStats prepared(const AttentionArguments& p, const RowStats& row) {
  if (kGeneral) return row;
  const double sum = static_cast<double>(row.hi) + static_cast<double>(row.lo);
  const double lse = sum * exponents_per_score(p.scale_float);
  const float hi = static_cast<float>(lse);
  const bool finite = fabsf(hi) < float_of_bits(0x7f800000u);
  return {hi, finite ? static_cast<float>(lse - hi) : 0.0f, row.delta + row.rest, 0.0f};
}

// The weight of a pair from its product q . k, with the stats that prepared() made.
FASTATTN_DEVICE float weight_of(float dot, float unit, const RowStats& row) {
  return exp2_approx(fmaf(dot, unit, -row.hi) - row.lo);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace fastattn
