// Reads a score program, and checks that none of its steps points outside.
//
// fastattn/backends/_score_program.py explains the layout, the registers and their levels.
#pragma once
#include <cstdint>

namespace fastattn {

enum class ScoreOp : int32_t {
  constant = 0,
  integer = 1,
  batch = 2,
  head = 3,
  query = 4,
  key = 5,
  gather = 6,
  gather_integer = 7,
  index = 8,
  add = 9,
  subtract = 10,
  multiply = 11,
  divide = 12,
  negate = 13,
  absolute = 14,
  minimum = 15,
  maximum = 16,
  exponential = 17,
  logarithm = 18,
  tanh = 19,
  sigmoid = 20,
  square_root = 21,
  floor = 22,
  less = 23,
  less_equal = 24,
  equal = 25,
  add_integers = 26,
  subtract_integers = 27,
  multiply_integers = 28,
  divide_integers = 29,
  remainder = 30,
  less_integers = 31,
  less_equal_integers = 32,
  equal_integers = 33,
  both = 34,
  either = 35,
  one_of = 36,
  invert = 37,
  select = 38,
  to_float = 39,
  to_integer = 40,
  reduce = 41,
  scatter = 42,
  absolute_integers = 43,
  sine = 44,
  cosine = 45,
  exponential_minus_one = 46,
  logarithm_of_one_plus = 47,
  error_function = 48,
  power = 49,
  arctangent = 50,
  exponential_of_two = 51,
  number = 52,
};
constexpr int32_t kScoreOps = 53;

struct ScoreStep {
  int32_t op;       // ScoreOp
  int32_t to;       // a register
  int32_t a, b, c;  // registers, places of numbers, or bits of a constant
};

constexpr int32_t kMostRegisters = 128, kMostSteps = 1024, kMostNumbers = 4096;
constexpr int32_t kVariesByQuery = 1, kVariesByKey = 2;  // bits of a level
constexpr int64_t kScoreRows = 16;                       // keys for which the steps run at a time

struct ScoreSteps {
  const ScoreStep* first;
  int32_t count;
};

struct ScoreProgram {
  int64_t batch;
  int32_t registers;
  const int32_t* levels;       // [registers]
  int64_t at[kMostRegisters];  // where a register begins, in panels of queries
  int64_t panels;              // of all registers
  ScoreSteps value_before, value_each, before, each, after;
  int32_t value, gradient;  // registers
  bool derives, scatters, own_batch, own_head;
  const int32_t* numbers;   // that steps name: sizes and strides of captured tensors
  const int32_t* integers;  // captured, [integer_count]
  int64_t integer_count;
  const void* data;  // captured, [size] acc
  int64_t size;
  double* sums;     // of the gradient of data, [buffers][size], zeroed by the caller
  int64_t buffers;  // 0: not wanted
};

class ScoreProgramReader {
 public:
  // `to` has the size of the data. The call has B batch entries and Hq heads.
  ScoreProgramReader(const int32_t* words, int64_t count, int64_t B, int64_t Hq, ScoreProgram& to)
      : at_(words), left_(count), B_(B), Hq_(Hq), p(to) {}

  // Fills the program but for its sums. Returns what is not valid, null if it is.
  const char* read() {
    const int32_t* header = take(kHeader);
    if (header == nullptr) return "the length";
    p.registers = header[0];
    if (p.registers < 2 || p.registers > kMostRegisters) return "the number of registers";
    p.levels = take(p.registers);
    if (p.levels == nullptr) return "the length";
    p.panels = 0;
    for (int32_t n = 0; n < p.registers; ++n) {
      if (p.levels[n] < 0 || p.levels[n] > 3) return "a level";
      if (n < 2 && p.levels[n] != 3) return "a level";
      p.at[n] = p.panels;
      if (n >= 2) p.panels += (p.levels[n] & kVariesByKey) != 0 ? kScoreRows : 1;
    }
    p.value = header[6], p.gradient = header[7];
    if (!is_register(p.value) || !is_register(p.gradient)) return "a register";
    p.derives = (header[8] & 1) != 0, p.scatters = (header[8] & 2) != 0;
    count_ = header[9];
    if (count_ < kNamed || count_ > kMostNumbers) return "the number of numbers";
    ScoreSteps* const sections[] = {&p.value_before, &p.value_each, &p.before, &p.each, &p.after};
    for (int n = 0; n < 5; ++n) {
      if (header[1 + n] < 0 || header[1 + n] > kMostSteps) return "the number of steps";
      const int32_t* steps = take(kFields * header[1 + n]);
      if (steps == nullptr) return "the length";
      *sections[n] = {reinterpret_cast<const ScoreStep*>(steps), header[1 + n]};
    }
    p.numbers = take(count_);
    if (p.numbers == nullptr) return "the length";
    p.batch = p.numbers[0];
    if (p.batch < 1) return "the batch";
    p.own_batch = p.numbers[1] >= B_, p.own_head = p.numbers[2] >= Hq_;
    p.integers = at_, p.integer_count = left_;
    for (const ScoreSteps* s : sections)
      for (int32_t n = 0; n < s->count; ++n)
        if (const char* wrong = wrong_in(s->first[n])) return wrong;
    return nullptr;
  }

 private:
  static constexpr int64_t kHeader = 10, kFields = 5, kNamed = 3;
  static_assert(sizeof(ScoreStep) == kFields * sizeof(int32_t), "steps are read in place");
  const int32_t* at_;
  int64_t left_;
  int32_t count_ = 0;  // of numbers
  const int64_t B_, Hq_;
  ScoreProgram& p;

  // The next `count` words; null if there are fewer.
  const int32_t* take(int64_t count) {
    if (count > left_) return nullptr;
    const int32_t* found = at_;
    at_ += count, left_ -= count;
    return found;
  }

  // Whether a step may refer to this register or number.
  bool is_register(int32_t n) const { return n >= 0 && n < p.registers; }
  bool is_number(int32_t n) const { return n >= 0 && n < count_; }

  // Registers hold any bits: kernels clamp an index that they make.
  const char* wrong_in(const ScoreStep& s) const {
    if (s.op < 0 || s.op >= kScoreOps) return "an operation";
    if (!is_register(s.to)) return "a register";
    const auto op = static_cast<ScoreOp>(s.op);
    if (op <= ScoreOp::key) return nullptr;
    if (op == ScoreOp::number) return is_number(s.a) ? nullptr : "a number";
    if (!is_register(s.a)) return "a register";
    if (op == ScoreOp::gather || op == ScoreOp::gather_integer || op == ScoreOp::scatter) {
      if (!is_number(s.b) || !is_number(s.c)) return "a number";
      const int64_t most = op == ScoreOp::gather_integer ? p.integer_count : p.size;
      const int64_t first = p.numbers[s.b], count = p.numbers[s.c];
      return first < 0 || count < 1 || first + count > most ? "an element" : nullptr;
    }
    if (op == ScoreOp::index) {
      if (!is_number(s.b) || !is_number(s.c)) return "a number";
      return p.numbers[s.b] < 1 || p.numbers[s.c] < 1 ? "an index" : nullptr;
    }
    const bool two = (op >= ScoreOp::add && op <= ScoreOp::divide) || op == ScoreOp::minimum ||
                     op == ScoreOp::maximum || (op >= ScoreOp::less && op <= ScoreOp::one_of) ||
                     op == ScoreOp::select || op == ScoreOp::power || op == ScoreOp::arctangent;
    if (two && !is_register(s.b)) return "a register";
    return op == ScoreOp::select && !is_register(s.c) ? "a register" : nullptr;
  }
};

}  // namespace fastattn
