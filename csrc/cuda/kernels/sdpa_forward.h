// Attention forward for sm_80 and up: O = softmax(scale Q K^T + bias) V, with mma.sync.
//
// A block of threads computes kQueries queries of one head. Each warp has 16 kRowTiles of them and
// keeps their O in registers. K and V go through shared memory, kKeys rows at a time, with one
// buffer each: this step's V is copied during S = Q K^T, and the next step's K during O += P V.
#pragma once
#include "mask_program.h"
#include "scores.h"
#include "softmax.h"
#include "tile.h"
#include "varlen.h"

namespace fastattn {
namespace cuda {

// Shared memory is at most 97 KiB, so that a block fits on every GPU from sm_80 on (sm_86: 99 KiB).
template <class T, int kD, bool kGeneral>
struct ForwardShape {
  static constexpr bool kWide = sizeof(typename T::Storage) == 4;
  static constexpr int kRowTiles = !kWide && !kGeneral && kD <= 128 ? 2 : 1;
  static constexpr int kWarps = kWide && kD == 256 ? 2 : 4;
  // If O does not fit in a warp's registers, this many warps have the same rows and divide the
  // columns of O. Each of them computes all the scores.
  static constexpr int kColumnGroups = kWide && kD == 256 ? 2 : 1;
  static constexpr int kThreads = 32 * kWarps * kColumnGroups;
  static constexpr int kQueries = 16 * kRowTiles * kWarps;
  // As many keys as fit in registers beside O without spilling; test_cuda_compile.py fails if a
  // kernel spills.
  static constexpr int kKeys = kWide      ? (kD == 64    ? 64
                                             : kD == 128 ? 32
                                                         : 16)
                               : kGeneral ? (kD == 256 ? 16 : 64)
                                          : (kD == 64 ? 64 : 32);
  using QTile = Tile<T, kQueries, kD>;
  using KTile = Tile<T, kKeys, kD>;
  using Bits = MaskBits<kQueries, kKeys>;
  // The tiles, a flag for each key, and with options a bit for each pair.
  static constexpr int kFlags = QTile::kBytes + 2 * KTile::kBytes, kBits = kFlags + 4 * kKeys;
  static constexpr int kSharedBytes = kBits + (kGeneral ? Bits::kBytes : 0);
  static_assert(kSharedBytes <= 97 << 10, "too much shared memory");
};

template <class T, int kD, bool kGeneral>
struct AttentionForward {
  using Shape = ForwardShape<T, kD, kGeneral>;
  using Storage = typename T::Storage;
  using QTile = typename Shape::QTile;
  using KTile = typename Shape::KTile;
  static constexpr int kKeyTiles = Shape::kKeys / 8;  // tiles of 8 columns of S
  static constexpr int kColumns = kD / Shape::kColumnGroups;
  static constexpr int kValueTiles = kColumns / 8;  // and of O
  static constexpr int kSteps = kD / Product<T>::kDepth;
  static constexpr int kRowTiles = Shape::kRowTiles;

  const AttentionArguments& p;
  int b, h, i0;  // the head and the first query of this block
  int warp_row;  // the first row of this warp in the tile,
  int column0;   // and its first column of O
  QTile q_tile;
  KTile k_tile, v_tile;
  int* seen;  // [kKeys]: can a query see this key of the step?
  MaskTiles mask_tiles;
  typename Shape::Bits bits;  // of the step, if its tile is partly visible

  float s[kRowTiles][kKeyTiles * 4];    // scores, then weights
  float o[kRowTiles][kValueTiles * 4];  // O, not yet divided by the sum of the weights
  OnlineSoftmax softmax[kRowTiles];

  // The row and the column of accumulator (n, 2 r + e) of mma.m16n8, for this lane.
  FASTATTN_DEVICE int row_of(int tile, int r) const {
    return warp_row + 16 * tile + 8 * r + (static_cast<int>(threadIdx.x) & 31) / 4;
  }
  static FASTATTN_DEVICE int column_of(int n, int e) {
    return 8 * n + 2 * (static_cast<int>(threadIdx.x) & 3) + e;
  }

  FASTATTN_DEVICE AttentionForward(const AttentionArguments& arguments, const Block& block)
      : p(arguments), b(block.b), h(block.h), i0(block.row) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    warp_row = warp % Shape::kWarps * 16 * kRowTiles;
    // The compiler does not know the number of warps, and would keep addresses that depend on
    // column0 in registers.
    column0 = Shape::kColumnGroups == 1 ? 0 : warp / Shape::kWarps * kColumns;
    char* shared = dynamic_shared();
    q_tile.data = reinterpret_cast<Storage*>(shared);
    k_tile.data = reinterpret_cast<Storage*>(shared + QTile::kBytes);
    v_tile.data = reinterpret_cast<Storage*>(shared + QTile::kBytes + KTile::kBytes);
    seen = reinterpret_cast<int*>(shared + Shape::kFlags);
    bits.words = reinterpret_cast<uint32_t*>(shared + Shape::kBits);
    if (kGeneral) mask_tiles = MaskTiles(p, b, h);
  }

