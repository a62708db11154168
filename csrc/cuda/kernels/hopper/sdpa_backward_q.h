// Attention backward for Hopper, the gradient of the queries: dQ = scale dS K, where dS = P (dP -
// delta), dP = dO V^T. Queries stay and keys are streamed, as in the forward pass. In each step the
// tensor cores compute S = Q K^T, dP and the previous dS K at once, while the other consumer
// computes dS.
#pragma once
#include "../sdpa_pairs.h"
#include "../softmax.h"
#include "common.h"

namespace fastattn {
namespace cuda {

// A thread of a consumer holds half a row of dQ, of S and of dP, and a quarter of a row of dS.
constexpr int backward_q_registers(int keys, int width) {
  return width / 2 + 2 * (keys / 2) + keys / 4 + hopper::kSpareRegisters;
}

template <int kQueryWidth, int kValueWidth, bool kGeneral>
struct HopperBackwardQShape {
  static constexpr int kQ = kQueryWidth, kV = kValueWidth;
  static constexpr int kKeys = kGeneral    ? (kQ <= 128   ? 64
                                              : kQ == 192 ? 48
                                                          : 32)
                               : kQ <= 96  ? 80
                               : kQ <= 192 ? 64
                                           : 48;
  static constexpr int kStages = 2;
  using QTile = hopper::SwizzledTile<hopper::kRows, kQ>;
  using GTile = hopper::SwizzledTile<hopper::kRows, kV>;
  using KTile = hopper::SwizzledTile<kKeys, kQ>;
  using VTile = hopper::SwizzledTile<kKeys, kV>;
  struct SharedStorage {
    typename QTile::Storage q_tile;
    typename GTile::Storage g_tile;
    typename KTile::Storage k_tiles[kStages];
    typename VTile::Storage v_tiles[kStages];
    uint64_t q_full, q_empty;
    uint64_t k_full[kStages], k_landed[kStages], v_full[kStages], empty[kStages];
    int seen[2 * kKeys];  // [2, kKeys], for two steps: can a query see the key?
  };
  static_assert(sizeof(SharedStorage) <= hopper::kMaxSharedBytes, "too much shared memory");
  static_assert(backward_q_registers(kKeys, kQ) <= hopper::kConsumerRegisters,
                "too many registers");
};

// kOfDelta: only completes delta, with the same weights that it is multiplied by later; see
// sdpa_backward.h.
template <class T, class Shape, bool kGeneral, bool kOfDelta>
struct HopperBackwardQ {
  static constexpr int kKeys = Shape::kKeys, kKeyTiles = kKeys / 8;
  using Ring = hopper::Ring<Shape::kStages>;
  using Scores = float[kKeys / 2];
  using SharedStorage = typename Shape::SharedStorage;

  const HopperArguments& given;
  SharedStorage& shared;

  FASTATTN_DEVICE explicit HopperBackwardQ(const HopperArguments& arguments)
      : given(arguments), shared(*reinterpret_cast<SharedStorage*>(dynamic_shared())) {}

  FASTATTN_DEVICE typename Shape::QTile q_tile() const { return {shared.q_tile.data}; }
  FASTATTN_DEVICE typename Shape::GTile g_tile() const { return {shared.g_tile.data}; }
  FASTATTN_DEVICE typename Shape::KTile k_tile(int stage) const {
    return Shape::KTile::nth(shared.k_tiles, stage);
  }
  FASTATTN_DEVICE typename Shape::VTile v_tile(int stage) const {
    return Shape::VTile::nth(shared.v_tiles, stage);
  }

  // Sets how many arrivals complete each barrier; by one thread, before the others use them.
  FASTATTN_DEVICE void init_barriers() const {
    constexpr int kConsumerWarps = 4 * hopper::kConsumers;
    mbarrier_init(&shared.q_full, 2);  // Q and dO
    mbarrier_init(&shared.q_empty, kConsumerWarps);
    for (int n = 0; n < Shape::kStages; ++n) {
      mbarrier_init(shared.k_full + n, 1);
      mbarrier_init(shared.k_landed + n, 1);
      mbarrier_init(shared.v_full + n, 1);
      mbarrier_init(shared.empty + n, kConsumerWarps);
    }
    mbarrier_fence_init();
  }

