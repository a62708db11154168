// The instructions of wgmma.h, which includes this file within its namespace.
//
// PTX names every register of an instruction one by one. C++ cannot do it with an index sequence:
// the operands of an asm statement cannot expand a parameter pack, so nvcc rejects
// `"+f"(d[I])...`. Macros can.
//
// clang-format off

// The first n elements of d as operands, and the names of these operands.
#define FASTATTN_EIGHT(n) \
  "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3]), \
  "+f"(d[n + 4]), "+f"(d[n + 5]), "+f"(d[n + 6]), "+f"(d[n + 7])
#define FASTATTN_FLOATS_16 FASTATTN_EIGHT(0), FASTATTN_EIGHT(8)
#define FASTATTN_FLOATS_24 FASTATTN_FLOATS_16, FASTATTN_EIGHT(16)
#define FASTATTN_FLOATS_32 FASTATTN_FLOATS_24, FASTATTN_EIGHT(24)
#define FASTATTN_FLOATS_40 FASTATTN_FLOATS_32, FASTATTN_EIGHT(32)
#define FASTATTN_FLOATS_48 FASTATTN_FLOATS_40, FASTATTN_EIGHT(40)
#define FASTATTN_FLOATS_64 FASTATTN_FLOATS_48, FASTATTN_EIGHT(48), FASTATTN_EIGHT(56)
#define FASTATTN_FLOATS_96 \
  FASTATTN_FLOATS_64, FASTATTN_EIGHT(64), FASTATTN_EIGHT(72), FASTATTN_EIGHT(80), FASTATTN_EIGHT(88)
#define FASTATTN_FLOATS_128 \
  FASTATTN_FLOATS_96, FASTATTN_EIGHT(96), FASTATTN_EIGHT(104), FASTATTN_EIGHT(112), \
  FASTATTN_EIGHT(120)
#define FASTATTN_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FASTATTN_NAMES_24 FASTATTN_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FASTATTN_NAMES_32 FASTATTN_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTATTN_NAMES_40 FASTATTN_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FASTATTN_NAMES_48 FASTATTN_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FASTATTN_NAMES_64 FASTATTN_NAMES_48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTATTN_NAMES_96 FASTATTN_NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80" \
  ", %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FASTATTN_NAMES_128 FASTATTN_NAMES_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110" \
  ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124" \
  ", %125, %126, %127"

// A product with d of n columns. The numbers of the operands after d come last: a, b and whether to
// accumulate.
#define FASTATTN_SS(type, n, floats, transposed, a0, b0, p0) \
  static FASTATTN_DEVICE void ss(float (&d)[floats], uint64_t a, uint64_t b, bool accumulate) { \
    asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %" #p0 ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " \
        "{" FASTATTN_NAMES_##floats "}, %" #a0 ", %" #b0 ", p, 1, 1, 0, " #transposed "; }\n" \
        : FASTATTN_FLOATS_##floats \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))); \
  }
#define FASTATTN_RS(type, n, floats, transposed, a0, a1, a2, a3, b0, p0) \
  static FASTATTN_DEVICE void rs(float (&d)[floats], const uint32_t (&a)[4], uint64_t b, \
                                 bool accumulate) { \
    asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %" #p0 ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " \
        "{" FASTATTN_NAMES_##floats "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0 ", " \
        "p, 1, 1, " #transposed "; }\n" \
        : FASTATTN_FLOATS_##floats \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))); \
  }

// Products that compute scores read a and b from shared memory, not transposed: 32 to 96 columns.
// Products with scores read the scores from registers and b transposed: the columns of values. 64
// columns have all forms, for tests.
#define FASTATTN_WGMMAS(T, type) \
  template <> struct Wgmma<T, 32, false> { FASTATTN_SS(type, 32, 16, 0, 16, 17, 18) }; \
  template <> struct Wgmma<T, 48, false> { FASTATTN_SS(type, 48, 24, 0, 24, 25, 26) }; \
  template <> struct Wgmma<T, 64, false> { FASTATTN_SS(type, 64, 32, 0, 32, 33, 34) \
    FASTATTN_RS(type, 64, 32, 0, 32, 33, 34, 35, 36, 37) }; \
  template <> struct Wgmma<T, 80, false> { FASTATTN_SS(type, 80, 40, 0, 40, 41, 42) }; \
  template <> struct Wgmma<T, 96, false> { FASTATTN_SS(type, 96, 48, 0, 48, 49, 50) }; \
  template <> struct Wgmma<T, 64, true> { FASTATTN_SS(type, 64, 32, 1, 32, 33, 34) \
    FASTATTN_RS(type, 64, 32, 1, 32, 33, 34, 35, 36, 37) }; \
  template <> struct Wgmma<T, 96, true> { \
    FASTATTN_RS(type, 96, 48, 1, 48, 49, 50, 51, 52, 53) }; \
  template <> struct Wgmma<T, 128, true> { \
    FASTATTN_RS(type, 128, 64, 1, 64, 65, 66, 67, 68, 69) }; \
  template <> struct Wgmma<T, 192, true> { \
    FASTATTN_RS(type, 192, 96, 1, 96, 97, 98, 99, 100, 101) }; \
  template <> struct Wgmma<T, 256, true> { \
    FASTATTN_RS(type, 256, 128, 1, 128, 129, 130, 131, 132, 133) };
FASTATTN_WGMMAS(Bf16, "bf16")
FASTATTN_WGMMAS(F16, "f16")
// clang-format on
