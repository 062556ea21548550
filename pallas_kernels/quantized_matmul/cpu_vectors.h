// Vectors of 8 rows: GCC's and Clang's vector types, and the few operations worth an instruction of their own.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define JAXINFER_INLINE inline __attribute__((always_inline))

namespace jaxinfer {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(32)));    // 4 inputs of each of 8 rows
typedef int16_t Shorts __attribute__((vector_size(32)));   // 2 sums of each of 8 rows
typedef uint16_t UShorts __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));     // one number of each of 8 rows, as are the rest
typedef uint32_t Words __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));

template <class Vector>
JAXINFER_INLINE Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector>
JAXINFER_INLINE void store(void* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

JAXINFER_INLINE Floats splat(float x) { return Floats{x, x, x, x, x, x, x, x}; }

JAXINFER_INLINE Ints splat4(const int8_t* x) {  // 4 bytes for each row
  int32_t word;
  std::memcpy(&word, x, 4);
  return Ints{word, word, word, word, word, word, word, word};
}

JAXINFER_INLINE Shorts splat2(const int16_t* x) {  // 2 numbers for each row
  int32_t word;
  std::memcpy(&word, x, 4);
  return (Shorts)Ints{word, word, word, word, word, word, word, word};
}

JAXINFER_INLINE Floats to_float(Ints v) { return __builtin_convertvector(v, Floats); }

JAXINFER_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Rounds to nearest, ties to even.
JAXINFER_INLINE int32_t round_to_int(float v) {
#if defined(__SSE2__) && !defined(__FMA__)  // no instruction for it, and none that would add to an unrounded product
  return static_cast<int32_t>(v + 12582912.0f - 12582912.0f);
#else
  return static_cast<int32_t>(__builtin_rintf(v));
#endif
}

JAXINFER_INLINE Floats load_halves(const uint16_t* from) {
#if defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  typedef uint16_t Halves __attribute__((vector_size(16)));
  const Words bits = __builtin_convertvector(load<Halves>(from), Words);
  const Words tiny = (Words)((bits & 0x7c00) == 0);  // no hidden bit: read with it, then take it away
  const Words hidden = Words{} + (113u << 23);
  const Floats size = (Floats)(((bits & 0x7fff) << 13) + (112u << 23) + (tiny & (1u << 23))) - (Floats)(tiny & hidden);
  return (Floats)((Words)size | (bits & 0x8000) << 16);
#endif
}

// The codes of a chunk (4 inputs) of a tile: see cpu_weights.py.
template <int Bits>
JAXINFER_INLINE Bytes unpack(const uint8_t* tile, int chunk) {
  if (Bits == 8) return load<Bytes>(tile + 32 * chunk);
  Words low = load<Words>(tile + 32 * (chunk % 4));
  if (chunk >= 4) low >>= 4;
  low &= 0x0f0f0f0fu;
  if (Bits == 5) {
    const Words plane = load<Words>(tile + 128);
    low |= (chunk < 4 ? plane << (4 - chunk) : plane >> (chunk - 4)) & 0x10101010u;
  }
  if (Bits == 6) {
    const Words plane = load<Words>(tile + 128 + 32 * (chunk / 4));
    const int at = 2 * (chunk % 4);
    low |= (at < 4 ? plane << (4 - at) : plane >> (at - 4)) & 0x30303030u;
  }
  return (Bytes)low;
}

// codes * x, summed over pairs of inputs: at most 2 * 127 * (2**Bits - 1), or 2 * 127 * 128 of signed 8 bits.
template <int Bits>
JAXINFER_INLINE Shorts pair_products(Bytes codes, const int8_t* x) {
  const Ints xs = splat4(x);
#if defined(__AVX2__)
  const __m256i c = (__m256i)codes;
  if (Bits == 8) return (Shorts)_mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8((__m256i)xs, c));
  return (Shorts)_mm256_maddubs_epi16(c, (__m256i)xs);
#else
  const Shorts even = (Shorts)xs << 8 >> 8, odd = (Shorts)xs >> 8, c = (Shorts)codes;
  if (Bits == 8) return (c << 8 >> 8) * even + (c >> 8) * odd;
  return (c & 0xff) * even + (Shorts)((UShorts)c >> 8) * odd;
#endif
}

