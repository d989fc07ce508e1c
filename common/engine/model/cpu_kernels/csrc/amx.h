// C[M, N] (+)= A[M, K] W[N, K]^T on the tile unit (AMX) for bfloat16 weights.
//
// Activations go in rounded to bfloat16, products are exact, sums are float32. Every output takes 32 k after 32 k in
// order, whatever M is: the same bits in any batch, as in gemm.h (but not the bits of gemm.h, which does not round
// activations: a machine computes bfloat16 either here or there).
//
//   tile of activations [16 rows][32 k]     tile of weights [16 pairs of k][16 columns][2]     sums [16][16] float
#pragma once
#include "gemm.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define PD_AMX 1
#else
#define PD_AMX 0
#endif

namespace pd {

#if PD_AMX

constexpr int TILE_ROWS = 16;
constexpr int64_t ROWS_BYTES = TILE_ROWS * GROUP * 2;  // 16 rows and 32 k

// Asks the kernel for the tile registers; once per process.
inline bool has_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return granted;
}

// While it lives, this thread's tile registers are eight tiles of 16 rows of 64 bytes; afterwards the unit is off.
class TileScope {
 public:
  TileScope() {
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    _tile_loadconfig(&configuration);
  }
  ~TileScope() { _tile_release(); }
};

// Rows [0, rows) of a as tiles: [K / 32][16][32]; absent rows are 0.
static inline void round_rows(const float* a, int64_t lda, int64_t rows, int64_t k_end, char* out) {
  for (int64_t r = 0; r < TILE_ROWS; r++) {
    char* to = out + r * GROUP * 2;
    for (int64_t k = 0; k < k_end; k += GROUP, to += ROWS_BYTES) {
      __m512 first = _mm512_setzero_ps(), second = first;
      if (r < rows) {
        first = _mm512_loadu_ps(a + r * lda + k);
        second = _mm512_loadu_ps(a + r * lda + k + 16);
      }
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
  }
}

// One tile of rows times a part of one panel (two tiles of columns), added to sums [16][NR] unless this is the first.
static inline void one_tile(const char* a, const char* w, int64_t k_end, float* sums, bool is_first) {
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, sums, NR * 4);
    _tile_loadd(1, sums + 16, NR * 4);
  }
  for (int64_t g = 0; g < k_end / GROUP; g++, a += ROWS_BYTES, w += 2048) {
    for (int line = 0; line < 2048; line += 64) __builtin_prefetch(w + 2048 + line);
    _tile_loadd(4, w, 64);
    _tile_loadd(5, w + 1024, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
  }
  _tile_stored(0, sums, NR * 4);
  _tile_stored(1, sums + 16, NR * 4);
}

