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
// Rows are divided into segments, which the threads take:
//
//   backward_of_rows                  for each segment:
//    -> backward_segment              for each batch of its rows (for_batches_of_segment):
//      -> compute_coefficients        the sums loop: the sums of each row (backward_loops.h)
//      -> SegmentSums::add            the gradients loop: stores dx, and adds the rows to the segment's partial sums of
//                                     dweight and dbias, which are in the workspace
//    -> store_parameter_gradients     adds the partial sums of all segments (partial_sums.h); or, if the sums of a
//                                     segment are a sample's gradients, store_gradients() stores them at once
//
// x and dy come from memory once, so 3 * rows * cols * sizeof(T) bytes are moved. If there are fewer segments of long
// rows than threads, backward_sharing_columns() computes the sums of all rows first, and then the threads share the
// columns. gated_backward() runs the same steps on batches of a gated norm. The order of every sum stays the same.
//
// Precision: the saved mean is rounded, so xhat is off by a constant within a row. This constant is the average of xhat
// and is subtracted from it.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include "../dtypes.h"
#include "backward_loops.h"
#include "gated.h"
#include "partial_sums.h"

namespace layernorm::cpu::CPU_CAPABILITY {
namespace {

// Prefetches a row that will be stored.
template <class T>
void prefetch_row_for_write(T* row, int64_t cols) {
  for (int64_t j = 0; j < cols; j += kCacheLineBytes / sizeof(T)) {
    __builtin_prefetch(row + j, 1);
    asm volatile("");  // GCC removes a loop that only prefetches
  }
}

// The partial sums of a segment, for some columns: the total of its subtotals, which have up to kSubtotalRows rows
// each. The first subtotal is computed in a buffer. Each later one is computed in the second buffer and then added to
// the first; a segment of one subtotal has no second buffer.
template <class Call>
class SegmentSums {
 public:
  using Acc = typename Call::Acc;

  SegmentSums(const Call& call, int64_t buffer, int64_t second_buffer, Columns columns)
      : call_(call),
        total_(call, buffer, columns),
        second_(call, call.policy.second_buffers ? call.policy.buffers + second_buffer : buffer, columns) {}

  // Adds rows to the current subtotal, and stores their dx.
  void add(const Rows& rows, const Coefficients<Acc>& c, bool any_rescaled) {
    ColumnSums<Acc>& subtotal = is_first_ ? total_ : second_;
    compute_gradients_(call_, subtotal, rows, c, any_rescaled);
    if (call_.has_input_scale_gradients) input_scale_loop(call_, subtotal, rows);
    subtotal.are_unset = false;
  }

  // Ends the current subtotal, to which at least one row has been added. Later rows belong to the next subtotal.
  void end_subtotal() {
    if (!is_first_) {
      add_second(total_.dweight, second_.dweight);
      add_second(total_.dbias, second_.dbias);
      add_second(total_.dinput_scale, second_.dinput_scale);
    }
    is_first_ = false;
    second_.are_unset = true;
  }

  // Stores the total of all subtotals as the gradients of a sample.
  void store_gradients(int64_t sample) const {
    const auto store = [&](const Acc* sums, const View& gradient) {
      if (!gradient.data) return;
      store_totals(PartialSums<typename Call::X>{sums, call_.pitch, 1}, total_.columns,
                   gradient.row<typename Call::W>(sample, 0));
    };
    store(total_.dweight, call_.p.grad_weight);
    store(total_.dbias, call_.p.grad_bias);
    store(total_.dinput_scale, call_.p.grad_input_scale);
  }

 private:
  void add_second(Acc* total, const Acc* second) const {
    if (!total) return;
    for_each_pack<Acc, 1>(total_.columns, [&](int, int64_t j, auto) {
      write(total + j, read(total + j, AllLanes{}) + read(second + j, AllLanes{}), AllLanes{});
    });
  }

