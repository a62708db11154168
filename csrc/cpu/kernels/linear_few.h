// A linear layer of few rows, as for the next token of a language model.
//
// One to seven rows of x would fill few lanes of a panel, so the roles are exchanged: rows of the
// weight are transposed into a small panel, with the rows across the lanes, and x is broadcast. The
// weight is read once, and reading it is what takes the time. The sums have the order of the tiled
// kernel, and products commute, so the bits of a row do not depend on the number of rows.
#pragma once
#include "../threads.h"
#include "blocks.h"
#include "pack.h"
#include "lines.h"
#include "tile.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

#ifndef FASTATTN_CHUNK
#define FASTATTN_CHUNK 1
#define FASTATTN_LROWS 32
#define FASTATTN_SEG 1024
#endif

// Walks over the weight as FewRows does, some time before it, and has the processor read it into
// its L2 cache. A row is read for kSegment elements, then the same of the next row of the group.
template <class S, int64_t kGroup>
class ReadAhead {
  static constexpr int64_t kSegment = FASTATTN_SEG / sizeof(S), kLine = 64 / sizeof(S);

 public:
  ReadAhead(const LinearParams& params, int64_t n0) : p(params), n(n0) { next_segment(); }

  template <int kLines>
  FASTATTN_INLINE void lines() {
    if (kLines * kLine <= end - at) {
      FASTATTN_UNROLL for (int i = 0; i < kLines; ++i) __builtin_prefetch(at + i * kLine, 0, 2);
      at += kLines * kLine;
      if (at == end) next_row();
    } else {
      for (int i = 0; i < kLines; ++i) {
        __builtin_prefetch(at, 0, 2);
        at += kLine;
        if (at >= end) next_row();
      }
    }
  }

 private:
  const LinearParams& p;
  int64_t n, k = 0, rows = 0;  // the group, where the segment begins, and its rows that are left
  const S* at;
  const S* end;

  void row() {
    at = static_cast<const S*>(p.w) + (n + kGroup - rows) * p.w_stride + k;
    end = at + min_of(kSegment, p.K - k);
  }
  __attribute__((noinline)) void next_row() {
    if (--rows == 0) return next_segment();
    row();
  }
  void next_segment() {
    k += kSegment;
    if (k >= p.K) {
      k = 0;
      n = min_of(n + kGroup, p.N - kGroup);
    }
    rows = kGroup;
    row();
  }
};

// The weight is [N, K] with dense rows of S.
template <class P, class S>
class FewRows {
  typedef typename P::Acc T;
  typedef typename P::Word Word;
  static constexpr int W = kLanes<T>;
  static constexpr int kVectors = (kSame<T, double> ? FASTATTN_LROWS / 2 : FASTATTN_LROWS) / W;
  static constexpr int64_t L = kVectors * W;  // rows of the weight in a panel
  static constexpr int64_t kLine = 64 / sizeof(S);
  static constexpr int64_t kChunk =
      FASTATTN_CHUNK * kLine / P::kPerWord;  // words: with the panel, L1 holds the lines
  static constexpr int64_t kReduced = 256;   // words; as in Linear
  static constexpr int kRows = kSquareRows<P, S>;
  typedef ReadAhead<S, L> Ahead;

 public:
  static constexpr int64_t kMostRows = 7;

  explicit FewRows(const LinearParams& params) : p(params) {}

  // Whether there are few rows, and enough of the weight for a panel.
  static bool serves(const LinearParams& p) {
    return p.M <= kMostRows && p.N >= L && !p.w_transposed;
  }

