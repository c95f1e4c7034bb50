"""The rules of tests/mutants.py."""

import mutants

KERNEL = b"""\
constexpr int kThreads = 64 + 1;
template <int kStep>
__global__ void __launch_bounds__(kThreads) sum(const int* in, int* out, int n, bool negative) {
  __shared__ int tile[kThreads + 1];
  int total = 0;
  for (int i = threadIdx.x; i < n; i += kStep) total += negative ? -in[i] : in[2 * i];
  if constexpr (kStep > 1) total <<= 1;
  prefetch(in + n);
  __syncwarp();
  __syncthreads();
  if (threadIdx.x == 0 && n != 1) *out = total;
}
int blocks(int n) { return n / 2; }
"""
CHANGES = """\
6: i < n -> i >= n
6: i += kStep -> i -= kStep
6: -in[i] -> in[i]
6: i -> (i) + 1
6: 2 -> 2 + 1
6: 2 * i -> 2 + i
6: 2 * i -> (2 * i) + 1
6: negative -> !(negative)
6: total += negative ? -in[i] : in[2 * i] -> total -= negative ? -in[i] : in[2 * i]
10: __syncthreads(); -> (left out)
11: threadIdx.x == 0 -> threadIdx.x != 0
11: n != 1 -> n == 1
"""


def test_rules():
    found = [str(mutant).removeprefix("csrc/cuda/sum.cu:") for mutant in mutants.mutants_of(KERNEL, "csrc/cuda/sum.cu")]
    assert sorted(found) == sorted(CHANGES.splitlines())
