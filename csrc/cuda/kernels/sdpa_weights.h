// The results with an element per pair, or per sum of pairs: the weights, and the gradients of an
// additive mask and of a relative bias. A block of threads owns one block of the result. It
// recomputes the scores and sums in a fixed order: for averaged weights over the heads, for a mask
// over every dimension in which it is broadcast, for a relative bias over the pairs of a distance
// (relative_bias.h).
#pragma once
#include <type_traits>

#include "relative_bias.h"
#include "sdpa_backward.h"

namespace fastattn {
namespace cuda {

// A block does not copy while it computes, so other blocks on the multiprocessor must hide the
// latency: as many as 128 registers per thread allow.
constexpr int kPairsBlocks = 4;

// kPacked: of packed sequences, by_distance. The place of the sequence takes registers, too.
template <class T, int kD, bool kPacked>
__global__ void __launch_bounds__(BackwardShape<T, kD>::kThreads,
                                  kPacked ? kPairsBlocks / 2 : kPairsBlocks)
    attention_pairs_kernel(const __grid_constant__ PairsArguments given) {
  using Shape = BackwardShape<T, kD>;
  using Storage = typename T::Storage;
  constexpr int kThreads = Shape::kThreads, kQueries = Shape::kStaying, kKeys = Shape::kPassing;
  constexpr int kTiles = kKeys / 8, kSteps = kD / Product<T>::kDepth;
  static_assert(sizeof(DistanceTile<kQueries, kKeys>) <= Shape::kTileBytes,
                "the result reuses the tiles");

  std::conditional_t<kPacked, PairsArguments, const PairsArguments&> p = given;
  const bool by_distance = kPacked || p.by_distance;
  const int q_blocks = (p.sizes[2] + kQueries - 1) / kQueries;
  const int k_blocks = kPacked       ? static_cast<int>(packed_diagonals<kQueries>(p))
                       : by_distance ? static_cast<int>(diagonals_of<kQueries>(p))
                                     : (p.sizes[3] + kKeys - 1) / kKeys;
  unsigned n = blockIdx.x;
  int diagonal = static_cast<int>(n % static_cast<unsigned>(k_blocks));  // if by_distance
  const int k_block = diagonal * kKeys;
  n /= static_cast<unsigned>(k_blocks);
  const int q_block = static_cast<int>(n % static_cast<unsigned>(q_blocks)) * kQueries;
  n /= static_cast<unsigned>(q_blocks);
  const int head = static_cast<int>(n % static_cast<unsigned>(p.sizes[1]));
  int batch = static_cast<int>(n / static_cast<unsigned>(p.sizes[1]));
  if constexpr (kPacked) {
    if (!enter_diagonal<kQueries>(p, diagonal, batch, diagonal)) return;
  }
  const int rows = static_cast<int>(p.Lq), keys = static_cast<int>(p.Lk);
  // The range [begin, end) of a dimension that is summed into this block of the result.
  auto extent = [&](int dim, int64_t all, int begin, int count) {
    return p.sizes[dim] == 1
               ? Range{0, static_cast<int>(all)}
               : Range{begin, begin + count < all ? begin + count : static_cast<int>(all)};
  };
  const Range all_b = kPacked ? Range{batch, batch + 1} : extent(0, p.B, batch, 1);
  const Range all_h = extent(1, p.Hq, head, 1);
  const Range all_i = extent(2, p.Lq, q_block, kQueries);

  char* shared = dynamic_shared();
  const typename Shape::Staying q_tile{reinterpret_cast<Storage*>(shared)};
  const typename Shape::Staying g_tile{q_tile.data + kQueries * kD};
  const typename Shape::Passing k_tile{g_tile.data + kQueries * kD};
  const typename Shape::Passing v_tile{k_tile.data + kKeys * kD};
  const MaskBits<kQueries, kKeys> bits{reinterpret_cast<uint32_t*>(shared + Shape::kBits)};
  const bool aligned = p.aligned;
  const Place4 place{static_cast<int>(threadIdx.x) / 32 * 16};

  float sum[kTiles * 4];
  set_zero(sum);
  for (int b = all_b.begin; b < all_b.end; ++b)
    for (int h = all_h.begin; h < all_h.end; ++h)
      for (int i0 = all_i.begin; i0 < all_i.end; i0 += kQueries) {
        const int last_row = rows < i0 + kQueries ? rows : i0 + kQueries;
        const Range visible_to_block = keys_of_queries(p, i0, last_row);
        // Computed here: kept in a register throughout the loops, the end would spill.
        const Range here = by_distance ? keys_of_diagonal<kQueries>(p, diagonal, i0)
                                       : extent(3, p.Lk, anew(k_block), kKeys);
        for (int j0 = here.begin; j0 < here.end; j0 += kKeys) {
          if (j0 + kKeys <= visible_to_block.begin || j0 >= visible_to_block.end) continue;
          const Seen visible_here = MaskTiles(p, b, h).at(i0, j0);
          if (visible_here == Seen::none) continue;
          const bool partly = visible_here == Seen::some;
          const int h_kv = h / static_cast<int>(p.Hq / p.Hkv);
          __syncthreads();
          q_tile.template load<kThreads>(head_of<const Storage>(p.q, b, h, p.q_row, p.D, aligned),
                                         i0, 0, rows);
          k_tile.template load<kThreads>(
              head_of<const Storage>(p.k, b, h_kv, p.k_row, p.D, aligned), j0, 0, keys);
          if (p.gradient) {
            g_tile.template load<kThreads>(
                head_of<const Storage>(p.grad_out, b, h, p.q_row, p.Dv, aligned), i0, 0, rows);
            v_tile.template load<kThreads>(
                head_of<const Storage>(p.v, b, h_kv, p.k_row, p.Dv, aligned), j0, 0, keys);
          }
          cp_async_commit();
          if (partly) bits.template fill<kThreads>(p, b, h, i0, j0);
          cp_async_wait<0>();
          __syncthreads();
          float s[kTiles * 4], dp[kTiles * 4];
          set_zero(s);
          set_zero(dp);
          add_product_of_rows<kSteps, kTiles>(s, q_tile, place.warp_row, k_tile);
          if (p.gradient) add_product_of_rows<kSteps, kTiles>(dp, g_tile, place.warp_row, v_tile);
          const uint32_t hidden = partly ? hidden_pairs<kTiles, false>(bits, place) : 0;
          const Options options(p, b, h);
          FASTATTN_UNROLL
          for (int r = 0; r < 2; ++r) {
            const int i = anew(i0 + place.row(r));
            const RowStats stats = stats_of(p, b, h, i);
            const Range visible = visible_keys(p, i);
            FASTATTN_UNROLL
            for (int m = 0; m < kTiles; ++m) {
              Words words{};
              if (options.drops()) words = options.words(i, j0 + 8 * m);
              FASTATTN_UNROLL
              for (int e = 0; e < 2; ++e) {
                const int j = j0 + place.column(m, e), at = 4 * m + 2 * r + e;
                Pair pair = pair_of<T, true>(options, s[at], dp[at], i, j, visible, stats, words);
                if ((hidden >> at & 1) != 0) pair = {0.0f, 0.0f, 0.0f};
                sum[at] += p.gradient ? pair.gradient : pair.weight;
              }
            }
          }
          if (!by_distance) continue;
          __syncthreads();  // the tiles are read
          add_by_distance<kThreads>(
              p, i0, j0, *reinterpret_cast<DistanceTile<kQueries, kKeys>*>(shared),
              [&](auto put) {
                FASTATTN_UNROLL
                for (int m = 0; m < kTiles * 4; ++m)
                  put(place.row(m / 2 % 2), place.column(m / 4, m % 2), sum[m]);
              },
              table_of_diagonal(p, b, h, diagonal));
          set_zero(sum);
        }
      }
  if (by_distance) return;

  // The sums pass through shared memory, so that the rows or columns of a dimension of size 1 in
  // the result can be added.
  __syncthreads();
  auto* block = reinterpret_cast<float*>(shared);  // [kQueries, kKeys]
  FASTATTN_UNROLL
  for (int m = 0; m < kTiles * 4; ++m)
    block[place.row(m / 2 % 2) * kKeys + place.column(m / 4, m % 2)] = sum[m];
  __syncthreads();
  const bool sums_rows = p.sizes[2] == 1, sums_columns = p.sizes[3] == 1;
  for (int at = static_cast<int>(threadIdx.x); at < kQueries * kKeys; at += kThreads) {
    const int r = at / kKeys, c = at % kKeys;
    if (q_block + r >= p.sizes[2] || k_block + c >= p.sizes[3]) continue;
    double total = 0.0;
    for (int y = r; y < (sums_rows ? kQueries : r + 1); ++y)
      for (int x = c; x < (sums_columns ? kKeys : c + 1); ++x) total += block[y * kKeys + x];
    const int64_t to = batch * p.result_stride[0] + head * p.result_stride[1] +
                       (q_block + r) * p.result_stride[2] + (k_block + c) * p.result_stride[3];
    const float value = static_cast<float>(total) * p.factor;
    if (p.gradient)
      static_cast<float*>(p.result)[to] = value;
    else if constexpr (sizeof(Storage) == 2)
      static_cast<Storage*>(p.result)[to] = static_cast<Storage>(T::pack(value, 0.0f));
    else
      static_cast<Storage*>(p.result)[to] = value;
  }
}

}  // namespace cuda
}  // namespace fastattn
