// Causal attention of a block of queries over the paged cache, straight from the block table.
//
// Keys are visited in tiles of TILE tokens from position 0, with an online softmax [Milakov & Gimelshein 2018,
// arXiv:1805.02867] that starts afresh every SEGMENT tokens; segments are merged in order. So a query's result does not
// depend on how its prompt was cut into chunks, who shares its batch, or how tasks were cut:
//
//   keys   | tile 0 | tile 1 | ... | tile 7 || tile 8 | ...      a task: one sequence, some queries, KV heads, segments
//          |          segment 0            ||  segment 1
//   score = q K^T (in order of head_dim) -> running max, exp, sum (16 lanes) -> O = O * rescale + P V (in token order)
//
// Few rows: attention_few.h. On the tile unit (bfloat16): attention_amx.h. Many rows: here.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "attention_amx.h"
#include "attention_few.h"
#include "gemm.h"
#include "ops.h"
#include "softmax.h"

namespace pd {

constexpr int SEGMENT = 256;  // keys per segment
constexpr int QUERIES = 16;   // queries per task
constexpr int MAX_HEAD_DIM = 512;

struct AttentionTask {
  int32_t seq, first_query, num_queries;  // first_query: row of the batch
  int32_t first_position;                 // of first_query in its sequence
  int32_t first_head, end_head;           // KV heads
  int32_t first_key, end_key;             // keys [first_key, end_key), first_key at the start of a segment
  int32_t partial;                        // where the one segment's state goes, or -1: write the result

  int32_t num_keys() const { return first_position + num_queries; }
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
  int32_t use_tiles;  // on the tile unit (attention_amx.h): other bits
  RowTiles out_tiles;  // instead of `out` where there are any: rows of a product on the tile unit
};

struct AttentionScratch {
  Buffer q, scores, keys, values, segment, total, tile_queries, tiles;
};

// c[MR][NR] += a[MR][k_end] times one float panel. Meanwhile asks for what comes next: 2 lines of row `k >> shift`.
template <int MR>
static void add_product(const float* a, int64_t lda, int64_t k_end, const float* panel, float* c, int64_t ldc,
                        const char* const* next, int shift, int64_t offset) {
  Tile<MR, 1> acc;
  for (int i = 0; i < MR; i++)
    for (int half = 0; half < 2; half++) acc[i][half] = load(c + i * ldc + half * VL);
  for (int64_t k = 0; k < k_end; k++) {
    const char* ahead = next[k >> shift] + offset + (k & ((1 << shift) - 1)) * 128;
    __builtin_prefetch(ahead);
    __builtin_prefetch(ahead + 64);
    const vf left = load(panel + k * NR), right = load(panel + k * NR + VL);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const vf x = splat(a[i * lda + k]);
      acc[i][0] += x * left;
      acc[i][1] += x * right;
    }
  }
  for (int i = 0; i < MR; i++)
    for (int half = 0; half < 2; half++) store(c + i * ldc + half * VL, acc[i][half]);
}

using ProductFunction = void (*)(const float*, int64_t, int64_t, const float*, float*, int64_t, const char* const*, int,
                                 int64_t);
template <int... I>
constexpr std::array<ProductFunction, sizeof...(I)> products_of(std::integer_sequence<int, I...>) {
  return {&add_product<I + 1>...};
}

static inline void add_product_rows(int rows, const float* a, int64_t lda, int64_t k_end, const float* panel, float* c,
                                    int64_t ldc, const char* const* next, int shift, int64_t offset) {
  static constexpr auto table = products_of(std::make_integer_sequence<int, MAX_ROWS>{});
  for (int at = 0, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, t = 0; t < tiles; t++) {
    const int end = rows * (t + 1) / tiles;
    table[end - at - 1](a + at * lda, lda, k_end, panel, c + at * ldc, ldc, next, shift, offset);
    at = end;
  }
}

// Widens a bfloat16 row into `space`, or returns the float row itself.
static inline const float* widened(const char* row, bool is_bf16, int dim, float* space) {
  if (!is_bf16) return (const float*)row;
  const uint16_t* values = (const uint16_t*)row;
  int d = 0;
  for (; d + VL <= dim; d += VL) store(space + d, load_bf16(values + d));
  for (; d < dim; d++) space[d] = from_bf16(values[d]);
  return space;
}

