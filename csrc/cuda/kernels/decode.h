// Decoding: a few queries per sequence attend to a cache of keys and values, contiguous or paged.
//
// Decoding is memory bound. So a block of threads reads each key once for all query heads that
// share it: its 16 rows are the queries of one key head, and the head varies fastest. A long
// sequence is split between blocks at fixed positions, and a second kernel merges their partial
// results in order. So the result of a row does not depend on the rest of the batch.
//
// A split is a multiple of a step, so no step crosses the end of a split.
//
// Within a block each warp has 16 of the keys of a step, with its own softmax and its own O.
#pragma once
#include "mask_program.h"
#include "sdpa_rows.h"
#include "softmax.h"
#include "softmax_state.h"

namespace fastattn {
namespace cuda {

template <class T, int kD>
struct DecodeShape {
  static constexpr bool kWide = sizeof(typename T::Storage) == 4;
  static constexpr int kRows = 16;
  static constexpr int kKeysOfWarp = 16;
  static constexpr int kKeyWarps = kWide && kD == 256 ? 2 : 4;
  // If O does not fit in a warp's registers, this many warps have the same keys and divide the
  // columns of O.
  static constexpr int kColumnGroups = kD == 256 ? 2 : 1;
  static constexpr int kThreads = 32 * kKeyWarps * kColumnGroups;
  static constexpr int kKeys = kKeysOfWarp * kKeyWarps;
  using QTile = Tile<T, kRows, kD>;
  using KTile = Tile<T, kKeys, kD>;
  using WarpTile = Tile<T, kKeysOfWarp, kD>;  // the part of one warp
  // The tiles of Q, K and V, then m and l of the rows of each warp.
  static constexpr int kTileBytes = QTile::kBytes + 2 * KTile::kBytes;
  static constexpr int kSharedBytes = kTileBytes + kKeyWarps * kRows * 8;
  static_assert(kSharedBytes <= 97 << 10, "too much shared memory");
  static_assert(kRows * kD * 4 <= 2 * KTile::kBytes, "the sum of O reuses the tiles");
};

// The rows of a head in the cache of one sequence.
template <class Storage>
struct CacheRows {
  const Storage* data;  // of the head
  int64_t entry_stride, row_stride, column_stride;
  const int32_t* pages;  // the pages of this sequence, null = the cache is not paged
  int64_t entry;         // the cache entry if it is not paged
  int page_size;
  int64_t entries;
  int columns;
  bool aligned;

