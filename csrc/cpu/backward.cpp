// With xhat = (x - mean) * rstd and g = dy * weight, computes for every row of x and dy [rows, cols]
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat
//   dbias = sum over rows of dy
//
// RMSNorm has a mean of 0 and dx = rstd * (g - xhat * mean(g * xhat)). The gradient of the sum that forward returns
// with a residual is added to dx. If the sum is input_scale * input + residual, the gradients of the input and of
// input_scale are
//
//   dinput = dx * input_scale
//   dinput_scale = sum over rows of dx * input
//
// Rows are divided into segments. A thread takes a segment and handles a few rows at a time. Its sums loop computes the
// sums of each row; its gradients loop computes dx, and adds the rows to the segment's partial sums of dweight and
// dbias, which are in the workspace. A last loop adds the partial sums of all segments. x and dy come from memory once,
// so 3 * rows * cols * sizeof(T) bytes are moved. If there are fewer segments than threads, the sums of all rows are
// computed first, and then the threads share the columns. The order of every sum stays the same.
//
// Precision: the saved mean is rounded, so xhat is off by a constant within a row. This constant is the average of xhat
// and is subtracted from it.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <utility>

#include "../dtypes.h"
#include "backward_loops.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

template <class T>
void prefetch_row_for_write(T* row, int64_t cols) {
  for (int64_t j = 0; j < cols; j += kCacheLineBytes / sizeof(T)) {
    __builtin_prefetch(row + j, 1);
    asm volatile("");  // GCC removes a loop that only prefetches
  }
}

// Calls f(sample, first row, rows) for the rows of a segment, at most `step` at a time. f may write dx.
template <class B, class F>
void for_rows_of_segment(const B& b, int64_t segment, int64_t step, const F& f) {
  for_each_sample(b.p.rows, b.segments.begin(segment), b.segments.end(segment),
                  [&](int64_t sample, int64_t row, int64_t count) {
                    for (int64_t k = 0; k < count; k += step) f(sample, row + k, min(step, count - k));
                  });
  if (b.policy.streams) streaming_fence();
}

// The partial sums of a segment for columns [begin, begin + n). Those of the first kSumRows rows or less go to a
// buffer. Those of the rows that follow go to the second buffer and are then added to the first, kSumRows rows at a
// time.
template <class B>
class SegmentSums {
 public:
  SegmentSums(const B& b, int64_t buffer, int64_t second_buffer, int64_t begin, int64_t n)
      : b_(b), buffer_(buffer), second_buffer_(b.policy.buffers + second_buffer), begin_(begin), n_(n) {}

  // Adds rows r to r + count - 1 of a sample.
  void add(int64_t sample, int64_t r, int64_t count, const Coefficients<typename B::Acc>& c, bool any_rescaled) {
    if (rows_ + count > kSumRows) next_sum();
    const int64_t buffer = is_first_ ? buffer_ : second_buffer_;
    finish_(b_, buffer, sample, r, count, rows_ == 0, c, any_rescaled, begin_, n_);
    if (b_.has_input_scale_gradients) input_scale_loop(b_, buffer, sample, r, count, rows_ == 0, begin_, n_);
    rows_ += count;
  }

  // Adds the second buffer to the first, if the segment has used it. The caller has added at least one row.
  void end() {
    if (!is_first_) next_sum();
  }

 private:
  void next_sum() {
    if (!is_first_) {
      add_buffer(b_.dweight(buffer_), b_.dweight(second_buffer_));
      add_buffer(b_.dbias(buffer_), b_.dbias(second_buffer_));
      add_buffer(b_.dinput_scale(buffer_), b_.dinput_scale(second_buffer_));
    }
    is_first_ = false;
    rows_ = 0;
  }
  void add_buffer(typename B::Acc* sums, const typename B::Acc* more) const {
    if (!sums) return;
    for_each_pack<typename B::Acc, 1>(begin_, n_, [&](int, int64_t j, auto) {
      write(sums + j, read(sums + j, AllLanes{}) + read(more + j, AllLanes{}), AllLanes{});
    });
  }

  const B& b_;
  decltype(choose_gradients(std::declval<const B&>())) finish_ = choose_gradients(b_);
  const int64_t buffer_, second_buffer_, begin_, n_;
  int64_t rows_ = 0;  // in the current sum
  bool is_first_ = true;
};

// Handles all rows of a segment; its partial sums go to a buffer of the workspace.
template <class B>
void backward_segment(const B& b, int64_t segment, int64_t buffer, int64_t second_buffer) {
  SegmentSums<B> sums(b, buffer, second_buffer, 0, b.p.cols);
  for_rows_of_segment(b, segment, b.policy.batch, [&](int64_t sample, int64_t r, int64_t count) {
    typename B::Acc values[kCoefficients * kMaxBatchRows];
    const Coefficients<typename B::Acc> c = {values, kMaxBatchRows};
    for (int64_t k = 0; b.policy.prefetches_dx && k < count; ++k) {
      prefetch_row_for_write(b.p.grad_input.template row<typename B::X>(sample, r + k), b.p.cols);
    }
    sums.add(sample, r, count, c, compute_coefficients(b, sample, r, count, c));
  });
  sums.end();
}

