// All tuned choices of the CPU kernels: thresholds, and how many rows, columns or pixels the loops handle at a time. A
// policy is computed once per call, from the number of threads and from the arrays of the call: which of them exist,
// their rows, columns, dtypes and alignment. A batch is some rows whose sums are computed before the loop that stores
// their results.
//
// The choices of the first section determine the order of summation and thereby the bits of the results. So does the
// number of rows of a batch in backward, if kSubtotalRows is no multiple of it. These choices do not depend on the
// number of threads. All others change the speed alone; docs/design.md has their gains.
#pragma once

#include "kernels.h"
#include "load_store.h"

namespace layernorm::cpu {

static_assert(kVectorBytes >= CPU_CAPABILITY::kLeastVectorBytes, "compile with flags for the CPU capability");

namespace {

// The size of an array [samples * rows, cols], on which the choices depend.
struct ArraySize {
  ArraySize(const Params& p, int64_t element_bytes) : ArraySize(p, element_bytes, p.samples * p.rows) {}
  ArraySize(const Params& p, int64_t element_bytes, int64_t rows)
      : rows(rows), element_bytes(element_bytes), row_bytes(p.cols * element_bytes), bytes(rows * row_bytes) {}

  bool is_narrow() const { return row_bytes <= 4096; }  // four such rows fit into the first-level cache
  bool is_long() const { return row_bytes >= 8192; }
  // Whether rows are about a multiple of 4 KiB apart, such as rows of 1001 to 1047 floats. They then compete for the
  // same lines of the first-level cache, and a load waits for a store to another row, because the last 12 bits of their
  // addresses are about equal.
  bool rows_collide() const {
    const int64_t rest = row_bytes % 4096;
    return row_bytes > 2048 && min(rest, 4096 - rest) < 24 * element_bytes;
  }
  bool is_in_memory() const { return bytes > int64_t{1} << 23; }  // smaller arrays are taken to be in the caches

  int64_t rows, element_bytes, row_bytes, bytes;  // `rows` of all samples; `bytes` of the array
};

// ---- the order of summation -----------------------------------------------------------------------------------------

// The columns of a chunk, which are summed in Acc before the sums of the chunks are added in double (summation.h). Each
// lane adds at most 16 floats. With 64, one outlier among 8191 equal values exceeds the promised error, because adding
// small equal values to a large sum rounds in the same direction each time. Chunks of doubles are longer, because
// adding the sums of the chunks rounds as much as adding the elements.
template <class Acc>
constexpr int64_t kChunk = (sizeof(Acc) == 4 ? 8 : 16) * kVectorBytes;
// The channels of a pixel that are summed in Acc, for the same reason.
constexpr int64_t kChannelChunk = 16;
// The most runs in a row. A run is some adjacent chunks; threads that share a long row take runs of it.
constexpr int64_t kMaxRuns = 256;

// The number of accumulators of a sum over a row, for narrow and for wide rows. Each accumulator is a pack; two take
// turns to hide the latency of additions. For narrow rows, several rows that are handled together hide it.
constexpr int kNarrowPacks = 1, kWidePacks = 2;

// The most rows of a subtotal, whose weight gradients are added one by one. Equal floats round in the same direction
// each time: the relative error of the sum of 256 is up to 3.8e-6, and that of four subtotals of 64 up to 1.01e-6.
constexpr int64_t kSubtotalRows = 64;

// The weight gradients of up to kSubtotalRows rows of a segment are added in order, then the subtotals of the segment
// in order, then the segments in order and in double. The result does not depend on which thread takes which segment. A
// parameter that all samples share has segments of consecutive rows of [samples * rows]; else each sample has its own
// segments.
struct Segments {
  explicit Segments(const BackwardParams& p) : Segments(p, ParameterGradients(p)) {}

  // The first row of a segment and the row after its last one, of [samples * rows].
  int64_t begin(int64_t segment) const { return segment / per_sample * sample_rows + segment % per_sample * rows; }
  int64_t end(int64_t segment) const { return min(begin(segment) + rows, (segment / per_sample + 1) * sample_rows); }

  int64_t samples;          // with gradients of their own; else 1, and all rows count as rows of one sample
  int64_t sample_rows;      // the rows of such a sample
  int64_t rows;             // of a segment; the last one of a sample may have fewer
  int64_t per_sample;       // segments of a sample
  int64_t count;            // of all segments
  bool sums_are_gradients;  // whether the sums of each segment are the gradients of its sample

