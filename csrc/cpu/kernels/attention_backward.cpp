// Backward attention. With P = softmax(S) recomputed from the log-sum-exp, W = dropout(P) and dP =
// V dO^T + dW:
//
//   dV = W^T dO     dS = P o (dropout(dP) - delta)     dK = scale dS^T Q     dQ = scale dS K     d
//   mask = dS delta_i = sum_d dO_id O_id + sum_j W_ij dW_ij - dlse_i
//
// One pass over pairs of a block of keys and a panel of queries, scores transposed as in the
// forward pass: S^T and dS^T are the right-hand side of dQ^T, and their rows are the broadcast
// left-hand side of dK and dV.
#include "attention_backward.h"

#include "../threads.h"
#include "attention_weights.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// What makes probabilities of scores, and delta, for every query.
template <class P>
class Prepare {
  typedef typename P::Storage Storage;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kLanesOfPanel = kPanelLanes<P>;

 public:
  // `whole`: the unit computes delta itself, and needs an estimate only.
  Prepare(const AttentionParams& params, PreparedRows<T> out, bool whole)
      : p(params), tiles(params), out_(out), Bk(key_block<P>(params.D, params.Dv)), whole_(whole) {}

  void run(int team) {
    const int64_t panels = (p.Lq + kLanesOfPanel - 1) / kLanesOfPanel, tasks = p.B * p.Hq * panels;
    const bool weighted = !whole_ && p.grad_weights.data != nullptr;
#pragma omp parallel num_threads(team) if (team > 1)
    {
      const size_t own = static_cast<size_t>((2 * p.Dv + Bk) * kLanesOfPanel) * sizeof(T);
      char* base = static_cast<char*>(thread_scratch(tiles.allocate(nullptr).bytes + own));
      typename WeightsPass<P>::Buffers buf = tiles.allocate(base);
      T* o = reinterpret_cast<T*>(base + buf.bytes);  // [Dv][lanes]
      T* g = o + p.Dv * kLanesOfPanel;                // [Dv][lanes]
      T* grad = g + p.Dv * kLanesOfPanel;             // [Bk][lanes]
#pragma omp for schedule(dynamic, 16)
      for (int64_t t = 0; t < tasks; ++t) {
        const int64_t head = t / panels, i0 = t % panels * kLanesOfPanel;
        const int64_t b = head / p.Hq, h = head % p.Hq, i1 = min_of(p.Lq, i0 + kLanesOfPanel);
        from_output(o, g, b, h, i0, i1);
        scale(buf, b, h, i0, i1);
        if (weighted) from_weights(buf, grad, b, h, i0, i1, out_.delta + head * p.Lq);
      }
    }
  }

 private:
  const AttentionParams& p;
  const WeightsPass<P> tiles;
  const PreparedRows<T> out_;
  const int64_t Bk;
  const bool whole_;

  // The sum over d is the same chain of multiply-adds as in score_products: for a row that sees one
  // key, O is its value, and dP - delta is exactly 0.
  void from_output(T* o, T* g, int64_t b, int64_t h, int64_t i0, int64_t i1) const {
    constexpr int64_t lanes = kLanesOfPanel;
    const int64_t *so = p.out.stride, *sg = p.grad_out.stride, rows = i1 - i0,
                  head = (b * p.Hq + h) * p.Lq, chain = longest_chain(p);
    const Storage* out =
        static_cast<const Storage*>(p.out.data) + b * so[0] + h * so[1] + i0 * so[2];
    const Storage* grad =
        static_cast<const Storage*>(p.grad_out.data) + b * sg[0] + h * sg[1] + i0 * sg[2];
    pack_transposed<T>(out, so[2], so[3], rows, p.Dv, lanes, o, lanes);
    pack_transposed<T>(grad, sg[2], sg[3], rows, p.Dv, lanes, g, lanes);
    alignas(kVectorBytes) T total[lanes] = {};
    for (int64_t l = 0; l < lanes; l += W) {
      for (int64_t d0 = 0; d0 < p.Dv; d0 += chain) {
        Vec<T> acc{};
        for (int64_t d = d0; d < min_of(p.Dv, d0 + chain); ++d)
          acc += load(o + d * lanes + l) * load(g + d * lanes + l);
        store(total + l, d0 == 0 ? acc : load(total + l) + acc);
      }
    }
    for (int64_t i = i0; i < i1; ++i) {
      const T sum = total[i - i0],
              last = p.grad_lse != nullptr ? static_cast<T>(p.grad_lse[head + i]) : T(0);
      out_.center[head + i] = whole_ ? sum : T(0);
      out_.delta[head + i] = (whole_ ? T(0) : sum) - last;
    }
  }

