// Linear layers over weights that are packed into panels of columns.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include <omp.h>

#include "pairs.hpp"
#include "vectors.hpp"

namespace {

// What is multiplied at once: one input, widened, or a pair of them as they are.
template <class T>
using Factor = std::conditional_t<kPairs<T>, Pair, float>;
template <class X>
constexpr int64_t kInputs = std::is_same_v<X, Pair> ? 2 : 1;

// Of a panel, with a last one that has no second.
inline int64_t even(int64_t inputs) { return inputs + inputs % 2; }

// packed [panel, even(inputs), column]; what is past the last output or input is zero. Columns lie
// as load_two finds them; where bfloat16 is multiplied in pairs, a column's two side by side.
template <class T>
void pack_panels(const T *weight, T *packed, int64_t outputs, int64_t inputs) {
  constexpr int64_t kPanel = ::kPanel<float>;
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t k = 0; k < even(inputs); ++k)
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t n = p * kPanel + j, first = (p * even(inputs) + k) * kPanel;
        const int64_t place = kPairs<T> ? 2 * j + k % 2 * (1 - kPanel) : place_of_lane<T>(j);
        packed[first + place] = n < outputs && k < inputs ? weight[n * inputs + k] : T{};
      }
}

// Adds ROWS rows times one panel to sum, of which rows are SUM apart, or with NEW puts it there.
// Number k of row r is x[k * K + r * R]: with K = 0, the rows lie side by side, as [inputs, ROWS].
// Neither this nor multiply_row is inlined: what surrounds them would change which registers they
// get.
template <int ROWS, int K, int R, int SUM, bool NEW, class Real, class W>
[[gnu::noinline]] void multiply_tile(const Real *x, int64_t inputs, const W *panel, Real *sum) {
  constexpr int kLanes = ::kLanes<Real>, kPanel = 2 * kLanes;
  constexpr int input_step = K ? K : ROWS;
  constexpr int kAhead = sizeof(W) == 1 ? 64 : 24;  // inputs
  Vec<Real> left_sum[ROWS], right_sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    left_sum[r] = NEW ? Vec<Real>{} : load(sum + r * SUM);
    right_sum[r] = NEW ? Vec<Real>{} : load(sum + r * SUM + kLanes);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec<Real> left, right;
    load_two(panel + k * kPanel, left, right);
    // Some steps ahead, past the end too: the next piece of the panel usually follows there.
    for (int64_t i = 0; i < kPanel; i += 64 / int64_t(sizeof(W)))
      __builtin_prefetch(panel + (k + kAhead) * kPanel + i);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      left_sum[r] += x[k * input_step + r * R] * left;
      right_sum[r] += x[k * input_step + r * R] * right;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    store(left_sum[r], sum + r * SUM);
    store(right_sum[r], sum + r * SUM + kLanes);
  }
}

template <int ROWS, int K, int R, int SUM, bool NEW = false, class Real, class W>
void multiply(int64_t rows, const Real *x, int64_t inputs, const W *panel, Real *sum) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply<ROWS - 1, K, R, SUM, NEW>(rows, x, inputs, panel, sum);
  multiply_tile<ROWS, K, R, SUM, NEW>(x, inputs, panel, sum);
}

// One row times PANELS panels of `padded` inputs, to sum [panel, kPanel]. A single panel's sums
// would wait for each other; every number is summed in the same order as above.
template <int PANELS, class W>
[[gnu::noinline]] void multiply_row(const float *x, int64_t inputs, const W *panels,
                                    int64_t padded, float *sum) {
  constexpr int kLanes = ::kLanes<float>, kPanel = 2 * kLanes;
  constexpr int kAhead = sizeof(W) == 1 ? 64 : 24;  // inputs
  Vec<float> left_sum[PANELS] = {}, right_sum[PANELS] = {};
  for (int64_t k = 0; k < inputs; ++k)
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
      const W *weights = panels + (p * padded + k) * kPanel;
      Vec<float> left, right;
      load_two(weights, left, right);
      for (int64_t i = 0; i < kPanel; i += 64 / int64_t(sizeof(W)))
        __builtin_prefetch(weights + kAhead * kPanel + i);
      left_sum[p] += x[k] * left;
      right_sum[p] += x[k] * right;
    }
  for (int p = 0; p < PANELS; ++p) {
    store(left_sum[p], sum + p * kPanel);
    store(right_sum[p], sum + p * kPanel + kLanes);
  }
}

