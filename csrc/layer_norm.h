// The interface between the host code (ops.cpp) and the kernels (cpu/, cuda/). It has no torch types.
//
//   mean[r] = sum_j x[r, j] / cols          var[r] = sum_j (x[r, j] - mean[r])^2 / cols
//   rstd[r] = 1 / sqrt(var[r] + eps)        xhat   = (x - mean) * rstd        y = xhat * weight + bias
//
// RMSNorm has mean[r] = 0, so rstd[r] = 1 / sqrt(sum_j x[r, j]^2 / cols + eps). With a residual, x is input + residual,
// rounded to their dtype. A zero-centered weight multiplies by weight + 1.
//
// Sources: Ba, Kiros and Hinton, Layer Normalization, 2016, arXiv:1607.06450. Zhang and Sennrich, Root Mean Square
// Layer Normalization, 2019, arXiv:1910.07467.
#pragma once

#include <cstdint>

namespace layernorm {

enum class Dtype { kFloat64, kFloat32, kFloat16, kBFloat16 };

// Backward from the output divides by the weight. A smaller weight gives NaN, because a float16 output has no digit of
// the quotient left.
constexpr double kSmallestDivisor = 0x1p-16;

// Acc, the type of statistics and of sums over a row, is double for kFloat64 and else float.
struct ForwardParams {
  int64_t rows;          // >= 1
  int64_t cols;          // >= 1
  const void* input;     // [rows, cols] of dtype
  int64_t input_stride;  // elements from row to row; any value, the columns are contiguous
  const void* residual;  // [rows, cols] of dtype; null: none
  int64_t residual_stride;
  void* sum;           // [rows, cols] of dtype, contiguous: input + residual; may be residual itself; null: no residual
  const void* weight;  // [cols] of param_dtype; null: ones
  const void* bias;    // [cols] of param_dtype; null: zeros
  double eps;
  void* output;               // [rows, cols] of dtype, contiguous
  void* mean;                 // [rows] of Acc; null for RMSNorm
  void* rstd;                 // [rows] of Acc
  void* workspace;            // cuda::forward_workspace() bytes, aligned like any tensor; unused on a CPU
  bool rms;                   // RMSNorm
  bool zero_centered_weight;  // the weight is `weight` + 1; false if there is none
  Dtype dtype;
  Dtype param_dtype;
  void* stream;  // a cudaStream_t; unused on a CPU
};

struct BackwardParams {
  int64_t rows;
  int64_t cols;
  const void* grad_output;  // [rows, cols] of dtype
  int64_t grad_output_stride;
  const void* input;  // [rows, cols] of dtype
  int64_t input_stride;
  const void* grad_sum;  // [rows, cols] of dtype, added to grad_input; null: zeros
  int64_t grad_sum_stride;
  const void* mean;           // [rows] of Acc; null for RMSNorm, and if from_output
  const void* rstd;           // [rows] of Acc
  const void* weight;         // [cols] of param_dtype; null: ones
  const void* bias;           // [cols] of param_dtype; null: zeros; used only if from_output
  void* grad_input;           // [rows, cols] of dtype, contiguous; null: not wanted
  void* grad_weight;          // [cols] of param_dtype; null: not wanted
  void* grad_bias;            // [cols] of param_dtype; null: not wanted
  void* workspace;            // backward_workspace() bytes, aligned like any tensor
  bool rms;                   // RMSNorm
  bool zero_centered_weight;  // the weight is `weight` + 1; false if there is none
  bool from_output;           // input is forward's output: xhat = (input - bias) / weight, see kSmallestDivisor
  Dtype dtype;
  Dtype param_dtype;
  void* stream;  // a cudaStream_t; unused on a CPU
};

// The same for images, which are normalized over their channels: a row is a pixel, and its columns are channels.
struct ChannelsFirstForwardParams {
  int64_t images, channels, pixels;                  // each >= 1
  const void* input;                                 // [images, channels, pixels] of dtype
  int64_t input_image_stride, input_channel_stride;  // elements; any values, the pixels are contiguous
  const void* weight;                                // [channels] of param_dtype; null: ones
  const void* bias;                                  // [channels] of param_dtype; null: zeros
  double eps;
  void* output;  // [images, channels, pixels] of dtype, contiguous
  void* mean;    // [images, pixels] of Acc
  void* rstd;    // [images, pixels] of Acc
  Dtype dtype;
  Dtype param_dtype;
  void* stream;  // a cudaStream_t; unused on a CPU
};

struct ChannelsFirstBackwardParams {
  int64_t images, channels, pixels;
  const void* grad_output;  // [images, channels, pixels] of dtype
  int64_t grad_output_image_stride, grad_output_channel_stride;
  const void* input;  // [images, channels, pixels] of dtype
  int64_t input_image_stride, input_channel_stride;
  const void* mean;    // [images, pixels] of Acc
  const void* rstd;    // [images, pixels] of Acc
  const void* weight;  // [channels] of param_dtype; null: ones
  void* grad_input;    // [images, channels, pixels] of dtype, contiguous; null: not wanted
  void* grad_weight;   // [channels] of param_dtype; null: not wanted
  void* grad_bias;     // [channels] of param_dtype; null: not wanted
  void* workspace;     // channels_first_backward_workspace() bytes, aligned like any tensor
  Dtype dtype;
  Dtype param_dtype;
  void* stream;  // a cudaStream_t; unused on a CPU
};

namespace cpu {
void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
// Bytes of workspace for partial sums; all other fields of the parameters must be set.
int64_t backward_workspace(const BackwardParams& params);
void channels_first_forward(const ChannelsFirstForwardParams& params);
void channels_first_backward(const ChannelsFirstBackwardParams& params);
int64_t channels_first_backward_workspace(const ChannelsFirstBackwardParams& params);
}  // namespace cpu

namespace cuda {  // on the current device
void forward(const ForwardParams& params);
int64_t forward_workspace(const ForwardParams& params);
void backward(const BackwardParams& params);
int64_t backward_workspace(const BackwardParams& params);
void channels_first_forward(const ChannelsFirstForwardParams& params);
void channels_first_backward(const ChannelsFirstBackwardParams& params);
int64_t channels_first_backward_workspace(const ChannelsFirstBackwardParams& params);
}  // namespace cuda

}  // namespace layernorm
