// C[M, N] (+)= A[M, K] W[N, K]^T on the tile unit (AMX) for bfloat16 weights.
//
// Activations go in rounded to bfloat16, products are exact, sums are float32. Every output takes 32 k after 32 k in
// order, whatever M is: the same bits in any batch, as in gemm.h (but not the bits of gemm.h, which does not round
// activations: a machine computes bfloat16 either here or there).
//
//   tile of activations [16 rows][32 k]     tile of weights [16 pairs of k][16 columns][2]     sums [16][16] float
#pragma once
#include "gemm.h"

namespace pd {

#if PD_AMX

constexpr int64_t STREAM_BYTES = 8192;  // how far ahead of its use a weight that is used once is asked for

// sums [16][NR] = one tile of rows times one panel (two tiles of columns).
static inline void one_tile(const char* a, const char* w, int64_t k_end, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t g = 0; g < k_end / GROUP; g++, a += TILE_BYTES, w += 2048) {
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
  for (int64_t g = 0; g < k_end / GROUP; g++, a += TILE_BYTES, b += TILE_BYTES, w += 2048, next += 2048) {
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
constexpr int64_t SPLIT_BLOCK_BYTES = 5 << 18;  // beside quantised weights, which are small

static inline void write_tiles(const Packed& w, int64_t panel, const float* sums, const Target& out, int64_t row,
                               int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    vf left = load(sums + i * NR), right = load(sums + i * NR + VL);
    if (!out.tiles) {
      write_panel(w, panel, left, right, out, row + i);
      continue;
    }
    add_bias(w, panel, left, right);
    out.tiles.put_half(row + i, panel * VL, silu(left) * right);
  }
}

struct Range {
  int64_t begin, end;
};
// Part i of n of [0, count).
inline Range part_of(int64_t count, int64_t i, int64_t n) { return {count * i / n, count * (i + 1) / n}; }

// Some rows (from a whole tile on) times some panels.
static inline void rows_times_panels(const Packed& w, Range panels, const char* tiles, Range rows, const Target& out) {
  const int64_t tile_bytes = row_tiles_bytes(Rows::ROUNDED, TILE_ROWS, w.k), stride = panel_bytes(BF16_TILES, w.k);
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

// The rows as tiles: there already, or brought into `scratch`.
static inline RowTiles rows_as_tiles(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m) {
  if (in.tiles) return in.tiles;
  const Rows kind = rows_for(w.format);
  scratch.interleaved.need(row_tiles_bytes(kind, m, w.k) / 4);
  const RowTiles tiles{kind, (char*)scratch.interleaved.data(), w.k, m};
  pool.run(int(row_tiles(m)), [&](int t, int) {
    for (int64_t row = t * TILE_ROWS; row < std::min<int64_t>(m, (t + 1) * TILE_ROWS); row++)
      tiles.put_row(row, 0, in.a + row * in.lda, w.k);
  });
  return tiles;
}

// How a product is cut into tasks: some panels times some rows (a multiple of 32), both in the L2 cache.
struct Cut {
  int64_t groups, block, blocks;
  Cut(const Pool& pool, const Packed& w, Rows kind, int64_t m) {
    const int64_t num_panels = w.num_panels(), fit = std::max<int64_t>(1, PANELS_BYTES / panel_bytes(w.format, w.k));
    groups = std::min(num_panels, std::max<int64_t>((num_panels + fit - 1) / fit, pool.size() * 4));
    const int64_t pair_bytes = row_tiles_bytes(kind, 2 * TILE_ROWS, w.k);
    const int64_t pairs = (m + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    const int64_t most = std::max<int64_t>(1, (kind == Rows::SPLIT ? SPLIT_BLOCK_BYTES : BLOCK_BYTES) / pair_bytes);
    blocks = (pairs + most - 1) / most;
    block = (pairs + blocks - 1) / blocks * 2 * TILE_ROWS;
    blocks = (m + block - 1) / block;
  }
  int num_tasks() const { return int(blocks * groups); }
  Range panels(const Packed& w, int task) const { return part_of(w.num_panels(), task % groups, groups); }
  Range rows(int task, int64_t m) const { return {task / groups * block, std::min(m, (task / groups + 1) * block)}; }
};

static inline void gemm_tiles(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                              const Target& out) {
  const RowTiles rows = rows_as_tiles(pool, scratch, w, in, m);
  const Cut cut(pool, w, Rows::ROUNDED, m);
  pool.run(cut.num_tasks(), [&](int task, int) {
    rows_times_panels(w, cut.panels(w, task), rows.data, cut.rows(task, m), out);
  });
}

#else

static inline void gemm_tiles(Pool&, GemmScratch&, const Packed&, const Source&, int64_t, const Target&) {}

#endif

}  // namespace pd
