// Vectors of f32 lanes in GCC's vector extensions (GCC and clang), loads from f32 and bf16, exp and tanh.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define JAXINFER_UNROLL _Pragma("unroll")
#else
#define JAXINFER_UNROLL _Pragma("GCC unroll 16")
#endif

namespace jaxinfer {

#if defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512F__)
constexpr int kWide = 16;
#else
constexpr int kWide = kLanes;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef float WideVec __attribute__((vector_size(4 * kWide)));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void from_float(float x, float* y) { *y = x; }
inline void from_float(float x, bf16* y) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  y->bits = x != x ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const bf16* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, Bits) << 16);
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline WideVec load_wide(const float* p) {
  WideVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store_wide(float* p, WideVec v) { std::memcpy(p, &v, sizeof v); }

// Asks for the cache lines of n values at p.
template <class T>
inline void prefetch(const T* p, int64_t n) {
  const char* bytes = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < n * int64_t(sizeof(T)); i += 64) __builtin_prefetch(bytes + i);
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

inline float sum(Vec v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}
inline float max_lane(Vec v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
  return lanes[0];
}

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87 (exp is then smaller than f32's normal numbers).
inline Vec exp_nonpositive(Vec x) {
  const Vec lowest = Vec{} - 87.0f;
  const Vec c = x < lowest ? lowest : x;              // NaN stays
  const Vec shifted = c * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, kept in the low bits
  const Vec n = shifted - 12582912.0f;
  Vec r = c - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // Cephes' expf
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Vec y = (Vec)((Bits)p + ((Bits)shifted << 23));
  return x < lowest ? Vec{} : y;
}

// tanh as Eigen and XLA approximate it: an odd rational function, within a few units in the last place.
inline Vec tanh(Vec x) {
  const Vec limit = Vec{} + 7.90531110763549805f;
  x = x > limit ? limit : x;
  x = x < -limit ? -limit : x;
  const Vec s = x * x;
  Vec p = s * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f;
  p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f;
  p = p * s + 4.89352455891786e-03f;
  Vec q = s * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f;
  q = q * s + 4.89352518554385e-03f;
  return x * p / q;
}

// The sums of four vectors' lanes.
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX2__)
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// Exchanges rows and columns of kLanes vectors.
inline void transpose(Vec* x) {
#if defined(__AVX__)
  __m256 pairs[8], quads[8];
  JAXINFER_UNROLL for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
  }
  JAXINFER_UNROLL for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  JAXINFER_UNROLL for (int i = 0; i < 4; ++i) {
    x[i] = (Vec)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    x[i + 4] = (Vec)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const float kept = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = kept;
    }
#endif
}

// Denormal numbers count as zero while this lives, on whichever thread: results are then the same on all of them.
class FlushDenormals {
#if defined(__x86_64__)
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
 public:
  FlushDenormals() {}
#endif
};

}  // namespace jaxinfer