  void run() {
    const int64_t groups = (p.N + L - 1) / L;
    const int team = team_size(p.threads, groups, 2.0 * p.M * p.N * p.K);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Buffers buf = allocate(thread_scratch(allocate(nullptr).bytes));
      const Word* x = stage_keys<P>(P::elements(const_cast<void*>(p.x), p.dtype), p.x_stride[0],
                                    p.x_stride[1], p.M, p.K, buf.x);
      // Each thread reads one part of the weight.
#pragma omp for schedule(static)
      for (int64_t part = 0; part < team; ++part) {
        const int64_t g0 = groups * part / team, g1 = groups * (part + 1) / team;
        Ahead ahead(p, g0 * L);
        for (int64_t g = g0; g < g1; ++g) group(buf, x, g * L, ahead);
      }
    }
  }

 private:
  const LinearParams& p;

  struct Buffers {
    Word* x;      // [M][words of K]
    Word* panel;  // [kChunk][L]
    T* sums;      // [M][L], of a block of kReduced words
    T* y;         // [M][L]
    size_t bytes;
  };

  Buffers allocate(void* base) const {
    Arena a(base);
    Buffers buf;
    buf.x = a.take<Word>(p.M * words<P>(p.K));
    buf.panel = a.take<Word>(kChunk * L);
    buf.sums = a.take<T>(p.M * L);
    buf.y = a.take<T>(p.M * L);
    buf.bytes = a.used();
    return buf;
  }

  // Columns [n, n + L) of y. The last group begins earlier, and writes only those that no other
  // does.
  void group(Buffers& buf, const Word* x, int64_t n, Ahead& ahead) const {
    const int64_t n0 = min_of(n, p.N - L), reduced = words<P>(p.K);
    const S* w = static_cast<const S*>(p.w) + n0 * p.w_stride;
    for (int64_t k0 = 0; k0 < reduced; k0 += kReduced) {
      const int64_t k1 = min_of(reduced, k0 + kReduced);
      for (int64_t k = k0; k < k1; k += kChunk) {
        const int64_t count = min_of(kChunk, k1 - k), column = k * P::kPerWord;
        pack(w + column, min_of(count * P::kPerWord, p.K - column), buf.panel, ahead);
        multiply(x + k, reduced, count, k == k0, buf);
      }
      add(k0 == 0, n0, buf);
    }
    for (int64_t m = 0; m < p.M; ++m)
      store_columns(buf.y + m * L, n - n0, static_cast<S*>(p.y) + m * p.y_stride + n0);
  }

  // y = sums + bias of the first block, y += sums of the others.
  void add(bool first, int64_t n0, Buffers& buf) const {
    for (int64_t i = 0; i < p.M * L; i += W) {
      Vec<T> sum = load(buf.sums + i);
      if (!first)
        sum = load(buf.y + i) + sum;
      else if (p.bias != nullptr)
        sum += load_as<T>(static_cast<const S*>(p.bias) + n0 + i % L, W);
      store(buf.y + i, sum);
    }
  }

  // Columns [skipped, L) of a row.
  static void store_columns(const T* from, int64_t skipped, S* to) {
    for (; skipped % W != 0; ++skipped) narrow(from[skipped], to + skipped);
    for (int64_t i = skipped; i < L; i += W) store_as<T>(to + i, load(from + i), W);
  }

  // panel[word][lane] of `columns` elements of L rows.
  __attribute__((noinline)) void pack(const S* w, int64_t columns, Word* panel,
                                      Ahead& ahead) const {
    const int64_t ld = p.w_stride;
    for (int64_t n = 0; n < L; n += kRows) {
      const S* rows = w + n * ld;
      Word* to = panel + n;
      for (int64_t c = 0; c < columns; c += kLine, to += kLine / P::kPerWord * L) {
        ahead.template lines<kRows>();
        if (c + kLine <= columns) {
          transpose_lines<P>(rows + c, ld, to, L);
        } else {
          S part[kRows * kLine] = {};
          for (int i = 0; i < kRows; ++i)
            __builtin_memcpy(part + i * kLine, rows + i * ld + c,
                             static_cast<size_t>(columns - c) * sizeof(S));
          transpose_lines<P>(part, kLine, to, L);
        }
      }
    }
  }

  // sums[row][lane] += x panel
  void multiply(const Word* x, int64_t ldx, int64_t count, bool first, Buffers& buf) const {
    const int64_t fours = p.M / 4 * 4;  // of at most seven
    if (fours != 0) tiles<4>(x, ldx, count, first, buf.panel, buf.sums);
    x += fours * ldx;
    T* sums = buf.sums + fours * L;
    if (p.M % 4 == 1) tiles<1>(x, ldx, count, first, buf.panel, sums);
    if (p.M % 4 == 2) tiles<2>(x, ldx, count, first, buf.panel, sums);
    if (p.M % 4 == 3) tiles<3>(x, ldx, count, first, buf.panel, sums);
  }

  template <int kRowsOfX>
  static __attribute__((noinline)) void tiles(const Word* x, int64_t ldx, int64_t count, bool first,
                                              const Word* panel, T* sums) {
    // As many sums as the registers hold; three rows take those of four vectors, too.
    constexpr int kSums = kRegisters == 32 ? 16 : 8;
    constexpr int NV = min_of(kVectors, kSums / (kRowsOfX == 3 ? 4 : kRowsOfX));
    for (int64_t n = 0; n < L; n += NV * W)
      tile<P, kRowsOfX, NV, false>(
          x, ldx, panel + n, L, count,
          [&](int r, int v) __attribute__((always_inline)) {
            return first ? Vec<T>{} : load(sums + r * L + n + v * W);
          },
          [&](int r, int v, Vec<T> sum)
              __attribute__((always_inline)) { store(sums + r * L + n + v * W, sum); });
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
