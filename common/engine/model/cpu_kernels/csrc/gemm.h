// C[M, N] (+)= A[M, K] W[N, K]^T for packed W.
//
// Each output is one accumulator that takes k = 0, 1, 2, ... in order, one FMA each, in every path: a row's result is
// the same bits for any M, any neighbours, any number of threads, and any format that holds the same weights.
#pragma once
#include <array>
#include <utility>
#include <vector>

#include "ahead.h"
#include "pool.h"
#include "row_tiles.h"

namespace pd {

enum class Out { STORE, ADD, SILU };  // SILU: paired matrices only, writes silu(gate) * up

template <int MR, int NP>
using Tile = vf[MR][NP * 2];

constexpr int64_t PREFETCH_BYTES = 4096;  // how far ahead of its use a quantised weight is asked for, in each panel
constexpr int64_t FLOAT_PREFETCH_BYTES = 16384;  // and others, which pass by faster, in all panels together

constexpr int64_t ASKED_PER_GROUP = 7 * 64;  // bytes of `Ahead` that are asked for per group of a quantised panel

// Feeds body(k, weights[NP * 2]) with the dequantised weights of NP panels for k in [0, K). ask: see `Ahead`; or null.
template <int FORMAT, int NP, class Body>
static inline __attribute__((always_inline)) void stream(const char* const* panels, int64_t k_end, const char* ask,
                                                         const Body& body) {
  constexpr int64_t group = Layout<FORMAT>::group_bytes;
  vf w[NP * 2];
  if constexpr (FORMAT == F32 || FORMAT == BF16) {
    constexpr int64_t step = group / GROUP;
    for (int64_t k = 0; k < k_end; k++) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) {
        const char* at = panels[p] + k * step;
        for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(at + FLOAT_PREFETCH_BYTES / NP + line);
        for (int half = 0; half < 2; half++)
          w[p * 2 + half] =
              FORMAT == F32 ? load((const float*)at + half * VL) : load_bf16((const uint16_t*)at + half * VL);
      }
      body(k, w);
    }
  } else {
    constexpr int64_t AHEAD = PREFETCH_BYTES / group;
    vf scale[NP * 2], minimum[NP * 2];
    for (int64_t g = 0; g < k_end / GROUP; g++) {
      const char* values[NP];
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) {
        const uint16_t* head = (const uint16_t*)(panels[p] + g * group);
        // Behind the end of a panel comes the one that is read when these NP are done.
        const int64_t later = (g + AHEAD) * GROUP < k_end ? 0 : (NP - 1) * group * (k_end / GROUP);
        for (int64_t line = 0; line < group; line += 64)
          __builtin_prefetch(panels[p] + (g + AHEAD) * group + later + line);
        for (int half = 0; half < 2; half++) {
          scale[p * 2 + half] = load_half(head + half * VL);
          if (FORMAT != Q8_SYMMETRIC) minimum[p * 2 + half] = load_half(head + NR + half * VL);
        }
        values[p] = (const char*)head + (FORMAT == Q8_SYMMETRIC ? NR * 2 : NR * 4);
      }
      if (ask)
        for (int64_t line = 0; line < ASKED_PER_GROUP; line += 64)
          __builtin_prefetch(ask + g * ASKED_PER_GROUP + line, 0, 2);
      if constexpr (FORMAT == Q4) {
        for (int j = 0; j < GROUP / 8; j++) {
          vi words[NP * 2];
#pragma GCC unroll 4
          for (int p = 0; p < NP; p++)
            for (int half = 0; half < 2; half++)
              words[p * 2 + half] = *(const vi_mem*)((const int32_t*)values[p] + j * NR + half * VL);
#pragma GCC unroll 8
          for (int i = 0; i < 8; i++) {
#pragma GCC unroll 8
            for (int c = 0; c < NP * 2; c++)
              w[c] = nibble(words[c], i) * scale[c] + minimum[c];
            body(g * GROUP + j * 8 + i, w);
          }
        }
      } else {
        for (int k = 0; k < GROUP; k++) {
#pragma GCC unroll 8
          for (int c = 0; c < NP * 2; c++) {
            vf q = load_int8((const int8_t*)values[c / 2] + k * NR + (c % 2) * VL);
            w[c] = FORMAT == Q8_SYMMETRIC ? q * scale[c] : q * scale[c] + minimum[c];
          }
          body(g * GROUP + k, w);
        }
      }
    }
  }
}

