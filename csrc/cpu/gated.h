// The activation f of a gated norm, and the loops of its backward pass before and after those of the plain norm, which
// handles rows of Acc.
//
//   gate after the norm: y = n * f(z), where n = xhat * weight + bias is the plain norm of x
//     dn = dy * f(z)     dz = dy * f'(z) * n      dx is that of the plain norm, whose dy is dn
//   gate first: y is the plain norm of u = x * f(z)
//     dx = du * f(z)     dz = du * x * f'(z)      du is the dx of the plain norm
//
// The first loop of backward computes f(z) and f'(z), and stores the factor dy * f'(z) or x * f'(z) of dz. The last
// loop multiplies this factor by n or du, and need not compute f'(z) again.
#pragma once

#include "loops.h"

namespace layernorm::cpu {
namespace {

// s = 1 / (1 + exp(-z)), and 1 - s without cancellation.
template <class Acc>
struct Logistic {
  explicit Logistic(const Pack<Acc>& z) { set(z.a, s.a, complement.a), set(z.b, s.b, complement.b); }

  Pack<Acc> s, complement;

 private:
  static void set(Vec<Acc> z, Vec<Acc>& s, Vec<Acc>& complement) {
    const auto is_negative = z < 0;
    const Vec<Acc> e = exp_of_minus_abs<Acc>(z), one = Acc(1) - Vec<Acc>{}, sum = 1 + e;
    s = (is_negative ? e : one) / sum;
    complement = (is_negative ? one : e) / sum;
  }
};

// f(z). Without the attribute, GCC calls the function for each pack.
template <class Acc>
[[gnu::always_inline]] inline Pack<Acc> activate(const Pack<Acc>& z, Activation activation) {
  const Logistic<Acc> logistic(z);
  return activation == Activation::kSilu ? z * logistic.s : logistic.s;
}

// The value f(z) and the derivative f'(z).
template <class Acc>
struct WithDerivative {
  WithDerivative(const Pack<Acc>& z, Activation activation) {
    const Logistic<Acc> logistic(z);
    value = logistic.s;
    derivative = logistic.s * logistic.complement;
    if (activation == Activation::kSilu) {
      value = z * logistic.s;
      derivative = logistic.s * fma(z, logistic.complement, Acc(1));
    }
  }

