#include "quant/codebooks.h"

/* build/generated/tables.h: the definitions. */
#define M3_TABLE const
#include "tables.h"
