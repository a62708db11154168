// A layer over the cells of tables in one call, as in TabPFN: attention within each row, attention
// within each column, and an MLP.
//
//   a = norm1(x + A(x))                   A: the cells of a row attend to each other
//   b = norm2(a + B(a))                   B: the cells of a column attend to its first N cells
//   y = norm3(b + gelu(b W1^T) W2^T)
//
// The first N rows are known, the others are new: their queries attend to the first key head only.
// Keys and values of the known rows may come from an earlier call; then all rows are new.
//
// Attention in columns takes a few columns at a time, on all threads. All else is tasks of few
// enough cells that everything between two reads of x stays in L2, each on one thread: a team for
// each product would take as long to start as the product. So memory beside y is small. How many
// cells a task takes depends on the dtype only, and a cell's bits depend on its own table only.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "../function.h"
#include "kernel_table.h"
#include "layer_parts.h"
#include "threads.h"

namespace fastattn {
namespace {

class TableLayer {
 public:
  struct Attention {
    Part query, key, value, out;  // [E, E]
  };
  struct Norm {
    Part part;  // [E]
    double eps;
  };

  DType dtype;
  int threads;
  int64_t B, R, C, E, H, F;
  int64_t N;  // the known rows
  Attention rows, columns;
  Part first, second;  // [F, E], [E, F]
  Norm norms[3];
  bool rms;
  const char* x;                    // [B, R, C, E]
  char* y;                          // [B, R, C, E], may be x
  TensorView keys, values;          // [B C, N, 1, D], of the first head; no data: of the known rows
  char *first_keys, *first_values;  // [B C, N, 1, D], null: not wanted

  // Whether all tensors have the dtype and the sizes of the layer, and dense rows.
  bool is_usual() const {
    bool usual = H > 0 && E % H == 0 && N > 0 && F > 0 && (is_cached() || N <= R);
    for (const Attention* each : {&rows, &columns})
      for (const Part* part : {&each->query, &each->key, &each->value, &each->out})
        usual = usual && fits(*part, E, E);
    usual = usual && fits(first, F, E) && fits(second, E, F);
    for (const Norm& norm : norms)
      usual = usual && fits(norm.part.weight, E) && fits(norm.part.bias, E);
    if (!usual || !is_cached()) return usual;
    for (const TensorView* each : {&keys, &values})
      if (!each->has_sizes({B * C, N, 1, E / H}) || each->stride[3] != 1) return false;
    return true;
  }

  // Attention in rows, then attention in columns and the MLP, group by group.
  void run() const {
    const int64_t in_row = 2 * (4 * E * E + 2 * C * E), in_column = 2 * 4 * E * E,
                  after = 6 * E * E;
    each_task((B * R + rows_of_task() - 1) / rows_of_task(), B * R * C * in_row,
              [&](int64_t t, char* scratch) { attend_in_rows(t, scratch); });
    const int64_t blocks = (R + cells() - 1) / cells(), all = B * C;
    const int64_t enough = threads == 1 ? 1 : (kTasks * threads + blocks - 1) / blocks;
    const int64_t groups = std::max<int64_t>(1, all / (enough * columns_of_task()));
    Group g{0, 0, nullptr, nullptr, nullptr, nullptr};
    const int64_t most = (all + groups - 1) / groups, queries = most * R * E * element();
    const int64_t known = is_cached() ? 0 : most * N * E * element();
    const std::unique_ptr<char[]> memory(new char[static_cast<size_t>(2 * (queries + known))]);
    g.q = memory.get(), g.o = g.q + queries, g.k = g.o + queries, g.v = g.k + known;
    for (g.begin = 0; g.begin < all; g.begin = g.end) {
      g.end = std::min(all, g.begin + most);
      each_block(g, in_column, [&](const Cells& c, char* scratch) { project(g, c, scratch); });
      attend_in_columns(g);
      each_block(g, after, [&](const Cells& c, char* scratch) { finish(g, c, scratch); });
    }
  }

 private:
  static constexpr int64_t kTasks = 12;  // for each thread

