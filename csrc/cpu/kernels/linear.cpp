// A linear layer:  y = f(x W^T + b), and the matrix products of its backward pass.
//
// The products use the tiles of attention. 32 rows of x are transposed once into a panel, with the
// rows across the lanes. The weight is read in place, by broadcast, and never packed. So there is
// nothing to cache, and a small layer pays for no preparation. The reduction is split into blocks
// of a fixed length that are added in order. An element's bits therefore depend only on K, not on
// the other rows, the split into tasks, or the threads.
#include "../threads.h"
#include "activation.h"
#include "blocks.h"
#include "linear_few.h"
#include "linear_in_place.h"
#include "pack.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// y[m][n] = sum_k x[m][k] W(n, k) + b[n]. The weight is [N, K] with dense rows, or its transpose,
// [K, N] with dense rows.
template <class P, bool kTransposed>
class Linear {
  typedef typename P::Source Source;
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int NV = kPanelVectors, kFew = kFewVectors<P>;
  static constexpr int64_t L = kPanelLanes<P>;
  static constexpr int kRows = kTransposed ? P::kOutputRows : P::kScoreRows;
  static constexpr int64_t kReduced = kReducedWords * P::kPerWord;  // a panel's part fits L1
  static constexpr int64_t kRowsOfTask = 256;                       // of x
  static constexpr int64_t kStaged = 96;  // rows of N: a staged block shares L2 with x and y

 public:
  explicit Linear(const LinearParams& params)
      : p(params), m_tasks(ceil(p.M, kRowsOfTask)), columns(columns_of_task()) {}

