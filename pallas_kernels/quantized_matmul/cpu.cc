// x[M, K] times weights in tiles of 8 rows x 32 inputs (see cpu_weights.py), of float or of int8 activations.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "quantized_matmul/cpu_vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxinfer {
namespace {

constexpr int kRows = 8, kInputs = 32;  // of a tile
#if defined(__AVX2__)  // rows of x that share an unpacked tile: what the registers hold
constexpr int kMostInt8 = 6, kMostFloat = 8;
#else
constexpr int kMostInt8 = 2, kMostFloat = 4;
#endif

// Rows of x are cut into blocks of nearly equal size, at most `most`.
struct Blocks {
  int64_t M, num;
  Blocks(int64_t M, int most) : M(M), num((M + most - 1) / most) {}
  int64_t begin(int64_t i) const { return i * M / num; }
  int size(int64_t i) const { return static_cast<int>(begin(i + 1) - begin(i)); }
};

struct Problem {
  int64_t M, N, K;
  int group;
  const uint8_t* data;
  const uint16_t *scale, *offset;  // no offset: -scale * 2**(bits - 1), 0 for 8 bits
  void* out;
  bool bf16_out;
  // x in blocks of R rows; inside one, R numbers (of codes: 4 of each row) of the same input lie together.
  float* x;
  int8_t* codes;
  float *x_scale, *x_sum;  // a block of 32 inputs; a group of the weights: scale * sum of codes
};

// x as it comes.

float bf16_to_float(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

uint16_t float_to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(word >> 16 | 64);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

void read_block(const void* x, bool bf16, int64_t at, float* to) {
  if (!bf16) {
    std::memcpy(to, static_cast<const float*>(x) + at, kInputs * sizeof(float));
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(x) + at;
  for (int i = 0; i < kInputs; ++i) to[i] = bf16_to_float(from[i]);
}

// Writes row m of a block of R rows that starts at row m0.
void float_row(const Problem& p, const void* x, bool bf16, int64_t m0, int R, int m) {
  float values[kInputs];
  float* to = p.x + m0 * p.K + m;
  for (int64_t k = 0; k < p.K; k += kInputs) {
    read_block(x, bf16, (m0 + m) * p.K + k, values);
    for (int i = 0; i < kInputs; ++i) to[(k + i) * R] = values[i];
  }
}

// As float_row, in int8: the largest magnitude of 32 inputs becomes 127. Codes are rounded to nearest, ties to even.
void int8_row(const Problem& p, const void* x, bool bf16, int64_t m0, int R, int m, int bits) {
  const int64_t blocks = p.K / kInputs;
  const int parts = kInputs / p.group;
  const float weight = p.offset ? 1.0f : bits == 8 ? 0.0f : -static_cast<float>(1 << (bits - 1));
  int8_t* codes = p.codes + m0 * p.K + m * 4;
  float* scales = p.x_scale + m0 * blocks + m;
  float* sums = p.x_sum + m0 * blocks * parts + m;
  float values[kInputs];
  int32_t rounded[kInputs];
  for (int64_t b = 0; b < blocks; ++b) {
    read_block(x, bf16, (m0 + m) * p.K + b * kInputs, values);
    int32_t words[kInputs], largest = 0;
    std::memcpy(words, values, sizeof words);
    for (int i = 0; i < kInputs; ++i) largest = std::max(largest, words[i] & 0x7fffffff);  // NaN is the largest
    float size;
    std::memcpy(&size, &largest, 4);
    if (size < 1e-30f) size = 1e-30f;
    const float inverse = 127.0f / size, scale = size * (1.0f / 127.0f);
    for (int i = 0; i < kInputs; ++i) rounded[i] = round_to_int(values[i] * inverse);
    int8_t bytes[kInputs];
    for (int i = 0; i < kInputs; ++i) bytes[i] = static_cast<int8_t>(rounded[i]);
    for (int c = 0; c < kInputs / 4; ++c) std::memcpy(codes + (b * (kInputs / 4) + c) * 4 * R, bytes + 4 * c, 4);
    scales[b * R] = scale;
    for (int part = 0; part < parts; ++part) {
      int32_t sum = 0;
      for (int i = 0; i < p.group; ++i) sum += rounded[part * p.group + i];
      sums[(b * parts + part) * R] = weight * scale * static_cast<float>(sum);
    }
  }
}

// One tile after the other of 8 rows of the weight, for R rows of x.

template <int R>
void write(const Problem& p, int64_t tile_row, int64_t m0, const Floats (&sums)[R]) {
  const int64_t n = tile_row * kRows, count = std::min<int64_t>(kRows, p.N - n);
  for (int m = 0; m < R; ++m) {
    float values[kRows];
    store(values, sums[m]);
    const int64_t at = (m0 + m) * p.N + n;
    if (p.bf16_out) {
      uint16_t halves[kRows];
      for (int i = 0; i < kRows; ++i) halves[i] = float_to_bf16(values[i]);
      std::memcpy(static_cast<uint16_t*>(p.out) + at, halves, count * 2);
    } else if (count == kRows) {
      store(static_cast<float*>(p.out) + at, sums[m]);
    } else {
      std::memcpy(static_cast<float*>(p.out) + at, values, count * 4);
    }
  }
}

template <int Bits, int Group, int R>
void int8_rows(const Problem& p, int64_t tile_row, int64_t m0) {
  const int64_t tiles = p.K / kInputs;
  constexpr int parts = kInputs / Group;
  const uint8_t* tile = p.data + tile_row * tiles * Bits * 32;
  const uint16_t* scale = p.scale + tile_row * tiles * parts * kRows;
  const uint16_t* offset = p.offset + (p.offset ? tile_row * tiles * parts * kRows : 0);
  const int8_t* x = p.codes + m0 * p.K;
  const float *x_scale = p.x_scale + m0 * tiles, *x_sum = p.x_sum + m0 * tiles * parts;
  Floats sums[R] = {};
  auto add = [&](const Ints(&products)[R]) __attribute__((always_inline)) {
    const Floats s = load_halves(scale);
    if (Bits == 8) {
#pragma GCC unroll 8
      for (int m = 0; m < R; ++m) sums[m] = fma(to_float(products[m]) * splat(x_scale[m]), s, sums[m]);
    } else if (p.offset) {
      const Floats o = load_halves(offset);
      offset += kRows;
#pragma GCC unroll 8
      for (int m = 0; m < R; ++m) {
        sums[m] = fma(o, splat(x_sum[m]), sums[m]);
        sums[m] = fma(to_float(products[m]) * splat(x_scale[m]), s, sums[m]);
      }
    } else {
#pragma GCC unroll 8
      for (int m = 0; m < R; ++m)
        sums[m] = fma(fma(to_float(products[m]), splat(x_scale[m]), splat(x_sum[m])), s, sums[m]);
    }
    scale += kRows;
    x_sum += R;
  };
  for (int64_t t = 0; t < tiles; ++t) {
    if (Group == kInputs) {
      Ints products[R] = {};
      dots<Bits, R, 0, 8>(tile, x, products);
      add(products);
    } else {
      Ints first[R] = {}, second[R] = {};
      dots<Bits, R, 0, 4>(tile, x, first);
      add(first);
      dots<Bits, R, 4, 8>(tile, x, second);
      add(second);
    }
    tile += Bits * 32;
    x += kInputs * R;
    x_scale += R;
  }
  write(p, tile_row, m0, sums);
}

template <int Bits, int Group, int R>
void int8_block(const Problem& p, int64_t begin, int64_t end, int64_t m0) {
  for (; begin < end; ++begin) int8_rows<Bits, Group, R>(p, begin, m0);
}

// C rows of tiles at once: sums that do not wait for each other. Each sum has one order whatever R and C.
template <int Bits, int R, int C>
void float_rows(const Problem& p, int64_t tile_row, int64_t m0) {
  const int64_t tiles = p.K / kInputs, parts = kInputs / p.group;
  const int64_t row_bytes = tiles * Bits * 32, row_scales = tiles * parts * kRows;
  const uint8_t* tile = p.data + tile_row * row_bytes;
  const uint16_t* scale = p.scale + tile_row * row_scales;
  const uint16_t* offset = p.offset + (p.offset ? tile_row * row_scales : 0);
  const float* x = p.x + m0 * p.K;
  Floats sums[C][R] = {};
  for (int64_t t = 0; t < tiles; ++t) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t at = (t * parts + (parts == 2 ? half : 0)) * kRows;
      Floats s[C], o[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        s[c] = load_halves(scale + at + c * row_scales);
        o[c] = p.offset ? load_halves(offset + at + c * row_scales) : s[c] * splat(-static_cast<float>(1 << (Bits - 1)));
      }
#pragma GCC unroll 4
      for (int i = 4 * half; i < 4 * half + 4; ++i) {
        Ints codes[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) codes[c] = (Ints)unpack<Bits>(tile + c * row_bytes, i);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) {
            const Floats w = Bits == 8 ? to_float(codes[c] << (24 - 8 * j) >> 24) * s[c]
                                       : fma(to_float(codes[c] >> (8 * j) & 0xff), s[c], o[c]);
#pragma GCC unroll 8
            for (int m = 0; m < R; ++m) {
              sums[c][m] = fma(w, splat(x[(4 * i + j) * R + m]), sums[c][m]);
              if (C > 1) add_now(sums[c][m]);
            }
          }
        }
      }
    }
    tile += Bits * 32;
    x += kInputs * R;
  }
  for (int c = 0; c < C; ++c) write(p, tile_row + c, m0, sums[c]);
}

