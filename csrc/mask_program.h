// Reads a mask program, and checks that none of its steps points outside. On a GPU a kernel does
// it, because the program is in the GPU's memory, and the host would have to wait for it.
//
// fastattn/backends/_mask_program.py writes it: the number of steps, seven integers for each, then
// the data of the leaves in their order.
#pragma once
#include "both.h"
#include "params.h"

namespace fastattn {

class MaskProgramReader {
 public:
  // `packed`: params has the rows of all sequences, each of which is a part of every leaf.
  FASTATTN_BOTH MaskProgramReader(const int32_t* program, int64_t size,
                                  const AttentionParams& params, bool packed)
      : at_(program), left_(size), p(params), packed_(packed) {}

  // Fills steps and partial, [kMaskSteps]: a leaf of blocks has bits for partial[n] blocks, and the
  // caller checks its states. Returns the number of steps, 0 if the program is not valid.
  FASTATTN_BOTH int read(MaskStep* steps, int64_t* partial) {
    const int32_t* header = take(1);
    if (header == nullptr) return 0;
    const int64_t count = *header;
    if (count < 1 || count > kMaskSteps) return refuse("the number of steps");
    const int32_t* fields = take(kFields * count);
    if (fields == nullptr) return 0;
    int depth = 0;
    for (int64_t n = 0; n < count; ++n, fields += kFields) {
      if (fields[0] < 0 || fields[0] > static_cast<int>(MaskKind::blocks)) return refuse("a kind");
      MaskStep s{};
      s.kind = static_cast<MaskKind>(fields[0]);
      partial[n] = 0;
      if (s.kind == MaskKind::all_of || s.kind == MaskKind::any_of) {
        if (--depth < 1) return refuse("an operator without operands");
      } else {
        ++depth;
        if (!read_leaf(s, fields, partial[n])) return 0;
      }
      steps[n] = s;
    }
    if (depth != 1) return refuse("a leaf without an operator");
    if (left_ != 0) return refuse("the length");
    return static_cast<int>(count);
  }

  // The invalid part of the program, null if the program is valid.
  FASTATTN_BOTH const char* wrong() const { return wrong_; }

 private:
  static constexpr int kFields = 7;  // kind, negated, batch, heads, block_q, block_k, bit blocks
  const int32_t* at_;
  int64_t left_;
  const char* wrong_ = nullptr;
  const AttentionParams& p;
  const bool packed_;

  FASTATTN_BOTH int refuse(const char* what) {
    wrong_ = what;
    return 0;
  }

  // The next a * b * c integers, null if there are fewer. No product overflows.
  FASTATTN_BOTH const int32_t* take(int64_t a, int64_t b = 1, int64_t c = 1) {
    if (b > 0 && c > 0 && (a > left_ / b || a * b > left_ / c)) {
      refuse("the length");
      return nullptr;
    }
    const int32_t* found = at_;
    const int64_t count = b > 0 && c > 0 ? a * b * c : 0;
    at_ += count, left_ -= count;
    return found;
  }

  // The last vector of queries of a packed sequence begins anywhere, and ends past them.
  FASTATTN_BOTH int64_t padded(int64_t length) const {
    return (length + kMaskPadding - 1) / kMaskPadding * kMaskPadding + (packed_ ? kMaskPadding : 0);
  }

  // B is a multiple of the leaf's batch: under vmap, the examples come before it.
  FASTATTN_BOTH bool read_leaf(MaskStep& s, const int32_t* fields, int64_t& partial) {
    s.negated = fields[1] != 0;
    s.batch = fields[2], s.heads = fields[3];
    if (s.batch < 1 || (packed_ ? 1 : p.B) % s.batch != 0) return refuse("the batch");
    if (s.heads < 1 || p.Hq % s.heads != 0) return refuse("the heads");
    if (s.kind != MaskKind::blocks) {
      s.second = padded(p.Lq);
      s.stride = s.second + (s.kind == MaskKind::ids ? padded(p.Lk) : s.second);
      s.data = take(s.batch, s.stride);
      return s.data != nullptr;
    }
    if (packed_) return refuse("a kind");
    s.block_q = fields[4], s.block_k = fields[5], partial = fields[6];
    if (s.block_q < 1 || s.block_k < 1 || partial < 0) return refuse("the blocks");
    s.blocks_q = (p.Lq + s.block_q - 1) / s.block_q;
    s.blocks_k = (p.Lk + s.block_k - 1) / s.block_k;
    s.data = take(s.batch * s.heads, s.blocks_q, s.blocks_k);
    if (s.data == nullptr) return false;
    const int32_t* bits = take(partial, s.block_k, (s.block_q + 31) / 32);
    s.bits = reinterpret_cast<const uint32_t*>(bits);
    return bits != nullptr;
  }
};

}  // namespace fastattn