  Pack<Acc> value, derivative;
};

// The rows of an array from `first` on, as a view of one sample.
template <class Element>
View rows_from(const View& array, RowIndex first) {
  return {row_of<Element>(array, first), 0, array.row_stride, array.col_stride};
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The arrays of a batch, whose elements are Acc: scratch rows (policy.h), or rows of the call's arrays. Arrays that a
// call does not need are absent.
struct GatedBatch {
  View x, dy, dx;     // of the plain norm; dx may overwrite x or dy
  View input_factor;  // f(z), if the gate is first
  View gate_factor;   // dz / du or dz / n
};
constexpr int64_t kGatedArrays = 4;  // the most arrays of scratch rows in a batch

// The loop before those of the plain norm: multiplies dy or, if the gate is first, x by f(z), and stores the factors
// for the loop after. The other one of x and dy is only converted to Acc, if its elements are not Acc already.
template <class T>
void load_gated_batch(const BackwardParams& p, const Rows& rows, const GatedBatch& batch) {
  using Acc = AccOf<T>;
  constexpr bool kConverts = !std::is_same_v<T, Acc>;
  const Activation activation = p.activation;
  const View &multiplied = p.gate_first ? p.input : p.grad_output, &other = p.gate_first ? p.grad_output : p.input;
  const View &product = p.gate_first ? batch.x : batch.dy, &converted = p.gate_first ? batch.dy : batch.x;
  for (int64_t k = 0; k < rows.count; ++k) {
    const RowIndex row = rows[k];
    const T* const z = row_of<const T>(p.gate, row);
    const T* const from = row_of<const T>(multiplied, row);
    const T* const other_from = row_of<const T>(other, row);
    Acc* const to = product.row<Acc>(0, k);
    Acc* const other_to = converted.row<Acc>(0, k);
    Acc* const input_factor = batch.input_factor.row<Acc>(0, k);
    Acc* const gate_factor = batch.gate_factor.row<Acc>(0, k);
    for_each_pack<Acc, 1>({0, p.cols}, [&](int, int64_t j, auto lanes) {
      const WithDerivative<Acc> f(load<Acc>(z + j, lanes), activation);
      const auto v = load<Acc>(from + j, lanes);
      write(to + j, v * f.value, AllLanes{});
      if (input_factor) write(input_factor + j, f.value, AllLanes{});
      if (gate_factor) write(gate_factor + j, v * f.derivative, AllLanes{});
      if constexpr (kConverts) write(other_to + j, load<Acc>(other_from + j, lanes), AllLanes{});
    });
  }
}

// The loop after those of the plain norm: stores dz, and dx unless the plain norm has written it in place. The top of
// this file defines n and du; c has the coefficients of the rows (backward_loops.h).
template <class T, bool gate_first, class Coefficients>
void store_gated_batch(const BackwardParams& p, const Rows& rows, const GatedBatch& batch, const Coefficients& c) {
  using Acc = AccOf<T>;
  const Acc* const weight = parameter_of<const Acc>(p.weight, rows[0]);
  const Acc* const bias = parameter_of<const Acc>(p.bias, rows[0]);
  const Acc weight_offset = p.zero_centered_weight;
  const bool stores_dx = p.grad_input.data && row_of<T>(p.grad_input, rows[0]) != batch.dx.data;
  for (int64_t k = 0; k < rows.count; ++k) {
    const RowIndex row = rows[k];
    const Acc* const x = batch.x.row<const Acc>(0, k);
    const Acc* const dx = batch.dx.row<const Acc>(0, k);
    const Acc* const input_factor = batch.input_factor.row<const Acc>(0, k);
    const Acc* const gate_factor = batch.gate_factor.row<const Acc>(0, k);
    T* const grad_input = row_of<T>(p.grad_input, row);
    T* const grad_gate = row_of<T>(p.grad_gate, row);
    const Acc row_scale = c.row_scale()[k], scaled_mean = c.scaled_mean()[k], scaled_rstd = c.scaled_rstd()[k],
              minus_mean_xhat = c.minus_mean_xhat()[k];
    for_each_pack<Acc, 1>({0, p.cols}, [&](int, int64_t j, auto lanes) {
      if constexpr (gate_first) {
        const auto du = read(dx + j, AllLanes{});
        if (stores_dx) store<Acc, true>(grad_input + j, du * read(input_factor + j, AllLanes{}), lanes);
        if (grad_gate) store<Acc, true>(grad_gate + j, du * read(gate_factor + j, AllLanes{}), lanes);
      } else {
        if (stores_dx) store<Acc, true>(grad_input + j, read(dx + j, AllLanes{}), lanes);
        if (!grad_gate) return;
        auto n = fma(load<Acc>(x + j, lanes) * row_scale - scaled_mean, scaled_rstd, minus_mean_xhat);
        n = n * load_weight<Acc>(weight, weight_offset, j, lanes);
        if (bias) n = n + load<Acc>(bias + j, lanes);
        store<Acc, true>(grad_gate + j, n * read(gate_factor + j, AllLanes{}), lanes);
      }
    });
  }
}

// The two loops of a call. Only these depend on T; the rest of the gated backward pass is compiled for Acc alone.
template <class Coefficients>
struct GatedLoops {
  void (*load)(const BackwardParams&, const Rows&, const GatedBatch&);
  void (*store)(const BackwardParams&, const Rows&, const GatedBatch&, const Coefficients&);
};
template <class T, class Coefficients>
GatedLoops<Coefficients> choose_gated_loops(const BackwardParams& p) {
  return {load_gated_batch<T>,
          p.gate_first ? store_gated_batch<T, true, Coefficients> : store_gated_batch<T, false, Coefficients>};
}

}  // namespace
}  // namespace layernorm::cpu
