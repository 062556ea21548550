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

inline int64_t decode_scratch(int64_t group, int64_t H) { return group * (H + kBlock) + 4 * kBlock; }

// scores[i][0 .. 3] = q[i] . k[0 .. 3]
template <int Q, class T>
void four_scores(const float* q, int64_t H, const T* const* k, float* scores) {
  Vec acc[Q][4];
  JAXINFER_UNROLL for (int i = 0; i < 4 * Q; ++i) acc[i / 4][i % 4] = Vec{};
  int64_t h = 0;
  do {
    Vec x[Q];
    JAXINFER_UNROLL for (int i = 0; i < Q; ++i) x[i] = load(q + i * H + h);
    JAXINFER_UNROLL for (int j = 0; j < 4; ++j) {
      const Vec key = load(k[j] + h);
      JAXINFER_UNROLL for (int i = 0; i < Q; ++i) acc[i][j] += x[i] * key;
    }
  } while ((h += kLanes) < H);
  JAXINFER_UNROLL for (int i = 0; i < Q; ++i)
    store_sums(scores + i * kBlock, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
}

// acc[i][h .. h + C * kLanes] += sum over j of p[i][j] * v[j]
template <int Q, int C, class T>
void add_columns(const float* p, int64_t n, const T* const* v, int64_t h, float* acc, int64_t stride) {
  Vec sums[Q][C];
  JAXINFER_UNROLL for (int i = 0; i < Q * C; ++i) sums[i / C][i % C] = load(acc + i / C * stride + h + i % C * kLanes);
  int64_t j = 0;
  do {
    const T* value = v[j] + h;
    JAXINFER_UNROLL for (int c = 0; c < C; ++c) {
      const Vec x = load(value + c * kLanes);
      JAXINFER_UNROLL for (int i = 0; i < Q; ++i) sums[i][c] += p[i * kBlock + j] * x;
    }
  } while (++j < n);
  JAXINFER_UNROLL for (int i = 0; i < Q * C; ++i) store(acc + i / C * stride + h + i % C * kLanes, sums[i / C][i % C]);
}

template <int Q, class T>
void add_values(const float* p, int64_t n, const T* const* v, int64_t H, float* acc, int64_t stride) {
  constexpr int C = Q == 1 ? 8 : 4;
  int64_t h = 0;
  for (; h + C * kLanes <= H; h += C * kLanes) add_columns<Q, C>(p, n, v, h, acc, stride);
  for (; h + 2 * kLanes <= H; h += 2 * kLanes) add_columns<Q, 2>(p, n, v, h, acc, stride);
  for (; h < H; h += kLanes) add_columns<Q, 1>(p, n, v, h, acc, stride);
}

template <class TK, class TV>
void decode(const Problem& a, const Job& job, int64_t begin, int64_t end, const State& state, float* scratch) {
  const int64_t H = a.H, stride = State::padded(H);
  float* q = scratch;
  float* scores = q + a.group * H;  // [group, kBlock]
  const TK** keys = reinterpret_cast<const TK**>(scores + a.group * kBlock);
  const TV** values = reinterpret_cast<const TV**>(keys + kBlock);
  load_queries(a, job, q);
  state.clear(a.group, H);

  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t n = std::min(kBlock, end - block);
    find_rows(a, a.k_pages, job, block, block + n, keys);
    find_rows(a, a.v_pages, job, block, block + n, values);
    int64_t padded = n;
    for (; padded % 8; ++padded) keys[padded] = keys[n - 1];
    for (int64_t j = 0; j < padded; j += 4) {
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t next = j + i + kAhead;
        next < n ? prefetch(keys[next], H) : next < n + kAhead && next - n < n ? prefetch(values[next - n], H) : void();
      }
      for (int64_t i = 0, count; i < a.group; i += count) {
        count = next_vectors(a.group - i);
        const auto run = count == 1 ? four_scores<1, TK> : count == 2 ? four_scores<2, TK> : four_scores<3, TK>;
        run(q + i * H, H, keys + j, scores + i * kBlock + j);
      }
    }
    for (int64_t i = 0; i < a.group; ++i) {
      float* s = scores + i * kBlock;
      if (a.soft_cap) cap(s, padded, a.soft_cap);
      std::fill(s + n, s + padded, -kInfinity);
      multiply(state.acc + i * stride, stride, softmax(s, padded, state.m[i], state.l[i]));
    }
    for (int64_t j = 0; j < n; j += kValueBlock) {
      for (int64_t i = j + kValueBlock; i < std::min(n, j + 2 * kValueBlock); ++i) prefetch(values[i], H);
      for (int64_t i = 0, count; i < a.group; i += count) {
        count = next_vectors(a.group - i);
        const auto run = count == 1 ? add_values<1, TV> : count == 2 ? add_values<2, TV> : add_values<3, TV>;
        run(scores + i * kBlock + j, std::min(kValueBlock, n - j), values + j, H, state.acc + i * stride, stride);
      }
    }
  }
}

}  // namespace jaxinfer::attention
