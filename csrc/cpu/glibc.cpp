// Lets a library linked to a newer glibc run on glibc 2.28, as a manylinux_2_28 wheel must: defines
// the symbols that later versions added. exports.map keeps them local to this library.
#include <features.h>

#if defined(__GLIBC__)
// libstdc++ counts references without atomics while this is true; glibc has it from 2.32 on.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

// glibc 2.29 has second versions of log and pow, which only differ in not calling matherr.
#if defined(__x86_64__)
asm(".symver fastattn_first_log, log@GLIBC_2.2.5");
asm(".symver fastattn_first_pow, pow@GLIBC_2.2.5");
#elif defined(__aarch64__)
asm(".symver fastattn_first_log, log@GLIBC_2.17");
asm(".symver fastattn_first_pow, pow@GLIBC_2.17");
#endif
#if defined(__x86_64__) || defined(__aarch64__)
extern "C" double fastattn_first_log(double x);
extern "C" double log(double x) { return fastattn_first_log(x); }
extern "C" double fastattn_first_pow(double x, double y);
extern "C" double pow(double x, double y) { return fastattn_first_pow(x, y); }
#endif
#endif
