// New rows of keys and values on their way into a cache, and the rotation of the new queries.
//
// A pair (a, b) of columns of a row at position n is rotated by the angle in row n of the tables:
//
//   a' = a cos - b sin,  b' = a sin + b cos
//
// A token's angles are read once for all its heads. Values, and columns without an angle, are
// copied. A row x of a quantised cache, after its rotation, becomes int8 or e4m3 and one scale:
//
//   c = max |x_d| / most, at least the smallest normal number;  x_d ~ c round(x_d / c)
//
// where most is the largest number of the cache, 127 or 448.
#include "../../params.h"
#include "../simd/convert.h"
#include "../threads.h"
#include "blocks.h"
#include "scales.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

template <class S>
class Append {
  typedef decltype(widen(S())) T;
  static constexpr int W = kLanes<T>;
  static constexpr double kFlopsPerElement = 4;  // the time of one element, in flops

 public:
  explicit Append(const AppendParams& params)
      : p(params),
        pairs(params.rotary_pairs),
        quantises(params.key_scales.data != nullptr),
        largest(params.float8 ? 448 : 127),
        unit(params.float8 ? kE4m3Unit : 1.0f) {}

  // Appends all tokens, or none if a row cannot be quantised; returns the fault.
  AppendFault run() const {
    const double elements = static_cast<double>(p.B * p.L) * ((p.Hq + p.Hkv) * p.D + p.Hkv * p.Dv);
    const int64_t tokens = p.B * p.L;
    const int team = team_size(p.threads, tokens, kFlopsPerElement * elements);
    // All scales are checked before any row is written.
    int fault = static_cast<int>(AppendFault::none);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      const Scratch buf = scratch();
      if (quantises) {
#pragma omp for schedule(static) reduction(max : fault)
        for (int64_t t = 0; t < tokens; ++t)
          fault = max_of(fault, static_cast<int>(measure(t / p.L, t % p.L, buf)));
#pragma omp for schedule(dynamic) reduction(max : fault)
        for (int64_t t = 0; t < p.B * p.Hkv; ++t)
          fault = max_of(fault, static_cast<int>(check_scales(t / p.Hkv, t % p.Hkv)));
      }
      if (fault == static_cast<int>(AppendFault::none)) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) token(t / p.L, t % p.L, buf);
      }
    }
    return static_cast<AppendFault>(fault);
  }

 private:
  const AppendParams& p;
  const int64_t pairs;
  const bool quantises;
  const T largest;   // number of a quantised cache
  const float unit;  // of its codes; finite times a scale

  struct Scratch {
    T *cos, *sin;  // [pairs]
    T *a, *b;      // [pairs] the two columns of each pair
    T* row;        // [D or Dv] to be quantised
  };

  // Takes the buffers of a thread from an arena.
  Scratch buffers(Arena& arena) const {
    Scratch buf;
    const int64_t size = round_up(pairs, W);
    buf.cos = arena.template take<T>(size), buf.sin = arena.template take<T>(size);
    buf.a = arena.template take<T>(size), buf.b = arena.template take<T>(size);
    buf.row = arena.template take<T>(quantises ? round_up(max_of(p.D, p.Dv), W) : 0);
    return buf;
  }

  // The buffers of this thread.
  Scratch scratch() const {
    Arena measured(nullptr);
    buffers(measured);
    Arena arena(thread_scratch(measured.used()));
    return buffers(arena);
  }

  // A row of a tensor.
  template <class X>
  struct Row {
    X* at;
    int64_t stride;
    bool dense() const { return stride == 1; }
    X& operator[](int64_t d) const { return at[d * stride]; }
  };
  // Row i of head h of entry b.
  template <class X = S>
  static Row<X> row_of(const Tensor4& x, int64_t b, int64_t h, int64_t i) {
    return {static_cast<X*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2],
            x.stride[3]};
  }

  // Appends token i of sequence b to all heads, and rotates its query.
  void token(int64_t b, int64_t i, const Scratch& buf) const {
    const CacheRow to = p.rows[b * p.L + i];
    if (pairs > 0) read_angles(p.positions[b * p.L + i], buf);
    for (int64_t h = 0; h < p.Hkv; ++h) {
      const Row<S> key = row_of(p.key, b, h, i), value = row_of(p.value, b, h, i);
      if (quantises) {
        rotate(key, Row<T>{buf.row, 1}, buf);
        quantise(p.key_cache, p.key_scales, *new_scale(0, b, i, h), to, h, p.D, buf);
        if (p.value_scales.data == nullptr) continue;  // the value is part of the key
        copy(value, Row<T>{buf.row, 1}, 0, p.Dv);
        quantise(p.value_cache, p.value_scales, *new_scale(1, b, i, h), to, h, p.Dv, buf);
      } else {
        rotate(key, row_of(p.key_cache, to.entry, h, to.row), buf);
        copy(value, row_of(p.value_cache, to.entry, h, to.row), 0, p.Dv);
      }
    }
    const int64_t query = i - (p.L - p.Lq);
    if (p.rotated.data == nullptr || query < 0) return;
    for (int64_t h = 0; h < p.Hq; ++h)
      rotate(row_of(p.query, b, h, query), row_of(p.rotated, b, h, query), buf);
  }

  // ---- Quantisation -----------------------------------------------------------------------------

  // The scale of a new row of keys (value = 0) or values (1).
  float* new_scale(int64_t value, int64_t b, int64_t i, int64_t h) const {
    return p.new_scales + ((value * p.B + b) * p.L + i) * p.Hkv + h;
  }

  // Writes the scales of a token.
  AppendFault measure(int64_t b, int64_t i, const Scratch& buf) const {
    if (pairs > 0) read_angles(p.positions[b * p.L + i], buf);
    AppendFault fault = AppendFault::none;
    for (int64_t h = 0; h < p.Hkv; ++h) {
      rotate(row_of(p.key, b, h, i), Row<T>{buf.row, 1}, buf);
      if (!scale_of(buf.row, p.D, new_scale(0, b, i, h))) fault = AppendFault::key;
      if (p.value_scales.data == nullptr) continue;
      copy(row_of(p.value, b, h, i), Row<T>{buf.row, 1}, 0, p.Dv);
      if (!scale_of(buf.row, p.Dv, new_scale(1, b, i, h))) fault = AppendFault::value;
    }
    return fault;
  }

  // Whether a scale of the earlier rows of a head is not positive and finite.
  AppendFault check_scales(int64_t b, int64_t h) const {
    const int32_t* const pages =
        p.block_table == nullptr ? nullptr : p.block_table + b * p.block_table_stride;
    const int64_t entry = p.entries == nullptr ? b : p.entries[b], length = p.lengths[b] - p.L;
    const int64_t begin = p.begins == nullptr ? 0 : p.begins[b];
    constexpr int64_t kBlock = 64;
    const Tensor4 both[2] = {p.key_scales, p.value_scales};
    for (const Tensor4& scales : both) {
      if (scales.data == nullptr) continue;
      for (int64_t j = begin; j < length; j += kBlock) {
        float block[kBlock];
        const int64_t end = min_of(length, j + kBlock);
        read_scales(scale_rows(scales, entry, h, pages, p.page_size), j, end, block);
        for (int64_t n = end - j; n < kBlock; ++n) block[n] = 1.0f;
        for (int64_t n = 0; n < kBlock; ++n) block[n] *= unit;
        if (any_wrong(block, kBlock)) return AppendFault::scale;
      }
    }
    return AppendFault::none;
  }

  // Returns false if an element is not finite, or too large for the scale.
  bool scale_of(const T* x, int64_t count, float* scale) const {
    T max_magnitude = 0, not_finite = 0;
    for (int64_t d = 0; d < count; ++d) {
      const T magnitude = x[d] < 0 ? -x[d] : x[d];
      max_magnitude = magnitude > max_magnitude ? magnitude : max_magnitude;
      not_finite += x[d] - x[d];
    }
    *scale = max_of(static_cast<float>(max_magnitude / largest), __FLT_MIN__);
    return not_finite == 0 && *scale <= __FLT_MAX__ / unit;
  }

  // Writes the row in `buf`, divided by its scale, and the scale to the row `at` of a cache.
  void quantise(const Tensor4& cache, const Tensor4& scales, float scale, CacheRow at, int64_t h,
                int64_t count, const Scratch& buf) const {
    *row_of<float>(scales, at.entry, h, at.row).at = scale;
    if (p.float8) {
      const Row<E4m3> to = row_of<E4m3>(cache, at.entry, h, at.row);
      for (int64_t d = 0; d < count; ++d)
        narrow(static_cast<float>(buf.row[d] / static_cast<T>(scale)), &to[d]);
      return;
    }
    const Row<Int8> to = row_of<Int8>(cache, at.entry, h, at.row);
    // Adding 1.5 * 2^(mantissa bits) rounds to an integer, ties to even.
    constexpr T kRounds = kSame<T, double> ? T(0x1.8p52) : T(0x1.8p23);
    for (int64_t d = 0; d < count; d += W) {
      Vec<T> x = load(buf.row + d) / splat<T>(static_cast<T>(scale));
      x = (x + kRounds) - kRounds;
      const int64_t n = min_of<int64_t>(W, count - d);
      for (int64_t l = 0; l < n; ++l)
        to[d + l] = {static_cast<int8_t>(max_of<T>(-127, min_of<T>(127, x[l])))};
    }
  }

  // ---- Rotation ---------------------------------------------------------------------------------

  // Reads cos and sin of a position, [pairs] each.
  void read_angles(int64_t position, const Scratch& to) const {
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

  // Rotates the first 2 * pairs columns of a row by the angles of its position; copies the others.
  template <class X>
  void rotate(Row<S> from, Row<X> to, const Scratch& f) const {
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
  static void copy(Row<S> from, Row<S> to, int64_t begin, int64_t end) {
    if (from.dense() && to.dense()) {
      if (begin < end)
        __builtin_memcpy(to.at + begin, from.at + begin,
                         static_cast<size_t>(end - begin) * sizeof(S));
      return;
    }
    for (int64_t d = begin; d < end; ++d) to[d] = from[d];
  }
  // Copies into scratch, as T. Where S is T, overload resolution prefers the function above.
  template <class X>
  static void copy(Row<S> from, Row<X> to, int64_t begin, int64_t end) {
    for (int64_t d = begin; d < end; ++d) to[d] = static_cast<X>(widen(from[d]));
  }
};

}  // namespace

// Appends new tokens to caches. With a fault, nothing is written.
AppendFault append_to_cache(const AppendParams& p) {
  AppendFault fault = AppendFault::none;
  with_stored(p.dtype, [&](auto stored) { fault = Append<decltype(stored)>(p).run(); });
  return fault;
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
