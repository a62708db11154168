// A linear layer on tiles:  y = f(x W^T + b), and the matrix products of its backward pass.
//
// A float is the sum of three bf16, and a product of floats six products of tiles, see parts.h. At
// their peak these take half of the time of multiply-adds on vectors, and they have half of the
// error. An fp16 is the sum of two parts. The sums of 32 rows by 32 columns stay in four tiles for
// a block of the reduced index; blocks are added in order, because one long sum would round more.
// Their length depends only on K and the dtype, so the bits of an element depend neither on the
// other rows nor on the threads.
//
// Tiles flush subnormals, and a difference of infinities is NaN, so rows and columns with very
// large, very small or infinite numbers are computed again on vectors.
#include "../../threads.h"
#include "../activation.h"
#include "../blocks.h"
#include "../team.h"
#include "base.h"
#include "linear_pack.h"

namespace fastattn {
namespace FASTATTN_BASE {
void linear(const LinearParams&);
}
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kSquare = 32;

// [32, 32] sums in tiles 0 to 3, [row half][column half]. Tiles 4 and 5 have the two halves of the
// left side, 6 and 7 of the right side. Each is loaded where its last use is over, and kept where
// the next product of parts has it too.
template <class F>
struct Sums {
  typedef PartProducts<F::kParts> Products;
  static constexpr int64_t kChunk = 2 * F::kParts * kTileElements;

  template <int T>
  static FASTATTN_INLINE void load_left(const Element* chunk, int part) {
    Tiles::load<T>(chunk + (2 * part + T - 4) * kTileElements, 64);
  }
  template <int T>
  static FASTATTN_INLINE void load_right(const Element* chunk, int part) {
    Tiles::load<T>(chunk + (2 * part + T - 6) * kTileElements, 64);
  }

  // Product I of the parts of a chunk, and the loads for the next one, which may be the first one
  // of the next chunk. Calls between() twice.
  template <int I, class Between>
  static FASTATTN_INLINE void product(const Element* left, const Element* right,
                                      const Element* next_left, const Element* next_right,
                                      Between between) {
    constexpr bool is_last = I + 1 == Products::count;
    constexpr int next = is_last ? 0 : I + 1;
    constexpr int of_left = Products::left[next], of_right = Products::right[next];
    constexpr bool new_left = is_last || of_left != Products::left[I];
    constexpr bool new_right = is_last || of_right != Products::right[I];
    if (is_last) left = next_left, right = next_right;
    if constexpr (new_left) {  // row by row
      F::template multiply<0, 4, 6>();
      F::template multiply<1, 4, 7>();
      load_left<4>(left, of_left);
      between();
      F::template multiply<2, 5, 6>();
      if constexpr (new_right) load_right<6>(right, of_right);
      F::template multiply<3, 5, 7>();
      load_left<5>(left, of_left);
      if constexpr (new_right) load_right<7>(right, of_right);
      between();
    } else {  // column by column
      F::template multiply<0, 4, 6>();
      F::template multiply<2, 5, 6>();
      load_right<6>(right, of_right);
      between();
      F::template multiply<1, 4, 7>();
      F::template multiply<3, 5, 7>();
      load_right<7>(right, of_right);
      between();
    }
  }
  template <class Between, int... I>
  static FASTATTN_INLINE void chunk(const Element* left, const Element* right,
                                    const Element* next_left, const Element* next_right,
                                    Between between, Indices<I...>) {
    (product<I>(left, right, next_left, next_right, between), ...);
  }

