// C[M, N] (+)= A[M, K] W[N, K]^T on the tile unit (AMX) for bfloat16 weights.
//
// Activations go in rounded to bfloat16, products are exact, sums are float32. Every output takes 32 k after 32 k in
// order, whatever M is: the same bits in any batch, as in gemm.h (but not the bits of gemm.h, which does not round
// activations: a machine computes bfloat16 either here or there).
//
//   tile of activations [16 rows][32 k]     tile of weights [16 pairs of k][16 columns][2]     sums [16][16] float
#pragma once
#include "gemm.h"
#include "ops.h"

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

// Tiles of rows lie as [rows / 16][K / 32][16][32]; what stands for rows that do not exist meets no other row.
inline int64_t row_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
inline int64_t row_tiles_bytes(int64_t rows, int64_t k) { return row_tiles(rows) * (k / GROUP) * ROWS_BYTES; }

// Where k = 0 of a row lies; the next 32 k are ROWS_BYTES behind.
static inline char* in_row_tiles(char* tiles, int64_t row, int64_t k_end) {
  return tiles + row / TILE_ROWS * (k_end / GROUP * ROWS_BYTES) + row % TILE_ROWS * (GROUP * 2);
}

static inline void round_32(vf first, vf second, char* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// One row into its place among tiles.
static inline void round_row(const float* a, int64_t k_end, char* to) {
  for (int64_t k = 0; k < k_end; k += GROUP, to += ROWS_BYTES) round_32(load(a + k), load(a + k + VL), to);
}

// `rms_norm` of one row, into its place among tiles.
static inline void norm_row(const float* x, const float* weight, int64_t n, float eps, char* to) {
  const float scale = rms_scale(x, n, eps);
  for (int64_t k = 0; k < n; k += GROUP, to += ROWS_BYTES)
    round_32(load(x + k) * scale * load(weight + k), load(x + k + VL) * scale * load(weight + k + VL), to);
}

constexpr int64_t STREAM_BYTES = 8192;  // how far ahead of its use a weight that is used once is asked for

// sums [16][NR] = one tile of rows times one panel (two tiles of columns).
static inline void one_tile(const char* a, const char* w, int64_t k_end, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t g = 0; g < k_end / GROUP; g++, a += ROWS_BYTES, w += 2048) {
    for (int line = 0; line < 2048; line += 64) __builtin_prefetch(w + STREAM_BYTES + line, 0, 2);
    _tile_loadd(4, w, 64);
    _tile_loadd(5, w + 1024, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
  }
  _tile_stored(0, sums, NR * 4);
  _tile_stored(1, sums + 16, NR * 4);
}

// sums [32][NR] = two tiles of rows (the second `a_bytes` behind the first) times one panel: each weight is used twice.
// STREAM: the weights are new to this core, ask for those of the next panel. (Asking for what is there already costs
// half of the unit's rate.)
template <bool STREAM>
static inline void two_tiles(const char* a, int64_t a_bytes, const char* w, int64_t k_end, float* sums) {
  const char *b = a + a_bytes, *next = w + panel_bytes(BF16_TILES, k_end);
  float* lower = sums + TILE_ROWS * NR;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t g = 0; g < k_end / GROUP; g++, a += ROWS_BYTES, b += ROWS_BYTES, w += 2048, next += 2048) {
    if (STREAM)
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

constexpr int64_t PANELS_BYTES = 1 << 19;  // weights of a task, and its rows: both stay in the L2 cache
constexpr int64_t BLOCK_BYTES = 3 << 18;

static inline void write_tiles(const Packed& w, int64_t panel, const float* sums, const Target& out, int64_t row,
                               int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    vf left = load(sums + i * NR), right = load(sums + i * NR + VL);
    if (!out.tiles) {
      write_panel(w, panel, left, right, out, row + i);
      continue;
    }
    add_bias(w, panel, left, right);
    char* to = in_row_tiles(out.tiles, row + i, w.n / 2) + panel / 2 * ROWS_BYTES + panel % 2 * 32;
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)(silu(left) * right)));
  }
}

struct Range {
  int64_t begin, end;
};
// Part i of n of [0, count).
inline Range part_of(int64_t count, int64_t i, int64_t n) { return {count * i / n, count * (i + 1) / n}; }

// Some rows (from a whole tile on) times some panels.
static inline void rows_times_panels(const Packed& w, Range panels, const char* tiles, Range rows, const Target& out) {
  const int64_t tile_bytes = row_tiles_bytes(TILE_ROWS, w.k), stride = panel_bytes(BF16_TILES, w.k);
  alignas(64) float sums[2 * TILE_ROWS * NR];
  TileScope scope;
  for (int64_t row = rows.begin; row < rows.end; row += 2 * TILE_ROWS) {
    const char* a = tiles + row / TILE_ROWS * tile_bytes;
    const int64_t count = std::min<int64_t>(rows.end - row, 2 * TILE_ROWS);
    for (int64_t panel = panels.begin; panel < panels.end; panel++) {
      const char* data = w.data + panel * stride;
      if (count <= TILE_ROWS)
        one_tile(a, data, w.k, sums);
      else if (row == rows.begin)
        two_tiles<true>(a, tile_bytes, data, w.k, sums);
      else
        two_tiles<false>(a, tile_bytes, data, w.k, sums);
      write_tiles(w, panel, sums, out, row, count);
    }
  }
}

static inline void gemm_tiles(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                              const Target& out) {
  const char* rows = in.tiles;
  if (!rows) {
    scratch.interleaved.need(row_tiles_bytes(m, w.k) / 4);
    char* to = (char*)scratch.interleaved.data();
    pool.run(int(row_tiles(m)), [&](int t, int) {
      for (int64_t row = t * TILE_ROWS; row < std::min<int64_t>(m, (t + 1) * TILE_ROWS); row++)
        round_row(in.a + row * in.lda, w.k, in_row_tiles(to, row, w.k));
    });
    rows = to;
  }
  const int64_t num_panels = w.num_panels(), fit = std::max<int64_t>(1, PANELS_BYTES / panel_bytes(BF16_TILES, w.k));
  const int64_t groups = std::min(num_panels, std::max<int64_t>((num_panels + fit - 1) / fit, pool.size() * 4));
  const int64_t block = std::max<int64_t>(1, BLOCK_BYTES / row_tiles_bytes(2 * TILE_ROWS, w.k)) * 2 * TILE_ROWS;
  const int64_t blocks = (m + block - 1) / block;
  pool.run(int(blocks * groups), [&](int task, int) {
    const int64_t first = task / groups * block;
    rows_times_panels(w, part_of(num_panels, task % groups, groups), rows, {first, std::min(m, first + block)}, out);
  });
}

#else

constexpr int TILE_ROWS = 16;
inline bool has_tiles() { return false; }
inline int64_t row_tiles(int64_t) { return 0; }
inline int64_t row_tiles_bytes(int64_t, int64_t) { return 0; }
static inline char* in_row_tiles(char* tiles, int64_t, int64_t) { return tiles; }
static inline void round_row(const float*, int64_t, char*) {}
static inline void norm_row(const float*, const float*, int64_t, float, char*) {}
static inline void gemm_tiles(Pool&, GemmScratch&, const Packed&, const Source&, int64_t, const Target&) {}

#endif

// C (+)= A W^T in whatever way fits the format and the number of rows.
static inline void multiply_rows(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                                 const Target& out) {
  if (w.format == BF16_TILES)
    gemm_tiles(pool, scratch, w, in, m, out);
  else
    gemm(pool, scratch, w, in, m, out);
}

}  // namespace pd