  // Page numbers are clamped, so an invalid table never causes a read outside the cache.
  FASTATTN_DEVICE const Storage* row(int j) const {
    if (pages == nullptr) return data + entry * entry_stride + j * row_stride;
    const int64_t page = clamp_int(pages[j / page_size], 0, static_cast<int>(entries) - 1);
    return data + page * entry_stride + j % page_size * row_stride;
  }
};

// The rows of one key head in a cache, for sequence b.
template <class Storage>
FASTATTN_DEVICE CacheRows<Storage> cache_rows(const DecodeArguments& p, const Tensor4& cache, int b,
                                              int h_kv, int64_t columns) {
  const int64_t entry = p.entries == nullptr ? b : p.entries[b];
  return {static_cast<const Storage*>(cache.data) + h_kv * cache.stride[1],
          cache.stride[0],
          cache.stride[2],
          cache.stride[3],
          p.block_table == nullptr ? nullptr : p.block_table + b * p.block_table_stride,
          clamp_int(entry, 0, static_cast<int>(p.cache_entries) - 1),
          static_cast<int>(p.page_size),
          p.cache_entries,
          static_cast<int>(columns),
          p.aligned};
}

// tile[r] = row(r). Rows whose row(r) is null and columns from `columns` on are zeros. The caller
// waits with cp_async_wait and a barrier.
template <int kThreads, int kRows, class Tile, class Row>
FASTATTN_DEVICE void load_rows(const Tile& tile, int columns, int64_t column_stride, bool aligned,
                               const typename Tile::Storage* anywhere, Row row) {
  using Storage = typename Tile::Storage;
  constexpr int kChunk = Tile::kChunk, kChunks = Tile::kChunks;
  const int thread = anew(threadIdx.x);
  for (int n = thread; n < kRows * kChunks; n += kThreads) {
    const int r = n / kChunks, c = n % kChunks, left = columns - c * kChunk;
    const Storage* from = left > 0 ? row(r) : nullptr;
    if (aligned) {
      const int bytes = from == nullptr ? 0 : left >= kChunk ? 16 : left * int(sizeof(Storage));
      cp_async_16(tile.chunk(r, c), from == nullptr ? anywhere : from + c * kChunk, bytes);
    } else {
      for (int e = 0; e < kChunk; ++e)
        tile.chunk(r, c)[e] =
            from != nullptr && e < left ? from[(c * kChunk + e) * column_stride] : Storage(0);
    }
  }
}

// The row of query i, head h and split s in the partial sums.
FASTATTN_DEVICE int64_t part_row(const DecodeArguments& p, int b, int h, int i, int s) {
  return ((b * p.Hq + h) * p.Lq + i) * p.splits + s;
}

// Restricts p to sequence b. Its last query is at the position of its last key.
FASTATTN_DEVICE void enter_cached_sequence(DecodeArguments& p, int b) {
  p.Lk = clamp_int(p.lengths[b], 0, static_cast<int>(p.Lk));
  p.offset = p.Lk - p.Lq;
  set_window(p);
}

// Zeroes the values of a warp's keys that the options hide from all rows, because 0 times NaN or
// inf would be NaN. Several warps may have the same keys; each clears them before it reads them.
template <class T, int kKeys, int kColumns>
FASTATTN_DEVICE void clear_unseen_values(const float (&s)[kKeys / 2],
                                         const Tile<T, kKeys, kColumns>& tile) {
  static_assert(kKeys <= 32, "one bit for each key");
  const int lane = static_cast<int>(threadIdx.x) & 31;
  unsigned seen = 0;
  FASTATTN_UNROLL
  for (int m = 0; m < kKeys / 8; ++m) FASTATTN_UNROLL
  for (int e = 0; e < 2; ++e) {
    const bool by_a_row = s[4 * m + e] != minus_infinity() || s[4 * m + 2 + e] != minus_infinity();
    seen |= (by_a_row ? 1u : 0u) << (8 * m + 2 * (lane & 3) + e);
  }
  FASTATTN_UNROLL
  for (int n = 16; n > 0; n /= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, n);
  for (int n = lane; n < kKeys * kColumns; n += 32)
    if ((seen >> n / kColumns & 1) == 0) tile.data[n] = typename T::Storage(0);
  __syncwarp();
}

// The partial result (o, m, l) of one split of the keys for the queries of one key head.
template <class T, int kD>
__global__ void __launch_bounds__(DecodeShape<T, kD>::kThreads, 1)
    decode_split_kernel(const __grid_constant__ DecodeArguments given) {
  using Shape = DecodeShape<T, kD>;
  using Storage = typename T::Storage;
  constexpr int kThreads = Shape::kThreads, kRows = Shape::kRows, kKeys = Shape::kKeys;
  constexpr int kTiles = Shape::kKeysOfWarp / 8, kSteps = kD / Product<T>::kDepth;
  constexpr int kColumns = kD / Shape::kColumnGroups;

  DecodeArguments p = given;
  const int group = static_cast<int>(p.Hq / p.Hkv), all_rows = group * static_cast<int>(p.Lq);
  const auto tiles = static_cast<unsigned>((all_rows + kRows - 1) / kRows);
  unsigned n = blockIdx.x;
  const int split = static_cast<int>(n % static_cast<unsigned>(p.splits));
  n /= static_cast<unsigned>(p.splits);
  const int row0 = static_cast<int>(n % tiles) * kRows;
  n /= tiles;
  const int h_kv = static_cast<int>(n % static_cast<unsigned>(p.Hkv));
  const int b = static_cast<int>(n / static_cast<unsigned>(p.Hkv));
  enter_cached_sequence(p, b);
  const int first = split * static_cast<int>(p.split_keys);
  if (first >= p.Lk) return;  // the merge skips splits without keys

  const int last_row = all_rows < row0 + kRows ? all_rows : row0 + kRows;
  Range keys = keys_of_queries(p, row0 / group, (last_row - 1) / group + 1);
  if (keys.begin < first) keys.begin = first;
  if (keys.end > first + p.split_keys) keys.end = first + static_cast<int>(p.split_keys);

  char* shared = dynamic_shared();
  const typename Shape::QTile q_tile{reinterpret_cast<Storage*>(shared)};
  const typename Shape::KTile k_tile{q_tile.data + kRows * kD};
  const typename Shape::KTile v_tile{k_tile.data + kKeys * kD};
  auto* stats = reinterpret_cast<float*>(shared + Shape::kTileBytes);  // [kKeyWarps, kRows, 2]

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const int key_warp = warp % Shape::kKeyWarps, key0 = key_warp * Shape::kKeysOfWarp;
  const int column0 = warp / Shape::kKeyWarps * kColumns;
  const typename Shape::WarpTile k_warp{k_tile.data + key0 * kD}, v_warp{v_tile.data + key0 * kD};
  const auto k = cache_rows<Storage>(p, p.k, b, h_kv, p.D);
  const auto v = cache_rows<Storage>(p, p.v, b, h_kv, p.Dv);
  const auto load = [&](const typename Shape::KTile& tile, const CacheRows<Storage>& from, int j0) {
    load_rows<kThreads, kKeys>(
        tile, from.columns, from.column_stride, from.aligned, from.data,
        [&](int r) { return keys.has(j0 + r) ? from.row(j0 + r) : nullptr; });
  };

  // The tiles of a mask program describe a step only if all its rows are in one tile.
  const int first_query = row0 / group, last_query = (last_row - 1) / group;
  const bool has_program = p.mask_table != nullptr;
  const bool in_tile = has_program && first_query / kMaskTile == last_query / kMaskTile &&
                       (group == 1 || !p.mask_table->of_heads);
  const MaskTiles mask_tiles(p, b, h_kv * group);
  const auto next = [&](int j) { return in_tile ? mask_tiles.next(first_query, j, keys.end) : j; };

  float o[kColumns / 2];
  FASTATTN_UNROLL
  for (int m = 0; m < kColumns / 2; ++m) o[m] = 0.0f;
  OnlineSoftmax softmax;
  softmax.init();
  int j0 = next(first + (keys.begin - first) / kKeys * kKeys);
  if (j0 < keys.end) {
    const auto* q = static_cast<const Storage*>(p.q.data) + b * p.q.stride[0];
    load_rows<kThreads, kRows>(
        q_tile, static_cast<int>(p.D), p.q.stride[3], p.aligned, q, [&](int r) {
          const int64_t i = (row0 + r) / group, h = h_kv * group + (row0 + r) % group;
          return row0 + r < all_rows ? q + h * p.q.stride[1] + i * p.q.stride[2] : nullptr;
        });
    load(k_tile, k, j0);
    cp_async_commit();
  }
  for (int following; j0 < keys.end; j0 = following) {
    const bool partly = has_program && !(in_tile && mask_tiles.at(first_query, j0) == Seen::all);
    cp_async_wait<0>();
    __syncthreads();  // K has arrived, and the previous V is no longer read
    load(v_tile, v, j0);
    cp_async_commit();
    // S = Q K^T
    float s[kTiles * 4];
    FASTATTN_UNROLL
    for (int m = 0; m < kTiles * 4; ++m) s[m] = 0.0f;
    add_product_of_rows<kSteps, kTiles>(s, q_tile, 0, k_warp);
    cp_async_wait<0>();
    __syncthreads();  // V has arrived, and K is no longer read
    following = next(j0 + kKeys);
    if (following < keys.end) {
      load(k_tile, k, following);
      cp_async_commit();
    }
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + 8 * r + lane / 4, there = row < last_row ? row : last_row - 1;
      const int i = there / group;
      const Options options(p, b, h_kv * group + there % group);
      const Range visible = row < last_row ? visible_keys(p, i) : Range{0, 0};
      uint32_t seen = ~0u;  // bits of the warp's keys
      if (partly)
        seen = MaskProgram{p, *p.mask_table, b, options.h}.keys(i, j0 + key0, Shape::kKeysOfWarp);
      FASTATTN_UNROLL
      for (int m = 0; m < kTiles; ++m) FASTATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * m + 2 * r + e];
        const int column = 8 * m + 2 * (lane & 3) + e;
        x = options.score(x, i, j0 + key0 + column, visible).value;
        if ((seen >> column & 1) == 0) x = minus_infinity();
      }
    }
    if (partly || p.relative_bias != nullptr) clear_unseen_values(s, v_warp);
    // O <- shrink O + P V
    float shrink[2];
    softmax.template update<kTiles>(s, 1.0f, shrink);
    FASTATTN_UNROLL
    for (int m = 0; m < kColumns / 2; ++m) o[m] *= shrink[m / 2 % 2];
    add_product_of_columns<Shape::kKeysOfWarp, kColumns / 8>(o, s, v_warp, column0);
  }
  cp_async_commit();  // no copy is pending from here on
  cp_async_wait<0>();
  softmax.finish();

  // Adds the sums of the warps in order. The sums of a row are rescaled to m, the maximum over the
  // warps.
  FASTATTN_UNROLL
  for (int r = 0; r < 2; ++r) {
    float* to = stats + 2 * (key_warp * kRows + 8 * r + lane / 4);
    if (lane % 4 == 0 && column0 == 0) to[0] = softmax.m[r], to[1] = softmax.l[r];
  }
  __syncthreads();                                    // stats are written, tiles no longer read
  auto* sum = reinterpret_cast<float*>(k_tile.data);  // [kRows, kD]
  for (int w = 0; w < Shape::kKeyWarps; ++w) {
    if (w == key_warp) {
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        float m = minus_infinity();
        for (int from = 0; from < Shape::kKeyWarps; ++from)
          m = fmaxf(m, stats[2 * (from * kRows + row)]);
        const float factor = shrink_to(softmax.m[r], m);
        FASTATTN_UNROLL
        for (int c = 0; c < kColumns / 8; ++c) FASTATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& to = sum[row * kD + column0 + 8 * c + 2 * (lane & 3) + e];
          const float x = o[4 * c + 2 * r + e] * factor;
          to = w == 0 ? x : to + x;
        }
      }
    }
    __syncthreads();
  }
  for (int at = static_cast<int>(threadIdx.x); at < (last_row - row0) * kD; at += kThreads) {
    const int r = at / kD, d = at % kD, h = h_kv * group + (row0 + r) % group;
    const int64_t part = part_row(p, b, h, (row0 + r) / group, split);
    if (d < p.Dv) p.part_sums[part * p.Dv + d] = sum[r * kD + d];
    if (d > 0) continue;
    float m = minus_infinity(), l = 0.0f;
    for (int w = 0; w < Shape::kKeyWarps; ++w) m = fmaxf(m, stats[2 * (w * kRows + r)]);
    for (int w = 0; w < Shape::kKeyWarps; ++w) {
      const float* from = stats + 2 * (w * kRows + r);
      l += from[1] * shrink_to(from[0], m);
    }
    p.part_stats[2 * part] = m;
    p.part_stats[2 * part + 1] = l;
  }
}

