// Splits work over XLA's own threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define JAXINFER_PAUSE() _mm_pause()
#else
#define JAXINFER_PAUSE() ((void)0)
#endif

// Defines the FFI handler `name`, visible in a library that hides all else.
#define JAXINFER_HANDLER(name, implementation, binding)    \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, implementation, binding)

namespace jaxinfer {

// Pieces of one call's work, taken by its own thread and by helpers as they come.
class Job {
 public:
  using Run = void (*)(const void* body, int64_t begin, int64_t end);

  Job(Run run, const void* body, int64_t n, int64_t grain)
      : run_(run), body_(body), n_(n), grain_(grain), pieces_((n + grain - 1) / grain) {}

  void work() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < pieces_;)
      run_(body_, i * grain_, std::min(n_, (i + 1) * grain_));
  }
  bool has_pieces() const { return next_.load(std::memory_order_relaxed) < pieces_; }
  int64_t pieces() const { return pieces_; }

  std::atomic<int> helpers{0};

 private:
  const Run run_;
  const void* const body_;
  const int64_t n_, grain_, pieces_;
  std::atomic<int64_t> next_{0};
};

// Helpers are tasks of XLA's pool that look out for the next job for a while after the last: a decode step makes
// hundreds of calls of 10-50 us, and waking a sleeping thread takes as long. A job never waits for a helper that has
// not started (all threads of the pool may be inside such calls): it waits for those that joined it.
class Team {
 public:
  static Team& get() {
    static Team team;
    return team;
  }

  void run(xla::ffi::ThreadPool& pool, Job& job) {
    const bool published = publish(&job);
    if (published) {
      const int wanted = static_cast<int>(std::min<int64_t>(pool.num_threads(), job.pieces())) - 1;
      while (active_.load(std::memory_order_relaxed) < wanted) {
        active_.fetch_add(1, std::memory_order_relaxed);
        pool.Schedule([this] { help(); });
      }
    }
    job.work();
    if (!published) return;  // another call has the helpers
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_.store(nullptr, std::memory_order_relaxed);
    }
    for (int waits = 0; job.helpers.load(std::memory_order_acquire) > 0; ++waits) pause(waits);
  }

 private:
  bool publish(Job* job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (job_.load(std::memory_order_relaxed)) return false;
    job_.store(job, std::memory_order_release);
    return true;
  }

  Job* join() {
    Job* seen = job_.load(std::memory_order_acquire);  // may be gone: looked into under the lock alone
    if (!seen) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    Job* job = job_.load(std::memory_order_relaxed);
    if (!job || !job->has_pieces()) return nullptr;
    job->helpers.fetch_add(1, std::memory_order_relaxed);
    return job;
  }

  void help() {
    using Clock = std::chrono::steady_clock;
    auto until = Clock::now() + kLookout;
    for (int waits = 0;; ++waits) {
      if (Job* job = join()) {
        job->work();
        job->helpers.fetch_sub(1, std::memory_order_release);
        waits = 0;
        until = Clock::now() + kLookout;
      } else if (waits % 64 == 63 && Clock::now() > until) {
        break;
      }
      JAXINFER_PAUSE();
    }
    active_.fetch_sub(1, std::memory_order_relaxed);
  }

  static void pause(int waits) {
    if (waits < 500) {
      JAXINFER_PAUSE();
    } else {
      std::this_thread::yield();  // more threads than CPUs: the helper may be waiting for this one
    }
  }

  static constexpr std::chrono::microseconds kLookout{100};

  std::mutex mutex_;
  std::atomic<Job*> job_{nullptr};
  std::atomic<int> active_{0};  // helpers scheduled or running
};

// Calls body(begin, end) for pieces of [0, n) of `grain` items, the last one shorter, on any of the pool's threads and
// on this one; returns when all are done.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t n, int64_t grain, const Body& body) {
  if (n <= grain || pool.num_threads() < 2) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  Job job([](const void* body, int64_t begin, int64_t end) { (*static_cast<const Body*>(body))(begin, end); }, &body,
          n, grain);
  Team::get().run(pool, job);
}

}  // namespace jaxinfer
