// One forward of a Llama-family decoder: all layers in one call, no allocation in the steady state.
#pragma once
#include <mutex>

#include "amx_quantised.h"
#include "attention.h"
#include "highest.h"

namespace pd {

struct LayerWeights {
  const float *attention_norm, *mlp_norm;  // [hidden]
  const float *q_norm, *k_norm;            // [head_dim] or null
  Packed qkv, output, gate_up, down;
};

struct DecoderConfig {
  int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab, max_positions, window;
  float norm_eps, attention_scale;
};

struct Step {
  const int64_t *token_ids, *positions, *slot_mapping, *logits_indices;
  const int32_t* block_tables;
  const int64_t *query_start, *seq_lens;
  int64_t num_tokens, num_seqs, max_blocks, num_logits;
  int64_t* highest;  // [num_logits] or null, see find_highest
};

enum class Fault : int32_t { NONE = 0, TOKEN = 1, POSITION = 2, SLOT = 3, BLOCK = 4, LENGTH = 5, LOGITS_INDEX = 6 };

class Decoder {
 public:
  Decoder(const DecoderConfig& config, const LayerWeights* layers, const Packed& embedding, const Packed& head,
          const float* final_norm, const float* cos, const float* sin, int num_threads)
      : config_(config), layers_(layers, layers + config.num_layers), embedding_(embedding), head_(head),
        final_norm_(final_norm), cos_(cos), sin_(sin), pool_(num_threads), gemm_(pool_.size()), ahead_(pool_.size()),
        attention_(pool_.size()) {}

  Fault forward(const Step& step, const Cache& cache, float* logits) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (Fault fault = check(step, cache); fault != Fault::NONE) return fault;
    if (step.num_tokens == 0) return Fault::NONE;
    reserve(step.num_tokens);
    plan_.make(step.query_start, step.seq_lens, step.num_seqs, config_.num_kv_heads, pool_);
    plan_.list_blocks(pool_, cache, step.block_tables, step.max_blocks, ahead_);
    ahead_.start(0, cache.block_bytes());
    Pool::Session session(pool_);
    for_rows(step.num_tokens, [&](int64_t row) { unpacked_row(embedding_, step.token_ids[row], hidden(row)); });
    for (int layer = 0; layer < config_.num_layers; layer++) {
      const bool last = layer + 1 == config_.num_layers;
      attention_block(layer, step, cache, last && step.num_logits == 0);
      if (!last) feed_forward(layer, step.num_tokens);
    }
    if (step.num_logits == 0) return Fault::NONE;
    // Only the wanted rows go through the rest of the last layer.
    keep_rows(step);
    const int last = config_.num_layers - 1;
    project_attention(last, step.num_logits, {});
    feed_forward(last, step.num_logits);
    norm_rows(step.num_logits, final_norm_);
    const Source wanted = normed_rows(step.num_logits);
    multiply_rows(pool_, gemm_, head_, wanted, step.num_logits, {logits, config_.vocab, Out::STORE});
    if (step.highest) find_highest(logits, step.num_logits, step.highest);
    return Fault::NONE;
  }

 private:
  int64_t q_size() const { return int64_t(config_.num_heads) * config_.head_dim; }
  int64_t kv_size() const { return int64_t(config_.num_kv_heads) * config_.head_dim; }
  // Row strides end off a power of two, so rows of a register tile do not compete for the same cache sets.
  int64_t ldx() const { return config_.hidden + 16; }
  int64_t ldqkv() const { return q_size() + 2 * kv_size() + 16; }
  int64_t ldo() const { return q_size() + 16; }
  int64_t lda() const { return config_.intermediate + 16; }
  float* hidden(int64_t row) { return hidden_.data() + row * ldx(); }
  float* normed(int64_t row) { return normed_.data() + row * ldx(); }

  // On the tile unit rows go from one product to the next laid out for it: `normed_`, `activated_` and, but for the last
  // layer's, `attended_` then hold tiles. A few rows to be split stay floats, shorter to hand from core to core.
  Rows row_kind() const { return rows_for(layers_[0].qkv.format); }
  RowTiles tiles_of(Buffer& buffer, int64_t width, int64_t rows) {
    const bool plain = row_kind() == Rows::PLAIN || (row_kind() == Rows::SPLIT && rows <= FEW_TILE_ROWS);
    return plain ? RowTiles{} : RowTiles{row_kind(), (char*)buffer.data(), width, rows};
  }
  RowTiles normed_tiles(int64_t rows) { return tiles_of(normed_, config_.hidden, rows); }
  RowTiles activated_tiles(int64_t rows) { return tiles_of(activated_, config_.intermediate, rows); }
  Source normed_rows(int64_t rows) { return {normed_.data(), ldx(), normed_tiles(rows), &ahead_}; }

