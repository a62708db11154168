// Forward attention in bf16 and fp32 on tiles:  O = softmax(scale Q K^T + bias) V.
//
// As on vectors (sdpa_forward.cpp), scores and outputs are transposed: S^T = K Q^T and
// O^T = V^T P^T, with the 32 queries of a panel across the lanes. So rules, masks and dropout are
// the same functions on the same layouts. sdpa_products.h has the main loop, sdpa_rows.h what
// happens to the rows between products; here are the tasks.
#pragma once
#include "../../threads.h"
#include "sdpa_products.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class P>
class TileForward {
  typedef typename P::Storage Storage;
  typedef typename TileProducts<P>::Panel Panel;
  typedef typename TileProducts<P>::Task Task;
  static constexpr int64_t kQueries = TileRows<P>::kQueries;  // of a panel
  // Panels that are computed together: they overlap each other, and wait for the next piece of the
  // keys, if there is one.
  static constexpr int64_t kPanelsOfPiece = 2, kPanelsOfPieces = 256;
  static constexpr int64_t kLeastPanels = 16;  // that share the packing of a task

 public:
  explicit TileForward(const Sequence& params)
      : p(params),
        products(params),
        group(params.Hq / params.Hkv),
        panels((params.Lq + kQueries - 1) / kQueries),
        share(panels_of_a_task()),
        bytes(products.allocate(nullptr, together()).bytes) {}

  int64_t tasks() const { return p.B * p.Hkv * chunks(); }
  int64_t neighbours() const { return p.window_right >= 0 ? 1 : tasks() / (p.B * p.Hq); }

  // A task is a share of the panels of a key head. Under a causal mask the longest ones come first.
  void run(int64_t t) const {
    const TileScope tiles;
    const int64_t heads = p.B * p.Hkv, head = head_of_task(t);
    const bool causal = p.window_right >= 0;
    const int64_t chunk = causal ? chunks() - 1 - t / heads : t % chunks();
    Task task;
    task.buf = products.allocate(thread_scratch(bytes), together());
    task.b = head / p.Hkv, task.hk = head % p.Hkv;
    const Range all{chunk * share, min_of((chunk + 1) * share, group * panels)};
    task.blocks = blocks_of(task, all);
    if (one_piece() && p.pages == nullptr && t + 1 < tasks() && head_of_task(t + 1) != head)
      read_ahead(task, head_of_task(t + 1), all.end - all.begin);
    for (int64_t n = all.begin; n < all.end; n += together()) {
      const int64_t count = min_of(together(), all.end - n);
      for (int64_t i = 0; i < count; ++i) {
        Panel& panel = task.buf.panels[i];
        products.rows.place(task.buf.rows, panel, task.b, task.hk, head_of(task, n + i),
                            first_of(n + i));
      }
      products.compute(task, count, true);
    }
  }

 private:
  const Sequence& p;
  const TileProducts<P> products;
  const int64_t group, panels;  // panels of a query head
  const int64_t share;          // panels of a task
  const size_t bytes;

  // Tasks are less than a head where there are few heads. Each packs its own keys and values.
  int64_t panels_of_a_task() const {
    const int64_t heads = p.B * p.Hkv, all = group * panels;
    const int64_t target = (4 * p.threads + heads - 1) / max_of<int64_t>(1, heads);
    const int64_t count = max_of<int64_t>(1, min_of(target, all / kLeastPanels));
    return max_of<int64_t>(1, (all + count - 1) / count);
  }
  // Tasks of a key head.
  int64_t chunks() const { return (group * panels + share - 1) / share; }
  bool one_piece() const { return products.piece() >= products.rows.all_blocks(); }
  int64_t together() const { return min_of(share, one_piece() ? kPanelsOfPiece : kPanelsOfPieces); }

  int64_t head_of_task(int64_t t) const {
    return p.window_right >= 0 ? t % (p.B * p.Hkv) : t / chunks();
  }

  // Reads ahead the keys and values of another head during this many panels of a task.
  void read_ahead(Task& task, int64_t head, int64_t count) const {
    const auto add = [&](const Tensor4& x, int64_t channels) {
      const int64_t b = head / p.Hkv, h = head % p.Hkv;
      task.next_head.add(static_cast<const Storage*>(x.data) + b * x.stride[0] + h * x.stride[1],
                         x.stride, p.Lk, channels);
    };
    add(p.k, p.D), add(p.v, p.Dv);
    // Under a causal mask panels meet half of the blocks.
    const int64_t blocks = count * (task.blocks.end - task.blocks.begin);
    task.next_head.share(p.window_right >= 0 ? (blocks + 1) / 2 : blocks);
  }
  // Panel n of a key head.
  int64_t head_of(const Task& task, int64_t n) const { return task.hk * group + n / panels; }
  // The first query of panel n.
  int64_t first_of(int64_t n) const { return n % panels * kQueries; }

  // The blocks that some panels of a task see.
  Range blocks_of(Task& task, Range some) const {
    Range range{products.rows.all_blocks(), 0};
    for (int64_t n = some.begin; n < some.end; ++n) {
      const int64_t i0 = first_of(n), i1 = min_of(p.Lq, i0 + kQueries);
      const Range blocks = products.rows.blocks_of(task.buf.rows, task.b, head_of(task, n), i0, i1);
      if (blocks.begin >= blocks.end) continue;
      range = {min_of(range.begin, blocks.begin), max_of(range.end, blocks.end)};
    }
    return range;
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
