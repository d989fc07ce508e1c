// Vectors of the widest unit this machine has, and the few elementwise functions the decoder needs.
//
// Everything here is elementwise or reduces in the fixed order of 16 lanes, so a result does not depend on the width
// of the machine's vectors. FMA contraction (-ffp-contract=fast) is relied on: `a * b + c` rounds once.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "exp.h"

namespace pd {

#if defined(__AVX512F__)
constexpr int VL = 16;            // lanes of one register
constexpr int MAX_ROWS = 14;      // rows of a register tile: 14 x 2 accumulators + 2 weights + 1 activation
constexpr int MAX_ACCUMULATORS = 28;
#else
constexpr int VL = 8;
constexpr int MAX_ROWS = 6;
constexpr int MAX_ACCUMULATORS = 12;
#endif
constexpr int NR = 2 * VL;        // columns of a weight panel

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef float lanes16 __attribute__((vector_size(64)));
typedef int32_t lanes16i __attribute__((vector_size(64)));
typedef float lanes16_mem __attribute__((vector_size(64), aligned(4), may_alias));

static inline vf load(const float* p) { return *(const vf_mem*)p; }
static inline void store(float* p, vf v) { *(vf_mem*)p = v; }

static inline vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#else
  return (vf)_mm256_set1_ps(x);
#endif
}

static inline vf load_bf16(const uint16_t* p) {
  vi wide = __builtin_convertvector(*(const vh*)p, vi) << 16;
  return (vf)wide;
}

static inline vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
}

static inline vf load_int8(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
}

// Nibble i of each lane as a float.
static inline vf nibble(vi words, int i) {
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (vf)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), values);  // looks at the low four bits only
#else
  return __builtin_convertvector((words >> (4 * i)) & 15, vf);
#endif
}

static inline uint16_t to_bf16(float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// `to_bf16` of each lane.
static inline void store_bf16(uint16_t* p, vf x) {
  typedef uint32_t vu __attribute__((vector_size(VL * 4)));
  const vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *(vh*)p = __builtin_convertvector(x != x ? ((bits >> 16) | 0x40) : rounded, vh);
}

static inline uint16_t to_half(float x) { return _cvtss_sh(x, 0); }
static inline float from_half(uint16_t x) { return _cvtsh_ss(x); }

// Floats at a multiple of 64 bytes; grows, never shrinks, and forgets its content when it grows.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void need(int64_t count) {
    if (count <= size_) return;
    std::free(data_);
    size_ = (count + 15) / 16 * 16;
    data_ = static_cast<float*>(std::aligned_alloc(64, size_t(size_) * sizeof(float)));
    if (!data_) throw std::bad_alloc();
    std::memset(data_, 0, size_t(size_) * sizeof(float));
  }
  float* data() { return data_; }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

static inline float sum16(lanes16 v) {
  float a[16];
  std::memcpy(a, &v, 64);
  for (int width = 8; width; width >>= 1)
    for (int i = 0; i < width; i++) a[i] += a[i + width];
  return a[0];
}

static inline lanes16 larger(lanes16 a, lanes16 b) { return a > b ? a : b; }

// The largest of 16 lanes (no NaN among them).
static inline float max16(lanes16 v) {
  v = larger(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
  v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
  v = larger(v, __builtin_shufflevector(v, v, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0));
  return v[0];
}

// exp, as far as single precision goes: beyond [-87.33, 88.37] that of the bound.
template <class F, class I>
static inline F exp_lanes(F x) {
  F low = F{} - 87.33f, high = F{} + 88.37f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  return exp_of_bounded<F, I>(x);
}

static inline float exp_one(float x) { return exp_lanes<lanes16, lanes16i>(lanes16{} + x)[0]; }
static inline vf exp_v(vf x) { return exp_lanes<vf, vi>(x); }
static inline vf silu(vf x) { return x / (exp_v(-x) + 1.0f); }

}  // namespace pd
