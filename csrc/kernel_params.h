// The interface between the host code (host.cpp) and the kernels (cpu/, cuda/). It has no torch types.
//
//   mean[r] = sum_j x[r, j] / cols          var[r] = sum_j (x[r, j] - mean[r])^2 / cols
//   rstd[r] = 1 / sqrt(var[r] + eps)        xhat   = (x - mean) * rstd        y = xhat * weight + bias
//
// where r is a row, j a column, and x [rows, cols] the input. RMSNorm has mean[r] = 0, so that
// rstd[r] = 1 / sqrt(sum_j x[r, j]^2 / cols + eps). With a residual, x is the sum, input + residual or
// input_scale * input + residual, rounded to the residual's dtype. With zero_centered_weight, weight + 1 replaces
// weight.
//
// A gated norm has a gate z [rows, cols] and an activation f. The output is y = (xhat * weight + bias) * f(z). With
// gate_first, it is y = xhat * weight + bias, and x is input * f(z), rounded to the type of sums (Acc, see Params).
//
// Sources: Ba, Kiros and Hinton, Layer Normalization, 2016, arXiv:1607.06450. Zhang and Sennrich, Root Mean Square
// Layer Normalization, 2019, arXiv:1910.07467.
#pragma once

#include <cstdint>

namespace layernorm {

enum class Dtype { kFloat64, kFloat32, kFloat16, kBFloat16 };

// The activation f(z) of a gated norm: kSilu is z * sigmoid(z), and kSigmoid is 1 / (1 + exp(-z)).
enum class Activation { kNone, kSilu, kSigmoid };

// The smallest absolute value of a weight by which backward divides to recover xhat from the output (memory_efficient).
// A smaller weight gives NaN, because a float16 output would have no correct digit of xhat.
constexpr double kSmallestDivisor = 0x1p-16;

// A tensor viewed as [samples, rows, cols]: the rows of a sample share the parameters, that is, the weight, the bias
// and the input_scale. Strides are in elements; data is null for an absent tensor.
struct View {
  void* data = nullptr;
  int64_t sample_stride = 0, row_stride = 0, col_stride = 0;

  // The first element of a row; null for an absent tensor.
  template <class T>
  T* row(int64_t sample, int64_t row) const {
    return data ? static_cast<T*>(data) + sample * sample_stride + row * row_stride : nullptr;
  }
};

// Allocates a workspace for the kernels of one call. Its owner keeps the memory until the kernels have finished.
class Allocator {
 public:
  // Returns uninitialized memory with the alignment of a new tensor. Each function of cpu:: and cuda:: below calls this
  // at most once.
  virtual void* allocate(int64_t bytes) = 0;

 protected:
  ~Allocator() = default;
};

// The fields that forward and backward share. Acc, the type of statistics and of sums, is double for kFloat64, else
// float.
//
// All arrays of [samples, rows, cols] have col_stride 1 or, with channels_first (images, whose channels are the columns
// and whose pixels are the rows), row_stride 1. The weight, bias, input_scale and their gradients are [samples, 1,
// cols] with col_stride 1; a sample_stride of 0 says that all samples share them.
//
// A gated norm has a weight and a bias of Acc, no residual and no memory_efficient. Forward has an input_scale only
// with a residual. With channels_first, there is no gate, no residual and no grad_sum.
struct Params {
  int64_t samples, rows, cols;  // each >= 1; `rows` is the number of rows of one sample
  View weight, bias;            // of param_dtype; if absent, ones and zeros
  View input_scale;             // of param_dtype; may be absent
  View gate;                    // of dtype, [samples, rows, cols]; absent if activation is kNone
  View mean, rstd;              // [samples, rows, 1] of Acc; RMSNorm has no mean
  bool channels_first;
  bool rms;
  bool zero_centered_weight;  // false without a weight
  Activation activation;      // of the gate
  bool gate_first;            // false if activation is kNone
  Dtype dtype;                // of output, grad_output and the input of forward
  Dtype sum_dtype;            // of residual and sum; without a residual, the same as dtype
  Dtype param_dtype;          // of weight, bias, input_scale and their gradients
  Allocator* allocator;       // of the workspace
  void* stream;               // a cudaStream_t; unused on a CPU
};

struct ForwardParams : Params {
  View input;     // of dtype
  View residual;  // of sum_dtype; may be absent
  View sum;       // of sum_dtype: x, only with a residual; may be the memory of the residual
  View output;    // of dtype
  double eps;
};

struct BackwardParams : Params {
  View grad_output;  // of dtype
  View input;        // of sum_dtype: the input or, with a residual, the sum of forward; its output if memory_efficient
  View grad_sum;     // of sum_dtype: the upstream gradient of the sum, added to grad_input; may be absent
  View grad_input;   // of sum_dtype: the gradient of the input or sum; like the gradients below, absent if not needed
  View grad_weight, grad_bias;  // of param_dtype
  View grad_gate;               // of dtype
  View scaled_input;            // of dtype: the input that input_scale multiplied; only with grad_input_scale
  View grad_scaled_input;       // of dtype: input_scale * grad_input; only with grad_input
  View grad_input_scale;        // of param_dtype; only with grad_input
  bool memory_efficient;        // xhat = (input - bias) / weight, see kSmallestDivisor
};

namespace cpu {
void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
}  // namespace cpu

namespace cuda {  // on the current device
void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
}  // namespace cuda

}  // namespace layernorm
