// Linear layers over weights that are packed into strips of columns.

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

// packed [strip, even(inputs), kStrip]; what is past the last output or input is zero. The
// columns of a panel lie as load_two finds them; where bfloat16 is multiplied in pairs, a column's
// two side by side.
template <class T>
void pack_panels(const T *weight, T *packed, int64_t outputs, int64_t inputs) {
  constexpr int64_t kPanel = ::kPanel<float>;
  const int64_t strips = (outputs + kStrip - 1) / kStrip;
#pragma omp parallel for
  for (int64_t p = 0; p < strips; ++p)
    for (int64_t k = 0; k < even(inputs); ++k)
      for (int64_t j = 0; j < kStrip; ++j) {
        const int64_t n = p * kStrip + j, first = (p * even(inputs) + k) * kStrip;
        const int64_t place = kPairs<T> ? 2 * j + k % 2 * (1 - kStrip)
                                        : j / kPanel * kPanel + place_of_lane<T>(j % kPanel);
        packed[first + place] = n < outputs && k < inputs ? weight[n * inputs + k] : T{};
      }
}

// Adds ROWS rows times one panel to sum, of which rows are SUM apart, or with NEW puts it there.
// Number k of row r is x[k * K + r * R]: with K = 0, the rows lie side by side, as [inputs, ROWS].
// From one input of the panel to the next are STEP numbers. Neither this nor multiply_row is
// inlined: what surrounds them would change which registers they get.
template <int ROWS, int K, int R, int SUM, int STEP, bool NEW, class Real, class W>
[[gnu::noinline]] void multiply_tile(const Real *x, int64_t inputs, const W *panel, Real *sum) {
  constexpr int kLanes = ::kLanes<Real>, input_step = K ? K : ROWS;
  Vec<Real> left_sum[ROWS], right_sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    left_sum[r] = NEW ? Vec<Real>{} : load(sum + r * SUM);
    right_sum[r] = NEW ? Vec<Real>{} : load(sum + r * SUM + kLanes);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec<Real> left, right;
    load_two(panel + k * STEP, left, right);
    fetch_ahead<ROWS, STEP>(panel + k * STEP);
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

template <int ROWS, int K, int R, int SUM, int STEP, bool NEW = false, class Real, class W>
void multiply(int64_t rows, const Real *x, int64_t inputs, const W *panel, Real *sum) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply<ROWS - 1, K, R, SUM, STEP, NEW>(rows, x, inputs, panel, sum);
  multiply_tile<ROWS, K, R, SUM, STEP, NEW>(x, inputs, panel, sum);
}

