// Linear layers over weights that are packed into strips of columns.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "linear/coded.hpp"
#include "linear/integers.hpp"

namespace {

// The type that weights of type T are packed as.
template <class T>
using Packed =
    std::conditional_t<kPairs<T>, Coded,
                       std::conditional_t<kIntegers && std::is_same_v<T, int8_t>, Raised, T>>;
// The type that inputs of type T are multiplied as: rounded groups, unchanged pairs, or widened.
template <class T, class W>
using Factor = std::conditional_t<
    kRoundsInputs<W>, Rounded,
    std::conditional_t<kPairs<T> && !std::is_same_v<W, int8_t>, Pair, float>>;
template <class X>
constexpr int64_t kInputs = std::is_same_v<X, Rounded> ? kGroup : std::is_same_v<X, Pair> ? 2 : 1;

// Multiplication steps for a row of X, including the zeros after its last input.
template <class X, class W>
int64_t steps_of(int64_t inputs) {
  const int64_t padded = kIsCoded<W> ? units_of(inputs) * kUnitInputs : inputs;
  return (padded + kInputs<X> - 1) / kInputs<X>;
}

template <class W>
const W *strip_at(const W *packed, int64_t p, int64_t inputs) {
  if constexpr (kIsCoded<W>)
    return packed + reinterpret_cast<const int64_t *>(packed)[p];
  else if constexpr (kRoundsInputs<W>)
    return packed + p * groups_of(inputs) * kGroupBytes<W>;
  else
    return packed + p * inputs * kStrip;
}

// Whether sums go from registers directly to the outputs.
template <class W>
constexpr bool kIsDirect = kIsCoded<W> || (kQuadProducts && kRoundsInputs<W>);

// The reader of a strip: a pointer, unless it is coded.
template <class W>
std::enable_if_t<!kIsCoded<W>, const W *> reader_of(const W *strip) {
  return strip;
}

// Adds ROWS rows times one panel to sum, whose rows are SUM apart, or with NEW overwrites it.
// Element k of row r is x[k * K + r * R], or with K = 0 x[k * ROWS + r * R]: rows interleaved as
// [inputs, ROWS]. Consecutive inputs of the panel are STEP elements apart. Neither this nor
// multiply_row is inlined: surrounding code would change their register allocation.
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

// Adds up to ROWS interleaved rows times `steps` steps of a strip to sums [rows, kStrip].
template <int ROWS, class X, class W>
void multiply_strip(int64_t rows, const X *x, int64_t steps, const W *strip, float *sums) {
  for (int64_t j = 0; j < kStrip; j += kPanel<float>)
    multiply<ROWS, 0, 1, kStrip, kStrip>(rows, x, steps, strip + j, sums + j);
}

// One row times a strip. Every element is summed in the same order as above.
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

// x [rows, stride], `inputs` of each → tile [inputs, rows], for at most kRows rows. Writes up to
// one vector past the end.
template <class T>
void fill_tile(const T *x, int64_t stride, int64_t inputs, int64_t rows, float *tile) {
  constexpr int64_t kLanes = ::kLanes<float>;
  int64_t k = 0;
  for (; rows > 2 && k + kLanes <= inputs; k += kLanes) {
    Vec<float> square[kLanes] = {};
    for (int64_t r = 0; r < rows; ++r) square[r] = load_wide(x + r * stride + k);
    transpose<float>(square);
    for (int64_t i = 0; i < kLanes; ++i) store(square[i], tile + (k + i) * rows);
  }
  for (; k < inputs; ++k)
    for (int64_t r = 0; r < rows; ++r) tile[k * rows + r] = widen(x[r * stride + k]);
}

inline void fill_row(const float *x, int64_t inputs, float *row) {
  std::copy(x, x + inputs, row);
}
template <class T>
void fill_row(const T *x, int64_t inputs, float *row) {
  for (int64_t k = 0; k < inputs; ++k) row[k] = widen(x[k]);
}

// For 8-bit weights, whose widening costs too much to be repeated for every tile of rows.
inline void widen_strip(const int8_t *strip, int64_t inputs, float *widened) {
  constexpr int64_t kLanes = ::kLanes<float>, kPanel = 2 * kLanes;
  for (int64_t i = 0; i < inputs * kStrip; i += kPanel) {
    Vec<float> left, right;
    load_two(strip + i, left, right);
    __builtin_prefetch(strip + i + 24 * kPanel);
    store(left, widened + i);
    store(right, widened + i + kLanes);
  }
}

// Adds up to kTile interleaved rows times a piece of a strip to their sums.
template <class W, class X, class Reader, class T>
void add_piece(int64_t rows, const X *x, int64_t steps, const Reader &weights,
               const Sums<T> &sums) {
  if constexpr (kIsDirect<W>) {
    multiply_strip<kTile<W>>(rows, x, steps, weights, sums);
    if (sums.direct()) return;
  } else {
    if (sums.first) std::fill(sums.kept, sums.kept + rows * kStrip, 0.0f);
    multiply_strip<kTile<W>>(rows, x, steps, weights, sums.kept);
  }
  if (sums.last) sums.outputs.finish(sums.strip, sums.row, rows, sums.kept);
}

// One row. Every thread widens it itself, which takes less time than waiting for another thread.
template <class T, class W>
void linear_row(Team &team, const T *x, const W *packed, int64_t inputs,
                const Outputs<T> &outputs) {
  typedef Factor<T, W> X;
  const int64_t steps = steps_of<X, W>(inputs);
  team.each([&](int64_t thread) {
    const std::unique_ptr<X[]> wide(new X[steps]{});
    fill_row(x, inputs, wide.get());
    alignas(64) float kept[kStrip];
    team.of_share(outputs.strips(), thread, [&](int64_t p) {
      const W *strip = strip_at(packed, p, inputs);
      if constexpr (kIsDirect<W> || kRoundsInputs<W>) {
        add_piece<W>(1, wide.get(), steps, reader_of(strip),
                     Sums<T>{outputs, p, 0, true, true, kept});
      } else {
        if constexpr (kStrip == kPanel<float>)
          multiply_tile<1, 1, 0, kStrip, kStrip, true>(wide.get(), steps, strip, kept);
        else
          multiply_row(wide.get(), steps, strip, kept);
        outputs.finish(p, 0, 1, kept);
      }
    });
  });
}

constexpr int64_t kChunk = 4 * kRows;  // rows per pass over the weights, at most

// Rows x [rows, inputs] of T in the form that weights of W are multiplied with: consecutive tiles
// of nearly equal size, each [steps, rows of the tile], so that it is read as one stream.
template <class T, class W>
class Tiles {
 public:
  typedef Factor<T, W> X;