  const Call& call_;
  const ComputeGradients<Call> compute_gradients_ = choose_gradients(call_);
  ColumnSums<Acc> total_, second_;
  bool is_first_ = true;  // whether the next rows belong to the first subtotal of the segment
};

// Calls f(Rows) for the rows of a segment, at most a batch of rows of one sample at a time. f adds them to `sums`;
// end_subtotal() follows at each BackwardPolicy::subtotal_end().
template <class Call, class F>
void for_batches_of_segment(const Call& call, int64_t segment, SegmentSums<Call>& sums, const F& f) {
  const int64_t batch = call.policy.batch_rows, end = call.segments.end(segment);
  for (int64_t row = call.segments.begin(segment); row < end;) {
    const int64_t subtotal_end = call.policy.subtotal_end(row, end);
    for_each_sample(call.p.rows, row, subtotal_end, [&](const Rows& rows) {
      for (int64_t k = 0; k < rows.count; k += batch) f(rows.part(k, min(batch, rows.count - k)));
    });
    sums.end_subtotal();
    row = subtotal_end;
  }
  if (call.policy.streams) streaming_fence();
}

// Handles all rows of a segment. Returns its partial sums, which are in a buffer of the workspace.
template <class Call>
SegmentSums<Call> backward_segment(const Call& call, int64_t segment, int64_t buffer, int64_t second_buffer) {
  SegmentSums<Call> sums(call, buffer, second_buffer, {0, call.p.cols});
  for_batches_of_segment(call, segment, sums, [&](const Rows& rows) {
    typename Call::Acc values[kCoefficients * kMaxBackwardBatchRows];
    const Coefficients<typename Call::Acc> c = {values, kMaxBackwardBatchRows};
    for (int64_t k = 0; call.policy.prefetches_dx && k < rows.count; ++k) {
      prefetch_row_for_write(row_of<typename Call::X>(call.p.grad_input, rows[k]), call.p.cols);
    }
    sums.add(rows, c, compute_coefficients(call, rows, c));
  });
  return sums;
}

// Handles few long rows: computes the coefficients of all rows first, then the threads share the columns.
template <class Call>
void backward_sharing_columns(const Call& call) {
  const BackwardParams& p = call.p;
  const int64_t all_rows = p.samples * p.rows;
  const auto coefficients_of = [&](const Rows& rows) {
    return call.coefficients.from(rows.sample * p.rows + rows.first);
  };
  if (call.policy.shares_rows) {
    for (int64_t r = 0; r < all_rows; ++r) {
      compute_coefficients_together<AllThreads, 1, kWidePacks>(call, RowIndex{r / p.rows, r % p.rows},
                                                               call.coefficients.from(r));
    }
  } else {
    parallel_for(all_rows, grain(p.cols), [&](int64_t begin, int64_t end) {
      for_each_sample(p.rows, begin, end,
                      [&](const Rows& rows) { compute_coefficients(call, rows, coefficients_of(rows)); });
    });
  }
  const int64_t tiles = ceil_div(p.cols, kTileCols);
  parallel_for(call.segments.count * tiles, grain(call.segments.rows * kTileCols), [&](int64_t task, int64_t end) {
    for (; task < end; ++task) {
      const int64_t segment = task / tiles, begin = task % tiles * kTileCols;
      SegmentSums<Call> sums(call, segment, segment, {begin, min(kTileCols, p.cols - begin)});
      for_batches_of_segment(call, segment, sums, [&](const Rows& rows) {
        const auto c = coefficients_of(rows);
        bool any_rescaled = false;
        for (int64_t k = 0; k < rows.count; ++k) any_rescaled |= has_row_scale(call, c, k);
        sums.add(rows, c, any_rescaled);
      });
      if (call.segments.sums_are_gradients) sums.store_gradients(/*sample=*/segment);
    }
  });
}

// Handles all rows. The threads share the columns, or take segments, whose sums are stored at once if they are the
// gradients of a sample, and otherwise added at the end.
template <class Call>
void backward_of_rows(const Call& call) {
  const BackwardParams& p = call.p;
  const BackwardPolicy& policy = call.policy;
  const Segments& segments = call.segments;
  if (policy.shares_columns) {
    backward_sharing_columns(call);
  } else if (segments.sums_are_gradients) {
    parallel_for(policy.buffers, 1, [&](int64_t buffer, int64_t end) {
      for (; buffer < end; ++buffer) {
        for (int64_t segment = buffer * segments.count / policy.buffers;
             segment < (buffer + 1) * segments.count / policy.buffers; ++segment) {
          backward_segment(call, segment, buffer, buffer).store_gradients(/*sample=*/segment);
        }
      }
    });
  } else {
    parallel_for(segments.count, segment_grain(segments, p.cols), [&](int64_t first, int64_t end) {
      for (int64_t segment = first; segment < end; ++segment) {
        // Another core may have read these partial sums in the last call, so that stores would wait for its cache.
        if (ParameterGradients(p).any()) prefetch_row_for_write(call.buffer(segment), call.pitch);
        backward_segment(call, segment, segment, /*second_buffer=*/first);  // one for each thread
      }
    });
  }
  if (!segments.sums_are_gradients) {
    store_parameter_gradients<typename Call::X, typename Call::W>(p, call.partials, segments.count);
  }
}

// A thread's part of the backward pass of a gated norm: the plain norm's backward pass for one batch of rows after the
// other. Some arrays of a batch are scratch rows; the others are read or written in place.
template <class Acc>
class GatedTask {
  using PlainCall = BackwardCall<Acc, Acc, Acc>;

