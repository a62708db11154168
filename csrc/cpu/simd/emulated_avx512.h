// The instructions of AVX-512 that the kernels use, in plain C++ for a processor with AVX2, so that
// tests can run the kernels of AVX-512 on processors without. The functions have the names of the
// intrinsics, which they hide within the namespace of the instruction set, so the kernels need no
// change. Their results are bitwise equal to the processor's, except that
//   - rcp14 is rounded to 14 bits, with another error of the same size;
//   - dpbf16 takes and gives subnormals, which the processor flushes.
//
// Immediate operands select one behaviour each; every other value traps.
#pragma once

// Some compilers define these as macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_cvtps_ph
#undef _mm512_reduce_ps
#undef _mm512_roundscale_pd
#undef _mm512_setr_epi64
#undef _mm512_slli_epi32
#undef _mm512_slli_epi64
#undef _mm512_srli_epi64

namespace fastattn {
namespace FASTATTN_ISA {
namespace {
namespace lanes {  // the lanes of 512 bits as numbers

typedef float F32 __attribute__((vector_size(64), may_alias));
typedef double F64 __attribute__((vector_size(64), may_alias));
typedef int32_t I32 __attribute__((vector_size(64), may_alias));
typedef uint8_t U8 __attribute__((vector_size(64), may_alias));
typedef uint16_t U16 __attribute__((vector_size(64), may_alias));
typedef uint32_t U32 __attribute__((vector_size(64), may_alias));
typedef uint64_t U64 __attribute__((vector_size(64), may_alias));
typedef uint16_t U16Of256 __attribute__((vector_size(32), may_alias));
typedef __m256i Halves[2];

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

FASTATTN_INLINE void expect(bool supported) {
  if (!supported) __builtin_trap();
}

// f(i) in every lane i of a V.
template <class V, class F>
FASTATTN_INLINE V each(F f) {
  V v;
  for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) v[i] = f(i);
  return v;
}

FASTATTN_INLINE bool has(uint64_t mask, unsigned i) { return mask >> i & 1; }

}  // namespace lanes

// -- loads and stores -----------------------------------------------------------------------------
FASTATTN_INLINE __m512i _mm512_loadu_si512(const void* p) {
  __m512i v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FASTATTN_INLINE __m512i _mm512_load_si512(const void* p) {
  lanes::expect(reinterpret_cast<uintptr_t>(p) % 64 == 0);
  return _mm512_loadu_si512(p);
}
FASTATTN_INLINE void _mm512_storeu_si512(void* p, __m512i v) { __builtin_memcpy(p, &v, sizeof v); }
FASTATTN_INLINE void _mm512_stream_si512(__m512i* p, __m512i v) {
  lanes::expect(reinterpret_cast<uintptr_t>(p) % 64 == 0);
  _mm512_storeu_si512(p, v);
}
// Of memory whose mask bit is 0 nothing is read or written.
template <class V, class T>
FASTATTN_INLINE V masked_load(uint64_t mask, const T* p) {
  V v{};
  for (unsigned i = 0; i < sizeof(V) / sizeof(T); ++i)
    if (lanes::has(mask, i)) v[i] = p[i];
  return v;
}
template <class V, class T>
FASTATTN_INLINE void masked_store(uint64_t mask, T* p, V v) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(T); ++i)
    if (lanes::has(mask, i)) p[i] = v[i];
}
FASTATTN_INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
  return (__m512)masked_load<lanes::F32>(mask, static_cast<const float*>(p));
}
FASTATTN_INLINE __m512d _mm512_maskz_loadu_pd(__mmask8 mask, const void* p) {
  return (__m512d)masked_load<lanes::F64>(mask, static_cast<const double*>(p));
}
FASTATTN_INLINE __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
  return (__m512i)masked_load<lanes::U16>(mask, static_cast<const uint16_t*>(p));
}
FASTATTN_INLINE __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  return (__m256i)masked_load<lanes::U16Of256>(mask, static_cast<const uint16_t*>(p));
}
FASTATTN_INLINE __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* p) {
  return (__m512i)masked_load<lanes::U8>(mask, static_cast<const uint8_t*>(p));
}
FASTATTN_INLINE __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* p) {
  typedef uint8_t V __attribute__((vector_size(16)));
  return (__m128i)masked_load<V>(mask, static_cast<const uint8_t*>(p));
}
FASTATTN_INLINE __m128 _mm_maskz_loadu_ps(__mmask8 mask, const void* p) {
  typedef float V __attribute__((vector_size(16)));
  return (__m128)masked_load<V>(mask, static_cast<const float*>(p));
}
FASTATTN_INLINE void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 v) {
  masked_store(mask, static_cast<float*>(p), (lanes::F32)v);
}
FASTATTN_INLINE void _mm512_mask_storeu_pd(void* p, __mmask8 mask, __m512d v) {
  masked_store(mask, static_cast<double*>(p), (lanes::F64)v);
}
FASTATTN_INLINE void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, __m256i v) {
  masked_store(mask, static_cast<uint16_t*>(p), (lanes::U16Of256)v);
}

