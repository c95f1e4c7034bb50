// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [samples, rows, cols] on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over rows      dbias = sum of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm. The gradient of forward's sum (grad_sum) is added to dx.
//
// A gated norm with gate z has y = n * f(z), where n = xhat * weight + bias. Then dn = dy * f(z) takes the place of dy
// above, and dz = dy * n * f'(z). With gate_first, u = x * f(z) is normalized: du is computed as dx above, and then
// dx = du * f(z) and dz = du * x * f'(z).
//
//   fetch(): global memory -> stage -> sum_row() -> [exchange] -> store_gradients(): dx, column sums -> add_partials
//
// x, dy, dx, dweight and dbias are input, grad_output, grad_input, grad_weight and grad_bias of BackwardParams. All
// rows are staged in shared memory. RowDivision divides a row among lanes, warps and blocks, and a thread owns 16
// columns (thread_columns.cuh), whose weights and sums of dweight and dbias it keeps in registers. Blocks are
// persistent: a block takes the rows of a segment (GradientPlan) in turn, which asynchronous copies bring to shared
// memory, and reads each row twice from there. The warps of a block exchange their sums once per row, while they work
// on the next row. The workspace has the partial sums of dweight of all segments, the partial sums of dbias, and then
// the results of BlockExchange. A second kernel, add_partials, adds the partial sums of the segments in order, without
// atomic operations. If there are few rows, one block or one cluster adds up the gradients itself. Backward moves 3 *
// samples * rows * cols * sizeof(T) bytes of x, dy and dx, and 5 * samples * rows * cols * sizeof(T) for a gated norm.
//
// As in cpu/backward.cpp, the mean of xhat, which is the rounding error of the saved mean, is subtracted from xhat.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include "../dtypes.h"
#include "launch_plan.h"
#include "vec.cuh"

namespace layernorm::cuda {

template <class T, class X>
void launch_backward(const BackwardParams& p);  // in backward_kernel.cuh; compiled for T in backward_<T>.cu

void backward(const BackwardParams& p) {
  if (p.grad_input_scale.data || p.grad_scaled_input.data) return backward_with_input_scale(p);
  if (p.channels_first) return channels_first_backward(p);
  dispatch_dtypes<Elements>(
      p, [&](auto types) { launch_backward<typename decltype(types)::T, typename decltype(types)::X>(p); });
}

}  // namespace layernorm::cuda
