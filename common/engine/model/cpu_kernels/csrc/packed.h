// How a weight matrix [N, K] lies in memory, packed once at load.
//
// N is cut into panels of NR columns, K runs inside a panel, so every kernel streams it front to back:
//
//   panel 0 (columns 0..NR-1)                     panel 1
//   | k=0: NR values | k=1: NR values | ... |     | ...
//
// Quantised panels interleave scales with the groups of 32 k they belong to:
//
//   | NR half scales | NR half minima | 32 * NR values | next group ...
//
// For the tile unit (`_TILES`) the values of a group lie as tiles of 16 columns, or so that they unpack into such.
//
// `paired` matrices hold two matrices of N/2 columns (gate, up): a panel is VL columns of the first, VL of the second.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace pd {

enum Format : int32_t {
  F32 = 0, BF16 = 1, Q8 = 2, Q8_SYMMETRIC = 3, Q4 = 4,
  BF16_TILES = 5, Q8_TILES = 6, Q8_SYMMETRIC_TILES = 7, Q4_TILES = 8
};
constexpr bool is_quantised_tiles(int32_t format) { return format >= Q8_TILES; }
// The format that holds the same numbers in the same room for vectors.
constexpr int32_t plain(int32_t format) {
  switch (format) {
    case BF16_TILES: return BF16;
    case Q8_TILES: return Q8;
    case Q8_SYMMETRIC_TILES: return Q8_SYMMETRIC;
    case Q4_TILES: return Q4;
    default: return format;
  }
}
constexpr int GROUP = 32;  // k values that share a scale, as in GGUF's Q4_1 and Q8_0

struct Packed {
  int32_t format;
  int32_t paired;
  int64_t n, k;
  const char* data;
  const float* bias;  // in panel order, num_panels * NR values, or null

  int64_t num_panels() const { return paired ? (n / 2 + VL - 1) / VL : (n + NR - 1) / NR; }
  // Row of the unpacked matrix that lane `lane` of panel `panel` holds, or -1 (padding).
  int64_t row(int64_t panel, int lane) const {
    if (!paired) {
      int64_t r = panel * NR + lane;
      return r < n ? r : -1;
    }
    int64_t half = n / 2, r = panel * VL + lane % VL;
    return r >= half ? -1 : lane < VL ? r : half + r;
  }
};

template <int FORMAT>
struct Layout;
template <>
struct Layout<F32> {
  static constexpr int group_bytes = GROUP * NR * 4;
};
template <>
struct Layout<BF16> {
  static constexpr int group_bytes = GROUP * NR * 2;
};
template <>
struct Layout<Q8> {
  static constexpr int group_bytes = NR * 4 + GROUP * NR;
};
template <>
struct Layout<Q8_SYMMETRIC> {
  static constexpr int group_bytes = NR * 2 + GROUP * NR;
};
template <>
struct Layout<Q4> {
  static constexpr int group_bytes = NR * 4 + GROUP * NR / 2;
};

inline int64_t group_bytes(int32_t format) {
  switch (plain(format)) {
    case F32: return Layout<F32>::group_bytes;
    case BF16: return Layout<BF16>::group_bytes;
    case Q8: return Layout<Q8>::group_bytes;
    case Q8_SYMMETRIC: return Layout<Q8_SYMMETRIC>::group_bytes;
    default: return Layout<Q4>::group_bytes;
  }
}

inline int64_t panel_bytes(int32_t format, int64_t k) { return group_bytes(format) * k / GROUP; }

// One group of 32 weights as value = scale * q + minimum; levels of q: [low, high].
struct Group {
  float scale, minimum;
  int low, high;
  float value(int q) const { return std::fma(scale, float(q), minimum); }
  int quantise(float x) const {
    if (scale == 0) return 0;
    return int(std::nearbyint(std::min(float(high), std::max(float(low), (x - minimum) / scale))));
  }
  double error(const float* w) const {
    double worst = 0;
    for (int i = 0; i < GROUP; i++) worst = std::max(worst, std::fabs(double(w[i]) - value(quantise(w[i]))));
    return worst;
  }
};

inline float through_half(float x) { return from_half(to_half(x)); }

inline Group fit(const float* w, int32_t format) {
  float low = w[0], high = w[0];
  for (int i = 1; i < GROUP; i++) {
    low = std::min(low, w[i]);
    high = std::max(high, w[i]);
  }
  if (format == Q8_SYMMETRIC) return {through_half(std::max(std::fabs(low), std::fabs(high)) / 127), 0, -127, 127};
  float minimum = through_half(low);
  Group four{through_half((high - minimum) / 15), minimum, 0, 15};
  if (format == Q4) return four;
  Group symmetric = fit(w, Q8_SYMMETRIC);
  float middle = through_half((low + high) / 2);
  float half_range = std::max(high - middle, middle - low);
  Group full{through_half(half_range / 127), middle, -127, 127};
  Group best = full.error(w) < symmetric.error(w) ? full : symmetric;
  return four.error(w) < best.error(w) ? four : best;
}

