// Many query tokens of a row: tiles of query vectors against tiles of keys, as small matrix products of packed tiles.
//
// Tiles of keys begin at multiples of kTileKeys, whatever the queries, and every sum runs over the keys in order: a
// token's result does not depend on the tile or the chunk in which it is computed.
#pragma once
#include "paged_attention/cpu_problem.h"

namespace jaxinfer::attention {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileVectors = 96;  // query vectors of a tile, about
constexpr int64_t kPanel = 2 * kWide;  // columns of a packed panel
constexpr int kRows = 6;               // rows of the micro-kernel: 12 sums in registers

inline int64_t tile_tokens(int64_t group) { return std::max<int64_t>(1, kTileVectors / group); }

inline int64_t tile_scratch(int64_t rows, int64_t H) {
  return rows * H + kRows * kTileKeys + 2 * kTileKeys * State::padded(H) + 16 + 2 * Rows::size(kTileKeys);
}

// c[R, kPanel] = a[R, n] . b[n, kPanel], added to c or not.
template <int R, bool add>
void multiply_panel(const float* a, int64_t stride_a, const float* b, int64_t n, float* c, int64_t stride_c) {
  WideVec sums[R][2];
  JAXINFER_UNROLL for (int i = 0; i < 2 * R; ++i)
    sums[i / 2][i % 2] = add ? load_wide(c + i / 2 * stride_c + i % 2 * kWide) : WideVec{};
  int64_t k = 0;
  do {
    const WideVec b0 = load_wide(b), b1 = load_wide(b + kWide);
    JAXINFER_UNROLL for (int i = 0; i < R; ++i) {
      const float x = a[i * stride_a + k];
      sums[i][0] += x * b0;
      sums[i][1] += x * b1;
    }
    b += kPanel;
  } while (++k < n);
  JAXINFER_UNROLL for (int i = 0; i < 2 * R; ++i)
    store_wide(c + i / 2 * stride_c + i % 2 * kWide, sums[i / 2][i % 2]);
}

// c[rows, panels * kPanel] (+)= a[rows, n] . panels of b, which lie `stride_b` apart
template <bool add>
void multiply_panels(int64_t rows, const float* a, int64_t stride_a, const float* b, int64_t stride_b, int64_t n,
                     int64_t panels, float* c, int64_t stride_c) {
  using Kernel = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t);
  static constexpr Kernel kernels[kRows] = {multiply_panel<1, add>, multiply_panel<2, add>, multiply_panel<3, add>,
                                            multiply_panel<4, add>, multiply_panel<5, add>, multiply_panel<6, add>};
  for (int64_t p = 0; p < panels; ++p) kernels[rows - 1](a, stride_a, b + p * stride_b, n, c + p * kPanel, stride_c);
}

// Packs keys as panels [kTileKeys / kPanel][H][kPanel]; keys outside [from, to) are zero, and never read.
template <class T>
void pack_keys(const Rows& keys, bool per_channel, int64_t from, int64_t to, int64_t H, float* packed) {
  if (from > 0 || to < kTileKeys) std::fill_n(packed, kTileKeys * H, 0.0f);
  for (int64_t j = from; j < to; ++j) {
    float* column = packed + j / kPanel * kPanel * H + j % kPanel;
    const bool is_block = j % kLanes == 0 && j + kLanes <= to;
    for (int64_t h = 0; h < H; h += kLanes) {
      if (is_block) {
        Vec block[kLanes];
        JAXINFER_UNROLL for (int i = 0; i < kLanes; ++i)
          block[i] = load_value<T>(keys, per_channel, j - from + i, h, H);
        transpose(block);
        JAXINFER_UNROLL for (int i = 0; i < kLanes; ++i) store(column + (h + i) * kPanel, block[i]);
      } else {
        const Vec key = load_value<T>(keys, per_channel, j - from, h, H);
        for (int i = 0; i < kLanes; ++i) column[(h + i) * kPanel] = key[i];
      }
    }
    if (is_block) j += kLanes - 1;
  }
}

// Packs values as panels [H / kPanel][kTileKeys][kPanel], zero likewise and in the columns past H.
template <class T>
void pack_values(const Rows& values, bool per_channel, int64_t from, int64_t to, int64_t H, float* packed) {
  if (from > 0 || to < kTileKeys || H % kPanel) std::fill_n(packed, kTileKeys * State::padded(H), 0.0f);
  for (int64_t j = from; j < to; ++j)
    for (int64_t h = 0; h < H; h += kLanes)
      store(packed + (h / kPanel * kTileKeys + j) * kPanel + h % kPanel,
            load_value<T>(values, per_channel, j - from, h, H));
}

