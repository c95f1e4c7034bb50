// Replaces the header of torch. The ranges of three threads are run one after another.
#pragma once

#include <algorithm>
#include <cstdint>

namespace at {

inline bool in_parallel_region() { return false; }
inline int get_num_threads() { return 3; }

template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  const int64_t step = std::max(grain, (end - begin + get_num_threads() - 1) / get_num_threads());
  for (; begin < end; begin += step) f(begin, std::min(end, begin + step));
}

}  // namespace at
