// The instruction sets: compiled, supported by this processor, and in use.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "../params.h"

namespace fastattn {

std::vector<std::string> compiled_isas();  // weakest first
std::vector<std::string>
supported_isas();  // the compiled ones that this processor can run, weakest first
std::map<std::string, std::string> unsupported_isas();  // the other compiled ones, and why
// Stand-ins for an instruction set that this processor may lack, for tests: far slower than all
// others, and used only if set_isa or FASTATTN_CPU_ISA names one. In none of the lists above.
std::vector<std::string> emulated_isas();

// The instruction set in use: a name, then the dtypes that use another one:
//
//   "avx512_bf16"    "avx512_bf16,bfloat16=avx512"
//
// Anything else throws std::invalid_argument. FASTATTN_CPU_ISA has the same syntax.
void set_isa(const std::string& spelled);
// As set_isa, but ignored after set_isa or if FASTATTN_CPU_ISA is set.
void set_default_isa(const std::string& spelled);
std::string current_isa();    // in the syntax of set_isa
bool on_tiles(DType dtype);   // whether the instruction set of this dtype multiplies it on tiles
bool has_tiles(DType dtype);  // whether it has tiles, which multiply the parts of linear layers

// Run attention of every size on tiles, as FASTATTN_CPU_ISA does, or leave small ones to vectors:
// for tests of tiles. Returns the previous setting.
bool set_all_sizes_on_tiles(bool all);

}  // namespace fastattn
