#include "matrix.h"

namespace emulator {

namespace {

struct Argument {
  uint32_t* registers;
  uint16_t* row;  // row r of matrix i belongs to thread 8 i + r
};

// visit(half register, element) for all four matrices.
template <class F>
void each_element(void** arguments, bool transposed, F visit) {
  auto of = [&](int thread) { return static_cast<Argument*>(arguments[thread]); };
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int thread = 0; thread < 32; ++thread)
      for (int half = 0; half < 2; ++half) {
        const int major = thread / 4, minor = thread % 4 * 2 + half;
        const int row = transposed ? minor : major, column = transposed ? major : minor;
        visit(reinterpret_cast<uint16_t*>(of(thread)->registers + matrix) + half,
              of(8 * matrix + row)->row + column);
      }
}

}  // namespace

void load_matrices(uint32_t* registers, const void* row, bool transposed, Place place) {
  shared_address(row, 16, 16, "ldmatrix", place);
  Argument mine{registers, static_cast<uint16_t*>(const_cast<void*>(row))};
  warp_together("ldmatrix", &mine, place, [=](void** arguments) {
    each_element(arguments, transposed, [](uint16_t* half, uint16_t* x) { *half = *x; });
  });
}

void store_matrices(void* row, const uint32_t* registers, bool transposed, Place place) {
  shared_address(row, 16, 16, "stmatrix", place);
  Argument mine{const_cast<uint32_t*>(registers), static_cast<uint16_t*>(row)};
  warp_together("stmatrix", &mine, place, [=](void** arguments) {
    each_element(arguments, transposed, [](uint16_t* half, uint16_t* x) { *x = *half; });
  });
}

}  // namespace emulator