// Where K of the TILE tokens from `begin` on lies for the task's first head. From num_keys on: the last one again, whose
// weight will be 0.
static inline void locate(const AttentionArgs& args, const AttentionTask& task, int begin, const char** keys) {
  const uint32_t block_size = uint32_t(args.cache.block_size);
  const int32_t* table = args.block_tables + task.seq * args.max_blocks;
  const int64_t stride = args.cache.token_stride() * args.cache.element_bytes();
  const int count = std::min(TILE, task.num_keys() - begin);
  uint32_t block = uint32_t(begin) / block_size, offset = uint32_t(begin) % block_size;
  const char* at = args.cache.at(args.layer, table[block], offset, task.first_head);
  for (int t = 0; t < count; t++, offset++, at += stride) {
    if (offset == block_size) {
      block++, offset = 0;
      at = args.cache.at(args.layer, table[block], 0, task.first_head);
    }
    keys[t] = at;
  }
  for (int t = count; t < TILE; t++) keys[t] = keys[count - 1];
}

// Copies one tile of K (transposed, panels of NR tokens) and V (panels of NR dims) into the scratch.
static inline void load_tile(const Cache& cache, const TileRows& rows, int64_t wide, AttentionScratch& s) {
  const int dim = cache.head_dim, whole = dim / 8 * 8;
  float space[16][MAX_HEAD_DIM];
  for (int first = 0; first < TILE; first += 8) {
    const float *k[8], *v[8];
    for (int i = 0; i < 8; i++) {
      const char* at = rows.now[first + i] + rows.offset;
      k[i] = widened(at, cache.is_bf16, dim, space[i]);
      v[i] = widened(at + cache.value_offset(), cache.is_bf16, dim, space[8 + i]);
    }
    float* key = s.keys.data() + first / NR * (int64_t(dim) * NR) + first % NR;
    for (int d = 0; d < whole; d += 8) transpose8(k, d, key + int64_t(d) * NR, NR);
    for (int d = whole; d < dim; d++)
      for (int i = 0; i < 8; i++) key[int64_t(d) * NR + i] = k[i][d];
    for (int d = 0; d < wide; d += NR) {
      float* value = s.values.data() + d * TILE + first * NR;
      for (int i = 0; i < 8; i++) {
        if (d + NR <= dim) {
          store(value + i * NR, load(v[i] + d));
          store(value + i * NR + VL, load(v[i] + d + VL));
        } else {
          for (int e = 0; e < NR; e++) value[i * NR + e] = d + e < dim ? v[i][d + e] : 0.0f;
        }
      }
    }
  }
}

// Rows of a task: KV head, then query, then query head of the group. Writes the scaled queries into the scratch.
static inline void gather_queries(const AttentionArgs& args, const AttentionTask& task, float* to) {
  const int dim = args.cache.head_dim, group = args.group;
  for (int head = task.first_head; head < task.end_head; head++)
    for (int i = 0; i < task.num_queries; i++) {
      const float* q = args.q + (task.first_query + i) * args.ldq + int64_t(head) * group * dim;
      for (int d = 0; d < group * dim; d++) *to++ = q[d] * args.scale;
    }
}

static inline void write_result(const AttentionArgs& args, const AttentionTask& task, const SoftmaxState& state) {
  const int dim = args.cache.head_dim, group = args.group;
  float space[MAX_HEAD_DIM];
  int64_t row = 0;
  for (int head = task.first_head; head < task.end_head; head++)
    for (int i = 0; i < task.num_queries; i++) {
      for (int g = 0; g < group; g++, row++) {
        const int64_t token = task.first_query + i, column = (int64_t(head) * group + g) * dim;
        float* out = args.out_tiles ? space : args.out + token * args.ldo + column;
        const float inverse = 1.0f / sum16(*(lanes16_mem*)(state.sum + row * 16));
        for (int d = 0; d < dim; d++) out[d] = state.out[row * state.dim + d] * inverse;
        if (args.out_tiles) args.out_tiles.put_row(token, column, space, dim);
      }
    }
}

// Scores of one tile turn into probabilities. row: of the state.
static inline void softmax_rows(const AttentionArgs& args, const AttentionTask& task, int begin, int rows,
                                float* scores, const SoftmaxState& state, int64_t row) {
  for (int r = 0; r < rows; r++) {
    const int end = task.first_position + r / args.group + 1 - begin;
    softmax_row(scores + r * TILE, args.window ? end - args.window : 0, end, state, row + r);
  }
}

