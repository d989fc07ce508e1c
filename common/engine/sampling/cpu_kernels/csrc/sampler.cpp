// Sampling of logits rows in host memory: grammar mask, highest logit, draw. library.py declares the same signatures.
//
// A row's result depends on that row alone. A draw reads a row twice (highest logit, weights) and writes it nowhere but
// into a scratch row that stays in the core's own cache, and there only if something is to be cut off.
#include <algorithm>
#include <limits>
#include <vector>

#include "lanes.h"

using namespace pd;

namespace {

constexpr int64_t GROUP = 128;                 // tokens of a group: top_values.GROUP_SIZE
constexpr uint64_t FIRST_GROUP_ID = 1ULL << 32;  // race.FIRST_GROUP_ID
constexpr float LOWEST = 0x1p-60f;             // cuts._LOWEST
constexpr int64_t HEAD = 64;                   // groups looked at first for a nucleus
constexpr int64_t SORTED = 256;                // a nucleus' edge among this many values is found by sorting them
constexpr int BUCKETS = 256;
constexpr float INF = std::numeric_limits<float>::infinity();

// The highest value; `is_number` is cleared where a lane is NaN.
float highest(const float* row, int64_t size, bool* is_number) {
  f16 best[4] = {f16{} - INF, f16{} - INF, f16{} - INF, f16{} - INF};
  i16 ordered = i16{} - 1;
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      const f16 v = load(row + i + j * LANES);
      best[j] = larger(v, best[j]);
      ordered &= v == v;
    }
  float top = max_of(larger(larger(best[0], best[1]), larger(best[2], best[3])));
  bool fine = true;
  for (int lane = 0; lane < LANES; lane++) fine &= ordered[lane] != 0;
  for (; i < size; i++) {
    top = row[i] > top ? row[i] : top;
    fine &= row[i] == row[i];
  }
  *is_number = fine;
  return top;
}

// Makes lane i -inf where bit i of `allowed` is not set.
void forbid(float* p, uint32_t allowed) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, __mmask16(~allowed), _mm512_set1_ps(-INF));
#else
  const i16 bit = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                   1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  store(p, ((i16{} + int32_t(allowed)) & bit) != 0 ? load(p) : f16{} - INF);
#endif
}

int64_t first_of(const float* row, int64_t size, float value) {
  const f16 wanted = f16{} + value;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    if (const uint32_t bits = at_least(load(row + i), wanted)) return i + __builtin_ctz(bits);
  for (; i < size; i++)
    if (row[i] >= value) return i;
  return 0;
}

// What is done to one row before its tokens race.
struct Weigher {
  const float* row;
  int64_t size;
  float top;
  float inverse;  // of the temperature