 private:
  Segments(const BackwardParams& p, const ParameterGradients& gradients)
      : samples(gradients.any_per_sample() ? p.samples : 1),
        sample_rows(p.samples * p.rows / samples),
        rows(ceil_div(sample_rows, segments_for(sample_rows, p.cols))),
        per_sample(ceil_div(sample_rows, rows)),
        count(samples * per_sample),
        sums_are_gradients(per_sample == 1 && (samples == 1 || gradients.all_per_sample())) {}

  // A sample has up to 64 segments, which is enough for many threads. It has fewer if a segment would have less than 32
  // rows or about 32768 elements, because the core that adds the partial sums reads at least half of them from another
  // core's cache. A segment has at most 256 rows, for the precision of float sums, so that samples of more than 16384
  // rows have more segments.
  static int64_t segments_for(int64_t rows, int64_t cols) {
    const int64_t useful = min(min(64, ceil_div(rows, 32)), (rows * cols + 16384) / 32768);
    const int64_t n = max(useful / 2 * 2, ceil_div(rows, 256));
    return n > 1 ? n + n % 2 : n;  // even, so that two threads share the segments well
  }
};

// Images are divided into tiles of adjacent pixels. The channels of a tile should fit into 256 KiB of second-level
// cache, and each channel has at least a few cache lines of pixels. A segment is one tile, whose weight gradients have
// partial sums of their own. But images of less than 32 pixels share a segment of about 32 pixels, unless each image
// has weight gradients of its own (sums_each_image): partial sums would be as large as the images.
constexpr int64_t kMinTilePixels = 64, kMaxTilePixels = 256;
struct PixelTiles {
  PixelTiles(const Params& p, int64_t element_bytes, bool sums_each_image)
      : pixels(max(kMinTilePixels, min(fitting_pixels(p.cols * element_bytes), kMaxTilePixels))),
        per_image(ceil_div(p.rows, pixels)),
        count(p.samples * per_image),
        per_segment(sums_each_image ? 1 : ceil_div(32, p.rows)),
        segments(ceil_div(count, per_segment)) {}

  int64_t pixels;                 // of a tile; the last one of an image may have fewer
  int64_t per_image;              // tiles of an image
  int64_t count;                  // of all tiles
  int64_t per_segment, segments;  // tiles of a segment, and the number of segments

 private:
  static int64_t fitting_pixels(int64_t pixel_bytes) {
    return (int64_t{1} << 18) / pixel_bytes / kMinTilePixels * kMinTilePixels;
  }
};

// ---- threads --------------------------------------------------------------------------------------------------------

// The least work for which waking a thread pays, in elements of the input (about 10 us).
constexpr int64_t kGrain = 32768;

// The least number of tasks for which waking a thread pays, from the elements of a task.
inline int64_t grain(int64_t task_elements) { return ceil_div(kGrain, task_elements); }

// The same for segments, rounded down: one segment is enough even if it has slightly fewer elements than kGrain.
inline int64_t segment_grain(const Segments& segments, int64_t cols) { return max(1, kGrain / (segments.rows * cols)); }

// The columns of a tile, which is a task of backward's gradients loop if the threads share the columns.
constexpr int64_t kTileCols = 1024;

// Whether all threads share the sums of each row, because there are fewer rows than threads.
inline bool threads_share_rows(const ArraySize& x) { return x.rows < num_threads() && !x.is_narrow(); }

// ---- rows together --------------------------------------------------------------------------------------------------

// How many rows the loops handle together. Such rows share the loads of the parameters and hide the latency of
// additions.
constexpr int kFourRows = 4, kTwoRows = 2;

// Rows are handled one by one if x has another dtype than dy or the output, which keeps the library small.
template <class T, class X>
constexpr bool kHandlesRowsTogether = std::is_same_v<T, X>;

// Whether a loop loads all rows that it handles together before it stores the first, so that no load waits for a store
// to another row (ArraySize::rows_collide). For more rows, and in AVX2, there are too few registers.
template <int kCount>
constexpr bool kStoresLast = kVectorBytes == 64 && kCount == kTwoRows;

// ---- memory ---------------------------------------------------------------------------------------------------------

// Rows of at least so many columns that are stored one by one are stored from an aligned address on, see
// for_each_stored_pack().
constexpr int64_t kMinAlignedCols = 128;

// The number of elements from p to the first that is at a multiple of kVectorBytes.
template <class T>
int64_t elements_to_boundary(const T* p) {
  return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) % kVectorBytes / sizeof(T));
}

// Whether all rows of an array begin at multiples of kVectorBytes.
inline bool is_aligned(const View& array, int64_t element_bytes) {
  const auto is_multiple = [&](int64_t elements) { return elements * element_bytes % kVectorBytes == 0; };
  return is_multiple(array.row_stride) && is_multiple(array.sample_stride) &&
         reinterpret_cast<uintptr_t>(array.data) % kVectorBytes == 0;
}

