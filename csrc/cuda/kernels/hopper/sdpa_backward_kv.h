// Attention backward for Hopper, the gradients of keys and values: dV = P^T dO, dK = scale dS^T Q.
// Keys stay and queries are streamed, one after the other of the heads that share the keys. The
// scores are transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are already in the
// registers from which the next product reads them.
//
// Up to 128 columns a consumer has 64 keys and both of their sums. With more columns, registers
// hold only one sum. The two consumers then have the same 64 keys; one sums dV and the other dK.
#pragma once
#include "../sdpa_pairs.h"
#include "common.h"

namespace fastattn {
namespace cuda {

// A thread of a consumer holds half a row of dK and dV, or of one of them, and of S and dP.
constexpr int backward_kv_registers(int queries, int sums) {
  return sums / 2 + 2 * (queries / 2) + hopper::kSpareRegisters;
}

template <int kQueryWidth, int kValueWidth, bool kGeneral>
struct HopperBackwardKvShape {
  static constexpr int kQ = kQueryWidth, kV = kValueWidth;
  static constexpr bool kDivided = kQ > 128;
  static constexpr int kKeys = kDivided ? 64 : 128;
  static constexpr int kQueries = kGeneral    ? (kQ == 64    ? 64
                                                 : kQ == 128 ? 48
                                                             : 32)
                                  : kQ == 64  ? 96
                                  : kQ == 256 ? 48
                                              : 64;
  static constexpr int kStages = 2;
  using KTile = hopper::SwizzledTile<kKeys, kQ>;
  using VTile = hopper::SwizzledTile<kKeys, kV>;
  using QTile = hopper::SwizzledTile<kQueries, kQ>;
  using GTile = hopper::SwizzledTile<kQueries, kV>;
  struct SharedStorage {
    typename KTile::Storage k_tile;
    typename VTile::Storage v_tile;
    typename QTile::Storage q_tiles[kStages];
    typename GTile::Storage g_tiles[kStages];
    RowStats stats[kStages * kQueries];  // [kStages, kQueries]
    uint64_t k_full, k_empty;            // of K and V
    // `landed`: Q and dO have arrived. `full`: they are cleared, and the stats are there, too.
    uint64_t landed[kStages], full[kStages], empty[kStages];
  };
  static_assert(sizeof(SharedStorage) <= hopper::kMaxSharedBytes, "too much shared memory");
  static_assert(backward_kv_registers(kQueries, kDivided ? kQ : kQ + kV) <=
                    hopper::kConsumerRegisters,
                "too many registers");
};

template <class T, class Shape, bool kGeneral>
struct HopperBackwardKv {
  static constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries;
  static constexpr int kQueryTiles = kQueries / 8;
  using Ring = hopper::Ring<Shape::kStages>;
  using SharedStorage = typename Shape::SharedStorage;

  const HopperArguments& given;
  SharedStorage& shared;

  FASTATTN_DEVICE explicit HopperBackwardKv(const HopperArguments& arguments)
      : given(arguments), shared(*reinterpret_cast<SharedStorage*>(dynamic_shared())) {}

  FASTATTN_DEVICE typename Shape::KTile k_tile() const { return {shared.k_tile.data}; }
  FASTATTN_DEVICE typename Shape::VTile v_tile() const { return {shared.v_tile.data}; }
  FASTATTN_DEVICE typename Shape::QTile q_tile(int stage) const {
    return Shape::QTile::nth(shared.q_tiles, stage);
  }
  FASTATTN_DEVICE typename Shape::GTile g_tile(int stage) const {
    return Shape::GTile::nth(shared.g_tiles, stage);
  }

  // Sets how many arrivals complete each barrier; by one thread, before the others use them.
  FASTATTN_DEVICE void init_barriers() const {
    constexpr int kConsumerWarps = 4 * hopper::kConsumers;
    mbarrier_init(&shared.k_full, 2);  // K and V
    mbarrier_init(&shared.k_empty, kConsumerWarps);
    for (int n = 0; n < Shape::kStages; ++n) {
      mbarrier_init(shared.landed + n, 2);  // Q and dO
      mbarrier_init(shared.full + n, 1);
      mbarrier_init(shared.empty + n, kConsumerWarps);
    }
    mbarrier_fence_init();
  }

