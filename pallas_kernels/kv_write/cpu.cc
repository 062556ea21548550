// The KV write on CPUs, in place, with the rotation of the keys and the quantization of both on the way.
//
// A piece of work is one KV head of the keys or of the values, whose tokens are written in order: should two share a
// slot (padding does), the last one stays, on any number of threads.
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/pages.h"
#include "kv_write/cpu_quantize.h"

namespace ffi = xla::ffi;

namespace jaxinfer::kv_write {
namespace {

constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kSerial = 1 << 16;  // values below which other threads would come too late

struct Side {
  const void* from;  // [T, K, H]
  Pages pages;       // [K, slots, H]
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
  for (int64_t t = 0; t < a.T; ++t) {
    if (a.slot_mapping[t] < 0 || a.slot_mapping[t] >= a.slots) continue;
    const int64_t slot = head * a.slots + a.slot_mapping[t];
    const From* x = static_cast<const From*>(side.from) + (t * a.K + head) * a.H;
    To* to = reinterpret_cast<To*>(static_cast<char*>(side.pages.data) + slot * side.pages.row_bytes);
    if (side.is_rotated) {
      rotate(x, a.half, a.cos + t * a.half, a.sin + t * a.half, rotated);
      std::memcpy(rotated + 2 * a.half, x + 2 * a.half, (a.H - 2 * a.half) * sizeof(From));
      x = rotated;
    }
    if constexpr (kIsCode<To>) {
      float values[kMaxHeadDim + kLanes];
      for (int64_t h = 0; h < a.H; ++h) values[h] = to_float(x[h]);
      std::fill_n(values + a.H, kLanes, values[0]);
      quantize(values, a.H, to, side.pages.scale + slot, side.pages.zero + slot);
    } else if constexpr (sizeof(From) == sizeof(To)) {
      std::memcpy(to, x, a.H * sizeof(To));
    } else {
      for (int64_t h = 0; h < a.H; ++h) from_float(to_float(x[h]), to + h);
    }
  }
}

using Writer = void (*)(const Problem&, const Side&, int64_t);

template <class From>
Writer writer_from(Type to) {
  static constexpr Writer table[] = {write_head<From, float>,  write_head<From, bf16>,      write_head<From, int8_t>,
                                     write_head<From, float8>, write_head<From, packed<4>>, write_head<From, packed<2>>};
  return table[int(to)];
}
Writer writer(ffi::DataType from, Type to) {
  return from == ffi::DataType::F32 ? writer_from<float>(to) : writer_from<bf16>(to);
}

ffi::Error handle(ffi::ThreadPool pool, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slot_mapping,
                  ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::RemainingArgs old_pages,
                  ffi::RemainingRets new_pages) {
  for (auto type : {k.element_type(), v.element_type()})
    if (type != ffi::DataType::F32 && type != ffi::DataType::BF16)
      return ffi::Error::InvalidArgument("keys and values must be f32 or bf16");
  const int64_t T = k.dimensions()[0], K = k.dimensions()[1], H = k.dimensions()[2];
  Pages pages[2], old[2];
  ffi::Span<const int64_t> shape;
  for (size_t i = 0, from = 0, to = 0; i < 2; ++i) {
    if (!take_pages(old_pages, from, H, false, old[i], shape) || !take_pages(new_pages, to, H, false, pages[i], shape))
      return ffi::Error::InvalidArgument("pages must be f32, bf16 or codes with a scale a token");
    if (old[i].data != pages[i].data || old[i].scale != pages[i].scale || old[i].zero != pages[i].zero)
      return ffi::Error::Internal("the pages are to be written in place, but were given other memory");
  }
  Problem a{T, K, H, shape[1] * shape[2], cos.dimensions()[1], slot_mapping.typed_data(), cos.typed_data(),
            sin.typed_data()};
  if (a.H > kMaxHeadDim || 2 * a.half > a.H) return ffi::Error::InvalidArgument("head_dim or rotary is too large");
  const Side sides[2] = {{k.untyped_data(), pages[0], a.half > 0}, {v.untyped_data(), pages[1], false}};
  const Writer writers[2] = {writer(k.element_type(), pages[0].type), writer(v.element_type(), pages[1].type)};
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
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
