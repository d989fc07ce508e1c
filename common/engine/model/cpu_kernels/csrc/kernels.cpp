// The C border of the kernels; library.py declares the same signatures for ctypes.
#include <sys/mman.h>

#include "decoder.h"

using namespace pd;

namespace {

struct Threads {
  explicit Threads(int n) : pool(n), gemm(pool.size()), attention(pool.size()) {}
  Pool pool;
  GemmScratch gemm;
  std::vector<AttentionScratch> attention;
};

}  // namespace

extern "C" {

int64_t pd_lanes() { return VL; }
int32_t pd_has_tiles() { return has_tiles(); }

// Pages of 2 MB where the system grants them: streaming weights then misses the TLB 512 times less.
void pd_advise_huge(void* data, int64_t bytes) {
  const uintptr_t page = 2 << 20, begin = (uintptr_t(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (uintptr_t(data) + bytes) & ~(page - 1);
  if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}

void* pd_threads_new(int32_t n) { return new Threads(n); }
void pd_threads_free(void* threads) { delete static_cast<Threads*>(threads); }

// Reads every byte once, all threads together: what streaming weights can reach (benchmarks).
float pd_read(void* threads, const char* data, int64_t bytes) {
  auto& pool = static_cast<Threads*>(threads)->pool;
  Pool::Session session(pool);
  const int64_t piece = 1 << 20;
  std::vector<vf> sums(pool.size(), vf{});
  pool.run(int(bytes / piece), [&](int task, int thread) {
    vf a = {}, b = {}, c = {}, d = {};
    for (const char *at = data + task * piece, *end = at + piece; at < end; at += 4 * sizeof(vf)) {
      __builtin_prefetch(at + 4096);
      __builtin_prefetch(at + 4096 + 64);
      __builtin_prefetch(at + 4096 + 128);
      __builtin_prefetch(at + 4096 + 192);
      a += load((const float*)at);
      b += load((const float*)at + VL);
      c += load((const float*)at + 2 * VL);
      d += load((const float*)at + 3 * VL);
    }
    sums[thread] += a + b + c + d;
  });
  return sums[0][0];
}

int64_t pd_packed_bytes(const Packed* w) { return w->num_panels() * panel_bytes(w->format, w->k); }
int64_t pd_packed_columns(const Packed* w) { return w->num_panels() * NR; }

// weight: float [n, k]; to: pd_packed_bytes(shape) bytes. Returns whether the packed form holds it bit for bit; with
// `only_exact` it stops as soon as it does not.
int32_t pd_pack(void* threads, const Packed* shape, const float* weight, char* to, int32_t only_exact) {
  const int64_t bytes = panel_bytes(shape->format, shape->k), panels = shape->num_panels();
  auto& pool = static_cast<Threads*>(threads)->pool;
  Pool::Session session(pool);
  std::atomic<bool> exact{true};
  const int64_t per_task = std::max<int64_t>(1, panels / 64);
  pool.run(int((panels + per_task - 1) / per_task), [&](int task, int) {
    for (int64_t p = task * per_task; p < std::min(panels, (task + 1) * per_task); p++) {
      if (only_exact && !exact) return;
      if (!pack_panel(*shape, weight, p, to + p * bytes)) exact = false;
    }
  });
  return exact;
}

// bias: float [n] -> panel order, pd_packed_columns(shape) values.
void pd_pack_bias(const Packed* shape, const float* bias, float* to) {
  for (int64_t panel = 0; panel < shape->num_panels(); panel++)
    for (int lane = 0; lane < NR; lane++) {
      const int64_t row = shape->row(panel, lane);
      to[panel * NR + lane] = row < 0 ? 0.0f : bias[row];
    }
}

void pd_unpack_row(const Packed* w, int64_t row, float* out) { unpacked_row(*w, row, out); }

// x: float [m, lda]; out: float [m, ldc]; mode: 0 store, 1 add, 2 silu(gate) * up.
void pd_linear(void* threads, const Packed* w, const float* x, int64_t lda, int64_t m, float* out, int64_t ldc,
               int32_t mode) {
  auto* t = static_cast<Threads*>(threads);
  Pool::Session session(t->pool);
  multiply_rows(t->pool, t->gemm, *w, {x, lda}, m, {out, ldc, Out(mode)});
}

void pd_rms_norm(const float* x, const float* weight, int64_t rows, int64_t n, float eps, float* out) {
  for (int64_t r = 0; r < rows; r++) rms_norm(x + r * n, weight, n, eps, out + r * n);
}

// exp of count values (tests).
void pd_exp(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = exp_one(x[i]);
}

// q, out: float [num_tokens, num_heads * head_dim] with row strides ldq, ldo.
void pd_attention(void* threads, const AttentionArgs* args, const int64_t* query_start, const int64_t* seq_lens,
                  int64_t num_seqs) {
  auto* t = static_cast<Threads*>(threads);
  AttentionPlan plan;
  plan.make(query_start, seq_lens, num_seqs, args->cache.num_kv_heads, t->pool);
  Pool::Session session(t->pool);
  plan.run(t->pool, *args, t->attention);
}

void* pd_decoder_new(const DecoderConfig* config, const LayerWeights* layers, const Packed* embedding,
                     const Packed* head, const float* final_norm, const float* cos, const float* sin,
                     int32_t num_threads) {
  return new Decoder(*config, layers, *embedding, *head, final_norm, cos, sin, num_threads);
}
void pd_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

int32_t pd_decoder_forward(void* decoder, const Step* step, const Cache* cache, float* logits) {
  return int32_t(static_cast<Decoder*>(decoder)->forward(*step, *cache, logits));
}

}  // extern "C"
