// Attention forward for Hopper: O = softmax(scale Q K^T + bias) V, with TMA and wgmma.
//
// A block of threads takes tiles of 128 rows, one after the other, 64 rows for each consumer. While
// a consumer computes a softmax, the tensor cores compute
//   its own P_{j-1} V_{j-1} and Q K_{j+1}^T, issued before, and then
//   the products of the other consumer: barriers let the consumers issue products in turn.
// So S has two buffers of registers, and K has one buffer more than V.
#pragma once
#include <type_traits>

#include "../softmax.h"
#include "common.h"

namespace fastattn {
namespace cuda {

// The keys per step for the widths of Q and K, and of V: as many as fit in registers and shared
// memory. A thread of a consumer holds half a row of O and of each S, and a quarter of a row of P.
constexpr int forward_registers(int keys, int value_width, int score_buffers) {
  return value_width / 2 + score_buffers * keys / 2 + keys / 4 + hopper::kSpareRegisters;
}

template <int kQueryWidth, int kValueWidth, bool kGeneral>
struct HopperForwardShape {
  static constexpr int kQ = kQueryWidth, kV = kValueWidth;
  static constexpr int kKeys = kGeneral    ? 64
                               : kV == 64  ? 96
                               : kV == 96  ? 80
                               : kV == 128 ? 80
                               : kV == 192 ? 64
                                           : 80;
  // Two buffers of scores in registers; with options or with 256 columns of O there is room for one
  // only.
  static constexpr bool kOverlapped = !kGeneral && kV < 256;
  static constexpr int kKStages = kOverlapped ? 3 : 2, kVStages = 2;
  using QTile = hopper::SwizzledTile<hopper::kRows, kQ>;
  using KTile = hopper::SwizzledTile<kKeys, kQ>;
  using VTile = hopper::SwizzledTile<kKeys, kV>;
  struct SharedStorage {
    typename QTile::Storage q_tile;
    typename KTile::Storage k_tiles[kKStages];
    typename VTile::Storage v_tiles[kVStages];
    uint64_t q_full, q_empty;
    uint64_t k_full[kKStages], k_empty[kKStages];
    uint64_t v_full[kVStages], v_empty[kVStages], v_landed[kVStages];
    float low[hopper::kConsumerThreads][2];  // of ScaledSoftmax, for the rows of each thread
    int seen[2 * kKeys];                     // [2, kKeys], for two steps: can a query see the key?
  };
  static_assert(sizeof(SharedStorage) <= hopper::kMaxSharedBytes, "too much shared memory");
  static_assert(forward_registers(kKeys, kV, kOverlapped ? 2 : 1) <= hopper::kConsumerRegisters,
                "too many registers");
};

template <class T, class Shape, bool kGeneral>
struct HopperForward {
  static constexpr int kKeys = Shape::kKeys, kKeyTiles = kKeys / 8, kValueTiles = Shape::kV / 8;
  using KRing = hopper::Ring<Shape::kKStages>;
  using VRing = hopper::Ring<Shape::kVStages>;
  using QRing = hopper::Ring<1>;
  using Scores = float[kKeys / 2];
  using Softmax = typename std::conditional<kGeneral, OnlineSoftmax, ScaledSoftmax>::type;
  using SharedStorage = typename Shape::SharedStorage;

  const HopperArguments& given;
  SharedStorage& shared;

  FASTATTN_DEVICE explicit HopperForward(const HopperArguments& arguments)
      : given(arguments), shared(*reinterpret_cast<SharedStorage*>(dynamic_shared())) {}

  FASTATTN_DEVICE typename Shape::QTile q_tile() const { return {shared.q_tile.data}; }
  FASTATTN_DEVICE typename Shape::KTile k_tile(int stage) const {
    return Shape::KTile::nth(shared.k_tiles, stage);
  }
  FASTATTN_DEVICE typename Shape::VTile v_tile(int stage) const {
    return Shape::VTile::nth(shared.v_tiles, stage);
  }

  // Sets how many arrivals complete each barrier; by one thread, before the others use them.
  FASTATTN_DEVICE void init_barriers() const {
    constexpr int kConsumerWarps = 4 * hopper::kConsumers;
    mbarrier_init(&shared.q_full, 1);
    mbarrier_init(&shared.q_empty, kConsumerWarps);
    for (int n = 0; n < Shape::kKStages; ++n) {
      mbarrier_init(shared.k_full + n, 1);
      mbarrier_init(shared.k_empty + n, kConsumerWarps);
    }
    for (int n = 0; n < Shape::kVStages; ++n) {
      mbarrier_init(shared.v_full + n, 1);
      mbarrier_init(shared.v_empty + n, kConsumerWarps);
      mbarrier_init(shared.v_landed + n, 1);
    }
    mbarrier_fence_init();
  }

