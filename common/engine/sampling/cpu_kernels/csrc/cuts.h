// min_p, top_k and top_p as one threshold per row; cuts.py defines them.
#pragma once
#include "weights.h"

namespace pd {

constexpr float LOWEST = 0x1p-60f;  // cuts._LOWEST
constexpr int64_t HEAD = 64;        // groups looked at first for a nucleus
constexpr int64_t SORTED = 256;     // a nucleus' edge among this many values is found by sorting them
constexpr int BUCKETS = 256;

// The count-th highest of the groups' highest weights; at least `count` weights are not below it. 0 where there are
// not so many groups.
static inline float kth_maximum(Scratch& s, int64_t num_groups, int64_t count) {
  if (count > num_groups) return 0.0f;
  std::copy_n(s.maxima.begin(), num_groups, s.order.begin());
  std::nth_element(s.order.begin(), s.order.begin() + (count - 1), s.order.begin() + num_groups, std::greater<float>());
  return s.order[count - 1];
}

// Weights >= lowest and > 0, in any order, into s.values; how many.
static inline int64_t collect(Scratch& s, int64_t num_groups, float lowest) {
  float* to = s.values.data();
  const float floor = std::max(lowest, std::numeric_limits<float>::denorm_min());
  const vf bound = vf{} + floor;
  for (int64_t g = 0; g < num_groups; g++) {
    if (!(s.maxima[g] >= floor)) continue;
    const float* w = s.weights.data() + g * GROUP;
    for (int64_t i = 0; i < GROUP; i += LANES)
      for (uint32_t bits = at_least(load(w + i), bound); bits; bits &= bits - 1) *to++ = w[i + __builtin_ctz(bits)];
  }
  return to - s.values.data();
}

static inline double sum_of_values(const Scratch& s, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += s.values[i];
  return sum;
}

static inline float kth_highest(Scratch& s, int64_t num_groups, int64_t k) {
  const int64_t count = collect(s, num_groups, kth_maximum(s, num_groups, k));
  if (count < k) return 0.0f;
  std::nth_element(s.values.begin(), s.values.begin() + (k - 1), s.values.begin() + count, std::greater<float>());
  return s.values[k - 1];
}

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// The lowest of the positive v[0..n) whose strictly higher ones sum to less than `wanted`. Changes v.
static inline float nucleus_edge(float* v, int64_t n, double wanted) {
  double before = 0;
  while (n > SORTED) {
    const auto [low, high] = std::minmax_element(v, v + n);
    const uint32_t base = bits_of(*low), span = bits_of(*high) - base;
    if (!span) return *low;
    const int shift = std::max(0, 32 - __builtin_clz(span) - 8);
    double sums[BUCKETS] = {};
    int64_t counts[BUCKETS] = {};
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bucket = (bits_of(v[i]) - base) >> shift;
      sums[bucket] += v[i];
      counts[bucket]++;
    }
    int edge = BUCKETS - 1, last = edge;
    for (; edge >= 0; edge--) {
      if (!counts[edge]) continue;
      last = edge;
      if (before + sums[edge] >= wanted) break;
      before += sums[edge];
    }
    if (edge < 0) {  // rounding: all of them together just miss it
      before -= sums[last];
      edge = last;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++)
      if (int((bits_of(v[i]) - base) >> shift) == edge) v[kept++] = v[i];
    n = kept;
  }
  std::sort(v, v + n, std::greater<float>());
  int64_t i = 0;
  for (; i + 1 < n && before + v[i] < wanted; i++) before += v[i];
  return v[i];
}

static inline float nucleus(Scratch& s, int64_t num_groups, float lowest, double top_p) {
  double mass = 0;
  if (lowest > 0) {
    mass = sum_of_values(s, collect(s, num_groups, lowest));
  } else {
    for (int64_t g = 0; g < num_groups; g++) mass += s.totals[g];
  }
  const double wanted = top_p * mass;
  const float head = kth_maximum(s, num_groups, HEAD);
  int64_t count = collect(s, num_groups, std::max(lowest, head));
  if (head > lowest && sum_of_values(s, count) < wanted) count = collect(s, num_groups, lowest);
  return nucleus_edge(s.values.data(), count, wanted);
}

struct Cuts {
  int64_t top_k;  // 0: off
  double top_p;   // 1: off
  float min_p;    // 0: off
  bool any() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// The lowest weight that stays; cuts.py defines it.
static inline float threshold(Scratch& s, int64_t num_groups, const Cuts& cuts) {
  float lowest = cuts.min_p;
  if (cuts.top_k > 0) lowest = std::max(lowest, kth_highest(s, num_groups, cuts.top_k));
  if (cuts.top_p < 1) lowest = std::max(lowest, nucleus(s, num_groups, lowest, cuts.top_p));
  return std::max(lowest, LOWEST);
}

// Zero what is below the threshold; the groups that still weigh something into s.groups.
static inline void cut(Scratch& s, int64_t num_groups, float lowest) {
  const vf bound = vf{} + lowest;
  for (int64_t g = 0; g < num_groups; g++) {
    if (!(s.maxima[g] >= lowest)) continue;
    float* w = s.weights.data() + g * GROUP;
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const vf v = load(w + i);
      store(w + i, v >= bound ? v : vf{});
    }
    s.totals[g] = group_sum(w);
    s.groups.push_back(g);
  }
}

}  // namespace pd