// -- constants ------------------------------------------------------------------------------------
FASTATTN_INLINE __m512i _mm512_setzero_si512() { return __m512i{}; }
FASTATTN_INLINE __m512 _mm512_set1_ps(float x) {
  return (__m512)lanes::each<lanes::F32>([=](unsigned) { return x; });
}
FASTATTN_INLINE __m512d _mm512_set1_pd(double x) {
  return (__m512d)lanes::each<lanes::F64>([=](unsigned) { return x; });
}
FASTATTN_INLINE __m512i _mm512_set1_epi32(int x) { return (__m512i)(lanes::I32{} + x); }
FASTATTN_INLINE __m512i _mm512_set1_epi16(short x) {
  return (__m512i)(lanes::U16{} + static_cast<uint16_t>(x));
}
FASTATTN_INLINE __m512i _mm512_set4_epi32(int d, int c, int b, int a) {
  return (__m512i)lanes::I32{a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d};
}
template <class... Lanes>
FASTATTN_INLINE __m512i _mm512_setr_epi64(Lanes... x) {
  return __m512i{static_cast<long long>(x)...};
}
// From the last lane to the first.
template <class... Lanes>
FASTATTN_INLINE __m512i _mm512_set_epi16(Lanes... x) {
  const uint16_t reversed[32] = {static_cast<uint16_t>(x)...};
  return (__m512i)lanes::each<lanes::U16>([&](unsigned i) { return reversed[31 - i]; });
}

// -- the order of lanes ---------------------------------------------------------------------------
FASTATTN_INLINE __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  const lanes::U16 x = (lanes::U16)a, y = (lanes::U16)b, at = (lanes::U16)index;
  return (__m512i)lanes::each<lanes::U16>(
      [&](unsigned i) { return at[i] & 32 ? y[at[i] & 31] : x[at[i] & 31]; });
}
FASTATTN_INLINE __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
  const lanes::U16 x = (lanes::U16)a, at = (lanes::U16)index;
  return (__m512i)lanes::each<lanes::U16>([&](unsigned i) { return x[at[i] & 31]; });
}
FASTATTN_INLINE __m512i _mm512_permutex2var_epi64(__m512i a, __m512i index, __m512i b) {
  const lanes::U64 x = (lanes::U64)a, y = (lanes::U64)b, at = (lanes::U64)index;
  return (__m512i)lanes::each<lanes::U64>(
      [&](unsigned i) { return at[i] & 8 ? y[at[i] & 7] : x[at[i] & 7]; });
}
// The elements of the lower or the upper half of every 128 bits of a and b, in turn.
template <class V>
FASTATTN_INLINE __m512i unpacked(__m512i a, __m512i b, bool upper) {
  constexpr unsigned kCount = 16 / sizeof(V{}[0]);
  const V x = (V)a, y = (V)b;
  return (__m512i)lanes::each<V>([&](unsigned i) {
    const unsigned from = i / kCount * kCount + (upper ? kCount / 2 : 0) + i % kCount / 2;
    return i % 2 ? y[from] : x[from];
  });
}
FASTATTN_INLINE __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return unpacked<lanes::U8>(a, b, false);
}
FASTATTN_INLINE __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return unpacked<lanes::U8>(a, b, true);
}
FASTATTN_INLINE __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return unpacked<lanes::U16>(a, b, false);
}
FASTATTN_INLINE __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return unpacked<lanes::U16>(a, b, true);
}
FASTATTN_INLINE __m512i _mm512_mask_shuffle_epi8(__m512i other, __mmask64 mask, __m512i a,
                                                 __m512i index) {
  const lanes::U8 x = (lanes::U8)a, at = (lanes::U8)index, kept = (lanes::U8)other;
  return (__m512i)lanes::each<lanes::U8>([&](unsigned i) {
    const uint8_t moved = at[i] & 0x80 ? uint8_t{0} : x[i / 16 * 16 + (at[i] & 15)];
    return lanes::has(mask, i) ? moved : kept[i];
  });
}