  using Work = hopper::QueryTile<kKeys>;

  // -- the producer ------------------------------------------------------------------------------

  // Called by one warp.
  FASTATTN_DEVICE void load_all() const {
    prefetch_tensor_map(given.q_operand.map);
    prefetch_tensor_map(given.k_operand.map);
    prefetch_tensor_map(given.v_operand.map);
    QRing q_ring;
    KRing k_ring;
    VRing v_ring;
    hopper::for_each_query_tile<kKeys, false>(given, [&](const Work& work) {
      const auto& q = given.q_operand;
      const auto& k = given.k_operand;
      const auto& v = given.v_operand;
      mbarrier_wait(&shared.q_empty, q_ring.parity ^ 1);
      q_tile().load(q.map, &shared.q_full, given.tile_rows * given.group,
                    work.h_kv * given.group * q.head_step, work.p.q_row + work.i0,
                    work.b * q.batch_step);
      q_ring.advance();
      // K is loaded one step ahead of V.
      for (int j = 0; j <= work.count; ++j) {
        if (j < work.count) {
          mbarrier_wait(shared.k_empty + k_ring.stage, k_ring.parity ^ 1);
          k_tile(k_ring.stage)
              .load(k.map, shared.k_full + k_ring.stage, kKeys, work.h_kv * k.head_step,
                    work.p.k_row + work.key(j), work.b * k.batch_step);
          k_ring.advance();
        }
        if (j == 0) continue;
        mbarrier_wait(shared.v_empty + v_ring.stage, v_ring.parity ^ 1);
        uint64_t* barrier = work.is_edge(j - 1, given.Lk) ? shared.v_landed : shared.v_full;
        v_tile(v_ring.stage)
            .load(v.map, barrier + v_ring.stage, kKeys, work.h_kv * v.head_step,
                  work.p.k_row + work.key(j - 1), work.b * v.batch_step);
        v_ring.advance();
      }
    });
  }

  // The loop of the warp that clears rows of V past the end, which may be NaN.
  FASTATTN_DEVICE void clear_all() const {
    hopper::clear_edges<kKeys, Shape::kVStages>(given, shared.v_landed, shared.v_full,
                                                [&](int stage) { return v_tile(stage); });
  }

  // -- the consumers -----------------------------------------------------------------------------

  struct Consumer {
    const HopperForward& kernel;
    const int consumer, lane;
    float o[Shape::kV / 2];  // O, not yet divided by the sum of the weights
    Scores scores[2];
    uint32_t weights[kKeys / 16][4];
    Softmax softmax;
    float unit;      // of the scores
    int i[2];        // the queries of this thread's rows
    Range all_seen;  // steps whose keys are visible to all queries of this consumer
    QRing q_ring;
    KRing k_ring;
    VRing v_ring;
    MatrixDescriptor q_rows, k_rows, v_columns;  // of the first buffers

    FASTATTN_DEVICE Consumer(const HopperForward& kernel, int which)
        : kernel(kernel), consumer(which), lane(static_cast<int>(threadIdx.x) & 31) {
      unit = kGeneral ? 1.0f : kernel.given.scale_float;
      q_rows = kernel.q_tile().of_rows() + 64 * 128 * consumer;
      k_rows = kernel.k_tile(0).of_rows();
      v_columns = kernel.v_tile(0).of_columns();
    }

    FASTATTN_DEVICE int head(const Work& work, int r) const {
      return hopper::head_of_row(kernel.given, work, hopper::row_of_thread(r));
    }

    FASTATTN_DEVICE float (&low() const)[2] { return kernel.shared.low[threadIdx.x - 128]; }

    FASTATTN_DEVICE void await_turn() const {
      barrier_sync(hopper::kTurnBarrier + consumer, hopper::kConsumerThreads);
    }
    FASTATTN_DEVICE void pass_turn() const {
      barrier_arrive(hopper::kTurnBarrier + 1 - consumer, hopper::kConsumerThreads);
    }

    FASTATTN_DEVICE void release(uint64_t* barrier) const {
      if (lane == 0) mbarrier_arrive(barrier);
    }

    // Issues the next S = Q K^T.
    FASTATTN_DEVICE void begin_scores(Scores& s) const {
      mbarrier_wait(kernel.shared.k_full + k_ring.stage, k_ring.parity);
      const MatrixDescriptor b = k_rows + k_ring.stage * Shape::KTile::kBytes;
      wgmma_fence();
      FASTATTN_UNROLL
      for (int step = 0; step < Shape::kQ / 16; ++step)
        wgmma_ss<T, kKeys, false>(s, q_rows + Shape::QTile::columns_at(step),
                                  b + Shape::KTile::columns_at(step), step > 0);
      wgmma_commit();
    }