  // Over a bfloat16 cache attention takes the tile unit where the matrices do; 16 tokens of a block are a tile.
  bool attends_on_tiles(const Cache& cache) const {
    const bool fits = config_.head_dim % 32 == 0 && cache.block_size % 16 == 0;
    return row_kind() != Rows::PLAIN && cache.is_bf16 && fits;
  }

  Fault check(const Step& step, const Cache& cache) const {
    const int64_t num_slots = cache.num_blocks * cache.block_size;
    for (int64_t i = 0; i < step.num_tokens; i++) {
      if (step.token_ids[i] < 0 || step.token_ids[i] >= config_.vocab) return Fault::TOKEN;
      if (step.positions[i] < 0 || step.positions[i] >= config_.max_positions) return Fault::POSITION;
      if (step.slot_mapping[i] < 0 || step.slot_mapping[i] >= num_slots) return Fault::SLOT;
    }
    for (int64_t seq = 0; seq < step.num_seqs; seq++) {
      const int64_t begin = step.query_start[seq], end = step.query_start[seq + 1], length = step.seq_lens[seq];
      if (begin < 0 || begin > end || end > step.num_tokens || length < end - begin) return Fault::LENGTH;
      if (length > step.max_blocks * cache.block_size) return Fault::LENGTH;
      for (int64_t b = 0; b * cache.block_size < length; b++) {
        const int32_t block = step.block_tables[seq * step.max_blocks + b];
        if (block < 0 || block >= cache.num_blocks) return Fault::BLOCK;
      }
    }
    for (int64_t i = 0; i < step.num_logits; i++)
      if (step.logits_indices[i] < 0 || step.logits_indices[i] >= step.num_tokens) return Fault::LOGITS_INDEX;
    return Fault::NONE;
  }

  void reserve(int64_t rows) {
    if (rows <= capacity_) return;
    capacity_ = rows;
    hidden_.need(rows * ldx());
    const auto with_tiles = [&](int64_t ld) {
      return std::max(rows * ld, row_tiles_bytes(row_kind(), rows, ld) / 4);
    };
    normed_.need(with_tiles(ldx()));
    qkv_.need(rows * ldqkv());
    attended_.need(with_tiles(ldo()));
    activated_.need(with_tiles(lda()));
  }

  // A few rows are cheaper done here than handed out.
  template <class Body>
  void for_rows(int64_t rows, const Body& body) {
    if (rows < 8) {
      for (int64_t row = 0; row < rows; row++) body(row);
      return;
    }
    const int64_t per_task = std::max<int64_t>(4, rows / (pool_.size() * 8));
    pool_.run(int((rows + per_task - 1) / per_task), [&](int task, int) {
      for (int64_t row = task * per_task; row < std::min(rows, (task + 1) * per_task); row++) body(row);
    });
  }

  void norm_rows(int64_t rows, const float* weight) {
    const RowTiles tiles = normed_tiles(rows);
    for_rows(rows, [&](int64_t row) {
      if (tiles)
        tiles.put_normed(row, hidden(row), weight, config_.norm_eps);
      else
        rms_norm(hidden(row), weight, config_.hidden, config_.norm_eps, normed(row));
    });
  }

  void attention_block(int layer, const Step& step, const Cache& cache, bool only_cache) {
    const LayerWeights& w = layers_[layer];
    norm_rows(step.num_tokens, w.attention_norm);
    const Source rows = normed_rows(step.num_tokens);
    multiply_rows(pool_, gemm_, w.qkv, rows, step.num_tokens, {qkv_.data(), ldqkv(), Out::STORE});
    for_rows(step.num_tokens, [&](int64_t row) { place(layer, step, cache, row); });
    if (only_cache) return;
    const int group = config_.num_heads / config_.num_kv_heads;
    const bool is_last = layer + 1 == config_.num_layers, use_tiles = attends_on_tiles(cache);
    // The last layer's rows are picked among; heads that end inside 32 columns are not written as tiles.
    const RowTiles tiles = is_last || config_.head_dim % GROUP ? RowTiles{} : tiles_of(attended_, q_size(), step.num_tokens);
    const AttentionArgs args{cache, layer, group, config_.window, qkv_.data(), ldqkv(), attended_.data(), ldo(),
                             step.block_tables, step.max_blocks, config_.attention_scale, use_tiles, tiles};
    plan_.run(pool_, args, attention_);
    if (is_last)
      ahead_.clear();
    else
      ahead_.start((layer + 1) * cache.block_bytes(), cache.block_bytes());
    if (!is_last) project_attention(layer, step.num_tokens, tiles);
  }

