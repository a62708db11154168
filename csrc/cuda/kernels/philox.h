// Dropout: whether a pair is kept is a function of the seed and the pair's position only. The
// definition is in docs/numerics.md; Philox4x32-10 is from Salmon et al. 2011,
// https://doi.org/10.1145/2063384.2063405.
#pragma once
#include "../device.h"

namespace fastattn {
namespace cuda {

struct Words {
  uint32_t x[4];
};

FASTATTN_DEVICE Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  FASTATTN_UNROLL
  for (int n = 0; n < 10; ++n) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The 16-bit draw of a key: number key % 8 of the eight of its block.
FASTATTN_DEVICE uint32_t draw_of(const Words& words, int key) {
  const uint32_t word =
      key & 4 ? (key & 2 ? words.x[3] : words.x[2]) : (key & 2 ? words.x[1] : words.x[0]);
  return key & 1 ? word >> 16 : word & 0xFFFF;
}

}  // namespace cuda
}  // namespace fastattn
