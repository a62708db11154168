// out = x * scale + PE(position). SinusoidalParams defines the angles; docs/sinusoidal.md gives
// their accuracy.
//
// The work is bound by memory. A tile of PE is computed once, in L1, and added to every batch row
// with the same positions.
#include "../../params.h"
#include "../simd/convert.h"
#include "../simd/math.h"
#include "../simd/simd.h"
#include "../simd/stream.h"
#include "../threads.h"
#include "team.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

typedef uint64_t VecUL __attribute__((vector_size(kVectorBytes), may_alias));

constexpr int64_t kTileBytes = 16 * 1024;  // half of the smallest L1; the rest is for x and out
constexpr int64_t kTileRows = 64;
constexpr double kFlopsPerElement = 20;  // cost of one element, in flops

// The angles of one vector of columns, as 64-bit fractions of a turn.
template <class T>
struct Angles {
  static constexpr int kParts = 8 / sizeof(T);
  VecUL part[kParts];
};

// Loads a vector of angles, fractions of a turn in units of 2^-64.
template <class T>
FASTATTN_INLINE Angles<T> load_angles(const uint64_t* p) {
  typedef uint64_t Unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  Angles<T> a;
  FASTATTN_UNROLL for (int i = 0; i < Angles<T>::kParts; ++i) {
    a.part[i] = *reinterpret_cast<const Unaligned*>(p + i * kLanes<double>);
  }
  return a;
}

// The words 0, 2, 4, ... of a, then of b.
template <int... I>
FASTATTN_INLINE VecU even_words(VecU a, VecU b, Indices<I...>) {
  return __builtin_shufflevector(a, b, 2 * I...);
}
// The words 1, 3, 5, ... of a, then of b.
template <int... I>
FASTATTN_INLINE VecU odd_words(VecU a, VecU b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// After adding an eighth of a turn, the two top bits are the nearest quadrant, and the rest is the
// distance from it plus that eighth.
constexpr uint64_t kEighth = uint64_t{1} << 61;

FASTATTN_INLINE Waves<float> waves_of(const Angles<float>& angles) {
  typedef typename CountTo<kLanes<float>>::type All;
  const VecU a = (VecU)(angles.part[0] + kEighth), b = (VecU)(angles.part[1] + kEighth);
  const VecI high = (VecI)odd_words(a, b, All());
  const VecI low = (VecI)(even_words(a, b, All()) >> 1);  // one bit less converts as signed
  const VecI distance = (high & 0x3fffffff) - 0x20000000;
  // Both words are used, so that small angles keep their relative accuracy.
  return waves<float>(high, __builtin_convertvector(distance, VecF) * 0x1p-32f +
                                __builtin_convertvector(low, VecF) * 0x1p-63f);
}
// The same in float64.
FASTATTN_INLINE Waves<double> waves_of(const Angles<double>& angles) {
  const VecL a = (VecL)(angles.part[0] + kEighth);
  const VecL distance = (a & 0x3fffffffffffffff) - static_cast<int64_t>(kEighth);
  return waves<double>(a, __builtin_convertvector(distance, VecD) * 0x1p-64);
}

// The lower or upper half of a0 b0 a1 b1 ...
template <class T, int... I>
FASTATTN_INLINE Vec<T> zip_lower(Vec<T> a, Vec<T> b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes<T>)...);
}
// The upper halves of a and b, their elements in turn.
template <class T, int... I>
FASTATTN_INLINE Vec<T> zip_upper(Vec<T> a, Vec<T> b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes<T> + kLanes<T> / 2)...);
}

// One row of n columns: out = x * scale + pe. In 16 bits a tile's rows are short, and the hardware
// prefetcher does not follow the jump to the next batch row. So that row, `next`, is prefetched
// while this one streams. float32 does not gain from it.
template <class T, class S>
void add_row(const S* x, int64_t x_stride, [[maybe_unused]] const S* next, const T* pe, T scale,
             S* out, int64_t out_stride, int64_t n, bool stream) {
  if (x_stride != 1 || out_stride != 1) {
    for (int64_t c = 0; c < n; ++c) {
      narrow(static_cast<T>(widen(x[c * x_stride])) * scale + pe[c], out + c * out_stride);
    }
    return;
  }
  constexpr int kN = kLanes<T>;
  int64_t c = 0;
  if (stream && reinterpret_cast<uintptr_t>(out) % (kN * sizeof(S)) == 0) {
    for (; c + kN <= n; c += kN) {
      if constexpr (sizeof(S) < sizeof(T)) __builtin_prefetch(next + c);
      stream_as<T>(out + c, load_as<T>(x + c, kN) * scale + load(pe + c));
    }
  }
  for (; c + kN <= n; c += kN) {
    store_as<T>(out + c, load_as<T>(x + c, kN) * scale + load(pe + c), kN);
  }
  const int rest = static_cast<int>(n - c);
  if (rest > 0) store_as<T>(out + c, load_as<T>(x + c, rest) * scale + load(pe + c), rest);
}

