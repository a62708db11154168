// Which kernel runs each sequence of a batch, and on which thread.
#pragma once
#include "../threads.h"
#include "decode.h"
#include "varlen.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// In place of Decode where no sequence is decoded.
struct NoDecode {
  static bool serves(const Sequence&) { return false; }
  explicit NoDecode(const Sequence&) {}
  int64_t chunks() const { return 0; }
  int64_t state_size() const { return 0; }
  void run_head(int64_t) const {}
  template <class T>
  void run_chunk(int64_t, T*) const {}
  template <class T>
  void merge_head(int64_t, T*) const {}
};

// The parallel schedule of all sequences. A task is a block of queries of a head, or, for a
// sequence that D serves, one of its key heads. A key head larger than one thread's share of
// the work is split into chunks of keys, which are merged after all tasks are done, so the bits are
// the same.
//
// F is the kernel of the other sequences: constructed from one, it has tasks(), run(task) and
// neighbours(), how many consecutive tasks a thread should take.
template <class P, class F, class D>
class Schedule {
  typedef typename P::Acc T;

 public:
  // Counts the tasks of all sequences.
  explicit Schedule(const Sequences& sequences) : sequences_(sequences) {
    for (int64_t n = 0; n < sequences.count(); ++n) {
      const Sequence s = sequences.at(n);
      const double pairs = static_cast<double>(s.B * s.Hq) * s.Lq * s.Lk;
      const bool decoded = D::serves(s);
      flops_ += (decoded ? 8 : 2) * pairs * (s.D + s.Dv);  // decoding is bound by memory
      if (decoded) keys_ += static_cast<double>(s.B * s.Hkv) * s.Lk;
    }
  }

  // Runs all tasks, then the merges of chunks, on one thread or on a team. Tasks, merges and the
  // partial states of chunks are numbered over all sequences.
  void run() {
    // A rectangular batch is a single sequence, so its kernel and its plan are made only once: a
    // tiny call would notice.
    const int64_t count = sequences_.count();
    const Sequence first = sequences_.at(0);
    const F first_kernel(first);
    const Plan first_plan = plan(first);
    const auto planned = [&](int64_t n) { return n == 0 ? first_plan : plan(sequences_.at(n)); };
    const Tasks tasks(count, [&](int64_t n) { return planned(n).tasks; });
    const Tasks states(count, [&](int64_t n) { return planned(n).state; });
    const Tasks merges(count, [&](int64_t n) { return planned(n).merges; });
    T* const partial = static_cast<T*>(__builtin_malloc(
        states.total() == 0 ? 1 : static_cast<size_t>(states.total()) * sizeof(T)));
    const int team = team_size(sequences_.threads(), tasks.total(), flops_);
    // Sequences are sorted by work: if the heads of the first are small, all are.
    const int64_t neighbours =
        count > 1 && !prefetches_next_head<P>(first) ? 1 : first_plan.neighbours;
    const int64_t chunk = max_of<int64_t>(1, min_of(neighbours, tasks.total() / (team * 4)));
    const auto run_task = [&](int64_t t) __attribute__((noinline)) {
      if (count == 1 && !first_plan.decoded) return first_kernel.run(t);
      const int64_t n = tasks.sequence_of(t), task = t - tasks.before(n);
      const Sequence s = sequences_.at(n);
      if (!D::serves(s))
        F(s).run(task);
      else if (splits(s))
        D(s).run_chunk(task, partial + states.before(n));
      else
        D(s).run_head(task);
    };
    const auto merge = [&](int64_t t) __attribute__((noinline)) {
      const int64_t n = merges.sequence_of(t);
      const Sequence s = sequences_.at(n);
      D(s).merge_head(t - merges.before(n), partial + states.before(n));
    };
    if (team == 1) {  // without OpenMP, which a small call would notice
      for (int64_t t = 0; t < tasks.total(); ++t) run_task(t);
      for (int64_t t = 0; t < merges.total(); ++t) merge(t);
    } else {
#pragma omp parallel num_threads(team)
      {
#pragma omp for schedule(dynamic, chunk)
        for (int64_t t = 0; t < tasks.total(); ++t) run_task(t);
        if (merges.total() > 0) {
#pragma omp for schedule(static)
          for (int64_t t = 0; t < merges.total(); ++t) merge(t);
        }
      }
    }
    __builtin_free(partial);
  }

 private:
  const Sequences& sequences_;
  double flops_ = 0, keys_ = 0;

  struct Plan {
    bool decoded;
    int64_t tasks;       // of the kernel
    int64_t state;       // elements of the partial states of all chunks
    int64_t merges;      // heads whose chunks are merged
    int64_t neighbours;  // consecutive tasks that a thread should take
  };

  // Whether a key head is more than a fourth of a thread's share, so that its keys are split.
  bool splits(const Sequence& s) const {
    return D(s).chunks() > 1 && static_cast<double>(s.Lk) * 4 * s.threads > keys_;
  }

  // How the heads and queries of a sequence are divided into tasks.
  Plan plan(const Sequence& s) const {
    const int64_t heads = s.B * s.Hkv;
    if (s.Lq == 0) return {false, 0, 0, 0, 1};
    if (!D::serves(s)) {
      const F kernel(s);
      return {false, kernel.tasks(), 0, 0, kernel.neighbours()};
    }
    if (!splits(s)) return {true, heads, 0, 0, 1};
    const D decode(s);
    return {true, heads * decode.chunks(), heads * decode.chunks() * decode.state_size(), heads, 1};
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
