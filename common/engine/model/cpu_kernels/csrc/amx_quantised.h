// C[M, N] (+)= A[M, K] W[N, K]^T on the tile unit (AMX) for weights on a grid of 4 or 8 bits.
//
// A level (an integer of 8 bits) is a bfloat16, and an activation the sum of two (row_tiles.h), to 17 bits. Per 32 k,
// the two tiles of rows meet one tile of levels, the low terms first, in one float sum; then
//
//   out[row][column] += scale[column] * sum[row][column], then minimum[column] * (sum of the row's 32 k)
//
// in order of k, whatever M is: the same bits in any batch, as in gemm.h (but other last bits than gemm.h's).
#pragma once
#include "amx.h"

namespace pd {

#if PD_AMX

constexpr int AND_OR = 0xea;  // of three operands: (a & b) | c

// Levels of a group and 16 columns, as packed -> a tile [16 pairs of k][16 columns][2]; k and k + 16 are a pair.
template <int FORMAT>
static inline __attribute__((always_inline)) void unpack_levels(const char* values, char* tile) {
  if constexpr (FORMAT == Q4_TILES) {
    // 16 + level: a level as the upper bits of the significand of a number of [16, 32). (A table costs twice as much.)
    const __m512i bits = _mm512_set1_epi16(15 << 3), sixteen = _mm512_set1_epi16(0x4180);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i words = _mm512_loadu_si512(values + j * 64);
      const __m512i shifted[4] = {words, _mm512_srli_epi16(words, 4), _mm512_srli_epi16(words, 8),
                                  _mm512_shldi_epi16(words, words, 4)};  // as packed: rotated
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        _mm512_store_si512(tile + (4 * j + i) * 64, _mm512_ternarylogic_epi32(shifted[i], bits, sixteen, AND_OR));
    }
  } else {
    // Bytes as the low bits of a float's significand: 2^23 + level + 128 in steps of 1, 2^15 + ... in steps of 2^-8.
    const __m512i low = _mm512_set1_epi32(0xff), low_one = _mm512_set1_epi32(0x4b000000);
    const __m512i high = _mm512_set1_epi32(0xff00), high_one = _mm512_set1_epi32(0x47000000);
    const __m512 low_bias = _mm512_set1_ps(8388608.0f + 128), high_bias = _mm512_set1_ps(32768.0f + 128);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      __m512i words = _mm512_loadu_si512(values + j * 64);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++, words = _mm512_srli_epi32(words, 16)) {
        const __m512 even = _mm512_sub_ps((__m512)_mm512_ternarylogic_epi32(words, low, low_one, AND_OR), low_bias);
        const __m512 odd = _mm512_sub_ps((__m512)_mm512_ternarylogic_epi32(words, high, high_one, AND_OR), high_bias);
        // The lower half of such a float is 0.
        const __m512i both = _mm512_or_si512((__m512i)odd, _mm512_srli_epi32((__m512i)even, 16));
        _mm512_store_si512(tile + (2 * j + i) * 64, both);
      }
    }
  }
}

template <int FORMAT>
struct TileLayout {
  static constexpr bool HAS_MINIMUM = FORMAT != Q8_SYMMETRIC_TILES;
  static constexpr float ADDED = FORMAT == Q4_TILES ? 16 : 0;  // to each level by `unpack_levels`
  static constexpr int64_t group_bytes = Layout<plain(FORMAT)>::group_bytes;
  static constexpr int64_t values = HAS_MINIMUM ? NR * 4 : NR * 2;  // where they begin
  static constexpr int64_t tile_bytes = (group_bytes - values) / 2;
};

// Scale and minimum of 16 columns (half: 0 or 1), the minimum as that of unpacked levels.
struct Grid {
  vf scale, minimum = {};
};
template <int FORMAT>
static inline Grid load_grid(const char* group, int half) {
  using L = TileLayout<FORMAT>;
  const uint16_t* head = (const uint16_t*)group + half * VL;
  Grid grid{load_half(head)};
  if (L::HAS_MINIMUM) grid.minimum = load_half(head + NR) - L::ADDED * grid.scale;
  return grid;
}

