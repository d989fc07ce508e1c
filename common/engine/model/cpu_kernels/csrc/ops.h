// Row operations between the matrices: RMS norm, rotary embedding, writing K and V into the paged cache.
#pragma once
#include "packed.h"

namespace pd {

// Where K and V live: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] of float or bfloat16.
struct Cache {
  char* data;
  int32_t is_bf16, num_layers, block_size, num_kv_heads, head_dim;
  int64_t num_blocks;

  int64_t element_bytes() const { return is_bf16 ? 2 : 4; }
  int64_t token_stride() const { return int64_t(num_kv_heads) * head_dim; }
  // From K to V of the same token and head.
  int64_t value_offset() const { return block_size * token_stride() * element_bytes(); }
  // K and V of one block in one layer; those of the next layer lie behind them.
  int64_t block_bytes() const { return 2 * value_offset(); }
  // K of one token and head in one layer.
  char* at(int layer, int64_t block, int64_t offset, int head) const {
    const int64_t token = (block * num_layers + layer) * 2 * block_size + offset;
    return data + (token * token_stride() + int64_t(head) * head_dim) * element_bytes();
  }
};

// What a row is multiplied with, beside its weight.
static inline float rms_scale(const float* x, int64_t n, float eps) {
  lanes16 sum = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    lanes16 v = *(const lanes16_mem*)(x + i);
    sum += v * v;
  }
  for (int64_t lane = 0; i + lane < n; lane++) sum[lane] += x[i + lane] * x[i + lane];
  return 1.0f / std::sqrt(sum16(sum) / float(n) + eps);
}

static inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float scale = rms_scale(x, n, eps);
  for (int64_t j = 0; j < n; j++) out[j] = x[j] * scale * weight[j];
}

// Rotates the halves [0, half) and [half, 2 * half) of one head (the layout of Hugging Face's Llama).
static inline void rotate(float* head, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i++) {
    float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

static inline void write_cache(const float* x, char* to, int n, bool is_bf16) {
  if (!is_bf16) {
    std::memcpy(to, x, size_t(n) * 4);
    return;
  }
  uint16_t* out = (uint16_t*)to;
  int i = 0;
  for (; i + VL <= n; i += VL) store_bf16(out + i, load(x + i));
  for (; i < n; i++) out[i] = to_bf16(x[i]);
}

// What `pack_values` wrote.
static inline int unpacked_value(int32_t format, const char* values, int k, int lane) {
  if (format == Q4) return (((const uint32_t*)values)[k / 8 * NR + lane] >> (4 * (k % 8))) & 15;
  if (format == Q4_TILES) {
    const InWord at = in_nibbles(k, lane);
    return (rotated(((const uint16_t*)values)[at.word], 13) >> at.shift) & 15;
  }
  if (is_quantised_tiles(format)) return int(((const uint8_t*)values)[in_bytes(k, lane)]) - 128;
  return ((const int8_t*)values)[k * NR + lane];
}

// Row `index` of a packed matrix, dequantised: the embedding of a token.
static inline void unpacked_row(const Packed& w, int64_t index, float* out) {
  const int64_t panel = index / NR, step = group_bytes(w.format);
  const int lane = int(index % NR);
  const char* data = w.data + panel * panel_bytes(w.format, w.k);
  for (int64_t k = 0; k < w.k; k++) {
    const char* group = data + k / GROUP * step;
    const int64_t i = k % GROUP;
    if (w.format == F32) {
      out[k] = ((const float*)group)[i * NR + lane];
    } else if (w.format == BF16) {
      out[k] = from_bf16(((const uint16_t*)group)[i * NR + lane]);
    } else if (w.format == BF16_TILES) {
      out[k] = from_bf16(((const uint16_t*)group)[in_tiles(int(i), lane)]);
    } else {
      const bool is_symmetric = plain(w.format) == Q8_SYMMETRIC;
      const float scale = from_half(((const uint16_t*)group)[lane]);
      const float minimum = is_symmetric ? 0 : from_half(((const uint16_t*)group)[NR + lane]);
      const int q = unpacked_value(w.format, group + (is_symmetric ? NR * 2 : NR * 4), int(i), lane);
      out[k] = is_symmetric ? float(q) * scale : std::fma(float(q), scale, minimum);
    }
  }
}

}  // namespace pd
