// Parts of the program: each prints lines and says whether all was right, or fills a table.
#ifndef M3_BENCH_GPU_CHECKS_H
#define M3_BENCH_GPU_CHECKS_H

#include <cstdio>

bool check_decode();
bool check_low_bit();
bool check_prefill();
void time_decode(FILE *csv);
void time_low_bit(FILE *csv);
void time_prefill(FILE *csv);

#endif