template <int FORMAT, int MR, int NP>
static inline __attribute__((always_inline)) void multiply(const float* a, int64_t lda, const char* const* panels,
                                                           int64_t k_end, const char* ask, Tile<MR, NP>& acc) {
  stream<FORMAT, NP>(panels, k_end, ask, [&](int64_t k, const vf* w) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      vf x = splat(a[i * lda + k]);
#pragma GCC unroll 8
      for (int c = 0; c < NP * 2; c++) acc[i][c] += x * w[c];
    }
  });
}

struct Target {
  float* c;
  int64_t ldc;
  Out mode;
  RowTiles tiles = {};  // on the tile unit: SILU goes here instead, as rows of another product
};

// What a matrix is multiplied with.
struct Source {
  const float* a;
  int64_t lda;
  RowTiles tiles = {};  // on the tile unit: the rows are here instead
  Ahead* ahead = nullptr;
};

static inline void write_part(float* c, int64_t count, const float* values, bool add) {
  for (int64_t i = 0; i < count; i++) c[i] = add ? c[i] + values[i] : values[i];
}

static inline void add_bias(const Packed& w, int64_t panel, vf& left, vf& right) {
  if (!w.bias) return;
  left += load(w.bias + panel * NR);
  right += load(w.bias + panel * NR + VL);
}

// One row of one panel: bias, then store, add, or gate.
static inline __attribute__((always_inline)) void write_panel(const Packed& w, int64_t panel, vf left, vf right,
                                                              const Target& out, int64_t row) {
  add_bias(w, panel, left, right);
  const int64_t width = w.paired ? VL : NR, begin = panel * width;
  const int64_t count = std::min(width, (w.paired ? w.n / 2 : w.n) - begin);
  float* c = out.c + row * out.ldc + begin;
  if (out.mode == Out::SILU) {
    left = silu(left) * right;
    if (count == VL) return store(c, left);
  } else if (count == NR) {
    const bool add = out.mode == Out::ADD;
    store(c, add ? load(c) + left : left);
    return store(c + VL, add ? load(c + VL) + right : right);
  }
  float values[NR];
  store(values, left);
  store(values + VL, right);
  write_part(c, count, values, out.mode == Out::ADD);
}

// The first MR rows times panels [panel, panel + NP).
template <int FORMAT, int MR, int NP>
static void tile(const Packed& w, int64_t panel, const char* ask, const Source& in, const Target& out) {
  const char* panels[NP];
  const int64_t stride = panel_bytes(FORMAT, w.k);
  for (int p = 0; p < NP; p++) panels[p] = w.data + (panel + p) * stride;
  Tile<MR, NP> acc = {};
  multiply<FORMAT, MR, NP>(in.a, in.lda, panels, w.k, ask, acc);
  for (int i = 0; i < MR; i++)
    for (int p = 0; p < NP; p++) write_panel(w, panel + p, acc[i][p * 2], acc[i][p * 2 + 1], out, i);
}

using TileFunction = void (*)(const Packed&, int64_t, const char*, const Source&, const Target&);

template <int FORMAT, int NP, int... I>
constexpr std::array<TileFunction, MAX_ROWS> tiles_of(std::integer_sequence<int, I...>) {
  return {((I + 1) * NP * 2 <= MAX_ACCUMULATORS ? &tile<FORMAT, ((I + 1) * NP * 2 <= MAX_ACCUMULATORS ? I + 1 : 1), NP>
                                                : nullptr)...};
}

template <int FORMAT>
static TileFunction tile_function(int rows, int panels) {
  using Rows = std::make_integer_sequence<int, MAX_ROWS>;
  static constexpr std::array<TileFunction, MAX_ROWS> table[4] = {
      tiles_of<FORMAT, 1>(Rows{}), tiles_of<FORMAT, 2>(Rows{}), tiles_of<FORMAT, 3>(Rows{}),
      tiles_of<FORMAT, 4>(Rows{})};
  return table[panels - 1][rows - 1];
}

constexpr int64_t K_BLOCK = 192;  // k values of a panel that stay in the L1 cache while a block of rows passes by

