// Attention for a few queries over many keys (decoding) on tiles, where many query rows share a key
// head: groups of heads, one key head for all, or heads on one latent head.
//
// The query rows of all heads that share a key head are stacked: they are the queries of panels
// as in the forward pass, with positions and slopes of their own. As on vectors (../decode.h), the
// keys are split into chunks of fixed length that run in parallel and are merged in order. So the
// bits depend on neither the batch nor the threads.
#pragma once
#include "../../threads.h"
#include "../softmax_state.h"
#include "sdpa_products.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class TileDecode {
  typedef typename P::Storage Storage;
  typedef TileProducts<P> Products;
  typedef typename Products::Panel Panel;
  static constexpr int W = TileRows<P>::W, kVectors = TileRows<P>::kVectors;
  static constexpr int64_t kQueries = TileRows<P>::kQueries;
  static constexpr int64_t kBlocks = 8;  // of keys of a chunk: as many keys as on vectors

 public:
  // Every sequence of a call that fills tiles (kernel_table.h).
  static bool serves(const Sequence&) { return true; }

  explicit TileDecode(const Sequence& params)
      : p(params),
        rule(make_rule<float>(params)),
        group(params.Hq / params.Hkv),
        rows(params.Lq * group),
        panels((rows + kQueries - 1) / kQueries),
        channels(round_up(params.Dv, kStep)),
        chunks_((params.Lk + kBlocks * kBlockKeys - 1) / (kBlocks * kBlockKeys)) {}

  int64_t chunks() const { return chunks_; }
  int64_t state_size() const { return panels * panel_size(); }

  // A whole key head, chunk by chunk.
  void run_head(int64_t head) const {
    Head x(*this, head);
    begin_total(x.buf.total, head);
    stack_queries(x.buf.q, head);
    for (int64_t c = 0; c < chunks_; ++c) {
      chunk(x, head, c, x.buf.chunk_state);
      merge(x.buf.total, x.buf.chunk_state);
    }
    finish(x, head);
  }

  // Writes the state of chunk t % chunks of key head t / chunks.
  void run_chunk(int64_t t, float* states) const {
    Head x(*this, t / chunks_);
    stack_queries(x.buf.q, t / chunks_);
    chunk(x, t / chunks_, t % chunks_, states + t * state_size());
  }

  // Merges the states of all chunks of a head, in order, and writes its result.
  void merge_head(int64_t head, const float* states) const {
    Head x(*this, head);
    begin_total(x.buf.total, head);
    for (int64_t c = 0; c < chunks_; ++c)
      merge(x.buf.total, states + (head * chunks_ + c) * state_size());
    finish(x, head);
  }

 private:
  const Sequence& p;
  const ScoreRule<float> rule;
  const int64_t group, rows, panels, channels, chunks_;

  // Of a panel: o [channels][queries], m [queries], l [queries].
  int64_t panel_size() const { return (channels + 2) * kQueries; }
  // Where m and l are in a state, behind o [channels][kQueries].
  int64_t maxima() const { return channels * kQueries; }
  int64_t sums() const { return (channels + 1) * kQueries; }

  // Row r of a key head.
  struct Row {
    int64_t h, i;
  };
  // The query head and the query of stacked row r.
  Row row_of(int64_t head, int64_t r) const { return {head % p.Hkv * group + r / p.Lq, r % p.Lq}; }

  struct Buffers {
    Storage* q;          // [rows][D]
    Storage* out;        // [rows][Dv]
    double* lse;         // [rows]
    float* total;        // the state of each panel
    float* chunk_state;  // a state
    void* products;      // of the products
    size_t bytes;        // without these
  };

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers buf;
    buf.q = a.take<Storage>(rows * p.D);
    buf.out = a.take<Storage>(rows * p.Dv);
    buf.lse = a.take<double>(rows);
    buf.total = a.take<float>(state_size());
    buf.chunk_state = a.take<float>(state_size());
    buf.bytes = a.used();
    buf.products = static_cast<char*>(base) + buf.bytes;
    return buf;
  }

  // The stacked rows of a key head as the queries of one head.
  Sequence stacked(const Buffers& buf, int64_t head) const {
    const int64_t b = head / p.Hkv, hk = head % p.Hkv;
    const auto of_head = [&](const Tensor4& x) {
      Tensor4 own = x;
      own.data = static_cast<Storage*>(x.data) + b * x.stride[0] + hk * x.stride[1];
      return own;
    };
    Sequence s = p;
    s.B = s.Hq = s.Hkv = 1;
    s.Lq = s.lse_stride = rows;
    s.q = {buf.q, {0, 0, p.D, 1}};
    s.out = {buf.out, {0, 0, p.Dv, 1}};
    s.lse = buf.lse;
    s.k = of_head(p.k), s.v = of_head(p.v);
    s.sinks = nullptr;  // they join when the chunks are merged
    return s;
  }

  struct Head {
    Buffers buf;
    const Sequence s;
    const Products products;
    typename Products::Task task;

    Head(const TileDecode& decode, int64_t head)
        : buf(decode.scratch()),
          s(decode.stacked(buf, head)),
          products(s, kBlocks),
          task{products.allocate(buf.products, decode.panels), 0, 0, {}, -1, {}, {}} {}
  };

  // The buffers of this thread.
  Buffers scratch() const {
    const Buffers empty = allocate(nullptr);
    const Sequence s = stacked(empty, 0);
    const size_t all = empty.bytes + Products(s, kBlocks).allocate(nullptr, panels).bytes;
    return allocate(thread_scratch(all));
  }

  // Copies the query heads that share a key head to consecutive rows.
  void stack_queries(Storage* to, int64_t head) const {
    const int64_t* st = p.q.stride;
    const Storage* q = static_cast<const Storage*>(p.q.data) + head / p.Hkv * st[0];
    for (int64_t r = 0; r < rows; ++r) {
      const Row row = row_of(head, r);
      const Storage* from = q + row.h * st[1] + row.i * st[2];
      for (int64_t d = 0; d < p.D; ++d) to[r * p.D + d] = from[d * st[3]];
    }
  }

  // The state of one chunk of keys.
  void chunk(Head& x, int64_t head, int64_t c, float* state) const {
    const Range seen = visible_to_any(p, 0, p.Lq);
    Range blocks{max_of(c * kBlocks, seen.begin / kBlockKeys),
                 min_of((c + 1) * kBlocks, (seen.end + kBlockKeys - 1) / kBlockKeys)};
    if (seen.begin >= seen.end || blocks.begin >= blocks.end) blocks = {0, 0};
    x.task.blocks = blocks;
    for (int64_t n = 0; n < panels; ++n) place(x.task.buf.panels[n], head, n, blocks);
    {
      const TileScope tiles;
      x.products.compute(x.task, panels, false);
    }
    for (int64_t n = 0; n < panels; ++n) {
      float* const to = state + n * panel_size();
      x.products.rows.give(x.task.buf.panels[n].state, to + maxima(), to + sums(), to);
    }
  }

  // Sets panel n to its rows of a head, and to the blocks of keys of a chunk.
  void place(Panel& panel, int64_t head, int64_t n, Range blocks) const {
    panel.b = panel.hk = panel.h = 0;
    panel.i0 = n * kQueries, panel.i1 = min_of(rows, panel.i0 + kQueries);
    panel.all = visible_to_all(p, 0, p.Lq);
    panel.blocks = blocks;
    panel.apart = 0;
    panel.lanes.i0 = 0, panel.lanes.i1 = p.Lq;
    panel.lanes.any_slope = p.alibi != nullptr;
    for (int64_t l = 0; l < kQueries; ++l) {
      const Row row = row_of(head, min_of(rows - 1, panel.i0 + l));
      panel.lanes.position[l] = static_cast<float>(row.i);
      panel.lanes.slopes[l] = alibi_slope<float>(p, head / p.Hkv, row.h);
    }
  }

  // Before the first key there is only the sink of each row's head.
  void begin_total(float* total, int64_t head) const {
    for (int64_t n = 0; n < panels; ++n) {
      float* const to = total + n * panel_size();
      __builtin_memset(to, 0, static_cast<size_t>(channels * kQueries) * sizeof(float));
      for (int64_t l = 0; l < kQueries; ++l) {
        const Row row = row_of(head, min_of(rows - 1, n * kQueries + l));
        const FirstState<float> first = first_state<float>(p, rule, head / p.Hkv, row.h);
        to[maxima() + l] = first.maximum, to[sums() + l] = first.sum;
      }
    }
  }

  // Merges part into total. They cover disjoint sets of keys.
  void merge(float* total, const float* chunk_state) const {
    for (int64_t panel = 0; panel < panels; ++panel)
      for (int n = 0; n < kVectors; ++n) {
        float* const to = total + panel * panel_size() + n * W;
        const float* const from = chunk_state + panel * panel_size() + n * W;
        VecF m = load(to + maxima()), l = load(to + sums());
        const Shares<float> share = merge_sums<float>(
            &m, &l, load(from + maxima()), load(from + sums()),
            [&](VecF x) __attribute__((always_inline)) { return exponential(rule, x); });
        store(to + maxima(), m), store(to + sums(), l);
        for (int64_t d = 0; d < channels; ++d)
          merge_outputs<float>(share, to + d * kQueries, from + d * kQueries, W);
      }
  }

  // Writes out and lse of a head from its merged state.
  void finish(Head& x, int64_t head) const {
    for (int64_t n = 0; n < panels; ++n) {
      float* const from = x.buf.total + n * panel_size();
      finish_rows<P>(x.s, rule, make_dropout(p), 0, 0, n * kQueries,
                     min_of(kQueries, rows - n * kQueries), kQueries, from + maxima(),
                     from + sums(), from);
    }
    const int64_t *st = p.out.stride, b = head / p.Hkv;
    Storage* const out = static_cast<Storage*>(p.out.data) + b * st[0];
    for (int64_t r = 0; r < rows; ++r) {
      const Row row = row_of(head, r);
      p.lse[(b * p.Hq + row.h) * p.lse_stride + row.i] = x.buf.lse[r];
      __builtin_memcpy(out + row.h * st[1] + row.i * st[2], x.buf.out + r * p.Dv,
                       static_cast<size_t>(p.Dv) * sizeof(Storage));
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