// Where (k, lane) of a group lies in BF16_TILES: [tile of 16 columns][pair of k][column][2].
inline int in_tiles(int k, int lane) { return lane / 16 * (GROUP * 16) + k / 2 * 32 + lane % 16 * 2 + k % 2; }
// In Q4_TILES: which 16-bit word, [tile][4][column][2], and by how much it is shifted there: nibble i of word j unpacks
// to pair 4 j + i (k and k + 16 are a pair). Words are rotated left by 3.
struct InWord {
  int word, shift;
};
inline InWord in_nibbles(int k, int lane) {
  return {lane / 16 * 128 + k % 16 / 4 * 32 + lane % 16 * 2 + k / 16, k % 4 * 4};
}
inline uint16_t rotated(uint16_t word, int by) { return uint16_t(word << by | word >> (16 - by)); }
// In Q8_TILES: [tile][8][column][two pairs], 128 added (0 is not used).
inline int in_bytes(int k, int lane) {
  return lane / 16 * 512 + k % 16 / 2 * 64 + lane % 16 * 4 + k % 2 * 2 + k / 16;
}

// Writes the levels of one lane of a quantised group.
inline void pack_values(int32_t format, char* values, int lane, const int* q) {
  if (format == Q4) {  // a dword holds 8 consecutive k of one column
    for (int j = 0; j < GROUP / 8; j++) {
      uint32_t word = 0;
      for (int i = 0; i < 8; i++) word |= uint32_t(q[j * 8 + i]) << (4 * i);
      ((uint32_t*)values)[j * NR + lane] = word;
    }
  } else if (format == Q4_TILES) {
    for (int k = 0; k < GROUP; k++) {
      const InWord at = in_nibbles(k, lane);
      uint16_t& word = ((uint16_t*)values)[at.word];
      word = rotated(uint16_t((rotated(word, 13) & ~(15 << at.shift)) | q[k] << at.shift), 3);
    }
  } else if (is_quantised_tiles(format)) {
    for (int k = 0; k < GROUP; k++) ((uint8_t*)values)[in_bytes(k, lane)] = uint8_t(q[k] + 128);
  } else {
    for (int k = 0; k < GROUP; k++) ((int8_t*)values)[k * NR + lane] = int8_t(q[k]);
  }
}

// Writes one lane of a group; returns whether each weight comes back bit for bit.
inline bool pack_group(int32_t format, char* out, int lane, const float* w) {
  if (format == F32) {
    for (int k = 0; k < GROUP; k++) ((float*)out)[k * NR + lane] = w[k];
    return true;
  }
  bool exact = true;
  if (format == BF16 || format == BF16_TILES) {
    for (int k = 0; k < GROUP; k++) {
      ((uint16_t*)out)[format == BF16 ? k * NR + lane : in_tiles(k, lane)] = to_bf16(w[k]);
      exact &= from_bf16(to_bf16(w[k])) == w[k];
    }
    return exact;
  }
  const bool is_symmetric = plain(format) == Q8_SYMMETRIC;
  const Group group = fit(w, plain(format));
  int q[GROUP];
  for (int k = 0; k < GROUP; k++) {
    q[k] = group.quantise(w[k]);
    exact &= group.value(q[k]) == w[k];
  }
  ((uint16_t*)out)[lane] = to_half(group.scale);
  if (!is_symmetric) ((uint16_t*)out)[NR + lane] = to_half(group.minimum);
  pack_values(format, out + (is_symmetric ? NR * 2 : NR * 4), lane, q);
  return exact;
}

// Packs one panel of w [n, k]; returns whether it holds the weights exactly.
inline bool pack_panel(const Packed& shape, const float* w, int64_t panel, char* out) {
  static const float zeros[GROUP] = {};
  bool exact = true;
  for (int lane = 0; lane < NR; lane++) {
    const int64_t row = shape.row(panel, lane);
    for (int64_t g = 0; g < shape.k / GROUP; g++) {
      const float* group = row < 0 ? zeros : w + row * shape.k + g * GROUP;
      exact &= pack_group(shape.format, out + g * group_bytes(shape.format), lane, group);
    }
  }
  return exact;
}

}  // namespace pd