// Stores the sums in a buffer, for columns [begin, end), as the gradients of a sample.
template <class B>
void store_gradients(const B& b, int64_t sample, int64_t buffer, int64_t begin, int64_t end) {
  const auto store = [&](const typename B::Acc* sums, const View& gradient) {
    if (!gradient.data) return;
    add_partials<typename B::X>(sums, b.pitch, 1, begin, end, gradient.row<typename B::W>(sample, 0));
  };
  store(b.dweight(buffer), b.p.grad_weight);
  store(b.dbias(buffer), b.p.grad_bias);
  store(b.dinput_scale(buffer), b.p.grad_input_scale);
}

// Handles few long rows: computes the coefficients of all rows first, then the threads share the columns.
template <class B>
void backward_sharing_columns(const B& b) {
  const BackwardParams& p = b.p;
  const int64_t rows = p.samples * p.rows;
  if (b.policy.shares_rows) {
    for (int64_t r = 0; r < rows; ++r) {
      compute_coefficients<AllThreads, 1, kWidePacks>(b, r / p.rows, r % p.rows, b.coefficients.from(r));
    }
  } else {
    parallel_for(rows, grain(p.cols), [&](int64_t begin, int64_t end) {
      for_each_sample(p.rows, begin, end, [&](int64_t sample, int64_t r, int64_t count) {
        compute_coefficients(b, sample, r, count, b.coefficients.from(sample * p.rows + r));
      });
    });
  }
  const int64_t tiles = ceil_div(p.cols, kTileCols), step = b.policy.batch;
  parallel_for(b.segments.count * tiles, grain(b.segments.rows * kTileCols), [&](int64_t task, int64_t end) {
    for (; task < end; ++task) {
      const int64_t segment = task / tiles, begin = task % tiles * kTileCols;
      SegmentSums<B> sums(b, segment, segment, begin, min(kTileCols, p.cols - begin));
      for_rows_of_segment(b, segment, step, [&](int64_t sample, int64_t r, int64_t count) {
        const auto c = b.coefficients.from(sample * p.rows + r);
        bool any_rescaled = false;
        for (int64_t k = 0; k < count; ++k) any_rescaled |= has_row_scale(b, c, k);
        sums.add(sample, r, count, c, any_rescaled);
      });
      sums.end();
      if (b.segments.are_gradients) store_gradients(b, segment, segment, begin, min(begin + kTileCols, p.cols));
    }
  });
}

template <class B>
void backward(const B& b) {
  using X = typename B::X;
  using W = typename B::W;
  const BackwardParams& p = b.p;
  const BackwardPolicy& policy = b.policy;
  const Segments& segments = b.segments;
  if (policy.shares_columns) {
    backward_sharing_columns(b);
  } else if (segments.are_gradients) {
    parallel_for(policy.buffers, 1, [&](int64_t buffer, int64_t end) {
      for (; buffer < end; ++buffer) {
        for (int64_t segment = buffer * segments.count / policy.buffers;
             segment < (buffer + 1) * segments.count / policy.buffers; ++segment) {
          backward_segment(b, segment, buffer, buffer);
          store_gradients(b, segment, buffer, 0, p.cols);
        }
      }
    });
  } else {
    parallel_for(segments.count, segment_grain(segments, p.cols), [&](int64_t first, int64_t end) {
      for (int64_t segment = first; segment < end; ++segment) {
        // Another core may have read these partial sums in the last call, so that stores would wait for its cache.
        if (ParameterGradients(p).any()) prefetch_row_for_write(b.sums(segment), b.pitch);
        backward_segment(b, segment, segment, first);
      }
    });
  }
  if (!segments.are_gradients) add_partials<X, W>(p, b.partials, segments.count);
}

// A thread's part of the backward pass of a gated norm: that of the plain norm for batches of rows, some of whose
// arrays are scratch rows. An array without scratch rows is read or written in place.
template <class Acc>
class GatedTask {
 public:
  GatedTask(const BackwardParams& p, const GatedLoops<Coefficients<Acc>>& loops, const GatedPolicy& gated_policy,
            const BackwardPolicy& policy, Acc* partials, Acc* scratch)
      : p_(p), loops_(loops), norm_(p), b_(norm_, policy, partials) {
    const bool converts = p.dtype != p.param_dtype;
    const auto rows = [&](int64_t array) {
      return View{scratch + array * gated_policy.array, 0, gated_policy.pitch, 1};
    };
    if (p.gate_first || converts) scratch_.x = rows(0);
    if (!p.gate_first || converts) scratch_.dy = rows(1);
    if (p.grad_gate.data) scratch_.gate_factor = rows(2);
    if (p.gate_first && p.grad_input.data) scratch_.input_factor = rows(3);
    // The gradients loop has read a pack of x and dy when it overwrites that pack.
    if (p.gate_first && (p.grad_input.data || p.grad_gate.data)) scratch_.dx = scratch_.x;
    if (!p.gate_first && p.grad_input.data && converts) scratch_.dx = scratch_.dy;
    norm_.grad_input = scratch_.dx.data ? scratch_.dx : p.grad_input;
  }

