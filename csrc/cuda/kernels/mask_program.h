// Mask programs: which pairs are visible, by leaves and operators in postfix order (params.h).
//
// A separate kernel reads the program once per call and evaluates it for every tile of 64 x 64
// pairs. The other kernels skip tiles without a visible pair, ignore the program in tiles whose
// pairs are all visible, and compute one bit for each pair of the remaining tiles, in shared
// memory.
#pragma once
#include "../../mask_program.h"
#include "scores.h"
#include "varlen.h"

namespace fastattn {
namespace cuda {

// -- values of a program --------------------------------------------------------------------------

// The value of a program, from the values of its leaves, `width` bits each. The stack is one
// integer with the top in its lowest bits; read_program chooses a width such that it fits.
template <class Leaf>
FASTATTN_DEVICE uint64_t evaluate(const MaskTable& table, int width, Leaf leaf) {
  const uint64_t below = ~uint64_t(0) << width;  // all but the top
  uint64_t stack = 0;
  for (int n = 0; n < table.count; ++n) {
    const MaskStep& step = table.steps[n];
    if (step.kind == MaskKind::all_of)
      stack = stack >> width & (stack | below);
    else if (step.kind == MaskKind::any_of)
      stack = stack >> width | (stack & ~below);
    else
      stack = stack << width | (leaf(n, step) & ~below);
  }
  return stack & ~below;
}

// The program for one head of one batch entry.
struct MaskProgram {
  const AttentionArguments& p;
  const MaskTable& table;
  int b, h;

  // Bit n of the result: is key j + n visible to query i? i < Lq. The keys [j, j + count) are in
  // one tile; the bits of keys past the end are undefined. count is a power of two up to 32.
  FASTATTN_DEVICE uint32_t keys(int i, int j, int count) const {
    const int width = table.width < count ? table.width : count;
    uint32_t word = 0;
    for (int k = 0; k < count; k += width) {
      const uint64_t value = evaluate(table, width, [&](int n, const MaskStep& step) {
        const uint32_t seen = keys_of_leaf(n, step, i, j + k, width);
        return step.negated ? ~seen : seen;
      });
      word |= static_cast<uint32_t>(value) << k;
    }
    return word;
  }

  // How many pairs of a tile are visible. Called by one warp.
  FASTATTN_DEVICE Seen tile(int i0, int j0) const {
    // A value has two bits: may a pair be visible, and are all?
    const uint64_t value = evaluate(table, 2, [&](int, const MaskStep& step) -> uint64_t {
      bool any = false, every = true;
      look_at_leaf(step, i0, j0, any, every);
      int found = (any ? 1 : 0) | (every ? 0 : 2);
      FASTATTN_UNROLL
      for (int lane = 16; lane > 0; lane /= 2) found |= __shfl_xor_sync(0xffffffffu, found, lane);
      any = (found & 1) != 0, every = (found & 2) == 0;
      return step.negated ? (every ? 0 : 1) | (any ? 0 : 2) : (any ? 1 : 0) | (every ? 2 : 0);
    });
    return (value & 1) == 0 ? Seen::none : (value & 2) == 0 ? Seen::some : Seen::all;
  }

 private:
  // The batch entry or head of a leaf that has fewer of them than the call: they repeat.
  static FASTATTN_DEVICE int64_t repeated(int n, int64_t count) {
    return count == 1 ? 0 : static_cast<unsigned>(n) % static_cast<unsigned>(count);
  }

  // The numbers of a leaf for this batch entry and head.
  FASTATTN_DEVICE const int32_t* data_of(const MaskStep& step) const {
    const int64_t row = repeated(b, step.batch);
    if (step.kind != MaskKind::blocks) return step.data + row * step.stride;
    return step.data + (row * step.heads + repeated(h, step.heads)) * step.blocks_q * step.blocks_k;
  }

  // Bits [0, n); n may be anything.
  static FASTATTN_DEVICE uint32_t ones(int64_t n) {
    return static_cast<uint32_t>((uint64_t(1) << clamp_int(n, 0, 32)) - 1);
  }