// The work is split into blocks of positions and, if these are few, groups of batch rows.
struct Plan {
  int64_t rows;     // positions in a tile
  int64_t columns;  // columns in a tile, a multiple of the vector length
  int64_t blocks;   // ceil(L / rows)
  int64_t groups;   // of the B * H batch rows
  bool stream;
};

// How the encoding is divided: the tile of angles that a task computes and the rows of x that share
// it.
template <class T, class S>
Plan make_plan(const SinusoidalParams& p) {
  constexpr int64_t kElements = kTileBytes / sizeof(T);
  Plan plan;
  plan.columns = min_of(round_up(p.D, kLanes<T>), kElements);
  plan.rows = min_of(min_of(kElements / plan.columns, kTileRows), p.L);
  plan.blocks = (p.L + plan.rows - 1) / plan.rows;
  plan.groups = max_of<int64_t>(1, min_of(p.B * p.H, 4 * p.threads / plan.blocks));
  plan.stream = p.B * p.H * p.L * p.D > kStreamBytes / static_cast<int64_t>(sizeof(S));
  return plan;
}

template <class T>
struct Tile {
  alignas(kVectorBytes) T pe[kTileBytes / sizeof(T)];  // [rows, columns]
  int64_t position[kTileRows];
};

// Advances the angles from position[r - 1] to position[r]. A step to the next position is one
// addition; 64-bit products are slow on processors without an instruction for them.
template <class T>
FASTATTN_INLINE void advance(Angles<T>* angles, const Angles<T>& frequency, const Angles<T>& phase,
                             const int64_t* position, int64_t r) {
  const auto turns = static_cast<uint64_t>(position[r]);
  const bool next = r > 0 && turns == static_cast<uint64_t>(position[r - 1]) + 1;
  FASTATTN_UNROLL for (int i = 0; i < Angles<T>::kParts; ++i) {
    angles->part[i] =
        next ? angles->part[i] + frequency.part[i] : frequency.part[i] * turns + phase.part[i];
  }
}

// PE of the tile's positions [rows, columns], from column c0 on, each column separately. Also
// prefetches x, the first batch row with these positions.
template <class T, class S>
void fill_columns(Tile<T>* tile, const SinusoidalParams& p, int64_t rows, int64_t c0,
                  int64_t columns, const S* x) {
  for (int64_t c = 0; c < columns; c += kLanes<T>) {
    const Angles<T> frequency = load_angles<T>(p.frequency + c0 + c);
    const Angles<T> phase = load_angles<T>(p.phase + c0 + c);
    Angles<T> angles = phase;
    for (int64_t r = 0; r < rows; ++r) {
      advance(&angles, frequency, phase, tile->position, r);
      store(tile->pe + r * columns + c, waves_of(angles).sine);
      __builtin_prefetch(x + r * p.x.stride[2] + c * p.x.stride[3]);
    }
  }
}

// PE of all columns at once if they come in pairs: one angle gives sine and cosine. The last vector
// overlaps the previous one.
template <class T, class S>
void fill_pairs(Tile<T>* tile, const SinusoidalParams& p, int64_t rows, int64_t columns,
                const S* x) {
  typedef typename CountTo<kLanes<T>>::type All;
  constexpr int kN = kLanes<T>;
  const Angles<T> phase = {};
  for (int64_t i = 0; i < p.pairs; i += kN) {
    i = min_of(i, p.pairs - kN);
    const Angles<T> frequency = load_angles<T>(p.pair_frequency + i);
    const int64_t first = p.interleaved ? 2 * i : i,
                  second = p.interleaved ? 2 * i + kN : p.pairs + i;
    Angles<T> angles = phase;
    for (int64_t r = 0; r < rows; ++r) {
      advance(&angles, frequency, phase, tile->position, r);
      const Waves<T> w = waves_of(angles);
      T* const pe = tile->pe + r * columns;
      store(pe + first, p.interleaved ? zip_lower<T>(w.sine, w.cosine, All()) : w.sine);
      store(pe + second, p.interleaved ? zip_upper<T>(w.sine, w.cosine, All()) : w.cosine);
      __builtin_prefetch(x + r * p.x.stride[2] + first * p.x.stride[3]);
      __builtin_prefetch(x + r * p.x.stride[2] + second * p.x.stride[3]);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 2 * p.pairs; c < p.D; ++c) tile->pe[r * columns + c] = 0;
  }
}

