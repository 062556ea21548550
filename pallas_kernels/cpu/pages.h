// Pages of a KV cache as the C++ kernels are given them: floats, or codes with their scales (see pages.py).
#pragma once
#include "cpu/simd.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {

struct float8 {  // e4m3fn; a NaN is told by the scale, which then is one
  uint8_t bits;
};
template <int B>
struct packed {  // 8 / B codes, of channels H * B / 8 apart
  uint8_t bits;
};

enum class Type { f32, bf16, int8, float8, int4, int2 };  // kernels have tables in this order

template <class T>
constexpr int kBits = 8 * sizeof(T);
template <int B>
constexpr int kBits<packed<B>> = B;
template <class T>
constexpr bool kHasZero = kBits<T> < 8;
template <class T>
constexpr bool kIsCode = kBits<T> <= 8;

struct Pages {
  void* data;    // [K, P, page_size, H]
  float* scale;  // [K, P, page_size], or [K, P, H] if `per_channel`; null for floats
  float* zero;   // of the shape of `scale`, null for more than 4 bits
  Type type;
  bool per_channel;
  int64_t row_bytes;  // of the H elements of a token
};

inline const xla::ffi::AnyBuffer& buffer_of(const xla::ffi::AnyBuffer& x) { return x; }
inline const xla::ffi::AnyBuffer& buffer_of(const xla::ffi::Result<xla::ffi::AnyBuffer>& x) { return *x; }

// Takes the arrays of one side's pages of head dim H from the arguments or results `buffers`, from index `next` on:
// data, then scale and zero where the type of the data has them. Writes the shape of the data; false if one is missing.
template <class Buffers>
bool take_pages(const Buffers& buffers, size_t& next, int64_t H, bool per_channel, Pages& pages,
                xla::ffi::Span<const int64_t>& shape) {
  using xla::ffi::DataType;
  auto data = buffers.template get<xla::ffi::AnyBuffer>(next++);
  if (data.has_error()) return false;
  shape = buffer_of(*data).dimensions();
  switch (buffer_of(*data).element_type()) {
    case DataType::F32: pages.type = Type::f32; break;
    case DataType::BF16: pages.type = Type::bf16; break;
    case DataType::S8: pages.type = Type::int8; break;
    case DataType::F8E4M3FN: pages.type = Type::float8; break;
    case DataType::U8: pages.type = shape[3] * 2 == H ? Type::int4 : Type::int2; break;
    default: return false;
  }
  static constexpr int kSizes[] = {32, 16, 8, 8, 4, 2};
  const int bits = kSizes[int(pages.type)];
  pages.data = buffer_of(*data).untyped_data();
  pages.row_bytes = H * bits / 8;
  pages.per_channel = per_channel;
  float** parts[] = {&pages.scale, &pages.zero};
  for (int i = 0; i < 2; ++i) {
    *parts[i] = nullptr;
    if (bits > (i == 0 ? 8 : 4)) continue;
    auto part = buffers.template get<xla::ffi::AnyBuffer>(next++);
    if (part.has_error() || buffer_of(*part).element_type() != DataType::F32) return false;
    *parts[i] = static_cast<float*>(buffer_of(*part).untyped_data());
  }
  return true;
}

typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Vec load(const int8_t* p) {
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Vec);
}

inline Vec load(const float8* p) {
#if defined(__F16C__)
  // As f16, whose exponent has one bit more and a bias larger by 8.
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xbfff)));
  return (Vec)_mm256_cvtph_ps(half) * 256.0f;
#else
  UnsignedBytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const Bits code = __builtin_convertvector(bytes, Bits), magnitude = (code & 0x7f) << 20;
  // Subnormal codes m / 8 * 2^-6 are made as (1 + m / 8) * 2^-6 - 2^-6: f32's own may count as zero.
  const Bits is_small = (Bits)(magnitude < (1u << 23));
  const Vec y = (Vec)(magnitude + (120u << 23) + (is_small & (1u << 23))) - (Vec)(is_small & (121u << 23));
  return (Vec)((Bits)y | (code & 0x80) << 24);
#endif
}

// Lanes [h, h + kLanes) of a row of H elements; codes without scale and zero.
template <class T>
Vec load_lanes(const T* row, int64_t h, int64_t) {
  return load(row + h);
}
template <int B>
Vec load_lanes(const packed<B>* row, int64_t h, int64_t H) {
  const int64_t width = H * B / 8, plane = h / width;
  UnsignedBytes bytes;
  std::memcpy(&bytes, row + (h - plane * width), sizeof bytes);
  const Bits codes = (__builtin_convertvector(bytes, Bits) >> uint32_t(plane * B)) & ((1u << B) - 1);
  return __builtin_convertvector((Ints)codes, Vec);
}

}  // namespace jaxinfer