  // Bit n: does query i see key j + n, by one leaf? Of `width` keys.
  FASTATTN_DEVICE uint32_t keys_of_leaf(int n, const MaskStep& step, int i, int j,
                                        int width) const {
    const int32_t* data = data_of(step);
    const int32_t* of_query = data + p.q_row + i;
    if (step.kind == MaskKind::interval)
      return ones(int64_t(of_query[step.second]) - j) & ~ones(int64_t(of_query[0]) - j);
    uint32_t seen = 0;
    if (step.kind == MaskKind::ids) {
      const int32_t *ids = data + step.second + p.k_row + j, own = of_query[0];
      for (int k = 0; k < width; ++k) seen |= (ids[k] == own ? 1u : 0u) << k;
      return seen;
    }
    const int block_q = static_cast<int>(step.block_q), block_k = static_cast<int>(step.block_k);
    const int words = (block_q + 31) / 32, row = i / block_q, lane = i - row * block_q;
    const int end = clamp_int(p.Lk - j, 0, width);
    for (int k = 0, next; k < end; k = next) {  // keys [k, next) are in one block
      const int column = (j + k) / block_k, key = j + k - column * block_k;
      next = clamp_int(int64_t(k) + block_k - key, 0, end);
      const int32_t state = data[row * step.blocks_k + column];
      if (state == 1) seen |= ones(next) & ~ones(k);
      if (state < 2 || state - 2 >= table.partial[n]) continue;
      const uint32_t* bits = step.bits + (int64_t(state - 2) * block_k + key) * words + lane / 32;
      for (int m = k; m < next; ++m, bits += words) seen |= (*bits >> lane % 32 & 1) << m;
    }
    return seen;
  }

  // Whether any, and whether every, of this lane's pairs of the tile is visible.
  FASTATTN_DEVICE void look_at_leaf(const MaskStep& step, int i0, int j0, bool& any,
                                    bool& every) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int i1 = clamp_int(p.Lq, 0, i0 + kMaskTile), j1 = clamp_int(p.Lk, 0, j0 + kMaskTile);
    const int32_t* data = data_of(step);
    if (step.kind == MaskKind::blocks) {
      const int block_q = static_cast<int>(step.block_q), block_k = static_cast<int>(step.block_k);
      const int row = i0 / block_q, column = j0 / block_k;
      const int rows = (i1 - 1) / block_q + 1 - row, columns = (j1 - 1) / block_k + 1 - column;
      for (int n = lane; n < rows * columns; n += 32) {
        const int32_t state = data[(row + n / columns) * step.blocks_k + column + n % columns];
        any |= state != 0;
        every &= state == 1;
      }
      return;
    }
    for (int i = i0 + lane; i < i1; i += 32) {
      const int32_t* of_query = data + p.q_row + i;
      if (step.kind == MaskKind::interval) {
        const int low = of_query[0], high = of_query[step.second];
        any |= (low > j0 ? low : j0) < (high < j1 ? high : j1);
        every &= low <= j0 && high >= j1;
        continue;
      }
      for (int j = j0; j < j1; ++j) {
        const bool equal = of_query[0] == data[step.second + p.k_row + j];
        any |= equal;
        every &= equal;
      }
    }
  }
};

// Is pair (i, j) visible?
FASTATTN_DEVICE bool program_sees(const AttentionArguments& p, int b, int h, int i, int j) {
  return p.mask_table == nullptr || MaskProgram{p, *p.mask_table, b, h}.keys(i, j, 1) != 0;
}

// -- tiles ----------------------------------------------------------------------------------------

// [mask_rows_of(...), mask_columns]
FASTATTN_DEVICE Seen* tiles_of(const AttentionArguments& p) {
  return reinterpret_cast<Seen*>(p.mask_table + 1);
}

// The tiles of a head; for packed sequences, the tiles of sequence b.
struct MaskTiles {
  const Seen* tiles = nullptr;  // [tiles of queries, columns], null = all are visible
  int64_t columns = 0;

  MaskTiles() = default;
  FASTATTN_DEVICE MaskTiles(const AttentionArguments& p, int b, int h) {
    if (p.mask_table == nullptr) return;
    const int64_t entry = p.mask_table->of_batch ? b : 0, head = p.mask_table->of_heads ? h : 0;
    const int64_t row = p.q_starts == nullptr ? (entry * p.Hq + head) * mask_tiles_of(p.Lq)
                                              : p.q_row / kMaskTile + b;
    columns = p.mask_columns;
    tiles = tiles_of(p) + row * columns;
  }

  // How much of the tile of query i and key j is visible.
  FASTATTN_DEVICE Seen at(int i, int j) const {
    return tiles == nullptr ? Seen::all : tiles[i / kMaskTile * columns + j / kMaskTile];
  }