// Computes one tile of the encoding; the row of `padding_idx` is 0.
template <class T, class S>
void fill(Tile<T>* tile, const SinusoidalParams& p, int64_t rows, int64_t c0, int64_t columns,
          const S* x) {
  if (p.pairs >= kLanes<T> && columns >= p.D) {
    fill_pairs(tile, p, rows, columns, x);
  } else {
    fill_columns(tile, p, rows, c0, columns, x);
  }
  if (!p.has_padding_idx) return;
  for (int64_t r = 0; r < rows; ++r) {
    if (tile->position[r] != p.padding_idx) continue;
    for (int64_t c = 0; c < columns; ++c) tile->pe[r * columns + c] = 0;
  }
}

// One block of positions for the batch rows [n0, n1).
template <class T, class S>
void run_block(const SinusoidalParams& p, const Plan& plan, int64_t block, int64_t n0, int64_t n1) {
  Tile<T> tile;
  const int64_t first = block * plan.rows, rows = min_of(plan.rows, p.L - first);
  for (int64_t c0 = 0; c0 < p.D; c0 += plan.columns) {
    const int64_t columns = min_of(plan.columns, p.D - c0);
    const int64_t tile_columns = round_up(columns, kLanes<T>);
    const auto at = [&](const Tensor4& t, int64_t n) {
      return static_cast<S*>(t.data) + n / p.H * t.stride[0] + n % p.H * t.stride[1] +
             first * t.stride[2] + c0 * t.stride[3];
    };
    const int64_t* filled = nullptr;
    for (int64_t n = n0; n < n1; ++n) {
      const S *x = at(p.x, n), *next = at(p.x, min_of(n + 1, n1 - 1));
      S* out = at(p.out, n);
      const int64_t* const positions = p.positions ? p.positions + n / p.H * p.position_stride[0] +
                                                         n % p.H * p.position_stride[1] +
                                                         first * p.position_stride[2]
                                                   : nullptr;
      if (n == n0 || positions != filled) {
        for (int64_t r = 0; r < rows; ++r) {
          tile.position[r] = positions ? positions[r * p.position_stride[2]] : p.offset + first + r;
        }
        fill(&tile, p, rows, c0, tile_columns, x);
        filled = positions;
      }
      for (int64_t r = 0; r < rows; ++r) {
        add_row<T>(x, p.x.stride[3], next, tile.pe + r * tile_columns, static_cast<T>(p.scale), out,
                   p.out.stride[3], columns, plan.stream);
        x += p.x.stride[2], next += p.x.stride[2], out += p.out.stride[2];
      }
    }
  }
  if (plan.stream) stream_fence();
}

// Runs all tasks: a block of positions for a group of batch entries and heads.
template <class T, class S>
void run(const SinusoidalParams& p) {
  const Plan plan = make_plan<T, S>(p);
  const int64_t batch = p.B * p.H, tasks = plan.blocks * plan.groups;
  const double flops = kFlopsPerElement * static_cast<double>(batch * p.L * p.D);
  const int team = team_size(p.threads, tasks, flops);
  each_task(team, tasks, kStatic, [&](int64_t task) {
    const int64_t block = task / plan.groups, group = task % plan.groups;
    run_block<T, S>(p, plan, block, batch * group / plan.groups, batch * (group + 1) / plan.groups);
  });
}

}  // namespace

// out = scale x + PE, by the dtype of x.
void sinusoidal(const SinusoidalParams& p) {
  if (p.B * p.H * p.L * p.D == 0) return;
  switch (p.dtype) {
    case DType::f32:
      return run<float, float>(p);
    case DType::f64:
      return run<double, double>(p);
    case DType::bf16:
      return run<float, Bf16>(p);
    case DType::f16:
      return run<float, F16>(p);
    case DType::boolean:
      return;
  }
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