  // sums[32, 32], rows `stride` floats apart, = bias[32] + left right, of `steps` chunks. Calls
  // each_step(s) and twice for each product of parts between().
  template <class Step, class Between>
  static FASTATTN_INLINE void multiply(const Element* left, const Element* right, int64_t steps,
                                       const float* bias, float* sums, int64_t stride,
                                       Step each_step, Between between) {
    load_left<4>(left, Products::left[0]), load_left<5>(left, Products::left[0]);
    load_right<6>(right, Products::right[0]), load_right<7>(right, Products::right[0]);
    Tiles::load<0>(bias, 0), Tiles::load<1>(bias + 16, 0);  // the same 16 in each row
    Tiles::load<2>(bias, 0), Tiles::load<3>(bias + 16, 0);
    for (int64_t s = 0; s < steps; ++s) {
      each_step(s);
      const int64_t next = s + 1 < steps ? kChunk : 0;
      chunk(left, right, left + next, right + next, between,
            typename CountTo<Products::count>::type());
      left += kChunk, right += kChunk;
    }
    const int64_t bytes = 4 * stride;
    Tiles::store<0>(sums, bytes), Tiles::store<1>(sums + 16, bytes);
    Tiles::store<2>(sums + 16 * stride, bytes), Tiles::store<3>(sums + 16 * stride + 16, bytes);
  }
};

// S: of the tensors; F: of the parts.
template <class S, class F>
class TileLinear {
  static constexpr bool kDirect = kSame<S, float>;  // sums of blocks are added in y
  static constexpr int64_t kChunk = Sums<F>::kChunk;
  static constexpr int64_t kMostSteps = 48 / F::kParts;  // 32 packed lines have 96 KiB
  static constexpr int64_t kRowsOfTask = 256;            // packed, less than half of L2
  static constexpr int64_t kColumns = 2048;              // packed at a time
  static constexpr int64_t kRows = kDirect ? int64_t{1} << 62 : 2048;  // with sums besides y

 public:
  explicit TileLinear(const LinearParams& params)
      : p(params),
        x(lines(p.x, p.M, p.x_stride[1] == 1 ? p.x_stride[0] : p.x_stride[1], p.x_stride[1] != 1)),
        w(lines(p.w, p.N, p.w_stride, p.w_transposed)),
        steps(blocks_of(p.K, kSquare)),
        steps_of_block(blocks_of(steps, blocks_of(steps, kMostSteps))),
        rows_of_task(task_rows()),
        tasks_of_rows(blocks_of(min_of(p.M, kRows), rows_of_task)),
        parts(tasks_of_rows >= p.threads ? 1 : blocks_of(p.threads, tasks_of_rows)),
        packs_first(p.packed == nullptr && tasks_of_rows > 1),
        strips_of_w(blocks_of(p.N, kSquare)),
        team(team_size(p.threads, tasks_of_rows * parts, 2.0 * p.M * p.N * p.K)) {}

  void run() {
    shared = allocate_shared(thread_scratch(bytes_of_thread()));
    // Not in the scratch, which the kernels on vectors use too.
    const int64_t lines = round_up(p.M, kSquare) + round_up(p.N, kSquare);
    largest_of_x =
        static_cast<int32_t*>(__builtin_malloc(static_cast<size_t>(lines) * sizeof(int32_t)));
    largest_of_w = largest_of_x + round_up(p.M, kSquare);
    for (int64_t m = 0; m < p.M; m += kRows)
      for (int64_t n = 0; n < p.N; n += kColumns) group(m, n);
    compute_separate(p.M, largest_of_x, kLeastOfLeft, [&](int64_t m, int64_t count) {
      LinearParams some = p;
      some.M = count, some.x = x_at(m), some.y = y_at(m, 0);
      FASTATTN_BASE::linear(some);
    });
    const int32_t* const of_w = p.packed == nullptr ? largest_of_w : magnitudes_in(p.packed);
    compute_separate(p.N, of_w, kLeastOfRight, [&](int64_t n, int64_t count) {
      LinearParams some = p;
      some.N = count, some.w = w.data + n * (w.across ? 1 : w.stride), some.y = y_at(0, n);
      if (p.bias != nullptr) some.bias = static_cast<const S*>(p.bias) + n;
      FASTATTN_BASE::linear(some);
    });
    __builtin_free(largest_of_x);
  }

  // W as it is packed for later calls: [block of the reduced index][strip][steps] chunks, then the
  // magnitudes.
  void pack_all(void* to) const {
    each_task(team_size(p.threads, strips_of_w, 4.0 * p.N * p.K), strips_of_w, kStatic,
              [&](int64_t strip) {
                for (int64_t s = 0; s < steps; s += steps_of_block) {
                  const Block block{0, 0, 0, s, min_of(steps_of_block, steps - s)};
                  pack_lines<F, false>(w, strip * kSquare, s * kStep, block.steps,
                                       const_cast<Element*>(packed_strip(to, block, strip)),
                                       const_cast<int32_t*>(magnitudes_in(to)) + strip * kSquare);
                }
              });
  }

