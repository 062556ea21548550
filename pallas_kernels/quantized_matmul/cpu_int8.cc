// Activations rounded to int8.
#include "quantized_matmul/cpu_rounded.h"

namespace jaxinfer {

void int8_product(const Problem& p, xla::ffi::ThreadPool& pool) { rounded_product<int8_t>(p, pool); }

}  // namespace jaxinfer
