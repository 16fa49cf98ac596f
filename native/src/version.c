#include "m3.h"

int32_t m3_abi_version(void) { return M3_ABI_VERSION; }

const char *m3_version(void) { return M3_VERSION_STRING; }