 private:
  // A product of magnitudes within these has no part that is subnormal and counts, and no sum that
  // overflows before its time. Gradients are small, and always the left side; a whole row of W has
  // only small numbers where it is zero.
  static constexpr float kLeastOfLeft = 0x1p-80f, kLeastOfRight = 0x1p-20f, kLargest = 0x1p56f;

  const LinearParams& p;
  const Lines<S> x, w;
  const int64_t steps, steps_of_block;  // chunks of 32 of the reduced index, blocks of equal length
  const int64_t rows_of_task, tasks_of_rows;
  const int64_t parts;        // of the columns: tasks with the same rows
  const bool packs_first;     // W is packed for all tasks, else by each task for its columns
  const int64_t strips_of_w;  // of 32 columns
  const int team;

  struct Shared {
    Element* w;    // [strips of kColumns][steps_of_block] chunks, with packs_first
    float* sums;   // [rows][kColumns], unless kDirect
    float* bias;   // [kColumns]
    float* zeros;  // [32]
    size_t bytes;
  } shared;
  int32_t *largest_of_x, *largest_of_w;  // [M], [N] and up to a tile: magnitudes
  struct Own {
    Element* x;   // [panels of rows_of_task][steps_of_block] chunks
    Element* w;   // [steps_of_block] chunks
    float* edge;  // [32][32]
    size_t bytes;
  };

  static int64_t blocks_of(int64_t count, int64_t length) { return (count + length - 1) / length; }
  Lines<S> lines(const void* data, int64_t count, int64_t stride, bool across) const {
    return {static_cast<const S*>(data), count, p.K, stride, across};
  }
  const S* x_at(int64_t m) const { return static_cast<const S*>(p.x) + m * p.x_stride[0]; }
  S* y_at(int64_t m, int64_t n) const { return static_cast<S*>(p.y) + m * p.y_stride + n; }

  // Equal shares for the threads, if each gets so many rows that a packed W pays.
  int64_t task_rows() const {
    const int64_t rows = min_of(p.M, kRows), least = blocks_of(rows, kRowsOfTask);
    const int64_t tasks = rows >= 128 * p.threads ? round_up(least, int64_t(p.threads)) : least;
    return round_up(blocks_of(rows, tasks), kSquare);
  }

  Shared allocate_shared(void* base) const {
    Arena a(base);
    Shared s;
    const int64_t columns = round_up(min_of(p.N, kColumns), kSquare);
    s.w = a.take<Element>(packs_first ? columns / kSquare * steps_of_block * kChunk : 0);
    s.sums = a.take<float>(
        kDirect || steps_of_block == steps ? 0 : round_up(min_of(p.M, kRows), kSquare) * columns);
    s.bias = a.take<float>(columns);
    s.zeros = a.take<float>(kSquare);
    s.bytes = a.used();
    return s;
  }
  Own allocate_own(void* base) const {
    Arena a(base);
    Own o;
    o.x = a.take<Element>(rows_of_task / kSquare * steps_of_block * kChunk);
    o.w = a.take<Element>(packs_first || p.packed != nullptr ? 0 : steps_of_block * kChunk);
    o.edge = a.take<float>(kSquare * kSquare);
    o.bytes = a.used();
    return o;
  }
  // Every thread asks for the shared part too, in front of its own: the calling one has both, and
  // the others never touch it.
  size_t bytes_of_thread() const {
    return allocate_shared(nullptr).bytes + allocate_own(nullptr).bytes;
  }

