// The schedule of the backward pass: what is prepared for every query, and which thread runs which
// unit.
#pragma once
#include "../../score_program.h"
#include "../threads.h"
#include "sdpa_gradients.h"
#include "sdpa_weights.h"
#include "team.h"
#include "varlen.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// For every query: delta, and the row scale that turns scores into probabilities.
template <class P>
class Prepare {
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kLanesOfPanel = kPanelLanes<P>;

 public:
  // `whole`: the unit computes delta itself and needs only an estimate. `forward_scores`: its
  // scores have the bits of the forward pass's.
  Prepare(const Sequence& params, PreparedRows<T> out, bool whole, bool forward_scores)
      : p(params),
        rule(make_rule<T>(params)),
        tiles(params),
        out_(out),
        Bk(key_block<P>(params.D, params.Dv)),
        whole_(whole),
        forward_scores_(forward_scores) {}

  int64_t tasks() const { return p.B * p.Hq * panels(); }

  size_t bytes() const {
    return tiles.allocate(nullptr).bytes +
           static_cast<size_t>((2 * p.Dv + Bk) * kLanesOfPanel) * sizeof(T);
  }

  void head(int64_t b, int64_t h, char* base) const {
    for (int64_t i = 0; i < panels(); ++i) run((b * p.Hq + h) * panels() + i, base);
  }

  // Task t: a panel of queries of a head.
  void run(int64_t t, char* base) const {
    typename WeightsPass<P>::Buffers buf = tiles.allocate(base);
    T* o = reinterpret_cast<T*>(base + buf.bytes);  // [Dv][lanes]
    T* g = o + p.Dv * kLanesOfPanel;                // [Dv][lanes]
    T* grad = g + p.Dv * kLanesOfPanel;             // [Bk][lanes]
    const int64_t head = t / panels(), i0 = t % panels() * kLanesOfPanel;
    const int64_t b = head / p.Hq, h = head % p.Hq, i1 = min_of(p.Lq, i0 + kLanesOfPanel);
    from_output(o, g, b, h, i0, i1);
    scale(buf, b, h, i0, i1);
    if (!whole_ && p.grad_weights.data != nullptr)
      from_weights(buf, grad, b, h, i0, i1, out_.delta + head * p.Lq);
  }

 private:
  const Sequence& p;
  const ScoreRule<T> rule;
  const WeightsPass<P> tiles;
  const PreparedRows<T> out_;
  const int64_t Bk;
  const bool whole_, forward_scores_;

  int64_t panels() const { return (p.Lq + kLanesOfPanel - 1) / kLanesOfPanel; }

  // The sum over d is the same chain of multiply-adds as in score_products. If a row can see only
  // one key, O is its value, and dP - delta is exactly 0.
  void from_output(T* o, T* g, int64_t b, int64_t h, int64_t i0, int64_t i1) const {
    const int64_t *so = p.out.stride, *sg = p.grad_out.stride, rows = i1 - i0,
                  lanes = tiles.lanes_for(rows), head = (b * p.Hq + h) * p.Lq,
                  chain = longest_chain<T>(p);
    const double* grad_lse =
        p.grad_lse == nullptr ? nullptr : p.grad_lse + (b * p.Hq + h) * p.lse_stride;
    const Source out = P::elements(p.out.data, p.dtype) + b * so[0] + h * so[1] + i0 * so[2];
    const Source grad = P::elements(p.grad_out.data, p.dtype) + b * sg[0] + h * sg[1] + i0 * sg[2];
    pack_transposed<T>(out, so[2], so[3], rows, p.Dv, lanes, o, lanes);
    pack_transposed<T>(grad, sg[2], sg[3], rows, p.Dv, lanes, g, lanes);
    alignas(kVectorBytes) T total[kLanesOfPanel] = {};
    for (int64_t l = 0; l < lanes; l += W) {
      for (int64_t d0 = 0; d0 < p.Dv; d0 += chain) {
        Vec<T> acc{};
        for (int64_t d = d0; d < min_of(p.Dv, d0 + chain); ++d)
          acc += load(o + d * lanes + l) * load(g + d * lanes + l);
        store(total + l, d0 == 0 ? acc : load(total + l) + acc);
      }
    }
    for (int64_t i = i0; i < i1; ++i) {
      const T sum = total[i - i0], last = grad_lse != nullptr ? static_cast<T>(grad_lse[i]) : T(0);
      out_.center[head + i] = whole_ ? sum : T(0);
      out_.delta[head + i] = (whole_ ? T(0) : sum) - last;
    }
  }

