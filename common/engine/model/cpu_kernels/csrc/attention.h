// Causal attention of a block of queries over the paged cache, straight from the block table.
//
// One task: one sequence, one KV head, up to QUERIES consecutive queries and all query heads of the group as rows.
// Keys are visited in tiles of TILE tokens aligned to the position 0, with an online softmax [Milakov & Gimelshein 2018,
// arXiv:1805.02867], so a query's result does not depend on how its prompt was cut into chunks or who shares its block:
//
//   keys      | tile 0: 0..31 | tile 1: 32..63 | ...      rows: query 0 head 0, query 0 head 1, ..., query 1 head 0, ...
//   score = q K^T (in order of head_dim) -> running max, exp, sum (16 lanes) -> O = O * rescale + P V (in token order)
#pragma once
#include <limits>
#include <vector>

#include "gemm.h"
#include "ops.h"

namespace pd {

constexpr int TILE = 32;      // keys per tile
constexpr int QUERIES = 16;   // queries per task

struct AttentionTask {
  int32_t seq, first_query, num_queries, kv_head;  // first_query: row of the batch
  int32_t first_position;                          // position of first_query in its sequence
};

struct AttentionArgs {
  Cache cache;
  int layer, group;         // group: query heads per KV head
  int window;               // a query sees this many last keys, itself included; 0: all
  const float* q;           // [num_tokens, ldq], head-major
  int64_t ldq;
  float* out;               // [num_tokens, ldo]
  int64_t ldo;
  const int32_t* block_tables;
  int64_t max_blocks;
  float scale;
};

class AttentionScratch {
 public:
  void reserve(int rows, int head_dim) {
    padded_dim = (head_dim + NR - 1) / NR * NR;
    need(q, int64_t(rows) * head_dim);
    need(scores, int64_t(rows) * TILE);
    need(out, int64_t(rows) * padded_dim);
    need(keys, int64_t(head_dim) * TILE);
    need(values, int64_t(padded_dim) * TILE);
    need(max, rows);
    need(sum, int64_t(rows) * 16);
  }
  std::vector<float> q, scores, out, keys, values, max, sum;
  int64_t padded_dim = 0;