  using Work = hopper::QueryTile<kKeys>;

  // Called by one warp.
  FASTATTN_DEVICE void load_all() const {
    hopper::Ring<1> q_ring;
    Ring ring;
    hopper::for_each_query_tile<kKeys, false>(given, [&](const Work& work) {
      const int group = given.group, first_row = work.p.q_row + work.i0;
      mbarrier_wait(&shared.q_empty, q_ring.parity ^ 1);
      const auto& q = given.q_operand;
      const auto& g = given.g_operand;
      q_tile().load(q.map, &shared.q_full, given.tile_rows * group, work.h_kv * group * q.head_step,
                    first_row, work.b * q.batch_step);
      g_tile().load(g.map, &shared.q_full, given.tile_rows * group, work.h_kv * group * g.head_step,
                    first_row, work.b * g.batch_step);
      q_ring.advance();
      const auto& k = given.k_operand;
      const auto& v = given.v_operand;
      for (int j = 0; j < work.count; ++j) {
        const int stage = ring.stage, row = work.p.k_row + work.key(j);
        mbarrier_wait(shared.empty + stage, ring.parity ^ 1);
        k_tile(stage).load(k.map,
                           (work.is_edge(j, given.Lk) ? shared.k_landed : shared.k_full) + stage,
                           kKeys, work.h_kv * k.head_step, row, work.b * k.batch_step);
        v_tile(stage).load(v.map, shared.v_full + stage, kKeys, work.h_kv * v.head_step, row,
                           work.b * v.batch_step);
        ring.advance();
      }
    });
  }

  // The loop of the warp that clears rows of K past the end, which may be NaN.
  FASTATTN_DEVICE void clear_all() const {
    hopper::clear_edges<kKeys, Shape::kStages>(given, shared.k_landed, shared.k_full,
                                               [&](int stage) { return k_tile(stage); });
  }

  struct Consumer {
    const HopperBackwardQ& kernel;
    const int consumer, lane;
    float dq[Shape::kQ / 2];
    Scores s, dp;  // `s` then holds dS
    uint32_t ds[kKeys / 16][4];
    int i[2];  // the queries of this thread's rows
    RowStats stats[2];
    Range visible[2];
    int flags = 0;  // the buffer of flags used last
    hopper::Ring<1> q_ring;
    Ring ring;
    MatrixDescriptor q_rows, g_rows, k_rows, v_rows, k_columns;  // of the first buffers

    FASTATTN_DEVICE Consumer(const HopperBackwardQ& kernel, int which)
        : kernel(kernel), consumer(which), lane(static_cast<int>(threadIdx.x) & 31) {
      q_rows = kernel.q_tile().of_rows() + 64 * 128 * consumer;
      g_rows = kernel.g_tile().of_rows() + 64 * 128 * consumer;
      k_rows = kernel.k_tile(0).of_rows();
      v_rows = kernel.v_tile(0).of_rows();
      k_columns = kernel.k_tile(0).of_columns();
    }

    FASTATTN_DEVICE void release(uint64_t* barrier) const {
      if (lane == 0) mbarrier_arrive(barrier);
    }

    FASTATTN_DEVICE int head(const Work& work, int r) const {
      return hopper::head_of_row(kernel.given, work, hopper::row_of_thread(r));
    }

    FASTATTN_DEVICE void run(const Work& work) {
      FASTATTN_UNROLL
      for (int n = 0; n < Shape::kQ / 2; ++n) dq[n] = 0.0f;
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        i[r] = hopper::query_of_row(kernel.given, work, hopper::row_of_thread(r));
        stats[r] =
            hopper::prepared<kGeneral>(work.p, stats_of(work.p, work.b, head(work, r), i[r]));
        visible[r] = visible_keys(work.p, i[r]);
      }
      if (work.count > 0) {
        mbarrier_wait(&kernel.shared.q_full, q_ring.parity);
        if (kOfDelta)
          sum_delta(work);
        else
          sum_gradient(work);
        q_ring.advance();
      }
      if (!kOfDelta) store(work);
    }

