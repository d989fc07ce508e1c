// Attention of few query rows (decode) over one tile of keys, straight from the cache: nothing is copied.
//
// K is turned in registers, VL tokens by VL dwords at a time, V is used as it lies. Each score takes head_dim in order
// and each output takes tokens in order, one FMA each: the bits of the path for many rows. Meanwhile the lines of
// another tile are asked for: a step is a read of the cache, and a core must not wait for it.
#pragma once
#include <array>
#include <utility>

#include "simd.h"

namespace pd {

constexpr int TILE = 32;     // keys per tile
constexpr int FEW_ROWS = 8;  // query rows that are attended this way

// out[i][t] = the dword i behind rows[t] + offset, for VL rows and VL dwords.
static inline __attribute__((always_inline)) void transpose_dwords(const char* const* rows, int64_t offset, vf* out) {
#if defined(__AVX512F__)
  const auto four = [&](int row, int at) __attribute__((always_inline)) {
    return _mm_loadu_ps((const float*)(rows[row] + offset) + at);
  };
  using wide = __m512;
#define PD_LANES(r, at)                                                                                   \
  _mm512_insertf32x4(_mm512_insertf32x4(_mm512_insertf32x4(_mm512_castps128_ps512(four(r, at)), four(r + 4, at), 1), \
                                        four(r + 8, at), 2),                                              \
                     four(r + 12, at), 3)
#define PD_OP(name) _mm512_##name
#else
  const auto four = [&](int row, int at) __attribute__((always_inline)) {
    return _mm_loadu_ps((const float*)(rows[row] + offset) + at);
  };
  using wide = __m256;
#define PD_LANES(r, at) _mm256_insertf128_ps(_mm256_castps128_ps256(four(r, at)), four(r + 4, at), 1)
#define PD_OP(name) _mm256_##name
#endif
#pragma GCC unroll 4
  for (int at = 0; at < VL; at += 4) {
    const wide a = PD_LANES(0, at), b = PD_LANES(1, at), c = PD_LANES(2, at), d = PD_LANES(3, at);
    const wide ab_low = PD_OP(unpacklo_ps)(a, b), ab_high = PD_OP(unpackhi_ps)(a, b);
    const wide cd_low = PD_OP(unpacklo_ps)(c, d), cd_high = PD_OP(unpackhi_ps)(c, d);
    out[at] = (vf)PD_OP(shuffle_ps)(ab_low, cd_low, 0x44);
    out[at + 1] = (vf)PD_OP(shuffle_ps)(ab_low, cd_low, 0xee);
    out[at + 2] = (vf)PD_OP(shuffle_ps)(ab_high, cd_high, 0x44);
    out[at + 3] = (vf)PD_OP(shuffle_ps)(ab_high, cd_high, 0xee);
  }
#undef PD_LANES
#undef PD_OP
}

// Rows that K and V of a tile's tokens begin at (`offset` behind each pointer), and those of the tile to ask for.
struct TileRows {
  const char *const *now, *const *next;
  int64_t offset;
};

// scores[R][TILE] = q[R][dim] K^T.
template <bool IS_BF16, int R>
static void few_scores(const float* q, int dim, const TileRows& rows, float* scores) {
  constexpr int STEP = IS_BF16 ? 2 * VL : VL, STEP_BYTES = VL * 4;
  for (int first = 0; first < TILE; first += VL) {
    vf acc[R] = {};
    int64_t offset = rows.offset;
    for (int d = 0; d < dim; d += STEP, offset += STEP_BYTES) {
      vf keys[VL];
      transpose_dwords(rows.now + first, offset, keys);
      if (STEP_BYTES == 64 || d * (IS_BF16 ? 2 : 4) % 64 == 0)
        for (int t = 0; t < VL; t++) __builtin_prefetch(rows.next[first + t] + offset, 0, 2);
#pragma GCC unroll 16
      for (int i = 0; i < VL; i++) {
        if constexpr (IS_BF16) {
          const vf low = (vf)((vi)keys[i] << 16), high = (vf)((vi)keys[i] & int32_t(0xffff0000));
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) acc[r] += splat(q[r * dim + d + 2 * i]) * low;
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) acc[r] += splat(q[r * dim + d + 2 * i + 1]) * high;
        } else {
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) acc[r] += splat(q[r * dim + d + i]) * keys[i];
        }
      }
    }
    for (int r = 0; r < R; r++) store(scores + r * TILE + first, acc[r]);
  }
}

template <bool IS_BF16, int R, int C>
static inline void few_columns(const float* p, int count, int64_t d, const TileRows& rows, float* out, int64_t ldo) {
  constexpr int ELEMENT = IS_BF16 ? 2 : 4;
  const int64_t offset = rows.offset + d * ELEMENT;
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(out + r * ldo + d + c * VL);
  for (int t = 0; t < count; t++) {
    for (int line = 0; line < C * VL * ELEMENT; line += 64) __builtin_prefetch(rows.next[t] + offset + line, 0, 2);
    const char* values = rows.now[t] + offset;
    vf v[C];
    for (int c = 0; c < C; c++)
      v[c] = IS_BF16 ? load_bf16((const uint16_t*)values + c * VL) : load((const float*)values + c * VL);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf x = splat(p[r * TILE + t]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] += x * v[c];
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * ldo + d + c * VL, acc[r][c]);
}

// out[R][dim] += p[R][TILE] V over the first `count` tokens.
template <bool IS_BF16, int R>
static void few_values(const float* p, int count, int dim, const TileRows& rows, float* out, int64_t ldo) {
  constexpr int C = R * 4 <= MAX_ACCUMULATORS - 4 || R * 4 == 12 ? 4 : R * 2 <= MAX_ACCUMULATORS ? 2 : 1;
  int64_t d = 0;
  for (; d + C * VL <= dim; d += C * VL) few_columns<IS_BF16, R, C>(p, count, d, rows, out, ldo);
  for (; d < dim; d += VL) few_columns<IS_BF16, R, 1>(p, count, d, rows, out, ldo);
}

using ScoresFunction = void (*)(const float*, int, const TileRows&, float*);
using ValuesFunction = void (*)(const float*, int, int, const TileRows&, float*, int64_t);
struct FewFunctions {
  ScoresFunction scores;
  ValuesFunction values;
};

template <bool IS_BF16, int... I>
constexpr std::array<FewFunctions, sizeof...(I)> few_functions(std::integer_sequence<int, I...>) {
  return {FewFunctions{&few_scores<IS_BF16, I + 1>, &few_values<IS_BF16, I + 1>}...};
}

// The functions for so many rows, or null where they do not fit the shape.
static inline const FewFunctions* few_functions_for(int rows, int dim, bool is_bf16) {
  using Rows = std::make_integer_sequence<int, FEW_ROWS>;
  static constexpr auto floats = few_functions<false>(Rows{}), halves = few_functions<true>(Rows{});
  if (rows > FEW_ROWS || dim % (is_bf16 ? 2 * VL : VL)) return nullptr;
  return is_bf16 ? &halves[rows - 1] : &floats[rows - 1];
}

}  // namespace pd
