// Splits work over XLA's own threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define JAXINFER_PAUSE() _mm_pause()
#else
#define JAXINFER_PAUSE() ((void)0)
#endif

// Defines the C function that jax.ffi calls; everything else in the library stays hidden.
#define JAXINFER_HANDLER(name, function, binding)                                                   \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)

namespace jaxinfer {

// Calls body(begin, end) for pieces of [0, n) of `grain` items, the last one shorter, on any of the pool's threads and
// on this one; returns when all are done. Threads take pieces as they come, so that a helper that the pool never
// starts (all its threads may be inside such calls and waiting) holds up nobody.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t n, int64_t grain, const Body& body) {
  const int64_t pieces = (n + grain - 1) / grain;
  const int64_t helpers = std::min<int64_t>(pieces, pool.num_threads()) - 1;
  if (helpers < 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();  // a helper may start after this call has returned: it then finds no piece
  auto work = [shared, pieces, n, grain, &body] {
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      body(i * grain, std::min(n, (i + 1) * grain));
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::remove_const_t<decltype(work)>(work));
  work();
  for (int waits = 0; shared->done.load(std::memory_order_acquire) < pieces; ++waits) {
    if (waits < 500) {
      JAXINFER_PAUSE();
    } else {
      std::this_thread::yield();  // more threads than CPUs: the helper may be waiting for this one
    }
  }
}

}  // namespace jaxinfer