// How many rows ahead a loop that handles `count` rows together prefetches; 0 for no prefetch. Several rows gain if
// they are in memory; single rows also in the third-level cache. The hardware prefetcher is better for rows of less
// than 256 bytes, for single rows of up to 2 KiB of 32- or 64-bit elements, and if the rows have more than 32 KiB
// together.
inline int64_t rows_to_prefetch(const ArraySize& x, int64_t count) {
  const bool hardware_is_better = x.row_bytes < 256 || (x.element_bytes > 2 && count == 1 && x.row_bytes <= 2048);
  const bool is_in_near_caches = count > 1 ? !x.is_in_memory() : x.bytes <= int64_t{1} << 21;
  if (hardware_is_better || is_in_near_caches || count * x.row_bytes > 32768) return 0;
  return max(count, ceil_div(4096, x.row_bytes));
}

// ---- forward --------------------------------------------------------------------------------------------------------

// The rows of a batch if rows are short. In smaller batches, the output would wait for the statistics more often.
constexpr int kForwardBatchRows = 16;

// The differences x - center of narrow 16-bit rows, up to kMaxDifferences numbers, may be kept on the stack between the
// statistics and the output, which then need not widen x again.
template <int kPacks, class T, class X>
constexpr bool kMayKeepDifferences = kPacks == kNarrowPacks && std::is_same_v<T, X> && sizeof(X) == 2;
constexpr int64_t kMaxDifferences = 4096;

// How far ahead of its stores an output row that is stored alone is prefetched, in bytes, because the stores would
// stall the loop. To prefetch all of a long row at its beginning would evict the input from the first-level cache.
constexpr int64_t kWriteAheadBytes = 1024;

// The prefetches of later rows by the output loop.
struct Prefetch {
  int64_t rows_ahead;  // 0 for no prefetch
  bool output;         // whether to prefetch the output as well as the input; not if it is streamed
};

struct ForwardPolicy {
  // x is the input or its sum with the residual.
  ForwardPolicy(const ForwardParams& p, int64_t x_bytes, int64_t output_bytes) {
    const ArraySize x(p, x_bytes), y(p, output_bytes);
    is_narrow = x.is_narrow();
    shares_rows = threads_share_rows(x);
    // Rows of 1.5 to 8 KiB of 32- or 64-bit elements are read faster one by one if they are in memory. So are other
    // rows from 384 bytes on if a residual is added, which reads and writes four arrays of together more than 20 MiB.
    const bool has_large_sum = p.residual.data && x.row_bytes >= 384 && x.bytes > int64_t{5} << 20;
    const bool reads_single = x_bytes > 2 && x.row_bytes >= 1536 ? x.is_in_memory() : has_large_sum;
    rows_together = is_narrow ? (reads_single ? 1 : kFourRows) : reads_single && !x.is_long() ? 1 : kTwoRows;
    batch_rows = rows_together == kFourRows && p.cols <= (x_bytes > 2 && x.is_in_memory() ? 63 : 192)
                     ? kForwardBatchRows
                     : rows_together;
    // In arrays of more than 2 MiB, stores of differences would wait until earlier stores to the output are done.
    kept_rows = x.bytes <= int64_t{1} << 21 ? kMaxDifferences / padded_cols(p) : 0;
    // Rows to which a residual is added share no loads, unless there is an input_scale, so they are handled one by one
    // and stored from aligned addresses on. The output loop would lose more by reading the weight for each row.
    const bool shares_input_scale = p.input_scale.data && is_aligned(p.sum, x_bytes);
    residuals_together = p.cols < kMinAlignedCols || shares_input_scale ? rows_together : 1;
    // Streaming stores bypass the caches: the next reader of a smaller output would lose more than they gain. Short
    // rows gain nothing. Rows of 32- or 64-bit elements gain from 7 KiB on, and from 4 KiB on if a residual is added.
    const bool output_is_aligned = is_aligned(p.output, output_bytes);
    const bool gains_below_8_kib =
        output_bytes > 2 && !is_narrow && p.activation == Activation::kNone && (p.residual.data || y.row_bytes >= 7168);
    streams = kHasStreamingStores && (y.is_long() || gains_below_8_kib) && y.bytes >= int64_t{1} << 24 &&
              (output_is_aligned || can_stream_single(p, y));
    outputs_together = streams && !output_is_aligned ? 1 : rows_together;
    // Rows of 4 KiB of float16 are as fast four together.
    const bool is_half_4k = p.sum_dtype == Dtype::kFloat16 && x.row_bytes == 4096;
    if (x.rows_collide() && !is_half_4k) outputs_together = min(outputs_together, kTwoRows);
    prefetch_together = prefetch(p, x, y, rows_together);
    prefetch_single = prefetch(p, x, y, 1);
  }

