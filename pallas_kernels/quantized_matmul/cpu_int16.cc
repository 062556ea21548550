// Activations rounded to int16.
#include "quantized_matmul/cpu_rounded.h"

namespace jaxinfer {

void int16_product(const Problems& problems, xla::ffi::ThreadPool& pool) { rounded_product<int16_t>(problems, pool); }

}  // namespace jaxinfer
