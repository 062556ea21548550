// Ragged paged attention on CPUs: pages are read where they lie, through the page table.
//
// The work is cut into jobs (one KV head of one row, and of rows with many query tokens one tile of them), and long
// jobs into parts of their keys, whose states are combined by whichever thread ends the last one. How a row is cut
// depends on its own lengths alone, and sums run in one order: a row's result is the same in every batch, on any number
// of threads.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/parallel.h"
#include "paged_attention/cpu_decode.h"
#include "paged_attention/cpu_problem.h"
#include "paged_attention/cpu_tile.h"

namespace ffi = xla::ffi;

namespace jaxinfer::attention {
namespace {

constexpr int64_t kSplit = 256;       // keys of a part, at least
constexpr int64_t kMaxSplits = 32;    // parts of a row, about
constexpr int64_t kTileSplit = 1024;  // keys of a part of a tile, at least
constexpr int64_t kFewTiles = 4;      // a row of fewer tiles than this has their keys split
constexpr double kSerial = 4e5;       // multiplications below which other threads would come too late

// Aligned memory that a thread keeps from call to call; its content is lost when it grows.
class Scratch {
 public:
  float* floats(int64_t n) {
    if (n > size_) {
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64)));
      size_ = n;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t size_ = 0;
};

struct Plan {
  struct Part {
    int32_t job, split;
  };
  std::vector<Job> jobs;
  std::vector<Part> parts;
  int64_t partial = 0;  // floats of the states of jobs in several parts
  int64_t scratch = 0;  // floats that a thread needs
  double cost = 0;

  void clear() {
    jobs.clear();
    parts.clear();
    partial = scratch = 0;
    cost = 0;
  }

  void add(const Problem& a, Job job) {
    const int64_t rows = job.count * a.group;
    const int64_t first = job.key_begin / job.split;
    job.splits = job.key_end > job.key_begin ? (job.key_end - 1) / job.split - first + 1 : 1;
    job.partial = partial;
    if (job.splits > 1) partial += job.splits * State::size(rows, a.H);
    for (int64_t s = job.splits - 1; s >= 0; --s) parts.push_back({int32_t(jobs.size()), int32_t(s)});
    jobs.push_back(job);
    const int64_t working = job.decoding ? decode_scratch(rows, a.H) : tile_scratch(rows, a.H);
    scratch = std::max(scratch, State::size(rows, a.H) + working);
    cost += 2.0 * rows * a.H * (job.key_end - job.key_begin);
  }
};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Jobs of rows with many query tokens first, the longest first: the small ones then fill the threads evenly.
void make_plan(const Problem& a, Plan& plan) {
  plan.clear();
  for (const bool decoding : {false, true})
    for (int64_t row = 0; row < a.S; ++row) {
      const int64_t token = std::clamp<int64_t>(a.cu_q_lens[row], 0, a.T);
      const int64_t count = std::clamp<int64_t>(a.cu_q_lens[row + 1], token, a.T) - token;
      if (count == 0 || (count == 1) != decoding) continue;
      const int64_t length = std::min<int64_t>(a.kv_lens[row], a.M * a.page_size), start = length - count;
      const int64_t step = decoding ? 1 : tile_tokens(a.group), tiles = (count + step - 1) / step;
      const int64_t low = std::max<int64_t>(start + 1 - a.window, 0);
      int64_t split = std::max(kSplit, round_up((length - low) / kMaxSplits, kSplit));
      if (!decoding) split = tiles < kFewTiles ? std::max(kTileSplit, split) : round_up(length + 1, kTileKeys);
      for (int64_t t = tiles - 1; t >= 0; --t)
        for (int64_t head = 0; head < a.K; ++head) {
          const int64_t n = std::min(step, count - t * step), position = start + t * step;
          const int64_t begin = std::max<int64_t>(position + 1 - a.window, 0);
          plan.add(a, {row, head, token + t * step, n, position, begin, std::max(begin, a.end_of_keys(position + n - 1)), split, 0,
                       decoding, 0});
        }
    }
}

void run(const Problem& a, const Job& job, int64_t begin, int64_t end, const State& state, float* scratch) {
  (job.decoding ? decode : tile)(a, job, begin, end, state, scratch);
}

// Writes the results of a job whose parts' states lie one after the other from `memory` on.
template <class T>
void finish(const Problem& a, const Job& job, float* memory) {
  const int64_t rows = job.count * a.group, stride = State::padded(a.H), size = State::size(rows, a.H);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t place = (job.token + i / a.group) * a.N + job.head * a.group + i % a.group;
    const State first = State::at(memory, rows, a.H);
    float m = first.m[i], l = first.l[i];
    float* acc = first.acc + i * stride;
    for (int64_t s = 1; s < job.splits; ++s) {
      const State next = State::at(memory + s * size, rows, a.H);
      if (next.m[i] == -kInfinity && !(next.l[i] > 0 || next.l[i] != next.l[i])) continue;
      const float top = std::max(m, next.m[i]);
      const float old = m == top ? 1.0f : std::exp(m - top);
      const float fresh = next.m[i] == top ? 1.0f : std::exp(next.m[i] - top);
      const float* x = next.acc + i * stride;
      for (int64_t h = 0; h < stride; h += kLanes) store(acc + h, load(acc + h) * old + load(x + h) * fresh);
      l = l * old + next.l[i] * fresh;
      m = top;
    }
    T* out = static_cast<T*>(a.out) + place * a.H;
    const float factor = l == 0 ? 0.0f : 1.0f / l;  // no key at all: zeros
    for (int64_t h = 0; h < a.H; ++h) from_float(acc[h] * factor, out + h);
    a.lse[place] = l == 0 ? -kInfinity : m + std::log(l);
  }
}