    // S is complete.
    FASTATTN_DEVICE void end_scores(Scores& s) {
      wgmma_arrived(s);
      release(kernel.shared.k_empty + k_ring.stage);
      k_ring.advance();
    }

    // Called before the wait for P V that follows the softmax. This wait contains a loop. Without
    // one the compiler moves the wait for P V before all exponentials, and the two no longer
    // overlap.
    FASTATTN_DEVICE void await_values() const {
      mbarrier_wait(kernel.shared.v_full + v_ring.stage, v_ring.parity);
    }

    // Issues O += P V.
    FASTATTN_DEVICE void begin_values() {
      const MatrixDescriptor b = v_columns + v_ring.stage * Shape::VTile::kBytes;
      wgmma_fence();
      FASTATTN_UNROLL
      for (int step = 0; step < kKeys / 16; ++step)
        wgmma_rs<T, Shape::kV, true>(o, weights[step], b + Shape::VTile::rows_at(step), true);
      wgmma_commit();
      v_ring.advance();
    }

    FASTATTN_DEVICE void run(const Work& work) {
      softmax.init();
      FASTATTN_UNROLL
      for (int n = 0; n < Shape::kV / 2; ++n) o[n] = 0.0f;
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r)
        i[r] = hopper::query_of_row(kernel.given, work, hopper::row_of_thread(r));
      const int count = work.count;
      if (count > 0) {
        all_seen = hopper::all_seen(kernel.given, work, consumer);
        mbarrier_wait(&kernel.shared.q_full, q_ring.parity);
        if (Shape::kOverlapped)
          run_overlapped(work);
        else
          run_one_by_one(work);
        wgmma_wait<0>();
        end_values();
        q_ring.advance();
      }
      finish(work);
    }

    // With options: P V_{j-1} and then Q K_j^T are computed while the other consumer computes its
    // weights.
    FASTATTN_DEVICE void run_one_by_one(const Work& work) {
      for (int j = 0; j < work.count; ++j) {
        begin_scores(scores[0]);
        wgmma_wait<0>();
        end_scores(scores[0]);
        if (j > 0) end_values();
        if (j + 1 == work.count) release(&kernel.shared.q_empty);
        float shrink[2];
        weigh(work, j, scores[0], shrink);
        await_values();
        take_weights(shrink, scores[0]);
        begin_values();
      }
    }

    // Without options: S has two buffers, and each has its own code, because registers cannot be
    // indexed. The products of S must not be issued in a branch, or the compiler waits for each of
    // them.
    FASTATTN_DEVICE void run_overlapped(const Work& work) {
      begin_scores(scores[0]);
      wgmma_wait<0>();
      end_scores(scores[0]);
      await_turn();
      int j = 0;
      for (; j + 2 < work.count; j += 2) {
        step(work, j, scores[0], scores[1]);
        step(work, j + 1, scores[1], scores[0]);
      }
      if (j + 1 < work.count) {
        step(work, j, scores[0], scores[1]);
        last_step(work, j + 1, scores[1]);
      } else {
        last_step(work, j, scores[0]);
      }
    }

    // S_j is complete, and P V_{j-1} is issued. Q K_{j+1}^T is computed during this softmax.
    FASTATTN_DEVICE void step(const Work& work, int j, Scores& s, Scores& next) {
      begin_scores(next);
      pass_turn();
      float shrink[2];
      weigh(work, j, s, shrink);
      await_values();
      wgmma_wait<1>();
      if (j > 0) end_values();
      take_weights(shrink, s);
      await_turn();
      begin_values();
      wgmma_wait<1>();
      end_scores(next);
    }

    // The last block of keys, after which no scores are computed meanwhile.
    FASTATTN_DEVICE void last_step(const Work& work, int j, Scores& s) {
      pass_turn();
      release(&kernel.shared.q_empty);
      float shrink[2];
      weigh(work, j, s, shrink);
      await_values();
      wgmma_wait<0>();
      if (j > 0) end_values();
      take_weights(shrink, s);
      begin_values();
    }

    // Turns scores into weights.
    FASTATTN_DEVICE void weigh(const Work& work, int j, Scores& s, float (&shrink)[2]) {
      apply_options(work, j, s);
      if (kGeneral && excludes_pairs(work.p)) clear_unseen_values(s);
      if constexpr (kGeneral)
        softmax.template update<kKeyTiles>(s, unit, shrink);
      else
        softmax.template update<kKeyTiles>(s, unit, shrink, low());
      if (kGeneral) drop(work, j, s);
    }