  void scale(typename WeightsPass<P>::Buffers& buf, int64_t b, int64_t h, int64_t i0,
             int64_t i1) const {
    const Storage* q =
        static_cast<const Storage*>(p.q.data) + b * p.q.stride[0] + h * p.q.stride[1];
    const int64_t rows = i1 - i0, lanes = tiles.lanes_for(rows);
    pack_panel<P>(q + i0 * p.q.stride[2], p.q.stride[2], p.q.stride[3], rows, p.D, lanes, buf.q,
                  lanes, buf.temp);
    tiles.scale_rows(buf, b, h, i0, i1, buf.q, buf.rows);
    const RowScale<T> to = out_.rows.at((b * p.Hq + h) * p.Lq + i0);
    for (int64_t i = 0; i < rows; ++i) {
      to.high[i] = buf.rows.high[i];
      to.low[i] = buf.rows.low[i];
      to.inverse[i] = buf.rows.inverse[i];
    }
  }

  void from_weights(typename WeightsPass<P>::Buffers& buf, T* grad, int64_t b, int64_t h,
                    int64_t i0, int64_t i1, T* delta) const {
    constexpr int64_t lanes = kLanesOfPanel;
    const int64_t hk = h / (p.Hq / p.Hkv);
    const Storage* q =
        static_cast<const Storage*>(p.q.data) + b * p.q.stride[0] + h * p.q.stride[1];
    const Storage* k =
        static_cast<const Storage*>(p.k.data) + b * p.k.stride[0] + hk * p.k.stride[1];
    pack_panel<P>(q + i0 * p.q.stride[2], p.q.stride[2], p.q.stride[3], i1 - i0, p.D, lanes, buf.q,
                  lanes, buf.temp);
    Vec<T> total[kPanelVectors] = {};
    for (int64_t j0 = 0; j0 < p.Lk; j0 += Bk) {
      const int64_t j1 = min_of(p.Lk, j0 + Bk);
      const Word* ks =
          stage_keys<P>(k + j0 * p.k.stride[2], p.k.stride[2], p.k.stride[3], j1 - j0, p.D, buf.k);
      tiles.template weights_tile<kPanelVectors>(buf, b, h, i0, i1, j0, j1, buf.q, ks, buf.rows);
      pack_grad_weights<P>(p, b, h, i0, i1, j0, j1, grad);
      for (int64_t j = 0; j < j1 - j0; ++j)
        FASTATTN_UNROLL for (int n = 0; n < kPanelVectors; ++n) {
          const int64_t at = j * lanes + n * W;
          total[n] += load(buf.s + at) * load(grad + at);
        }
    }
    for (int64_t i = i0; i < i1; ++i) delta[i] += total[(i - i0) / W][(i - i0) % W];
  }
};

// The parallel schedule. A unit is (key head, chunk of keys): it owns dK and dV of its chunk and
// adds a partial dQ. Chunks depend on Lk alone and partial dQs are added in the order of chunks, in
// parallel or not: same bits.
template <class P>
class Backward {
  typedef typename P::Acc T;

 public:
  explicit Backward(const AttentionParams& params) : p(params), unit_(params) {}