  // One task for each block of rows and outputs.
  void run() {
    const int64_t n_tasks = ceil(p.N, columns);
    const double flops = 2.0 * p.M * p.N * p.K;
    const int team = team_size(p.threads, m_tasks * n_tasks, flops);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Buffers buf = allocate(thread_scratch(allocate(nullptr).bytes));
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < m_tasks * n_tasks; ++t) {
        const int64_t m0 = t / n_tasks * kRowsOfTask, n0 = t % n_tasks * columns;
        task(buf, m0, min_of(p.M, m0 + kRowsOfTask), n0, min_of(p.N, n0 + columns));
      }
    }
  }

 private:
  const LinearParams& p;
  const int64_t m_tasks, columns;

  struct Buffers {
    Word* x;     // [panels][words of kReduced][lanes]
    Word* w;     // [kStaged][words of kReduced], transposed: [words of kReduced][kStaged]
    T* y;        // [panels][columns][lanes]
    Word* temp;  // [lanes][words of kReduced]
    T* ones;     // [lanes]
    size_t bytes;
  };

  static constexpr int64_t ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

  // Larger tasks for fewer threads, as long as the sums of one task stay in L2.
  int64_t columns_of_task() const {
    const int64_t target = ceil(p.N * m_tasks, 4 * max_of(1, p.threads));
    return min_of<int64_t>(384, max_of<int64_t>(1, ceil(target, kStaged)) * kStaged);
  }

  // Takes the buffers of a thread from an arena; a null base only measures.
  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers buf;
    const int64_t rows = min_of(kRowsOfTask, ceil(p.M, L) * L);
    const int64_t reduced = words<P>(min_of(p.K, kReduced));
    buf.x = a.take<Word>(rows * reduced);
    buf.w = a.take<Word>(kStaged * reduced);
    buf.y = a.take<T>(rows * min_of(columns, p.N));
    buf.temp = a.take<Word>(L * reduced);
    buf.ones = a.take<T>(L);
    buf.bytes = a.used();
    return buf;
  }

  // The lanes of a panel with `rows` rows of x.
  static int64_t lanes_for(int64_t rows) { return rows <= kFew * W ? kFew * W : L; }

  // y[m0, m1)[n0, n1), block by block of the reduced dimension.
  void task(Buffers& buf, int64_t m0, int64_t m1, int64_t n0, int64_t n1) const {
    const Source x = P::elements(const_cast<void*>(p.x), p.dtype);
    for (int64_t k0 = 0; k0 < p.K; k0 += kReduced) {
      const int64_t k1 = min_of(p.K, k0 + kReduced), reduced = words<P>(k1 - k0);
      for (int64_t m = m0; m < m1; m += L) {
        const int64_t rows = min_of(L, m1 - m), lanes = lanes_for(rows);
        const Source from = x + m * p.x_stride[0] + k0 * p.x_stride[1];
        Word* const to = buf.x + (m - m0) * reduced;
        if (p.x_stride[0] == 1 && rows == lanes)
          pack_dense_columns(from, k1 - k0, lanes, to);
        else
          pack_panel<P>(from, p.x_stride[0], p.x_stride[1], rows, k1 - k0, lanes, to, lanes,
                        buf.temp);
      }
      for (int64_t n = n0; n < n1; n += kStaged)
        block(buf, m0, m1, n0, n, min_of(n1, n + kStaged), n1 - n0, k0, k1);
    }
    for (int64_t l = 0; l < L; ++l) buf.ones[l] = T(1);
    const Source y = P::elements(p.y, p.dtype);
    for (int64_t m = m0; m < m1; m += L) {
      const int64_t rows = min_of(L, m1 - m);
      T* const panel = buf.y + (m - m0) * (n1 - n0);
      activate(p.activation, panel, lanes_for(rows) * (n1 - n0));
      unpack_transposed<T>(panel, lanes_for(rows), buf.ones, rows, n1 - n0, y + m * p.y_stride + n0,
                           p.y_stride);
    }
  }

  // pack_panel for an x that is transposed in memory, as in the gradient of the weight: the panel
  // needs no transposition.
  void pack_dense_columns(Source x, int64_t columns, int64_t lanes, Word* to) const {
    if constexpr (P::kPerWord == 2)
      stage_row_pairs(x, p.x_stride[1], 1, columns, lanes, to, lanes);
    else
      stage_rows<T>(x, p.x_stride[1], 1, columns, lanes, to, lanes);
  }

  // Columns [n, n_end) of all panels, reduced over [k0, k1).
  void block(Buffers& buf, int64_t m0, int64_t m1, int64_t n0, int64_t n, int64_t n_end,
             int64_t width, int64_t k0, int64_t k1) const {
    const Source w = P::elements(const_cast<void*>(p.w), p.dtype);
    const int64_t reduced = words<P>(k1 - k0), ld = kTransposed ? n_end - n : reduced;
    const Word* A =
        kTransposed
            ? stage_reduced<P>(w + k0 * p.w_stride + n, p.w_stride, 1, k1 - k0, n_end - n, buf.w)
            : stage_keys<P>(w + n * p.w_stride + k0, p.w_stride, 1, n_end - n, k1 - k0, buf.w);
    T bias[kStaged];
    if (p.bias != nullptr)
      with_elements(P::elements(const_cast<void*>(p.bias), p.dtype) + n, [&](const auto* from) {
        for (int64_t i = 0; i < n_end - n; ++i) bias[i] = static_cast<T>(widen(from[i]));
      });
    const T* const added = p.bias == nullptr ? nullptr : bias;
    for (int64_t m = m0; m < m1; m += L) {
      const Word* B = buf.x + (m - m0) * reduced;
      T* C = buf.y + (m - m0) * width;
      if (m1 - m <= kFew * W)
        tiles<kFew>(A, ld, B, n_end - n, reduced, added, k0 == 0, C + (n - n0) * kFew * W);
      else
        tiles<NV>(A, ld, B, n_end - n, reduced, added, k0 == 0, C + (n - n0) * L);
    }
  }

  // C[rows][lanes] = bias + A B with `first`, else C += A B. A [rows, reduced] are weights, B a
  // panel of rows of x.
  template <int kVectors>
  static __attribute__((noinline)) void tiles(const Word* A, int64_t ld, const Word* B,
                                              int64_t rows, int64_t reduced, const T* bias,
                                              bool first, T* C) {
    constexpr int64_t lanes = kVectors * W;
    const auto zero = [](int64_t, int) { return Vec<T>{}; };
    if (first) {
      tile_rows<P, kRows, kVectors, kTransposed>(rows, A, ld, B, lanes, reduced, zero,
                                                 [&](int64_t r, int n, Vec<T> sum)
                                                     __attribute__((always_inline)) {
                                                       if (bias != nullptr)
                                                         sum += splat<T>(bias[r]);
                                                       store(C + r * lanes + n * W, sum);
                                                     });
    } else {
      tile_rows<P, kRows, kVectors, kTransposed>(rows, A, ld, B, lanes, reduced, zero,
                                                 [&](int64_t r, int n, Vec<T> sum)
                                                     __attribute__((always_inline)) {
                                                       T* c = C + r * lanes + n * W;
                                                       store(c, load(c) + sum);
                                                     });
    }
  }
};

// Computes the layer by a kernel that does not copy the weight, if one serves it.
template <class P>
bool without_copies(const LinearParams& p) {
  bool done = false;
  if constexpr (kVariants)
    with_stored<P>(p.dtype, [&](auto stored) __attribute__((always_inline)) {
      typedef decltype(stored) S;
      if constexpr (kSame<P, Single> && kLanes<float> >= 8)
        if ((done = InPlace<P, S>::serves(p))) return InPlace<P, S>::run(p);
      if ((done = FewRows<P, S>::serves(p))) FewRows<P, S>(p).run();
    });
  return done;
}

}  // namespace

// y = x W^T + b by the kernel for this number of rows.
void linear(const LinearParams& p) {
  if (p.M == 0 || p.N == 0) return;
  with_policy(p.dtype, [&](auto policy) {
    typedef decltype(policy) P;
    if (without_copies<P>(p)) return;
    if (p.w_transposed)
      Linear<P, true>(p).run();
    else
      Linear<P, false>(p).run();
  });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
