// The product of activations rounded to int8: integer dot products of 32 or 16 inputs, scaled and added in f32.
#include <utility>

#include "quantized_matmul/cpu_problem.h"

namespace jaxinfer {
namespace {

// x in blocks of R rows; inside one, 4 codes of each of R rows, of the same inputs, lie together.
struct Codes {
  int8_t* codes;
  float *scale, *sum;  // of a block of 32 inputs; of a group of the weights: scale * sum of codes
};

// Rounds row m of a block of R rows that starts at row m0: the largest magnitude of 32 inputs becomes 127. Codes are rounded to nearest, ties to even.
void round_row(const Problem& p, const Codes& x, int64_t m0, int R, int m) {
  const int64_t blocks = p.K / kInputs;
  const int parts = kInputs / p.group;
  const float weight = p.offset ? 1.0f : p.bits == 8 ? 0.0f : -static_cast<float>(1 << (p.bits - 1));
  int8_t* codes = x.codes + m0 * p.K + m * 4;
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

template <int Bits, int Group, int R>
void int8_rows(const Problem& p, const Codes& codes, int64_t tile_row, int64_t m0) {
  const int64_t tiles = p.K / kInputs;
  constexpr int parts = kInputs / Group;
  const uint8_t* tile = p.data + tile_row * tiles * Bits * 32;
  const uint16_t* scale = p.scale + tile_row * tiles * parts * kRows;
  const uint16_t* offset = p.offset + (p.offset ? tile_row * tiles * parts * kRows : 0);
  const int8_t* x = codes.codes + m0 * p.K;
  const float *x_scale = codes.scale + m0 * tiles, *x_sum = codes.sum + m0 * tiles * parts;
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
    if (R == 1) prefetch_ahead<Bits * 32>(tile);
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
void int8_block(const Problem& p, const Codes& codes, int64_t begin, int64_t end, int64_t m0) {
  for (; begin < end; ++begin) int8_rows<Bits, Group, R>(p, codes, begin, m0);
}

using Block = void (*)(const Problem&, const Codes&, int64_t tile_row_begin, int64_t tile_row_end, int64_t m0);

template <int Bits, int Group, int... I>
Block find_block(int R, std::integer_sequence<int, I...>) {
  constexpr Block blocks[] = {int8_block<Bits, Group, I + 1>...};
  return blocks[R - 1];
}

Block find_block(const Problem& p, int R) {
  constexpr std::make_integer_sequence<int, kMost> rows{};
  if (p.group == 16) return find_block<6, 16>(R, rows);  // GGUF's Q6_K alone
  switch (p.bits) {
    case 4: return find_block<4, 32>(R, rows);
    case 5: return find_block<5, 32>(R, rows);
    case 6: return find_block<6, 32>(R, rows);
    default: return find_block<8, 32>(R, rows);
  }
}

}  // namespace

void int8_product(const Problem& p, xla::ffi::ThreadPool& pool) {
  static thread_local std::vector<float> floats;
  static thread_local std::vector<int8_t> bytes;
  Codes x;
  x.codes = scratch(bytes, p.M * p.K);
  x.scale = scratch(floats, p.M * (p.tiles() + p.K / p.group));
  x.sum = x.scale + p.M * p.tiles();
  const Blocks blocks(p.M);
  parallel_for(pool, blocks.num, std::max<int64_t>(1, 32768 / (p.K * kMost)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int m = 0; m < blocks.size(i); ++m) round_row(p, x, blocks.begin(i), blocks.size(i), m);
  });
  parallel_for(pool, p.tile_rows(), piece_of(p, blocks.num, pool.num_threads()), [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < blocks.num; ++i)
      find_block(p, blocks.size(i))(p, x, begin, end, blocks.begin(i));
  });
}

}  // namespace jaxinfer