// Sums over all 32 k of a group, of 16 rows of a tile of `height`.
static inline vf row_sums(const char* group, int height) {
  const float* halves = (const float*)(group + height * SPLIT_ROW_BYTES);
  return load(halves) + load(halves + TILE_ROWS);
}

static inline void write_split(const Packed& w, int64_t panel, vf left, vf right, const Target& out, int64_t row) {
  if (!out.tiles) return write_panel(w, panel, left, right, out, row);
  add_bias(w, panel, left, right);
  out.tiles.put_half(row, panel * VL, silu(left) * right);
}

// The first M rows times one panel, a group of 32 k at a time: each weight is unpacked, used and forgotten.
//
// The rows are one tile with both their terms, whose sums vectors add up as the unit adds a product for each (many rows,
// below). The stages of a group (unpack, multiply, store, fold) lie a group apart: what a tile is loaded from, or a vector
// from a stored tile, has to reach the cache first. Buffers of one parity of g lie on one half of 4 KB, or loads would
// wait for stores to the other's.
// How far ahead of its use a weight is asked for, into the L2 cache: the L1 cache is busy with tiles.
constexpr int64_t TILE_PREFETCH_BYTES = 12288;

template <int FORMAT, int M>
class FewRows {
 public:
  vf acc[M][2] = {};

  FewRows(const Packed& w, int64_t panel, const char* ask, const char* rows)
      : data_(w.data + panel * panel_bytes(FORMAT, w.k)), ask_(ask), rows_(rows), groups_(w.k / GROUP) {}

  void run() {
    unpack<0>(0);
    unpack<1>(1);
    for (int64_t g = 0; g < groups_ + 2; g += 2) {
      step<0>(g);
      step<1>(g + 1);
    }
  }

 private:
  using L = TileLayout<FORMAT>;

  // SIDE: the parity of g.
  template <int SIDE>
  inline __attribute__((always_inline)) void step(int64_t g) {
    if (g < groups_) {
      ask_for(g);
      multiply<SIDE>(rows_ + g * split_bytes(M));
    }
    if (g >= 1 && g - 1 < groups_) take<1 - SIDE>();
    if (g >= 2 && g - 2 < groups_) fold<SIDE>(g - 2);
    unpack<SIDE>(g + 2);
  }

  inline __attribute__((always_inline)) void ask_for(int64_t g) {
    const char* data = data_ + g * L::group_bytes + TILE_PREFETCH_BYTES;
    for (int64_t line = 0; line < L::group_bytes; line += 64) __builtin_prefetch(data + line, 0, 2);
    if (!ask_) return;
    for (int64_t line = 0; line < ASKED_PER_GROUP; line += 64)
      __builtin_prefetch(ask_ + g * ASKED_PER_GROUP + line, 0, 2);
  }

  template <int SIDE>
  inline __attribute__((always_inline)) void unpack(int64_t g) {
    if (g >= groups_) return;
    const char* values = data_ + g * L::group_bytes + L::values;
    unpack_levels<FORMAT>(values, levels_[SIDE][0]);
    unpack_levels<FORMAT>(values + L::tile_bytes, levels_[SIDE][1]);
  }

  template <int SIDE>
  inline __attribute__((always_inline)) void multiply(const char* rows) {
    tile_load<4>(rows, TERM_BYTES);
    multiply_half<2 * SIDE>(levels_[SIDE][0]);
    multiply_half<2 * SIDE + 1>(levels_[SIDE][1]);
  }
  template <int C>
  static inline __attribute__((always_inline)) void multiply_half(const char* levels) {
    tile_zero<C>();
    tile_load<7>(levels, 64);
    tile_multiply<C, 4, 7>();
  }