  // A tile of keys that stays while queries are streamed.
  struct Work {
    AttentionArguments p;
    int b, h_kv, j0, last_key;
    Range queries;  // that can see at least one key
    int begin;      // the first query of a head's first step
  };

  // False if there are no such keys.
  FASTATTN_DEVICE bool find(int tile, Work& work) const {
    work.p = given;
    Block block;
    if (!hopper::enter_tile<false>(given, tile, work.p, block)) return false;
    work.b = block.b;
    work.h_kv = block.h;
    work.j0 = block.row;
    const int keys = static_cast<int>(work.p.Lk);
    work.last_key = keys < work.j0 + kKeys ? keys : work.j0 + kKeys;
    work.queries = queries_of_keys(work.p, work.j0, work.last_key);
    work.begin = work.queries.begin < work.queries.end ? work.queries.begin / kQueries * kQueries
                                                       : work.queries.end;
    return true;
  }

  // Calls f(tile, work) for each tile of this block of threads that some query can see, or with
  // kAll for each tile.
  template <bool kAll, class F>
  FASTATTN_DEVICE void for_each_tile(F f) const {
    for (int round = 0;; ++round) {
      const int tile = hopper::tile_of_round(round);
      if (tile >= given.tiles) break;
      Work work{};
      if (find(tile, work) && (kAll || work.begin < work.queries.end)) f(tile, work);
    }
  }

  // Calls f(head, first query) for each step.
  template <class F>
  FASTATTN_DEVICE void for_each_step(const Work& work, F f) const {
    for (int n = 0; n < given.group; ++n)
      for (int i0 = work.begin; i0 < work.queries.end; i0 += kQueries)
        f(work.h_kv * given.group + n, i0);
  }

  // Called by one warp.
  FASTATTN_DEVICE void load_all() const {
    hopper::Ring<1> k_ring;
    Ring ring;
    for_each_tile<false>([&](int, const Work& work) {
      const auto& k = given.k_operand;
      const auto& v = given.v_operand;
      mbarrier_wait(&shared.k_empty, k_ring.parity ^ 1);
      const int row = work.p.k_row + work.j0;
      k_tile().load(k.map, &shared.k_full, kKeys, work.h_kv * k.head_step, row,
                    work.b * k.batch_step);
      v_tile().load(v.map, &shared.k_full, kKeys, work.h_kv * v.head_step, row,
                    work.b * v.batch_step);
      k_ring.advance();
      for_each_step(work, [&](int h, int i0) {
        const auto& q = given.q_operand;
        const auto& g = given.g_operand;
        mbarrier_wait(shared.empty + ring.stage, ring.parity ^ 1);
        const int first = work.p.q_row + i0;
        q_tile(ring.stage)
            .load(q.map, shared.landed + ring.stage, kQueries, h * q.head_step, first,
                  work.b * q.batch_step);
        g_tile(ring.stage)
            .load(g.map, shared.landed + ring.stage, kQueries, h * g.head_step, first,
                  work.b * g.batch_step);
        ring.advance();
      });
    });
  }

  // Loads the stats of the queries. Called by one warp. Clears Q and dO of queries that can see
  // none of these keys: they pass no gradient, but 0 times NaN or inf would be NaN.
  FASTATTN_DEVICE void bring_stats() const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    Ring ring;
    for_each_tile<false>([&](int, const Work& work) {
      for_each_step(work, [&](int h, int i0) {
        RowStats* of_stage = shared.stats + ring.stage * kQueries;
        auto sees = [&](int n) {
          return work.queries.has(i0 + n) && of_stage[n].hi != float_of_bits(0x7f800000u);
        };
        mbarrier_wait(shared.empty + ring.stage, ring.parity ^ 1);
        int blind = 0;
        for (int n = lane; n < kQueries; n += 32) {
          of_stage[n] = hopper::prepared<kGeneral>(work.p, stats_of(work.p, work.b, h, i0 + n));
          blind |= !sees(n);
        }
        FASTATTN_UNROLL
        for (int n = 16; n > 0; n /= 2) blind |= __shfl_xor_sync(0xffffffffu, blind, n);
        mbarrier_wait(shared.landed + ring.stage, ring.parity);
        if (blind) {
          q_tile(ring.stage).template clear_rows<32>(lane, sees);
          g_tile(ring.stage).template clear_rows<32>(lane, sees);
          fence_proxy_async();
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared.full + ring.stage);
        ring.advance();
      });
    });
  }

