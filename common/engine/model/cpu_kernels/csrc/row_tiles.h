// Rows of a product as the tile unit (AMX) takes them: 16 rows x 32 k of bfloat16 a tile, [rows / 16][K / 32][tiles].
//
// ROUNDED (bfloat16 weights): one tile, each value rounded.
// SPLIT (quantised weights): two tiles whose sum is each value to 2^-17 of it (x = high + low, each rounded to 8 bits),
// row by row, [rows][high, low][16 k][k, k + 16], and behind them the sums over the first and the last 16 of the 32 k,
// [2][16 rows] float. Up to 8 rows are one tile of that many rows.
//
// What stands for rows that do not exist meets no other row.
#pragma once
#include "ops.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define PD_AMX 1
#else
#define PD_AMX 0
#endif

namespace pd {

enum class Rows : int32_t { PLAIN = 0, ROUNDED = 1, SPLIT = 2 };

inline Rows rows_for(int32_t format) {
  return format == BF16_TILES ? Rows::ROUNDED : is_quantised_tiles(format) ? Rows::SPLIT : Rows::PLAIN;
}

constexpr int TILE_ROWS = 16;
constexpr int TERMS = 2;  // of a split value
constexpr int FEW_TILE_ROWS = TILE_ROWS / TERMS;  // so many rows or fewer are one split tile that has no others
constexpr int64_t TILE_BYTES = TILE_ROWS * GROUP * 2;
constexpr int64_t TERM_BYTES = GROUP * 2, SPLIT_ROW_BYTES = TERMS * TERM_BYTES, SUMS_BYTES = 2 * TILE_ROWS * 4;
constexpr int64_t split_bytes(int rows) { return rows * SPLIT_ROW_BYTES + SUMS_BYTES; }
constexpr int64_t SPLIT_BYTES = split_bytes(TILE_ROWS);

inline int64_t row_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
// Most bytes that rows of width k take.
inline int64_t row_tiles_bytes(Rows kind, int64_t rows, int64_t k) {
  const int64_t tile = kind == Rows::SPLIT ? SPLIT_BYTES : kind == Rows::ROUNDED ? TILE_BYTES : 0;
  return row_tiles(rows) * (k / GROUP) * tile;
}

#if PD_AMX

// Asks the kernel for the tile registers; once per process.
inline bool has_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return granted;
}

// While it lives, this thread's tile registers 0 to 6 have so many rows of 64 bytes and register 7 has 16; afterwards
// the unit is off.
class TileScope {
 public:
  explicit TileScope(int rows = TILE_ROWS) {
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } configuration;
    for (int i = 0; i < 8; i++) configuration.rows[i] = uint8_t(i < 7 ? rows : TILE_ROWS);
    asm volatile("ldtilecfg %0" ::"m"(configuration));
  }
  ~TileScope() { _tile_release(); }
};

// The unit's instructions by number of register (those of the compiler take no template arguments, and do not tell it
// that a load reads memory).
template <int T>
static inline __attribute__((always_inline)) void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
static inline __attribute__((always_inline)) void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
static inline __attribute__((always_inline)) void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// C += A B
template <int C, int A, int B>
static inline __attribute__((always_inline)) void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

static inline void round_32(vf first, vf second, char* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// Two bfloat16 of each of 16 floats: `high` the nearest, in the upper half of a lane, `low` what is left, likewise.
struct Split {
  __m512i high, low;
  explicit Split(vf x) {
    high = upper(x);
    low = upper(x - (vf)high);
  }
  vf sum() const { return (vf)high + (vf)low; }

 private:
  static __m512i upper(vf x) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
  }
};

// Terms of 16 values (half: 0 or 1) of a row to where they lie among its group's (k and k + 16 are side by side), and
// their sum.
static inline void split_16(vf x, int half, char* to, float* sum) {
  const Split split(x);
  *sum = sum16(split.sum());
  if (half) {
    _mm512_mask_storeu_epi16(to, 0xaaaaaaaa, split.high);
    _mm512_mask_storeu_epi16(to + TERM_BYTES, 0xaaaaaaaa, split.low);
  } else {
    _mm512_mask_storeu_epi16(to, 0x55555555, _mm512_srli_epi32(split.high, 16));
    _mm512_mask_storeu_epi16(to + TERM_BYTES, 0x55555555, _mm512_srli_epi32(split.low, 16));
  }
}