  // Packs `rows` queries from i0 on into a panel.
  void pack_queries(typename WeightsPass<P>::Buffers& buf, int64_t b, int64_t h, int64_t i0,
                    int64_t rows, int64_t lanes) const {
    const int64_t* st = p.q.stride;
    const Source q = P::elements(p.q.data, p.dtype) + b * st[0] + h * st[1] + i0 * st[2];
    pack_panel<P>(q, st[2], st[3], rows, p.D, lanes, buf.q, lanes, buf.temp);
  }

  // Prepares the row scales of queries [i0, i1).
  void scale(typename WeightsPass<P>::Buffers& buf, int64_t b, int64_t h, int64_t i0,
             int64_t i1) const {
    const int64_t rows = i1 - i0;
    const auto packed = [&] {
      pack_queries(buf, b, h, i0, rows, tiles.lanes_for(rows));
      return buf.q;
    };
    tiles.scale_rows(buf, b, h, i0, i1, packed, buf.rows);
    const RowScale<T> to = out_.rows.at((b * p.Hq + h) * p.Lq + i0);
    for (int64_t i = 0; i < rows; ++i) {
      const double lse = p.lse[(b * p.Hq + h) * p.lse_stride + i0 + i];
      to.high[i] = buf.rows.high[i];
      to.low[i] = buf.rows.low[i];
      to.inverse[i] = buf.rows.inverse[i];
      if (!forward_scores_ || lse - lse != 0) continue;
      scale_from_lse(rule, lse, to.at(i));
      if (-kAbsorbingLse < lse && lse < kAbsorbingLse) continue;
      // The log-sum-exp is the maximum of the forward scores, which these rows must subtract. The
      // maximum recomputed above is rounded otherwise, by more than an exponential can take. The
      // sum counts the keys that share the maximum.
      to.low[i] = T(0);
      to.inverse[i] = buf.rows.inverse[i];
    }
  }

