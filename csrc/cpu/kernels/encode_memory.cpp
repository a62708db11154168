// Sentences as memories, m_i = sum_j l_j o A[x_ij] + T_i, and the gradients of A and T. A sentence
// of only padding has m_i = 0.
//
// The embeddings [B, N, J, D] are never stored. The rows of a sentence's words are added in
// registers, one block of columns at a time.
#include <cstddef>
#include <cstdint>

#include "../../params.h"
#include "../simd/convert.h"
#include "../simd/simd.h"
#include "../threads.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

// Vectors of columns summed at once: enough independent chains to hide the latency of an addition.
constexpr int kVectors = 4;

// A word that is not padding: its row of the table, and its position in the sentence.
struct Word {
  int64_t row, place;
};

// Reads the words of sentence (r, b, n) that are not padding; returns their number.
int64_t read_sentence(const EncodeMemoryParams& p, int64_t r, int64_t b, int64_t n, Word* words) {
  const int64_t* token =
      p.tokens + r * p.token_stride[0] + b * p.token_stride[1] + n * p.token_stride[2];
  int64_t count = 0;
  for (int64_t j = 0; j < p.J; ++j, token += p.token_stride[3]) {
    words[count] = {*token, j};
    count += !(p.has_padding_idx && *token == p.padding_idx);  // padding is overwritten by the next
  }
  return count;
}

// The words of a sentence, in the scratch of the thread.
Word* sentence_scratch(const EncodeMemoryParams& p) {
  return static_cast<Word*>(thread_scratch(static_cast<size_t>(p.J + 1) * sizeof(Word)));
}

// Row (i, j, k) of a tensor of four dimensions.
template <class S>
const S* row_of(const Tensor4& t, int64_t i, int64_t j, int64_t k) {
  return static_cast<const S*>(t.data) + i * t.stride[0] + j * t.stride[1] + k * t.stride[2];
}

// out [columns] = sum_w factors[w.place] o table[w.row] + start, in N vectors; the last one has
// `last` lanes. start may be null.
template <class T, class S, int N>
FASTATTN_INLINE void sum_words(const S* table, int64_t row_stride, const T* factors,
                               int64_t factor_stride, const Word* words, int64_t count,
                               const S* start, S* out, int last) {
  constexpr int kN = kLanes<T>;
  const auto lanes = [last](int i) { return i == N - 1 ? last : kN; };
  Vec<T> sum[N] = {};
  if (start != nullptr) {
    FASTATTN_UNROLL for (int i = 0; i < N; ++i) sum[i] = load_as<T>(start + i * kN, lanes(i));
  }
  for (const Word* w = words; w != words + count; ++w) {
    const S* const row = table + w->row * row_stride;
    const T* const factor = factors + w->place * factor_stride;
    FASTATTN_UNROLL for (int i = 0; i < N; ++i) {
      sum[i] += load_as<T>(factor + i * kN, lanes(i)) * load_as<T>(row + i * kN, lanes(i));
    }
  }
  FASTATTN_UNROLL for (int i = 0; i < N; ++i) store_as<T>(out + i * kN, sum[i], lanes(i));
}

// table [rows, columns] += factors[w.place] o grad, for each word.
template <class T, class S, int N>
FASTATTN_INLINE void spread_words(T* table, int64_t row_stride, const T* factors,
                                  int64_t factor_stride, const Word* words, int64_t count,
                                  const S* grad, T* grad_temporal, int last) {
  constexpr int kN = kLanes<T>;
  const auto lanes = [last](int i) { return i == N - 1 ? last : kN; };
  Vec<T> g[N];
  FASTATTN_UNROLL for (int i = 0; i < N; ++i) g[i] = load_as<T>(grad + i * kN, lanes(i));
  if (grad_temporal != nullptr) {
    FASTATTN_UNROLL for (int i = 0; i < N; ++i) {
      T* const at = grad_temporal + i * kN;
      store_first(at, load_first(at, lanes(i)) + g[i], lanes(i));
    }
  }
  for (const Word* w = words; w != words + count; ++w) {
    T* const row = table + w->row * row_stride;
    const T* const factor = factors + w->place * factor_stride;
    FASTATTN_UNROLL for (int i = 0; i < N; ++i) {
      T* const at = row + i * kN;
      const Vec<T> term = load_first(factor + i * kN, lanes(i)) * g[i];
      store_first(at, load_first(at, lanes(i)) + term, lanes(i));
    }
  }
}

// Calls f(N, c, last) for blocks of N vectors from column c on; the last vector has `last` lanes.
template <class T, class F>
FASTATTN_INLINE void for_columns(int64_t c, int64_t end, const F& f) {
  constexpr int kN = kLanes<T>;
  for (; end - c > (kVectors - 1) * kN; c += kVectors * kN) {
    f(Width<kVectors>(), c, static_cast<int>(min_of<int64_t>(end - c - (kVectors - 1) * kN, kN)));
  }
  const int columns_left = static_cast<int>(end - c);
  if (columns_left > 2 * kN) return f(Width<3>(), c, columns_left - 2 * kN);
  if (columns_left > kN) return f(Width<2>(), c, columns_left - kN);
  if (columns_left > 0) return f(Width<1>(), c, columns_left);
}

