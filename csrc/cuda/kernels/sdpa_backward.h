// Attention backward for sm_80 and up, with mma.sync. Two kernels, which both recompute the scores.
// One computes dQ: a block of queries stays, and the keys are streamed. The other computes dK and
// dV: a block of keys stays, and the queries are streamed. So every sum has one owner and one
// order, and the results are bitwise equal in every run.
#pragma once
#include "sdpa_forward.h"
#include "sdpa_pairs.h"
#include "sdpa_rows.h"

namespace fastattn {
namespace cuda {

// The rows and columns of a thread's accumulators.
struct Place4 {
  int warp_row;
  // The row and the column of accumulator (n, 2 r + e) of mma.m16n8, for this lane.
  FASTATTN_DEVICE int row(int r) const {
    return warp_row + 8 * r + (static_cast<int>(threadIdx.x) & 31) / 4;
  }
  static FASTATTN_DEVICE int column(int n, int e) {
    return 8 * n + 2 * (static_cast<int>(threadIdx.x) & 3) + e;
  }
};

template <int kCount>
FASTATTN_DEVICE void set_zero(float (&x)[kCount]) {
  FASTATTN_UNROLL
  for (int n = 0; n < kCount; ++n) x[n] = 0.0f;
}

// Bit n of the result: does a mask program hide the pair of accumulator n? With kTransposed rows
// are keys.
template <int kTiles, bool kTransposed, class Bits>
FASTATTN_DEVICE uint32_t hidden_pairs(const Bits& bits, const Place4& place) {
  static_assert(kTiles * 4 <= 32, "one bit for each pair");
  uint32_t hidden = 0;
  FASTATTN_UNROLL
  for (int n = 0; n < kTiles * 4; ++n) {
    const int row = place.row(n / 2 % 2), column = place.column(n / 4, n % 2);
    hidden |= (bits.has(kTransposed ? column : row, kTransposed ? row : column) ? 0u : 1u) << n;
  }
  return hidden;
}

// Stores x * factor as rows of a tile, from column column0 on.
template <int kTiles, class Tile>
FASTATTN_DEVICE void put(const Tile& tile, const Place4& place, int column0,
                         const float (&x)[kTiles * 4], float factor) {
  FASTATTN_UNROLL
  for (int n = 0; n < kTiles; ++n) FASTATTN_UNROLL
  for (int r = 0; r < 2; ++r)
    tile.store_pair(place.row(r), column0 + place.column(n, 0), x[4 * n + 2 * r] * factor,
                    x[4 * n + 2 * r + 1] * factor);
}

// If the sums do not fit in a warp's registers, kColumnGroups warps have the same rows and divide
// the columns of dQ, or of dK and dV. Each of them computes all the scores.
template <class T, int kD, bool kGeneral>
struct BackwardQueriesShape : BackwardShape<T, kD> {
  using Base = BackwardShape<T, kD>;
  static constexpr int kColumnGroups = kD < 256 ? 1 : Base::kWide ? 4 : kGeneral ? 2 : 1;
  static constexpr int kThreads = Base::kThreads * kColumnGroups;
};

template <class T, int kD, bool kGeneral>
struct BackwardKeysShape : BackwardShape<T, kD> {
  using Base = BackwardShape<T, kD>;
  static constexpr int kColumnGroups = kD == 64    ? (Base::kWide && kGeneral ? 2 : 1)
                                       : kD == 128 ? 2
                                                   : (Base::kWide ? 4 : 2);
  static constexpr int kThreads = Base::kThreads * kColumnGroups;
};

// dQ of one block of queries: dQ += dS K over all blocks of keys.
template <class T, int kD, bool kGeneral>
__global__ void __launch_bounds__(BackwardQueriesShape<T, kD, kGeneral>::kThreads, 1)
    attention_backward_q_kernel(const __grid_constant__ AttentionArguments given) {
  using Shape = BackwardQueriesShape<T, kD, kGeneral>;
  using Storage = typename T::Storage;
  constexpr int kThreads = Shape::kThreads, kQueries = Shape::kStaying, kKeys = Shape::kPassing;
  constexpr int kTiles = kKeys / 8, kSteps = kD / Product<T>::kDepth;
  constexpr int kColumns = kD / Shape::kColumnGroups;

  AttentionArguments p = given;
  Block block;
  if (!enter_queries<kQueries>(p, block)) return;
  const int b = block.b, h = block.h, i0 = block.row;
  const int h_kv = h / static_cast<int>(p.Hq / p.Hkv);
  const int rows = static_cast<int>(p.Lq), last_row = rows < i0 + kQueries ? rows : i0 + kQueries;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Place4 place{warp % Shape::kWarps * 16};
  const int column0 = warp / Shape::kWarps * kColumns;  // of dQ

  char* shared = dynamic_shared();
  const typename Shape::Staying q_tile{reinterpret_cast<Storage*>(shared)};
  const typename Shape::Staying g_tile{q_tile.data + kQueries * kD};  // of dO
  const typename Shape::Passing k_tile{g_tile.data + kQueries * kD};
  const typename Shape::Passing v_tile{k_tile.data + kKeys * kD};
  int* seen = reinterpret_cast<int*>(shared + Shape::kTileBytes);
  const MaskBits<kQueries, kKeys> bits{reinterpret_cast<uint32_t*>(shared + Shape::kBits)};
  const bool aligned = p.aligned;
  const auto k = head_of<const Storage>(p.k, b, h_kv, p.k_row, p.D, aligned);
  const auto v = head_of<const Storage>(p.v, b, h_kv, p.k_row, p.Dv, aligned);

  const Range keys = keys_of_queries(p, i0, last_row);
  const int begin = keys.begin / kKeys * kKeys;
  q_tile.template load<kThreads>(head_of<const Storage>(p.q, b, h, p.q_row, p.D, aligned), i0, 0,
                                 rows);
  g_tile.template load<kThreads>(head_of<const Storage>(p.grad_out, b, h, p.q_row, p.Dv, aligned),
                                 i0, 0, rows);
  const Options options(p, b, h);
  RowStats stats[2];
  Range visible[2];
  FASTATTN_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int i = i0 + place.row(r);
    stats[r] = stats_of(p, b, h, i);
    visible[r] = visible_keys(p, i);
  }

