// The product of activations rounded to integers: dot products of 32 or 16 inputs, exact in int32, scaled and added in f32.
// Code is int8_t or int16_t; each has a file of its own, compiled beside the other.
#pragma once
#include <limits>
#include <utility>

#include "quantized_matmul/cpu_problem.h"

namespace jaxinfer {
namespace {

// What registers hold: rows of x that share an unpacked tile, and rows of tiles that share a broadcast of x.
#if defined(__AVX2__)
template <class Code>
constexpr int kShare = sizeof(Code) == 2 ? 4 : 6;
template <class Code, int R>
constexpr int kBeside = sizeof(Code) == 2 && R > 1 ? 2 : 1;
#else
template <class Code>
constexpr int kShare = 2;
template <class Code, int R>
constexpr int kBeside = 1;
#endif

// x in blocks of R rows; inside one, 4 codes of each of R rows, of the same inputs, lie together.
template <class Code>
struct Codes {
  Code* codes;
  float *scale, *sum;  // of a block of 32 inputs; of a group of the weights: scale * sum of codes
};

// Rounds row m of a block of R rows that starts at row m0: the largest magnitude of 32 inputs becomes the largest code.
// Codes are rounded to nearest, ties to even.
template <class Code>
void round_row(const Problem& p, const Codes<Code>& x, int64_t m0, int R, int m) {
  constexpr float most = std::numeric_limits<Code>::max();
  const int64_t blocks = p.K / kInputs;
  const int parts = kInputs / p.group;
  const float weight = p.offset ? 1.0f : p.bits == 8 ? 0.0f : -static_cast<float>(1 << (p.bits - 1));
  Code* codes = x.codes + m0 * p.K + m * 4;
  float* scales = x.scale + m0 * blocks + m;
  float* sums = x.sum + m0 * blocks * parts + m;
  float values[kInputs];
  int32_t rounded[kInputs];
  for (int64_t b = 0; b < blocks; ++b) {
    read_block(p.x, p.bf16_x, (m0 + m) * p.K + b * kInputs, values);
    int32_t words[kInputs], largest = 0;
    std::memcpy(words, values, sizeof words);
    for (int i = 0; i < kInputs; ++i) largest = std::max(largest, words[i] & 0x7fffffff);  // NaN is the largest
    float size;
    std::memcpy(&size, &largest, 4);
    if (size < 1e-30f) size = 1e-30f;
    const float inverse = most / size, scale = size * (1.0f / most);
    for (int i = 0; i < kInputs; ++i) rounded[i] = round_to_int(values[i] * inverse);
    for (int c = 0; c < kInputs / 4; ++c) store_codes(codes + (b * (kInputs / 4) + c) * 4 * R, rounded + 4 * c);
    scales[b * R] = scale;
    for (int part = 0; part < parts; ++part) {
      int32_t sum = 0;
      for (int i = 0; i < p.group; ++i) sum += rounded[part * p.group + i];
      sums[(b * parts + part) * R] = weight * scale * static_cast<float>(sum);
    }
  }
}

// R rows of x times C rows of tiles.
template <class Code, int Bits, int Group, int R, int C>
void multiply(const Problem& p, const Codes<Code>& codes, int64_t tile_row, int64_t m0) {
  const int64_t tiles = p.K / kInputs, row_bytes = p.row_bytes(), row_scales = p.scales();
  constexpr int parts = kInputs / Group;
  const uint8_t* tile = p.data + tile_row * row_bytes;
  const uint16_t* scale = p.scale + tile_row * row_scales;
  const uint16_t* offset = p.offset + (p.offset ? tile_row * row_scales : 0);
  const Code* x = codes.codes + m0 * p.K;
  const float *x_scale = codes.scale + m0 * tiles, *x_sum = codes.sum + m0 * tiles * parts;
  Floats sums[C][R] = {};
  auto add = [&](const Ints(&products)[C][R]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Floats s = load_halves(scale + c * row_scales);
      if (Bits == 8) {
#pragma GCC unroll 8
        for (int m = 0; m < R; ++m) sums[c][m] = fma(to_float(products[c][m]) * splat(x_scale[m]), s, sums[c][m]);
      } else if (p.offset) {
        const Floats o = load_halves(offset + c * row_scales);
#pragma GCC unroll 8
        for (int m = 0; m < R; ++m) {
          sums[c][m] = fma(o, splat(x_sum[m]), sums[c][m]);
          sums[c][m] = fma(to_float(products[c][m]) * splat(x_scale[m]), s, sums[c][m]);
        }
      } else {
#pragma GCC unroll 8
        for (int m = 0; m < R; ++m)
          sums[c][m] = fma(fma(to_float(products[c][m]), splat(x_scale[m]), splat(x_sum[m])), s, sums[c][m]);
      }
    }
    scale += kRows;
    if (p.offset) offset += kRows;
    x_sum += R;
  };
  for (int64_t t = 0; t < tiles; ++t) {
    for (int c = 0; c < C; ++c) prefetch_ahead<Bits * 32>(tile + c * row_bytes);
    if (Group == kInputs) {
      Ints products[C][R] = {};
      dots<Bits, R, C, 0, 8>(tile, row_bytes, x, products);
      add(products);
    } else {
      Ints first[C][R] = {}, second[C][R] = {};
      dots<Bits, R, C, 0, 4>(tile, row_bytes, x, first);
      add(first);
      dots<Bits, R, C, 4, 8>(tile, row_bytes, x, second);
      add(second);
    }
    tile += Bits * 32;
    x += kInputs * R;
    x_scale += R;
  }
  for (int c = 0; c < C; ++c) write(p, tile_row + c, m0, sums[c]);
}

template <class Code, int Bits, int Group, int R>
void multiply_block(const Problem& p, const Codes<Code>& codes, int64_t begin, int64_t end, int64_t m0) {
  constexpr int C = kBeside<Code, R>;
  for (; begin + C <= end; begin += C) multiply<Code, Bits, Group, R, C>(p, codes, begin, m0);
  for (; begin < end; ++begin) multiply<Code, Bits, Group, R, 1>(p, codes, begin, m0);
}

template <class Code>
using Block = void (*)(const Problem&, const Codes<Code>&, int64_t tile_row_begin, int64_t tile_row_end, int64_t m0);

template <class Code, int Bits, int Group, int... I>
Block<Code> find_block(int R, std::integer_sequence<int, I...>) {
  constexpr Block<Code> blocks[] = {multiply_block<Code, Bits, Group, I + 1>...};
  return blocks[R - 1];
}

template <class Code>
Block<Code> find_block(const Problem& p, int R) {
  constexpr std::make_integer_sequence<int, kShare<Code>> rows{};
  if (p.group == 16) return find_block<Code, 6, 16>(R, rows);  // GGUF's Q6_K alone
  switch (p.bits) {
    case 4: return find_block<Code, 4, 32>(R, rows);
    case 5: return find_block<Code, 5, 32>(R, rows);
    case 6: return find_block<Code, 6, 32>(R, rows);
    default: return find_block<Code, 8, 32>(R, rows);
  }
}

template <class Code>
void rounded_product(const Problems& problems, xla::ffi::ThreadPool& pool) {
  const Problem& p = problems[0];
  static thread_local std::vector<float> floats;
  static thread_local std::vector<Code> integers;
  Codes<Code> x;
  x.codes = scratch(integers, p.M * p.K);
  x.scale = scratch(floats, p.M * (p.tiles() + p.K / p.group));
  x.sum = x.scale + p.M * p.tiles();
  const Blocks blocks(p.M, kShare<Code>);
  parallel_for(pool, blocks.num, std::max<int64_t>(1, 32768 / (p.K * kShare<Code>)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int m = 0; m < blocks.size(i); ++m) round_row(p, x, blocks.begin(i), blocks.size(i), m);
  });
  for_tile_rows(problems, pool, blocks.num, kBeside<Code, 2>, [&](const Problem& p, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < blocks.num; ++i)
      find_block<Code>(p, blocks.size(i))(p, x, begin, end, blocks.begin(i));
  });
}

}  // namespace
}  // namespace jaxinfer
