// Quantization of one token of one head as `quantize` in pages.py does it: bit for bit without a zero point.
#pragma once
#include "cpu/pages.h"

namespace jaxinfer::kv_write {

inline Vec max_or_nan(Vec m, Vec x) { return ((x > m) | (x != x)) ? x : m; }
inline float max_or_nan(float m, float x) { return x > m || x != x ? x : m; }

// The largest of n (a multiple of kLanes) numbers, or NaN if one is.
template <class Map>
float largest(const float* x, int64_t n, Map map) {
  Vec m = map(load(x));
  for (int64_t i = kLanes; i < n; i += kLanes) m = max_or_nan(m, map(load(x + i)));
  float result = m[0];
  for (int i = 1; i < kLanes; ++i) result = max_or_nan(result, m[i]);
  return result;
}

// x rounded to an integer of at most 22 bits, ties to even; any integer for NaN.
inline Ints round_to_int(Vec x) {
  const Vec shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  return ((Ints)shifted & 0x7fffff) - 0x400000;
}

// Codes of numbers of at most 448: e4m3fn, to nearest, ties to even.
inline Bits to_float8(Vec x) {
  const Bits bits = (Bits)x, magnitude = bits & 0x7fffffff;
  const Bits normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  const Bits small = (Bits)round_to_int((Vec)magnitude * 512.0f);  // multiples of 2^-9 below 2^-6
  const Bits is_small = (Bits)(magnitude < (121u << 23));
  const Bits is_nan = (Bits)(magnitude > 0x7f800000u);
  return ((bits >> 24) & 0x80) | ((is_small & small) | (~is_small & normal)) | (is_nan & 0x7f);
}

// Writes the codes of x[n] as `to` stores them; x is continued to whole vectors by copies of an element. Returns scale
// and zero.
template <class T>
void quantize(const float* x, int64_t n, T* to, float* scale, float* zero) {
  const int64_t whole = (n + kLanes - 1) / kLanes * kLanes;
  alignas(64) int32_t codes[1024 + kLanes];
  const auto magnitude = [](Vec v) { return (Vec)((Bits)v & 0x7fffffff); };
  if constexpr (!kHasZero<T>) {
    const float limit = std::is_same_v<T, float8> ? 448.0f : 127.0f;
    *scale = max_or_nan(1e-12f, largest(x, whole, magnitude)) * (1.0f / limit);
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Vec y = load(x + i) / *scale;
      const Ints code = std::is_same_v<T, float8> ? (Ints)to_float8(y) : round_to_int(y);
      std::memcpy(codes + i, &code, sizeof code);
    }
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<T, float8>) {
        to[i].bits = uint8_t(codes[i]);
      } else {
        to[i] = int8_t(codes[i]);
      }
    }
  } else {
    constexpr int bits = kBits<T>, top = (1 << bits) - 1;
    const float low = -largest(x, whole, [](Vec v) { return -v; }), high = largest(x, whole, [](Vec v) { return v; });
    *scale = max_or_nan(1e-12f, high - low) * (1.0f / top);
    *zero = -low / *scale;
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Vec exact = load(x + i) / *scale + *zero;
      const Ints code = round_to_int(min(max(exact, Vec{}), Vec{} + float(top)));
      std::memcpy(codes + i, &code, sizeof code);
    }
    const int64_t width = n * bits / 8;
    for (int64_t j = 0; j < width; ++j) {
      int32_t byte = 0;
      for (int plane = 0; plane < 8 / bits; ++plane) byte |= (codes[j + plane * width] & top) << (plane * bits);
      to[j].bits = uint8_t(byte);
    }
  }
}

}  // namespace jaxinfer::kv_write
