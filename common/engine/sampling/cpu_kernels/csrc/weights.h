// A row's weights in groups, and the scratch memory of a draw.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "lanes.h"

namespace pd {

constexpr int64_t GROUP = 128;  // tokens of a group: top_values.GROUP_SIZE
constexpr float INF = std::numeric_limits<float>::infinity();

// What is done to one row before its tokens race.
struct Weigher {
  const float* row;
  int64_t size;
  float top;
  float inverse;  // of the temperature

  vf of(vf logits) const { return exp_lanes((logits - top) * inverse); }

  // Weights of group g, zeros beyond the row.
  void group(int64_t g, float* to) const {
    const int64_t start = g * GROUP, count = std::min(GROUP, size - start);
    alignas(64) float padded[GROUP];
    const float* from = row + start;
    if (count < GROUP) {
      std::fill(std::copy(from, from + count, padded), padded + GROUP, -INF);
      from = padded;
    }
    for (int64_t i = 0; i < GROUP; i += LANES) store(to + i, of(load(from + i)));
  }
};

struct Scratch {
  std::vector<float> weights, totals, maxima, order, values;
  std::vector<int64_t> groups;

  void fit(int64_t num_groups) {
    if (int64_t(totals.size()) >= num_groups) return;
    weights.resize(num_groups * GROUP);
    values.resize(num_groups * GROUP);
    totals.resize(num_groups);
    maxima.resize(num_groups);
    order.resize(num_groups);
  }
};

static inline float group_sum(const float* w) { return sum(w, GROUP); }

// Weights of the whole row into the scratch, with the sum and the highest of each group.
static inline void weigh(const Weigher& weigher, Scratch& s, int64_t num_groups) {
  for (int64_t g = 0; g < num_groups; g++) {
    float* w = s.weights.data() + g * GROUP;
    weigher.group(g, w);
    vf best = load(w);
    for (int64_t i = LANES; i < GROUP; i += LANES) best = larger(load(w + i), best);
    s.totals[g] = group_sum(w);
    s.maxima[g] = max_of(best);
  }
}

}  // namespace pd
