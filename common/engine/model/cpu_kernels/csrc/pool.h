// A small thread pool for phases of a few microseconds.
//
// Each thread has a stretch of neighbouring tasks and takes them in order, so what it asks memory for ahead of time is
// its own next task's; a thread that is done takes from the far end of another's stretch.
//
// The caller works too and a phase ends when its tasks are done, not when every thread has shown up: a thread that lost
// its core to another process delays nobody. Threads spin only while a forward is running (Pool::Session), then sleep
// in the kernel; an idle engine costs nothing.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pd {

// While it lives, numbers too small to be normal count as zero to this thread, as they always do to the tile unit: a sum
// is the same whoever adds it up.
class FlushScope {
 public:
  FlushScope() { _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
  ~FlushScope() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x40;
  const unsigned before_ = _mm_getcsr();
};

class Pool {
 public:
  explicit Pool(int num_threads) : size_(num_threads < 1 ? 1 : num_threads), stretches_(size_) {
    for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    if (getpid() != owner_) {  // a fork inherits the object but not the threads
      for (auto& worker : workers_) worker.detach();
      return;
    }
    stopping_.store(true);
    open_.store(1);
    wake();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  // While a session is open the workers poll for phases; between sessions they sleep.
  class Session {
   public:
    explicit Session(Pool& pool) : pool_(pool) {
      pool_.open_.store(1, std::memory_order_release);
      if (pool_.size_ > 1) pool_.wake();
    }
    ~Session() { pool_.open_.store(0, std::memory_order_release); }

   private:
    Pool& pool_;
    FlushScope flush_;
  };

  // Thread t begins with tasks [first_task(t), first_task(t + 1)).
  int first_task(int num_tasks, int thread) const { return int(int64_t(num_tasks) * thread / size_); }

  // Calls body(task, thread) for each task in [0, num_tasks); returns when all are done.
  template <class Body>
  void run(int num_tasks, const Body& body) {
    if (size_ == 1 || num_tasks <= 1) {
      for (int task = 0; task < num_tasks; task++) body(task, 0);
      return;
    }
    function_.store([](const void* b, int task, int thread) { (*static_cast<const Body*>(b))(task, thread); },
                    std::memory_order_relaxed);
    body_.store(&body, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    for (int t = 0; t < size_; t++) {
      const uint64_t begin = first_task(num_tasks, t), end = first_task(num_tasks, t + 1);
      stretches_[t].rest.store(end << 32 | begin, std::memory_order_relaxed);
    }
    uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(epoch << 32 | uint64_t(num_tasks) << 16, std::memory_order_release);
    while (take(0)) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != num_tasks; spins++) relax(spins);
  }

 private:
  struct alignas(64) Stretch {
    std::atomic<uint64_t> rest{0};  // end (32 bits) | next (32)
  };

  // A task for whoever has a claim: its own next one, or the last one of another thread's.
  int pick(int thread) {
    for (int other = 0;; other = (other + 1) % size_) {
      auto& rest = stretches_[(thread + other) % size_].rest;
      uint64_t seen = rest.load(std::memory_order_relaxed);
      while (uint32_t(seen) != seen >> 32) {
        const uint64_t left = other ? seen - (uint64_t(1) << 32) : seen + 1;
        if (rest.compare_exchange_weak(seen, left, std::memory_order_acq_rel))
          return other ? int(left >> 32) : int(uint32_t(seen));
      }
    }
  }

  // ticket: epoch (32 bits) | number of tasks (16) | claims (16)
  bool take(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      uint32_t claims = ticket & 0xffff, total = (ticket >> 16) & 0xffff;
      if (claims >= total) return false;
      if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        // The phase cannot end before this task does, so function and body are this phase's.
        function_.load(std::memory_order_relaxed)(body_.load(std::memory_order_relaxed), pick(thread), thread);
        done_.fetch_add(1, std::memory_order_acq_rel);
        return true;
      }
    }
  }

  static void relax(int spins) {
    if (spins < 4000)
      __builtin_ia32_pause();
    else
      sched_yield();
  }

  void work(int thread) {
    FlushScope flush;
    int spins = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
      if (take(thread)) {
        spins = 0;
      } else if (open_.load(std::memory_order_acquire)) {
        relax(spins++);
      } else {
        syscall(SYS_futex, &open_, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
        spins = 0;
      }
    }
  }

  void wake() { syscall(SYS_futex, &open_, FUTEX_WAKE_PRIVATE, size_, nullptr, nullptr, 0); }

  using Function = void (*)(const void*, int, int);
  const int size_;
  const pid_t owner_ = getpid();
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> done_{0};
  alignas(64) std::atomic<uint32_t> open_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<Function> function_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::vector<Stretch> stretches_;
  std::vector<std::thread> workers_;
};

}  // namespace pd
