// What the two paths of ragged paged attention on CPUs share: the arguments, where keys lie, the online softmax.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/simd.h"

namespace jaxinfer::attention {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

enum class Type { f32, bf16 };

struct Problem {
  const void* q;        // [T, N, H]
  const void* k_pages;  // [K, P, page_size, H]
  const void* v_pages;
  const int32_t* page_indices;  // [S, M]
  const int32_t* kv_lens;       // [S]
  const int32_t* cu_q_lens;     // [S + 1]
  const uint32_t* tree_mask;    // [T, W]
  void* out;                    // [T, N, H]
  float* lse;                   // [T, N]
  Type q_type, k_type, v_type;
  int64_t T, N, H, K, P, page_size, S, M, W;
  int64_t group;   // query heads of a KV head
  int64_t window;  // keys that a token sees, itself included; very large for all
  float scale, soft_cap;  // soft_cap 0: none
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

// Writes the addresses of the keys (or values) [begin, end) of a row. Page numbers out of range read the null page.
template <class T>
void find_rows(const Problem& a, const void* pages, const Job& job, int64_t begin, int64_t end, const T** rows) {
  const int32_t* table = a.page_indices + job.row * a.M;
  const T* head = static_cast<const T*>(pages) + job.head * a.P * a.page_size * a.H;
  int64_t page = begin / a.page_size, offset = begin % a.page_size;
  for (int64_t key = begin; key < end; ++page, offset = 0) {
    const int64_t number = uint32_t(table[page]) < uint64_t(a.P) ? table[page] : 0;
    const T* row = head + (number * a.page_size + offset) * a.H;
    for (; offset < a.page_size && key < end; ++offset, ++key, row += a.H) *rows++ = row;
  }
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
