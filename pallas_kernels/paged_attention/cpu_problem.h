// What the two paths of ragged paged attention on CPUs share: the arguments, where keys lie, the online softmax.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/pages.h"

namespace jaxinfer::attention {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Problem {
  const void* q;                // [T, N, H]
  Pages k, v;
  const int32_t* page_indices;  // [S, M]
  const int32_t* kv_lens;       // [S]
  const int32_t* cu_q_lens;     // [S + 1]
  const uint32_t* tree_mask;    // [T, W]
  void* out;                    // [T, N, H]
  float* lse;                   // [T, N]
  Type q_type;
  int64_t T, N, H, K, P, page_size, S, M, W;
  int64_t group;   // query heads of a KV head
  int64_t window;  // keys that a token sees, itself included; very large for all
  float scale, soft_cap;  // soft_cap 0: none
  bool before_own_page;   // a token sees no key of its own page

  // The first key after those that a query token at `position` sees.
  int64_t end_of_keys(int64_t position) const {
    return before_own_page ? position / page_size * page_size : position + 1;
  }
};

// The query tokens [token, token + count) of one row and the query heads of one KV head, against the keys
// [key_begin, key_end) in `splits` parts, the first of which ends at a multiple of `split`.
struct Job {
  int64_t row, head, token, count;
  int64_t position;  // of the first token
  int64_t key_begin, key_end, split, splits;
  bool decoding;    // the row has one query token
  int64_t partial;  // where its parts' states lie
};

// The state of the online softmax of `rows` query vectors (FlashAttention, Dao et al. 2022, Algorithm 1).
struct State {
  float* m;    // [rows] maximum of the scores so far
  float* l;    // [rows] sum of exp(score - m)
  float* acc;  // [rows, H padded] sum of exp(score - m) * v

  static int64_t padded(int64_t H) { return (H + 2 * kWide - 1) / (2 * kWide) * (2 * kWide); }
  static int64_t size(int64_t rows, int64_t H) { return (rows * (2 + padded(H)) + 15) / 16 * 16; }
  static State at(float* memory, int64_t rows, int64_t H) {
    return {memory + rows * padded(H), memory + rows * padded(H) + rows, memory};
  }
  void clear(int64_t rows, int64_t H) const {
    std::fill_n(acc, rows * padded(H), 0.0f);
    std::fill_n(m, rows, -kInfinity);
    std::fill_n(l, rows, 0.0f);
  }
};

// Where some keys (or values) of a row lie, and their scales and zeros.
struct Rows {
  const char** data;
  float* scale;  // one a key, of pages with one a token; followed by zeros up to a multiple of kLanes
  float* zero;
  const float** channel_scale;  // [H], of pages with one a channel
  const float** channel_zero;

  static int64_t size(int64_t n) { return 8 * n; }  // floats of memory for n keys
  static Rows at(float* memory, int64_t n) {
    const auto pointers = reinterpret_cast<const char**>(memory);
    const auto channels = reinterpret_cast<const float**>(pointers + n);
    return {pointers, memory + 6 * n, memory + 7 * n, channels, channels + n};
  }
};

// Finds the keys (or values) [begin, end) of a row. Page numbers out of range read the null page.
inline void find_rows(const Problem& a, const Pages& pages, const Job& job, int64_t begin, int64_t end,
                      const Rows& rows) {
  const int32_t* table = a.page_indices + job.row * a.M;
  int64_t page = begin / a.page_size, offset = begin % a.page_size, j = 0;
  for (int64_t key = begin; key < end; ++page, offset = 0) {
    const int64_t number = job.head * a.P + (uint32_t(table[page]) < uint64_t(a.P) ? table[page] : 0);
    const int64_t slot = number * a.page_size + offset, n = std::min(a.page_size - offset, end - key);
    const char* row = static_cast<const char*>(pages.data) + slot * pages.row_bytes;
    for (int64_t i = 0; i < n; ++i, row += pages.row_bytes) rows.data[j + i] = row;
    if (pages.per_channel) {
      std::fill_n(rows.channel_scale + j, n, pages.scale + number * a.H);
      std::fill_n(rows.channel_zero + j, n, pages.zero + number * a.H);
    } else if (pages.scale) {
      std::copy_n(pages.scale + slot, n, rows.scale + j);
      if (pages.zero) std::copy_n(pages.zero + slot, n, rows.zero + j);
    }
    key += n, j += n;
  }
  for (; j % kLanes; ++j) rows.scale[j] = rows.zero[j] = 0;
}

// Lanes [h, h + kLanes) of key (or value) j as it is meant.
template <class T>
Vec load_value(const Rows& rows, bool per_channel, int64_t j, int64_t h, int64_t H) {
  Vec x = load_lanes(reinterpret_cast<const T*>(rows.data[j]), h, H);
  if constexpr (kIsCode<T>) {
    if (per_channel) return (x - load(rows.channel_zero[j] + h)) * load(rows.channel_scale[j] + h);
    if constexpr (kHasZero<T>) x -= rows.zero[j];
    x *= rows.scale[j];
  }
  return x;
}

// Writes the job's query vectors, token by token, times the scale, as f32[count * group, H].
template <class T>
void load_queries(const Problem& a, const Job& job, float* q) {
  for (int64_t t = 0; t < job.count; ++t) {
    const T* from = static_cast<const T*>(a.q) + ((job.token + t) * a.N + job.head * a.group) * a.H;
    for (int64_t i = 0; i < a.group * a.H; i += kLanes) store(q + i, load(from + i) * a.scale);
    q += a.group * a.H;
  }
}
inline void load_queries(const Problem& a, const Job& job, float* q) {
  a.q_type == Type::f32 ? load_queries<float>(a, job, q) : load_queries<bf16>(a, job, q);
}

// Turns n scores (a multiple of kLanes; -inf where masked) into exp(score - m) with the new m, adds them to l, and
// returns what the accumulator is to be multiplied by.
inline float softmax(float* scores, int64_t n, float& m, float& l) {
  Vec top = Vec{} - kInfinity;
  for (int64_t i = 0; i < n; i += kLanes) top = max(load(scores + i), top);  // a NaN goes on into the sum below
  const float m_new = std::max(m, max_lane(top));
  const float base = m_new == -kInfinity ? 0.0f : m_new;
  Vec total{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec p = exp_nonpositive(load(scores + i) - base);
    store(scores + i, p);
    total += p;
  }
  const float correction = m == m_new ? 1.0f : std::exp(m - m_new);
  l = l * correction + sum(total);
  m = m_new;
  return correction;
}

inline void cap(float* scores, int64_t n, float soft_cap) {
  for (int64_t i = 0; i < n; i += kLanes) store(scores + i, soft_cap * tanh(load(scores + i) / soft_cap));
}

inline void multiply(float* x, int64_t n, float factor) {
  if (factor == 1.0f) return;
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * factor);
}

}  // namespace jaxinfer::attention