// x [rows, inputs] → tile [inputs, rows], of at most kRows rows. Writes up to a vector more.
template <class T>
void fill_tile(const T *x, int64_t inputs, int64_t rows, float *tile) {
  constexpr int64_t kLanes = ::kLanes<float>;
  int64_t k = 0;
  for (; rows > 2 && k + kLanes <= inputs; k += kLanes) {
    Vec<float> square[kLanes] = {};
    for (int64_t r = 0; r < rows; ++r) square[r] = load_wide(x + r * inputs + k);
    transpose<float>(square);
    for (int64_t i = 0; i < kLanes; ++i) store(square[i], tile + (k + i) * rows);
  }
  for (; k < inputs; ++k)
    for (int64_t r = 0; r < rows; ++r) tile[k * rows + r] = widen(x[r * inputs + k]);
}

inline void fill_row(const float *x, int64_t inputs, float *row) {
  std::copy(x, x + inputs, row);
}
template <class T>
void fill_row(const T *x, int64_t inputs, float *row) {
  for (int64_t k = 0; k < inputs; ++k) row[k] = widen(x[k]);
}

// Of 8-bit weights, whose widening costs too much to be repeated for every tile of rows.
template <class W>
void widen_panel(const W *panel, int64_t inputs, float *widened) {
  constexpr int64_t kLanes = ::kLanes<float>, kPanel = 2 * kLanes;
  for (int64_t k = 0; k < inputs; ++k) {
    Vec<float> left, right;
    load_two(panel + k * kPanel, left, right);
    __builtin_prefetch(panel + (k + 24) * kPanel);
    store(left, widened + k * kPanel);
    store(right, widened + k * kPanel + kLanes);
  }
}

// Where sums go: y, with a scale of each output's weights and a bias, if there are any.
template <class T>
struct Outputs {
  const float *scale, *bias;  // [count] or null
  T *y;                       // [rows, count]
  int64_t count;

  // Of panel p and `rows` rows from number `first` on: sums [rows, kPanel].
  void finish(int64_t p, int64_t first, int64_t rows, const float *sums) const {
    constexpr int64_t kPanel = ::kPanel<float>;
    const int64_t column = p * kPanel, columns = std::min<int64_t>(kPanel, count - column);
    for (int64_t m = 0; m < rows; ++m) {
      T *to = y + (first + m) * count + column;
      if constexpr (kPairs<T>)
        if (columns == kPanel) {
          finish_panel(sums + m * kPanel, column, to);
          continue;
        }
      for (int64_t j = 0; j < columns; ++j)
        narrow(sums[m * kPanel + j] * (scale ? scale[column + j] : 1.0f) +
                   (bias ? bias[column + j] : 0.0f),
               to + j);
    }
  }

  void finish_panel(const float *sums, int64_t column, T *to) const {
    const int64_t middle = column + kLanes<float>;
    Vec<float> left = load(sums), right = load(sums + kLanes<float>);
    if (scale) left *= load(scale + column), right *= load(scale + middle);
    if (bias) left += load(bias + column), right += load(bias + middle);
    store_narrowed(left, right, to);
  }
};