  // kDk, kDv: the gradients that this consumer sums.
  template <bool kDk, bool kDv>
  struct Consumer {
    const HopperBackwardKv& kernel;
    float dk[kDk ? Shape::kQ / 2 : 1], dv[kDv ? Shape::kV / 2 : 1];
    float s[kQueries / 2], dp[kQueries / 2];
    uint32_t weights[kDv ? kQueries / 16 : 1][4], ds[kDk ? kQueries / 16 : 1][4];
    hopper::Ring<1> k_ring;
    Ring ring;
    MatrixDescriptor k_rows, v_rows, q_rows, g_rows, q_columns, g_columns;  // of the first buffers

    FASTATTN_DEVICE Consumer(const HopperBackwardKv& kernel, int consumer) : kernel(kernel) {
      k_rows = kernel.k_tile().of_rows() + first_row(consumer) * 128;
      v_rows = kernel.v_tile().of_rows() + first_row(consumer) * 128;
      q_rows = kernel.q_tile(0).of_rows();
      g_rows = kernel.g_tile(0).of_rows();
      q_columns = kernel.q_tile(0).of_columns();
      g_columns = kernel.g_tile(0).of_columns();
    }

    // The consumer's first row in the tile.
    static FASTATTN_DEVICE int first_row(int consumer) {
      return Shape::kDivided ? 0 : 64 * consumer;
    }

    // Values that depend on the thread index are recomputed at each use, because no register is
    // free to keep them.
    static FASTATTN_DEVICE int thread() { return anew(threadIdx.x) - 128; }
    static FASTATTN_DEVICE int lane() { return thread() & 31; }
    // The key of row r of this thread.
    static FASTATTN_DEVICE int key(const Work& work, int r) {
      const int n = thread();
      return work.j0 + first_row(n / 128) + n / 32 % 4 * 16 + 8 * r + n % 32 / 4;
    }

    FASTATTN_DEVICE void release(uint64_t* barrier) const {
      if (lane() == 0) mbarrier_arrive(barrier);
    }

    FASTATTN_DEVICE void sum(const Work& work) {
      FASTATTN_UNROLL
      for (int n = 0; kDk && n < Shape::kQ / 2; ++n) dk[n] = 0.0f;
      FASTATTN_UNROLL
      for (int n = 0; kDv && n < Shape::kV / 2; ++n) dv[n] = 0.0f;
      if (work.begin < work.queries.end) {
        mbarrier_wait(&kernel.shared.k_full, k_ring.parity);
        kernel.for_each_step(work, [&](int h, int i0) { step(work, h, i0); });
        release(&kernel.shared.k_empty);
        k_ring.advance();
      }
    }

    // Writes dK and dV of the consumer's keys.
    FASTATTN_DEVICE void store(const Work& work) const {
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int j = key(work, r);
        const int64_t row = work.p.k_row + int64_t(j);
        if (kDk)
          hopper::store_row<T, Shape::kQ>(dk + 2 * r, work.p.scale_float, work.p.grad_k, work.b,
                                          work.h_kv, row, work.p.D, j < work.last_key);
        if (kDv)
          hopper::store_row<T, Shape::kV>(dv + 2 * r, 1.0f, work.p.grad_v, work.b, work.h_kv, row,
                                          work.p.Dv, j < work.last_key);
      }
    }

