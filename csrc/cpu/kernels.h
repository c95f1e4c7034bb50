// The interface between dispatch.cpp, which is compiled once and uses torch, and the kernels (forward.cpp,
// backward.cpp, channels_first.cpp), which are compiled once per instruction set and include no torch header.
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

// Calls task(context, begin, end) on torch's threads, for ranges of at least `grain` that cover [0, n).
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
// Weight gradients are summed over the rows of a slot in order, then over the slots in order and in double, so the
// result does not depend on which thread takes which slot. 2048 rows or more have at least 64 slots, enough for many
// threads. A slot has at most 256 rows, for the precision of fp32 sums, and at least 32, which keeps the memory of the
// slots below a tenth of the input's.
inline int64_t rows_per_slot(int64_t rows) {
  const int64_t wanted = (rows + 63) / 64;
  return wanted < 32 ? 32 : wanted > 256 ? 256 : wanted;
}
inline int64_t num_slots(int64_t rows) { return (rows + rows_per_slot(rows) - 1) / rows_per_slot(rows); }
}  // namespace

// Backward's workspace holds partial sums [slots, 2, cols padded to a multiple of kMaxPackSize] and kCoefficients
// values per row. For few short rows it is on the stack, which saves a fifth of a microsecond per call.
constexpr int64_t kMaxPackSize = 32;
constexpr int64_t kCoefficients = 6;
constexpr int64_t kStackCols = 1024;
inline bool fits_stack(int64_t rows, int64_t cols) { return num_slots(rows) == 1 && cols <= kStackCols; }

// Images are divided into blocks of adjacent pixels. All channels of a block fit into the second-level cache, and each
// channel has at least a few cache lines of pixels. Blocks of small images share a slot, so that partial sums stay
// small beside the images.
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

// The least work for one thread, in elements of the input (about 10 us).
constexpr int64_t kGrain = 32768;

}  // namespace layernorm::cpu
