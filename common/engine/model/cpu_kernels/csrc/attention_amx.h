// Attention over a bfloat16 cache on the tile unit (AMX): queries and probabilities go in rounded to bfloat16.
//
//   scores^T [16 tokens][16 rows] = K [16 tokens][32 dims] (as it lies) x queries [16 pairs of dims][16 rows][2]
//   softmax over tokens, a query row a lane
//   out [16 rows][16 dims] = probabilities [16 rows][32 tokens] x V [16 pairs of tokens][16 dims][2]
//
// A row's lane meets nothing of other rows: its bits do not depend on who shares the tile. Few rows (decode) and many
// (prefill) go this same way.
#pragma once
#include "amx.h"
#include "attention_few.h"

namespace pd {

// One KV head of a task, and one tile of its keys.
struct TileAttention {
  int dim, group, num_rows;  // query heads per KV head; rows: queries x group, query-major
  int count;                 // tokens of the tile that exist
  int first_end;             // of the first query: keys [0, first_end) of the tile are seen
  int window;                // 0: all
  const char* const* keys;   // K of each token, `offset` behind each pointer; V `value_offset` behind that
  const char* const* next;   // of the tile to ask for
  int64_t offset, value_offset, token_bytes;
};

#if PD_AMX

constexpr int LANES = 16;  // rows of a tile of scores
constexpr int64_t TILE_FLOATS = 256;

inline int64_t row_groups(int num_rows) { return (num_rows + LANES - 1) / LANES; }
// Floats that the queries of one KV head take as tiles.
inline int64_t query_tile_floats(int num_rows, int dim) { return row_groups(num_rows) * (dim / 32) * TILE_FLOATS; }
constexpr int64_t GROUP_FLOATS = 3 * TILE_FLOATS + LANES;  // of 16 rows: scores, probabilities by row, their rescale
// Floats of scratch: V as tiles, products, what each 16 rows keep.
inline int64_t tile_scratch_floats(int num_rows, int dim) {
  return TILE * dim / 2 + LANES * dim + row_groups(num_rows) * GROUP_FLOATS;
}

// Queries float [num_rows][dim] -> [groups of 16 rows][dim / 32][16 pairs of dims][16 rows][2].
static inline void queries_to_tiles(const float* q, int num_rows, int dim, float* out) {
  alignas(64) float rounded[LANES][16];
  const char* rows[LANES];
  for (int r = 0; r < LANES; r++) rows[r] = (const char*)rounded[r];
  for (int first = 0; first < num_rows; first += LANES)
    for (int d = 0; d < dim; d += 32, out += TILE_FLOATS) {
      for (int r = 0; r < LANES; r++) {
        __m512 low = _mm512_setzero_ps(), high = low;
        if (first + r < num_rows) {
          low = _mm512_loadu_ps(q + (first + r) * dim + d);
          high = _mm512_loadu_ps(q + (first + r) * dim + d + 16);
        }
        _mm512_store_si512(rounded[r], (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      vf turned[VL];
      transpose_dwords(rows, 0, turned);
      for (int pair = 0; pair < 16; pair++) store(out + pair * 16, turned[pair]);
    }
}

// V of the tile -> [dim / 16][16 pairs of tokens][16 dims][2]; two tiles share 32 dims, in the order of unpack.
// Tokens that do not exist are 0. Meanwhile asks for the next tile's.
static inline void values_to_tiles(const TileAttention& a, float* out) {
  const int64_t offset = a.offset + a.value_offset;
  for (int t = 0; t < TILE; t += 2)
    for (int d = 0; d < a.dim; d += 32) {
      const int64_t at = d * 2;
      for (int i = t; i < t + 2; i++) __builtin_prefetch(a.next[i] + offset + at, 0, 2);
      const __m512i zero = _mm512_setzero_si512();
      const __m512i even = t < a.count ? _mm512_loadu_si512(a.keys[t] + offset + at) : zero;
      const __m512i odd = t + 1 < a.count ? _mm512_loadu_si512(a.keys[t + 1] + offset + at) : zero;
      float* to = out + d / 16 * TILE_FLOATS + t / 2 * 16;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
      _mm512_storeu_si512(to + TILE_FLOATS, _mm512_unpackhi_epi16(even, odd));
    }
}

// scores[32 tokens][16 rows]; tokens 16.. are only touched where they exist.
static inline void tile_scores(const TileAttention& a, const float* queries, float* scores) {
  const bool both = a.count > LANES;
  _tile_zero(0);
  _tile_zero(1);
  for (int d = 0; d < a.dim; d += 32, queries += TILE_FLOATS) {
    _tile_loadd(6, queries, 64);
    _tile_loadd(4, a.keys[0] + a.offset + d * 2, a.token_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (!both) continue;
    _tile_loadd(5, a.keys[LANES] + a.offset + d * 2, a.token_bytes);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, scores, 64);
  if (both) _tile_stored(1, scores + TILE_FLOATS, 64);
}

// exp(x) for x <= 0 to 4e-5, which rounding to bfloat16 (4e-3) hides: 2^n * 2^r with a degree-4 Taylor polynomial.
static inline __m512 exp_coarse(__m512 x) {
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(scaled, 8), r = _mm512_sub_ps(scaled, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(9.618129e-3f), r, _mm512_set1_ps(5.550411e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24022651f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69314718f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), n);
}

static inline __m512i bf16_lanes(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

// Which of the tile's tokens each of 16 rows from row `first` on sees.
struct Seen {
  __m512i begin, end;
  Seen(const TileAttention& a, int first) {
    alignas(64) int32_t begins[LANES], ends[LANES];
    for (int r = 0; r < LANES; r++) {
      ends[r] = std::min(a.first_end + (first + r) / a.group, a.count);
      begins[r] = a.window ? a.first_end + (first + r) / a.group - a.window : 0;
    }
    begin = _mm512_load_si512(begins), end = _mm512_load_si512(ends);
  }
  bool all() const {
    return !_mm512_cmplt_epi32_mask(end, _mm512_set1_epi32(TILE)) && !_mm512_cmpgt_epi32_mask(begin, _mm512_setzero_si512());
  }
  __mmask16 token(int t) const {
    const __m512i at = _mm512_set1_epi32(t);
    return _mm512_cmplt_epi32_mask(at, end) & _mm512_cmpge_epi32_mask(at, begin);
  }
};

// The highest of each row's scores [32 tokens][16 rows] and `before`.
template <bool ALL>
static inline __m512 tile_peak(const Seen& seen, const float* scores, __m512 before) {
  __m512 peaks[4] = {before, before, before, before};
#pragma GCC unroll 32
  for (int t = 0; t < TILE; t++) {
    const __m512 score = _mm512_load_ps(scores + t * LANES);
    peaks[t % 4] = ALL ? _mm512_max_ps(peaks[t % 4], score)
                       : _mm512_mask_max_ps(peaks[t % 4], seen.token(t), peaks[t % 4], score);
  }
  return _mm512_max_ps(_mm512_max_ps(peaks[0], peaks[1]), _mm512_max_ps(peaks[2], peaks[3]));
}

// Scores become probabilities bfloat16, pairs of tokens [16][16 rows][2], in place; their sum onto `total`.
template <bool ALL>
static inline __m512 tile_exponentials(const TileAttention& a, const Seen& seen, bool asks_for_next, float* scores,
                                       __m512 anchor, __m512 total) {
  for (int t = 0; t < TILE; t += 2) {
    __m512 p[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      p[i] = exp_coarse(_mm512_sub_ps(_mm512_load_ps(scores + (t + i) * LANES), anchor));
      if (!ALL) p[i] = _mm512_maskz_mov_ps(seen.token(t + i), p[i]);
      total = _mm512_add_ps(total, p[i]);
      if (asks_for_next)
        for (int at = 0; at < a.dim * 2; at += 64) __builtin_prefetch(a.next[t + i] + a.offset + at, 0, 2);
    }
    // Pair t / 2 takes the place of scores that have been read.
    _mm512_store_si512(scores + t / 2 * LANES, _mm512_or_si512(bf16_lanes(p[0]), _mm512_slli_epi32(bf16_lanes(p[1]), 16)));
  }
  return total;
}

// Softmax of 16 rows from row `first` on: scores [32 tokens][16 rows] -> probabilities bfloat16 [16 rows][32 tokens] in
// `turned`. Updates max and the first lane of sum [16]; returns what the rows' outputs so far are multiplied by.
static inline __m512 tile_softmax(const TileAttention& a, int first, float* scores, float* turned, float* max,
                                  float* sum) {
  const int rows = std::min(LANES, a.num_rows - first);
  const __mmask16 exist = __mmask16((1u << rows) - 1);
  const Seen seen(a, first);
  const bool all = seen.all();
  const __m512 absent = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512 before = _mm512_mask_loadu_ps(absent, exist, max);
  const __m512 peak = all ? tile_peak<true>(seen, scores, before) : tile_peak<false>(seen, scores, before);
  const __mmask16 any = _mm512_cmpneq_ps_mask(peak, absent), had = _mm512_cmpneq_ps_mask(before, absent);
  const __m512 anchor = _mm512_maskz_mov_ps(any, peak);
  const __m512 rescale = _mm512_maskz_mov_ps(had, (__m512)exp_v((vf)_mm512_sub_ps(before, anchor)));
  const __m512i lanes = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                           _mm512_set1_epi32(16));
  __m512 total = _mm512_mul_ps(_mm512_mask_i32gather_ps(_mm512_setzero_ps(), exist, lanes, sum, 4), rescale);
  total = all ? tile_exponentials<true>(a, seen, first == 0, scores, anchor, total)
              : tile_exponentials<false>(a, seen, first == 0, scores, anchor, total);
  const char* pairs[LANES];
  for (int pair = 0; pair < LANES; pair++) pairs[pair] = (const char*)(scores + pair * LANES);
  vf by_row[VL];
  transpose_dwords(pairs, 0, by_row);
  for (int r = 0; r < LANES; r++) store(turned + r * LANES, by_row[r]);
  _mm512_mask_storeu_ps(max, exist, peak);
  _mm512_mask_i32scatter_ps(sum, exist, lanes, total, 4);
  return rescale;
}

// out[rows][ldo] = out * rescale + probabilities x V.
static inline void tile_outputs(const TileAttention& a, int rows, const float* probabilities, const float* values,
                                const float* scale, float* products, float* out, int64_t ldo) {
  _tile_loadd(6, probabilities, 64);
  for (int c = 0; c < a.dim / 16; c += 2) {
    _tile_zero(2);
    _tile_loadd(7, values + c * TILE_FLOATS, 64);
    _tile_dpbf16ps(2, 6, 7);
    _tile_zero(3);
    _tile_loadd(5, values + (c + 1) * TILE_FLOATS, 64);
    _tile_dpbf16ps(3, 6, 5);
    _tile_stored(2, products + c * 16, a.dim * 4);
    _tile_stored(3, products + c * 16 + 16, a.dim * 4);
  }
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int r = 0; r < rows; r++) {
    const __m512 factor = _mm512_set1_ps(scale[r]);
    for (int d = 0; d < a.dim; d += 32) {
      const __m512 one = _mm512_loadu_ps(products + r * a.dim + d), two = _mm512_loadu_ps(products + r * a.dim + d + 16);
      float* to = out + r * ldo + d;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), factor, _mm512_permutex2var_ps(one, low, two)));
      to += 16;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), factor, _mm512_permutex2var_ps(one, high, two)));
    }
  }
}

