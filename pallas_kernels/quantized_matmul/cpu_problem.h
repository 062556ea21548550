// What the files of the product share: its arguments, and results as they leave.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "quantized_matmul/cpu_vectors.h"

namespace jaxinfer {

constexpr int kRows = 8, kInputs = 32;  // of a tile

// Rows of x are cut into blocks of nearly equal size.
struct Blocks {
  int64_t M, num;
  Blocks(int64_t M, int most) : M(M), num((M + most - 1) / most) {}
  int64_t begin(int64_t i) const { return i * M / num; }
  int size(int64_t i) const { return static_cast<int>(begin(i + 1) - begin(i)); }
};

struct Problem {
  int64_t M, N, K;
  int bits, group;
  const void* x;
  bool bf16_x;
  const uint8_t* data;
  const uint16_t *scale, *offset;  // no offset: -scale * 2**(bits - 1), 0 for 8 bits
  void* out;
  bool bf16_out;

  int64_t tiles() const { return K / kInputs; }
  int64_t tile_rows() const { return (N + kRows - 1) / kRows; }
  int64_t scales() const { return K / group * kRows; }  // of a row of tiles
  int64_t row_bytes() const { return tiles() * bits * 32; }
};

// Of one x and one format, N, the weight and the result apart.
using Problems = std::vector<Problem>;

void float_product(const Problems& problems, xla::ffi::ThreadPool& pool);
void int16_product(const Problems& problems, xla::ffi::ThreadPool& pool);
void int8_product(const Problems& problems, xla::ffi::ThreadPool& pool);

inline float bf16_to_float(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline uint16_t float_to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(word >> 16 | 64);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline void read_block(const void* x, bool bf16, int64_t at, float* to) {
  if (!bf16) {
    std::memcpy(to, static_cast<const float*>(x) + at, kInputs * sizeof(float));
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(x) + at;
  for (int i = 0; i < kInputs; ++i) to[i] = bf16_to_float(from[i]);
}

// Asks for the bytes of a tile some way ahead: a CPU's own prefetcher stops at the end of a page of memory.
template <int Bytes>
JAXINFER_INLINE void prefetch_ahead(const void* at) {
  constexpr int ahead = 4096;
#pragma GCC unroll 4
  for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(static_cast<const char*>(at) + ahead + i);
}

// Writes 8 outputs of each of R rows.
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

// Memory of the calling thread, kept for its next call.
template <class T>
T* scratch(std::vector<T>& memory, int64_t count) {
  if (memory.size() < static_cast<size_t>(count)) memory.resize(count);
  return memory.data();
}

// Calls body(problem, begin, end) for rows of tiles of all problems. A thread takes a multiple of `unit` of them at once:
// few enough to balance and to stay in a cache while all of x passes.
template <class Body>
void for_tile_rows(const Problems& problems, xla::ffi::ThreadPool& pool, int64_t blocks, int64_t unit,
                   const Body& body) {
  const Problem& p = problems[0];
  int64_t total = 0;
  for (const Problem& each : problems) total += each.tile_rows();
  const int64_t row_bytes = p.row_bytes() + p.scales() * (p.offset ? 4 : 2);
  int64_t piece = std::max<int64_t>(1, total / (4 * std::max<int64_t>(1, pool.num_threads())));
  piece = std::min(piece, std::max<int64_t>(1, (128 << 10) / row_bytes));
  piece = std::max(piece, (16 << 10) / (row_bytes * blocks) + 1);
  parallel_for(pool, total, (piece + unit - 1) / unit * unit, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Problem& each : problems) {
      const int64_t from = std::max(begin - first, int64_t{0}), to = std::min(end - first, each.tile_rows());
      if (from < to) body(each, from, to);
      first += each.tile_rows();
    }
  });
}

}  // namespace jaxinfer