  // A call with a mask program recomputes the place of its sequence: kept in registers, it would
  // make float32 with 128 columns spill.
  const auto own = [&] {
    AttentionArguments found = given;
    if (found.q_starts != nullptr) enter_sequence(found, b);
    return found;
  };

  float dq[kColumns / 2];
  set_zero(dq);
  // float32 needs a more accurate delta: dP - delta must be exactly 0 for a query that sees one
  // key. So for float32, and with a gradient of the weights, of the mask or of a relative bias, a
  // first pass sums the part of delta that dO . O lacks. It uses the same weights as the second
  // pass, where delta is subtracted.
  const bool exact = sizeof(Storage) == 4 || (kGeneral && p.exact_delta);
  const float rest[2] = {stats[0].rest, stats[1].rest};
  if (exact) stats[0].rest = stats[1].rest = 0.0f;
  for (int pass = exact ? 0 : 1; pass < 2; ++pass) {
    float sums[2] = {0.0f, 0.0f};
    for (int j0 = begin; j0 < keys.end; j0 += kKeys) {
      const Seen visible_here = kGeneral ? MaskTiles(own(), b, h).at(i0, j0) : Seen::all;
      if (visible_here == Seen::none) continue;
      const bool partly = visible_here == Seen::some;
      const bool masked = kGeneral && (partly || has_bias(p));
      __syncthreads();  // the previous keys are no longer read
      k_tile.template load<kThreads>(k, j0, keys.begin, keys.end);
      v_tile.template load<kThreads>(v, j0, keys.begin, keys.end);
      cp_async_commit();
      for (int n = static_cast<int>(threadIdx.x); n < kKeys; n += kThreads) seen[n] = 0;
      if (partly) bits.template fill<kThreads>(own(), b, h, i0, j0);
      cp_async_wait<0>();
      __syncthreads();

      // S = Q K^T, dP = dO V^T
      float s[kTiles * 4], dp[kTiles * 4];
      set_zero(s);
      set_zero(dp);
      add_product_of_rows<kSteps, kTiles>(s, q_tile, place.warp_row, k_tile);
      add_product_of_rows<kSteps, kTiles>(dp, g_tile, place.warp_row, v_tile);

      const uint32_t hidden = partly ? hidden_pairs<kTiles, false>(bits, place) : 0;
      bool any[kTiles * 2] = {};  // for each key of this thread: can a query see it?
      FASTATTN_UNROLL
      for (int n = 0; n < kTiles; ++n) FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        // With options no register is free to keep these values throughout the loop.
        const int i = kGeneral ? anew(i0 + place.row(r)) : i0 + place.row(r);
        const Range sees = kGeneral ? visible_keys(p, i) : visible[r];
        Words words{};
        if (kGeneral && options.drops()) words = options.words(i, j0 + 8 * n);
        FASTATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int j = j0 + place.column(n, e), at = 4 * n + 2 * r + e;
          Pair pair = pair_of<T, kGeneral>(options, s[at], dp[at], i, j, sees, stats[r], words);
          if (kGeneral && (hidden >> at & 1) != 0) pair = {0.0f, 0.0f, 0.0f};
          if (exact) sums[r] += pair.gradient;
          if (masked) any[2 * n + e] |= pair.slope != 0.0f;
          s[at] = pair.gradient * pair.slope;
        }
      }
      if (pass == 0) continue;
      if (masked) {  // 0 times NaN or inf in a hidden key would be NaN
        FASTATTN_UNROLL
        for (int n = 0; n < kTiles * 2; ++n)
          if (any[n]) seen[place.column(n / 2, n % 2)] = 1;
        __syncthreads();
        k_tile.template clear_rows<kThreads>(seen);
        __syncthreads();
      }
      // dQ += dS K
      add_product_of_columns<kKeys, kColumns / 8>(dq, s, k_tile, column0);
    }
    if (pass == 1) break;
    FASTATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      stats[r].rest = rest[r] + sum_of_row(sums[r]);
      const int i = i0 + place.row(r);
      if (threadIdx.x % 4 == 0 && i < last_row)  // read by the kernel of dK and dV
        p.row_stats[stats_row(p, b, h, i) * 4 + 3] = stats[r].rest;
    }
  }
  cp_async_commit();  // without visible keys, the first copies are still pending
  cp_async_wait<0>();
  __syncthreads();
  put<kColumns / 8>(q_tile, place, column0, dq, p.scale_float);
  __syncthreads();
  constexpr int kRows = kQueries * 32 / kThreads;  // each warp writes a share of the rows
  q_tile.store_rows(head_of<Storage>(p.grad_q, b, h, p.q_row, p.D, aligned), i0, last_row,
                    warp * kRows, kRows);
}

