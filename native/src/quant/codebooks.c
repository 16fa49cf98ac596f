#include "quant/codebooks.h"

/* build/generated/tables.h: the definitions. */
#include "tables.h"
