// Copies of index keys in 4 or 8 bits, and what their scan hands to the exact choice.
//
// A key k is kept as s c + e: a scale s, codes c, and a bound of the error. A query q is t d + f likewise, with codes
// of 16 bits, so that D = c . d is an exact integer. Then q . k = s t D + f . (s c) + q . e, and the float32 sum of the
// exact scan is within SUM_ERROR |q| |k| of that. With |f| <= QUERY_ERROR |q| a token stores
//   spread = |e| + (QUERY_ERROR + SUM_ERROR) |s c|,  rounded up,
// and the score of the exact scan lies within |q| spread of s t D. A key that is no number or so large that products
// might overflow has an infinite spread: the exact scan decides.
#ifndef M3_SRC_CUDA_MSA_LOW_BIT_CUH
#define M3_SRC_CUDA_MSA_LOW_BIT_CUH

#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

constexpr int QUERY_LEVELS = 32600;      // two digits of 8 bits
constexpr float QUERY_ERROR = 1.8e-4f;   // sqrt(DIM) / 2 / QUERY_LEVELS, and what its rounding adds
constexpr float SUM_ERROR = 6.2e-5f;     // of tensor cores' sums too, and of those on bounds
constexpr float TRUSTED_MOST = 1e17f;    // of a number: norms stay below 1.2e18
constexpr float TRUSTED_LEAST = 1e-10f;  // of the largest number of a query that is not zero
constexpr float UNDERFLOW = 1e-25f;      // part of every spread: times such a query it covers products that underflow
constexpr float UNBOUNDED = 3e38f;       // stands for infinity in bounds
constexpr int MOST_SEEDS = 512;          // thread blocks of the scan
constexpr int PIECES = 8, PIECE_TOKENS = 16;  // of a block: piece g has tokens g, g + 8, ...

// A page is LOADS chunks, each of PLANES planes of 64 bytes a token, and then a pair (s, spread) of bfloat16 a token.
// 8 bits: bytes 16 t + 8 (w & 1) + {0..3} of plane w / 2 are channels 32 w + 4 t + {0..3}, the next four those after 16
// more. 4 bits: bytes 16 t + 4 w + {0..3} hold the first four in their low halves and the others in their high halves.
template <int BITS>
struct low_bit_layout {
  static constexpr int TOKENS = BITS == 4 ? 128 : 64, LOADS = BLOCK / TOKENS, PLANES = BITS / 4;
  static constexpr int PLANE_BYTES = TOKENS * 64, PAIRS_AT = PLANES * PLANE_BYTES, CHUNK_BYTES = PAIRS_AT + TOKENS * 4;
  static constexpr int PAGE = LOADS * CHUNK_BYTES;
  // What a code u stands for, in steps: 2 u - 15 of half a step, or u.
  static constexpr float LARGEST = BITS == 4 ? 15 : 127;
};

// The upper bounds of the tokens of a piece: the largest, whose last 4 bits are the number of its token in the piece,
// and the next one.
using piece_bounds = float2;

struct bounds_args {
  m3_msa_rows rows;
  const char *low_bit;
  const void *index;
  int32_t index_type;
  const float *q;
  piece_bounds *bounds;  // [n, HEADS, max_blocks, PIECES]
  float *block_bounds;   // [n, HEADS, max_blocks] the largest of a block
  float *seeds;          // [n, HEADS, thread blocks] a lower bound of the score of one competing block, or -infinity
  int32_t local, stages;
  bool exact_seeds;
};

struct rescore_args {
  m3_msa_rows rows;
  const void *index;
  int32_t index_type;
  const float *q;
  const piece_bounds *bounds;
  const float *block_bounds, *seeds;
  int32_t n_seeds, local;
  int32_t *not_finite, code;
  uint64_t *rescored;  // NULL, or tokens are added
};

}  // namespace m3_msa

#endif