// One sentence with all tables: its words are read once.
template <class T, class S>
void encode_sentence(const EncodeMemoryParams& p, int64_t r, int64_t b, int64_t n, Word* words) {
  const int64_t count = read_sentence(p, r, b, n, words);
  const T* const factors = static_cast<const T*>(p.factors);
  for (int64_t g = 0; g < p.G; ++g) {
    const S* const table = row_of<S>(p.weight, r, g, 0);
    const S* const start = p.temporal.data && count > 0 ? row_of<S>(p.temporal, r, g, n) : nullptr;
    S* const out = static_cast<S*>(p.out) + (((r * p.B + b) * p.G + g) * p.N + n) * p.D;
    for_columns<T>(0, p.D, [&](auto width, int64_t c, int last) __attribute__((always_inline)) {
      sum_words<T, S, decltype(width)::value>(table + c, p.weight.stride[2], factors + c,
                                              p.factor_stride, words, count,
                                              start ? start + c : nullptr, out + c, last);
    });
  }
}

// Forward: one task for each sentence.
template <class T, class S>
void run_forward(const EncodeMemoryParams& p) {
  const int64_t tasks = p.R * p.B * p.N;
  const double flops = 2.0 * static_cast<double>(tasks * p.J * p.G * p.D);
  const int team = team_size(p.threads, tasks, flops);
#pragma omp parallel num_threads(team) if (team > 1)
  {
    Word* const words = sentence_scratch(p);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      encode_sentence<T, S>(p, task / p.N / p.B, task / p.N % p.B, task % p.N, words);
    }
  }
}

// The gradients of the columns [c0, c1) of one table. One task owns them and processes the
// sentences in order, so the sums do not depend on the number of threads.
template <class T, class S>
void gather_gradient(const EncodeMemoryParams& p, int64_t r, int64_t g, int64_t c0, int64_t c1,
                     Word* words) {
  const T* const factors = static_cast<const T*>(p.factors);
  T* const table = static_cast<T*>(p.grad_weight) + (r * p.G + g) * p.V * p.D;
  T* const temporal =
      p.grad_temporal ? static_cast<T*>(p.grad_temporal) + (r * p.G + g) * p.N * p.D : nullptr;
  const auto clear = [&](T* rows, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = c0; c < c1; ++c) rows[i * p.D + c] = 0;
    }
  };
  clear(table, p.V);
  if (temporal) clear(temporal, p.N);
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t n = 0; n < p.N; ++n) {
      const int64_t count = read_sentence(p, r, b, n, words);
      if (count == 0) continue;
      const S* const grad = static_cast<const S*>(p.grad) + r * p.grad_stride[0] +
                            b * p.grad_stride[1] + g * p.grad_stride[2] + n * p.grad_stride[3];
      for_columns<T>(c0, c1, [&](auto width, int64_t c, int last) __attribute__((always_inline)) {
        spread_words<T, S, decltype(width)::value>(
            table + c, p.D, factors + c, p.factor_stride, words, count, grad + c,
            temporal ? temporal + n * p.D + c : nullptr, last);
      });
    }
  }
}

// Backward: one task for each table and block of columns, so no two threads add to an element.
template <class T, class S>
void run_backward(const EncodeMemoryParams& p) {
  constexpr int64_t kColumns = kVectors * kLanes<T>;
  const int64_t blocks = (p.D + kColumns - 1) / kColumns, tasks = p.R * p.G * blocks;
  const double flops = 2.0 * static_cast<double>(p.R * p.B * p.N * p.J * p.G * p.D);
  const int team = team_size(p.threads, tasks, flops);
#pragma omp parallel num_threads(team) if (team > 1)
  {
    Word* const words = sentence_scratch(p);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t table = task / blocks, c = task % blocks * kColumns;
      gather_gradient<T, S>(p, table / p.G, table % p.G, c, min_of(c + kColumns, p.D), words);
    }
  }
}

}  // namespace

// Forward for the dtype of the table.
void encode_memory(const EncodeMemoryParams& p) {
  switch (p.dtype) {
    case DType::f32:
      return run_forward<float, float>(p);
    case DType::f64:
      return run_forward<double, double>(p);
    case DType::bf16:
      return run_forward<float, Bf16>(p);
    case DType::f16:
      return run_forward<float, F16>(p);
    case DType::boolean:
      return;
  }
}

// Backward for the dtype of the table.
void encode_memory_backward(const EncodeMemoryParams& p) {
  switch (p.dtype) {
    case DType::f32:
      return run_backward<float, float>(p);
    case DType::f64:
      return run_backward<double, double>(p);
    case DType::bf16:
      return run_backward<float, Bf16>(p);
    case DType::f16:
      return run_backward<float, F16>(p);
    case DType::boolean:
      return;
  }
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