  // y[m0 to m0 + kRows)[n0 to n0 + kColumns)
  void group(int64_t m0, int64_t n0) {
    const int64_t rows = min_of(kRows, p.M - m0), columns = min_of(kColumns, p.N - n0);
    const int64_t strips = blocks_of(columns, kSquare);
    for (int64_t n = 0; n < round_up(columns, kSquare); ++n)
      shared.bias[n] =
          p.bias == nullptr || n >= columns ? 0.0f : widen(static_cast<const S*>(p.bias)[n0 + n]);
    for (int64_t l = 0; l < kSquare; ++l) shared.zeros[l] = 0.0f;
    for (int64_t s = 0; s < steps; s += steps_of_block) {
      const Block block{m0, m0 + rows, n0, s, min_of(steps_of_block, steps - s)};
      if (packs_first)
        each_task(team, strips, kStatic, [&](int64_t strip) {
          pack_strip(block, strip, shared.w + strip * block.steps * kChunk);
        });
      const auto make = [&] {
        char* const own = static_cast<char*>(thread_scratch(bytes_of_thread()));
        return allocate_own(own + shared.bytes);
      };
      each_task(team, blocks_of(rows, rows_of_task) * parts, 1, make,
                [&](const Own& own, int64_t t) {
                  const int64_t m = m0 + t / parts * rows_of_task, part = t % parts;
                  task(own, block, m, min_of(block.m1, m + rows_of_task), strips * part / parts,
                       strips * (part + 1) / parts, part == 0);
                });
    }
  }

  // y[m0, m1), columns from n0 on, reduced over chunks [step, step + steps).
  struct Block {
    int64_t m0, m1, n0, step, steps;
  };

  const Element* packed_strip(const void* packed, const Block& b, int64_t strip) const {
    const int64_t before = b.step * strips_of_w + (b.n0 / kSquare + strip) * b.steps;
    return static_cast<const Element*>(packed) + before * kChunk;
  }
  const int32_t* magnitudes_in(const void* packed) const {
    const Element* const all = static_cast<const Element*>(packed);
    return reinterpret_cast<const int32_t*>(all + steps * strips_of_w * kChunk);
  }

  void pack_strip(const Block& b, int64_t strip, Element* to) const {
    const int64_t n = b.n0 + strip * kSquare;
    pack_lines<F, false>(w, n, b.step * kStep, b.steps, to, largest_of_w + n);
  }

  // Rows [m0, m1) of a block by columns of strips [begin, end). `records`: no other task packs
  // these rows, or this is the one that notes their magnitudes.
  void task(const Own& own, const Block& b, int64_t m0, int64_t m1, int64_t begin, int64_t end,
            bool records) const {
    const int64_t length = b.steps * kChunk, panels = blocks_of(m1 - m0, kSquare);
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t m = m0 + i * kSquare;
      pack_lines<F, true>(x, m, b.step * kStep, b.steps, own.x + i * length,
                          records ? largest_of_x + m : nullptr);
    }
    const TileScope tiles;
    for (int64_t strip = begin; strip < end; ++strip) {
      const Element* right = own.w;
      if (p.packed != nullptr)
        right = packed_strip(p.packed, b, strip);
      else if (packs_first)
        right = shared.w + strip * length;
      else
        pack_strip(b, strip, own.w);
      for (int64_t i = 0; i < panels; ++i) {
        // While this square is multiplied, the next strip comes nearer.
        const int64_t lines = blocks_of(length / 32, panels);
        const Element* const ahead = right + length + min_of(i * lines, length / 32) * 32;
        const int64_t count =
            right != own.w && strip + 1 < end ? min_of(lines, length / 32 - i * lines) : 0;
        square(own, b, m0 + i * kSquare, strip, own.x + i * length, right, ahead, count,
               i + 1 < panels ? m0 + (i + 1) * kSquare : m0);
      }
    }
  }