    // Writes dQ of the consumer's queries.
    FASTATTN_DEVICE void store(const Work& work) const {
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r)
        hopper::store_row<T, Shape::kQ>(dq + 2 * r, work.p.scale_float, work.p.grad_q, work.b,
                                        head(work, r), work.p.q_row + int64_t(i[r]), work.p.D,
                                        i[r] < work.last_query);
    }

    // dQ += dS K over all blocks of keys.
    FASTATTN_DEVICE void sum_gradient(const Work& work) {
      const Range all_seen = hopper::all_seen(kernel.given, work, consumer);
      for (int j = 0; j < work.count; ++j) {
        begin_scores();
        wgmma_wait<0>();
        wgmma_arrived(s);
        wgmma_arrived(dp);
        if (j > 0) end_product();
        if (j + 1 == work.count) release(&kernel.shared.q_empty);
        if (!kGeneral && all_seen.has(j))
          differentiate<false>(work, j);
        else
          differentiate<true>(work, j);
        begin_product();
      }
      wgmma_wait<0>();
      end_product();
    }

    // Issues S = Q K^T and dP = dO V^T.
    FASTATTN_DEVICE void begin_scores() {
      mbarrier_wait(kernel.shared.k_full + ring.stage, ring.parity);
      mbarrier_wait(kernel.shared.v_full + ring.stage, ring.parity);
      const MatrixDescriptor of_k = k_rows + ring.stage * Shape::KTile::kBytes;
      const MatrixDescriptor of_v = v_rows + ring.stage * Shape::VTile::kBytes;
      wgmma_fence();
      FASTATTN_UNROLL
      for (int step = 0; step < Shape::kQ / 16; ++step)
        wgmma_ss<T, kKeys, false>(s, q_rows + Shape::QTile::columns_at(step),
                                  of_k + Shape::KTile::columns_at(step), step > 0);
      FASTATTN_UNROLL
      for (int step = 0; step < Shape::kV / 16; ++step)
        wgmma_ss<T, kKeys, false>(dp, g_rows + Shape::GTile::columns_at(step),
                                  of_v + Shape::VTile::columns_at(step), step > 0);
      wgmma_commit();
    }

    // Issues dQ += dS K.
    FASTATTN_DEVICE void begin_product() {
      const MatrixDescriptor of_k = k_columns + ring.stage * Shape::KTile::kBytes;
      wgmma_fence();
      FASTATTN_UNROLL
      for (int step = 0; step < kKeys / 16; ++step)
        wgmma_rs<T, Shape::kQ, true>(dq, ds[step], of_k + Shape::KTile::rows_at(step), true);
      wgmma_commit();
      ring.advance();
    }

    // The product is complete, and the keys are no longer needed.
    FASTATTN_DEVICE void end_product() {
      wgmma_arrived(dq);
      release(kernel.shared.empty + ring.previous());
    }

    // The pair at index `at` of s, for calls without options.
    FASTATTN_DEVICE Pair plain_pair(int at, float unit, const RowStats& row) const {
      const float weight = hopper::weight_of(s[at], unit, row);
      return {weight, weight * (dp[at] - row.delta), 1.0f};
    }