template <int Bits, int R>
void float_block(const Problem& p, int64_t begin, int64_t end, int64_t m0) {
  constexpr int C = R == 1 ? (Bits == 8 ? 4 : 2) : R < 4 ? 2 : 1;  // more would not fit the registers
  for (; begin + C <= end; begin += C) float_rows<Bits, R, C>(p, begin, m0);
  for (; begin < end; ++begin) float_rows<Bits, R, 1>(p, begin, m0);
}

using Block = void (*)(const Problem&, int64_t tile_row_begin, int64_t tile_row_end, int64_t m0);

template <int Bits, int... I>
Block find_int8_block(int group, int R, std::integer_sequence<int, I...>) {
  constexpr Block of_32[] = {int8_block<Bits, 32, I + 1>...}, of_16[] = {int8_block<Bits, 16, I + 1>...};
  return (group == 32 ? of_32 : of_16)[R - 1];
}

template <int Bits, int... I>
Block find_float_block(int R, std::integer_sequence<int, I...>) {
  constexpr Block blocks[] = {float_block<Bits, I + 1>...};
  return blocks[R - 1];
}

template <int Bits>
Block find_block(bool int8, int group, int R) {
  return int8 ? find_int8_block<Bits>(group, R, std::make_integer_sequence<int, kMostInt8>{})
              : find_float_block<Bits>(R, std::make_integer_sequence<int, kMostFloat>{});
}

