// An instruction set with tiles computes attention. The one below it, on vectors, computes the
// rest.
#define FASTATTN_REST FASTATTN_BASE
#include "../table.h"
