// What dispatch.cpp (compiled once, sees torch) and forward.cpp, backward.cpp, channels_first.cpp (compiled once per
// instruction set, see no torch header) know of each other.
#pragma once

#include <cstdint>

#include "../layer_norm.h"

namespace layernorm::cpu {

#define LAYERNORM_DECLARE_KERNELS(capability)                              \
  namespace capability {                                                   \
  void forward(const ForwardParams& params);                               \
  void backward(const BackwardParams& params);                             \
  void channels_first_forward(const ChannelsFirstForwardParams& params);   \
  void channels_first_backward(const ChannelsFirstBackwardParams& params); \
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

// Calls task(context, begin, end) on torch's threads for ranges of at least `grain` that make up [0, n).
using Task = void (*)(const void* context, int64_t begin, int64_t end);
void run_on_threads(int64_t n, int64_t grain, Task task, const void* context);

namespace {
template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  const Task call = [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const F*>(context))(begin, end);
  };
  run_on_threads(n, grain, call, &f);
}
}  // namespace

namespace {
// Weight gradients are summed over the rows of a slot in order, then over the slots in order and in double:
// the result does not depend on which thread takes which slot. At least 64 slots from 2048 rows up keep many
// threads busy; at most 256 rows a slot keep the fp32 sums exact; at least 32 keep the slots' memory below a
// tenth of the input's.
inline int64_t rows_per_slot(int64_t rows) {
  const int64_t wanted = (rows + 63) / 64;
  return wanted < 32 ? 32 : wanted > 256 ? 256 : wanted;
}
inline int64_t num_slots(int64_t rows) { return (rows + rows_per_slot(rows) - 1) / rows_per_slot(rows); }
}  // namespace

// Backward's workspace: partial sums [slots, 2, cols padded to a multiple of kMaxPackSize], kCoefficients
// numbers a row. Of few short rows it stands on the stack, which saves a call a fifth of a microsecond.
constexpr int64_t kMaxPackSize = 32;
constexpr int64_t kCoefficients = 6;
constexpr int64_t kStackCols = 1024;
inline bool fits_stack(int64_t rows, int64_t cols) { return num_slots(rows) == 1 && cols <= kStackCols; }

// Images are cut into blocks of neighbouring pixels, of which all channels stay in the second-level cache; at least so
// many pixels that a channel's are a few cache lines. Blocks of so few pixels that their partial sums would be as long
// as the image share a slot with others.
constexpr int64_t kMinBlockPixels = 64, kMaxBlockPixels = 256;
struct Blocks {
  Blocks(int64_t images, int64_t channels, int64_t image_pixels, int64_t element_size) {
    const int64_t fitting = (int64_t{1} << 18) / (channels * element_size) / kMinBlockPixels * kMinBlockPixels;
    pixels = fitting < kMinBlockPixels ? kMinBlockPixels : fitting > kMaxBlockPixels ? kMaxBlockPixels : fitting;
    per_image = (image_pixels + pixels - 1) / pixels;
    count = images * per_image;
    per_slot = image_pixels < 32 ? (31 + image_pixels) / image_pixels : 1;
    slots = (count + per_slot - 1) / per_slot;
  }
  int64_t pixels, per_image, count, per_slot, slots;
};

// Work for one thread, in elements of the input, that is worth waking another thread for (some 10 us).
constexpr int64_t kGrain = 32768;

}  // namespace layernorm::cpu