constexpr int kMergeThreads = 128;

// O = sum over the splits of exp(m_s - m) O_s, divided by the sum of the weights. One warp per row,
// with its columns across the lanes.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    decode_merge_kernel(const __grid_constant__ DecodeArguments given) {
  using Storage = typename T::Storage;
  DecodeArguments p = given;
  const int64_t row = blockIdx.x * int64_t(kMergeThreads / 32) + threadIdx.x / 32;
  if (row >= p.B * p.Hq * p.Lq) return;
  const int i = static_cast<int>(row % p.Lq), h = static_cast<int>(row / p.Lq % p.Hq);
  const int b = static_cast<int>(row / p.Lq / p.Hq), lane = static_cast<int>(threadIdx.x) & 31;
  enter_cached_sequence(p, b);
  const int count = static_cast<int>((p.Lk + p.split_keys - 1) / p.split_keys);
  const int64_t part = part_row(p, b, h, i, 0);
  const float* stats = p.part_stats + 2 * part;  // [splits, 2]

  float most = minus_infinity();
  for (int s = lane; s < count; s += 32) most = fmaxf(most, stats[2 * s]);
  most = max_of_warp(most);
  float l = 0.0f;
  for (int s = 0; s < count; ++s) l += stats[2 * s + 1] * shrink_to(stats[2 * s], most);
  const RowTotal total = total_of_row(most, l, sink_of(p, b, h));
  auto* out = static_cast<Storage*>(p.out.data) + b * p.out.stride[0] + h * p.out.stride[1] +
              i * p.out.stride[2];
  for (int d = lane; d < p.Dv; d += 32) {
    float x = 0.0f;
    for (int s = 0; s < count; ++s)
      x += p.part_sums[(part + s) * p.Dv + d] * shrink_to(stats[2 * s], most);
    x *= total.factor;
    if constexpr (sizeof(Storage) == 2)
      out[d * p.out.stride[3]] = static_cast<Storage>(T::pack(x, 0.0f));
    else
      out[d * p.out.stride[3]] = x;
  }
  if (lane == 0) p.lse[row] = total.lse();
}

