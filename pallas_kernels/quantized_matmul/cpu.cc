// x[M, K] times each of several weights of one format in tiles of 8 rows x 32 inputs (see cpu_weights.py), of activations as they are or rounded.
#include "quantized_matmul/cpu_problem.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxinfer {

// weights: data, scale and offset of each.
static ffi::Error quantized_matmul_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs weights,
                                        ffi::RemainingRets outs, int32_t activation_bits) {  // 32: floats
  std::vector<Problem> problems(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    const auto data = *weights.get<ffi::AnyBuffer>(3 * i), scale = *weights.get<ffi::AnyBuffer>(3 * i + 1),
               offset = *weights.get<ffi::AnyBuffer>(3 * i + 2);
    ffi::AnyBuffer out = **outs.get<ffi::AnyBuffer>(i);
    Problem& p = problems[i];
    p.M = x.dimensions()[0];
    p.K = x.dimensions()[1];
    p.N = out.dimensions()[1];
    p.bits = static_cast<int>(data.dimensions()[2]);
    p.group = static_cast<int>(p.K / scale.dimensions()[1]);
    p.x = x.untyped_data();
    p.bf16_x = x.element_type() == ffi::BF16;
    p.data = static_cast<const uint8_t*>(data.untyped_data());
    p.scale = static_cast<const uint16_t*>(scale.untyped_data());
    p.offset = offset.element_count() ? static_cast<const uint16_t*>(offset.untyped_data()) : nullptr;
    p.out = out.untyped_data();
    p.bf16_out = out.element_type() == ffi::BF16;
  }
  if (problems.empty() || !problems[0].M) return ffi::Error::Success();
  (activation_bits == 16 ? int16_product : activation_bits == 8 ? int8_product : float_product)(problems, pool);
  return ffi::Error::Success();
}

}  // namespace jaxinfer

JAXINFER_HANDLER(quantized_matmul, jaxinfer::quantized_matmul_impl,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()  // x
                     .RemainingArgs()
                     .RemainingRets()
                     .Attr<int32_t>("activation_bits"));