Block find_block(int bits, bool int8, int group, int R) {
  switch (bits) {
    case 4: return find_block<4>(int8, group, R);
    case 5: return find_block<5>(int8, group, R);
    case 6: return find_block<6>(int8, group, R);
    default: return find_block<8>(int8, group, R);
  }
}

// Memory of the calling thread, kept for its next call.
template <class T>
T* scratch(std::vector<T>& memory, int64_t count) {
  if (memory.size() < static_cast<size_t>(count)) memory.resize(count);
  return memory.data();
}

ffi::Error quantized_matmul_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                                 ffi::AnyBuffer offset, ffi::Result<ffi::AnyBuffer> out, bool int8) {
  Problem p{};
  p.M = x.dimensions()[0];
  p.K = x.dimensions()[1];
  p.N = out->dimensions()[1];
  p.group = static_cast<int>(p.K / scale.dimensions()[1]);
  p.data = static_cast<const uint8_t*>(data.untyped_data());
  p.scale = static_cast<const uint16_t*>(scale.untyped_data());
  p.offset = offset.element_count() ? static_cast<const uint16_t*>(offset.untyped_data()) : nullptr;
  p.out = out->untyped_data();
  p.bf16_out = out->element_type() == ffi::BF16;
  const int bits = static_cast<int>(data.dimensions()[2]);
  const int64_t tile_rows = data.dimensions()[0], tiles = p.K / kInputs;
  if (!p.M || !p.N) return ffi::Error::Success();

  const Blocks blocks(p.M, int8 ? kMostInt8 : kMostFloat);
  static thread_local std::vector<float> floats;
  static thread_local std::vector<int8_t> codes;
  if (int8) {
    p.codes = scratch(codes, p.M * p.K);
    p.x_scale = scratch(floats, p.M * (tiles + p.K / p.group));
    p.x_sum = p.x_scale + p.M * tiles;
  } else {
    p.x = scratch(floats, p.M * p.K);
  }
  const bool bf16 = x.element_type() == ffi::BF16;
  const int64_t grain = std::max<int64_t>(1, 32768 / (p.K * kMostInt8));
  parallel_for(pool, blocks.num, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t m0 = blocks.begin(i);
      const int R = blocks.size(i);
      for (int m = 0; m < R; ++m) {
        if (int8) int8_row(p, x.untyped_data(), bf16, m0, R, m, bits);
        else float_row(p, x.untyped_data(), bf16, m0, R, m);
      }
    }
  });

  // A piece is some rows of tiles: few enough to balance and to stay in a cache while all of x passes.
  const int64_t row_bytes = tiles * (bits * 32 + (kInputs / p.group) * (p.offset ? 32 : 16));
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  int64_t piece = std::max<int64_t>(1, tile_rows / (4 * threads));
  piece = std::min(piece, std::max<int64_t>(1, (128 << 10) / row_bytes));
  piece = std::max(piece, (16 << 10) / (row_bytes * blocks.num) + 1);
  parallel_for(pool, tile_rows, piece, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < blocks.num; ++i) {
      const Block block = find_block(bits, int8, p.group, blocks.size(i));
      block(p, begin, end, blocks.begin(i));
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer

JAXINFER_HANDLER(quantized_matmul, jaxinfer::quantized_matmul_impl,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()  // x
                     .Arg<ffi::AnyBuffer>()  // data
                     .Arg<ffi::AnyBuffer>()  // scale
                     .Arg<ffi::AnyBuffer>()  // offset
                     .Ret<ffi::AnyBuffer>()
                     .Attr<bool>("int8"));