JAXINFER_INLINE Ints add_pairs(Shorts v) {
#if defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1));
#else
  return ((Ints)v << 16 >> 16) + ((Ints)v >> 16);
#endif
}

// a * b, summed over pairs.
JAXINFER_INLINE Ints pair_sums(Shorts a, Shorts b) {
#if defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  __m128i x[2], y[2];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 2; ++i) x[i] = _mm_madd_epi16(x[i], y[i]);
  return load<Ints>(x);
#else
  return ((Ints)a << 16 >> 16) * ((Ints)b << 16 >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// Keeps GCC from collecting what is to be added up until the registers overflow.
template <class Vector>
JAXINFER_INLINE void add_now(Vector& sum) {
#if defined(__AVX2__)
  asm("" : "+x"(sum));
#endif
}

// Adds to sums[c][m] the dot products of chunks [Begin, End) of a tile in each of C rows of tiles, row_bytes apart, with
// each of R rows of x, 4 inputs of all R rows in turn. Below 8 bits as many chunks as surely fit are summed in 16 bits.
template <int Bits, int R, int C, int Begin, int End>
JAXINFER_INLINE void dots(const uint8_t* tile, int64_t row_bytes, const int8_t* x, Ints (&sums)[C][R]) {
  static_assert(C == 1, "two rows of tiles do not fit the registers");
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#pragma GCC unroll 8
  for (int i = Begin; i < End; ++i) {
    const __m256i codes = (__m256i)unpack<Bits>(tile, i), size = Bits == 8 ? _mm256_abs_epi8(codes) : codes;
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      __m256i xs = (__m256i)splat4(x + (i * R + m) * 4);
      if (Bits == 8) xs = _mm256_sign_epi8(xs, codes);
      sums[0][m] = (Ints)_mm256_dpbusd_epi32((__m256i)sums[0][m], size, xs);
    }
  }
#else
  constexpr int most = 32767 / (2 * 127 * (Bits == 8 ? 128 : (1 << Bits) - 1));
  constexpr int run = most >= End - Begin ? End - Begin : most;  // 8, 4, 2 and 1 chunks
  static_assert((End - Begin) % run == 0, "the runs tile the chunks");
#pragma GCC unroll 8
  for (int begin = Begin; begin < End; begin += run) {
    Shorts products[R] = {};
#pragma GCC unroll 8
    for (int i = begin; i < begin + run; ++i) {
      const Bytes codes = unpack<Bits>(tile, i);
#pragma GCC unroll 8
      for (int m = 0; m < R; ++m) {
        products[m] += pair_products<Bits>(codes, x + (i * R + m) * 4);
        if (R > 2) add_now(products[m]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      sums[0][m] += add_pairs(products[m]);
      if (R > 2) add_now(sums[0][m]);
    }
  }
#endif
}

// The same of 16 bits. The codes are widened to the inputs 0 and 2 of a chunk, and to 1 and 3: the order of store_codes.
template <int Bits, int R, int C, int Begin, int End>
JAXINFER_INLINE void dots(const uint8_t* tile, int64_t row_bytes, const int16_t* x, Ints (&sums)[C][R]) {
#pragma GCC unroll 8
  for (int i = Begin; i < End; ++i) {
    Shorts even[C], odd[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Shorts codes = (Shorts)unpack<Bits>(tile + c * row_bytes, i);
      even[c] = Bits == 8 ? codes << 8 >> 8 : codes & 0xff;
      odd[c] = Bits == 8 ? codes >> 8 : (Shorts)((UShorts)codes >> 8);
    }
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const Shorts x_even = splat2(x + (i * R + m) * 4), x_odd = splat2(x + (i * R + m) * 4 + 2);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        sums[c][m] += pair_sums(even[c], x_even);
        add_now(sums[c][m]);
        sums[c][m] += pair_sums(odd[c], x_odd);
        add_now(sums[c][m]);
      }
    }
  }
}

// Stores the codes of a chunk as `dots` reads them.
inline void store_codes(int8_t* to, const int32_t* rounded) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<int8_t>(rounded[i]);
}

inline void store_codes(int16_t* to, const int32_t* rounded) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<int16_t>(rounded[i / 2 + 2 * (i % 2)]);
}

}  // namespace
}  // namespace jaxinfer