 private:
  static void need(std::vector<float>& v, int64_t n) {
    if (int64_t(v.size()) < n) v.resize(n);
  }
};

static inline void transpose8(const float* in, int64_t stride, float* out, int64_t out_stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(in + i * stride);
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

// Rows [0, rows) of a [rows, K] times a panel-packed float matrix of `panels` panels, added to c (row stride ldc).
template <int MR>
static void add_product(const float* a, int64_t lda, int64_t k_end, const float* panel, int64_t panels, float* c,
                        int64_t ldc) {
  for (int64_t p = 0; p < panels; p++) {
    const char* data = (const char*)(panel + p * k_end * NR);
    Tile<MR, 1> acc;
    for (int i = 0; i < MR; i++)
      for (int half = 0; half < 2; half++) acc[i][half] = load(c + i * ldc + p * NR + half * VL);
    multiply<F32, MR, 1>(a, lda, &data, k_end, acc);
    for (int i = 0; i < MR; i++)
      for (int half = 0; half < 2; half++) store(c + i * ldc + p * NR + half * VL, acc[i][half]);
  }
}

using ProductFunction = void (*)(const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t);
template <int... I>
constexpr std::array<ProductFunction, sizeof...(I)> products_of(std::integer_sequence<int, I...>) {
  return {&add_product<I + 1>...};
}

static inline void add_product_rows(int rows, const float* a, int64_t lda, int64_t k_end, const float* panel,
                                    int64_t panels, float* c, int64_t ldc) {
  static constexpr auto table = products_of(std::make_integer_sequence<int, MAX_ROWS>{});
  for (int at = 0, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, t = 0; t < tiles; t++) {
    int end = rows * (t + 1) / tiles;
    table[end - at - 1](a + at * lda, lda, k_end, panel, panels, c + at * ldc, ldc);
    at = end;
  }
}

// Copies one tile of K (transposed, panels of NR tokens) and V (panels of NR dims) into the scratch; absent tokens are 0.
static inline void load_tile(const AttentionArgs& args, const int32_t* table, int kv_head, int64_t begin, int count,
                             AttentionScratch& s) {
  const Cache& cache = args.cache;
  const int dim = cache.head_dim;
  float rows[8 * 512];
  if (count < TILE) {
    std::fill(s.keys.begin(), s.keys.begin() + int64_t(dim) * TILE, 0.0f);
    std::fill(s.values.begin(), s.values.begin() + s.padded_dim * TILE, 0.0f);
  }
  for (int t = 0; t < count; t++) {
    const int64_t position = begin + t, block = table[position / cache.block_size];
    const int64_t slot = block * cache.block_size + position % cache.block_size;
    const char *k = cache.at(args.layer, 0, slot, kv_head), *v = cache.at(args.layer, 1, slot, kv_head);
    float* row = rows + (t % 8) * dim;
    float* value = s.values.data() + t * NR;
    if (cache.is_bf16) {
      for (int d = 0; d < dim; d++) row[d] = from_bf16(((const uint16_t*)k)[d]);
      for (int d = 0; d < dim; d++) value[d / NR * (TILE * NR) + d % NR] = from_bf16(((const uint16_t*)v)[d]);
    } else {
      std::memcpy(row, k, size_t(dim) * 4);
      for (int d = 0; d < dim; d += NR) std::memcpy(value + d * TILE, (const float*)v + d, size_t(std::min(NR, dim - d)) * 4);
    }
    float* key = s.keys.data() + t / NR * (int64_t(dim) * NR);
    if (t % 8 == 7) {
      for (int d = 0; d + 8 <= dim; d += 8) transpose8(rows + d, dim, key + int64_t(d) * NR + t % NR - 7, NR);
      for (int i = 0; i < 8; i++)
        for (int d = dim / 8 * 8; d < dim; d++) key[int64_t(d) * NR + t % NR - 7 + i] = rows[i * dim + d];
    } else if (t == count - 1) {
      for (int i = 0; i <= t % 8; i++)
        for (int d = 0; d < dim; d++) key[int64_t(d) * NR + t % NR - t % 8 + i] = rows[i * dim + d];
    }
  }
}

// Turns one row of scores into probabilities; rescales what the row has gathered so far. Keys [first, end) are seen.
static inline void softmax_row(float* score, int first, int end, float& max, float* sum, float* out, int64_t dim) {
  if (end <= 0 || first >= TILE) {
    std::memset(score, 0, TILE * sizeof(float));
    return;
  }
  const float absent = -std::numeric_limits<float>::infinity();
  for (int t = 0; t < first; t++) score[t] = absent;
  for (int t = std::max(end, 0); t < TILE; t++) score[t] = absent;
  float peak = max;
  for (int t = 0; t < TILE; t++) peak = score[t] > peak ? score[t] : peak;
  lanes16 lanes = *(lanes16_mem*)sum;
  if (peak != max) {
    const float rescale = max == absent ? 0.0f : exp_lanes<lanes16, lanes16i>(lanes16{} + (max - peak))[0];
    for (int64_t d = 0; d < dim; d++) out[d] *= rescale;
    lanes *= rescale;
    max = peak;
  }
  for (int half = 0; half < TILE; half += 16) {
    lanes16 x = *(lanes16_mem*)(score + half);
    lanes16 p = exp_lanes<lanes16, lanes16i>(x - peak);
    p = x == absent ? lanes16{} : p;
    lanes += p;
    *(lanes16_mem*)(score + half) = p;
  }
  *(lanes16_mem*)sum = lanes;
}

static inline void attend(const AttentionArgs& args, const AttentionTask& task, AttentionScratch& s) {
  const int dim = args.cache.head_dim, group = args.group, rows = task.num_queries * group;
  s.reserve(QUERIES * group, dim);
  for (int r = 0; r < rows; r++) {
    const float* q = args.q + (task.first_query + r / group) * args.ldq + int64_t(task.kv_head * group + r % group) * dim;
    for (int d = 0; d < dim; d++) s.q[int64_t(r) * dim + d] = q[d] * args.scale;
  }
  std::fill(s.out.begin(), s.out.begin() + rows * s.padded_dim, 0.0f);
  std::fill(s.sum.begin(), s.sum.begin() + rows * 16, 0.0f);
  std::fill(s.max.begin(), s.max.begin() + rows, -std::numeric_limits<float>::infinity());
  const int32_t* table = args.block_tables + task.seq * args.max_blocks;
  const int num_keys = task.first_position + task.num_queries;
  const int oldest = args.window ? std::max(0, task.first_position + 1 - args.window) / TILE * TILE : 0;
  for (int begin = oldest; begin < num_keys; begin += TILE) {
    load_tile(args, table, task.kv_head, begin, std::min(TILE, num_keys - begin), s);
    for (int half = 0; half < TILE / NR; half++) {
      for (int r = 0; r < rows; r++) std::memset(&s.scores[r * TILE + half * NR], 0, NR * sizeof(float));
      add_product_rows(rows, s.q.data(), dim, dim, &s.keys[int64_t(half) * dim * NR], 1, &s.scores[half * NR], TILE);
    }
    for (int r = 0; r < rows; r++) {
      const int end = task.first_position + r / group + 1 - begin;
      softmax_row(&s.scores[r * TILE], args.window ? end - args.window : 0, end, s.max[r], &s.sum[r * 16],
                  &s.out[r * s.padded_dim], dim);
    }
    add_product_rows(rows, s.scores.data(), TILE, TILE, s.values.data(), s.padded_dim / NR, s.out.data(), s.padded_dim);
  }
  for (int r = 0; r < rows; r++) {
    float* out = args.out + (task.first_query + r / group) * args.ldo + int64_t(task.kv_head * group + r % group) * dim;
    const float inverse = 1.0f / sum16(*(lanes16_mem*)&s.sum[r * 16]);
    for (int d = 0; d < dim; d++) out[d] = s.out[r * s.padded_dim + d] * inverse;
  }
}

}  // namespace pd