  // Norms and rotates the heads of one token and writes its K and V into the cache.
  void place(int layer, const Step& step, const Cache& cache, int64_t row) {
    const LayerWeights& w = layers_[layer];
    const int dim = config_.head_dim, half = dim / 2;
    float* heads = qkv_.data() + row * ldqkv();
    const float* cos = cos_ + step.positions[row] * half;
    const float* sin = sin_ + step.positions[row] * half;
    for (int head = 0; head < config_.num_heads + config_.num_kv_heads; head++) {
      const float* norm = head < config_.num_heads ? w.q_norm : w.k_norm;
      if (norm) rms_norm(heads + head * dim, norm, dim, config_.norm_eps, heads + head * dim);
      rotate(heads + head * dim, cos, sin, half);
    }
    const int64_t block = step.slot_mapping[row] / cache.block_size, offset = step.slot_mapping[row] % cache.block_size;
    for (int head = 0; head < config_.num_kv_heads; head++) {
      char* at = cache.at(layer, block, offset, head);
      write_cache(heads + q_size() + head * dim, at, dim, cache.is_bf16);
      write_cache(heads + q_size() + kv_size() + head * dim, at + cache.value_offset(), dim, cache.is_bf16);
    }
  }

  void project_attention(int layer, int64_t rows, const RowTiles& tiles) {
    const Target residual{hidden_.data(), ldx(), Out::ADD};
    multiply_rows(pool_, gemm_, layers_[layer].output, {attended_.data(), ldo(), tiles, &ahead_}, rows, residual);
  }

  void feed_forward(int layer, int64_t rows) {
    const LayerWeights& w = layers_[layer];
    norm_rows(rows, w.mlp_norm);
    const Target activated{activated_.data(), lda(), Out::SILU, activated_tiles(rows)};
    multiply_rows(pool_, gemm_, w.gate_up, normed_rows(rows), rows, activated);
    const Source down{activated_.data(), lda(), activated_tiles(rows), &ahead_};
    multiply_rows(pool_, gemm_, w.down, down, rows, {hidden_.data(), ldx(), Out::ADD});
  }

  // The first token with the highest logit of each row; -1 where that is no finite number or a logit is NaN. Each
  // thread looks at the columns it has just written, or nearly so.
  void find_highest(const float* logits, int64_t rows, int64_t* tokens) {
    const int64_t parts = pool_.size(), vocab = config_.vocab;
    highest_.resize(rows * parts);
    pool_.run(int(parts), [&](int part, int) {
      for (int64_t row = 0; row < rows; row++)
        highest_[row * parts + part] = highest_of(logits + row * vocab, vocab * part / parts, vocab * (part + 1) / parts);
    });
    for (int64_t row = 0; row < rows; row++) {
      const Highest* found = highest_.data() + row * parts;
      Highest best = found[0];
      for (int64_t part = 1; part < parts; part++)
        if (!(found[part].value <= best.value)) best = std::isnan(best.value) ? best : found[part];
      tokens[row] = std::isfinite(best.value) ? best.place : -1;
    }
  }

  // Moves the rows whose logits are wanted to the front (through `normed_` and `qkv_`: the order may be any).
  void keep_rows(const Step& step) {
    for (int64_t i = 0; i < step.num_logits; i++) {
      const int64_t row = step.logits_indices[i];
      std::memcpy(normed(i), hidden(row), size_t(config_.hidden) * 4);
      std::memcpy(qkv_.data() + i * ldqkv(), attended_.data() + row * ldo(), size_t(q_size()) * 4);
    }
    for (int64_t i = 0; i < step.num_logits; i++) {
      std::memcpy(hidden(i), normed(i), size_t(config_.hidden) * 4);
      std::memcpy(attended_.data() + i * ldo(), qkv_.data() + i * ldqkv(), size_t(q_size()) * 4);
    }
  }

  const DecoderConfig config_;
  const std::vector<LayerWeights> layers_;
  const Packed embedding_, head_;
  const float *final_norm_, *cos_, *sin_;
  Pool pool_;
  GemmScratch gemm_;
  Ahead ahead_;
  std::vector<AttentionScratch> attention_;
  AttentionPlan plan_;
  std::vector<Highest> highest_;
  Buffer hidden_, normed_, qkv_, attended_, activated_;
  int64_t capacity_ = 0;
  std::mutex mutex_;
};

}  // namespace pd