    // P V is complete.
    FASTATTN_DEVICE void end_values() {
      wgmma_arrived(o);
      release(kernel.shared.v_empty + v_ring.previous());
    }

    // Rescales O to the new maximum, and packs P for the next product.
    FASTATTN_DEVICE void take_weights(const float (&shrink)[2], Scores& s) {
      FASTATTN_UNROLL
      for (int e = 0; e < Shape::kV / 2; ++e) o[e] *= shrink[e / 2 % 2];
      wgmma_arrived(s);  // otherwise the compiler keeps the old and the new weights live at once
      FASTATTN_UNROLL
      for (int e = 0; e < kKeys / 4; ++e) weights[e / 4][e % 4] = T::pack(s[2 * e], s[2 * e + 1]);
    }

    // The column of accumulator (n, e) of wgmma, for this lane.
    static FASTATTN_DEVICE int column_of(int n, int e) {
      return 8 * n + 2 * (static_cast<int>(threadIdx.x) & 3) + e;
    }

    // Turns dot products into scores. Without options they stay unscaled, and only the window
    // applies.
    FASTATTN_DEVICE void apply_options(const Work& work, int j, Scores& s) const {
      const int j0 = work.key(j);
      if (!kGeneral && all_seen.has(j)) return;
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Options options(work.p, work.b, head(work, r));
        const Range visible = visible_keys(work.p, i[r]);
        FASTATTN_UNROLL
        for (int n = 0; n < kKeyTiles; ++n) FASTATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + 2 * r + e];
          const int key = j0 + column_of(n, e);
          if (kGeneral)
            x = options.score(x, i[r], key, visible).value;
          else if (!visible.has(key))
            x = minus_infinity();
        }
      }
    }

    // Zeroes the values of keys that the options hide from all queries of the tile.
    FASTATTN_DEVICE void clear_unseen_values(const Scores& s) const {
      static_assert(Shape::kVStages == 2, "flags have a buffer for each stage");
      bool any[kKeyTiles * 2] = {};
      FASTATTN_UNROLL
      for (int e = 0; e < kKeys / 2; ++e) any[e / 4 * 2 + e % 2] |= s[e] != minus_infinity();
      await_values();
      hopper::clear_unseen<kKeys>(kernel.shared.seen, v_ring.stage, any,
                                  kernel.v_tile(v_ring.stage));
    }

    // Applies dropout to the weights of a block.
    FASTATTN_DEVICE void drop(const Work& work, int j, Scores& s) const {
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Options options(work.p, work.b, head(work, r));
        if (!options.drops()) return;
        FASTATTN_UNROLL
        for (int n = 0; n < kKeyTiles; ++n) {
          const Words words = options.words(i[r], work.key(j) + 8 * n);
          FASTATTN_UNROLL
          for (int e = 0; e < 2; ++e) {
            float& x = s[4 * n + 2 * r + e];
            const float kept = options.kept(words, column_of(n, e));
            x = kept == 0.0f ? 0.0f : x * kept;  // a dropped weight is 0 even if it is NaN
          }
        }
      }
    }

    // Writes O / l and lse to global memory.
    FASTATTN_DEVICE void finish(const Work& work) {
      softmax.finish();
      FASTATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        const bool there = i[r] < work.last_query;
        const int h = head(work, r);
        const float sink = sink_of(kernel.given, work.b, h);
        RowTotal total;
        if constexpr (kGeneral)
          total = softmax.total(r, unit, sink);
        else
          total = softmax.total(r, unit, sink, low());
        hopper::store_row<T, Shape::kV>(o + 2 * r, total.factor, work.p.out, work.b, h,
                                        work.p.q_row + int64_t(i[r]), work.p.Dv, there);
        if (there && (lane & 3) == 0) work.p.lse[stats_row(work.p, work.b, h, i[r])] = total.lse();
      }
    }
  };
};

// out and lse: a producer loads tiles, and the consumers compute.
template <class T, int kQueryWidth, int kValueWidth, bool kGeneral>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    attention_forward_hopper_kernel(const __grid_constant__ HopperArguments given) {
// The host pass must see the body; other architectures cannot compile it.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = HopperForwardShape<kQueryWidth, kValueWidth, kGeneral>;
  using Kernel = HopperForward<T, Shape, kGeneral>;
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
  const int consumer = warp / 4 - 1;
  typename Kernel::Consumer me(kernel, consumer);
  if (Shape::kOverlapped && consumer == 1) me.pass_turn();
  hopper::for_each_query_tile<Shape::kKeys, true>(
      given, [&](const typename Kernel::Work& work) { me.run(work); });
  if (Shape::kOverlapped && consumer == 0) me.await_turn();
#endif
}

}  // namespace cuda
}  // namespace fastattn
