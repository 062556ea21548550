// Activations rounded to int8.
#include "quantized_matmul/cpu_rounded.h"

namespace jaxinfer {

void int8_product(const Problems& problems, xla::ffi::ThreadPool& pool) { rounded_product<int8_t>(problems, pool); }

}  // namespace jaxinfer