  // The first key from j on, and before `end`, whose tile has a pair that is visible to the tile of
  // query i. Beyond j it is the first of its tile.
  FASTATTN_DEVICE int next(int i, int j, int end) const {
    while (j < end && at(i, j) == Seen::none) j = j / kMaskTile * kMaskTile + kMaskTile;
    return j;
  }
};

// The bits of a part of a tile, [kQueries, words of kKeys]: 1 = visible.
template <int kQueries, int kKeys>
struct MaskBits {
  static constexpr int kWidth = kKeys < 32 ? kKeys : 32, kWords = kKeys / kWidth;
  static constexpr int kBytes = 4 * kQueries * kWords;

  uint32_t* words;  // in shared memory

  // Called by all threads; a barrier must follow.
  template <int kThreads>
  FASTATTN_DEVICE void fill(const AttentionArguments& p, int b, int h, int i0, int j0) const {
    static_assert(kMaskTile % kQueries == 0 && kMaskTile % kKeys == 0, "a part of one tile");
    const MaskProgram program{p, *p.mask_table, b, h};
    for (int n = static_cast<int>(threadIdx.x); n < kQueries * kWords; n += kThreads) {
      const int i = i0 + n / kWords, j = j0 + n % kWords * kWidth;
      words[n] = i < p.Lq ? program.keys(i, j, kWidth) : 0;
    }
  }

  FASTATTN_DEVICE bool has(int query, int key) const {
    return (words[query * kWords + key / 32] >> key % 32 & 1) != 0;
  }
};

// -- the kernel that reads a program --------------------------------------------------------------

// Enough blocks for any GPU; each reads the program.
constexpr int kMaskThreads = 128, kMaskTilesOfBlock = kMaskThreads / 32, kMostMaskBlocks = 1024;

// Reads a mask program into the table that all blocks of the call share. Its width is how many keys
// a tile evaluates at once: the deepest stack of operands must fit in 64 bits.
FASTATTN_DEVICE void read_program(const AttentionArguments& p, MaskTable& table) {
  MaskProgramReader reader(p.mask_words, p.mask_length, p, p.q_starts != nullptr);
  table.count = reader.read(table.steps, table.partial);
  table.of_batch = table.of_heads = false;
  int depth = 0, deepest = 1;
  for (int n = 0; n < table.count; ++n) {
    const MaskStep& step = table.steps[n];
    const bool is_leaf = step.kind != MaskKind::all_of && step.kind != MaskKind::any_of;
    depth += is_leaf ? 1 : -1;
    if (depth > deepest) deepest = depth;
    table.of_batch |= is_leaf && step.batch > 1;
    table.of_heads |= is_leaf && step.heads > 1;
  }
  table.width = 32;
  while (table.width * deepest > 64) table.width /= 2;
}

// A warp takes a tile. Heads and batch entries whose tiles are the same have them once. T selects
// the object file.
template <class T>
__global__ void __launch_bounds__(kMaskThreads)
    attention_mask_kernel(const __grid_constant__ AttentionArguments given) {
  auto& table = *reinterpret_cast<MaskTable*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) read_program(given, table);
  __syncthreads();
  if (blockIdx.x == 0 && thread == 0) *given.mask_table = table;
  const bool packed = given.q_starts != nullptr;
  const int64_t rows = mask_rows_of(packed, packed ? given.B : 1, 1, given.Lq);
  const int64_t columns = given.mask_columns;
  const int64_t entries = table.of_batch ? given.B : 1, heads = table.of_heads ? given.Hq : 1;
  const int64_t tiles = entries * heads * rows * columns;
  const int64_t first = int64_t(blockIdx.x) * kMaskTilesOfBlock + thread / 32;
  for (int64_t n = first; n < tiles; n += int64_t(gridDim.x) * kMaskTilesOfBlock) {
    const int column = static_cast<int>(n % columns), row = static_cast<int>(n / columns % rows);
    const int64_t head = n / columns / rows;
    const int b = static_cast<int>(head / heads), h = static_cast<int>(head % heads);
    AttentionArguments p = given;
    const int i0 = packed ? enter_packed_queries<kMaskTile>(p, row, 0).row : row * kMaskTile;
    if (i0 >= p.Lq || column * kMaskTile >= p.Lk) continue;  // of another sequence
    const Seen seen = MaskProgram{p, table, b, h}.tile(i0, column * kMaskTile);
    if (thread % 32 == 0) tiles_of(p)[((b * p.Hq + h) * rows + row) * columns + column] = seen;
  }
}

}  // namespace cuda
}  // namespace fastattn
