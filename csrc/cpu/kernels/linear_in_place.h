// A linear layer with AVX2 or AVX-512.
//
// As in the tiled kernel, rows of x are transposed once, with the rows across the lanes, and an
// element of the weight is broadcast. But a few rows of the weight are multiplied from beginning to
// end before the next begin: prefetchers follow a few streams, no row is copied (16 bits are
// widened, block by block), and all panels of x use a block while it is in L1. Bound by reading the
// weight with 8 rows, and by the arithmetic from 32 rows on. Many rows are chunks that fit L2. The
// reduction has the blocks of the other kernels, so the bits of a row are the same. Up to half as
// many rows as lanes are multiplied by half vectors, of which AVX-512 computes two in the time of
// one.
#pragma once
#include "../threads.h"
#include "activation.h"
#include "blocks.h"
#include "linear_few.h"
#include "lines.h"
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// The weight is [N, K] with dense rows of S.
template <class P, class S>
class InPlace {
  typedef typename P::Acc T;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t L = kPanelLanes<P>;  // rows of x in a panel; the last may be one vector
  // The least lanes of a panel: half a vector of 16.
  static constexpr int64_t kLeast = W == 16 ? W / 2 : W;
  static constexpr int64_t kGroup = kRegisters == 32 ? 12 : 6;  // rows of the weight
  static constexpr int64_t kColumns = 96;  // of y that are transposed at a time
  static constexpr int64_t kLine = 64 / sizeof(S);
  static constexpr int64_t kAhead = 16 * kLine;  // elements; of all rows they would fill half of L1
  // Whether two blocks of the reduction can be multiplied at a time.
  static constexpr bool kHasPairs = kGroup > 8 && kSame<S, T>;
  static constexpr int64_t kChunkRows = 128, kChunkElements = 1 << 20;  // of x, at most
  static constexpr int64_t kMostInCache = 3 << 16;                      // elements of x
  static constexpr int64_t kTasksPerThread = 2;

 public:
  // FewRows does less arithmetic where lanes of a panel would be empty. With eight lanes, few are
  // empty.
  static bool serves(const LinearParams& p) {
    const int64_t lanes = lanes_for(min_of(p.M, L)), empty = max_of<int64_t>(0, lanes - p.M);
    const bool is_full = W == 8 ? p.M >= W : empty * (is_paired(p) ? 4 : 8) <= lanes;
    return is_full && !p.w_transposed;
  }