  Tiles(const T *x, int64_t rows, int64_t inputs)
      : x_(x),
        rows_(rows),
        inputs_(inputs),
        count_((rows + kRows - 1) / kRows),
        tile_rows_((rows + count_ - 1) / count_),
        steps_(steps_of<X, W>(inputs)) {}

  int64_t tile_rows() const { return tile_rows_; }  // of all tiles but the last
  int64_t steps() const { return steps_; }
  std::unique_ptr<X[]> room() const { return std::unique_ptr<X[]>(new X[count_ * size()]); }

  void fill(Team &team, X *to) const {
    // Inputs per task: rounding takes long enough to be split between threads.
    const int64_t part = kRoundsInputs<W> ? kGroup : inputs_, parts = (inputs_ + part - 1) / part;
    team.share(count_ * parts, [&](int64_t i) {
      const int64_t row = i / parts * tile_rows_, count = std::min(tile_rows_, rows_ - row);
      const int64_t first = i % parts * part, last = std::min(first + part, inputs_);
      X *tile = to + place(row);
      fill_tile(x_ + row * inputs_ + first, inputs_, last - first, count,
                tile + first / kInputs<X> * count);
      if (last == inputs_)
        std::fill(tile + steps_of<X, T>(inputs_) * count, tile + steps_ * count, X{});
    });
  }

  // Offset of the tile that begins with `row`.
  int64_t place(int64_t row) const { return row / tile_rows_ * size(); }

 private:
  int64_t size() const { return kRows * steps_ + kLanes<float>; }  // fill_tile writes past the end

