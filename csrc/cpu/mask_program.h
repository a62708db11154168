// The steps of a mask program for the CPU's kernels.
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "../mask_program.h"
#include "../params.h"

namespace fastattn {

// Reads the program of a call whose result is not empty; p then points to `steps`. Raises if
// anything in the program points outside.
inline void read_mask_program(const int32_t* words, int64_t count, AttentionParams& p,
                              std::vector<MaskStep>& steps, bool packed = false) {
  if (p.B == 0) return;
  MaskProgramReader reader(words, count, p, packed);
  int64_t partial[kMaskSteps];
  steps.resize(kMaskSteps);
  steps.resize(static_cast<size_t>(reader.read(steps.data(), partial)));
  const char* wrong = reader.wrong();
  for (size_t n = 0; n < steps.size(); ++n) {
    const MaskStep& s = steps[n];
    if (s.kind != MaskKind::blocks) continue;
    const int32_t* end = s.data + s.batch * s.heads * s.blocks_q * s.blocks_k;
    for (const int32_t* state = s.data; state != end; ++state)
      if (*state < 0 || *state - 2 >= partial[n]) wrong = "the state of a block";
  }
  if (wrong != nullptr)
    throw pybind11::value_error(std::string("fastattn: mask_program is not valid: ") + wrong);
  p.mask_program = steps.data(), p.mask_steps = static_cast<int>(steps.size());
}

}  // namespace fastattn
