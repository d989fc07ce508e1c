// The highest logit of a row, looked for by the threads that wrote it while it lies in their caches.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.h"

namespace pd {

struct Highest {
  float value;    // NaN where one of those looked at is
  int64_t place;  // the first of them
};

constexpr int64_t HIGHEST_BLOCK = 1024;  // values that are looked at again for the first of them

// Of x[begin], ..., x[end - 1].
static inline Highest highest_of(const float* x, int64_t begin, int64_t end) {
  Highest best{-INFINITY, begin};
  vi ordered = vi{} - 1;
  bool is_number = true;
  for (int64_t start = begin; start < end; start += HIGHEST_BLOCK) {
    const int64_t stop = std::min(end, start + HIGHEST_BLOCK);
    vf top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t i = start;
    for (; i + 4 * VL <= stop; i += 4 * VL)
      for (int j = 0; j < 4; j++) {
        const vf v = load(x + i + j * VL);
        top[j] = v > top[j] ? v : top[j];
        ordered &= v == v;
      }
    for (int j = 1; j < 4; j++) top[0] = top[j] > top[0] ? top[j] : top[0];
    float value = top[0][0];
    for (int lane = 1; lane < VL; lane++) value = std::max(value, top[0][lane]);
    for (; i < stop; i++) {
      value = x[i] > value ? x[i] : value;
      is_number &= x[i] == x[i];
    }
    if (value > best.value) best = {value, start};
  }
  for (int lane = 0; lane < VL; lane++) is_number &= ordered[lane] != 0;
  if (!is_number) return {NAN, begin};
  while (best.place < end && x[best.place] < best.value) best.place++;
  return best;
}

}  // namespace pd