  const T *x_;
  const int64_t rows_, inputs_, count_, tile_rows_, steps_;
};

// Several rows; the threads share the strips.
template <class T, class W>
void linear_rows(Team &team, const T *x, const W *packed, int64_t rows, int64_t inputs,
                 const Outputs<T> &outputs) {
  typedef Factor<T, W> X;
  constexpr int64_t kStep = kRoundsInputs<W> ? kGroupBytes<W> : kInputs<X> * kStrip;
  // Steps processed for all tiles before the next ones: weights that fit the first-level cache, or
  // the second, which is fast enough where they have to be unpacked.
  constexpr int64_t kDepth = kIsCoded<W> ? 768 : kPiece / kStep / int64_t(sizeof(W));
  constexpr int64_t kWidened = std::is_same_v<W, int8_t> ? 64 : 0;  // widened once for all tiles
  const Tiles<T, W> tiles(x, rows, inputs);
  const int64_t steps = tiles.steps(), tile_rows = tiles.tile_rows();
  const int64_t chunk_size = kChunk / kRows * tile_rows;
  // For few rows each thread fills tiles of its own: shared ones would have to come from another
  // thread's cache.
  const bool apart = rows <= kChunk;
  const std::unique_ptr<X[]> shared = apart ? nullptr : tiles.room();
  if (!apart) tiles.fill(team, shared.get());
  team.each([&](int64_t thread) {
    const std::unique_ptr<X[]> own = apart ? tiles.room() : nullptr;
    Team alone;
    if (apart) tiles.fill(alone, own.get());
    const X *wide = apart ? own.get() : shared.get();
    alignas(64) float kept[kChunk * kStrip];
    alignas(64) float widened[kWidened * kStep + 1];
    for (int64_t chunk = 0; chunk < rows; chunk += chunk_size) {
      const int64_t chunk_rows = std::min(chunk_size, rows - chunk);
      // Adds `depth` steps of strip p, from the k-th on, to the sums of all rows of the chunk.
      const auto add = [&](int64_t p, const auto &weights, int64_t k, int64_t depth) {
        for (int64_t m = 0; m < chunk_rows; m += tile_rows) {
          const int64_t count = std::min(tile_rows, chunk_rows - m);
          const X *tile = wide + tiles.place(chunk + m) + k * count;
          add_piece<W>(count, tile, depth, weights,
                       Sums<T>{outputs, p, chunk + m, k == 0, k + depth == steps,
                               kept + m * kStrip});
        }
      };
      team.of_share(outputs.strips(), thread, [&](int64_t p) {
        const W *strip = strip_at(packed, p, inputs);
        const bool shares = kWidened && chunk_rows > tile_rows;
        const int64_t step = shares ? kWidened : kDepth;
        auto weights = reader_of(strip);
        for (int64_t k = 0; k < steps; k += step, weights += step * kStep) {
          const int64_t depth = std::min(step, steps - k);
          if constexpr (kWidened > 0)
            if (shares) {
              widen_strip(weights, depth, widened);
              add(p, widened, k, depth);
              continue;
            }
          add(p, weights, k, depth);
        }
      });
    }
  });
}

// Calls act(team, first, count, thread) for all rows with the whole team; or, where there are
// enough rows, for some at a time with each thread alone. What one part of `act` leaves for the
// next, kChunk rows at most, then stays in the thread's own cache.
template <class Act>
void by_rows(Team &team, int64_t rows, const Act &act) {
  const int64_t each = team.size() * kChunk;
  if (rows <= kChunk || rows < each) return act(team, int64_t(0), rows, int64_t(0));
  const int64_t chunks = (rows + each - 1) / each * team.size();
  const int64_t size = (rows + chunks - 1) / chunks;
  std::atomic<int64_t> taken(0);
  team.each([&](int64_t thread) {
    Team alone;
    for (int64_t first; (first = size * taken.fetch_add(1)) < rows;)
      act(alone, first, std::min(size, rows - first), thread);
  });
}

template <class T, class W>
void linear(Team &team, const T *x, const W *packed, int64_t rows, int64_t inputs,
            const Outputs<T> &outputs) {
  if (rows == 0) return;
  if (rows == 1) return linear_row(team, x, packed, inputs, outputs);
  by_rows(team, rows, [&](Team &own, int64_t first, int64_t count, int64_t) {
    linear_rows(own, x + first * inputs, packed, count, inputs, outputs.from(first));
  });
}

extern "C" struct LinearArguments {
  const void *packed;
  const float *scale;  // of 8-bit weights, or null
  const float *bias;   // or null
  int64_t inputs, outputs;
  int64_t bits;  // per weight: 4, 8, or 0 where they are of the inputs' type
  int64_t gated, activation;  // as in Outputs
};

template <class T>
void linear(Team &team, const LinearArguments &a, const T *x, T *y, int64_t rows) {
  const Outputs<T> outputs{a.scale, a.bias, y, a.outputs, a.gated != 0, a.activation};
  const auto by = [&](auto *packed) { linear(team, x, packed, rows, a.inputs, outputs); };
  const auto by_form = [&](auto *packed) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(packed)>> W;
    if constexpr (!std::is_same_v<W, int8_t>)  // those are widened from the first-level cache
      if (rows <= kReading) return by(reinterpret_cast<const Once<W> *>(packed));
    by(packed);
  };
  if constexpr (kIntegers)
    if (a.bits == 4) return by_form(static_cast<const Nibbles *>(a.packed));
  if (a.bits == 8)
    by_form(static_cast<const Packed<int8_t> *>(a.packed));
  else
    by_form(static_cast<const Packed<T> *>(a.packed));
}

}  // namespace
