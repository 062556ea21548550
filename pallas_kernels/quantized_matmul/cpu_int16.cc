// Activations rounded to int16.
#include "quantized_matmul/cpu_rounded.h"

namespace jaxinfer {

void int16_product(const Problem& p, xla::ffi::ThreadPool& pool) { rounded_product<int16_t>(p, pool); }

}  // namespace jaxinfer