// The first lanes of 512 bits, then zeros.
template <class V, class Part>
FASTATTN_INLINE V extended(Part x) {
  V v{};
  __builtin_memcpy(&v, &x, sizeof x);
  return v;
}
FASTATTN_INLINE __m512 _mm512_zextps128_ps512(__m128 x) { return extended<__m512>(x); }
FASTATTN_INLINE __m512d _mm512_zextpd128_pd512(__m128d x) { return extended<__m512d>(x); }

// -- masks ----------------------------------------------------------------------------------------
FASTATTN_INLINE __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
  const lanes::F32 x = (lanes::F32)a;
  return (__m512)lanes::each<lanes::F32>(
      [&](unsigned i) { return lanes::has(mask, i) ? x[i] : 0.0f; });
}
FASTATTN_INLINE __m512i _mm512_mask_blend_epi32(__mmask16 mask, __m512i a, __m512i b) {
  const lanes::U32 x = (lanes::U32)a, y = (lanes::U32)b;
  return (__m512i)lanes::each<lanes::U32>(
      [&](unsigned i) { return lanes::has(mask, i) ? y[i] : x[i]; });
}
FASTATTN_INLINE __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
  const lanes::U16 x = (lanes::U16)a, y = (lanes::U16)b;
  return (__m512i)lanes::each<lanes::U16>(
      [&](unsigned i) { return lanes::has(mask, i) ? y[i] : x[i]; });
}
FASTATTN_INLINE __m512i _mm512_movm_epi16(__mmask32 mask) {
  return (__m512i)lanes::each<lanes::U16>(
      [&](unsigned i) { return static_cast<uint16_t>(lanes::has(mask, i) ? 0xffff : 0); });
}
FASTATTN_INLINE __mmask32 _mm512_cmple_epu16_mask(__m512i a, __m512i b) {
  const lanes::U16 x = (lanes::U16)a, y = (lanes::U16)b;
  __mmask32 mask = 0;
  for (unsigned i = 0; i < 32; ++i) mask |= static_cast<__mmask32>(x[i] <= y[i]) << i;
  return mask;
}
FASTATTN_INLINE __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int relation) {
  lanes::expect(relation == _CMP_NEQ_UQ);
  const lanes::F32 x = (lanes::F32)a, y = (lanes::F32)b;
  unsigned mask = 0;
  for (unsigned i = 0; i < 16; ++i) mask |= static_cast<unsigned>(x[i] != y[i]) << i;
  return static_cast<__mmask16>(mask);
}
FASTATTN_INLINE __mmask16 _mm_mask_testn_epi8_mask(__mmask16 tested, __m128i a, __m128i b) {
  const __m128i neither = _mm_cmpeq_epi8(_mm_and_si128(a, b), _mm_setzero_si128());
  return static_cast<__mmask16>(tested & static_cast<unsigned>(_mm_movemask_epi8(neither)));
}

