// The online softmax of attention [Milakov & Gimelshein 2018, arXiv:1805.02867]: its state, and one tile of one row.
#pragma once
#include <algorithm>
#include <limits>

#include "attention_few.h"
#include "simd.h"

namespace pd {

constexpr float ABSENT = -std::numeric_limits<float>::infinity();  // the score of a key that is not seen

// The softmax state of query rows: running max, sum of exponentials by lane, weighted sum of values.
struct SoftmaxState {
  float *max, *sum, *out;  // [rows], [rows][16], [rows][dim]
  int64_t dim;

  static int64_t floats(int64_t rows, int64_t dim) { return rows * (1 + 16 + dim); }
  SoftmaxState(float* memory, int64_t rows, int64_t dim)
      : max(memory + rows * (16 + dim)), sum(memory + rows * dim), out(memory), dim(dim) {}

  void clear(int64_t rows) const {
    std::memset(out, 0, size_t(rows * (dim + 16)) * sizeof(float));
    std::fill(max, max + rows, ABSENT);
  }

  // Takes in the later segment `next` of the first `rows` rows; exponentials of 16 rows at once.
  void merge(int64_t rows, const SoftmaxState& next) const {
    for (int64_t first = 0; first < rows; first += 16) {
      const int count = int(std::min<int64_t>(16, rows - first));
      lanes16 before = lanes16{} + ABSENT, later = before;
      std::memcpy(&before, max + first, size_t(count) * sizeof(float));
      std::memcpy(&later, next.max + first, size_t(count) * sizeof(float));
      const lanes16 peak = larger(later, before);
      lanes16 mine = exp_lanes<lanes16, lanes16i>(before - peak), other = exp_lanes<lanes16, lanes16i>(later - peak);
      mine = before == ABSENT ? lanes16{} : mine;
      for (int i = 0; i < count; i++)
        if (later[i] != ABSENT) merge_row(first + i, next, peak[i], mine[i], other[i]);
    }
  }

 private:
  void merge_row(int64_t r, const SoftmaxState& next, float peak, float mine, float other) const {
    float *a = out + r * dim, *b = next.out + r * dim;
    for (int64_t d = 0; d < dim; d++) a[d] = a[d] * mine + b[d] * other;
    for (int i = 0; i < 16; i++) sum[r * 16 + i] = sum[r * 16 + i] * mine + next.sum[r * 16 + i] * other;
    max[r] = peak;
  }
};

// Turns one row of scores into probabilities; rescales what the row has gathered so far. Keys [first, end) are seen.
static inline void softmax_row(float* score, int first, int end, const SoftmaxState& state, int64_t r) {
  if (end <= 0 || first >= TILE) {
    std::memset(score, 0, TILE * sizeof(float));
    return;
  }
  for (int t = 0; t < first; t++) score[t] = ABSENT;
  for (int t = std::max(end, 0); t < TILE; t++) score[t] = ABSENT;
  const float before = state.max[r];
  const lanes16 left = *(lanes16_mem*)score, right = *(lanes16_mem*)(score + 16);
  const float peak = std::max(before, max16(larger(left, right)));
  lanes16 lanes = *(lanes16_mem*)(state.sum + r * 16);
  if (peak != before) {
    const float rescale = before == ABSENT ? 0.0f : exp_one(before - peak);
    float* out = state.out + r * state.dim;
    for (int64_t d = 0; d < state.dim; d++) out[d] *= rescale;
    lanes *= rescale;
    state.max[r] = peak;
  }
  for (int half = 0; half < TILE; half += 16) {
    const lanes16 x = *(lanes16_mem*)(score + half);
    lanes16 p = exp_lanes<lanes16, lanes16i>(x - peak);
    p = x == ABSENT ? lanes16{} : p;
    lanes += p;
    *(lanes16_mem*)(score + half) = p;
  }
  *(lanes16_mem*)(state.sum + r * 16) = lanes;
}

}  // namespace pd
