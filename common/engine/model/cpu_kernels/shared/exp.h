// exp of vectors of floats, for every library that build.py makes.
//
// FMA contraction (-ffp-contract=fast) is relied on: `a * b + c` rounds once.
#pragma once

namespace pd {

// exp of each lane of x, all in [-87.33, 88.37] (no bounds are checked), less than 2 ulp off. Range reduction to
// [-ln2/2, ln2/2] and a degree-6 polynomial with Cephes' coefficients. F: a vector of floats, I: of as many int32.
template <class F, class I>
static inline F exp_of_bounded(F x) {
  F magic = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  F n = (x * 1.44269504088896341f + magic) - magic;
  F r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F p = F{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  I exponent = (__builtin_convertvector(n, I) + 127) << 23;
  return p * (F)exponent;
}

}  // namespace pd