// Two tiles of rows (the second `a_bytes` behind the first) at once: each weight is used twice. next: the weights that
// the call after this one takes.
static inline void two_tiles(const char* a, int64_t a_bytes, const char* w, int64_t k_end, float* sums, bool is_first,
                             const char* next) {
  const char* b = a + a_bytes;
  float* lower = sums + TILE_ROWS * NR;
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, NR * 4);
    _tile_loadd(1, sums + 16, NR * 4);
    _tile_loadd(2, lower, NR * 4);
    _tile_loadd(3, lower + 16, NR * 4);
  }
  for (int64_t g = 0; g < k_end / GROUP; g++, a += ROWS_BYTES, b += ROWS_BYTES, w += 2048, next += 2048) {
    for (int line = 0; line < 2048; line += 64) __builtin_prefetch(next + line, 0, 2);
    _tile_loadd(4, w, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(5, w + 1024, 64);
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(0, sums, NR * 4);
  _tile_stored(1, sums + 16, NR * 4);
  _tile_stored(2, lower, NR * 4);
  _tile_stored(3, lower + 16, NR * 4);
}

constexpr int64_t TILE_K = 288;            // k values of two row tiles that stay in the L1 cache while panels pass by
constexpr int64_t MOST_PANELS = 16;        // panels a task takes
constexpr int64_t PANELS_BYTES = 1 << 19;  // of which no more than this: they stay in the L2 cache while rows pass by

static inline void write_tiles(const Packed& w, int64_t panel, const float* sums, const Target& out, int64_t row,
                               int64_t count) {
  for (int64_t i = 0; i < count; i++)
    write_panel(w, panel, load(sums + i * NR), load(sums + i * NR + VL), out, row + i);
}

// All rows times panels [first, last).
static inline void rows_times_panels(const Packed& w, int64_t first, int64_t last, const char* rows, int64_t m,
                                     const Target& out) {
  const int64_t tile_bytes = w.k / GROUP * ROWS_BYTES, stride = panel_bytes(BF16_TILES, w.k);
  alignas(64) float sums[MOST_PANELS][2 * TILE_ROWS * NR];
  TileScope scope;
  for (int64_t row = 0; row < m; row += 2 * TILE_ROWS) {
    const char* a = rows + row / TILE_ROWS * tile_bytes;
    const int64_t count = std::min<int64_t>(m - row, 2 * TILE_ROWS);
    for (int64_t k = 0; k < w.k; k += TILE_K) {
      const int64_t length = std::min(TILE_K, w.k - k);
      const char *of_a = a + k / GROUP * ROWS_BYTES, *part = w.data + first * stride + panel_bytes(BF16_TILES, k);
      const char* next_k = w.data + first * stride + (k + length < w.k ? panel_bytes(BF16_TILES, k + length) : 0);
      for (int64_t panel = first; panel < last; panel++, part += stride) {
        const char* next = panel + 1 < last ? part + stride : next_k;
        if (count > TILE_ROWS)
          two_tiles(of_a, tile_bytes, part, length, sums[panel - first], k == 0, next);
        else
          one_tile(of_a, part, length, sums[panel - first], k == 0);
      }
    }
    for (int64_t panel = first; panel < last; panel++) write_tiles(w, panel, sums[panel - first], out, row, count);
  }
}

static inline void gemm_tiles(Pool& pool, GemmScratch& scratch, const Packed& w, const float* a, int64_t lda, int64_t m,
                              const Target& out) {
  const int64_t num_tiles = (m + TILE_ROWS - 1) / TILE_ROWS, tile_bytes = w.k / GROUP * ROWS_BYTES;
  const int64_t num_panels = w.num_panels();
  scratch.interleaved.need(num_tiles * tile_bytes / 4);
  char* rows = (char*)scratch.interleaved.data();
  pool.run(int(num_tiles), [&](int t, int) {
    const int64_t row = int64_t(t) * TILE_ROWS;
    round_rows(a + row * lda, lda, std::min<int64_t>(TILE_ROWS, m - row), w.k, rows + t * tile_bytes);
  });
  const int64_t fit = std::min(MOST_PANELS, PANELS_BYTES / panel_bytes(BF16_TILES, w.k));
  const int64_t per_task = std::max<int64_t>(1, std::min(fit, num_panels / (pool.size() * 4)));
  pool.run(int((num_panels + per_task - 1) / per_task), [&](int task, int) {
    const int64_t first = task * per_task, last = std::min(num_panels, first + per_task);
    rows_times_panels(w, first, last, rows, m, out);
  });
}

#else

inline bool has_tiles() { return false; }
static inline void gemm_tiles(Pool&, GemmScratch&, const Packed&, const float*, int64_t, int64_t, const Target&) {}

#endif

// C (+)= A W^T in whatever way fits the format and the number of rows.
static inline void multiply_rows(Pool& pool, GemmScratch& scratch, const Packed& w, const float* a, int64_t lda,
                                 int64_t m, const Target& out) {
  if (w.format == BF16_TILES)
    gemm_tiles(pool, scratch, w, a, lda, m, out);
  else
    gemm(pool, scratch, w, a, lda, m, out);
}

}  // namespace pd
