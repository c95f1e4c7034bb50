// The interface between dispatch.cpp, which is compiled once and uses torch, and the kernels (forward.cpp,
// backward.cpp, channels_first.cpp), which are compiled once per instruction set and include no torch header.
#pragma once

#include <cstdint>

#include "../layer_norm.h"

namespace layernorm::cpu {

#define LAYERNORM_DECLARE_KERNELS(capability)                 \
  namespace capability {                                      \
  void forward(const ForwardParams& params);                  \
  void backward(const BackwardParams& params);                \
  void channels_first_forward(const ForwardParams& params);   \
  void channels_first_backward(const BackwardParams& params); \
  }
LAYERNORM_DECLARE_KERNELS(DEFAULT)
#if defined(LAYERNORM_X86)
LAYERNORM_DECLARE_KERNELS(AVX2)
LAYERNORM_DECLARE_KERNELS(AVX512)
#endif
#undef LAYERNORM_DECLARE_KERNELS

// The instruction set in use: "DEFAULT", "AVX2" or "AVX512".
const char* capability();

int num_threads();

// Calls task(context, begin, end) on torch's threads, for ranges of at least `grain` that cover [0, n).
using Task = void (*)(const void* context, int64_t begin, int64_t end);
void run_on_threads(int64_t n, int64_t grain, Task task, const void* context);

// Work for one thread, in elements of the input, that is worth waking it for (about 10 us).
constexpr int64_t kGrain = 32768;

constexpr int64_t kMaxPackSize = 32;
constexpr int64_t kCoefficients = 6;
constexpr int64_t kStackCols = 1024;
constexpr int64_t kTile = 1024;  // columns of one task if the threads share the columns
constexpr int64_t kMinBlockPixels = 64, kMaxBlockPixels = 256;

namespace {

template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  const Task call = [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const F*>(context))(begin, end);
  };
  run_on_threads(n, grain, call, &f);
}

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool wants_parameters(const BackwardParams& p) { return p.grad_weight.data || p.grad_bias.data; }
inline bool has_gradient_per_group(const BackwardParams& p) {
  return p.grad_weight.group_stride || p.grad_bias.group_stride;
}

// The most rows whose weight gradients are added one by one. Equal floats round in the same direction each time: the
// sum of 256 is off by up to 3.8e-6, and the sum of four sums of 64 by up to 1.01e-6.
constexpr int64_t kSumRows = 64;

// Weight gradients are summed over up to kSumRows rows of a segment in order, then over these sums in order, then over
// the segments in order and in double, so the result does not depend on which thread takes which segment. A parameter
// that all groups share has segments of consecutive rows of [groups * rows]; else each group has its own segments.
//
// A group has up to 64 segments, enough for many threads, or more of 256 rows, for the precision of fp32 sums. It has
// fewer if they would have less than 32 rows or kGrain elements, because another core reads half of the partial sums:
// 3136 x 192 bf16 take 0.92 of the time that 64 segments take, and 0.8 if the two cores share no cache (AMD EPYC).
//
// If each group has one segment, its sums are the gradients. The thread that has them stores them, and reuses its
// buffer.
struct Segments {
  explicit Segments(const BackwardParams& p)
      : groups(has_gradient_per_group(p) ? p.groups : 1),
        group_rows(p.groups * p.rows / groups),
        rows(ceil_div(group_rows, segments_for(group_rows, p.cols))),
        per_group(ceil_div(group_rows, rows)),
        count(groups * per_group),
        share_columns(count < num_threads() && p.cols > kTile),
        are_gradients(per_group == 1 && (groups == 1 || (is_grouped(p.grad_weight) && is_grouped(p.grad_bias)))),
        buffers(are_gradients && !share_columns
                    ? min(min(count, num_threads()), ceil_div(count * rows * p.cols, kGrain))
                    : count),
        second_buffers(rows > kSumRows && wants_parameters(p) ? buffers : 0) {}

  int64_t begin(int64_t segment) const { return segment / per_group * group_rows + segment % per_group * rows; }
  int64_t end(int64_t segment) const { return min(begin(segment) + rows, (segment / per_group + 1) * group_rows); }

  int64_t groups, group_rows, rows, per_group, count;
  bool share_columns;  // whether there are too few segments for the threads
  bool are_gradients;
  int64_t buffers;         // of the workspace: one for each segment, or one for each thread
  int64_t second_buffers;  // for all sums of kSumRows rows but the first of a segment; a thread uses one of them

 private:
  static int64_t segments_for(int64_t rows, int64_t cols) {
    const int64_t useful = min(min(64, ceil_div(rows, 32)), (rows * cols + kGrain / 2) / kGrain);
    const int64_t n = max(useful / 2 * 2, ceil_div(rows, 256));
    return n > 1 ? n + n % 2 : n;  // even, so that two threads share the segments well
  }
  static bool is_grouped(const View& gradient) { return !gradient.data || gradient.group_stride; }
};

// Images are divided into blocks of adjacent pixels. All channels of a block fit into the second-level cache, and each
// channel has at least a few cache lines of pixels. Blocks of small images share a segment, so that partial sums stay
// small beside the images, unless each image has its own parameters.
struct Blocks {
  Blocks(const Params& p, int64_t element_size, bool own_parameters) {
    const int64_t fitting = (int64_t{1} << 18) / (p.cols * element_size) / kMinBlockPixels * kMinBlockPixels;
    pixels = max(kMinBlockPixels, min(fitting, kMaxBlockPixels));
    per_image = ceil_div(p.rows, pixels);
    count = p.groups * per_image;
    per_segment = p.rows < 32 && !own_parameters ? (31 + p.rows) / p.rows : 1;
    segments = ceil_div(count, per_segment);
  }
  int64_t pixels, per_image, count, per_segment, segments;
};

inline int64_t padded_cols(const Params& p) { return ceil_div(p.cols, kMaxPackSize) * kMaxPackSize; }

}  // namespace
}  // namespace layernorm::cpu