  void handle_segment(int64_t segment, int64_t buffer, int64_t second_buffer) {
    SegmentSums<B> sums(b_, buffer, second_buffer, 0, p_.cols);
    for_rows_of_segment(b_, segment, b_.policy.batch, [&](int64_t sample, int64_t r, int64_t count) {
      Acc values[kCoefficients * kMaxBatchRows];
      const Coefficients<Acc> c = {values, kMaxBatchRows};
      const GatedBatch batch = set_rows(sample, r);
      loops_.load(p_, sample, r, count, batch);
      sums.add(0, 0, count, c, compute_coefficients(b_, 0, 0, count, c));
      if (p_.grad_input.data || p_.grad_gate.data) loops_.store(p_, sample, r, count, batch, c);
    });
    sums.end();
  }
  void store_gradients(int64_t segment, int64_t buffer) {
    CPU_CAPABILITY::store_gradients(b_, segment, buffer, 0, p_.cols);
  }

 private:
  using B = Backward<Acc, Acc, Acc>;

  // Makes the rows from r of a sample on those of sample 0 of the plain norm.
  GatedBatch set_rows(int64_t sample, int64_t r) {
    GatedBatch batch = scratch_;
    if (!batch.x.data) batch.x = rows_from<Acc>(p_.input, sample, r);
    if (!batch.dy.data) batch.dy = rows_from<Acc>(p_.grad_output, sample, r);
    if (!batch.dx.data) batch.dx = rows_from<Acc>(p_.grad_input, sample, r);
    norm_.input = batch.x;
    norm_.grad_output = batch.dy;
    norm_.grad_input = batch.dx;
    norm_.weight = rows_from<Acc>(p_.weight, sample, 0);
    norm_.bias = rows_from<Acc>(p_.bias, sample, 0);
    norm_.mean = rows_from<Acc>(p_.mean, sample, r);
    norm_.rstd = rows_from<Acc>(p_.rstd, sample, r);
    return batch;
  }

  const BackwardParams& p_;
  const GatedLoops<Coefficients<Acc>>& loops_;
  BackwardParams norm_;
  const B b_;
  GatedBatch scratch_;
};

template <class Acc>
void gated_backward(const BackwardParams& p, const GatedLoops<Coefficients<Acc>>& loops) {
  // The plain norm gets batches of rows in the caches, where one row is as good as all and prefetches gain nothing.
  BackwardPolicy norm_policy(p, ArraySize(p, sizeof(Acc), /*rows=*/1));
  norm_policy.prefetched = 0;
  const Segments& segments = norm_policy.segments;
  const GatedPolicy policy(p, segments.count, norm_policy.batch, kGatedArrays);
  const int64_t buffers = norm_policy.buffers + norm_policy.second_buffers;
  const int64_t sums = ParameterGradients(p).count * buffers * padded_cols(p);
  Acc* const partials =
      static_cast<Acc*>(p.allocator->allocate((sums + policy.scratch) * static_cast<int64_t>(sizeof(Acc))));
  parallel_for(policy.tasks, 1, [&](int64_t task, int64_t end) {
    GatedTask<Acc> rows(p, loops, policy, norm_policy, partials, partials + sums + task * policy.task_scratch);
    for (int64_t segment = task * segments.count / policy.tasks; segment < end * segments.count / policy.tasks;
         ++segment) {
      rows.handle_segment(segment, segments.are_gradients ? task : segment, task);
      if (segments.are_gradients) rows.store_gradients(segment, task);
    }
  });
  if (!segments.are_gradients) add_partials<Acc, Acc>(p, partials, segments.count);
}

}  // namespace

void backward(const BackwardParams& p) {
  if (p.channels_first) return channels_first_backward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using T = typename decltype(types)::T;
    using X = typename decltype(types)::X;
    using W = typename decltype(types)::W;
    using Acc = AccOf<X>;
    if (p.activation != Activation::kNone) {
      return gated_backward<Acc>(p, choose_gated_loops<T, Coefficients<Acc>>(p));
    }
    const BackwardPolicy policy(p, ArraySize(p, sizeof(X)));
    // The partial sums and, if the threads share the columns, the coefficients of all rows.
    const int64_t sums = ParameterGradients(p).count * (policy.buffers + policy.second_buffers);
    const int64_t coefficients = policy.shares_columns ? kCoefficients * p.samples * p.rows : 0;
    const int64_t elements = sums * padded_cols(p) + coefficients;
    alignas(kVectorBytes) Acc stack[2 * 3 * kMaxStackCols];  // two buffers
    void* const workspace =
        policy.uses_stack ? stack : p.allocator->allocate(elements * static_cast<int64_t>(sizeof(Acc)));
    backward(Backward<T, X, W>(p, policy, static_cast<Acc*>(workspace)));
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
