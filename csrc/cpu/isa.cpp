// isa.h describes the functions that are declared there.
#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernel_table.h"
#include "processor.h"

namespace fastattn {

// All tables that a build may have.
namespace baseline {
extern const KernelTable table;
}
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx512_bf16 {
extern const KernelTable table;
}
namespace armv8_6 {
extern const KernelTable table;
}
namespace amx_bf16 {
extern const KernelTable table;
}
namespace avx512_bf16_emulated {
extern const KernelTable table;
}
namespace amx_bf16_emulated {
extern const KernelTable table;
}

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

// Why this process cannot use an instruction set; "" if it can.
typedef std::string (*WhyNot)();

std::string always() { return ""; }
#if defined(__x86_64__)
[[maybe_unused]] std::string why_no_avx2() {
  return has_avx2() ? "" : "the processor or the system has no AVX2 with FMA, F16C and BMI2";
}
[[maybe_unused]] std::string why_no_avx512() {
  return has_avx512() ? "" : "the processor or the system has no AVX-512 F, BW, VL, DQ and CD";
}
[[maybe_unused]] std::string why_no_avx512_bf16() {
  return has_avx512_bf16() ? "" : "the processor or the system has no AVX-512 BF16";
}
// Why the vector instructions that a table with tiles also uses are missing, see setup.py.
[[maybe_unused]] std::string why_no_vectors_below_tiles() {
#if FASTATTN_HAVE_AVX512
  return why_no_avx512();
#else
  return why_no_avx512_bf16();
#endif
}
[[maybe_unused]] std::string why_no_amx_bf16() {
  const std::string reason = why_no_tiles("bf16");
  return reason.empty() ? why_no_vectors_below_tiles() : reason;
}
#elif defined(__aarch64__)
[[maybe_unused]] std::string why_no_armv8_6() {
  return has_feature("bf16") && has_feature("i8mm")
             ? ""
             : "the processor or the system has no BF16 and I8MM";
}
#endif

struct Entry {
  const KernelTable* table;
  WhyNot why_not;
};

// Weakest first: the last supported one is the default.
const Entry kEntries[] = {
    {&baseline::table, always},
#if FASTATTN_HAVE_AVX2
    {&avx2::table, why_no_avx2},
#endif
#if FASTATTN_HAVE_AVX512
    {&avx512::table, why_no_avx512},
#endif
#if FASTATTN_HAVE_AVX512_BF16
    {&avx512_bf16::table, why_no_avx512_bf16},
#endif
#if FASTATTN_HAVE_ARMV8_6
    {&armv8_6::table, why_no_armv8_6},
#endif
#if FASTATTN_HAVE_AMX_BF16
    {&amx_bf16::table, why_no_amx_bf16},
#endif
};

const std::vector<Entry> kEmulated = {
#if FASTATTN_HAVE_AVX512_BF16_EMULATED
    {&avx512_bf16_emulated::table, why_no_avx2},
#endif
#if FASTATTN_HAVE_AMX_BF16_EMULATED
    {&amx_bf16_emulated::table, FASTATTN_EMULATED_TILES_NEED},
#endif
};

// Indexed by DType.
constexpr int kDtypes = 4;
const char* const kDtypeNames[kDtypes] = {"float32", "float64", "bfloat16", "float16"};

std::atomic<const KernelTable*> current[kDtypes];
std::atomic<bool> was_set{false};  // by set_isa
std::atomic<bool> all_sizes_on_tiles{false};

// The table of an instruction set; raises with the reason if it cannot run here.
const KernelTable* find(const std::string& name) {
  std::string reason = "this build has no such instruction set";
  const auto matches = [&](const Entry& e) {
    if (name != e.table->isa) return false;
    reason = e.why_not();
    return reason.empty();
  };
  for (const Entry& e : kEntries)
    if (matches(e)) return e.table;
  for (const Entry& e : kEmulated)
    if (matches(e)) return e.table;
  std::string allowed;
  for (const std::string& isa : supported_isas()) allowed += (allowed.empty() ? "" : ", ") + isa;
  throw std::invalid_argument("FASTATTN_CPU_ISA: \"" + name + "\" is not available here: " +
                              reason + "; this build on this processor has: " + allowed);
}

// The index of a dtype by its name.
int dtype_named(const std::string& name) {
  for (int i = 0; i < kDtypes; ++i)
    if (name == kDtypeNames[i]) return i;
  throw std::invalid_argument("FASTATTN_CPU_ISA: \"" + name +
                              "\" is no dtype; allowed are float32, float64, bfloat16, float16");
}

// The value of FASTATTN_CPU_ISA, or null.
const char* forced() {
  const char* name = std::getenv("FASTATTN_CPU_ISA");
  return name != nullptr && *name != '\0' ? name : nullptr;
}

// Applies FASTATTN_CPU_ISA: one instruction set, then instruction sets of single dtypes.
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

bool has_tiles(const std::string& isa) { return isa.rfind("amx_", 0) == 0; }

bool is_emulated(const std::string& isa) {
  return std::any_of(kEmulated.begin(), kEmulated.end(),
                     [&](const Entry& e) { return isa == e.table->isa; });
}

// Without tiles, which run only where they are chosen by name, as fastattn/evidence.py does.
std::string strongest_vectors() {
  std::string strongest;
  for (const std::string& isa : supported_isas())
    if (!has_tiles(isa)) strongest = isa;
  return strongest;
}

}  // namespace