// -- integers -------------------------------------------------------------------------------------
FASTATTN_INLINE __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
FASTATTN_INLINE __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return (__m512i)((lanes::U16)a + (lanes::U16)b);
}
FASTATTN_INLINE __m512i _mm512_slli_epi32(__m512i a, unsigned by) {
  return (__m512i)((lanes::U32)a << by);
}
FASTATTN_INLINE __m512i _mm512_slli_epi64(__m512i a, unsigned by) {
  return (__m512i)((lanes::U64)a << by);
}
FASTATTN_INLINE __m512i _mm512_srli_epi64(__m512i a, unsigned by) {
  return (__m512i)((lanes::U64)a >> by);
}
FASTATTN_INLINE __m512i _mm512_mul_epu32(__m512i a, __m512i b) {
  return (__m512i)(((lanes::U64)a & 0xffffffffu) * ((lanes::U64)b & 0xffffffffu));
}
// Each sum of four products of a byte of a, unsigned, and of b, signed, is added to a lane of c.
FASTATTN_INLINE __m512i _mm512_dpbusd_epi32(__m512i c, __m512i a, __m512i b) {
  const lanes::U8 x = (lanes::U8)a, y = (lanes::U8)b;
  return (__m512i)lanes::each<lanes::U32>([&](unsigned i) {
    uint32_t sum = ((lanes::U32)c)[i];
    for (unsigned n = 4 * i; n < 4 * i + 4; ++n)
      sum += static_cast<uint32_t>(x[n] * static_cast<int8_t>(y[n]));
    return sum;
  });
}
FASTATTN_INLINE int _mm512_reduce_max_epi32(__m512i a) {
  const lanes::I32 x = (lanes::I32)a;
  int most = x[0];
  for (unsigned i = 1; i < 16; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// -- conversions ----------------------------------------------------------------------------------
FASTATTN_INLINE __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return (__m512i) __builtin_convertvector((lanes::U16Of256)a, lanes::U32);
}
FASTATTN_INLINE __m512i _mm512_cvtepi8_epi32(__m128i a) {
  typedef int8_t I8Of128 __attribute__((vector_size(16), may_alias));
  return (__m512i) __builtin_convertvector((I8Of128)a, lanes::I32);
}
FASTATTN_INLINE __m512 _mm512_cvtepi32_ps(__m512i a) {
  return (__m512) __builtin_convertvector((lanes::I32)a, lanes::F32);
}
FASTATTN_INLINE __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return (__m256i) __builtin_convertvector((lanes::U32)a, lanes::U16Of256);
}
FASTATTN_INLINE __m512 _mm512_cvtph_ps(__m256i a) {
  __m512 v;
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                            _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
  __builtin_memcpy(&v, halves, sizeof v);
  return v;
}
FASTATTN_INLINE __m256i _mm512_cvtps_ph(__m512 a, int rounding) {
  lanes::expect(rounding == lanes::kNearest);
  __m256 halves[2];
  __builtin_memcpy(halves, &a, sizeof a);
  return _mm256_set_m128i(_mm256_cvtps_ph(halves[1], lanes::kNearest),
                          _mm256_cvtps_ph(halves[0], lanes::kNearest));
}

