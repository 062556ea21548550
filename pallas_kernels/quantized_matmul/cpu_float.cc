// The product of activations as they are. One row: each tile is unpacked and multiplied in registers. More rows: rows of
// tiles are unpacked into a panel that stays in a cache while all of x passes. The order of a sum is the same in both.
#include <utility>

#include "quantized_matmul/cpu_problem.h"

namespace jaxinfer {
namespace {

// Rows of tiles in a panel, and rows of x that share it: kWidth * kMost sums in registers.
#if defined(__AVX2__)
constexpr int kWidth = 2, kMost = 6;
#else
constexpr int kWidth = 1, kMost = 2;
#endif

struct Cursor {
  const uint8_t* tile;
  const uint16_t *scale, *offset;
};

inline Cursor at_row(const Problem& p, int64_t tile_row) {
  return {p.data + tile_row * p.row_bytes(), p.scale + tile_row * p.scales(),
          p.offset ? p.offset + tile_row * p.scales() : nullptr};
}

// Calls use(i, c, values) for the 32 inputs of tile t in each of C rows of tiles: 8 values of the weight.
template <int Bits, int C, class Use>
JAXINFER_INLINE void unpack_tiles(const Problem& p, const Cursor (&rows)[C], int64_t t, const Use& use) {
  const int64_t parts = kInputs / p.group;
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) prefetch_ahead<Bits * 32>(rows[c].tile + t * Bits * 32);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const int64_t at = (t * parts + (parts == 2 ? half : 0)) * kRows;
    Floats s[C], o[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      s[c] = load_halves(rows[c].scale + at);
      o[c] = rows[c].offset ? load_halves(rows[c].offset + at) : s[c] * splat(-static_cast<float>(1 << (Bits - 1)));
    }
#pragma GCC unroll 4
    for (int i = 4 * half; i < 4 * half + 4; ++i) {
      Ints codes[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) codes[c] = (Ints)unpack<Bits>(rows[c].tile + t * Bits * 32, i);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
          use(4 * i + j, c, Bits == 8 ? to_float(codes[c] << (24 - 8 * j) >> 24) * s[c]
                                      : fma(to_float(codes[c] >> (8 * j) & 0xff), s[c], o[c]));
    }
  }
}

// One row of x, C rows of tiles at once: sums that do not wait for each other.
template <int Bits, int C>
void one_row(const Problem& p, const float* x, int64_t tile_row) {
  Cursor rows[C];
  Floats sums[C][1] = {};
  for (int c = 0; c < C; ++c) rows[c] = at_row(p, tile_row + c);
  for (int64_t t = 0; t < p.tiles(); ++t)
    unpack_tiles<Bits, C>(p, rows, t, [&](int i, int c, Floats w) __attribute__((always_inline)) {
      sums[c][0] = fma(w, splat(x[t * kInputs + i]), sums[c][0]);
      add_now(sums[c][0]);
    });
  for (int c = 0; c < C; ++c) write(p, tile_row + c, 0, sums[c]);
}

template <int Bits>
void one_row_piece(const Problem& p, const float* x, int64_t begin, int64_t end) {
  constexpr int C = Bits == 8 ? 4 : 2;  // more would not fit the registers
  for (; begin + C <= end; begin += C) one_row<Bits, C>(p, x, begin);
  for (; begin < end; ++begin) one_row<Bits, 1>(p, x, begin);
}

// Unpacks row of tiles c of a panel, f32[K, width, 8].
template <int Bits>
void fill_panel(const Problem& p, int64_t tile_row, int c, int width, float* panel) {
  const Cursor row[1] = {at_row(p, tile_row)};
  for (int64_t t = 0; t < p.tiles(); ++t)
    unpack_tiles<Bits, 1>(p, row, t, [&](int i, int, Floats w) __attribute__((always_inline)) {
      store(panel + ((t * kInputs + i) * width + c) * kRows, w);
    });
}

// R rows of x, f32[K, R], times a panel.
template <int R, int C>
void multiply_panel(const Problem& p, const float* panel, const float* x, int64_t tile_row, int64_t m0) {
  Floats sums[C][R] = {};
  for (int64_t k = 0; k < p.K; ++k) {
    Floats w[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) w[c] = load<Floats>(panel + (k * C + c) * kRows);
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const Floats xs = splat(x[k * R + m]);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) sums[c][m] = fma(w[c], xs, sums[c][m]);
    }
  }
  for (int c = 0; c < C; ++c) write(p, tile_row + c, m0, sums[c]);
}

using Multiply = void (*)(const Problem&, const float* panel, const float* x, int64_t tile_row, int64_t m0);

template <int C, int... I>
Multiply find_multiply(int R, std::integer_sequence<int, I...>) {
  constexpr Multiply all[] = {multiply_panel<I + 1, C>...};
  return all[R - 1];
}

Multiply find_multiply(int R, int width) {
  constexpr std::make_integer_sequence<int, kMost> rows{};
  return width == kWidth ? find_multiply<kWidth>(R, rows) : find_multiply<1>(R, rows);
}

// Row m of a block of R rows that starts at row m0, R numbers of the same input together.
void spread_row(const Problem& p, float* x, int64_t m0, int R, int m) {
  float values[kInputs];
  float* to = x + m0 * p.K + m;
  for (int64_t k = 0; k < p.K; k += kInputs) {
    read_block(p.x, p.bf16_x, (m0 + m) * p.K + k, values);
    for (int i = 0; i < kInputs; ++i) to[(k + i) * R] = values[i];
  }
}

template <class... Args>
void for_bits(int bits, void (*four)(Args...), void (*five)(Args...), void (*six)(Args...), void (*eight)(Args...),
              Args... args) {
  (bits == 4 ? four : bits == 5 ? five : bits == 6 ? six : eight)(args...);
}

}  // namespace

void float_product(const Problems& problems, xla::ffi::ThreadPool& pool) {
  const Problem& p = problems[0];
  static thread_local std::vector<float> spread;
  float* x = scratch(spread, p.M * p.K);
  const Blocks blocks(p.M, kMost);
  parallel_for(pool, blocks.num, std::max<int64_t>(1, 32768 / (p.K * kMost)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int m = 0; m < blocks.size(i); ++m) spread_row(p, x, blocks.begin(i), blocks.size(i), m);
  });
  if (p.M == 1) {
    for_tile_rows(problems, pool, 1, 1, [&](const Problem& p, int64_t begin, int64_t end) {
      for_bits<const Problem&, const float*, int64_t, int64_t>(p.bits, one_row_piece<4>, one_row_piece<5>,
                                                               one_row_piece<6>, one_row_piece<8>, p, x, begin, end);
    });
    return;
  }
  for_tile_rows(problems, pool, blocks.num, kWidth, [&](const Problem& p, int64_t begin, int64_t end) {
    static thread_local std::vector<float> memory;
    float* panel = scratch(memory, p.K * kWidth * kRows);
    for (int64_t tile_row = begin; tile_row < end; tile_row += kWidth) {
      const int width = end - tile_row < kWidth ? 1 : kWidth;
      for (int c = 0; c < width; ++c)
        for_bits<const Problem&, int64_t, int, int, float*>(p.bits, fill_panel<4>, fill_panel<5>, fill_panel<6>,
                                                            fill_panel<8>, p, tile_row + c, c, width, panel);
      for (int64_t i = 0; i < blocks.num; ++i)
        find_multiply(blocks.size(i), width)(p, panel, x + blocks.begin(i) * p.K, tile_row, blocks.begin(i));
    }
  });
}

}  // namespace jaxinfer