  bool is_narrow;
  bool shares_rows;            // whether all threads share each row
  int64_t rows_together;       // the rows that the statistics loop handles together
  int64_t residuals_together;  // the rows to which the residual is added together
  int64_t outputs_together;    // the rows whose outputs are stored together
  int64_t batch_rows;          // the rows whose statistics are computed before their outputs are stored
  int64_t kept_rows;           // the most rows of a batch that keeps its differences (kMayKeepDifferences)
  bool streams;                // whether the output is written with streaming stores
  Prefetch prefetch_together;  // for loops over several rows
  Prefetch prefetch_single;    // for loops over single rows

 private:
  // Whether streaming stores may write rows that are not aligned, one by one. 16-bit rows of less than 16 KiB are
  // faster together, and gated rows without streaming.
  static bool can_stream_single(const ForwardParams& p, const ArraySize& y) {
    return p.activation == Activation::kNone && (y.element_bytes > 2 || y.row_bytes >= 16384) &&
           reinterpret_cast<uintptr_t>(p.output.data) % y.element_bytes == 0;
  }

  // The output is prefetched with the input, because a store to a line in memory would wait for it. The hardware
  // prefetches it better if rows are short, or single rows of up to 8 KiB of 32- or 64-bit elements.
  static Prefetch prefetch(const ForwardParams& p, const ArraySize& x, const ArraySize& y, int64_t count) {
    const bool output = y.row_bytes > 256 && (count > 1 || y.element_bytes == 2 || y.is_long());
    return {p.residual.data ? 0 : rows_to_prefetch(x, count), output};
  }
};

// ---- backward -------------------------------------------------------------------------------------------------------

// The most rows that the gradients loop handles together. The coefficients of two fill the 16 registers of AVX2.
constexpr int kMostGradientRows = kVectorBytes == 32 ? kTwoRows : kFourRows;

// The most rows of a batch in backward.
constexpr int64_t kMaxBackwardBatchRows = kSubtotalRows;

// Whether the gradients loop may go column by column, and how many packs of columns it takes at a time.
constexpr bool kHasColumnLoop = kVectorBytes > 16;
constexpr int kColumnPacks = kVectorBytes == 64 ? 2 : 1;

// Backward without a gate, with one segment and at most this many columns, has its workspace on the stack.
constexpr int64_t kMaxStackCols = 1024;
static_assert(kMaxStackCols <= kTileCols, "the stack has no room for the coefficients of all rows");

struct BackwardPolicy {
  BackwardPolicy(const BackwardParams& p, const ArraySize& x) : segments(p) {
    is_narrow = x.is_narrow();
    shares_rows = threads_share_rows(x);
    shares_columns = segments.count < num_threads() && p.cols > kTileCols;
    buffers = segments.count;
    if (segments.sums_are_gradients && !shares_columns) {
      buffers = min(min(buffers, num_threads()), ceil_div(segments.count * segments.rows * p.cols, kGrain));
    }
    second_buffers = segments.rows > kSubtotalRows && ParameterGradients(p).any() ? buffers : 0;
    uses_stack = segments.count == 1 && p.cols <= kMaxStackCols;
    choose_rows(x);
    // Row by row, the gradients loop has few iterations in short rows. Column by column, it reads more streams, which
    // is slower for longer rows in memory.
    by_columns = (x.is_in_memory() ? x.row_bytes : p.cols) <= 256 && batch_rows > 1;
    // The hardware prefetcher is better for single rows of less than 4 KiB. The next batch of other short rows fits
    // into the first-level cache beside this one.
    if (rows_together == 1 && x.row_bytes < 4096) {
      rows_ahead = 0;
    } else {
      rows_ahead = x.row_bytes <= 3072 ? max(batch_rows, ceil_div(4096, x.row_bytes)) : rows_to_prefetch(x, batch_rows);
    }
    // A smaller dx is better left in the caches for its next reader, as any dx is for input_scale_loop().
    streams = x.bytes >= int64_t{1} << 23 && kHasStreamingStores && is_aligned(p.grad_input, x.element_bytes) &&
              !has_input_scale_gradients(p);
    prefetches_dx = x.is_in_memory() && x.element_bytes > 2 && x.row_bytes >= 16384 && !streams && p.grad_input.data;
  }