struct Packers {
  void (*keys)(const Rows&, bool per_channel, int64_t from, int64_t to, int64_t H, float* packed);
  void (*values)(const Rows&, bool per_channel, int64_t from, int64_t to, int64_t H, float* packed);
};
template <class T>
constexpr Packers kPackers = {pack_keys<T>, pack_values<T>};
inline const Packers& packers(Type type) {
  static constexpr Packers table[] = {kPackers<float>,  kPackers<bf16>,      kPackers<int8_t>,
                                      kPackers<float8>, kPackers<packed<4>>, kPackers<packed<2>>};
  return table[int(type)];
}

// Masks what query token `token` at `position` does not see of the n keys from `first_key` on.
inline void mask(const Problem& a, int64_t start, int64_t token, int64_t position, int64_t first_key, int64_t n,
                 float* scores) {
  const int64_t low = std::clamp<int64_t>(position - a.window + 1 - first_key, 0, n);
  const int64_t high = std::clamp<int64_t>(a.end_of_keys(position) - first_key, 0, n);
  std::fill(scores, scores + low, -kInfinity);
  std::fill(scores + high, scores + n, -kInfinity);
  const uint32_t* words = a.tree_mask + token * a.W;
  if (first_key + high <= start || std::all_of(words, words + a.W, [](uint32_t word) { return word == 0; })) return;
  for (int64_t j = std::max<int64_t>(start - first_key, 0); j < high; ++j) {
    const int64_t bit = first_key + j - start;  // of the row's query tokens
    const bool sees = bit / 32 < a.W && (words[bit / 32] >> (bit % 32) & 1);
    if (!sees && first_key + j != position) scores[j] = -kInfinity;
  }
}

inline void tile(const Problem& a, const Job& job, int64_t begin, int64_t end, const State& state, float* scratch) {
  const int64_t H = a.H, stride = State::padded(H), rows = job.count * a.group;
  float* q = scratch;
  float* scores = q + rows * H;  // [kRows, kTileKeys]
  float* packed_keys = scores + kRows * kTileKeys;
  float* packed_values = packed_keys + kTileKeys * stride;
  float* end_of_floats = packed_values + kTileKeys * stride;
  const Rows keys = Rows::at(scratch + (end_of_floats - scratch + 15) / 16 * 16, kTileKeys);
  const Rows values = Rows::at(reinterpret_cast<float*>(keys.data) + Rows::size(kTileKeys), kTileKeys);
  const int64_t start = a.kv_lens[job.row] - (a.cu_q_lens[job.row + 1] - a.cu_q_lens[job.row]);
  load_queries(a, job, q);
  state.clear(rows, H);

  for (int64_t first = begin / kTileKeys * kTileKeys; first < end; first += kTileKeys) {
    const int64_t from = std::max(first, begin), to = std::min(first + kTileKeys, end);
    find_rows(a, a.k, job, from, to, keys);
    find_rows(a, a.v, job, from, to, values);
    packers(a.k.type).keys(keys, a.k.per_channel, from - first, to - first, H, packed_keys);
    packers(a.v.type).values(values, a.v.per_channel, from - first, to - first, H, packed_values);
    for (int64_t r = 0; r < rows; r += kRows) {
      const int64_t count = std::min<int64_t>(kRows, rows - r);
      const int64_t last = job.position + (r + count - 1) / a.group;
      const int64_t n = std::min(to, a.end_of_keys(last)) - first;  // keys that the block's last vector may see
      if (n <= 0) continue;
      const int64_t panels = (n + kPanel - 1) / kPanel;
      multiply_panels<false>(count, q + r * H, H, packed_keys, kPanel * H, H, panels, scores, kTileKeys);
      for (int64_t i = r; i < r + count; ++i) {
        float* s = scores + (i - r) * kTileKeys;
        const int64_t t = i / a.group, position = job.position + t, width = panels * kPanel;
        if (a.soft_cap) cap(s, width, a.soft_cap);
        if (a.end_of_keys(position) < first + width || position - a.window + 1 > first || a.W)
          mask(a, start, job.token + t, position, first, width, s);
        multiply(state.acc + i * stride, stride, softmax(s, width, state.m[i], state.l[i]));
      }
      multiply_panels<true>(count, scores, kTileKeys, packed_values, kTileKeys * kPanel, n, stride / kPanel,
                            state.acc + r * stride, stride);
    }
  }
}

}  // namespace jaxinfer::attention