  FASTATTN_DEVICE void run() {
    const int rows = static_cast<int>(p.Lq);
    const int last_row = rows < i0 + Shape::kQueries ? rows : i0 + Shape::kQueries;
    const int h_kv = h / static_cast<int>(p.Hq / p.Hkv);
    const bool aligned = !kGeneral || p.aligned;
    const auto q = head_of<const Storage>(p.q, b, h, p.q_row, p.D, aligned);
    const auto k = head_of<const Storage>(p.k, b, h_kv, p.k_row, p.D, aligned);
    const auto v = head_of<const Storage>(p.v, b, h_kv, p.k_row, p.Dv, aligned);

    FASTATTN_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      softmax[t].init();
      FASTATTN_UNROLL
      for (int n = 0; n < kValueTiles * 4; ++n) o[t][n] = 0.0f;
    }

    // Keys that no query of the block can see are loaded as zeros, so NaN or inf in them has no
    // effect.
    const Range keys = keys_of_queries(p, i0, last_row);
    const auto next = [&](int j) { return kGeneral ? mask_tiles.next(i0, j, keys.end) : j; };
    int j0 = next(keys.begin / Shape::kKeys * Shape::kKeys);
    if (j0 < keys.end) {
      q_tile.template load<Shape::kThreads>(q, i0, 0, rows);
      k_tile.template load<Shape::kThreads>(k, j0, keys.begin, keys.end);
      cp_async_commit();
    }
    for (int following; j0 < keys.end; j0 = following) {
      const bool partly = kGeneral && mask_tiles.at(i0, j0) == Seen::some;
      cp_async_wait<0>();
      __syncthreads();  // K has arrived, and the previous V is no longer read
      v_tile.template load<Shape::kThreads>(v, j0, keys.begin, keys.end);
      cp_async_commit();
      if constexpr (kGeneral)
        if (partly) bits.template fill<Shape::kThreads>(p, b, h, i0, j0);
      multiply_scores();
      cp_async_wait<0>();
      __syncthreads();  // V has arrived, and K is no longer read
      following = next(j0 + Shape::kKeys);
      if (following < keys.end) {
        k_tile.template load<Shape::kThreads>(k, following, keys.begin, keys.end);
        cp_async_commit();
      }
      FASTATTN_UNROLL
      for (int t = 0; t < kRowTiles; ++t) {
        apply_options(t, j0, last_row);
        if (partly) apply_program(t);
      }
      if (kGeneral && (partly || has_bias(p))) clear_unseen_values();
      FASTATTN_UNROLL
      for (int t = 0; t < kRowTiles; ++t) {
        // O <- shrink O + P V
        float shrink[2];
        softmax[t].template update<kKeyTiles>(s[t], kGeneral ? 1.0f : p.scale_float, shrink);
        FASTATTN_UNROLL
        for (int n = 0; n < kValueTiles * 4; ++n) o[t][n] *= shrink[n / 2 % 2];
        if (kGeneral) drop(t, j0);
      }
      add_values();
    }
    finish(last_row);
  }

  // S = Q K^T; every row tile of a warp uses the same fragment of K.
  FASTATTN_DEVICE void multiply_scores() {
    FASTATTN_UNROLL
    for (int t = 0; t < kRowTiles; ++t) FASTATTN_UNROLL
    for (int n = 0; n < kKeyTiles * 4; ++n) s[t][n] = 0.0f;
    const int lane = anew(threadIdx.x & 31);
    FASTATTN_UNROLL_BY(kSteps <= 8 ? kSteps : kSteps <= 16 ? 4 : 1)
    for (int k = 0; k < kSteps; ++k) {
      typename Product<T>::A a[kRowTiles];
      FASTATTN_UNROLL
      for (int t = 0; t < kRowTiles; ++t) a[t] = q_tile.a(lane, warp_row + 16 * t, k);
      FASTATTN_UNROLL
      for (int n = 0; n < kKeyTiles; n += 2) {
        const auto fragment = k_tile.b_of_rows(lane, 8 * n, k);
        FASTATTN_UNROLL
        for (int t = 0; t < kRowTiles; ++t) Product<T>::add(s[t] + 4 * n, a[t], fragment);
      }
    }
  }

  // O += P V
  FASTATTN_DEVICE void add_values() {
    constexpr int kDepth = Product<T>::kDepth;
    const int lane = anew(threadIdx.x & 31);
    FASTATTN_UNROLL
    for (int k = 0; k < Shape::kKeys / kDepth; ++k) {
      typename Product<T>::A a[kRowTiles];
      FASTATTN_UNROLL
      for (int t = 0; t < kRowTiles; ++t)
        a[t] = Product<T>::a_of_accumulators(s[t] + k * kDepth / 2);
      FASTATTN_UNROLL
      for (int n = 0; n < kValueTiles; n += 2) {
        const auto fragment = v_tile.b_of_columns(lane, k, column0 + 8 * n);
        FASTATTN_UNROLL
        for (int t = 0; t < kRowTiles; ++t) Product<T>::add(o[t] + 4 * n, a[t], fragment);
      }
    }
  }

