#include "isa.h"

#include <algorithm>
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

// By DType.
constexpr int kDtypes = 4;
const char* const kDtypeNames[kDtypes] = {"float32", "float64", "bfloat16", "float16"};

std::atomic<const KernelTable*> current[kDtypes];
std::atomic<bool> was_set{false};  // by set_isa

const KernelTable* find(const std::string& name) {
  for (const Entry& e : kEntries)
    if (name == e.table->isa && e.supported()) return e.table;
  std::string allowed;
  for (const std::string& isa : supported_isas()) allowed += (allowed.empty() ? "" : ", ") + isa;
  throw std::invalid_argument(
      "FASTATTN_CPU_ISA: \"" + name +
      "\" is not available here; this build on this processor has: " + allowed);
}

int dtype_named(const std::string& name) {
  for (int i = 0; i < kDtypes; ++i)
    if (name == kDtypeNames[i]) return i;
  throw std::invalid_argument("FASTATTN_CPU_ISA: \"" + name +
                              "\" is no dtype; allowed are float32, float64, bfloat16, float16");
}

const char* forced() {
  const char* name = std::getenv("FASTATTN_CPU_ISA");
  return name != nullptr && *name != '\0' ? name : nullptr;
}

void use(const std::string& spelled) {
  const KernelTable* chosen[kDtypes];
  size_t end = spelled.find(',');
  std::fill_n(chosen, kDtypes, find(spelled.substr(0, end)));
  while (end != std::string::npos) {
    const size_t begin = end + 1;
    end = spelled.find(',', begin);
    const std::string one = spelled.substr(begin, end == std::string::npos ? end : end - begin);
    const size_t equals = one.find('=');
    if (equals == std::string::npos)
      throw std::invalid_argument("FASTATTN_CPU_ISA: \"" + one +
                                  "\" after a comma must be dtype=instruction set");
    chosen[dtype_named(one.substr(0, equals))] = find(one.substr(equals + 1));
  }
  for (int i = 0; i < kDtypes; ++i) current[i].store(chosen[i]);
}

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

void set_isa(const std::string& spelled) {
  use(spelled);
  was_set = true;
}

void set_default_isa(const std::string& spelled) {
  if (forced() == nullptr && !was_set) use(spelled);
}

std::string current_isa() {
  const std::string most = kernels(DType::f32).isa;
  std::string spelled = most;
  for (int i = 1; i < kDtypes; ++i) {
    const std::string isa = kernels(static_cast<DType>(i)).isa;
    if (isa != most) spelled += std::string(",") + kDtypeNames[i] + "=" + isa;
  }
  return spelled;
}

const KernelTable& kernels(DType dtype) {
  const std::atomic<const KernelTable*>& chosen = current[static_cast<int>(dtype)];
  const KernelTable* table = chosen.load(std::memory_order_relaxed);
  if (table == nullptr) {
    const char* name = forced();
    use(name != nullptr ? name : supported_isas().back());
    table = chosen.load();
  }
  return *table;
}

}  // namespace fastattn