    // Adds one block of queries of one head: S^T and dP^T, then P^T and dS^T, then dV and dK.
    FASTATTN_DEVICE void step(const Work& work, int h, int i0) {
      const int stage = ring.stage;
      mbarrier_wait(kernel.shared.landed + stage, ring.parity);
      mbarrier_wait(kernel.shared.full + stage, ring.parity);
      const MatrixDescriptor of_q = q_rows + stage * Shape::QTile::kBytes;
      const MatrixDescriptor of_g = g_rows + stage * Shape::GTile::kBytes;
      // S^T = K Q^T, dP^T = V dO^T
      wgmma_fence();
      FASTATTN_UNROLL
      for (int n = 0; n < Shape::kQ / 16; ++n)
        wgmma_ss<T, kQueries, false>(s, k_rows + Shape::KTile::columns_at(n),
                                     of_q + Shape::QTile::columns_at(n), n > 0);
      wgmma_commit();
      if constexpr (kDk) {
        wgmma_fence();
        FASTATTN_UNROLL
        for (int n = 0; n < Shape::kV / 16; ++n)
          wgmma_ss<T, kQueries, false>(dp, v_rows + Shape::VTile::columns_at(n),
                                       of_g + Shape::GTile::columns_at(n), n > 0);
        wgmma_commit();
      }
      if (kGeneral) {
        await_all();
        differentiate_general(work, h, i0);
      } else if (all_see(work, i0)) {
        differentiate<false>(work, i0);
      } else {
        differentiate<true>(work, i0);
      }
      // dV += P^T dO, dK += dS^T Q
      const MatrixDescriptor from_q = q_columns + stage * Shape::QTile::kBytes;
      const MatrixDescriptor from_g = g_columns + stage * Shape::GTile::kBytes;
      wgmma_fence();
      if constexpr (kDv) {
        FASTATTN_UNROLL
        for (int n = 0; n < kQueries / 16; ++n)
          wgmma_rs<T, Shape::kV, true>(dv, weights[n], from_g + Shape::GTile::rows_at(n), true);
      }
      if constexpr (kDk) {
        FASTATTN_UNROLL
        for (int n = 0; n < kQueries / 16; ++n)
          wgmma_rs<T, Shape::kQ, true>(dk, ds[n], from_q + Shape::QTile::rows_at(n), true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (kDv) wgmma_arrived(dv);
      if (kDk) wgmma_arrived(dk);
      release(kernel.shared.empty + stage);
      ring.advance();
    }

    // Can all queries of a step see all keys of this consumer, as far as the window decides?
    FASTATTN_DEVICE bool all_see(const Work& work, int i0) const {
      const int first = work.j0 + first_row(thread() / 128), last = i0 + kQueries - 1;
      return last < work.p.Lq && visible_keys(work.p, last).begin <= first &&
             first + 64 <= visible_keys(work.p, i0).end;
    }

    // Waits for all products: S^T and dP^T are then in registers.
    FASTATTN_DEVICE void await_all() {
      wgmma_wait<0>();
      wgmma_arrived(s);
      if (kDk) wgmma_arrived(dp);
    }

    // Turns S^T and dP^T into P^T and dS^T. The weights are computed while dP^T is not yet
    // complete. Without kEdge, all queries can see all keys.
    template <bool kEdge>
    FASTATTN_DEVICE void differentiate(const Work& work, int i0) {
      const float unit = hopper::exponent_unit(kernel.given);
      const int j0 = key(work, 0), column0 = 2 * (lane() & 3);
      const RowStats* of_stage = kernel.shared.stats + ring.stage * kQueries;
      wgmma_wait<kDk ? 1 : 0>();
      wgmma_arrived(s);
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        Range sees{};
        if (kEdge) sees = queries_of_keys(work.p, j0 + 8 * r, j0 + 8 * r + 1);
        FASTATTN_UNROLL
        for (int n = 0; n < kQueryTiles; ++n) FASTATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + column0 + e;
          float& x = s[4 * n + 2 * r + e];
          x = hopper::weight_of(x, unit, of_stage[column]);
          if (kEdge && !sees.has(i0 + column)) x = 0.0f;
        }
      }
      // Already complete; kept because without this branch ptxas moves the wait for dP^T before all
      // but a few of the weights.
      mbarrier_wait(kernel.shared.full + ring.stage, ring.parity);
      await_all();
      FASTATTN_UNROLL
      for (int n = 0; n < kQueryTiles; ++n) {
        const RowStats* row = of_stage + 8 * n + column0;
        const float delta[2] = {row[0].delta, row[1].delta};
        FASTATTN_UNROLL
        for (int r = 0; r < 2; ++r) {
          const float* weight = s + 4 * n + 2 * r;
          const float* gradient = dp + 4 * n + 2 * r;
          if (kDv) weights[n / 2][n % 2 * 2 + r] = T::pack(weight[0], weight[1]);
          if (kDk)
            ds[n / 2][n % 2 * 2 + r] =
                T::pack(score_gradient<kEdge>(weight[0], gradient[0] - delta[0]),
                        score_gradient<kEdge>(weight[1], gradient[1] - delta[1]));
        }
      }
    }

