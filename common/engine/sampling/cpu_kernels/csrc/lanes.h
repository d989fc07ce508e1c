// Vectors of floats as wide as one register, of 8 doubles or integers, and the elementwise functions sampling needs.
//
// Sums take the order of 16 lanes on every machine. FMA contraction (-ffp-contract=fast) is relied on in the polynomials.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "exp.h"

namespace pd {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;  // wider vectors than a register are compared and selected lane by lane
#endif
constexpr int HALF = 8;
constexpr int SUM_LANES = 16;

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef float vf_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef double d8 __attribute__((vector_size(64)));
typedef int64_t i8 __attribute__((vector_size(64)));
typedef uint64_t u8 __attribute__((vector_size(64)));
typedef float f8 __attribute__((vector_size(32)));
typedef float f8_mem __attribute__((vector_size(32), aligned(4), may_alias));

static inline vf load(const float* p) { return *(const vf_mem*)p; }
static inline void store(float* p, vf v) { *(vf_mem*)p = v; }
static inline vf larger(vf a, vf b) { return a > b ? a : b; }

// Bit i is set where lane i of `a` is at least `b`.
static inline uint32_t at_least(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ)));
#endif
}

static inline float max_of(vf v) {
  float best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// Sum of `size` values, a multiple of SUM_LANES, at p.
static inline float sum(const float* p, int64_t size) {
  constexpr int PARTS = SUM_LANES / LANES;
  vf sums[PARTS] = {};
  for (int64_t i = 0; i < size; i += SUM_LANES)
    for (int part = 0; part < PARTS; part++) sums[part] += load(p + i + part * LANES);
  float a[SUM_LANES];
  std::memcpy(a, sums, sizeof a);
  for (int width = SUM_LANES / 2; width; width >>= 1)
    for (int i = 0; i < width; i++) a[i] += a[i + width];
  return a[0];
}

// exp of x <= 0, at most 2 ulp off; 0 below -87, where single precision ends. NaN stays NaN.
static inline vf exp_lanes(vf x) {
  const vf lowest = vf{} - 87.0f;
  const vf value = exp_of_bounded<vf, vi>(x < lowest ? lowest : x);
  return x < lowest ? vf{} : value;
}

// log of normal doubles in (0, 1], less than 1 ulp off: fdlibm's reduction to [sqrt(1/2), sqrt(2)) and its polynomial.
static inline d8 log_lanes(d8 x) {
  i8 bits = (i8)x;
  const i8 offset = i8{} + 0x3fe6a09e667f3bcdLL;  // bits of sqrt(1/2)
  const i8 exponent = (bits - offset) >> 52;
  const d8 k = __builtin_convertvector(exponent, d8);
  const d8 f = (d8)(bits - (exponent << 52)) - 1.0;
  const d8 s = f / (f + 2.0), z = s * s, w = z * z;
  const d8 odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const d8 even = z * (6.666666666666735130e-01 +
                       w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const d8 half_square = 0.5 * f * f;
  return k * 6.93147180369123816490e-01 -
         ((half_square - (s * (half_square + (odd + even)) + k * 1.90821492927058770002e-10)) - f);
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ULL;

// random.py's noise, the same bits: Exp(1) of (key, id), for eight ids.
static inline f8 noise_lanes(uint64_t key, u8 ids) {
  u8 v = key + (ids + 1) * GOLDEN;
  v ^= v >> 33;
  v *= 0xFF51AFD7ED558CCDULL;
  v ^= v >> 33;
  v *= 0xC4CEB9FE1A85EC53ULL;
  v ^= v >> 33;
  const d8 uniform = (__builtin_convertvector((i8)(v >> 11), d8) + 0.5) * 0x1p-53;
  return __builtin_convertvector(-log_lanes(uniform), f8);
}

}  // namespace pd
