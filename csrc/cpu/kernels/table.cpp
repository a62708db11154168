// An instruction set on vectors computes everything itself.
#define FASTATTN_REST FASTATTN_ISA
#include "table.h"
