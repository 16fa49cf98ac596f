/* exponential.h - numbers of the exponential function that all tables compute:
 *     exp(x) = 2^n (1 + r + r^2 q(r)),  n = round(x / ln 2),  r = x - n ln 2 in two steps,
 * with q of degree 4 fitted to the least largest relative error (5e-9) for |r| <= ln 2 / 2. */
#ifndef M3_SRC_CPU_EXPONENTIAL_H
#define M3_SRC_CPU_EXPONENTIAL_H

#define M3_EXP_LOWEST (-104.0f) /* below the logarithm of half the smallest number */
#define M3_EXP_HIGHEST 89.0f    /* above that of the largest one */
#define M3_EXP_LOG2_E 0x1.715476p+0f
#define M3_EXP_LN2_HIGH 0x1.63p-1f /* so few bits that n times it is exact */
#define M3_EXP_LN2_LOW (-0x1.bd0106p-13f)
#define M3_EXP_Q4 0x1.6a23ccp-10f
#define M3_EXP_Q3 0x1.123a20p-7f
#define M3_EXP_Q2 0x1.5558f2p-5f
#define M3_EXP_Q1 0x1.555492p-3f
#define M3_EXP_Q0 0x1.fffffcp-2f

#endif