// A group of a row: its terms and, TILE_ROWS floats apart, its two sums.
static inline void split_32(vf first, vf second, char* to, float* sums) {
  const Split one(first), two(second);
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(one.high, 16), two.high));
  _mm512_storeu_si512(to + TERM_BYTES, _mm512_or_si512(_mm512_srli_epi32(one.low, 16), two.low));
  // Both sums at once, each as `sum16` adds.
  const __m512 left = (__m512)one.sum(), right = (__m512)two.sum();
  vf sum = (vf)_mm512_shuffle_f32x4(left, right, 0x44) + (vf)_mm512_shuffle_f32x4(left, right, 0xee);
  sum += (vf)_mm512_shuffle_f32x4((__m512)sum, (__m512)sum, 0xb1);
  sum += (vf)_mm512_permute_ps((__m512)sum, 0x4e);
  sum += (vf)_mm512_permute_ps((__m512)sum, 0xb1);
  sums[0] = sum[0];
  sums[TILE_ROWS] = sum[8];
}

// `rows` rows of `k_end` values as tiles; or none (PLAIN).
struct RowTiles {
  Rows kind = Rows::PLAIN;
  int32_t height = TILE_ROWS;  // rows of a tile
  char* data = nullptr;
  int64_t k_end = 0;

  RowTiles() = default;
  RowTiles(Rows kind, char* data, int64_t k_end, int64_t rows)
      : kind(kind), height(kind == Rows::SPLIT && rows <= FEW_TILE_ROWS ? int32_t(rows) : TILE_ROWS), data(data),
        k_end(k_end) {}

  explicit operator bool() const { return data != nullptr; }
  int64_t group_bytes() const { return kind == Rows::SPLIT ? split_bytes(height) : TILE_BYTES; }
  // Of the tile that `row` is in: what group `group` of 32 k is.
  char* group(int64_t row, int64_t group) const {
    return data + (row / height * (k_end / GROUP) + group) * group_bytes();
  }
  void put(int64_t row, int64_t group_index, vf first, vf second) const {
    const int64_t in_tile = row % height;
    char* to = group(row, group_index);
    if (kind == Rows::SPLIT)
      split_32(first, second, to + in_tile * SPLIT_ROW_BYTES, sums_of(to) + in_tile);
    else
      round_32(first, second, to + in_tile * (GROUP * 2));
  }
  // 16 values from column `column` on, a multiple of 16.
  void put_half(int64_t row, int64_t column, vf x) const {
    const int64_t in_tile = row % height, half = column / 16 % 2;
    char* to = group(row, column / GROUP);
    if (kind == Rows::SPLIT) {
      split_16(x, int(half), to + in_tile * SPLIT_ROW_BYTES, sums_of(to) + half * TILE_ROWS + in_tile);
    } else {
      _mm256_storeu_si256((__m256i*)(to + in_tile * (GROUP * 2) + half * 32), (__m256i)_mm512_cvtneps_pbh((__m512)x));
    }
  }
  float* sums_of(char* group) const { return (float*)(group + height * SPLIT_ROW_BYTES); }
  // `count` values (a multiple of 32) from column `column` on.
  void put_row(int64_t row, int64_t column, const float* values, int64_t count) const {
    for (int64_t k = 0; k < count; k += GROUP)
      put(row, (column + k) / GROUP, load(values + k), load(values + k + VL));
  }
  // `rms_norm` of one row.
  void put_normed(int64_t row, const float* x, const float* weight, float eps) const {
    const float scale = rms_scale(x, k_end, eps);
    for (int64_t k = 0; k < k_end; k += GROUP)
      put(row, k / GROUP, load(x + k) * scale * load(weight + k), load(x + k + VL) * scale * load(weight + k + VL));
  }
};

#else

inline bool has_tiles() { return false; }

struct RowTiles {
  Rows kind = Rows::PLAIN;
  int32_t height = TILE_ROWS;
  char* data = nullptr;
  int64_t k_end = 0;
  RowTiles() = default;
  RowTiles(Rows, char*, int64_t, int64_t) {}
  explicit operator bool() const { return false; }
  void put_row(int64_t, int64_t, const float*, int64_t) const {}
  void put_normed(int64_t, const float*, const float*, float) const {}
};

#endif

}  // namespace pd