 public:
  GatedTask(const BackwardParams& p, const GatedLoops<Coefficients<Acc>>& loops, const GatedPolicy& gated_policy,
            const BackwardPolicy& policy, Acc* partials, Acc* scratch)
      : p_(p), loops_(loops), norm_(p), call_(norm_, policy, partials) {
    // A batch has scratch rows for the arrays that load_gated_batch() computes, or converts to Acc.
    const bool converts = p.dtype != p.param_dtype;
    const auto rows = [&](int64_t array) {
      return View{scratch + array * gated_policy.array_elements, 0, gated_policy.pitch, 1};
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

  // Handles all rows of a segment, as backward_segment() does.
  SegmentSums<PlainCall> backward_segment(int64_t segment, int64_t buffer, int64_t second_buffer) {
    SegmentSums<PlainCall> sums(call_, buffer, second_buffer, {0, p_.cols});
    for_batches_of_segment(call_, segment, sums, [&](const Rows& rows) {
      Acc values[kCoefficients * kMaxBackwardBatchRows];
      const Coefficients<Acc> c = {values, kMaxBackwardBatchRows};
      const GatedBatch batch = set_rows(rows);
      const Rows norm_rows = {0, 0, rows.count};
      loops_.load(p_, rows, batch);
      sums.add(norm_rows, c, compute_coefficients(call_, norm_rows, c));
      if (p_.grad_input.data || p_.grad_gate.data) loops_.store(p_, rows, batch, c);
    });
    return sums;
  }

 private:
  // Makes `rows` the first rows of sample 0 of the plain norm.
  GatedBatch set_rows(const Rows& rows) {
    const RowIndex parameter = {rows.sample, 0};
    GatedBatch batch = scratch_;
    if (!batch.x.data) batch.x = rows_from<Acc>(p_.input, rows[0]);
    if (!batch.dy.data) batch.dy = rows_from<Acc>(p_.grad_output, rows[0]);
    if (!batch.dx.data) batch.dx = rows_from<Acc>(p_.grad_input, rows[0]);
    norm_.input = batch.x;
    norm_.grad_output = batch.dy;
    norm_.grad_input = batch.dx;
    norm_.weight = rows_from<Acc>(p_.weight, parameter);
    norm_.bias = rows_from<Acc>(p_.bias, parameter);
    norm_.mean = rows_from<Acc>(p_.mean, rows[0]);
    norm_.rstd = rows_from<Acc>(p_.rstd, rows[0]);
    return batch;
  }

  const BackwardParams& p_;
  const GatedLoops<Coefficients<Acc>>& loops_;
  BackwardParams norm_;
  const PlainCall call_;
  GatedBatch scratch_;
};

template <class Acc>
void gated_backward(const BackwardParams& p, const GatedLoops<Coefficients<Acc>>& loops) {
  // The plain norm handles batches that are in the caches, where prefetches and streaming stores gain nothing. So its
  // policy is that of an array of one row, which is in the caches, too.
  BackwardPolicy norm_policy(p, ArraySize(p, sizeof(Acc), /*rows=*/1));
  norm_policy.rows_ahead = 0;
  norm_policy.streams = false;
  const Segments& segments = norm_policy.segments;
  const GatedPolicy policy(p, segments.count, norm_policy.batch_rows, kGatedArrays);
  const int64_t buffers = norm_policy.buffers + norm_policy.second_buffers;
  const int64_t sum_elements = ParameterGradients(p).count * buffers * padded_cols(p);
  Acc* const partials =
      static_cast<Acc*>(p.allocator->allocate((sum_elements + policy.elements) * static_cast<int64_t>(sizeof(Acc))));
  parallel_for(policy.tasks, 1, [&](int64_t task, int64_t end) {
    GatedTask<Acc> norm(p, loops, policy, norm_policy, partials, partials + sum_elements + task * policy.task_elements);
    for (int64_t segment = task * segments.count / policy.tasks; segment < end * segments.count / policy.tasks;
         ++segment) {
      const auto partial_sums = norm.backward_segment(segment, segments.sums_are_gradients ? task : segment, task);
      if (segments.sums_are_gradients) partial_sums.store_gradients(/*sample=*/segment);
    }
  });
  if (!segments.sums_are_gradients) store_parameter_gradients<Acc, Acc>(p, partials, segments.count);
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
    // The workspace has the partial sums and, if the threads share the columns, the coefficients of all rows.
    const int64_t arrays = ParameterGradients(p).count * (policy.buffers + policy.second_buffers);
    const int64_t coefficients = policy.shares_columns ? kCoefficients * p.samples * p.rows : 0;
    const int64_t elements = arrays * padded_cols(p) + coefficients;
    alignas(kVectorBytes) Acc stack[2 * 3 * kMaxStackCols];  // two buffers, each for the gradients of 3 parameters
    void* const workspace =
        policy.uses_stack ? stack : p.allocator->allocate(elements * static_cast<int64_t>(sizeof(Acc)));
    backward_of_rows(BackwardCall<T, X, W>(p, policy, static_cast<Acc*>(workspace)));
  });
}

}  // namespace layernorm::cpu::CPU_CAPABILITY