  // Returns the row after the subtotal that begins at `row` in a segment that ends at `segment_end`. A subtotal has
  // whole batches, except the last one of a segment. Its end does not depend on where the samples of a view cut
  // batches.
  int64_t subtotal_end(int64_t row, int64_t segment_end) const {
    return segment_end - row <= kSubtotalRows ? segment_end : row + kSubtotalRows / batch_rows * batch_rows;
  }

  Segments segments;
  bool is_narrow;
  bool shares_rows;     // whether all threads share the sums of each row, if they share the columns
  bool shares_columns;  // whether the threads share the columns, because there are too few segments for them

  // The buffers for partial sums in the workspace: one for each segment. If the sums of a segment are gradients, the
  // thread stores them at once and uses its buffer for the next segment, so that one for each thread is enough.
  int64_t buffers;
  int64_t second_buffers;  // as many again, after these in the workspace, or 0 if none is needed
  bool uses_stack;         // whether the workspace is on the stack, because it is small

  int64_t rows_together;  // the rows that share the loads of the weight and the loads and stores of the partial sums
  int64_t batch_rows;     // the rows whose sums are computed before the gradients loop starts
  bool by_columns;        // whether the gradients loop goes column by column through all rows of a batch
  int64_t rows_ahead;     // how many rows ahead x and dy are prefetched, or 0
  bool streams;           // whether dx is written with streaming stores
  bool prefetches_dx;  // whether dx is prefetched before the sums of a long row, because stores would wait for memory

 private:
  void choose_rows(const ArraySize& x) {
    // In memory, rows of up to 8 KiB of 32- or 64-bit elements are read faster one by one, except the shortest. So are
    // 16-bit rows of about 1 to 2 KiB. A row of less than 683 bytes must have the same batches (below) in memory and
    // in the caches: a batch of 12 or more such rows determines the order of summation if it does not divide
    // kSubtotalRows.
    const bool is_16_bit = x.element_bytes == 2;
    const int64_t shortest = is_16_bit ? 1000 : 704;
    if (x.is_in_memory() && x.row_bytes >= shortest && x.row_bytes < (is_16_bit ? 2560 : 8192)) {
      rows_together = batch_rows = 1;
      return;
    }
    // Four wide rows are slower in memory, and four rows that collide in the caches as well. Narrow rows that exceed
    // 2 KiB of 32- or 64-bit elements are slower because four such streams are read more slowly.
    const bool is_short = x.row_bytes <= (is_16_bit ? 4096 : 2048);
    const bool is_wide_in_cache = !x.is_narrow() && !x.is_in_memory();
    rows_together = (is_short || is_wide_in_cache) && !x.rows_collide() ? kFourRows : kTwoRows;
    // Short rows would wait for the coefficients of each row, so a batch has as many as 8 KiB hold.
    batch_rows = max(rows_together, min(kMaxBackwardBatchRows, 8192 / x.row_bytes / kFourRows * kFourRows));
  }
};

// ---- gated norms ----------------------------------------------------------------------------------------------------

// Backward of a gated norm, and forward if the gate is first, handle rows in batches. The arrays that they compute for
// the plain norm are scratch rows: rows of Acc in the workspace, which stay in the first-level cache.
struct GatedPolicy {
  // There are at most `most_tasks` tasks. A batch of `batch_rows` rows has scratch rows for `arrays` arrays.
  GatedPolicy(const Params& p, int64_t most_tasks, int64_t batch_rows, int64_t arrays)
      : tasks(max(1, min(min(most_tasks, num_threads()), p.samples * p.rows * p.cols / kGrain))),
        batch_rows(batch_rows),
        pitch(padded_cols(p) + kMaxPackSize),
        array_elements(batch_rows * pitch),
        task_elements(arrays * array_elements),
        elements(tasks * task_elements) {}

  int64_t tasks;       // each of which has its own scratch rows
  int64_t batch_rows;  // the most rows of a batch
  int64_t pitch;  // elements from scratch row to scratch row: one pack more, so that rows of 2^n columns do not collide
  int64_t array_elements;  // of one array's scratch rows
  int64_t task_elements;   // of all scratch rows of a task
  int64_t elements;        // of all scratch rows
};

// The rows of a batch in forward if the gate is first: as many as 16 KiB hold, in multiples of the rows that the plain
// norm handles together.
inline int64_t gated_forward_batch_rows(const ArraySize& x) {
  const int64_t rows = 16384 / x.row_bytes;
  return rows >= kForwardBatchRows ? min(rows / kForwardBatchRows, 4) * kForwardBatchRows
                                   : max(1, rows / kTwoRows * kTwoRows);
}

}  // namespace
}  // namespace layernorm::cpu
