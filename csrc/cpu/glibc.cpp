// Lets a library linked to a newer glibc run on glibc 2.28, as a manylinux_2_28 wheel must: defines
// the two symbols that later versions added. exports.map keeps them local to this library.
#include <features.h>

#if defined(__GLIBC__)
// libstdc++ counts references without atomics while this is true; glibc has it from 2.32 on.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

// glibc 2.29 has a second version of log, which only differs in not calling matherr.
#if defined(__x86_64__)
asm(".symver fastattn_first_log, log@GLIBC_2.2.5");
#elif defined(__aarch64__)
asm(".symver fastattn_first_log, log@GLIBC_2.17");
#endif
#if defined(__x86_64__) || defined(__aarch64__)
extern "C" double fastattn_first_log(double x);
extern "C" double log(double x) { return fastattn_first_log(x); }
#endif
#endif