  template <int SIDE>
  inline __attribute__((always_inline)) void take() {
    tile_store<2 * SIDE>(sums_[SIDE][0], 64);
    tile_store<2 * SIDE + 1>(sums_[SIDE][1], 64);
  }

  template <int SIDE>
  inline __attribute__((always_inline)) void fold(int64_t g) {
    alignas(64) float of_rows[TILE_ROWS];
    if (L::HAS_MINIMUM) store(of_rows, row_sums(rows_ + g * split_bytes(M), M));
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const Grid grid = load_grid<FORMAT>(data_ + g * L::group_bytes, half);
      const float* sums = sums_[SIDE][half];
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) {
        const float* of = sums + i * TERMS * VL;
        acc[i][half] += grid.scale * (load(of + VL) + load(of));
        if (L::HAS_MINIMUM) acc[i][half] += grid.minimum * splat(of_rows[i]);
      }
    }
  }

  alignas(64) char levels_[2][2][TILE_BYTES];
  float sums_[2][2][16 * 16];
  const char *data_, *ask_, *rows_;
  const int64_t groups_;
};

template <int FORMAT, int M>
static void panels_times_few(const Packed& w, Range panels, Ahead* ahead, int thread, const char* rows,
                             const Target& out) {
  const int64_t asked = w.k / GROUP * ASKED_PER_GROUP;
  const char* begin = w.data + panels.begin * panel_bytes(FORMAT, w.k);
  for (int64_t line = 0; line < PREFETCH_BYTES; line += 64) __builtin_prefetch(begin + line, 0, 2);
  TileScope scope(TERMS * M);
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    FewRows<FORMAT, M> few(w, panel, ahead ? ahead->next(thread, asked) : nullptr, rows);
    few.run();
    for (int i = 0; i < M; i++) write_split(w, panel, few.acc[i][0], few.acc[i][1], out, i);
  }
}

using FewRowsFunction = void (*)(const Packed&, Range, Ahead*, int, const char*, const Target&);
template <int FORMAT, int... I>
constexpr std::array<FewRowsFunction, sizeof...(I)> few_rows_functions(std::integer_sequence<int, I...>) {
  return {&panels_times_few<FORMAT, I + 1>...};
}

// Each thread splits the rows for itself: they are few, and then lie in its own cache.
template <int FORMAT>
static void few_rows_split(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                           const Target& out) {
  static constexpr auto table = few_rows_functions<FORMAT>(std::make_integer_sequence<int, FEW_TILE_ROWS>{});
  const int64_t num_panels = w.num_panels(), num_tasks = std::min<int64_t>(num_panels, pool.size() * 8);
  Ahead* ahead = m >= COMPUTING_ROWS ? in.ahead : nullptr;
  for (auto& is_split : scratch.is_split) is_split.value = false;
  pool.run(int(num_tasks), [&](int task, int thread) {
    Buffer& buffer = scratch.sums[thread];
    if (!scratch.is_split[thread].value) {
      buffer.need(row_tiles_bytes(Rows::SPLIT, m, w.k) / 4);
      const RowTiles rows{Rows::SPLIT, (char*)buffer.data(), w.k, m};
      for (int64_t row = 0; row < m; row++) rows.put_row(row, 0, in.a + row * in.lda, w.k);
      scratch.is_split[thread].value = true;
    }
    table[m - 1](w, part_of(num_panels, task, num_tasks), ahead, thread, (const char*)buffer.data(), out);
  });
}

constexpr int64_t GROUPS_AT_ONCE = 6;  // groups of a panel whose levels stay in the L1 cache while rows pass by

// What of a panel is unpacked at a time.
struct UnpackedGroups {
  alignas(64) char levels[GROUPS_AT_ONCE][2][TILE_BYTES];
  alignas(64) float scale[GROUPS_AT_ONCE][NR], minimum[GROUPS_AT_ONCE][NR];
};

