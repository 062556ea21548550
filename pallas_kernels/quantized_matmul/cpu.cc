// x[M, K] times weights in tiles of 8 rows x 32 inputs (see cpu_weights.py), of activations as they are or rounded.
#include "quantized_matmul/cpu_problem.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxinfer {

static ffi::Error quantized_matmul_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data,
                                        ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::Result<ffi::AnyBuffer> out,
                                        int32_t activation_bits) {  // 32: floats
  Problem p{};
  p.M = x.dimensions()[0];
  p.K = x.dimensions()[1];
  p.N = out->dimensions()[1];
  p.bits = static_cast<int>(data.dimensions()[2]);
  p.group = static_cast<int>(p.K / scale.dimensions()[1]);
  p.x = x.untyped_data();
  p.bf16_x = x.element_type() == ffi::BF16;
  p.data = static_cast<const uint8_t*>(data.untyped_data());
  p.scale = static_cast<const uint16_t*>(scale.untyped_data());
  p.offset = offset.element_count() ? static_cast<const uint16_t*>(offset.untyped_data()) : nullptr;
  p.out = out->untyped_data();
  p.bf16_out = out->element_type() == ffi::BF16;
  if (p.M && p.N)
    (activation_bits == 16 ? int16_product : activation_bits == 8 ? int8_product : float_product)(p, pool);
  return ffi::Error::Success();
}

}  // namespace jaxinfer

JAXINFER_HANDLER(quantized_matmul, jaxinfer::quantized_matmul_impl,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()  // x
                     .Arg<ffi::AnyBuffer>()  // data
                     .Arg<ffi::AnyBuffer>()  // scale
                     .Arg<ffi::AnyBuffer>()  // offset
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int32_t>("activation_bits"));