  // Rows [r0, r1) of columns [c0, c1), counted over all tables.
  struct Cells {
    int64_t c0, c1, r0, r1;
    int64_t rows() const { return r1 - r0; }
    int64_t count() const { return (c1 - c0) * rows(); }
  };
  // Columns [begin, end), and what is stored of them.
  struct Group {
    int64_t begin, end;
    char *q, *o;  // [columns, R, E]: queries, and what they attend to
    char *k, *v;  // [columns, H, N, D]: attention reads dense rows in place
  };

  // Whether the keys and values of the columns come from an earlier call.
  bool is_cached() const { return keys.data != nullptr; }
  int64_t element() const { return element_bytes(dtype); }
  // As many as a task of attention has queries.
  int64_t cells() const { return 1024 / element(); }
  int64_t rows_of_task() const { return std::max<int64_t>(1, cells() / std::max<int64_t>(1, C)); }
  int64_t columns_of_task() const {
    return std::max<int64_t>(1, cells() / std::max<int64_t>(1, R));
  }

  // Whether a weight is [n, k] with dense rows, and its bias fits.
  static bool fits(const Part& part, int64_t n, int64_t k) {
    const TensorView& w = part.weight;
    return w.data != nullptr && w.has_sizes({n, k}) && (w.stride[1] == 1 || k == 1) &&
           fits(part.bias, n);
  }
  // Whether a vector is [n] and contiguous, or missing.
  static bool fits(const TensorView& row, int64_t n) {
    return row.data == nullptr || (row.has_sizes({n}) && (row.stride[0] == 1 || n == 1));
  }

  // task(t, scratch) for each t, on all threads.
  template <class Task>
  void each_task(int64_t count, int64_t flops, Task task) const {
    const int team = team_size(threads, count, static_cast<double>(flops));
    // Of attention in rows: q, k, v and what the cells attend to, [cells, E]. After attention in
    // columns: three times [cells, E], and the hidden units, [cells, F].
    const int64_t most = std::max(cells(), rows_of_task() * C);
    const int64_t bytes = (most * (3 * E + std::max(E, F)) * element() + 4095) / 4096 * 4096;
    const std::unique_ptr<char[]> memory(new char[static_cast<size_t>(team * bytes)]);
    if (team == 1) {
      for (int64_t t = 0; t < count; ++t) task(t, memory.get());
      return;
    }
#pragma omp parallel num_threads(team)
    {
      char* const scratch = memory.get() + omp_get_thread_num() * bytes;
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < count; ++t) task(t, scratch);
    }
  }

  // task(cells, scratch) for all cells of a group.
  template <class Task>
  void each_block(const Group& g, int64_t flops_of_cell, Task task) const {
    const int64_t together = columns_of_task(), blocks = (R + cells() - 1) / cells();
    const int64_t count = (g.end - g.begin + together - 1) / together * blocks;
    each_task(count, (g.end - g.begin) * R * flops_of_cell, [&](int64_t t, char* scratch) {
      const int64_t c = g.begin + t / blocks * together, r = t % blocks * cells();
      task(Cells{c, std::min(g.end, c + together), r, std::min(R, r + cells())}, scratch);
    });
  }

  // The cell of x in a column [B C] and a row.
  char* at(int64_t column, int64_t row) const {
    return y + (((column / C * R + row) * C + column % C) * E) * element();
  }
  // to [cells, E] = the cells, or back.
  template <bool kBack>
  void copy(const Cells& cells, char* to) const {
    const int64_t bytes = E * element();
    for (int64_t c = cells.c0; c < cells.c1; ++c)
      for (int64_t r = cells.r0; r < cells.r1; ++r, to += bytes) {
        char* const cell = at(c, r);
        std::memcpy(kBack ? cell : to, kBack ? to : cell, static_cast<size_t>(bytes));
      }
  }

  // to [count, n] = f(from W^T + b)
  void linear(const void* from, int64_t count, const Part& part, void* to,
              MlpActivation f = MlpActivation::none) const {
    const TensorView& w = part.weight;
    multiply({dtype, 1, count}, from, w.size[1], part, to, w.size[0], f);
  }

  // to [count, E] = norm(from + residual)
  void add_and_normalize(const void* from, const void* residual, int64_t count, const Norm& norm,
                         void* to) const {
    normalize({dtype, 1, count}, E, from, nullptr, residual, nullptr, &norm.part, norm.eps, rms,
              to);
  }

