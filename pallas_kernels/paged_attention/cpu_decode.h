// One query token of a row: a product of few query vectors with many keys, bounded by the reading of keys and values.
//
// The query heads of a KV head share every load, three (or two) at a time, so that their sums stay in registers.
#pragma once
#include "paged_attention/cpu_problem.h"

namespace jaxinfer::attention {

constexpr int64_t kBlock = 256;    // keys whose scores are kept at once
constexpr int64_t kAhead = 32;       // keys between what is used and what is fetched from memory
constexpr int64_t kValueBlock = 32;  // values that stay in the first cache for all query vectors

// Query vectors taken at once when `left` are left.
inline int64_t next_vectors(int64_t left) { return left == 4 ? 2 : std::min<int64_t>(left, 3); }

constexpr int64_t kStride = kBlock + 16;  // between the scores of query vectors: the last four may reach past a block

inline int64_t decode_scratch(int64_t group, int64_t H) {
  return group * (2 * H + kStride + 2) + 16 + 2 * Rows::size(kStride);
}

// scores[i][0 .. 3] = q[i] . k[0 .. 3], of codes without their scales
template <int Q, class T>
void four_scores(const float* q, int64_t H, const char* const* k, float* scores) {
  Vec acc[Q][4];
  JAXINFER_UNROLL for (int i = 0; i < 4 * Q; ++i) acc[i / 4][i % 4] = Vec{};
  int64_t h = 0;
  do {
    Vec x[Q];
    JAXINFER_UNROLL for (int i = 0; i < Q; ++i) x[i] = load(q + i * H + h);
    JAXINFER_UNROLL for (int j = 0; j < 4; ++j) {
      const Vec key = load_lanes(reinterpret_cast<const T*>(k[j]), h, H);
      JAXINFER_UNROLL for (int i = 0; i < Q; ++i) acc[i][j] += x[i] * key;
    }
  } while ((h += kLanes) < H);
  JAXINFER_UNROLL for (int i = 0; i < Q; ++i)
    store_sums(scores + i * kStride, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
}

// acc[i][h .. h + C * kLanes] += sum over j of p[i][j] * v[j]
template <int Q, int C, class T>
void add_columns(const float* p, int64_t n, const char* const* v, int64_t h, int64_t H, float* acc, int64_t stride) {
  Vec sums[Q][C];
  JAXINFER_UNROLL for (int i = 0; i < Q * C; ++i) sums[i / C][i % C] = load(acc + i / C * stride + h + i % C * kLanes);
  int64_t j = 0;
  do {
    const T* value = reinterpret_cast<const T*>(v[j]);
    JAXINFER_UNROLL for (int c = 0; c < C; ++c) {
      const Vec x = load_lanes(value, h + c * kLanes, H);
      JAXINFER_UNROLL for (int i = 0; i < Q; ++i) sums[i][c] += p[i * kStride + j] * x;
    }
  } while (++j < n);
  JAXINFER_UNROLL for (int i = 0; i < Q * C; ++i) store(acc + i / C * stride + h + i % C * kLanes, sums[i / C][i % C]);
}

template <int Q, class T>
void add_values(const float* p, int64_t n, const char* const* v, int64_t H, float* acc, int64_t stride) {
  constexpr int C = Q == 1 ? 8 : 4;
  int64_t h = 0;
  for (; h + C * kLanes <= H; h += C * kLanes) add_columns<Q, C, T>(p, n, v, h, H, acc, stride);
  for (; h + 2 * kLanes <= H; h += 2 * kLanes) add_columns<Q, 2, T>(p, n, v, h, H, acc, stride);
  for (; h < H; h += kLanes) add_columns<Q, 1, T>(p, n, v, h, H, acc, stride);
}

// The inner loops for one type of pages, by the number of query vectors - 1.
struct DecodeLoops {
  void (*scores[3])(const float* q, int64_t H, const char* const* k, float* scores);
  void (*values[3])(const float* p, int64_t n, const char* const* v, int64_t H, float* acc, int64_t stride);
};
template <class T>
constexpr DecodeLoops kDecodeLoops = {{four_scores<1, T>, four_scores<2, T>, four_scores<3, T>},
                                      {add_values<1, T>, add_values<2, T>, add_values<3, T>}};
inline const DecodeLoops& decode_loops(Type type) {
  static constexpr DecodeLoops table[] = {kDecodeLoops<float>,  kDecodeLoops<bf16>,      kDecodeLoops<int8_t>,
                                          kDecodeLoops<float8>, kDecodeLoops<packed<4>>, kDecodeLoops<packed<2>>};
  return table[int(type)];
}

// Moves the scales of a page's channels from its keys to the queries: q . ((k - zero) * scale) is the product of
// `scaled` = q * scale with the codes k, plus `offsets`.
inline void scale_queries(const float* q, int64_t group, int64_t H, const float* scale, const float* zero,
                          float* scaled, float* offsets) {
  for (int64_t i = 0; i < group; ++i) {
    Vec total{};
    for (int64_t h = 0; h < H; h += kLanes) {
      const Vec x = load(q + i * H + h) * load(scale + h);
      store(scaled + i * H + h, x);
      total -= x * load(zero + h);
    }
    offsets[i] = sum(total);
  }
}

// Makes scores of n codes, whose scales are one a token, those of the keys; `total` is the sum of the query's lanes.
inline void scale_scores(const Rows& keys, bool has_zero, int64_t n, float total, float* scores) {
  for (int64_t j = 0; j < n; j += kLanes) {
    const Vec x = load(scores + j);
    store(scores + j, (has_zero ? x - load(keys.zero + j) * total : x) * load(keys.scale + j));
  }
}

// Makes n weights of values those of their codes, and takes the part of their zeros from the H sums of `acc`.
inline void scale_weights(const Rows& values, bool has_zero, int64_t n, int64_t H, float* weights, float* acc) {
  Vec total{};
  for (int64_t j = 0; j < n; j += kLanes) {
    const Vec p = load(weights + j) * load(values.scale + j);
    store(weights + j, p);
    if (has_zero) total += p * load(values.zero + j);
  }
  if (!has_zero) return;
  const float shift = sum(total);
  for (int64_t h = 0; h < H; h += kLanes) store(acc + h, load(acc + h) - shift);
}

inline void decode(const Problem& a, const Job& job, int64_t begin, int64_t end, const State& state, float* scratch) {
  const int64_t H = a.H, stride = State::padded(H);
  const DecodeLoops& key_loops = decode_loops(a.k.type);
  const DecodeLoops& value_loops = decode_loops(a.v.type);
  float* q = scratch;
  float* scaled = q + a.group * H;
  float* scores = scaled + a.group * H;  // [group, kStride]
  float* offsets = scores + a.group * kStride;
  float* totals = offsets + a.group;
  const Rows keys = Rows::at(scratch + (a.group * (2 * H + kStride + 2) + 15) / 16 * 16, kStride);
  const Rows values = Rows::at(reinterpret_cast<float*>(keys.data) + Rows::size(kStride), kStride);
  load_queries(a, job, q);
  for (int64_t i = 0; i < a.group; ++i) {
    Vec total{};
    for (int64_t h = 0; h < H; h += kLanes) total += load(q + i * H + h);
    totals[i] = sum(total);
  }
  state.clear(a.group, H);

  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t n = std::min(kBlock, end - block);
    find_rows(a, a.k, job, block, block + n, keys);
    find_rows(a, a.v, job, block, block + n, values);
    int64_t padded = n;
    for (; padded % 8; ++padded) keys.data[padded] = keys.data[n - 1];
    std::fill(keys.data + padded, keys.data + padded + 4, keys.data[n - 1]);
    for (int64_t from = 0, to; from < n; from = to) {  // all keys, or those of a page: what shares its scales
      to = a.k.per_channel ? std::min(n, ((block + from) / a.page_size + 1) * a.page_size - block) : n;
      if (a.k.per_channel)
        scale_queries(q, a.group, H, keys.channel_scale[from], keys.channel_zero[from], scaled, offsets);
      const float* queries = a.k.per_channel ? scaled : q;
      for (int64_t j = from; j < to; j += 4) {
        for (int64_t i = 0; i < 4; ++i) {
          const int64_t next = j + i + kAhead;
          if (next < n) prefetch(keys.data[next], a.k.row_bytes);
          else if (next < n + kAhead && next - n < n) prefetch(values.data[next - n], a.v.row_bytes);
        }
        for (int64_t i = 0, count; i < a.group; i += count) {
          count = next_vectors(a.group - i);
          key_loops.scores[count - 1](queries + i * H, H, keys.data + j, scores + i * kStride + j);
        }
      }
      if (a.k.per_channel)
        for (int64_t i = 0; i < a.group; ++i)
          for (int64_t j = from; j < to; ++j) scores[i * kStride + j] += offsets[i];
    }
    for (int64_t i = 0; i < a.group; ++i) {
      float* s = scores + i * kStride;
      if (a.k.scale && !a.k.per_channel) scale_scores(keys, a.k.zero, n, totals[i], s);
      if (a.soft_cap) cap(s, padded, a.soft_cap);
      std::fill(s + n, s + padded, -kInfinity);
      multiply(state.acc + i * stride, stride, softmax(s, padded, state.m[i], state.l[i]));
      if (a.v.scale) scale_weights(values, a.v.zero, n, H, s, state.acc + i * stride);
    }
    for (int64_t j = 0; j < n; j += kValueBlock) {
      for (int64_t i = j + kValueBlock; i < std::min(n, j + 2 * kValueBlock); ++i)
        prefetch(values.data[i], a.v.row_bytes);
      for (int64_t i = 0, count; i < a.group; i += count) {
        count = next_vectors(a.group - i);
        value_loops.values[count - 1](scores + i * kStride + j, std::min(kValueBlock, n - j), values.data + j, H,
                                      state.acc + i * stride, stride);
      }
    }
  }
}

}  // namespace jaxinfer::attention
