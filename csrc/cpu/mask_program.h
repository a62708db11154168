// Reads a mask program, and checks that nothing in it points outside.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

#include "../options.h"
#include "../params.h"

namespace fastattn {

// fastattn/backends/_mask_program.py writes it: the number of steps, seven integers for each, then
// the data of the leaves in their order.
class MaskProgramReader {
 public:
  // `packed`: p has the rows of all sequences, each of which is a part of every leaf.
  MaskProgramReader(const int32_t* program, int64_t size, const AttentionParams& params,
                    bool packed)
      : at_(program), left_(size), p(params), packed_(packed) {}

  std::vector<MaskStep> read() {
    const int64_t count = *take(1);
    if (count < 1 || count > kMaskSteps) refuse("the number of steps");
    const int32_t* fields = take(kFields * count);
    std::vector<MaskStep> steps;
    int depth = 0;
    for (int64_t n = 0; n < count; ++n, fields += kFields) {
      MaskStep s{};
      if (fields[0] < 0 || fields[0] > static_cast<int>(MaskKind::blocks)) refuse("a kind");
      s.kind = static_cast<MaskKind>(fields[0]);
      if (s.kind == MaskKind::all_of || s.kind == MaskKind::any_of) {
        if (--depth < 1) refuse("an operator without operands");
      } else {
        ++depth;
        read_leaf(s, fields);
      }
      steps.push_back(s);
    }
    if (depth != 1) refuse("a leaf without an operator");
    if (left_ != 0) refuse("the length");
    return steps;
  }

 private:
  static constexpr int kFields = 7;  // kind, negated, batch, heads, block_q, block_k, bit blocks
  const int32_t* at_;
  int64_t left_;
  const AttentionParams& p;
  const bool packed_;

  [[noreturn]] static void refuse(const char* what) {
    throw pybind11::value_error(std::string("fastattn: mask_program is not valid: ") + what);
  }

  // The next a * b * c integers.
  const int32_t* take(int64_t a, int64_t b = 1, int64_t c = 1) {
    int64_t count = 0;
    if (__builtin_mul_overflow(a, b, &count) || __builtin_mul_overflow(count, c, &count) ||
        count < 0 || count > left_)
      refuse("the length");
    const int32_t* found = at_;
    at_ += count, left_ -= count;
    return found;
  }

  // The last vector of queries of a packed sequence begins anywhere, and ends past them.
  int64_t padded(int64_t length) const {
    return (length + kMaskPadding - 1) / kMaskPadding * kMaskPadding + (packed_ ? kMaskPadding : 0);
  }

  // B is a multiple of the leaf's batch: under vmap, the examples come before it.
  void read_leaf(MaskStep& s, const int32_t* fields) {
    s.negated = fields[1] != 0;
    s.batch = fields[2], s.heads = fields[3];
    if (s.batch < 1 || (packed_ ? 1 : p.B) % s.batch != 0) refuse("the batch");
    if (s.heads < 1 || p.Hq % s.heads != 0) refuse("the heads");
    if (s.kind != MaskKind::blocks) {
      s.second = padded(p.Lq);
      s.stride = s.second + (s.kind == MaskKind::ids ? padded(p.Lk) : s.second);
      s.data = take(s.batch, s.stride);
      return;
    }
    if (packed_) refuse("a kind");
    s.block_q = fields[4], s.block_k = fields[5];
    const int64_t partial = fields[6];
    if (s.block_q < 1 || s.block_k < 1 || partial < 0) refuse("the blocks");
    s.blocks_q = (p.Lq + s.block_q - 1) / s.block_q;
    s.blocks_k = (p.Lk + s.block_k - 1) / s.block_k;
    s.data = take(s.batch * s.heads, s.blocks_q, s.blocks_k);
    for (const int32_t* state = s.data; state != at_; ++state)
      if (*state < 0 || *state - 2 >= partial) refuse("the state of a block");
    s.bits = reinterpret_cast<const uint32_t*>(take(partial, s.block_k, (s.block_q + 31) / 32));
  }
};

// Reads the program of a call, if it has one and computes something; p then points to `steps`.
inline void read_mask_program(const Named& operands, AttentionParams& p,
                              std::vector<MaskStep>& steps, bool packed = false) {
  struct Words {
    const int32_t* at = nullptr;
    int64_t count = 0;
  } words;
  static const auto fields =
      std::make_tuple(field("mask_program", &Words::at), field("mask_length", &Words::count));
  operands.read_given(words, fields);
  if (words.at == nullptr || p.B == 0) return;
  steps = MaskProgramReader(words.at, words.count, p, packed).read();
  p.mask_program = steps.data(), p.mask_steps = static_cast<int>(steps.size());
}

}  // namespace fastattn