// One tile of keys: updates max [rows], sum [rows][16] (its first lane) and out [rows][ldo]. The thread's tiles are on.
// Each stage goes over all rows before the next begins: what it waits for is then long done.
static inline void attend_on_tiles(const TileAttention& a, const float* queries, float* scratch, float* max, float* sum,
                                   float* out, int64_t ldo) {
  float *values = scratch, *products = values + TILE * a.dim / 2, *groups = products + LANES * a.dim;
  const auto of_group = [&](int first) { return groups + first / LANES * GROUP_FLOATS; };
  for (int first = 0; first < a.num_rows; first += LANES, queries += a.dim / 32 * TILE_FLOATS)
    tile_scores(a, queries, of_group(first));
  values_to_tiles(a, values);
  for (int first = 0; first < a.num_rows; first += LANES) {
    float* scores = of_group(first);
    const __m512 rescale = tile_softmax(a, first, scores, scores + 2 * TILE_FLOATS, max + first, sum + first * 16);
    _mm512_store_ps(scores + 3 * TILE_FLOATS, rescale);
  }
  for (int first = 0; first < a.num_rows; first += LANES) {
    const float* scores = of_group(first);
    tile_outputs(a, std::min(LANES, a.num_rows - first), scores + 2 * TILE_FLOATS, values, scores + 3 * TILE_FLOATS,
                 products, out + first * ldo, ldo);
  }
}

#else

class TileScope {};
inline int64_t query_tile_floats(int, int) { return 0; }
inline int64_t tile_scratch_floats(int, int) { return 0; }
static inline void queries_to_tiles(const float*, int, int, float*) {}
static inline void attend_on_tiles(const TileAttention&, const float*, float*, float*, float*, float*, int64_t) {}

#endif

}  // namespace pd