  // Adds the gradients of the weights to delta: sum_j P dP of these gradients.
  void from_weights(typename WeightsPass<P>::Buffers& buf, T* grad, int64_t b, int64_t h,
                    int64_t i0, int64_t i1, T* delta) const {
    constexpr int64_t lanes = kLanesOfPanel;
    const int64_t hk = h / (p.Hq / p.Hkv);
    const Source k = P::elements(p.k.data, p.dtype) + b * p.k.stride[0] + hk * p.k.stride[1];
    pack_queries(buf, b, h, i0, i1 - i0, lanes);
    Vec<T> total[kPanelVectors] = {};
    for (int64_t j0 = 0; j0 < p.Lk; j0 += Bk) {
      const int64_t j1 = min_of(p.Lk, j0 + Bk);
      const Word* ks =
          stage_keys<P>(k + j0 * p.k.stride[2], p.k.stride[2], p.k.stride[3], j1 - j0, p.D, buf.k);
      tiles.template weights_tile<kPanelVectors>(buf, b, h, i0, i1, j0, j1, buf.q, ks, buf.rows);
      pack_grad_weights<P, kPanelVectors>(p, b, h, i0, i1, j0, j1, grad);
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
// adds a partial dQ. Chunks depend on Lk alone, and partial dQs are added in the order of chunks,
// in parallel or not, so the bits are the same. `Units` chooses the type of a sequence's unit from
// the sequence alone, so that its bits do not depend on the others either.
template <class P, class Units>
class Backward {
  typedef typename P::Acc T;

 public:
  // Counts the tasks of all sequences.
  explicit Backward(const Sequences& sequences) : sequences_(sequences) {
    for (int64_t n = 0; n < sequences.count(); ++n) {
      const Sequence s = sequences.at(n);
      work_ += static_cast<double>(owners(s).count) * s.Lq * s.Lk;
      flops_ += 5.0 * static_cast<double>(s.B * s.Hq * s.Lq) * s.Lk * (s.D + s.Dv);
    }
  }

  // Prepares all rows and runs all tasks, on one thread or on a team.
  void run() {
    const Sequence first = sequences_.at(0);
    Units::with(first, [&](const auto& unit) { run_from(first, unit); });
  }

 private:
  const Sequences& sequences_;
  double work_ = 0, flops_ = 0;
  T* memory_ = nullptr;

  // The row statistics of all queries, then dq, dk and dv by chunks of keys. `of_first`: the unit
  // of the first sequence.
  template <class First>
  void run_from(const Sequence& first, const First& of_first) {
    const int64_t count = sequences_.count();
    const Tasks rows(count, [&](int64_t n) {
      const Sequence s = sequences_.at(n);
      return s.B * s.Hq * s.Lq;
    });
    memory_ =
        static_cast<T*>(__builtin_malloc(static_cast<size_t>(5 * rows.total()) * sizeof(T) + 1));
    prepare(rows);

    // Round m runs the m-th member of every owner. There is one round if no gradient of a mask is
    // shared.
    const Tasks parts(count, [&](int64_t n) { return plan(n).partial; });
    constexpr int64_t kCacheLine = 64;
    void* const allocated =
        __builtin_malloc(static_cast<size_t>(parts.total()) * sizeof(T) + kCacheLine);
    T* const partial = reinterpret_cast<T*>(
        round_up(reinterpret_cast<int64_t>(allocated), kCacheLine));  // tiles store whole lines
    const int64_t rounds = splits(first) ? owners(first).members : 1;
    const Tasks tasks(count, [&](int64_t n) { return plan(n).tasks; });
    const Tasks sums(count, [&](int64_t n) { return plan(n).sums; });
    const int team = team_size(sequences_.threads(), tasks.total(), flops_);
    const bool follow = of_first.heads_follow();  // then the heads of all sequences do
    const int64_t chunk =
        follow ? max_of<int64_t>(1, min_of(kHeadsInOrder, tasks.total() / (team * 4))) : 1;
    const auto run_unit = [&](const Sequence& s, const auto& unit, int64_t n, int64_t own,
                              int64_t m) {
      if (splits(s))
        one_chunk(s, unit, own, m, prepared(rows, n), partial + parts.before(n));
      else
        all_chunks(s, unit, own, prepared(rows, n));
    };
    const auto run_task = [&](int64_t t, int64_t m) __attribute__((noinline)) {
      if (count == 1 && !has_score_sums(first)) return run_unit(first, of_first, 0, t, m);
      const int64_t n = tasks.sequence_of(t), own = t - tasks.before(n);
      Sequence s = sequences_.at(n);
      s.score_sums = score_sums(s, own);
      Units::with(s, [&](const auto& unit) { run_unit(s, unit, n, own, m); });
    };
    const auto sum = [&](int64_t t, int64_t m) __attribute__((noinline)) {
      const int64_t n = sums.sequence_of(t);
      const Sequence s = sequences_.at(n);
      Units::with(s, [&](const auto& unit) {
        sum_chunks(s, unit, t - sums.before(n), m, partial + parts.before(n));
      });
    };
    if (team == 1) {  // without OpenMP, which a small call would notice
      for (int64_t m = 0; m < rounds; ++m) {
        for (int64_t t = 0; t < tasks.total(); ++t) run_task(t, m);
        for (int64_t t = 0; t < sums.total(); ++t) sum(t, m);
      }
    } else {
#pragma omp parallel num_threads(team)
      for (int64_t m = 0; m < rounds; ++m) {
#pragma omp for schedule(dynamic, chunk)
        for (int64_t t = 0; t < tasks.total(); ++t) run_task(t, m);
        if (sums.total() == 0) continue;
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < sums.total(); ++t) sum(t, m);
      }
    }
    __builtin_free(allocated);
    __builtin_free(memory_);
  }

  static bool empty(const Sequence& s) { return s.Lq == 0 || s.Lk == 0; }

  // Units that add to the same element of the mask's gradient must run one after the other. `count`
  // sets of key heads are independent; the members of a set take turns.
  struct Owners {
    int64_t count, members;
    bool own_batch, own_head, in_order;
    // -1: there is none.
    int64_t head(const Sequence& s, int64_t owner, int64_t member) const {
      if (in_order) {
        const int64_t n = owner * members + member;
        return n < s.B * s.Hkv ? n : -1;
      }
      if (own_batch && own_head) return owner;
      if (own_batch) return owner * s.Hkv + member;
      if (own_head) return member * s.Hkv + owner;
      return member;
    }
  };

  // The owners of a sequence: each alone adds to its elements of the mask's or program's gradient.
  static Owners owners(const Sequence& s) {
    const bool needs_mask_grad = s.grad_mask.data != nullptr;
    const int64_t heads = s.B * s.Hkv;
    if (has_score_sums(s)) {
      const ScoreProgram& program = *s.score_program;
      if (program.buffers > 1)
        return {program.buffers, (heads + program.buffers - 1) / program.buffers, false, false,
                true};
      const int64_t count = (program.own_batch ? s.B : 1) * (program.own_head ? s.Hkv : 1);
      return {count, heads / count, program.own_batch, program.own_head, false};
    }
    const bool own_batch = !needs_mask_grad || s.B == 1 || s.grad_mask.stride[0] != 0;
    const bool own_head = !needs_mask_grad || s.Hkv == 1 || s.grad_mask.stride[1] != 0;
    const int64_t count = (own_batch ? s.B : 1) * (own_head ? s.Hkv : 1);
    return {count, heads / count, own_batch, own_head, false};
  }

  // Whether tasks sum gradients of captured tensors in buffers.
  static bool has_score_sums(const Sequence& s) {
    return s.score_program != nullptr && s.score_program->buffers > 0;
  }
  // Each owner has a buffer of its own, unless no two of them add to the same element.
  static double* score_sums(const Sequence& s, int64_t owner) {
    if (!has_score_sums(s)) return nullptr;
    const ScoreProgram& program = *s.score_program;
    return program.sums + (program.buffers > 1 ? owner * program.size : 0);
  }

  // An owner larger than one thread's share of the work is split. Chunks are independent unless the
  // mask has no key axis.
  bool splits(const Sequence& s) const {
    const bool own_keys = s.grad_mask.data == nullptr || s.grad_mask.stride[3] != 0;
    return own_keys && !has_score_sums(s) && s.threads > 1 &&
           static_cast<double>(s.Lq) * s.Lk * 4 * s.threads > work_ &&
           Units::with(s, [](const auto& unit) { return unit.chunks() > 1; });
  }

  struct Plan {
    int64_t tasks, sums, partial;
  };

  // The tasks of sequence n, the sums of their chunks, and the elements of the buffers for them.
  Plan plan(int64_t n) const {
    const Sequence s = sequences_.at(n);
    if (empty(s)) return {0, 0, 0};
    const int64_t own = owners(s).count, group = s.Hq / s.Hkv;
    if (!splits(s)) return {own, 0, 0};
    return Units::with(s, [&](const auto& unit) -> Plan {
      return {own * unit.chunks(), own * group, own * unit.chunks() * group * unit.dq_size()};
    });
  }

  // Where the prepared rows of sequence n are.
  PreparedRows<T> prepared(const Tasks& rows, int64_t n) const {
    T* at = memory_ + rows.before(n);
    const int64_t all = rows.total();
    return {{at, at + all, at + 2 * all}, at + 3 * all, at + 4 * all};
  }

  // What the chunks of a head share; a head in one piece is prepared just before.
  void prepare(const Tasks& rows) const {
    const auto of = [&](const Sequence& s, int64_t n) {
      return Units::with(s,
                         [&](const auto& unit) { return preparation(s, unit, prepared(rows, n)); });
    };
    const Tasks tasks(sequences_.count(), [&](int64_t n) {
      const Sequence s = sequences_.at(n);
      return empty(s) || !splits(s) ? 0 : of(s, n).tasks();
    });
    const int team = team_size(sequences_.threads(), tasks.total(), flops_);
    each_task(team, tasks.total(), 16, [&](int64_t t) {
      const int64_t n = tasks.sequence_of(t);
      const Sequence s = sequences_.at(n);
      const Prepare<P> rows_of = of(s, n);
      rows_of.run(t - tasks.before(n), static_cast<char*>(thread_scratch(rows_of.bytes())));
    });
  }
  // What prepares the rows of a sequence for its unit.
  template <class Unit>
  static Prepare<P> preparation(const Sequence& s, const Unit& unit, PreparedRows<T> to) {
    return Prepare<P>(s, to, unit.sums_delta(), Unit::forward_scores());
  }

  // Task t of a sequence whose rows are prepared: one chunk of keys of one key head.
  template <class Unit>
  static void one_chunk(const Sequence& s, const Unit& unit, int64_t t, int64_t m,
                        const PreparedRows<T>& prepared, T* partial) {
    typename Unit::Buffers buf = unit.allocate(thread_scratch(unit.allocate(nullptr).bytes));
    const int64_t chunks = unit.chunks(), head_size = s.Hq / s.Hkv * unit.dq_size();
    unit.run(buf, owners(s).head(s, t / chunks, m), t % chunks, prepared, partial + t * head_size);
  }

  // dq of one query head: the sum of its chunks, in their order.
  template <class Unit>
  static void sum_chunks(const Sequence& s, const Unit& unit, int64_t t, int64_t m, T* partial) {
    const int64_t group = s.Hq / s.Hkv, size = unit.dq_size(), chunks = unit.chunks();
    T* sum = partial + t / group * chunks * group * size + t % group * size;
    for (int64_t c = 1; c < chunks; ++c) add(sum, sum + c * group * size, size);
    unit.write_dq(owners(s).head(s, t / group, m), t % group, sum);
  }

  // A task that prepares the rows of one key head and then runs all its chunks.
  template <class Unit>
  static void all_chunks(const Sequence& s, const Unit& unit, int64_t owner,
                         const PreparedRows<T>& prepared) {
    const int64_t group = s.Hq / s.Hkv, head_size = group * unit.dq_size();
    const size_t own = static_cast<size_t>(2 * head_size) * sizeof(T);
    const Prepare<P> prepare = preparation(s, unit, prepared);
    const size_t unit_bytes = unit.allocate(nullptr).bytes;
    char* base = static_cast<char*>(thread_scratch(unit_bytes + own + prepare.bytes()));
    typename Unit::Buffers buf = unit.allocate(base);
    T* total = reinterpret_cast<T*>(base + buf.bytes);
    T* part = total + head_size;
    const Owners all = owners(s);
    for (int64_t m = 0; m < all.members; ++m) {
      const int64_t head = all.head(s, owner, m);
      if (head < 0) break;
      for (int64_t g = 0; g < group; ++g)
        prepare.head(head / s.Hkv, head % s.Hkv * group + g, base + unit_bytes + own);
      for (int64_t c = 0; c < unit.chunks(); ++c) {
        unit.run(buf, head, c, prepared, c == 0 ? total : part);
        if (c > 0) add(total, part, head_size);
      }
      for (int64_t g = 0; g < group; ++g) unit.write_dq(head, g, total + g * unit.dq_size());
    }
  }

  // sum += x.
  static void add(T* sum, const T* x, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes<T>) store(sum + i, load(sum + i) + load(x + i));
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