template <int FORMAT>
static void unpack_groups(const char* data, int64_t count, UnpackedGroups& to) {
  using L = TileLayout<FORMAT>;
  for (int64_t g = 0; g < count; g++, data += L::group_bytes) {
    for (int64_t line = 0; line < L::group_bytes; line += 64) __builtin_prefetch(data + PREFETCH_BYTES + line);
    for (int half = 0; half < 2; half++) {
      unpack_levels<FORMAT>(data + L::values + half * L::tile_bytes, to.levels[g][half]);
      const Grid grid = load_grid<FORMAT>(data, half);
      store(to.scale[g] + half * VL, grid.scale);
      store(to.minimum[g] + half * VL, grid.minimum);
    }
  }
}

// What a group's products leave to be done: acc[rows][NR] += scale * sums[rows][NR] + minimum * the rows' sums.
struct Fold {
  const float *sums, *scale, *minimum;
  const char* rows;
  float* acc;

  // Eight rows from `first` on of the 16 at `of`, whose sums and accumulators lie `offset` behind the first ones'.
  template <bool HAS_MINIMUM>
  inline __attribute__((always_inline)) void part(const char* of, int first, int64_t offset) const {
    alignas(64) float of_rows[TILE_ROWS];
    if (HAS_MINIMUM) store(of_rows, row_sums(of, TILE_ROWS));
    const vf scales[2] = {load(scale), load(scale + VL)}, minima[2] = {load(minimum), load(minimum + VL)};
#pragma GCC unroll 8
    for (int i = first; i < first + 8; i++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const int64_t at = offset + i * NR + half * VL;
        vf to = load(acc + at) + scales[half] * load(sums + at);
        if (HAS_MINIMUM) to += minima[half] * splat(of_rows[i]);
        store(acc + at, to);
      }
  }
};

// acc[16 or 32 rows][NR] += some groups of the rows times those of a panel; the second 16 rows lie `next_rows` behind.
// `before` is folded meanwhile; returns what is left to be.
template <bool BOTH, bool HAS_MINIMUM>
static Fold rows_times_groups(const char* rows, int64_t next_rows, const UnpackedGroups& panel, int64_t count,
                              float* acc, float (*sums)[2 * TILE_ROWS * NR], Fold before) {
  for (int64_t g = 0; g < count; g++, rows += SPLIT_BYTES) {
    float* to = sums[before.sums == sums[0]];
    tile_zero<0>(), tile_zero<1>();
    if (BOTH) tile_zero<2>(), tile_zero<3>();
    tile_load<6>(panel.levels[g][0], 64);
    tile_load<7>(panel.levels[g][1], 64);
#pragma GCC unroll 2
    for (int term = TERMS - 1; term >= 0; term--) {
      tile_load<4>(rows + term * TERM_BYTES, SPLIT_ROW_BYTES);
      tile_multiply<0, 4, 6>();
      tile_multiply<1, 4, 7>();
      if (before.sums) before.part<HAS_MINIMUM>(before.rows, term ? 0 : 8, 0);
      if (!BOTH) continue;
      tile_load<5>(rows + next_rows + term * TERM_BYTES, SPLIT_ROW_BYTES);
      tile_multiply<2, 5, 6>();
      tile_multiply<3, 5, 7>();
      if (before.sums) before.part<HAS_MINIMUM>(before.rows + next_rows, term ? 0 : 8, TILE_ROWS * NR);
    }
    tile_store<0>(to, NR * 4);
    tile_store<1>(to + VL, NR * 4);
    if (BOTH) {
      tile_store<2>(to + TILE_ROWS * NR, NR * 4);
      tile_store<3>(to + TILE_ROWS * NR + VL, NR * 4);
    }
    before = {to, panel.scale[g], panel.minimum[g], rows, acc};
  }
  return before;
}

template <bool BOTH, bool HAS_MINIMUM>
static void finish(const Fold& left, int64_t next_rows) {
  for (int first = 0; first < TILE_ROWS; first += 8) {
    left.part<HAS_MINIMUM>(left.rows, first, 0);
    if (BOTH) left.part<HAS_MINIMUM>(left.rows + next_rows, first, TILE_ROWS * NR);
  }
}

