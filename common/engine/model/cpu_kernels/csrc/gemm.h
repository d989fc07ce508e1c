// C[M, N] (+)= A[M, K] W[N, K]^T for packed W.
//
// Each output is one accumulator that takes k = 0, 1, 2, ... in order, one FMA each, in every path: a row's result is
// the same bits for any M, any neighbours, any number of threads, and any format that holds the same weights.
#pragma once
#include <array>
#include <utility>
#include <vector>

#include "packed.h"
#include "pool.h"

namespace pd {

enum class Out { STORE, ADD, SILU };  // SILU: paired matrices only, writes silu(gate) * up

template <int MR, int NP>
using Tile = vf[MR][NP * 2];

// Feeds body(k, weights[NP * 2]) with the dequantised weights of NP panels for k in [0, K).
template <int FORMAT, int NP, class Body>
static inline __attribute__((always_inline)) void stream(const char* const* panels, int64_t k_end, const Body& body) {
  constexpr int64_t group = Layout<FORMAT>::group_bytes;
  vf w[NP * 2];
  if constexpr (FORMAT == F32 || FORMAT == BF16) {
    constexpr int64_t step = group / GROUP;
    constexpr int64_t ahead = NP == 1 ? 2048 : 1024;
    for (int64_t k = 0; k < k_end; k++) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) {
        const char* at = panels[p] + k * step;
        for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(at + ahead + line);
        for (int half = 0; half < 2; half++)
          w[p * 2 + half] = FORMAT == F32 ? load((const float*)at + half * VL) : load_bf16((const uint16_t*)at + half * VL);
      }
      body(k, w);
    }
  } else {
    vf scale[NP * 2], minimum[NP * 2];
    for (int64_t g = 0; g < k_end / GROUP; g++) {
      const char* values[NP];
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) {
        const uint16_t* head = (const uint16_t*)(panels[p] + g * group);
        for (int64_t line = 0; line < group; line += 64) __builtin_prefetch(panels[p] + (g + 1) * group + line);
        for (int half = 0; half < 2; half++) {
          scale[p * 2 + half] = load_half(head + half * VL);
          if (FORMAT != Q8_SYMMETRIC) minimum[p * 2 + half] = load_half(head + NR + half * VL);
        }
        values[p] = (const char*)head + (FORMAT == Q8_SYMMETRIC ? NR * 2 : NR * 4);
      }
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
              w[c] = __builtin_convertvector((words[c] >> (4 * i)) & 15, vf) * scale[c] + minimum[c];
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
                                                           int64_t k_end, Tile<MR, NP>& acc) {
  stream<FORMAT, NP>(panels, k_end, [&](int64_t k, const vf* w) __attribute__((always_inline)) {
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
};

static inline void write_panel(const Packed& w, int64_t panel, vf left, vf right, const Target& out, int64_t row) {
  if (w.bias) {
    left += load(w.bias + panel * NR);
    right += load(w.bias + panel * NR + VL);
  }
  float* c = out.c + row * out.ldc;
  int64_t begin = panel * (w.paired ? VL : NR), end = w.paired ? w.n / 2 : w.n;
  if (out.mode == Out::SILU) {
    left = silu(left) * right;
    if (begin + VL <= end) return store(c + begin, left);
    for (int64_t i = begin; i < end; i++) c[i] = left[i - begin];
    return;
  }
  float values[NR];
  store(values, left);
  store(values + VL, right);
  if (out.mode == Out::STORE && begin + NR <= end) {
    store(c + begin, left);
    store(c + begin + VL, right);
  } else if (out.mode == Out::STORE) {
    for (int64_t i = begin; i < end; i++) c[i] = values[i - begin];
  } else {
    for (int64_t i = begin; i < std::min(end, begin + NR); i++) c[i] += values[i - begin];
  }
}

// Rows [row, row + MR) times panels [panel, panel + NP).
template <int FORMAT, int MR, int NP>
static void tile(const Packed& w, int64_t panel, const char* data, const float* a, int64_t lda, const Target& out,
                 int64_t row) {
  const char* panels[NP];
  const int64_t stride = panel_bytes(FORMAT, w.k);
  for (int p = 0; p < NP; p++) panels[p] = data + p * stride;
  Tile<MR, NP> acc = {};
  multiply<FORMAT, MR, NP>(a + row * lda, lda, panels, w.k, acc);
  for (int i = 0; i < MR; i++)
    for (int p = 0; p < NP; p++) write_panel(w, panel + p, acc[i][p * 2], acc[i][p * 2 + 1], out, row + i);
}

using TileFunction = void (*)(const Packed&, int64_t, const char*, const float*, int64_t, const Target&, int64_t);

template <int FORMAT, int NP, int... I>
constexpr std::array<TileFunction, MAX_ROWS> tiles_of(std::integer_sequence<int, I...>) {
  return {((I + 1) * NP * 2 <= MAX_ACCUMULATORS ? &tile<FORMAT, ((I + 1) * NP * 2 <= MAX_ACCUMULATORS ? I + 1 : 1), NP>
                                                : nullptr)...};
}

template <int FORMAT>
static TileFunction tile_function(int rows, int panels) {
  using Rows = std::make_integer_sequence<int, MAX_ROWS>;
  static constexpr std::array<TileFunction, MAX_ROWS> table[4] = {
      tiles_of<FORMAT, 1>(Rows{}), tiles_of<FORMAT, 2>(Rows{}), tiles_of<FORMAT, 3>(Rows{}), tiles_of<FORMAT, 4>(Rows{})};
  return table[panels - 1][rows - 1];
}

template <int FORMAT>
static void unpack_panel(const Packed& w, const char* data, float* out) {
  stream<FORMAT, 1>(&data, w.k, [&](int64_t k, const vf* v) {
    store(out + k * NR, v[0]);
    store(out + k * NR + VL, v[1]);
  });
}

// All rows of a block (more than one register tile) times one panel.
template <int FORMAT>
static void panel_times_block(const Packed& w, int64_t panel, const float* a, int64_t lda, const Target& out, int64_t row,
                              int64_t num_rows, float* scratch) {
  const char* data = w.data + panel * panel_bytes(FORMAT, w.k);
  if (FORMAT != F32) {
    unpack_panel<FORMAT>(w, data, scratch);
    data = (const char*)scratch;
  }
  int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t t = 0; t < num_tiles; t++) {
    int64_t begin = num_rows * t / num_tiles, end = num_rows * (t + 1) / num_tiles;
    tile_function<F32>(int(end - begin), 1)(w, panel, data, a, lda, out, row + begin);
  }
}

// Panels read side by side: enough independent accumulators to hide the latency of an FMA, few enough to share out.
static inline int panels_at_once(int64_t rows, int64_t num_panels, int threads) {
  for (int np = 4; np > 1; np--)
    if (rows * np * 2 <= MAX_ACCUMULATORS && rows <= 4 && (num_panels % (int64_t(np) * threads) == 0 || num_panels > 256))
      return np;
  return rows <= 3 ? 2 : 1;
}

template <int FORMAT>
static void gemm_as(Pool& pool, std::vector<std::vector<float>>& scratch, const Packed& w, const float* a, int64_t lda,
                    int64_t m, const Target& out) {
  const int64_t num_panels = w.num_panels(), stride = panel_bytes(FORMAT, w.k);
  if (m <= MAX_ROWS) {
    const int np = panels_at_once(m, num_panels, pool.size());
    const int64_t units = (num_panels + np - 1) / np, per_task = std::max<int64_t>(1, units / (pool.size() * 16));
    pool.run(int((units + per_task - 1) / per_task), [&](int task, int) {
      const int64_t end = std::min(num_panels, (task + 1) * per_task * np);
      for (int64_t panel = task * per_task * np; panel < end; panel += np) {
        int count = int(std::min<int64_t>(np, end - panel));
        tile_function<FORMAT>(int(m), count)(w, panel, w.data + panel * stride, a, lda, out, 0);
      }
    });
    return;
  }
  const int64_t fits = std::max<int64_t>(MAX_ROWS, (1 << 18) / w.k / MAX_ROWS * MAX_ROWS);  // 1 MB of A: half of an L2
  const int64_t num_blocks = (m + fits - 1) / fits;
  const int64_t per_task = std::max<int64_t>(1, num_panels / (pool.size() * 8));
  const int64_t tasks_per_block = (num_panels + per_task - 1) / per_task;
  pool.run(int(num_blocks * tasks_per_block), [&](int task, int thread) {
    const int64_t block = task / tasks_per_block, begin = m * block / num_blocks, end = m * (block + 1) / num_blocks;
    const int64_t first = (task % tasks_per_block) * per_task, last = std::min(num_panels, first + per_task);
    auto& unpacked = scratch[thread];
    if (FORMAT != F32 && int64_t(unpacked.size()) < w.k * NR) unpacked.resize(w.k * NR);
    for (int64_t panel = first; panel < last; panel++)
      panel_times_block<FORMAT>(w, panel, a, lda, out, begin, end - begin, unpacked.data());
  });
}

static inline void gemm(Pool& pool, std::vector<std::vector<float>>& scratch, const Packed& w, const float* a, int64_t lda,
                        int64_t m, const Target& out) {
  switch (w.format) {
    case F32: return gemm_as<F32>(pool, scratch, w, a, lda, m, out);
    case BF16: return gemm_as<BF16>(pool, scratch, w, a, lda, m, out);
    case Q8: return gemm_as<Q8>(pool, scratch, w, a, lda, m, out);
    case Q8_SYMMETRIC: return gemm_as<Q8_SYMMETRIC>(pool, scratch, w, a, lda, m, out);
    default: return gemm_as<Q4>(pool, scratch, w, a, lda, m, out);
  }
}

}  // namespace pd