// One row times a strip. Every number is summed in the same order as above.
template <class W>
[[gnu::noinline]] void multiply_row(const float *x, int64_t inputs, const W *strip, float *sum) {
  constexpr int kLanes = ::kLanes<float>, kPanel = ::kPanel<float>, kPanels = kStrip / kPanel;
  Vec<float> left_sum[kPanels] = {}, right_sum[kPanels] = {};
  for (int64_t k = 0; k < inputs; ++k)
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      Vec<float> left, right;
      load_two(strip + k * kStrip + p * kPanel, left, right);
      left_sum[p] += x[k] * left;
      right_sum[p] += x[k] * right;
    }
  for (int p = 0; p < kPanels; ++p) {
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
void widen_strip(const W *strip, int64_t inputs, float *widened) {
  constexpr int64_t kLanes = ::kLanes<float>, kPanel = 2 * kLanes;
  for (int64_t i = 0; i < inputs * kStrip; i += kPanel) {
    Vec<float> left, right;
    load_two(strip + i, left, right);
    __builtin_prefetch(strip + i + 24 * kPanel);
    store(left, widened + i);
    store(right, widened + i + kLanes);
  }
}

// Where sums go: y, with a scale of each output's weights and a bias, if there are any.
template <class T>
struct Outputs {
  const float *scale, *bias;  // [count] or null
  T *y;                       // [rows, count]
  int64_t count;

  // Of strip p and `rows` rows from number `first` on: sums [rows, kStrip].
  void finish(int64_t p, int64_t first, int64_t rows, const float *sums) const {
    const int64_t column = p * kStrip, columns = std::min<int64_t>(kStrip, count - column);
    for (int64_t m = 0; m < rows; ++m) {
      T *to = y + (first + m) * count + column;
      if constexpr (kPairs<T>)
        if (columns == kStrip) {
          finish_strip(sums + m * kStrip, column, to);
          continue;
        }
      for (int64_t j = 0; j < columns; ++j)
        narrow(sums[m * kStrip + j] * (scale ? scale[column + j] : 1.0f) +
                   (bias ? bias[column + j] : 0.0f),
               to + j);
    }
  }

  void finish_strip(const float *sums, int64_t column, T *to) const {
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
  const int64_t strips = (outputs.count + kStrip - 1) / kStrip;
  const int64_t steps = (inputs + kInputs<X> - 1) / kInputs<X>;
#pragma omp parallel
  {
    const std::unique_ptr<X[]> wide(new X[steps]);
    fill_row(x, inputs, wide.get());
    alignas(64) float sums[kStrip];
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < strips; ++p) {
      const W *weights = packed + p * even(inputs) * kStrip;
      if constexpr (kStrip == kPanel<float>)
        multiply_tile<1, 1, 0, kStrip, kStrip, true>(wide.get(), steps, weights, sums);
      else
        multiply_row(wide.get(), steps, weights, sums);
      outputs.finish(p, 0, 1, sums);
    }
  }
}

// scale [outputs] or null: what each output's weights are to be multiplied by.
template <class T, class W>
void linear(const T *x, const W *packed, const float *scale, const float *bias, T *y,
            int64_t rows, int64_t inputs, int64_t outputs) {
  typedef Factor<T> X;
  typedef std::conditional_t<kPairs<T>, bf16, float> Widened;
  constexpr int64_t kPanel = ::kPanel<float>, kStep = kInputs<X> * kStrip;
  constexpr int64_t kChunk = 4 * kRows;                   // rows per pass over the weights
  constexpr int64_t kDepth = kPiece / kStep / sizeof(W);  // steps
  constexpr int64_t kWidened = sizeof(W) == 1 ? 64 : 0;   // steps that tiles share, widened
  const Outputs<T> to{scale, bias, y, outputs};
  if (rows == 1) return linear_row(x, packed, inputs, to);
  const int64_t strips = (outputs + kStrip - 1) / kStrip, tiles = (rows + kRows - 1) / kRows;
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
    alignas(64) float sums[kChunk * kStrip];
    alignas(64) Widened widened[(kWidened + 1) * kStep];
    for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
      const int64_t chunk_rows = std::min(kChunk, rows - chunk);
      // Adds so many steps of weights, the k-th and on, to the sums of all of the chunk's rows.
      const auto add = [&](const auto *weights, int64_t k, int64_t depth) {
        for (int64_t j = 0; j < kStrip; j += kPanel)
          for (int64_t m = 0; m < chunk_rows; m += kRows) {
            const int64_t count = std::min<int64_t>(kRows, chunk_rows - m);
            const X *tile = wide.get() + (chunk + m) / kRows * tile_size + k * count;
            multiply<kRows, 0, 1, kStrip, kStrip>(count, tile, depth, weights + j,
                                                  sums + m * kStrip + j);
          }
      };
#pragma omp for schedule(static) nowait
      for (int64_t p = 0; p < strips; ++p) {
        std::fill(sums, sums + chunk_rows * kStrip, 0.0f);
        const bool shared = kWidened && chunk_rows > kRows;
        const int64_t step = shared ? kWidened : kDepth;
        for (int64_t k = 0; k < steps; k += step) {
          const int64_t depth = std::min(step, steps - k);
          const W *piece = packed + p * even(inputs) * kStrip + k * kStep;
          if constexpr (kWidened > 0)
            if (shared) {
              widen_strip(piece, depth, widened);
              add(widened, k, depth);
              continue;
            }
          add(piece, k, depth);
        }
        to.finish(p, chunk, chunk_rows, sums);
      }
    }
  }
}

}  // namespace
