#include "../../csrc/cuda/ptx/wgmma.h"

#include <map>

#include "arithmetic.h"

namespace emulator {

namespace {

struct Products {  // of one thread
  bool fenced = false;
  std::vector<Wgmma> open;
  std::deque<std::vector<Wgmma>> groups;
};

std::map<unsigned, Products> products;
std::map<unsigned, uint64_t> computed;  // how often a warpgroup's waits have ended

const bool registered = [] {
  hooks().at_begin.push_back([] {
    products.clear();
    computed.clear();
  });
  hooks().at_end.push_back([] {
    for (const auto& [thread, mine] : products)
      if (!mine.open.empty() || !mine.groups.empty())
        fail("the block has ended, but not the wgmma of thread " + std::to_string(thread));
  });
  return true;
}();

float widen(uint32_t bits, bool half) {
  const auto x = static_cast<uint16_t>(bits);
  return half ? fastattn::cuda::float_of_f16(x) : fastattn::cuda::float_of_bf16(x);
}

// Element (mn, k) of an operand, as the section on "matrix-descriptor" and the canonical layouts of
// the manual have it for 16-bit elements and the 128-byte swizzle.
float element(uint64_t descriptor, int mn, int k, bool transposed, bool half, Place place) {
  const auto field = [&](int from) {
    return static_cast<uint32_t>(descriptor >> from & 0x3FFF) << 4;
  };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  if (descriptor >> 62 != 1) fail("wgmma: only the 128-byte swizzle is modelled", place);
  const auto i = static_cast<uint32_t>(mn), j = static_cast<uint32_t>(k);
  uint32_t address = start;
  if (transposed)
    address += i % 64 * 2 + i / 64 * leading + j % 8 * 128 + j / 8 * stride;
  else
    address += i % 8 * 128 + i / 8 * stride + j * 2;
  address ^= (address >> 7 & 7) << 4;
  return widen(*reinterpret_cast<uint16_t*>(shared_pointer(address, 2, 2, "wgmma", place)), half);
}

void execute(Wgmma* const* of) {
  static float a[64][16], b[256][16], d[64][256];
  const Wgmma& first = *of[0];
  const int columns = first.columns;
  for (int thread = 0; thread < 128; ++thread) {
    const Wgmma& x = *of[thread];
    if (x.b_descriptor != first.b_descriptor || x.a_descriptor != first.a_descriptor ||
        x.columns != columns || x.accumulate != first.accumulate)
      fail("the threads of a warpgroup give wgmma different operands", x.place);
  }
  // visit(thread, its register of a, row, column of the pair)
  for (int thread = 0; thread < 128; ++thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int n = 0; n < 4 && first.registers; ++n)
      for (int e = 0; e < 2; ++e)
        a[row + n % 2 * 8][column + n / 2 * 8 + e] =
            widen(of[thread]->a[n] >> 16 * e & 0xFFFF, first.half);
    for (int n = 0; n < columns / 2; ++n)
      d[row + n / 2 % 2 * 8][n / 4 * 8 + column + n % 2] =
          first.accumulate ? of[thread]->d[n] : 0.0f;
  }
  for (int m = 0; m < 64 && !first.registers; ++m)
    for (int k = 0; k < 16; ++k)
      a[m][k] = element(first.a_descriptor, m, k, false, first.half, first.place);
  for (int n = 0; n < columns; ++n)
    for (int k = 0; k < 16; ++k)
      b[n][k] = element(first.b_descriptor, n, k, first.transposed, first.half, first.place);
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < columns; ++n) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[m][k] * b[n][k];
      d[m][n] += sum;
    }
  for (int thread = 0; thread < 128; ++thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int n = 0; n < columns / 2; ++n)
      of[thread]->d[n] = d[row + n / 2 % 2 * 8][n / 4 * 8 + column + n % 2];
  }
}

// All groups but the last ones.
void compute(const std::vector<Products*>& threads, size_t remaining, Place place) {
  while (threads[0]->groups.size() > remaining) {
    for (size_t n = 0; n < threads[0]->groups.front().size(); ++n) {
      Wgmma* operations[128];
      for (int t = 0; t < 128; ++t) {
        if (threads[t]->groups.empty() || threads[t]->groups.front().size() <= n)
          fail("the threads of a warpgroup have begun different products", place);
        operations[t] = &threads[t]->groups.front()[n];
      }
      execute(operations);
    }
    for (Products* mine : threads) mine->groups.pop_front();
  }
}

}  // namespace

void begin_wgmma(const Wgmma& operation) {
  if (operation.columns % 8 != 0 || operation.columns > 256)
    fail("wgmma has 8 to 256 columns, a multiple of 8", operation.place);
  Products& mine = products[machine.current->id];
  if (!mine.fenced) fail("wgmma without a wgmma.fence after the last group", operation.place);
  mine.open.push_back(operation);
}

void fence_wgmma() { products[machine.current->id].fenced = true; }

void commit_wgmma() {
  Products& mine = products[machine.current->id];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
  mine.fenced = false;
}

// The products are computed when nothing else can go on; with a seed, half of them at once.
void wait_wgmma(size_t remaining, Place place) {
  uint64_t* done = &computed[machine.current->id / 128];
  const uint64_t before = *done;
  warpgroup_together("wgmma.wait_group", &products[machine.current->id], place, [=](void** all) {
    std::vector<Products*> threads;
    for (int t = 0; t < 128; ++t) threads.push_back(static_cast<Products*>(all[t]));
    if (threads[0]->groups.size() <= remaining) return static_cast<void>(++*done);
    const auto finish = [=] {
      compute(threads, remaining, place);
      ++*done;
    };
    if (machine.shuffled && random_bits() % 2 == 0)
      finish();
    else
      begin_work(finish);
  });
  if (*done == before) wait_while(done, before, "wgmma.wait_group", place);
}

}  // namespace emulator