  // Heads of width D in cells [sequences, length, E].
  Tensor4 heads(char* from, int64_t length) const { return {from, {length * E, E / H, E, 1}}; }
  // p.out = attention(p.q, p.k, p.v) of `sequences`
  void attend(AttentionParams p, int64_t sequences, int64_t queries, int64_t length,
              int64_t key_heads) const {
    if (queries == 0) return;
    p.dtype = dtype;
    p.B = sequences, p.Hq = H, p.Hkv = key_heads, p.Lq = queries, p.Lk = length, p.D = p.Dv = E / H;
    p.scale = 1.0 / std::sqrt(static_cast<double>(p.D));
    p.window_left = p.window_right = -1;
    kernels(dtype).attention_forward(p);
  }

  // a = norm1(x + A(x)) for some rows.
  void attend_in_rows(int64_t task, char* scratch) const {
    const int64_t r0 = task * rows_of_task(), count = std::min(B * R, r0 + rows_of_task()) - r0;
    const int64_t cells = count * C, bytes = cells * E * element();
    const char* const from = x + r0 * C * E * element();
    char *const q = scratch, *const k = q + bytes, *const v = k + bytes, *const o = v + bytes;
    linear(from, cells, rows.query, q);
    linear(from, cells, rows.key, k);
    linear(from, cells, rows.value, v);
    AttentionParams p{};
    p.threads = 1, p.q = heads(q, C), p.k = heads(k, C), p.v = heads(v, C), p.out = heads(o, C);
    attend(p, count, C, C, H);
    linear(o, cells, rows.out, q);
    add_and_normalize(q, from, cells, norms[0], y + r0 * C * E * element());
  }

  // Queries of cells, and keys and values of the known ones.
  void project(const Group& g, const Cells& cells, char* scratch) const {
    copy<false>(cells, scratch);
    linear(scratch, cells.count(), columns.query, of_group(g, g.q, cells));
    const Cells known{cells.c0, cells.c1, cells.r0, std::min(cells.r1, N)};
    if (is_cached() || known.rows() <= 0) return;
    if (known.rows() < cells.rows()) copy<false>(known, scratch);
    char* const made = scratch + known.count() * E * element();
    linear(scratch, known.count(), columns.key, made);
    split(known, g.begin, made, g.k, first_keys);
    linear(scratch, known.count(), columns.value, made);
    split(known, g.begin, made, g.v, first_values);
  }
  // The heads of `from` [cells, E], and the first one also into `kept`, unless that is null.
  void split(const Cells& cells, int64_t begin, const char* from, char* to, char* kept) const {
    const int64_t D = E / H * element();
    for (int64_t c = cells.c0; c < cells.c1; ++c)
      for (int64_t n = cells.r0; n < cells.r1; ++n)
        for (int64_t h = 0; h < H; ++h, from += D) {
          std::memcpy(to + (((c - begin) * H + h) * N + n) * D, from, static_cast<size_t>(D));
          if (h == 0 && kept != nullptr)
            std::memcpy(kept + (c * N + n) * D, from, static_cast<size_t>(D));
        }
  }
  // The place of cells in [columns of the group, R, E].
  char* of_group(const Group& g, char* all, const Cells& cells) const {
    return all + ((cells.c0 - g.begin) * R + cells.r0) * E * element();
  }

  // The attention in columns of a group: the first N rows with all heads, the other rows with the
  // first head of the keys and values of these N.
  void attend_in_columns(const Group& g) const {
    AttentionParams p{};
    const int64_t sequences = g.end - g.begin, known = is_cached() ? 0 : N, D = E / H;
    p.threads = threads;
    p.q = heads(g.q, R), p.out = heads(g.o, R);
    p.k = {g.k, {N * E, N * D, D, 1}}, p.v = {g.v, {N * E, N * D, D, 1}};
    if (is_cached()) p.k = first_of(keys, g.begin), p.v = first_of(values, g.begin);
    attend(p, sequences, known, N, H);
    const int64_t skipped = known * E * element();
    p.q.data = g.q + skipped, p.out.data = g.o + skipped;
    attend(p, sequences, R - known, N, 1);
  }

