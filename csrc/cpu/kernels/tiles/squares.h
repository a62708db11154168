// Products of tiles in squares: [32, 32] += [32, 32] [32, 32] is four products, in tiles 0 to 3.
// Between two products a caller does vector work, because the tile unit and the vector units
// overlap only as far as the reorder window reaches.
#pragma once
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kLanesOfSquare = 32;
constexpr int64_t kSquareBytes = kLanesOfSquare * 4;  // of a row of floats, or of words
constexpr int64_t kRightTile = 16 * kLanesOfSquare;   // words from one right side to the next

// One kind of products, for the scores or for the outputs: each of `sums` squares adds `steps`
// products of a left and a right side.
struct Operands {
  const Element* left;  // [sums][steps][part][2] packed tiles, streamed from L2, each once
  const float* right;   // [steps][part][16 words][32], stays in L1
  float* sum;           // [sums][32][32]
  int64_t sums, steps;
  bool add;  // to what the sums hold, else from zero
};

template <class Format>
class Squares {
  typedef PartProducts<Format::kParts> Products;
  static constexpr int64_t kLeftPart = 2 * kTileElements;

 public:
  // Products of tiles for each step of a sum.
  static constexpr int kProducts = 4 * Products::count;

  // `scratch_square`: [32, 32], takes the store before the first sum.
  FASTATTN_INLINE explicit Squares(float* scratch_square)
      : nowhere_(scratch_square), pending_(scratch_square) {}

  // The products of a, then of b; either may have no sums. Calls between(n) after product n of each
  // step. Each tile is loaded one or two products before it is needed, and kept where the next
  // square has it too: six products of three parts then load 7 pairs of tiles instead of 12.
  //
  // The sums of the last square stay in their tiles until others need these, or flush(). A store
  // right after its product would wait for it and block what follows: of eight products, 190 cycles
  // instead of 132.
  template <class Between>
  FASTATTN_INLINE void multiply(const Operands& a, const Operands& b, Between between) {
    const Operands& first = a.sums > 0 ? a : b;
    if (first.sums == 0) return;
    const Element* const left = first.left + Products::left[0] * kLeftPart;
    Tiles::load<4>(first.right + Products::right[0] * kRightTile, kSquareBytes);
    Tiles::load_once<6>(left, 64);
    Tiles::load_once<7>(left + kTileElements, 64);
    // One loop for both kinds, so that the vector work is compiled once.
    for (int64_t kind = a.sums > 0 ? 0 : 1; kind < 2; ++kind) {
      const Operands& x = kind == 0 ? a : b;
      Step step{x.left, x.right, nullptr, nullptr, x.sum, false, x.add, true};
      for (int64_t n = 0; n < x.sums; ++n, step.sum += kLanesOfSquare * kLanesOfSquare)
        for (int64_t k = 0; k < x.steps; ++k) {
          const bool last = k + 1 == x.steps, end = last && n + 1 == x.sums;
          step.first = k == 0;
          step.more = !end || (kind == 0 && b.sums > 0);
          step.next_left = end ? b.left : step.left + Format::kParts * kLeftPart;
          step.next_right = end    ? b.right
                            : last ? x.right
                                   : step.right + Format::kParts * kRightTile;
          all_parts(step, between, Indices<>());
          step.left = step.next_left, step.right = step.next_right;
        }
    }
  }

  // Stores the tiles of the square whose sum is pending.
  FASTATTN_INLINE void flush() {
    Tiles::store<0>(pending_ + at<0>(), kSquareBytes);
    Tiles::store<1>(pending_ + at<1>(), kSquareBytes);
    Tiles::store<2>(pending_ + at<2>(), kSquareBytes);
    Tiles::store<3>(pending_ + at<3>(), kSquareBytes);
    pending_ = nowhere_;
  }

 private:
  float* const nowhere_;
  float* pending_;  // what tiles 0 to 3 hold belongs here

  // One step of a sum, and where the operands of the next one are.
  struct Step {
    const Element* left;
    const float* right;
    const Element* next_left;
    const float* next_right;
    float* sum;
    bool first, add, more;
  };

  // The products of all parts of a step.
  template <class Between, int... I>
  FASTATTN_INLINE void all_parts(const Step& x, Between between, Indices<I...>) {
    constexpr int n = sizeof...(I);
    if constexpr (n < Products::count)
      all_parts(x, between, Indices<I..., n>());
    else
      (one_part<I>(x, between), ...);
  }
  // Product I of parts.
  template <int I, class Between>
  FASTATTN_INLINE void one_part(const Step& x, Between between) {
    constexpr bool kLast = I + 1 == Products::count;
    constexpr int before = I == 0 ? 0 : I - 1, next = kLast ? 0 : I + 1;
    constexpr bool kNewRight = I == 0 || Products::right[I] != Products::right[before];
    constexpr bool kNextRight = kLast || Products::right[next] != Products::right[I];
    constexpr bool kNextLeft = kLast || Products::left[next] != Products::left[I];
    const float* const right = x.right + Products::right[I] * kRightTile;
    const Element* const left = (kLast ? x.next_left : x.left) + Products::left[next] * kLeftPart;
    const bool first = I == 0 && x.first;
    if (first) start<0>(x.sum, x.add);
    Format::template multiply<0, 6, 4>();
    if (kNewRight) Tiles::load<5>(right + 16, kSquareBytes);
    between(Width<4 * I>());
    if (first) start<1>(x.sum, x.add);
    Format::template multiply<1, 7, 4>();
    if (kNextRight && (!kLast || x.more))
      Tiles::load<4>((kLast ? x.next_right : x.right) + Products::right[next] * kRightTile,
                     kSquareBytes);
    between(Width<4 * I + 1>());
    if (first) start<2>(x.sum, x.add);
    Format::template multiply<2, 6, 5>();
    if (kNextLeft && (!kLast || x.more)) Tiles::load_once<6>(left, 64);
    between(Width<4 * I + 2>());
    if (first) start<3>(x.sum, x.add);
    Format::template multiply<3, 7, 5>();
    if (kNextLeft && (!kLast || x.more)) Tiles::load_once<7>(left + kTileElements, 64);
    between(Width<4 * I + 3>());
    if (first) pending_ = x.sum;
  }

  // The quarter of tile T: its upper half is 0 and 2, its left half 0 and 1.
  template <int T>
  static constexpr int64_t at() {
    return T % 2 * 16 * kLanesOfSquare + T / 2 * 16;
  }

  // Stores the pending tile T, and starts its next sum.
  template <int T>
  FASTATTN_INLINE void start(const float* sum, bool add) {
    Tiles::store<T>(pending_ + at<T>(), kSquareBytes);
    if (add)
      Tiles::load<T>(sum + at<T>(), kSquareBytes);
    else
      Tiles::zero<T>();
  }
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