  void run() {
    const int64_t heads = p.B * p.Hkv, group = p.Hq / p.Hkv, rows = p.B * p.Hq * p.Lq;
    const double flops = 10.0 * static_cast<double>(rows) * p.Lk * (p.D + p.Dv) / 2;
    T* const memory =
        static_cast<T*>(__builtin_malloc(static_cast<size_t>(5 * rows) * sizeof(T) + 1));
    const PreparedRows<T> prepared{
        {memory, memory + rows, memory + 2 * rows}, memory + 3 * rows, memory + 4 * rows};
    Prepare<P>(p, prepared, unit_.sums_delta()).run(team_size(p.threads, rows, flops));

    // Units that add to the same element of the mask's gradient must follow each other. `owners`
    // sets of key heads are independent; an owner's members take turns. Chunks are independent
    // unless the mask has no key axis.
    const bool wanted = p.grad_mask.data != nullptr;
    const bool own_batch = !wanted || p.B == 1 || p.grad_mask.stride[0] != 0;
    const bool own_head = !wanted || p.Hkv == 1 || p.grad_mask.stride[1] != 0;
    const bool own_keys = !wanted || p.grad_mask.stride[3] != 0;
    const int64_t owners = (own_batch ? p.B : 1) * (own_head ? p.Hkv : 1), members = heads / owners;
    const auto head_of = [&](int64_t owner, int64_t member) {
      if (own_batch && own_head) return owner;
      if (own_batch) return owner * p.Hkv + member;
      if (own_head) return member * p.Hkv + owner;
      return member;
    };

    const int64_t chunks = unit_.chunks(), dq_size = unit_.dq_size(), head_size = group * dq_size;
    const bool split = own_keys && chunks > 1 && p.threads > 1 && owners < 4 * p.threads;
    const int team = team_size(p.threads, split ? owners * chunks : owners, flops);
    const int64_t partials = split ? owners * chunks : 0;
    T* partial = static_cast<T*>(
        __builtin_malloc(static_cast<size_t>(partials * head_size) * sizeof(T) + 1));
#pragma omp parallel num_threads(team) if (team > 1)
    {
      typedef typename BackwardUnit<P>::Buffers Buffers;
      const size_t own = split ? 0 : static_cast<size_t>(2 * head_size) * sizeof(T);
      char* base = static_cast<char*>(thread_scratch(unit_.allocate(nullptr).bytes + own));
      Buffers buf = unit_.allocate(base);
      T* total = reinterpret_cast<T*>(base + buf.bytes);
      T* part = total + head_size;
      if (split) {
        for (int64_t m = 0; m < members; ++m) {
#pragma omp for schedule(dynamic, 1)
          for (int64_t t = 0; t < owners * chunks; ++t)
            unit_.run(buf, head_of(t / chunks, m), t % chunks, prepared, partial + t * head_size);
#pragma omp for schedule(dynamic, 1)
          for (int64_t t = 0; t < owners * group; ++t) {
            T* sum = partial + t / group * chunks * head_size + t % group * dq_size;
            for (int64_t c = 1; c < chunks; ++c) add(sum, sum + c * head_size, dq_size);
            unit_.write_dq(head_of(t / group, m), t % group, sum);
          }
        }
      } else {
#pragma omp for schedule(dynamic, 1)
        for (int64_t owner = 0; owner < owners; ++owner) {
          for (int64_t m = 0; m < members; ++m) {
            const int64_t head = head_of(owner, m);
            for (int64_t c = 0; c < chunks; ++c) {
              unit_.run(buf, head, c, prepared, c == 0 ? total : part);
              if (c > 0) add(total, part, head_size);
            }
            for (int64_t g = 0; g < group; ++g) unit_.write_dq(head, g, total + g * dq_size);
          }
        }
      }
    }
    __builtin_free(partial);
    __builtin_free(memory);
  }

 private:
  const AttentionParams& p;
  BackwardUnit<P> unit_;

  static void add(T* sum, const T* x, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes<T>) store(sum + i, load(sum + i) + load(x + i));
  }
};

}  // namespace

void attention_backward(const AttentionParams& p) {
  if (p.B == 0 || p.Hq == 0 || p.Lq == 0 || p.Lk == 0)
    return;  // nothing to add: the caller passed zeros
  with_policy(p.dtype, [&](auto policy) { Backward<decltype(policy)>(p).run(); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
