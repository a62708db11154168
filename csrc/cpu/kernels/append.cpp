// New rows of keys and values on their way into a cache, and the rotation of the new queries.
//
// A pair (a, b) of columns of a row at position n is rotated by the angle in row n of the tables:
//
//   a' = a cos - b sin,  b' = a sin + b cos
//
// A token's angles are read once for all its heads. Values, and columns without an angle, are
// copied.
#include "../../params.h"
#include "../simd/convert.h"
#include "../threads.h"
#include "blocks.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class S>
class Append {
  typedef decltype(widen(S())) T;
  static constexpr int W = kLanes<T>;
  static constexpr double kFlopsPerElement = 4;  // the time of one element, in flops

 public:
  explicit Append(const AppendParams& params) : p(params), pairs(params.rotary_pairs) {}

  void run() const {
    const double elements = static_cast<double>(p.B * p.L) * ((p.Hq + p.Hkv) * p.D + p.Hkv * p.Dv);
    const int team = team_size(p.threads, p.B * p.L, kFlopsPerElement * elements);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      const Angles angles = scratch();
#pragma omp for schedule(static)
      for (int64_t t = 0; t < p.B * p.L; ++t) token(t / p.L, t % p.L, angles);
    }
  }

 private:
  const AppendParams& p;
  const int64_t pairs;

  struct Angles {
    T *cos, *sin;  // [pairs]
    T *a, *b;      // [pairs] the two columns of each pair
  };
  Angles scratch() const {
    const int64_t size = round_up(pairs, W);
    T* const base = static_cast<T*>(thread_scratch(static_cast<size_t>(4 * size) * sizeof(T)));
    return {base, base + size, base + 2 * size, base + 3 * size};
  }

  // A row of a tensor.
  struct Row {
    S* at;
    int64_t stride;
    bool dense() const { return stride == 1; }
    S& operator[](int64_t d) const { return at[d * stride]; }
  };
  static Row row_of(const Tensor4& x, int64_t b, int64_t h, int64_t i) {
    return {static_cast<S*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2],
            x.stride[3]};
  }

  void token(int64_t b, int64_t i, const Angles& angles) const {
    const CacheRow to = p.rows[b * p.L + i];
    if (pairs > 0) read_angles(p.positions[b * p.L + i], angles);
    for (int64_t h = 0; h < p.Hkv; ++h) {
      rotate(row_of(p.key, b, h, i), row_of(p.key_cache, to.entry, h, to.row), angles);
      copy(row_of(p.value, b, h, i), row_of(p.value_cache, to.entry, h, to.row), 0, p.Dv);
    }
    const int64_t query = i - (p.L - p.Lq);
    if (pairs == 0 || query < 0) return;
    for (int64_t h = 0; h < p.Hq; ++h)
      rotate(row_of(p.query, b, h, query), row_of(p.rotated, b, h, query), angles);
  }

  void read_angles(int64_t position, const Angles& to) const {
    const auto read = [&](const Tensor4& table, T* x) {
      const int64_t row = position * table.stride[2];
      for (int64_t r = 0; r < pairs; ++r) {
        const int64_t at = row + r * table.stride[3];
        x[r] = p.tables_are_f32 ? static_cast<T>(static_cast<const float*>(table.data)[at])
                                : static_cast<T>(widen(static_cast<const S*>(table.data)[at]));
      }
    };
    read(p.rotary_cos, to.cos);
    read(p.rotary_sin, to.sin);
  }

  void rotate(Row from, Row to, const Angles& f) const {
    copy(from, to, 2 * pairs, p.D);
    const bool halves = !p.rotary_interleaved;
    if (halves && from.dense() && to.dense()) {
      for (int64_t r = 0; r < pairs; r += W) {
        const int n = static_cast<int>(min_of<int64_t>(W, pairs - r));
        const Vec<T> a = load_as<T>(from.at + r, n), b = load_as<T>(from.at + pairs + r, n);
        const Vec<T> cos = load(f.cos + r), sin = load(f.sin + r);
        store_as<T>(to.at + r, a * cos - b * sin, n);
        store_as<T>(to.at + pairs + r, a * sin + b * cos, n);
      }
      return;
    }
    // Columns of pair r.
    const auto first = [&](int64_t r) { return halves ? r : 2 * r; };
    const auto second = [&](int64_t r) { return halves ? pairs + r : 2 * r + 1; };
    for (int64_t r = 0; r < pairs; ++r) {
      f.a[r] = static_cast<T>(widen(from[first(r)]));
      f.b[r] = static_cast<T>(widen(from[second(r)]));
    }
    for (int64_t r = 0; r < pairs; r += W) {
      const Vec<T> a = load(f.a + r), b = load(f.b + r);
      const Vec<T> cos = load(f.cos + r), sin = load(f.sin + r);
      store(f.a + r, a * cos - b * sin);
      store(f.b + r, a * sin + b * cos);
    }
    for (int64_t r = 0; r < pairs; ++r) {
      narrow(f.a[r], &to[first(r)]);
      narrow(f.b[r], &to[second(r)]);
    }
  }

  // Columns [begin, end).
  static void copy(Row from, Row to, int64_t begin, int64_t end) {
    if (from.dense() && to.dense()) {
      if (begin < end)
        __builtin_memcpy(to.at + begin, from.at + begin,
                         static_cast<size_t>(end - begin) * sizeof(S));
      return;
    }
    for (int64_t d = begin; d < end; ++d) to[d] = from[d];
  }
};

}  // namespace

void append_to_cache(const AppendParams& p) {
  with_policy(p.dtype, [&](auto policy) { Append<typename decltype(policy)::Storage>(p).run(); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
