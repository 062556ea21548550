// The KV write on CPUs, in place, with the rotation of the keys on the way.
//
// A piece of work is one KV head of the keys or of the values, whose tokens are written in order: should two share a
// slot (padding does), the last one stays, on any number of threads.
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace ffi = xla::ffi;

namespace jaxinfer::kv_write {
namespace {

constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kSerial = 1 << 16;  // values below which other threads would come too late

struct Side {
  const void* from;  // [T, K, H]
  void* pages;       // [K, slots, H]
  bool is_rotated;
};

struct Problem {
  int64_t T, K, H, slots, half;
  const int32_t* slot_mapping;
  const float* cos;  // [T, half]
  const float* sin;
};

// Rotates the pairs (x[i], x[i + half]) in f32 and rounds them to their own type.
template <class From>
void rotate(const From* __restrict x, int64_t half, const float* cos, const float* sin, From* __restrict y) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    from_float(a * cos[i] - b * sin[i], y + i);
    from_float(b * cos[i] + a * sin[i], y + half + i);
  }
}

template <class From, class To>
void write_head(const Problem& a, const Side& side, int64_t head) {
  From rotated[kMaxHeadDim];
  To* pages = static_cast<To*>(side.pages) + head * a.slots * a.H;
  for (int64_t t = 0; t < a.T; ++t) {
    if (a.slot_mapping[t] < 0 || a.slot_mapping[t] >= a.slots) continue;
    const From* x = static_cast<const From*>(side.from) + (t * a.K + head) * a.H;
    To* to = pages + a.slot_mapping[t] * a.H;
    if (side.is_rotated) {
      rotate(x, a.half, a.cos + t * a.half, a.sin + t * a.half, rotated);
      std::memcpy(rotated + 2 * a.half, x + 2 * a.half, (a.H - 2 * a.half) * sizeof(From));
      x = rotated;
    }
    if constexpr (sizeof(From) == sizeof(To)) {
      std::memcpy(to, x, a.H * sizeof(To));
    } else {
      for (int64_t h = 0; h < a.H; ++h) from_float(to_float(x[h]), to + h);
    }
  }
}

using Writer = void (*)(const Problem&, const Side&, int64_t);

Writer writer(ffi::DataType from, ffi::DataType to) {
  if (from == ffi::DataType::F32) return to == ffi::DataType::F32 ? write_head<float, float> : write_head<float, bf16>;
  return to == ffi::DataType::F32 ? write_head<bf16, float> : write_head<bf16, bf16>;
}

bool is_known(ffi::DataType type) { return type == ffi::DataType::F32 || type == ffi::DataType::BF16; }

ffi::Error handle(ffi::ThreadPool pool, ffi::AnyBuffer old_k, ffi::AnyBuffer old_v, ffi::AnyBuffer k, ffi::AnyBuffer v,
                  ffi::Buffer<ffi::S32> slot_mapping, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Result<ffi::AnyBuffer> k_pages, ffi::Result<ffi::AnyBuffer> v_pages) {
  for (auto type : {k.element_type(), v.element_type(), k_pages->element_type(), v_pages->element_type()})
    if (!is_known(type)) return ffi::Error::InvalidArgument("keys, values and pages must be f32 or bf16");
  if (old_k.untyped_data() != k_pages->untyped_data() || old_v.untyped_data() != v_pages->untyped_data())
    return ffi::Error::Internal("the pages are to be written in place, but were given other memory");
  const auto pages = k_pages->dimensions();
  Problem a{k.dimensions()[0], pages[0], pages[3], pages[1] * pages[2], cos.dimensions()[1], slot_mapping.typed_data(),
            cos.typed_data(), sin.typed_data()};
  if (a.H > kMaxHeadDim || 2 * a.half > a.H) return ffi::Error::InvalidArgument("head_dim or rotary is too large");
  const Side sides[2] = {{k.untyped_data(), k_pages->untyped_data(), a.half > 0}, {v.untyped_data(), v_pages->untyped_data(), false}};
  const Writer writers[2] = {writer(k.element_type(), k_pages->element_type()),
                             writer(v.element_type(), v_pages->element_type())};
  const int64_t pieces = 2 * a.K;
  parallel_for(pool, pieces, a.T * a.K * a.H < kSerial ? pieces : 1, [&](int64_t from, int64_t to) {
    const FlushDenormals flush;
    for (int64_t i = from; i < to; ++i) writers[i % 2](a, sides[i % 2], i / 2);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer::kv_write

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* write_kv(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(write_kv, jaxinfer::kv_write::handle,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