  // Divides the rows of x into chunks and the outputs into groups; a task is one of both.
  static void run(const LinearParams& p) {
    const int64_t most =
        max_of(L, min_of(kChunkRows, kChunkElements / max_of<int64_t>(1, p.K) / L * L));
    // Each thread takes whole rows, if there are enough, which it may also have computed before.
    const int64_t share = round_up((p.M + p.threads - 1) / p.threads, L);
    const int64_t rows = p.M >= p.threads * L ? min_of(most, share) : most;
    const int64_t chunks = (p.M + rows - 1) / rows, groups = (p.N + kGroup - 1) / kGroup;
    const int team = team_size(p.threads, chunks * groups, 2.0 * p.M * p.N * p.K);
    // Of fewer rows, each thread reads one part of the weight. Of more, a chunk is packed once for
    // each part, so the parts are as few as keep all threads busy.
    const int64_t tasks = p.M <= most ? team : kTasksPerThread * team;
    const int64_t parts = min_of(groups, (tasks + chunks - 1) / chunks);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      LinearParams chunk = p;
      chunk.M = min_of(p.M, rows);
      const Buffers buf = allocate(thread_scratch(allocate(nullptr, chunk).bytes), chunk);
      for (int64_t l = 0; l < L; ++l) buf.ones[l] = T(1);
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < chunks * parts; ++task) {
        const int64_t m = task / parts * rows, part = task % parts;
        chunk.M = min_of(rows, p.M - m);
        chunk.x = static_cast<const S*>(p.x) + m * p.x_stride[0];
        chunk.y = static_cast<S*>(p.y) + m * p.y_stride;
        const int64_t end = min_of(p.N, groups * (part + 1) / parts * kGroup);
        InPlace(chunk, buf).multiply(groups * part / parts * kGroup, end);
      }
    }
  }

 private:
  struct Buffers {
    T* x;     // [panels][K][lanes]
    T* w;     // [kGroup][kReducedWords], widened
    T* y;     // [panels][kColumns][lanes]
    T* ones;  // [L]
    size_t bytes;
  };

  const LinearParams& p;  // of a chunk
  const Buffers& buf;

  InPlace(const LinearParams& chunk, const Buffers& buffers) : p(chunk), buf(buffers) {}

  static Buffers allocate(void* base, const LinearParams& p) {
    Arena a(base);
    Buffers buf;
    const int64_t lanes = round_up(p.M, int64_t(W));
    buf.x = a.take<T>(lanes * (p.K + 1));
    buf.w = a.take<T>(kSame<S, T> ? 0 : kGroup * kReducedWords);
    buf.y = a.take<T>(lanes * kColumns);
    buf.ones = a.take<T>(L);
    buf.bytes = a.used();
    return buf;
  }

  // Whether rows of the weight are whole pages apart. Lines of all rows of a group would then
  // compete for the eight places of one set of L1, so half a group is multiplied at a time, by two
  // blocks, which keeps as many sums.
  static bool is_paired(const LinearParams& p) {
    return kHasPairs && p.w_stride % (4096 / int64_t(sizeof(S))) == 0;
  }

  // The panel of x that begins with row m.
  int64_t rows_at(int64_t m) const { return min_of(L, p.M - m); }
  int64_t lanes_at(int64_t m) const { return lanes_for(rows_at(m)); }
  static int64_t lanes_for(int64_t rows) { return rows <= kLeast ? kLeast : rows <= W ? W : L; }

  // Columns [n0, n1) of y.
  void multiply(int64_t n0, int64_t n1) const {
    const S* const x = static_cast<const S*>(p.x);
    for (int64_t m = 0; m < p.M; m += L)
      // Of half a vector, the other half is overwritten by the next column.
      pack_transposed<T>(x + m * p.x_stride[0], p.x_stride[0], p.x_stride[1], rows_at(m), p.K,
                         round_up(lanes_at(m), int64_t(W)), buf.x + m * p.K, lanes_at(m));
    for (int64_t n = n0; n < n1; n += kColumns) columns(n, min_of(n1, n + kColumns));
  }

  // At most kColumns of them.
  void columns(int64_t n0, int64_t n1) const {
    // If x leaves L2 while a group is multiplied, each part of it serves all groups at once.
    const int64_t step = p.M * p.K <= kMostInCache ? kGroup : n1 - n0;
    for (int64_t first = n0; first < n1; first += step)
      for (int64_t k = 0, count; k < p.K; k += count) {
        const bool paired = is_paired(p) && p.K - k >= 2 * kReducedWords;
        count = min_of(p.K - k, paired ? 2 * kReducedWords : kReducedWords);
        for (int64_t n = first; n < min_of(n1, first + step); n += kGroup)
          block(n, min_of(n1, n + kGroup), k, count, n0);
      }
    for (int64_t m = 0; m < p.M; m += L) {
      T* const y = buf.y + m * kColumns;
      activate(p.activation, y, round_up(lanes_at(m) * (n1 - n0), int64_t(W)));
      unpack_transposed<T>(y, lanes_at(m), buf.ones, rows_at(m), n1 - n0,
                           static_cast<S*>(p.y) + m * p.y_stride + n0, p.y_stride);
    }
  }

  // One or two blocks of rows [n, end) of the weight, as they are stored and as T.
  struct Block {
    const S* stored;
    const T* w;
    int64_t ldw, count;  // count: of the reduction
    int64_t left;        // elements from here to the end of a row
    bool first;
  };

  // y[columns n to end] += W[n to end, k to k + count] x
  void block(int64_t n, int64_t end, int64_t k, int64_t count, int64_t n0) const {
    const S* const stored = static_cast<const S*>(p.w) + n * p.w_stride + k;
    Block b{stored, nullptr, p.w_stride, count, p.K - k, k == 0};
    if constexpr (kSame<S, T>) {
      b.w = stored;
    } else {
      b.w = buf.w, b.ldw = count;
      stage_rows<T>(stored, p.w_stride, int64_t(1), end - n, count, buf.w, count);
    }
    for (int64_t m = 0; m < p.M; m += L) {
      const int64_t lanes = lanes_at(m);
      const T* const x = buf.x + m * p.K + k * lanes;
      T* const y = buf.y + m * kColumns + (n - n0) * lanes;
      if (end - n < kGroup)
        for (int64_t r = 0; r < end - n; ++r) panel<1>(lanes, b, r, x, n, y);
      else
        panel<kGroup>(lanes, b, 0, x, n, y);
    }
  }

  // Rows [r0, r0 + kRows) of the block times a panel of x.
  template <int64_t kRows>
  void panel(int64_t lanes, const Block& b, int64_t r0, const T* x, int64_t n, T* y) const {
    if (lanes == L) return tiles<kRows, kPanelVectors, Vec<T>>(b, r0, x, n, y);
    if (lanes == W) return tiles<kRows, 1, Vec<T>>(b, r0, x, n, y);
    if constexpr (kLeast < W) tiles<kRows, 1, HalfF>(b, r0, x, n, y);
  }

  // The same; a block with many words is multiplied in half as many rows, each with two chains of
  // sums, which round less.
  template <int64_t kRows, int kVectors, class V>
  void tiles(const Block& b, int64_t r0, const T* x, int64_t n, T* y) const {
    if constexpr (kHasPairs)
      if (b.count > kReducedWords) {
        constexpr int64_t kHalf = kRows == 1 ? 1 : kRows / 2;
        for (int64_t r = r0; r < r0 + kRows; r += kHalf) tile<kHalf, 2, kVectors, V>(b, r, x, n, y);
        return;
      }
    tile<kRows, 1, kVectors, V>(b, r0, x, n, y);
  }

  // Rows that are ld apart, four of them by one pointer. The address of an element is a pointer, a
  // multiple of ld and a constant, so that few instructions advance all rows; the compiler would
  // keep a pointer for each row, which are more than its registers.
  template <int64_t kRows, class E>
  struct Rows {
    const E* fourth[(kRows + 3) / 4];
    int64_t ld, ld3;

    FASTATTN_INLINE Rows(const E* w, int64_t ld) : ld(ld), ld3(3 * ld) {
      FASTATTN_UNROLL for (int64_t r = 0; r < kRows; r += 4) {
        fourth[r / 4] = w + r * ld;
        asm("" : "+r"(fourth[r / 4]));
      }
      asm("" : "+r"(ld3));
    }
    FASTATTN_INLINE const E* row(int64_t r) const {
      return fourth[r / 4] + (r % 4 == 3 ? ld3 : r % 4 * ld);
    }
    FASTATTN_INLINE void advance(int64_t count) {
      FASTATTN_UNROLL for (int64_t r = 0; r < kRows; r += 4) fourth[r / 4] += count;
    }
  };

  // kBlocks blocks of the reduction, each with its own sums.
  template <int64_t kRows, int kBlocks, int kVectors, class V>
  __attribute__((noinline)) void tile(const Block& b, int64_t r0, const T* x, int64_t n,
                                      T* y) const {
    constexpr int64_t width = sizeof(V) / sizeof(T), lanes = kVectors * width;
    constexpr int64_t kUnrolled = kRegisters == 32 ? 4 : 2;
    Rows<kRows, T> w(b.w + r0 * b.ldw, b.ldw);
    Rows<kRows, S> stored(b.stored + r0 * p.w_stride, p.w_stride);
    V acc[kBlocks][kRows][kVectors] = {};
    const auto add_products = [&](int64_t k) __attribute__((always_inline)) {
      FASTATTN_UNROLL for (int64_t j = 0; j < kBlocks; ++j) {
        const int64_t at = k + j * kReducedWords;
        V lane[kVectors];
        FASTATTN_UNROLL for (int v = 0; v < kVectors; ++v) lane[v] =
            *reinterpret_cast<const V*>(x + at * lanes + v * width);
        FASTATTN_UNROLL for (int64_t r = 0; r < kRows; ++r)
            FASTATTN_UNROLL for (int v = 0; v < kVectors; ++v) acc[j][r][v] =
                w.row(r)[at] * lane[v] + acc[j][r][v];
      }
    };
    const int64_t count = b.count / kBlocks;
    for (int64_t k = 0; k < count; k += kLine) {
      // Prefetch what is read next: later in these rows, or the beginning of the next group.
      const int64_t ahead = kBlocks * kAhead;
      const Rows<kRows, S> next(
          stored.row(0) + (k + ahead < b.left ? ahead : ahead + kGroup * p.w_stride - p.K),
          p.w_stride);
      FASTATTN_UNROLL for (int64_t r = 0; r < kRows; ++r)
          FASTATTN_UNROLL for (int64_t j = 0; j < kBlocks; ++j)
              __builtin_prefetch(next.row(r) + j * kReducedWords, 0, 2);
      if (k + kLine <= count)
        for (int64_t i = 0; i < kLine; i += kUnrolled) {
          FASTATTN_UNROLL for (int64_t u = 0; u < kUnrolled; ++u) add_products(u);
          w.advance(kUnrolled), x += kUnrolled * lanes;
        }
      else
        for (int64_t i = k; i < count; ++i) {
          add_products(0);
          w.advance(1), x += lanes;
        }
      stored.advance(kLine);
    }
    const S* const bias = p.bias == nullptr ? nullptr : static_cast<const S*>(p.bias) + n + r0;
    FASTATTN_UNROLL for (int64_t r = 0; r < kRows; ++r) {
      const T added = bias == nullptr ? T(0) : static_cast<T>(widen(bias[r]));
      FASTATTN_UNROLL for (int v = 0; v < kVectors; ++v) {
        V* const at = reinterpret_cast<V*>(y + (r0 + r) * lanes + v * width);
        V sum = b.first ? added + acc[0][r][v] : *at + acc[0][r][v];
        FASTATTN_UNROLL for (int64_t j = 1; j < kBlocks; ++j) sum += acc[j][r][v];
        *at = sum;
      }
    }
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