void attend(const Problem& a, ffi::ThreadPool& pool) {
  static thread_local Scratch partials;  // like the plan, kept from call to call
  static thread_local Plan own_plan;
  Plan& plan = own_plan;  // the other threads use this one, not theirs
  make_plan(a, plan);
  float* shared = partials.floats(plan.partial);
  const auto left = std::make_unique<std::atomic<int32_t>[]>(plan.jobs.size());  // parts of a job not yet done
  for (size_t j = 0; j < plan.jobs.size(); ++j) left[j].store(plan.jobs[j].splits, std::memory_order_relaxed);

  const int64_t count = plan.parts.size();
  parallel_for(pool, count, plan.cost < kSerial ? std::max<int64_t>(count, 1) : 1, [&](int64_t from, int64_t to) {
    static thread_local Scratch own;
    const FlushDenormals flush;
    float* memory = own.floats(plan.scratch);
    for (int64_t i = from; i < to; ++i) {
      const auto [j, s] = plan.parts[i];
      const Job& job = plan.jobs[j];
      const int64_t rows = job.count * a.group, size = State::size(rows, a.H);
      const int64_t edge = (job.key_begin / job.split + s) * job.split;
      float* states = job.splits > 1 ? shared + job.partial : memory;
      run(a, job, std::max(job.key_begin, edge), std::min(job.key_end, edge + job.split),
          State::at(states + s * size, rows, a.H), memory + size);
      if (left[j].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      a.q_type == Type::f32 ? finish<float>(a, job, states) : finish<bf16>(a, job, states);
    }
  });

  const int64_t used = std::clamp<int64_t>(a.cu_q_lens[a.S], 0, a.T), item = a.q_type == Type::f32 ? 4 : 2;
  std::memset(static_cast<char*>(a.out) + used * a.N * a.H * item, 0, (a.T - used) * a.N * a.H * item);
  std::fill(a.lse + used * a.N, a.lse + a.T * a.N, -kInfinity);
}

ffi::Error handle(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::Buffer<ffi::S32> page_indices,
                  ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::U32> tree_mask,
                  ffi::RemainingArgs pages, ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::F32> lse,
                  float scale, int64_t window, float soft_cap, bool before_own_page,
                  bool k_per_channel) {
  Problem a{};
  const auto queries = q.dimensions(), table = page_indices.dimensions();
  a.T = queries[0], a.N = queries[1], a.H = queries[2];
  ffi::Span<const int64_t> shape;
  size_t next = 0;
  if (!take_pages(pages, next, a.H, k_per_channel, a.k, shape) || !take_pages(pages, next, a.H, false, a.v, shape))
    return ffi::Error::InvalidArgument("keys and values must be pages of f32, bf16 or codes with scales");
  if (q.element_type() != ffi::DataType::F32 && q.element_type() != ffi::DataType::BF16)
    return ffi::Error::InvalidArgument("queries must be f32 or bf16");
  a.q_type = q.element_type() == ffi::DataType::F32 ? Type::f32 : Type::bf16;
  a.q = q.untyped_data();
  a.page_indices = page_indices.typed_data(), a.kv_lens = kv_lens.typed_data();
  a.cu_q_lens = cu_q_lens.typed_data(), a.tree_mask = tree_mask.typed_data();
  a.out = out->untyped_data(), a.lse = lse->typed_data();
  a.K = shape[0], a.P = shape[1], a.page_size = shape[2];
  a.S = table[0], a.M = table[1], a.W = tree_mask.dimensions()[1];
  a.group = a.N / a.K, a.window = window, a.scale = scale, a.soft_cap = soft_cap;
  a.before_own_page = before_own_page;
  if (a.H % 8) return ffi::Error::InvalidArgument("head_dim must be a multiple of 8");
  attend(a, pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer::attention

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ragged_paged_attention(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(ragged_paged_attention, jaxinfer::attention::handle,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("before_own_page")
                                  .Attr<bool>("k_per_channel"));