  // Turns dot products into scores. Without options they stay unscaled, and only the window
  // applies.
  FASTATTN_DEVICE void apply_options(int t, int j0, int last_row) {
    if (!kGeneral) {
      const bool inner =
          visible_keys(p, last_row - 1).begin <= j0 && j0 + Shape::kKeys <= visible_keys(p, i0).end;
      if (inner) return;
    }
    const Options options(p, b, h);
    const int first = anew(i0 + row_of(t, 0));
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int i = first + 8 * r;
      const Range visible = visible_keys(p, i);
      FASTATTN_UNROLL
      for (int n = 0; n < kKeyTiles; ++n) FASTATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& x = s[t][4 * n + 2 * r + e];
        const int j = j0 + column_of(n, e);
        if (kGeneral)
          x = options.score(x, i, j, visible).value;
        else if (!visible.has(j))
          x = minus_infinity();
      }
    }
  }

  // Hides the pairs that the mask program excludes, in row tile t.
  FASTATTN_DEVICE void apply_program(int t) {
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) FASTATTN_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) FASTATTN_UNROLL
    for (int e = 0; e < 2; ++e)
      if (!bits.has(row_of(t, r), column_of(n, e))) s[t][4 * n + 2 * r + e] = minus_infinity();
  }

  // Zeroes the values of keys that the options hide from all queries of this block, because 0 times
  // NaN or inf would be NaN.
  FASTATTN_DEVICE void clear_unseen_values() {
    for (int n = static_cast<int>(threadIdx.x); n < Shape::kKeys; n += Shape::kThreads) seen[n] = 0;
    __syncthreads();
    bool any[kKeyTiles * 2] = {};
    FASTATTN_UNROLL
    for (int t = 0; t < kRowTiles; ++t) FASTATTN_UNROLL
    for (int n = 0; n < kKeyTiles * 4; ++n) any[n / 4 * 2 + n % 2] |= s[t][n] != minus_infinity();
    FASTATTN_UNROLL
    for (int n = 0; n < kKeyTiles * 2; ++n)
      if (any[n]) seen[column_of(n / 2, n % 2)] = 1;  // written by several threads, but always 1
    __syncthreads();
    v_tile.template clear_rows<Shape::kThreads>(seen);
    __syncthreads();
  }

  // Applies dropout to the weights of row tile t.
  FASTATTN_DEVICE void drop(int t, int j0) {
    const Options options(p, b, h);
    if (!options.drops()) return;
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) FASTATTN_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      const Words words = options.words(i0 + row_of(t, r), j0 + 8 * n);
      FASTATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& x = s[t][4 * n + 2 * r + e];
        const float kept = options.kept(words, column_of(n, e));
        x = kept == 0.0f ? 0.0f : x * kept;  // a dropped weight is 0 even if it is NaN
      }
    }
  }

  // Writes O / l through shared memory to global memory, whole rows at a time. Each warp uses its
  // own rows of the Q tile.
  FASTATTN_DEVICE void finish(int last_row) {
    const bool aligned = !kGeneral || p.aligned;
    const auto out = head_of<Storage>(p.out, b, h, p.q_row, p.Dv, aligned);
    double* lse = p.lse + stats_row(p, b, h, 0);
    const float sink = sink_of(p, b, h);
    FASTATTN_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      softmax[t].finish();
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const RowTotal total = softmax[t].total(r, kGeneral ? 1.0f : p.scale_float, sink);
        FASTATTN_UNROLL
        for (int n = 0; n < kValueTiles; ++n) {
          const float* x = o[t] + 4 * n + 2 * r;
          q_tile.store_pair(row_of(t, r), column0 + column_of(n, 0), x[0] * total.factor,
                            x[1] * total.factor);
        }
        const int i = i0 + row_of(t, r);
        if (threadIdx.x % 4 == 0 && column0 == 0 && i < last_row) lse[i] = total.lse();
      }
    }
    constexpr int kRows =
        16 * kRowTiles / Shape::kColumnGroups;  // each warp writes a share of the rows
    if (Shape::kColumnGroups == 1)
      __syncwarp();
    else
      __syncthreads();
    q_tile.store_rows(out, i0, last_row, warp_row + column0 / kColumns * kRows, kRows);
  }
};

// out and lse of one block of queries.
template <class T, int kD, bool kGeneral>
__global__ void __launch_bounds__(ForwardShape<T, kD, kGeneral>::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ AttentionArguments given) {
  AttentionArguments p = given;
  Block block;
  if (enter_queries<ForwardShape<T, kD, kGeneral>::kQueries>(p, block))
    AttentionForward<T, kD, kGeneral>(p, block).run();
}

}  // namespace cuda
}  // namespace fastattn