// One tile of keys for one KV head: rows [row, row + num_queries * group) of the state.
static inline void attend_tile(const AttentionArgs& args, const AttentionTask& task, int head, int begin,
                               TileRows tile, AttentionScratch& s, const SoftmaxState& state) {
  const int dim = args.cache.head_dim, rows = task.num_queries * args.group;
  const int64_t row = int64_t(head - task.first_head) * rows;
  const float* q = s.q.data() + row * dim;
  float *scores = s.scores.data(), *out = state.out + row * state.dim;
  const int count = std::min(TILE, task.num_keys() - begin);
  tile.offset = int64_t(head - task.first_head) * dim * args.cache.element_bytes();
  if (args.use_tiles) {
    const TileAttention on{dim, args.group, rows, count, task.first_position + 1 - begin, args.window, tile.now, tile.next,
                           tile.offset, args.cache.value_offset(), args.cache.token_stride() * 2};
    const float* queries = s.tile_queries.data() + (head - task.first_head) * query_tile_floats(rows, dim);
    attend_on_tiles(on, queries, s.tiles.data(), state.max + row, state.sum + row * 16, out, state.dim);
    return;
  }
  if (const FewFunctions* few = few_functions_for(rows, dim, args.cache.is_bf16)) {
    few->scores(q, dim, tile, scores);
    softmax_rows(args, task, begin, rows, scores, state, row);
    tile.offset += args.cache.value_offset();
    few->values(scores, count, dim, tile, out, state.dim);
    return;
  }
  load_tile(args.cache, tile, state.dim, s);
  std::memset(scores, 0, size_t(rows) * TILE * sizeof(float));
  int shift = 0;  // dim >> shift rows of 2 << shift cache lines
  while ((dim - 1) >> shift >= TILE) shift++;
  for (int half = 0; half < TILE / NR; half++)
    add_product_rows(rows, q, dim, dim, s.keys.data() + int64_t(half) * dim * NR, scores + half * NR, TILE, tile.next,
                     shift, tile.offset);
  softmax_rows(args, task, begin, rows, scores, state, row);
  for (int64_t d = 0; d < state.dim; d += NR)
    add_product_rows(rows, scores, TILE, TILE, s.values.data() + d * TILE, out + d, state.dim, tile.next, 0,
                     tile.offset + args.cache.value_offset() + d * args.cache.element_bytes());
}

static inline int64_t padded(int head_dim) { return (head_dim + NR - 1) / NR * NR; }

// The task's queries, scaled; for the tile unit also as its tiles.
static inline void take_queries(const AttentionArgs& args, const AttentionTask& task, AttentionScratch& s) {
  const int dim = args.cache.head_dim, rows = task.num_queries * args.group, heads = task.end_head - task.first_head;
  s.q.need(int64_t(heads) * rows * dim);
  gather_queries(args, task, s.q.data());
  if (!args.use_tiles) return;
  const int64_t floats = query_tile_floats(rows, dim);
  s.tile_queries.need(heads * floats);
  s.tiles.need(tile_scratch_floats(rows, dim));
  for (int head = 0; head < heads; head++)
    queries_to_tiles(s.q.data() + int64_t(head) * rows * dim, rows, dim, s.tile_queries.data() + head * floats);
}

// partials: the states of tasks that are one segment of several, each of `partial_floats` floats.
static inline void attend(const AttentionArgs& args, const AttentionTask& task, AttentionScratch& s, float* partials,
                          int64_t partial_floats) {
  const int dim = args.cache.head_dim, rows = (task.end_head - task.first_head) * task.num_queries * args.group;
  const int64_t wide = padded(dim);
  s.scores.need(int64_t(task.num_queries) * args.group * TILE);
  s.keys.need(int64_t(dim) * TILE);
  s.values.need(wide * TILE);
  s.segment.need(SoftmaxState::floats(rows, wide));
  s.total.need(SoftmaxState::floats(rows, wide));
  take_queries(args, task, s);
  std::optional<TileScope> tiles_on;
  if (args.use_tiles) tiles_on.emplace();
  const SoftmaxState total(s.total.data(), rows, wide);
  const bool is_partial = task.partial >= 0;
  const SoftmaxState segment(is_partial ? partials + task.partial * partial_floats : s.segment.data(), rows, wide);
  if (!is_partial) total.clear(rows);
  const char* keys[2][TILE];
  int tile = 0;  // keys[tile % 2] are located
  const int oldest = args.window ? std::max(0, task.first_position + 1 - args.window) / TILE * TILE : 0;
  for (int first = task.first_key; first < task.end_key; first += SEGMENT) {
    segment.clear(rows);
    const int end = std::min(first + SEGMENT, task.end_key);
    for (int begin = std::max(first, oldest); begin < end; begin += TILE, tile++) {
      const char **now = keys[tile % 2], **next = keys[(tile + 1) % 2];
      if (tile == 0) locate(args, task, begin, now);
      const bool is_last = begin + TILE >= task.end_key;
      if (!is_last) locate(args, task, begin + TILE, next);
      for (int head = task.first_head; head < task.end_head; head++)
        attend_tile(args, task, head, begin, {now, is_last ? now : next, 0}, s, segment);
    }
    if (!is_partial) total.merge(rows, segment);
  }
  if (!is_partial) write_result(args, task, total);
}

