// Sampling of logits rows in host memory: grammar mask, highest logit, draw. library.py declares the same signatures.
//
// A row's result depends on that row alone. A draw reads a row twice (highest logit, weights) and writes it nowhere but
// into a scratch row that stays in the core's own cache, and there only if something is to be cut off.
#include <array>
#include <utility>

#include "cuts.h"

using namespace pd;

namespace {

constexpr uint64_t FIRST_GROUP_ID = 1ULL << 32;  // race.FIRST_GROUP_ID

// The highest value; `is_number` is cleared where a lane is NaN.
float highest(const float* row, int64_t size, bool* is_number) {
  vf best[4] = {vf{} - INF, vf{} - INF, vf{} - INF, vf{} - INF};
  vi ordered = vi{} - 1;
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      const vf v = load(row + i + j * LANES);
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

// The values at p, -inf in lane i where bit i of `allowed` is not set; further bits mean nothing.
vf load_allowed(const float* p, uint32_t allowed) {
#if defined(__AVX512F__)
  return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(-INF), __mmask16(allowed), p);
#else
  const vi bit = {1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7};
  return ((vi{} + int32_t(allowed)) & bit) != 0 ? load(p) : vf{} - INF;
#endif
}

// Makes lane i -inf where bit i of `allowed` is not set.
void forbid(float* p, uint32_t allowed) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, __mmask16(~allowed), _mm512_set1_ps(-INF));
#else
  store(p, load_allowed(p, allowed));
#endif
}

// `highest` and `first_of` of what `allowed` has a bit for; the rest is not read.
float highest_allowed(const float* row, int64_t size, const uint32_t* allowed, bool* is_number) {
  vf best = vf{} - INF;
  vi ordered = vi{} - 1;
  int64_t start = 0;
  for (; start + 32 <= size; start += 32) {
    const uint32_t word = allowed[start / 32];
    if (!word) continue;
    for (int i = 0; i < 32; i += LANES) {
      const vf v = load_allowed(row + start + i, word >> i);
      best = larger(v, best);
      ordered &= v == v;
    }
  }
  float top = max_of(best);
  bool fine = true;
  for (int lane = 0; lane < LANES; lane++) fine &= ordered[lane] != 0;
  for (int64_t i = start; i < size; i++) {
    if (!(allowed[start / 32] >> (i - start) & 1)) continue;
    top = row[i] > top ? row[i] : top;
    fine &= row[i] == row[i];
  }
  *is_number = fine;
  return top;
}

int64_t first_allowed(const float* row, int64_t size, const uint32_t* allowed, float value) {
  const vf wanted = vf{} + value;
  int64_t start = 0;
  for (; start + 32 <= size; start += 32) {
    const uint32_t word = allowed[start / 32];
    if (!word) continue;
    for (int i = 0; i < 32; i += LANES)
      if (const uint32_t bits = at_least(load_allowed(row + start + i, word >> i), wanted))
        return start + i + __builtin_ctz(bits);
  }
  for (int64_t i = start; i < size; i++)
    if (allowed[start / 32] >> (i - start) & 1 && row[i] >= value) return i;
  return 0;
}

constexpr int COUNTED = LANES == 16 ? 12 : 6;  // values counted in one pass: each takes two registers

// Lane i of `counts` grows where lane i of x is above `value`.
vi counted(vi counts, vf x, vf value) {
#if defined(__AVX512F__)
  const __mmask16 above = _mm512_cmp_ps_mask((__m512)x, (__m512)value, _CMP_GT_OQ);
  return (vi)_mm512_mask_add_epi32((__m512i)counts, above, (__m512i)counts, _mm512_set1_epi32(1));
#else
  return counts - (x > value);
#endif
}

// How many of the row are above each of N values.
template <int N>
void count_above(const float* row, int64_t size, const float* values, int64_t* counts) {
  vf value[N];
  vi above[N];
  for (int v = 0; v < N; v++) {
    value[v] = vf{} + values[v];
    above[v] = vi{};
  }
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vf x = load(row + i);
#pragma GCC unroll 12
    for (int v = 0; v < N; v++) above[v] = counted(above[v], x, value[v]);
  }
  for (int v = 0; v < N; v++) {
    counts[v] = 0;
    for (int lane = 0; lane < LANES; lane++) counts[v] += above[v][lane];
    for (int64_t rest = i; rest < size; rest++) counts[v] += row[rest] > values[v];
  }
}