// -- arithmetic -----------------------------------------------------------------------------------
FASTATTN_INLINE __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
FASTATTN_INLINE __m512d _mm512_max_pd(__m512d a, __m512d b) { return a > b ? a : b; }
FASTATTN_INLINE __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return (__m512)lanes::each<lanes::F32>(
      [&](unsigned i) { return __builtin_fmaf(a[i], b[i], c[i]); });
}
FASTATTN_INLINE __m512d _mm512_fmsub_pd(__m512d a, __m512d b, __m512d c) {
  return (__m512d)lanes::each<lanes::F64>(
      [&](unsigned i) { return __builtin_fma(a[i], b[i], -c[i]); });
}
FASTATTN_INLINE __m512 _mm512_rcp14_ps(__m512 a) {
  return (__m512)((lanes::U32)(1.0f / (lanes::F32)a) & ~0x1ffu);
}
// x - round(x), 0 for an infinity; the difference is rounded in the same direction, as for small
// negative x, where it is 1 + x rounded down. w is 0, as large as x, or so close to x that the
// difference is exact, so `error` is the exact error of `nearest`.
FASTATTN_INLINE __m512 _mm512_reduce_ps(__m512 a, int rounding) {
  lanes::expect(rounding == lanes::kNearest || rounding == lanes::kDown);
  return (__m512)lanes::each<lanes::F32>([&](unsigned i) {
    const float x = a[i];
    if (__builtin_isinf(x)) return 0.0f;
    const bool down = rounding == lanes::kDown;
    const float w = down ? __builtin_floorf(x) : __builtin_rintf(x);
    const float nearest = x - w, error = x - (nearest + w);
    return down && error < 0 ? __builtin_nextafterf(nearest, -1.0f) : nearest;
  });
}
FASTATTN_INLINE __m512d _mm512_roundscale_pd(__m512d a, int rounding) {
  lanes::expect(rounding == lanes::kNearest);
  return (__m512d)lanes::each<lanes::F64>([&](unsigned i) { return __builtin_rint(a[i]); });
}
// x 2^floor(power), rounded once; as the processor for a positive x, the kernels' case.
template <class T>
FASTATTN_INLINE T scaled(T x, T power) {
  constexpr T kMost = 3000;  // beyond, all results are 0 or inf
  if (power != power) return power;
  const T n = power > kMost ? kMost : power < -kMost ? -kMost : power;
  const int whole = static_cast<int>(__builtin_floor(n));
  return static_cast<T>(sizeof(T) == 4 ? __builtin_ldexpf(x, whole) : __builtin_ldexp(x, whole));
}
FASTATTN_INLINE __m512 _mm512_scalef_ps(__m512 a, __m512 power) {
  return (__m512)lanes::each<lanes::F32>([&](unsigned i) { return scaled<float>(a[i], power[i]); });
}
FASTATTN_INLINE __m512d _mm512_scalef_pd(__m512d a, __m512d power) {
  return (__m512d)lanes::each<lanes::F64>(
      [&](unsigned i) { return scaled<double>(a[i], power[i]); });
}

// -- pairs of bf16 --------------------------------------------------------------------------------
// The upper halves of the lanes, or their lower halves, as floats.
FASTATTN_INLINE lanes::F32 odd_of_pairs(lanes::U32 x) { return (lanes::F32)(x & 0xffff0000u); }
FASTATTN_INLINE lanes::F32 even_of_pairs(lanes::U32 x) { return (lanes::F32)(x << 16); }

FASTATTN_INLINE __m512 _mm512_dpbf16_ps(__m512 c, __m512bh a, __m512bh b) {
  const lanes::U32 x = (lanes::U32)a, y = (lanes::U32)b;
  const __m512 odd = _mm512_fmadd_ps((__m512)odd_of_pairs(x), (__m512)odd_of_pairs(y), c);
  return _mm512_fmadd_ps((__m512)even_of_pairs(x), (__m512)even_of_pairs(y), odd);
}
// The elements of b, then the elements of a, rounded to nearest, ties to even; subnormals give 0.
FASTATTN_INLINE __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  const auto rounded = [](float x) -> uint16_t {
    uint32_t u;
    __builtin_memcpy(&u, &x, sizeof u);
    if (x != x) return static_cast<uint16_t>(u >> 16 | 0x40);
    if ((u & 0x7f800000u) == 0) return static_cast<uint16_t>(u >> 16 & 0x8000);
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  };
  return (__m512bh)lanes::each<lanes::U16>(
      [&](unsigned i) { return rounded(i < 16 ? b[i] : a[i - 16]); });
}

}  // namespace
}  // namespace FASTATTN_ISA
}  // namespace fastattn