// All instruction sets that were compiled, whether the processor has them or not.
std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Entry& e : kEntries) names.emplace_back(e.table->isa);
  return names;
}

// The compiled instruction sets that this processor has.
std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Entry& e : kEntries)
    if (e.why_not().empty()) names.emplace_back(e.table->isa);
  return names;
}

// The compiled instruction sets that cannot run here, with the reasons.
std::map<std::string, std::string> unsupported_isas() {
  std::map<std::string, std::string> reasons;
  for (const Entry& e : kEntries)
    if (const std::string reason = e.why_not(); !reason.empty()) reasons[e.table->isa] = reason;
  return reasons;
}

// The instruction sets that are emulated, for tests.
std::vector<std::string> emulated_isas() {
  std::vector<std::string> names;
  for (const Entry& e : kEmulated)
    if (e.why_not().empty()) names.emplace_back(e.table->isa);
  return names;
}

// Chooses instruction sets, spelled as in FASTATTN_CPU_ISA.
void set_isa(const std::string& spelled) {
  use(spelled);
  was_set = true;
}

void set_default_isa(const std::string& spelled) {
  if (forced() == nullptr && !was_set) use(spelled);
}

// The chosen instruction sets, spelled as in FASTATTN_CPU_ISA.
std::string current_isa() {
  const std::string isa_of_float32 = kernels(DType::f32).isa;
  std::string spelled = isa_of_float32;
  for (int i = 1; i < kDtypes; ++i) {
    const std::string isa = kernels(static_cast<DType>(i)).isa;
    if (isa != isa_of_float32) spelled += std::string(",") + kDtypeNames[i] + "=" + isa;
  }
  return spelled;
}

// Whether tiles have products of a dtype.
bool multiplies_on_tiles(DType dtype, bool emulated) {
  if (dtype == DType::f16) return emulated || has_feature("amx_fp16");
  return dtype == DType::bf16 || dtype == DType::f32;
}

// Whether attention of these sizes is faster on tiles than on vectors.
bool pays_on_tiles(DType dtype, int64_t queries, int64_t keys, int64_t columns) {
  if (all_sizes_on_tiles.load(std::memory_order_relaxed)) return true;
  // Packing is padded to 64 keys, and a product of few columns saves little.
  if (dtype != DType::f32) return keys > 32 || columns > 64;
  // Rows are split into three parts each, which many pairs must share.
  const int64_t pairs = columns < 64 ? int64_t{1} << 18 : int64_t{1} << 16;
  return queries >= 128 && keys >= 128 && queries * keys >= pairs;
}

bool set_all_sizes_on_tiles(bool all) { return all_sizes_on_tiles.exchange(all); }

bool decodes_on_tiles(const AttentionParams& p) { return on_tiles(p.dtype) && fills_tiles(p); }

bool has_tiles(DType dtype) { return has_tiles(std::string(kernels(dtype).isa)); }

// Whether attention of a dtype may run on tiles, with the chosen instruction set.
bool on_tiles(DType dtype) {
  const std::string isa = kernels(dtype).isa;
  return has_tiles(isa) && multiplies_on_tiles(dtype, is_emulated(isa));
}

// The kernels of a dtype, chosen at the first call.
const KernelTable& kernels(DType dtype) {
  const std::atomic<const KernelTable*>& chosen = current[static_cast<int>(dtype)];
  const KernelTable* table = chosen.load(std::memory_order_relaxed);
  if (table == nullptr) {
    const char* name = forced();
    if (name != nullptr) all_sizes_on_tiles.store(true);
    use(name != nullptr ? name : strongest_vectors());
    table = chosen.load();
  }
  return *table;
}

}  // namespace fastattn
