// The instructions of AVX-512 that the kernels use, one at a time: real ones, or emulated with
// -DFASTATTN_EMULATED_AVX512=1. tests/cpu/test_emulated_avx512.py calls them.
#define FASTATTN_ISA tested
#include "../../csrc/cpu/simd/simd.h"

namespace fastattn {
namespace FASTATTN_ISA {
namespace {

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

template <class T>
T from(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
void put(void* p, T v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// a, b, c and out have 64 bytes; of shorter operands and results the rest is not used.
struct Call {
  const void *a, *b, *c;
  uint64_t mask;
  void* out;
  __m512 f(const void* p) const { return from<__m512>(p); }
  __m512d d(const void* p) const { return from<__m512d>(p); }
  __m512i i(const void* p) const { return from<__m512i>(p); }
  __mmask16 m16() const { return static_cast<__mmask16>(mask); }
  __mmask8 m8() const { return static_cast<__mmask8>(mask); }
  __mmask32 m32() const { return static_cast<__mmask32>(mask); }
};

struct Instruction {
  const char* name;
  void (*run)(const Call&);
};

#define FASTATTN_RESULT(name, result) {name, [](const Call& x) { put(x.out, result); }}

const Instruction kInstructions[] = {
    FASTATTN_RESULT("maskz_loadu_ps", _mm512_maskz_loadu_ps(x.m16(), x.a)),
    FASTATTN_RESULT("maskz_loadu_pd", _mm512_maskz_loadu_pd(x.m8(), x.a)),
    FASTATTN_RESULT("maskz_loadu_epi16", _mm512_maskz_loadu_epi16(x.m32(), x.a)),
    FASTATTN_RESULT("256_maskz_loadu_epi16", _mm256_maskz_loadu_epi16(x.m16(), x.a)),
    FASTATTN_RESULT("maskz_loadu_epi8", _mm512_maskz_loadu_epi8(x.mask, x.a)),
    FASTATTN_RESULT("128_maskz_loadu_epi8", _mm_maskz_loadu_epi8(x.m16(), x.a)),
    FASTATTN_RESULT("128_maskz_loadu_ps", _mm_maskz_loadu_ps(x.m8(), x.a)),
    {"mask_storeu_ps", [](const Call& x) { _mm512_mask_storeu_ps(x.out, x.m16(), x.f(x.a)); }},
    {"mask_storeu_pd", [](const Call& x) { _mm512_mask_storeu_pd(x.out, x.m8(), x.d(x.a)); }},
    {"256_mask_storeu_epi16",
     [](const Call& x) { _mm256_mask_storeu_epi16(x.out, x.m16(), from<__m256i>(x.a)); }},
    FASTATTN_RESULT("set1_epi16", _mm512_set1_epi16(from<int16_t>(x.a))),
    FASTATTN_RESULT("set1_epi32", _mm512_set1_epi32(from<int32_t>(x.a))),
    FASTATTN_RESULT("set1_ps", _mm512_set1_ps(from<float>(x.a))),
    FASTATTN_RESULT("set1_pd", _mm512_set1_pd(from<double>(x.a))),
    FASTATTN_RESULT("set4_epi32", _mm512_set4_epi32(4, 3, 2, 1)),
    FASTATTN_RESULT("setr_epi64", _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11)),
    FASTATTN_RESULT("set_epi16",
                    _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16,
                                     15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)),
    FASTATTN_RESULT("permutex2var_epi16", _mm512_permutex2var_epi16(x.i(x.a), x.i(x.c), x.i(x.b))),
    FASTATTN_RESULT("permutexvar_epi16", _mm512_permutexvar_epi16(x.i(x.c), x.i(x.a))),
    FASTATTN_RESULT("permutex2var_epi64", _mm512_permutex2var_epi64(x.i(x.a), x.i(x.c), x.i(x.b))),
    FASTATTN_RESULT("unpacklo_epi8", _mm512_unpacklo_epi8(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("unpackhi_epi8", _mm512_unpackhi_epi8(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("unpacklo_epi16", _mm512_unpacklo_epi16(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("unpackhi_epi16", _mm512_unpackhi_epi16(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("mask_shuffle_epi8",
                    _mm512_mask_shuffle_epi8(x.i(x.b), x.mask, x.i(x.a), x.i(x.c))),
    FASTATTN_RESULT("zextps128_ps512", _mm512_zextps128_ps512(from<__m128>(x.a))),
    FASTATTN_RESULT("zextpd128_pd512", _mm512_zextpd128_pd512(from<__m128d>(x.a))),
    FASTATTN_RESULT("maskz_mov_ps", _mm512_maskz_mov_ps(x.m16(), x.f(x.a))),
    FASTATTN_RESULT("mask_blend_epi32", _mm512_mask_blend_epi32(x.m16(), x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("mask_blend_epi16", _mm512_mask_blend_epi16(x.m32(), x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("movm_epi16", _mm512_movm_epi16(x.m32())),
    FASTATTN_RESULT("cmple_epu16_mask", _mm512_cmple_epu16_mask(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("cmp_ps_mask", _mm512_cmp_ps_mask(x.f(x.a), x.f(x.b), _CMP_NEQ_UQ)),
    FASTATTN_RESULT("128_mask_testn_epi8_mask",
                    _mm_mask_testn_epi8_mask(x.m16(), from<__m128i>(x.a), from<__m128i>(x.b))),
    FASTATTN_RESULT("or_si512", _mm512_or_si512(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("add_epi16", _mm512_add_epi16(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("slli_epi32", _mm512_slli_epi32(x.i(x.a), 16)),
    FASTATTN_RESULT("slli_epi64", _mm512_slli_epi64(x.i(x.a), 32)),
    FASTATTN_RESULT("srli_epi64", _mm512_srli_epi64(x.i(x.a), 32)),
    FASTATTN_RESULT("mul_epu32", _mm512_mul_epu32(x.i(x.a), x.i(x.b))),
    FASTATTN_RESULT("reduce_max_epi32", _mm512_reduce_max_epi32(x.i(x.a))),
    FASTATTN_RESULT("cvtepu16_epi32", _mm512_cvtepu16_epi32(from<__m256i>(x.a))),
    FASTATTN_RESULT("cvtepi8_epi32", _mm512_cvtepi8_epi32(from<__m128i>(x.a))),
    FASTATTN_RESULT("cvtepi32_ps", _mm512_cvtepi32_ps(x.i(x.a))),
    FASTATTN_RESULT("cvtepi32_epi16", _mm512_cvtepi32_epi16(x.i(x.a))),
    FASTATTN_RESULT("cvtph_ps", _mm512_cvtph_ps(from<__m256i>(x.a))),
    FASTATTN_RESULT("cvtps_ph", _mm512_cvtps_ph(x.f(x.a), kNearest)),
    FASTATTN_RESULT("max_ps", _mm512_max_ps(x.f(x.a), x.f(x.b))),
    FASTATTN_RESULT("max_pd", _mm512_max_pd(x.d(x.a), x.d(x.b))),
    FASTATTN_RESULT("fmadd_ps", _mm512_fmadd_ps(x.f(x.a), x.f(x.b), x.f(x.c))),
    FASTATTN_RESULT("fmsub_pd", _mm512_fmsub_pd(x.d(x.a), x.d(x.b), x.d(x.c))),
    FASTATTN_RESULT("rcp14_ps", _mm512_rcp14_ps(x.f(x.a))),
    FASTATTN_RESULT("reduce_ps nearest", _mm512_reduce_ps(x.f(x.a), kNearest)),
    FASTATTN_RESULT("reduce_ps down", _mm512_reduce_ps(x.f(x.a), kDown)),
    FASTATTN_RESULT("roundscale_pd", _mm512_roundscale_pd(x.d(x.a), kNearest)),
    FASTATTN_RESULT("scalef_ps", _mm512_scalef_ps(x.f(x.a), x.f(x.b))),
    FASTATTN_RESULT("scalef_pd", _mm512_scalef_pd(x.d(x.a), x.d(x.b))),
#if FASTATTN_EMULATED_AVX512 || defined(__AVX512VNNI__)
    FASTATTN_RESULT("dpbusd_epi32", _mm512_dpbusd_epi32(x.i(x.c), x.i(x.a), x.i(x.b))),
#endif
#if FASTATTN_AVX512_BF16
    FASTATTN_RESULT("dpbf16_ps",
                    _mm512_dpbf16_ps(x.f(x.c), from<__m512bh>(x.a), from<__m512bh>(x.b))),
    FASTATTN_RESULT("cvtne2ps_pbh", _mm512_cvtne2ps_pbh(x.f(x.a), x.f(x.b))),
#endif
};

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn

// Returns whether there is such an instruction.
extern "C" int run_instruction(const char* name, const void* a, const void* b, const void* c,
                               uint64_t mask, void* out) {
  for (const auto& instruction : fastattn::tested::kInstructions)
    if (__builtin_strcmp(instruction.name, name) == 0) {
      instruction.run({a, b, c, mask, out});
      return 1;
    }
  return 0;
}