    // Selected where a query cannot see a key, because the incoming gradient may be NaN.
    template <bool kEdge>
    static FASTATTN_DEVICE float score_gradient(float weight, float gradient) {
      return kEdge && weight == 0.0f ? 0.0f : weight * gradient;
    }

    // With options: the weights after dropout.
    FASTATTN_DEVICE void differentiate_general(const Work& work, int h, int i0) {
      const Options options(work.p, work.b, h);
      const int j0 = key(work, 0), column0 = 2 * (lane() & 3);
      const RowStats* of_stage = kernel.shared.stats + ring.stage * kQueries;
      Range sees[2]{};  // queries that can see each key; none for keys past the end
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r)
        if (j0 + 8 * r < work.last_key)
          sees[r] = queries_of_keys(work.p, j0 + 8 * r, j0 + 8 * r + 1);
      FASTATTN_UNROLL
      for (int n = 0; n < kQueryTiles; ++n) {
        Pair pairs[2][2];  // [key, query]
        FASTATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + column0 + e, i = i0 + column;
          const RowStats row = of_stage[column];
          FASTATTN_UNROLL
          for (int r = 0; r < 2; ++r) {
            const int j = j0 + 8 * r, at = 4 * n + 2 * r + e;
            Words words{};
            if (options.drops()) words = options.words(i, j);
            pairs[r][e] = pair_of<T, true>(options, s[at], kDk ? dp[at] : 0.0f, i, j,
                                           {j, j + sees[r].has(i)}, row, words);
          }
        }
        FASTATTN_UNROLL
        for (int r = 0; r < 2; ++r) {
          const Pair(&x)[2] = pairs[r];
          const int at = n % 2 * 2 + r;
          if (kDv) weights[n / 2][at] = T::pack(x[0].weight, x[1].weight);
          if (kDk) ds[n / 2][at] = T::pack(x[0].gradient * x[0].slope, x[1].gradient * x[1].slope);
        }
      }
    }
  };

  // The loop of a consumer over its tiles of keys.
  template <bool kDk, bool kDv>
  FASTATTN_DEVICE void consume(int consumer) const {
    Consumer<kDk, kDv> me(*this, consumer);
    for_each_tile<true>([&](int tile, const Work& work) {
      me.sum(work);
      // Recomputes the work, because no registers are free to keep it beside the sums.
      Work again{};
      find(anew(static_cast<unsigned>(tile)), again);
      me.store(again);
    });
  }
};

// dK and dV: a producer loads tiles, and the consumers sum their gradients.
template <class T, int kQueryWidth, int kValueWidth, bool kGeneral>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    attention_backward_kv_hopper_kernel(const __grid_constant__ HopperArguments given) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = HopperBackwardKvShape<kQueryWidth, kValueWidth, kGeneral>;
  using Kernel = HopperBackwardKv<T, Shape, kGeneral>;
  const Kernel kernel(given);
  const int thread = static_cast<int>(threadIdx.x), warp = hopper::uniform(thread / 32);
  if (thread == 0) kernel.init_barriers();
  __syncthreads();
  if (warp < 4) {
    give_registers<hopper::kProducerRegisters>();
    if (warp == 0) kernel.load_all();
    if (warp == 1) kernel.bring_stats();
    return;
  }
  take_registers<hopper::kConsumerRegisters>();
  const int consumer = warp / 4 - 1;
  if (!Shape::kDivided)
    kernel.template consume<true, true>(consumer);
  else if (consumer == 0)
    kernel.template consume<false, true>(consumer);
  else
    kernel.template consume<true, false>(consumer);
#endif
}

}  // namespace cuda
}  // namespace fastattn