  // y = norm3(b + MLP(b)), b = norm2(a + B(a))
  void finish(const Group& g, const Cells& cells, char* scratch) const {
    const int64_t count = cells.count(), bytes = count * E * element();
    char *const a = scratch, *const b = a + bytes, *const m = b + bytes, *const hidden = m + bytes;
    copy<false>(cells, a);
    linear(of_group(g, g.o, cells), count, columns.out, b);
    add_and_normalize(b, a, count, norms[1], b);
    linear(b, count, first, hidden, MlpActivation::gelu);
    linear(hidden, count, second, m);
    add_and_normalize(m, b, count, norms[2], a);
    copy<true>(cells, a);
  }

  // The cached head of columns from `column` on.
  Tensor4 first_of(const TensorView& view, int64_t column) const {
    char* const data = static_cast<char*>(view.data) + column * view.stride[0] * element();
    return {data, {view.stride[0], 0, view.stride[1], 1}};
  }
};

struct TableCall {
  FASTATTN_TENSORS(x, keys, values)
};

// The layer on x [B, R, C, E]. parts: 13 pairs of a weight and a bias, which may be None: of
// attention in rows and in columns each query, key, value and out, of the MLP first and second, and
// of three norms, whose weights may be None. eps: of the norms. keys, values: [B C, N, 1, D], or
// None. With `in_place` the result is x. Returns y, and with `keeps` the keys and values of the
// first head; None where the layer's own forward must run: a tensor is not plain memory, is
// unusual, or requires a gradient that is wanted.
py::object table_layer(const TableCall& c, py::handle parts, py::handle eps, int64_t num_heads,
                       int64_t known, bool rms, bool in_place, bool keeps, bool wants_gradients) {
  TableLayer t{};
  TensorView x;
  if (!read_plain(c.x, wants_gradients, &x) || x.rank != 4 || !x.is_contiguous()) return none();
  if (x.dtype != DType::f32 && x.dtype != DType::bf16 && x.dtype != DType::f16) return none();
  t.dtype = x.dtype;
  t.B = x.size[0], t.R = x.size[1], t.C = x.size[2], t.E = x.size[3], t.H = num_heads, t.N = known;
  TableLayer::Attention &r = t.rows, &k = t.columns;
  Part* const layers[] = {&r.query, &r.key,   &r.value, &r.out,   &k.query,
                          &k.key,   &k.value, &k.out,   &t.first, &t.second};
  const auto pairs = parts.cast<py::tuple>(), each_eps = eps.cast<py::tuple>();
  expect(pairs.size() == 13 && each_eps.size() == 3,
         "parts must be 13 pairs, and eps three numbers");
  const auto reads = [&](py::handle from, TensorView* to) {
    if (from.is_none()) return true;
    return read_plain(from, wants_gradients, to) && to->dtype == t.dtype;
  };
  for (size_t n = 0; n < pairs.size(); ++n) {
    const auto pair = pairs[n].cast<py::tuple>();
    TableLayer::Norm& norm = t.norms[n < 10 ? 0 : n - 10];
    if (n >= 10) norm.eps = each_eps[n - 10].cast<double>();
    if (!reads(pair[0], n < 10 ? &layers[n]->weight : &norm.part.weight) ||
        !reads(pair[1], n < 10 ? &layers[n]->bias : &norm.part.bias))
      return none();
  }
  if (!reads(c.keys, &t.keys) || !reads(c.values, &t.values)) return none();
  t.F = t.first.weight.size[0], t.rms = rms, t.threads = threads();
  if (!c.keys.is_none()) t.N = t.keys.rank > 1 ? t.keys.size[1] : 0;
  if (c.keys.is_none() != c.values.is_none() || (keeps && !c.keys.is_none()) || !t.is_usual())
    return none();
  t.x = static_cast<const char*>(x.data);
  py::object y = py::reinterpret_borrow<py::object>(c.x);
  if (in_place)
    t.y = static_cast<char*>(x.data);
  else
    y = new_result(t.dtype, x.sizes(), &t.y);
  py::object first_keys = none(), first_values = none();
  if (keeps) {
    const Sizes sizes{t.B * t.C, t.N, 1, t.E / t.H};
    first_keys = new_result(t.dtype, sizes, &t.first_keys);
    first_values = new_result(t.dtype, sizes, &t.first_values);
  }
  if (t.B * t.R * t.C > 0) without_gil([&] { t.run(); });
  return py::make_tuple(y, first_keys, first_values);
}

}  // namespace
}  // namespace fastattn