// Appends the new keys and values to the cache of each sequence. One warp per key and its value.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    append_to_cache_kernel(const __grid_constant__ DecodeArguments p) {
  using Storage = typename T::Storage;
  const int64_t row = blockIdx.x * int64_t(kMergeThreads / 32) + threadIdx.x / 32;
  if (row >= p.B * p.Hkv * p.Lq) return;
  const int l = static_cast<int>(row % p.Lq), h = static_cast<int>(row / p.Lq % p.Hkv);
  const int b = static_cast<int>(row / p.Lq / p.Hkv), lane = static_cast<int>(threadIdx.x) & 31;
  int64_t at = p.lengths[b] + l;
  int64_t entry = p.entries == nullptr ? b : p.entries[b];
  if (at < 0 || at >= p.Lk) return;  // never write outside the cache
  if (p.block_table != nullptr) {
    entry = p.block_table[b * p.block_table_stride + at / p.page_size];
    at %= p.page_size;
  }
  if (entry < 0 || entry >= p.cache_entries) return;
  auto copy = [&](const Tensor4& to, const Tensor4& from, int64_t columns) {
    auto* target = static_cast<Storage*>(to.data) + entry * to.stride[0] + h * to.stride[1] +
                   at * to.stride[2];
    const auto* source = static_cast<const Storage*>(from.data) + b * from.stride[0] +
                         h * from.stride[1] + l * from.stride[2];
    for (int64_t d = lane; d < columns; d += 32)
      target[d * to.stride[3]] = source[d * from.stride[3]];
  };
  copy(p.k, p.new_k, p.D);
  copy(p.v, p.new_v, p.Dv);
}

}  // namespace cuda
}  // namespace fastattn