  // y[m, m + 32)[32 columns of a strip]. Prefetches `lines` lines from `ahead` on, and the rows of
  // y from `next` on, which are added to next.
  void square(const Own& own, const Block& b, int64_t m, int64_t strip, const Element* left,
              const Element* right, const Element* ahead, int64_t lines, int64_t next) const {
    const int64_t n = b.n0 + strip * kSquare;
    const bool first = b.step == 0, last = b.step + b.steps == steps;
    const bool whole = m + kSquare <= p.M && n + kSquare <= p.N;
    float* before = nullptr;  // the sums of earlier blocks
    int64_t ld = p.y_stride;
    if constexpr (kDirect)
      before = y_at(m, n);
    else if (!(first && last))
      before = shared.sums + (m - b.m0) * round_up(min_of(p.N, kColumns), kSquare) + n - b.n0,
      ld = round_up(min_of(p.N, kColumns), kSquare);
    const bool to_sums = first && (kDirect ? whole && !(last && has_activation()) : !last);
    const S* const next_y = y_at(next, next > m ? n : min_of(n + kSquare, p.N - 1));
    int64_t fetched = 0;
    const int64_t calls = b.steps * Sums<F>::Products::count * 2;
    const int64_t per_call = blocks_of(max_of<int64_t>(lines, 0), calls);
    Sums<F>::multiply(
        left, right, b.steps, first ? shared.bias + n - b.n0 : shared.zeros,
        to_sums ? before : own.edge, to_sums ? ld : kSquare,
        [&](int64_t s) __attribute__((always_inline)) {
          for (int64_t r = s * kSquare / b.steps; r < (s + 1) * kSquare / b.steps; ++r) {
            const S* const row = next_y + min_of(r, p.M - 1 - next) * p.y_stride;
            __builtin_prefetch(row, 1), __builtin_prefetch(row + kSquare / 2, 1);
          }
        },
        [&]() __attribute__((always_inline)) {
          for (const int64_t to = min_of(lines, fetched + per_call); fetched < to; ++fetched)
            __builtin_prefetch(ahead + fetched * 32, 0, 2);
        });
    if (to_sums) return;
    const int64_t rows = min_of(kSquare, p.M - m), columns = min_of(kSquare, p.N - n);
    if (!first)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; c += 16) {
          const int some = static_cast<int>(min_of<int64_t>(16, columns - c));
          float* const sum = own.edge + r * kSquare + c;
          store(sum, load(sum) + load_first(before + r * ld + c, some));
        }
    if (last) activate(p.activation, own.edge, kSquare * kSquare);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; c += 16) {
        const int some = static_cast<int>(min_of<int64_t>(16, columns - c));
        const VecF sum = load(own.edge + r * kSquare + c);
        if (last)
          store_as<float>(y_at(m + r, n + c), sum, some);
        else
          store_first(before + r * ld + c, sum, some);
      }
  }

  bool has_activation() const { return p.activation != MlpActivation::none; }

  // f(first, count) for each run of lines whose magnitudes are beyond what parts can have.
  template <class Compute>
  void compute_separate(int64_t count, const int32_t* largest, float least, Compute f) const {
    if (F::kParts == 1) return;
    const auto is_separate = [&](int64_t i) {
      return largest[i] > static_cast<int32_t>(bits_of(kLargest)) ||
             (largest[i] != 0 && largest[i] < static_cast<int32_t>(bits_of(least)));
    };
    for (int64_t i = 0, end; i < count; i = end + 1) {
      for (end = i; end < count && is_separate(end);) ++end;
      if (end > i) f(i, end - i);
    }
  }
};

// Whether tiles multiply these tensors.
bool serves(const LinearParams& p) {
  return p.on_tiles && p.K > 0 && (p.x_stride[0] == 1 || p.x_stride[1] == 1);
}

// Calls f(layer) with the kernel of a dtype, which has one.
template <class Call>
void with_kernel(const LinearParams& p, Call f) {
  if (p.dtype == DType::f32) return f(TileLinear<float, RoundedBf16<3>>(p));
  if (p.dtype == DType::f16) return f(TileLinear<F16, RoundedBf16<2>>(p));
  f(TileLinear<Bf16, RoundedBf16<1>>(p));
}

}  // namespace

// y = f(x W^T + b), on tiles where that is requested, else on vectors.
void linear(const LinearParams& p) {
  if (p.M == 0 || p.N == 0) return;
  if (p.dtype == DType::f64 || !serves(p)) return FASTATTN_BASE::linear(p);
  with_kernel(p, [](auto layer) { layer.run(); });
}

// W, packed for linear(); `to` has packed_weight_bytes().
void pack_weight(const LinearParams& p, void* to) {
  with_kernel(p, [&](const auto& layer) { layer.pack_all(to); });
}

}  // namespace FASTATTN_ISA
}  // namespace fastattn
