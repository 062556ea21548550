// Zeros that take memory when they are first written.
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ffi = xla::ffi;

namespace jaxinfer {

static ffi::Error zeros_on_demand_impl(ffi::Result<ffi::AnyBuffer> out) {
  auto* begin = static_cast<uint8_t*>(out->untyped_data());
  uint8_t* end = begin + out->size_bytes();
#if defined(__linux__)
  // XLA's buffers come from malloc, hence from private anonymous memory, whose pages Linux replaces by zeros here.
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* first = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  auto* last = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (first < last && madvise(first, last - first, MADV_DONTNEED) == 0) {
    std::memset(begin, 0, first - begin);
    begin = last;
  }
#endif
  std::memset(begin, 0, end - begin);
  return ffi::Error::Success();
}

}  // namespace jaxinfer

JAXINFER_HANDLER(zeros_on_demand, jaxinfer::zeros_on_demand_impl, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
