#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernel_table.h"

namespace fastattn {

namespace baseline {
extern const KernelTable table;
}
#if FASTATTN_HAVE_AVX2
namespace avx2 {
extern const KernelTable table;
}
#endif
#if FASTATTN_HAVE_AVX512
namespace avx512 {
extern const KernelTable table;
}
#endif
#if FASTATTN_HAVE_AVX512_BF16
namespace avx512_bf16 {
extern const KernelTable table;
}
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512cd");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
bool always() { return true; }

struct Entry {
  const KernelTable* table;
  bool (*supported)();
};

// Weakest first: the last supported one is the default.
const Entry kEntries[] = {
    {&baseline::table, always},
#if FASTATTN_HAVE_AVX2
    {&avx2::table, has_avx2},
#endif
#if FASTATTN_HAVE_AVX512
    {&avx512::table, has_avx512},
#endif
#if FASTATTN_HAVE_AVX512_BF16
    {&avx512_bf16::table, has_avx512_bf16},
#endif
};

const KernelTable* find(const std::string& name) {
  for (const Entry& e : kEntries)
    if (name == e.table->isa && e.supported()) return e.table;
  std::string allowed;
  for (const std::string& isa : supported_isas()) allowed += (allowed.empty() ? "" : ", ") + isa;
  throw std::invalid_argument(
      "FASTATTN_CPU_ISA: \"" + name +
      "\" is not available here; this build on this processor has: " + allowed);
}

const KernelTable* choose() {
  const char* forced = std::getenv("FASTATTN_CPU_ISA");
  if (forced != nullptr && *forced != '\0') return find(forced);
  return find(supported_isas().back());
}

std::atomic<const KernelTable*> current{nullptr};

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Entry& e : kEntries) names.emplace_back(e.table->isa);
  return names;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Entry& e : kEntries)
    if (e.supported()) names.emplace_back(e.table->isa);
  return names;
}

void set_isa(const std::string& name) { current.store(find(name)); }

const KernelTable& kernels() {
  const KernelTable* table = current.load(std::memory_order_relaxed);
  if (table == nullptr) {
    table = choose();
    current.store(table);
  }
  return *table;
}

}  // namespace fastattn
