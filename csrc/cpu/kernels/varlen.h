// A batch as sequences: one rectangle, or many sequences of different lengths.
#pragma once
#include "policy.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

class Sequences {
 public:
  explicit Sequences(const AttentionParams& rectangle) : all_(rectangle), table_(nullptr) {}
  explicit Sequences(const SequencesParams& table) : all_(table.attention), table_(&table) {}

  int64_t count() const { return table_ == nullptr ? 1 : all_.B; }
  int threads() const { return all_.threads; }
  const AttentionParams& all() const { return all_; }

  // The n-th sequence in order of work, with its lengths, diagonal and pointers.
  Sequence at(int64_t n) const {
    Sequence s{};
    static_cast<AttentionParams&>(s) = all_;
    s.lse_stride = all_.Lq;
    if (table_ == nullptr) return s;
    const SequencesParams& t = *table_;
    const int64_t b = t.order[n];
    s.index = b;
    s.B = 1;
    s.lse_stride = t.lse_stride;
    const bool q_packed = t.q_starts != nullptr, k_packed = t.k_starts != nullptr;
    if (q_packed) s.Lq = t.q_starts[b + 1] - t.q_starts[b];
    s.Lk = k_packed ? t.k_starts[b + 1] - t.k_starts[b] : t.k_lengths[b];
    s.offset = t.bottom_right ? s.Lk - s.Lq : 0;
    if (t.k_begins != nullptr) s.k_begin = t.k_begins[b];

    const int dim = q_packed ? 2 : 0;
    const int64_t q_at = q_packed ? t.q_starts[b] : b;
    move(s.q, dim, q_at), move(s.out, dim, q_at);
    move(s.grad_out, dim, q_at), move(s.grad_q, dim, q_at);
    move(s.position_query, dim, q_at), move(s.grad_position_query, dim, q_at);
    const int64_t table = b * all_.Hq * all_.buckets * all_.D;
    s.grad_query_table = moved(s.grad_query_table, table);
    s.grad_key_table = moved(s.grad_key_table, table);
    const int64_t lse_at = q_packed ? q_at : b * all_.Hq * t.lse_stride;
    s.lse += lse_at;
    if (s.grad_lse != nullptr) s.grad_lse += lse_at;
    s.alibi = moved(s.alibi, b * s.alibi_stride[0]);
    s.sinks = moved(s.sinks, b * s.sinks_stride[0]);
    s.mask_query = q_packed ? q_at : 0;
    s.mask_key = k_packed ? t.k_starts[b] : 0;
    if (s.relative_bias != nullptr) narrow_table(s, t);

    if (t.block_table != nullptr) {
      s.pages = t.block_table + b * t.block_table_stride;
      s.page_size = t.page_size;
      return s;
    }
    const int64_t k_at = k_packed ? t.k_starts[b] : t.k_batch != nullptr ? t.k_batch[b] : b;
    const int k_dim = k_packed ? 2 : 0;
    if (s.k_scales.data == nullptr) {
      move(s.k, k_dim, k_at), move(s.v, k_dim, k_at);
    } else {
      move(s.k, k_dim, k_at, 1), move(s.v, k_dim, k_at, 1);
      move(s.k_scales, k_dim, k_at, 4), move(s.v_scales, k_dim, k_at, 4);
    }
    move(s.grad_k, k_dim, k_at), move(s.grad_v, k_dim, k_at);
    return s;
  }

 private:
  const AttentionParams& all_;
  const SequencesParams* table_;

  // Restricts the table and its gradient to the middle: a sequence has no longer distances.
  void narrow_table(Sequence& s, const SequencesParams& t) const {
    const int64_t size = 2 * max_of<int64_t>(1, max_of(s.Lq, s.Lk)) - 1;
    s.relative_bias = moved(
        s.relative_bias, s.index * s.relative_bias_stride[0] + s.relative_bias_size / 2 - size / 2);
    s.relative_bias_size = size;
    if (s.grad_relative_bias != nullptr)
      s.grad_relative_bias = moved(s.grad_relative_bias, t.bias_starts[s.index]);
  }

  static int64_t size_of(DType dtype) {
    return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
  }
  // Advances an operand of the accumulator's type; null stays null.
  const void* moved(const void* x, int64_t elements) const {
    if (x == nullptr) return x;
    return static_cast<const char*>(x) +
           elements * size_of(all_.dtype == DType::f64 ? DType::f64 : DType::f32);
  }
  // The pointer that is `elements` later; null stays null.
  void* moved(void* x, int64_t elements) const {
    return const_cast<void*>(moved(static_cast<const void*>(x), elements));
  }
  // Moves a tensor to an index of one dimension.
  void move(Tensor4& x, int dim, int64_t steps) const { move(x, dim, steps, size_of(all_.dtype)); }
  static void move(Tensor4& x, int dim, int64_t steps, int64_t bytes) {
    if (x.data != nullptr) x.data = static_cast<char*>(x.data) + steps * x.stride[dim] * bytes;
  }
};

// Maps tasks to sequences, from the number of tasks of each sequence.
class Tasks {
 public:
  // `tasks_of(n)` is the number of tasks of sequence n.
  template <class F>
  Tasks(int64_t count, F tasks_of) : count_(count), first_(one_) {
    if (count > 1)
      first_ =
          static_cast<int64_t*>(__builtin_malloc(static_cast<size_t>(count + 1) * sizeof(int64_t)));
    first_[0] = 0;
    for (int64_t n = 0; n < count; ++n) first_[n + 1] = first_[n] + tasks_of(n);
  }
  ~Tasks() {
    if (first_ != one_) __builtin_free(first_);
  }
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;

  // The number of all tasks, and of the tasks before a sequence.
  int64_t total() const { return first_[count_]; }
  int64_t before(int64_t sequence) const { return first_[sequence]; }
  // The sequence of a task.
  int64_t sequence_of(int64_t task) const {
    int64_t low = 0, high = count_;  // first_[low] <= task < first_[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_[middle] <= task ? low : high) = middle;
    }
    return low;
  }

 private:
  int64_t count_;
  int64_t one_[2];
  int64_t* first_;
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
