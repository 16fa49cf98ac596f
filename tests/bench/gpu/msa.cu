// Checks and times the MSA kernels: msa [check] [check-low-bit] [check-prefill] [time] [time-low-bit] [time-prefill]
// (all without arguments). CSV to $OUT/msa.csv, or msa.csv.
#include <cstdlib>
#include <cstring>
#include <string>

#include "cases.cuh"
#include "checks.h"

int main(int argc, char **argv) {
  auto asked = [&](const char *what) {
    for (int i = 1; i < argc; i++)
      if (!strcmp(argv[i], what)) return true;
    return argc == 1;
  };
  setvbuf(stdout, nullptr, _IOLBF, 0);
  cudaDeviceProp p;
  CUDA(cudaGetDeviceProperties(&p, 0));
  printf("%s, %d multiprocessors\n", p.name, p.multiProcessorCount);
  const char *folder = getenv("OUT");
  FILE *csv = fopen((std::string(folder ? folder : ".") + "/msa.csv").c_str(), "w");
  if (!csv) {
    perror("msa.csv");
    return 1;
  }
  fprintf(csv, "case,context,batch,us,bytes_or_flop,rate,rescored\n");
  bool good = true;
  if (asked("check")) good &= check_decode();
  if (asked("check-low-bit")) good &= check_low_bit();
  if (asked("check-prefill")) good &= check_prefill();
  if (asked("time")) time_decode(csv);
  if (asked("time-low-bit")) time_low_bit(csv);
  if (asked("time-prefill")) time_prefill(csv);
  fclose(csv);
  printf(good ? "all right\n" : "FAILED\n");
  return good ? 0 : 1;
}