// Eight rows of eight floats -> eight columns.
static inline void transpose8(const float* const* in, int64_t offset, float* out, int64_t out_stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(in[i] + offset);
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

// The rows of one register tile, k-major: out[k][rows]. K is a multiple of GROUP.
static inline void interleave_rows(const float* a, int64_t lda, int rows, int64_t k_end, float* out) {
  int first = 0;
  if (rows >= 8) {
    // Rows that are no multiple of 8 are covered by a second, overlapping group of 8.
    for (first = 0; first < rows; first += 8) {
      const int at = std::min(first, rows - 8);
      const float* in[8];
      for (int i = 0; i < 8; i++) in[i] = a + (at + i) * lda;
      for (int64_t k = 0; k < k_end; k += 8) transpose8(in, k, out + k * rows + at, rows);
    }
    return;
  }
  for (; first < rows; first++)
    for (int64_t k = 0; k < k_end; k++) out[k * rows + first] = a[first * lda + k];
}

// acc[MR][2] (kept in `sums` between blocks of k) += interleaved rows times one block of a float panel. Meanwhile asks
// for the rows and the weights that come next.
template <int MR>
static void block_tile(const float* a, const float* panel, int64_t k_end, float* sums, bool is_first,
                       const float* next_a, const char* next_b) {
  Tile<MR, 1> acc = {};
  if (!is_first)
    for (int i = 0; i < MR; i++)
      for (int half = 0; half < 2; half++) acc[i][half] = load(sums + i * NR + half * VL);
  for (int64_t k = 0; k < k_end; k++) {
    const vf left = load(panel + k * NR), right = load(panel + k * NR + VL);
    __builtin_prefetch(next_a + k * MR);
    __builtin_prefetch(next_b + k * 64, 0, 2);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const vf x = splat(a[k * MR + i]);
      acc[i][0] += x * left;
      acc[i][1] += x * right;
    }
  }
  for (int i = 0; i < MR; i++)
    for (int half = 0; half < 2; half++) store(sums + i * NR + half * VL, acc[i][half]);
}

using BlockFunction = void (*)(const float*, const float*, int64_t, float*, bool, const float*, const char*);
template <int... I>
constexpr std::array<BlockFunction, sizeof...(I)> block_tiles(std::integer_sequence<int, I...>) {
  return {&block_tile<I + 1>...};
}

struct alignas(64) Flag {
  bool value = false;
};

struct GemmScratch {
  Buffer interleaved;                  // shared: [m][K] in tiles
  std::vector<Buffer> unpacked, sums;  // per thread: [K_BLOCK][NR], [rows of a block][NR]
  std::vector<Flag> is_split;          // per thread: whether it has split this product's rows (amx_quantised.h)
  explicit GemmScratch(int threads) : unpacked(threads), sums(threads), is_split(threads) {
    for (auto& buffer : unpacked) buffer.need(K_BLOCK * NR);
  }
};

// Where tile t of n begins when `rows` are shared out evenly.
static inline int64_t tile_begin(int64_t rows, int64_t t, int64_t n) { return rows * t / n; }

// Tiles [first, last) of the interleaved rows times one panel.
template <int FORMAT>
static void panel_times_tiles(const Packed& w, int64_t panel, const float* a, int64_t m, int64_t num_tiles,
                              int64_t first, int64_t last, float* unpacked, float* sums, const Target& out) {
  static constexpr auto table = block_tiles(std::make_integer_sequence<int, MAX_ROWS>{});
  const char* data = w.data + panel * panel_bytes(FORMAT, w.k);
  const int64_t base = tile_begin(m, first, num_tiles);
  for (int64_t k = 0; k < w.k; k += K_BLOCK) {
    const int64_t length = std::min(K_BLOCK, w.k - k);
    const char* block = data + panel_bytes(FORMAT, k);
    if (FORMAT != F32)
      stream<FORMAT, 1>(&block, length, nullptr, [&](int64_t i, const vf* v) __attribute__((always_inline)) {
        store(unpacked + i * NR, v[0]);
        store(unpacked + i * NR + VL, v[1]);
      });
    const float* values = FORMAT == F32 ? (const float*)block : unpacked;
    for (int64_t t = first; t < last; t++) {
      const int64_t row = tile_begin(m, t, num_tiles), rows = tile_begin(m, t + 1, num_tiles) - row;
      const float* tile = a + row * w.k + k * rows;
      const float* next = t + 1 < last ? tile + rows * w.k : a + base * w.k + (k + length) * rows;
      table[rows - 1](tile, values, length, sums + (row - base) * NR, k == 0, next,
                      block + panel_bytes(FORMAT, length) + (t - first) % 2 * length * 64);
    }
  }
  for (int64_t row = base; row < tile_begin(m, last, num_tiles); row++) {
    const float* sum = sums + (row - base) * NR;
    write_panel(w, panel, load(sum), load(sum + VL), out, row);
  }
}