// Which tasks one batch is cut into, and the states of those that share a query.
class AttentionPlan {
 public:
  void make(const int64_t* query_start, const int64_t* seq_lens, int64_t num_seqs, int num_kv_heads, const Pool& pool) {
    tasks_.clear();
    merges_.clear();
    num_partials_ = 0;
    for (int64_t seq = 0; seq < num_seqs; seq++) {
      const int64_t begin = query_start[seq], end = query_start[seq + 1];
      for (int64_t q = begin; q < end; q += QUERIES) {
        AttentionTask task{int32_t(seq), int32_t(q), int32_t(std::min<int64_t>(QUERIES, end - q)),
                           int32_t(seq_lens[seq] - end + q), 0, num_kv_heads, 0, 0, -1};
        task.end_key = task.num_keys();
        add(task, num_seqs < 4 * pool.size());
      }
    }
    deal(pool);
  }

  // Lists the blocks that each thread will read, as they lie in layer 0, for `Ahead`.
  void list_blocks(const Pool& pool, const Cache& cache, const int32_t* block_tables, int64_t max_blocks,
                   Ahead& ahead) const {
    ahead.clear();
    const int num_tasks = int(tasks_.size());
    for (int thread = 0; thread < pool.size(); thread++)
      for (int i = pool.first_task(num_tasks, thread); i < pool.first_task(num_tasks, thread + 1); i++) {
        const AttentionTask& task = tasks_[i];
        if (task.first_head) continue;  // the first head's task asks for all of them
        for (int64_t block = task.first_key / cache.block_size; block * cache.block_size < task.end_key; block++) {
          if (ahead.num_pieces(thread) * cache.block_bytes() >= MOST_AHEAD_BYTES) break;
          ahead.add(thread, cache.at(0, block_tables[task.seq * max_blocks + block], 0, 0));
        }
      }
  }

  void run(Pool& pool, const AttentionArgs& args, std::vector<AttentionScratch>& scratch) {
    const int64_t wide = padded(args.cache.head_dim), rows = int64_t(args.cache.num_kv_heads) * args.group;
    const int64_t floats = (SoftmaxState::floats(FEW_QUERIES * rows, wide) + 15) / 16 * 16, per_run = 1 << 15;
    partials_.need(num_partials_ * floats);
    for (int64_t first = 0; first < int64_t(tasks_.size()); first += per_run)
      pool.run(int(std::min<int64_t>(per_run, tasks_.size() - first)), [&](int task, int thread) {
        attend(args, tasks_[first + task], scratch[thread], partials_.data(), floats);
      });
    for (const AttentionTask& merge : merges_) {
      const int64_t count = rows * merge.num_queries;
      scratch[0].total.need(SoftmaxState::floats(count, wide));
      const SoftmaxState total(scratch[0].total.data(), count, wide);
      total.clear(count);
      for (int64_t i = 0; i * SEGMENT < merge.end_key; i++) {
        const SoftmaxState segment(partials_.data() + (merge.partial + i) * floats, count, wide);
        total.merge(count, segment);
      }
      write_result(args, merge, total);
    }
  }

 private:
  static constexpr int FEW_QUERIES = 8;
  static constexpr int64_t MOST_AHEAD_BYTES = 1 << 20;  // half of an L2 cache

  // Few queries read much and compute little: all heads of a token together, as they lie. With few sequences their
  // segments are shared out, and short ones head by head. Many queries compute much: head by head.
  void add(AttentionTask task, bool few_sequences) {
    const int num_heads = task.end_head;
    if (task.num_queries <= FEW_QUERIES && few_sequences && task.end_key > SEGMENT) {
      task.partial = num_partials_;
      merges_.push_back(task);
      for (int first = 0; first < task.num_keys(); first += SEGMENT) {
        task.first_key = first;
        task.end_key = std::min(first + SEGMENT, task.num_keys());
        task.partial = num_partials_++;
        tasks_.push_back(task);
      }
    } else if (task.num_queries <= FEW_QUERIES && !few_sequences) {
      tasks_.push_back(task);
    } else {
      for (int head = 0; head < num_heads; head++) {
        task.first_head = head;
        task.end_head = head + 1;
        tasks_.push_back(task);
      }
    }
  }

  // Long ones first, and to every thread some of each length: the last task to end decides when the phase does.
  void deal(const Pool& pool) {
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const AttentionTask& a, const AttentionTask& b) {
      return a.end_key - a.first_key > b.end_key - b.first_key;
    });
    sorted_ = tasks_;
    const int num_tasks = int(tasks_.size());
    int dealt = 0;
    for (int round = 0; dealt < num_tasks; round++)
      for (int thread = 0; thread < pool.size(); thread++) {
        const int place = pool.first_task(num_tasks, thread) + round;
        if (place < pool.first_task(num_tasks, thread + 1)) tasks_[place] = sorted_[dealt++];
      }
  }

  std::vector<AttentionTask> tasks_, sorted_, merges_;
  Buffer partials_;
  int32_t num_partials_ = 0;
};

}  // namespace pd