// Rows [range) times one panel. acc: [rows of the range, padded to 16][NR].
template <int FORMAT>
static void panel_times_rows(const Packed& w, int64_t panel, const RowTiles& tiles, Range range, float* acc,
                             const Target& out) {
  using L = TileLayout<FORMAT>;
  constexpr int64_t PAIR = 2 * TILE_ROWS;
  const int64_t groups = w.k / GROUP, next_rows = groups * SPLIT_BYTES, num_rows = range.end - range.begin;
  const int64_t in_pairs = (num_rows + TILE_ROWS - 1) / PAIR * PAIR;
  const char* data = w.data + panel * panel_bytes(FORMAT, w.k);
  std::memset(acc, 0, size_t(row_tiles(num_rows)) * TILE_ROWS * NR * 4);
  UnpackedGroups unpacked;
  alignas(64) float sums[2][PAIR * NR];
  for (int64_t g = 0; g < groups; g += GROUPS_AT_ONCE) {
    const int64_t count = std::min(GROUPS_AT_ONCE, groups - g);
    unpack_groups<FORMAT>(data + g * L::group_bytes, count, unpacked);
    Fold left{};
    for (int64_t i = 0; i < in_pairs; i += PAIR)
      left = rows_times_groups<true, L::HAS_MINIMUM>(tiles.group(range.begin + i, g), next_rows, unpacked, count,
                                                     acc + i * NR, sums, left);
    if (left.sums) finish<true, L::HAS_MINIMUM>(left, next_rows);
    if (in_pairs >= num_rows) continue;
    left = rows_times_groups<false, L::HAS_MINIMUM>(tiles.group(range.begin + in_pairs, g), 0, unpacked, count,
                                                    acc + in_pairs * NR, sums, {});
    finish<false, L::HAS_MINIMUM>(left, 0);
  }
  for (int64_t row = range.begin; row < range.end; row++, acc += NR)
    write_split(w, panel, load(acc), load(acc + VL), out, row);
}

template <int FORMAT>
static void gemm_split_as(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                          const Target& out) {
  if (m <= FEW_TILE_ROWS) return few_rows_split<FORMAT>(pool, scratch, w, in, m, out);
  const RowTiles rows = rows_as_tiles(pool, scratch, w, in, m);
  const Cut cut(pool, w, Rows::SPLIT, m);
  pool.run(cut.num_tasks(), [&](int task, int thread) {
    const Range panels = cut.panels(w, task), range = cut.rows(task, m);
    auto& acc = scratch.sums[thread];
    acc.need(row_tiles(range.end - range.begin) * TILE_ROWS * NR);
    TileScope scope;
    for (int64_t panel = panels.begin; panel < panels.end; panel++)
      panel_times_rows<FORMAT>(w, panel, rows, range, acc.data(), out);
  });
}

static inline void gemm_split(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                              const Target& out) {
  switch (w.format) {
    case Q8_TILES: return gemm_split_as<Q8_TILES>(pool, scratch, w, in, m, out);
    case Q8_SYMMETRIC_TILES: return gemm_split_as<Q8_SYMMETRIC_TILES>(pool, scratch, w, in, m, out);
    default: return gemm_split_as<Q4_TILES>(pool, scratch, w, in, m, out);
  }
}

#else

static inline void gemm_split(Pool&, GemmScratch&, const Packed&, const Source&, int64_t, const Target&) {}

#endif

// C (+)= A W^T in whatever way fits the format and the number of rows.
static inline void multiply_rows(Pool& pool, GemmScratch& scratch, const Packed& w, const Source& in, int64_t m,
                                 const Target& out) {
  switch (rows_for(w.format)) {
    case Rows::ROUNDED: return gemm_tiles(pool, scratch, w, in, m, out);
    case Rows::SPLIT: return gemm_split(pool, scratch, w, in, m, out);
    default: return gemm(pool, scratch, w, in, m, out);
  }
}

}  // namespace pd
