// RMS normalization on CPUs, with the residual sum before it. A row is summed in one fixed order, so that its result
// depends neither on the other rows nor on the number of threads.
#include <cmath>
#include <cstdint>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace ffi = xla::ffi;

namespace jaxinfer::rms_norm {
namespace {

constexpr int64_t kGrain = 1 << 14;  // values of a piece: less would not be worth another thread

// Writes x + y to `total` if there is a y, and returns the sum of squares.
float add_and_square(const float* x, const float* y, int64_t D, float* total) {
  Vec squares[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= D; i += 2 * kLanes)
    for (int j = 0; j < 2; ++j) {
      const int64_t at = i + j * kLanes;
      Vec v = load(x + at);
      if (y) store(total + at, v = v + load(y + at));
      squares[j] += v * v;
    }
  float rest = 0;
  for (; i < D; ++i) {
    float v = x[i];
    if (y) total[i] = v = v + y[i];
    rest += v * v;
  }
  return sum(squares[0] + squares[1]) + rest;
}

void norm_row(const float* x, const float* y, const float* scale, int64_t D, float eps, float* total, float* out) {
  const float factor = 1.0f / std::sqrt(add_and_square(x, y, D, total) / D + eps);
  const float* from = y ? total : x;
  for (int64_t i = 0; i < D; ++i) out[i] = from[i] * factor * scale[i];
}

using Array = ffi::Buffer<ffi::F32>;

ffi::Error run(ffi::ThreadPool pool, const Array& x, const float* y, const Array& scale, float eps, float* total,
               float* out) {
  const int64_t D = scale.element_count(), T = D ? x.element_count() / D : 0;
  const float *from = x.typed_data(), *scales = scale.typed_data();
  parallel_for(pool, T, std::max<int64_t>(1, kGrain / std::max<int64_t>(D, 1)), [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    for (int64_t t = begin; t < end; ++t)
      norm_row(from + t * D, y ? y + t * D : nullptr, scales, D, eps, y ? total + t * D : nullptr, out + t * D);
  });
  return ffi::Error::Success();
}

ffi::Error norm(ffi::ThreadPool pool, Array x, Array scale, ffi::Result<Array> out, float eps) {
  return run(pool, x, nullptr, scale, eps, nullptr, out->typed_data());
}

ffi::Error add_norm(ffi::ThreadPool pool, Array x, Array y, Array scale, ffi::Result<Array> total,
                    ffi::Result<Array> out, float eps) {
  return run(pool, x, y.typed_data(), scale, eps, total->typed_data(), out->typed_data());
}

}  // namespace
}  // namespace jaxinfer::rms_norm

JAXINFER_HANDLER(rms_norm, jaxinfer::rms_norm::norm,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Ret<ffi::Buffer<ffi::F32>>()
                     .Attr<float>("eps"));

JAXINFER_HANDLER(add_rms_norm, jaxinfer::rms_norm::add_norm,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Ret<ffi::Buffer<ffi::F32>>()
                     .Ret<ffi::Buffer<ffi::F32>>()
                     .Attr<float>("eps"));
