// Products of tiles as a list of squares: each is four products, [32, 32] += [32, 32] [32, 32], in
// tiles 0 to 3. Between two products a caller does vector work, because the tile unit and the
// vector units overlap only as far as the reorder window reaches.
#pragma once
#include "pack.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int64_t kLanesOfSquare = 32;
constexpr int64_t kSquareBytes = kLanesOfSquare * 4;  // of a row of floats, or of words
constexpr int64_t kRightTile = 16 * kLanesOfSquare;   // words from one right side to the next

// Where the operands of a square are, from the beginning of its kind's.
struct Square {
  int64_t left;   // elements: two packed tiles, the upper and the lower half
  int64_t right;  // words: 16 rows of 32
  int64_t sum;    // floats: 32 rows of 32
  bool first;     // of the squares that are added to the same sum, which are consecutive
};

// The operands of one kind of squares, which are products for the scores or for the outputs.
struct Operands {
  const Element* left;  // streamed from L2, each tile once
  const float* right;   // stays in L1
  float* sum;
  bool add;  // to what the sums hold, else from zero
};

template <class Format>
class Squares {
 public:
  // `scratch_square`: [32, 32], takes the store before the first sum.
  FASTATTN_INLINE explicit Squares(float* scratch_square)
      : nowhere_(scratch_square), pending_(scratch_square) {}

  // Squares [begin, end) of a list; squares from `second` on are of kind b. Each tile is loaded one
  // or two products before it is needed, and kept where the next square has it too: six products of
  // three parts then load 7 pairs of tiles instead of 12.
  //
  // The sums of the last square stay in their tiles until others need these, or flush(). A store
  // right after its product would wait for it and block what follows: of eight products, 190 cycles
  // instead of 132.
  template <class Between>
  FASTATTN_INLINE void multiply(const Square* list, int64_t begin, int64_t second, int64_t end,
                                const Operands& a, const Operands& b, Between between) {
    const auto left = [&](int64_t n) { return (n < second ? a : b).left + list[n].left; };
    const auto right = [&](int64_t n) { return (n < second ? a : b).right + list[n].right; };
    if (begin >= end) return;
    Tiles::load<4>(right(begin), kSquareBytes);
    Tiles::load_once<6>(left(begin), 64);
    Tiles::load_once<7>(left(begin) + kTileElements, 64);
    bool new_right = true;
    for (int64_t n = begin; n < end; ++n) {
      const Operands& x = n < second ? a : b;
      float* const sum = x.sum + list[n].sum;
      const bool first = list[n].first, more = n + 1 < end;
      const bool next_left = more && left(n + 1) != left(n);
      const bool next_right = more && right(n + 1) != right(n);
      if (first) start<0>(sum, x.add);
      Format::template multiply<0, 6, 4>();
      if (new_right) Tiles::load<5>(right(n) + 16, kSquareBytes);
      between();
      if (first) start<1>(sum, x.add);
      Format::template multiply<1, 7, 4>();
      if (next_right) Tiles::load<4>(right(n + 1), kSquareBytes);
      between();
      if (first) start<2>(sum, x.add);
      Format::template multiply<2, 6, 5>();
      if (next_left) Tiles::load_once<6>(left(n + 1), 64);
      between();
      if (first) start<3>(sum, x.add);
      Format::template multiply<3, 7, 5>();
      if (next_left) Tiles::load_once<7>(left(n + 1) + kTileElements, 64);
      between();
      new_right = next_right;
      pending_ = sum;
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