  f16 of(f16 logits) const { return exp_lanes((logits - top) * inverse); }

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

float group_sum(const float* w) {
  f16 sum = f16{};
  for (int64_t i = 0; i < GROUP; i += LANES) sum += load(w + i);
  return sum_of(sum);
}

// Weights of the whole row into the scratch, with the sum and the highest of each group.
void weigh(const Weigher& weigher, Scratch& s, int64_t num_groups) {
  for (int64_t g = 0; g < num_groups; g++) {
    float* w = s.weights.data() + g * GROUP;
    weigher.group(g, w);
    f16 best = load(w);
    for (int64_t i = LANES; i < GROUP; i += LANES) best = larger(load(w + i), best);
    s.totals[g] = group_sum(w);
    s.maxima[g] = max_of(best);
  }
}

// The count-th highest of the groups' highest weights; at least `count` weights are not below it. 0 where there are
// not so many groups.
float kth_maximum(Scratch& s, int64_t num_groups, int64_t count) {
  if (count > num_groups) return 0.0f;
  std::copy_n(s.maxima.begin(), num_groups, s.order.begin());
  std::nth_element(s.order.begin(), s.order.begin() + (count - 1), s.order.begin() + num_groups, std::greater<float>());
  return s.order[count - 1];
}

// Weights >= lowest and > 0, in any order, into s.values; how many.
int64_t collect(Scratch& s, int64_t num_groups, float lowest) {
  float* to = s.values.data();
  const float floor = std::max(lowest, std::numeric_limits<float>::denorm_min());
  const f16 bound = f16{} + floor;
  for (int64_t g = 0; g < num_groups; g++) {
    if (!(s.maxima[g] >= floor)) continue;
    const float* w = s.weights.data() + g * GROUP;
    for (int64_t i = 0; i < GROUP; i += LANES)
      for (uint32_t bits = at_least(load(w + i), bound); bits; bits &= bits - 1) *to++ = w[i + __builtin_ctz(bits)];
  }
  return to - s.values.data();
}

double sum_of_values(const Scratch& s, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += s.values[i];
  return sum;
}

float kth_highest(Scratch& s, int64_t num_groups, int64_t k) {
  const int64_t count = collect(s, num_groups, kth_maximum(s, num_groups, k));
  if (count < k) return 0.0f;
  std::nth_element(s.values.begin(), s.values.begin() + (k - 1), s.values.begin() + count, std::greater<float>());
  return s.values[k - 1];
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// The lowest of the positive v[0..n) whose strictly higher ones sum to less than `wanted`. Changes v.
float nucleus_edge(float* v, int64_t n, double wanted) {
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

float nucleus(Scratch& s, int64_t num_groups, float lowest, double top_p) {
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
float threshold(Scratch& s, int64_t num_groups, const Cuts& cuts) {
  float lowest = cuts.min_p;
  if (cuts.top_k > 0) lowest = std::max(lowest, kth_highest(s, num_groups, cuts.top_k));
  if (cuts.top_p < 1) lowest = std::max(lowest, nucleus(s, num_groups, lowest, cuts.top_p));
  return std::max(lowest, LOWEST);
}

// Zero what is below the threshold; the groups that still weigh something into s.groups.
void cut(Scratch& s, int64_t num_groups, float lowest) {
  const f16 bound = f16{} + lowest;
  for (int64_t g = 0; g < num_groups; g++) {
    if (!(s.maxima[g] >= lowest)) continue;
    float* w = s.weights.data() + g * GROUP;
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const f16 v = load(w + i);
      store(w + i, v >= bound ? v : f16{});
    }
    s.totals[g] = group_sum(w);
    s.groups.push_back(g);
  }
}

// The group that wins the first round among s.groups.
int64_t winning_group(const Scratch& s, uint64_t key) {
  int64_t winner = 0;
  float best = -1.0f;
  const int64_t count = s.groups.size();
  for (int64_t start = 0; start < count; start += HALF) {
    u8 ids = u8{};
    f8 totals = f8{};
    const int64_t n = std::min<int64_t>(HALF, count - start);
    for (int64_t i = 0; i < n; i++) {
      ids[i] = FIRST_GROUP_ID + uint64_t(s.groups[start + i]);
      totals[i] = s.totals[s.groups[start + i]];
    }
    const f8 arrival = totals / noise_lanes(key, ids);
    for (int64_t i = 0; i < n; i++)
      if (arrival[i] > best) {
        best = arrival[i];
        winner = s.groups[start + i];
      }
  }
  return winner;
}

int64_t winning_token(const float* weights, int64_t group, uint64_t key) {
  int64_t winner = 0;
  float best = -1.0f;
  for (int64_t i = 0; i < GROUP; i += HALF) {
    const u8 ids = u8{0, 1, 2, 3, 4, 5, 6, 7} + uint64_t(group * GROUP + i);
    const f8 arrival = *(const f8_mem*)(weights + i) / noise_lanes(key, ids);
    for (int lane = 0; lane < HALF; lane++)
      if (arrival[lane] > best) {
        best = arrival[lane];
        winner = i + lane;
      }
  }
  return group * GROUP + winner;
}

// Draws one token; false where there is none to draw.
bool draw(const float* row, int64_t size, uint64_t key, float inverse, const Cuts& cuts, Scratch& s, int64_t* token) {
  bool is_number;
  const float top = highest(row, size, &is_number);
  if (!is_number || !std::isfinite(top)) return false;
  const int64_t num_groups = (size + GROUP - 1) / GROUP;
  const Weigher weigher{row, size, top, inverse};
  s.fit(num_groups);
  s.groups.clear();
  alignas(64) float group[GROUP];
  if (cuts.any()) {
    weigh(weigher, s, num_groups);
    cut(s, num_groups, threshold(s, num_groups, cuts));
  } else {
    for (int64_t g = 0; g < num_groups; g++) {
      weigher.group(g, group);
      s.totals[g] = group_sum(group);
      if (s.totals[g] > 0) s.groups.push_back(g);
    }
  }
  const int64_t winner = winning_group(s, key);
  if (!cuts.any()) weigher.group(winner, group);
  *token = winning_token(cuts.any() ? s.weights.data() + winner * GROUP : group, winner, key);
  return true;
}

}  // namespace

extern "C" {

// Makes what a bitmask forbids -inf. bitmask: [num_rows, words], bit i of word w allows token 32 w + i.
void pd_mask(float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint32_t* bitmask,
             int64_t words) {
  for (int64_t r = 0; r < num_rows; r++) {
    float* row = logits + rows[r] * vocab;
    const uint32_t* allowed = bitmask + r * words;
    for (int64_t start = 0; start < vocab; start += 32) {
      const uint32_t word = allowed[start / 32];
      if (word == 0xffffffffu) continue;
      if (start + 32 <= vocab) {
        forbid(row + start, word & 0xffff);
        forbid(row + start + LANES, word >> LANES);
        continue;
      }
      for (int64_t i = start; i < vocab; i++) row[i] = word >> (i - start) & 1 ? row[i] : -INF;
    }
  }
}

// The first highest logit of each of `rows`, and whether it is a finite number in a row without NaN. Like pd_draw it
// writes tokens[row] and usable[row] of these rows only.
void pd_highest(const float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, int64_t* tokens,
                uint8_t* usable) {
  for (int64_t r = 0; r < num_rows; r++) {
    const float* row = logits + rows[r] * vocab;
    bool is_number;
    const float top = highest(row, vocab, &is_number);
    const bool is_usable = is_number && std::isfinite(top);
    usable[rows[r]] = is_usable;
    tokens[rows[r]] = is_usable ? first_of(row, vocab, top) : 0;
  }
}

// Draws a token of each of `rows`. Per row: key (random.row_keys), 1 / temperature, top_k, top_p, min_p.
void pd_draw(const float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint64_t* keys,
             const float* inverse_temperatures, const int64_t* top_k, const double* top_p, const float* min_p,
             int64_t* tokens, uint8_t* usable) {
  static thread_local Scratch scratch;
  for (int64_t r = 0; r < num_rows; r++) {
    int64_t token = 0;
    usable[rows[r]] = draw(logits + rows[r] * vocab, vocab, keys[r], inverse_temperatures[r],
                           {top_k[r], top_p[r], min_p[r]}, scratch, &token);
    tokens[rows[r]] = token;
  }
}

// Exp(1) noise of ids [0, count) for one key (tests).
void pd_noise(uint64_t key, uint64_t first_id, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += HALF) {
    const f8 v = noise_lanes(key, u8{0, 1, 2, 3, 4, 5, 6, 7} + first_id + uint64_t(i));
    for (int64_t lane = 0; lane < std::min<int64_t>(HALF, count - i); lane++) out[i + lane] = v[lane];
  }
}

}  // extern "C"