using CountFunction = void (*)(const float*, int64_t, const float*, int64_t*);
template <int... I>
constexpr std::array<CountFunction, sizeof...(I)> counts_of(std::integer_sequence<int, I...>) {
  return {&count_above<I + 1>...};
}

int64_t first_of(const float* row, int64_t size, float value) {
  const vf wanted = vf{} + value;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    if (const uint32_t bits = at_least(load(row + i), wanted)) return i + __builtin_ctz(bits);
  for (; i < size; i++)
    if (row[i] >= value) return i;
  return 0;
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
        for (int i = 0; i < 32; i += LANES) forbid(row + start + i, word >> i);
        continue;
      }
      for (int64_t i = start; i < vocab; i++) row[i] = word >> (i - start) & 1 ? row[i] : -INF;
    }
  }
}

// The first highest logit of each of `rows`, and whether it is a finite number in a row without NaN. Like pd_draw it
// writes tokens[row] and usable[row] of these rows only. Where mask_of[r] >= 0, only what that row of the bitmask allows
// counts; mask_of null: nothing is masked. known[row] (or known null) >= 0 is the first highest without a mask, which is
// a finite number in a row without NaN. Returns how many rows are not usable.
int64_t pd_highest(const float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint32_t* bitmask,
                   int64_t words, const int64_t* mask_of, const int64_t* known, int64_t* tokens, uint8_t* usable) {
  int64_t num_failed = 0;
  for (int64_t r = 0; r < num_rows; r++) {
    const float* row = logits + rows[r] * vocab;
    const uint32_t* allowed = mask_of && mask_of[r] >= 0 ? bitmask + mask_of[r] * words : nullptr;
    const int64_t best = known ? known[rows[r]] : -1;
    if (best >= 0 && (!allowed || allowed[best / 32] >> (best % 32) & 1)) {  // the first of all is the first of some
      usable[rows[r]] = true;
      tokens[rows[r]] = best;
      continue;
    }
    bool is_number;
    const float top = allowed ? highest_allowed(row, vocab, allowed, &is_number) : highest(row, vocab, &is_number);
    const bool is_usable = is_number && std::isfinite(top);
    num_failed += !is_usable;
    usable[rows[r]] = is_usable;
    tokens[rows[r]] = !is_usable ? 0 : allowed ? first_allowed(row, vocab, allowed, top) : first_of(row, vocab, top);
  }
  return num_failed;
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

// Log of the sum of exponentials of each row; NaN where the row's highest score is no finite number.
void pd_log_normaliser(const float* scores, int64_t vocab, int64_t num_rows, float* out) {
  alignas(64) float group[GROUP];
  for (int64_t r = 0; r < num_rows; r++) {
    const float* row = scores + r * vocab;
    bool is_number;
    const float top = highest(row, vocab, &is_number);
    const Weigher weigher{row, vocab, top, 1.0f};
    double total = 0;
    for (int64_t g = 0; g * GROUP < vocab; g++) {
      weigher.group(g, group);
      total += group_sum(group);
    }
    out[r] = is_number && std::isfinite(top) ? float(std::log(total) + top) : std::nanf("");
  }
}

// How many scores of each row are above each of its `per_row` values; counts: [num_rows, per_row].
void pd_count_above(const float* scores, int64_t vocab, int64_t num_rows, const float* values, int64_t per_row,
                    int64_t* counts) {
  static constexpr auto table = counts_of(std::make_integer_sequence<int, COUNTED>{});
  const int64_t passes = (per_row + COUNTED - 1) / COUNTED;
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t first = per_row * pass / passes, end = per_row * (pass + 1) / passes;
      table[end - first - 1](scores + r * vocab, vocab, values + r * per_row + first, counts + r * per_row + first);
    }
}

// exp of count values, none above 0 (tests).
void pd_exp(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = exp_lanes(vf{} + x[i])[0];
}

// Exp(1) noise of ids [0, count) for one key (tests).
void pd_noise(uint64_t key, uint64_t first_id, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += HALF) {
    const f8 v = noise_lanes(key, u8{0, 1, 2, 3, 4, 5, 6, 7} + first_id + uint64_t(i));
    for (int64_t lane = 0; lane < std::min<int64_t>(HALF, count - i); lane++) out[i + lane] = v[lane];
  }
}

}  // extern "C"