    // Calls f(r, index in s, pair) for each pair; r is 0 or 1, the row.
    template <bool kEdge, class F>
    FASTATTN_DEVICE void for_each_pair(const Work& work, int j, F f) {
      const float unit = hopper::exponent_unit(kernel.given);
      const int j0 = work.key(j);
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Options options(work.p, work.b, head(work, r));
        FASTATTN_UNROLL
        for (int n = 0; n < kKeyTiles; ++n) {
          Words words{};
          if (kGeneral && options.drops()) words = options.words(i[r], j0 + 8 * n);
          FASTATTN_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int at = 4 * n + 2 * r + e, key = j0 + 8 * n + 2 * (lane & 3) + e;
            if (kGeneral)
              f(r, at,
                pair_of<T, true>(options, s[at], dp[at], i[r], key, visible[r], stats[r], words));
            else if (!kEdge || visible[r].has(key))
              f(r, at, plain_pair(at, unit, stats[r]));
            else
              f(r, at, Pair{0.0f, 0.0f, 0.0f});
          }
        }
      }
    }

    // Completes delta of the consumer's queries from the products of all their pairs.
    FASTATTN_DEVICE void sum_delta(const Work& work) {
      const float rest[2] = {stats[0].rest, stats[1].rest};
      stats[0].rest = stats[1].rest = 0.0f;
      float sums[2] = {0.0f, 0.0f};
      for (int j = 0; j < work.count; ++j) {
        begin_scores();
        wgmma_wait<0>();
        wgmma_arrived(s);
        wgmma_arrived(dp);
        release(kernel.shared.empty + ring.stage);
        ring.advance();
        if (j + 1 == work.count) release(&kernel.shared.q_empty);
        for_each_pair<true>(work, j,
                            [&](int r, int, const Pair& pair) { sums[r] += pair.gradient; });
      }
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float sum = rest[r] + sum_of_row(sums[r]);
        if ((lane & 3) == 0 && i[r] < work.last_query)
          work.p.row_stats[stats_row(work.p, work.b, head(work, r), i[r]) * 4 + 3] = sum;
      }
    }

    // Turns S and dP into dS.
    template <bool kEdge>
    FASTATTN_DEVICE void differentiate(const Work& work, int j) {
      const bool masked = kGeneral && excludes_pairs(work.p);
      bool any[kKeyTiles * 2] = {};  // for each key of this thread: can a query see it?
      for_each_pair<kEdge>(work, j, [&](int, int at, const Pair& pair) {
        s[at] = pair.gradient * pair.slope;
        if (masked) any[at / 4 * 2 + at % 2] |= pair.slope != 0.0f;
      });
      if (masked)
        hopper::clear_unseen<kKeys>(kernel.shared.seen, flags ^= 1, any, kernel.k_tile(ring.stage));
      FASTATTN_UNROLL
      for (int e = 0; e < kKeys / 4; ++e) ds[e / 4][e % 4] = T::pack(s[2 * e], s[2 * e + 1]);
    }
  };
};

// The body of both kernels: one warp loads, one clears, two warp groups compute.
template <class T, class Shape, bool kGeneral, bool kOfDelta>
FASTATTN_DEVICE void backward_q_of_hopper(const HopperArguments& given) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = HopperBackwardQ<T, Shape, kGeneral, kOfDelta>;
  const Kernel kernel(given);
  const int thread = static_cast<int>(threadIdx.x), warp = hopper::uniform(thread / 32);
  if (thread == 0) kernel.init_barriers();
  for (int n = thread; kGeneral && n < 2 * Shape::kKeys; n += hopper::kThreads)
    kernel.shared.seen[n] = 0;
  __syncthreads();
  if (warp < 4) {
    give_registers<hopper::kProducerRegisters>();
    if (warp == 0) kernel.load_all();
    if (warp == 1) kernel.clear_all();
    return;
  }
  take_registers<hopper::kConsumerRegisters>();
  typename Kernel::Consumer me(kernel, warp / 4 - 1);
  hopper::for_each_query_tile<Shape::kKeys, true>(
      given, [&](const typename Kernel::Work& work) { me.run(work); });
#endif
}

// dQ of a tile of queries.
template <class T, int kQ, int kV, bool kGeneral>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    attention_backward_q_hopper_kernel(const __grid_constant__ HopperArguments given) {
  backward_q_of_hopper<T, HopperBackwardQShape<kQ, kV, kGeneral>, kGeneral, false>(given);
}

// delta of a tile of queries, where dO . O is not exact enough.
template <class T, int kWidth>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    attention_backward_delta_hopper_kernel(const __grid_constant__ HopperArguments given) {
  backward_q_of_hopper<T, HopperBackwardQShape<kWidth, kWidth, true>, true, true>(given);
}

}  // namespace cuda
}  // namespace fastattn
