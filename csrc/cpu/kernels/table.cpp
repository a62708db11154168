// The table of an instruction set on vectors: all kernels are compiled for it, unless it extends
// another one.
#if defined(FASTATTN_EXTENDS)
#define FASTATTN_REST FASTATTN_EXTENDS
#else
#define FASTATTN_REST FASTATTN_ISA
#endif
#include "table.h"