// The scores are transposed: rows are keys, columns are queries.
template <class T, int kD, bool kGeneral>
__global__ void __launch_bounds__(BackwardKeysShape<T, kD, kGeneral>::kThreads, 1)
    attention_backward_kv_kernel(const __grid_constant__ AttentionArguments given) {
  using Shape = BackwardKeysShape<T, kD, kGeneral>;
  using Storage = typename T::Storage;
  constexpr int kThreads = Shape::kThreads, kKeys = Shape::kStaying, kQueries = Shape::kPassing;
  constexpr int kTiles = kQueries / 8, kSteps = kD / Product<T>::kDepth;
  constexpr int kColumns = kD / Shape::kColumnGroups;

  AttentionArguments p = given;
  Block block;
  if (!enter_keys<kKeys>(p, block)) return;
  const int b = block.b, h_kv = block.h, j0 = block.row;
  const int group = static_cast<int>(p.Hq / p.Hkv);
  const int keys = static_cast<int>(p.Lk), last_key = keys < j0 + kKeys ? keys : j0 + kKeys;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Place4 place{warp % Shape::kWarps * 16};
  const int column0 = warp / Shape::kWarps * kColumns;  // of dK and dV

  char* shared = dynamic_shared();
  const typename Shape::Staying k_tile{reinterpret_cast<Storage*>(shared)};
  const typename Shape::Staying v_tile{k_tile.data + kKeys * kD};
  const typename Shape::Passing q_tile{v_tile.data + kKeys * kD};
  const typename Shape::Passing g_tile{q_tile.data + kQueries * kD};  // of dO
  auto* stats = reinterpret_cast<RowStats*>(shared + Shape::kTileBytes);
  int* seen = reinterpret_cast<int*>(stats + kQueries);
  const MaskBits<kQueries, kKeys> bits{reinterpret_cast<uint32_t*>(shared + Shape::kBits)};
  const bool aligned = p.aligned;
  k_tile.template load<kThreads>(head_of<const Storage>(p.k, b, h_kv, p.k_row, p.D, aligned), j0, 0,
                                 keys);
  v_tile.template load<kThreads>(head_of<const Storage>(p.v, b, h_kv, p.k_row, p.Dv, aligned), j0,
                                 0, keys);

  float dk[kColumns / 2], dv[kColumns / 2];
  set_zero(dk);
  set_zero(dv);
  const Range queries = queries_of_keys(p, j0, last_key);
  const int begin = queries.begin / kQueries * kQueries;
  for (int h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    const auto q = head_of<const Storage>(p.q, b, h, p.q_row, p.D, aligned);
    const auto g = head_of<const Storage>(p.grad_out, b, h, p.q_row, p.Dv, aligned);
    const Options options(p, b, h);
    for (int i0 = begin; i0 < queries.end; i0 += kQueries) {
      const Seen visible_here = kGeneral ? MaskTiles(p, b, h).at(i0, j0) : Seen::all;
      if (visible_here == Seen::none) continue;
      const bool partly = visible_here == Seen::some;
      __syncthreads();  // the previous queries are no longer read
      q_tile.template load<kThreads>(q, i0, queries.begin, queries.end);
      g_tile.template load<kThreads>(g, i0, queries.begin, queries.end);
      cp_async_commit();
      bool blind = false;
      for (int n = static_cast<int>(threadIdx.x); n < kQueries; n += kThreads) {
        stats[n] = stats_of(p, b, h, i0 + n);
        seen[n] = stats[n].hi != float_of_bits(0x7f800000u);
        blind |= seen[n] == 0 && i0 + n < p.Lq;
      }
      if (partly) bits.template fill<kThreads>(p, b, h, i0, j0);
      cp_async_wait<0>();
      if (__syncthreads_or(blind)) {
        // A fully masked row passes no gradient. Its Q and dO are cleared, because 0 times NaN or
        // inf would be NaN.
        q_tile.template clear_rows<kThreads>(seen);
        g_tile.template clear_rows<kThreads>(seen);
        __syncthreads();
      }

      // S^T = K Q^T, dP^T = V dO^T
      float s[kTiles * 4], dp[kTiles * 4];
      set_zero(s);
      set_zero(dp);
      add_product_of_rows<kSteps, kTiles, true>(s, k_tile, place.warp_row, q_tile);
      add_product_of_rows<kSteps, kTiles, true>(dp, v_tile, place.warp_row, g_tile);
      FASTATTN_UNROLL
      for (int n = 0; n < kTiles; ++n) FASTATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int column = place.column(n, e), i = i0 + column;
        const RowStats row = stats[column];
        const Range visible = visible_keys(p, i);
        FASTATTN_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int j = j0 + place.row(r), at = 4 * n + 2 * r + e;
          Words words{};
          if (kGeneral && options.drops()) words = options.words(i, j);
          const Pair pair = pair_of<T, kGeneral>(options, s[at], dp[at], i, j, visible, row, words);
          s[at] = pair.weight;
          dp[at] = pair.gradient * pair.slope;
        }
      }
      if (partly) {
        // Recomputed here: kept in registers across the loop, the positions of the bits spill.
        const uint32_t hidden = hidden_pairs<kTiles, true>(bits, Place4{anew(place.warp_row)});
        FASTATTN_UNROLL
        for (int n = 0; n < kTiles * 4; ++n)
          if ((hidden >> n & 1) != 0) s[n] = dp[n] = 0.0f;
      }
      // dV += P^T dO, dK += dS^T Q
      add_product_of_columns<kQueries, kColumns / 8>(dv, s, g_tile, column0);
      add_product_of_columns<kQueries, kColumns / 8>(dk, dp, q_tile, column0);
    }
  }
  cp_async_commit();  // without visible queries, the first copies are still pending
  cp_async_wait<0>();
  __syncthreads();
  put<kColumns / 8>(k_tile, place, column0, dk, p.scale_float);
  put<kColumns / 8>(v_tile, place, column0, dv, 1.0f);
  __syncthreads();
  constexpr int kRows = kKeys * 32 / kThreads;  // each warp writes a share of the rows
  k_tile.store_rows(head_of<Storage>(p.grad_k, b, h_kv, p.k_row, p.D, aligned), j0, last_key,
                    warp * kRows, kRows);
  v_tile.store_rows(head_of<Storage>(p.grad_v, b, h_kv, p.k_row, p.Dv, aligned), j0, last_key,
                    warp * kRows, kRows);
}

}  // namespace cuda
}  // namespace fastattn