// One row. Every thread widens it for itself, which takes less than waiting for another.
template <class T, class W>
void linear_row(const T *x, const W *packed, int64_t inputs, const Outputs<T> &outputs) {
  typedef Factor<T> X;
  constexpr int64_t kPanel = ::kPanel<float>, kTogether = 3;  // panels
  const int64_t panels = (outputs.count + kPanel - 1) / kPanel;
  const int64_t steps = (inputs + kInputs<X> - 1) / kInputs<X>;
#pragma omp parallel
  {
    const std::unique_ptr<X[]> wide(new X[steps]);
    fill_row(x, inputs, wide.get());
    alignas(64) float sums[kTogether * kPanel];
    // A share of panels, not of triples: there may be few of these.
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t end = panels * (thread + 1) / threads;
    for (int64_t p = panels * thread / threads; p < end; p += kTogether) {
      const int64_t count = std::min(kTogether, end - p);
      const W *weights = packed + p * even(inputs) * kPanel;
      if (count == kTogether)
        multiply_row<kTogether>(wide.get(), steps, weights, even(inputs), sums);
      else if (count == 2)
        multiply_row<2>(wide.get(), steps, weights, even(inputs), sums);
      else
        multiply_row<1>(wide.get(), steps, weights, even(inputs), sums);
      for (int64_t i = 0; i < count; ++i) outputs.finish(p + i, 0, 1, sums + i * kPanel);
    }
  }
}

// scale [outputs] or null: what each output's weights are to be multiplied by.
template <class T, class W>
void linear(const T *x, const W *packed, const float *scale, const float *bias, T *y,
            int64_t rows, int64_t inputs, int64_t outputs) {
  typedef Factor<T> X;
  typedef std::conditional_t<kPairs<T>, bf16, float> Widened;
  constexpr int64_t kPanel = ::kPanel<float>, kStep = kInputs<X> * kPanel;
  constexpr int64_t kChunk = 4 * kRows;                  // rows per pass over the panels
  constexpr int64_t kDepth = 16384 / kStep / sizeof(W);  // steps: 16 KiB of a panel stay in L1
  constexpr int64_t kWidened = sizeof(W) == 1 ? 64 : 0;  // steps that tiles share, widened
  const Outputs<T> to{scale, bias, y, outputs};
  if (rows == 1) return linear_row(x, packed, inputs, to);
  const int64_t panels = (outputs + kPanel - 1) / kPanel, tiles = (rows + kRows - 1) / kRows;
  const int64_t steps = (inputs + kInputs<X> - 1) / kInputs<X>;
  // Tile by tile of kRows rows, [steps, rows of the tile], so that a tile reads one stream.
  const int64_t tile_size = kRows * steps + kLanes<float>;  // fill_tile writes past the end
  const std::unique_ptr<X[]> wide(new X[tiles * tile_size]);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t)
      fill_tile(x + t * kRows * inputs, inputs, std::min<int64_t>(kRows, rows - t * kRows),
                wide.get() + t * tile_size);
    alignas(64) float sums[kChunk * kPanel];
    alignas(64) Widened widened[(kWidened + 1) * kStep];
    for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
      const int64_t chunk_rows = std::min(kChunk, rows - chunk);
#pragma omp for schedule(static) nowait
      for (int64_t p = 0; p < panels; ++p) {
        std::fill(sums, sums + chunk_rows * kPanel, 0.0f);
        const bool shared = kWidened && chunk_rows > kRows;
        const int64_t step = shared ? kWidened : kDepth;
        for (int64_t k = 0; k < steps; k += step) {
          const int64_t depth = std::min(step, steps - k);
          const W *piece = packed + p * even(inputs) * kPanel + k * kStep;
          if constexpr (kWidened > 0)
            if (shared) widen_panel(piece, depth, widened);
          for (int64_t m = 0; m < chunk_rows; m += kRows) {
            const int64_t count = std::min<int64_t>(kRows, chunk_rows - m);
            const X *tile = wide.get() + (chunk + m) / kRows * tile_size + k * count;
            float *sum = sums + m * kPanel;
            if constexpr (kWidened > 0)
              if (shared) {
                multiply<kRows, 0, 1, kPanel>(count, tile, depth, widened, sum);
                continue;
              }
            multiply<kRows, 0, 1, kPanel>(count, tile, depth, piece, sum);
          }
        }
        to.finish(p, chunk, chunk_rows, sums);
      }
    }
  }
}

}  // namespace