// Panels read side by side: enough independent accumulators to hide the latency of an FMA, few enough to share out and
// to stay in registers (a quantised panel also holds its scales, minima, words and values there).
template <int FORMAT>
static int panels_at_once(int64_t rows, int64_t num_panels, int threads) {
  constexpr int held = FORMAT == F32 || FORMAT == BF16 ? 0 : 8;
  for (int np = 4; np > 1; np--) {
    const bool fits = np * (rows * 2 + held) <= MAX_ACCUMULATORS && rows <= 4;
    if (fits && (np == 2 || num_panels % (int64_t(np) * threads) == 0 || num_panels > 256)) return np;
  }
  return 1;
}

constexpr int64_t COMPUTING_ROWS = 4;  // from here on few rows of quantised weights compute longer than they read

// Up to one register tile of rows: weights are read, widened and used in one go.
template <int FORMAT>
static void few_rows(Pool& pool, const Packed& w, const Source& in, int64_t m, const Target& out) {
  const int64_t num_panels = w.num_panels(), asked = w.k / GROUP * ASKED_PER_GROUP;
  const int np = panels_at_once<FORMAT>(m, num_panels, pool.size());
  const int64_t units = (num_panels + np - 1) / np, per_task = std::max<int64_t>(1, units / (pool.size() * 16));
  Ahead* ahead = FORMAT != F32 && FORMAT != BF16 && m >= COMPUTING_ROWS ? in.ahead : nullptr;
  pool.run(int((units + per_task - 1) / per_task), [&](int task, int thread) {
    const int64_t end = std::min(num_panels, (task + 1) * per_task * np);
    for (int64_t panel = task * per_task * np; panel < end; panel += np) {
      const int count = int(std::min<int64_t>(np, end - panel));
      tile_function<FORMAT>(int(m), count)(w, panel, ahead ? ahead->next(thread, asked) : nullptr, in, out);
    }
  });
}

template <int FORMAT>
static void many_rows(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                      const Target& out) {
  const int64_t num_tiles = (m + MAX_ROWS - 1) / MAX_ROWS, num_panels = w.num_panels();
  scratch.interleaved.need(m * w.k);
  float* rows = scratch.interleaved.data();
  pool.run(int(num_tiles), [&](int t, int) {
    const int64_t begin = tile_begin(m, t, num_tiles), end = tile_begin(m, t + 1, num_tiles);
    interleave_rows(in.a + begin * in.lda, in.lda, int(end - begin), w.k, rows + begin * w.k);
  });
  const int64_t fits = std::max<int64_t>(1, (1 << 18) / w.k / MAX_ROWS);  // tiles in 1 MB: half of an L2 cache
  const int64_t num_blocks = (num_tiles + fits - 1) / fits;
  const int64_t per_task = std::max<int64_t>(1, num_panels / (pool.size() * 8));
  const int64_t tasks_per_block = (num_panels + per_task - 1) / per_task;
  pool.run(int(num_blocks * tasks_per_block), [&](int task, int thread) {
    const int64_t block = task / tasks_per_block, begin = num_tiles * block / num_blocks;
    const int64_t end = num_tiles * (block + 1) / num_blocks;
    auto& sums = scratch.sums[thread];
    sums.need((end - begin) * MAX_ROWS * NR);
    const int64_t first = (task % tasks_per_block) * per_task, last = std::min(num_panels, first + per_task);
    for (int64_t panel = first; panel < last; panel++)
      panel_times_tiles<FORMAT>(w, panel, rows, m, num_tiles, begin, end, scratch.unpacked[thread].data(), sums.data(),
                                out);
  });
}

template <int FORMAT>
static void gemm_as(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m, const Target& out) {
  if (m <= MAX_ROWS)
    few_rows<FORMAT>(pool, w, in, m, out);
  else
    many_rows<FORMAT>(pool, scratch, w, in, m, out);
}

static inline void gemm(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                        const Target& out) {
  switch (w.format) {
    case F32: return gemm_as<F32>(pool, scratch, w, in, m, out);
    case BF16: return gemm_as<BF16>(pool, scratch, w, in, m, out);
    case Q8: return gemm_as<Q8>(pool, scratch, w, in, m, out);
    case Q8_SYMMETRIC: return gemm_as<Q8_SYMMETRIC>(pool, scratch, w, in, m, out);
    default: return gemm_as<Q4>(pool, scratch, w, in, m, out);
  }
}

}  // namespace pd
