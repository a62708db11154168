// An instruction set on vectors computes everything itself, unless it extends another one.
#if defined(FASTATTN_EXTENDS)
#define FASTATTN_REST FASTATTN_EXTENDS
#else
#define FASTATTN_REST FASTATTN_ISA
#endif
#include "table.h"
