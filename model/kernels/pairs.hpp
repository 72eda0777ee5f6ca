// Products of bfloat16 as they are, two at a time, where the processor has that.

#pragma once

#include <cstdint>

#include "vectors.hpp"

namespace {

// Two inputs of a row side by side, the first in the lower half.
struct Pair {
  uint32_t bits;
};

#if defined(__AVX512BF16__)

template <class T>
constexpr bool kPairs = std::is_same_v<T, bf16>;

// sum + a · b of the pairs in each lane, in float32. Numbers too small for float32's exponent
// count as zero.
inline Vec<float> plus_pairs(Vec<float> sum, const bf16 *weights, Pair x) {
  const __m512i right = _mm512_set1_epi32(int(x.bits));
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weights),
                                      (__m512bh)right);
}

// As the functions of linear.hpp that have the same names, with pairs for inputs.
template <int ROWS, int SUM>
[[gnu::noinline]] void multiply_tile(const Pair *x, int64_t steps, const bf16 *panel, float *sum) {
  constexpr int kLanes = ::kLanes<float>, kStep = 4 * kLanes, kAhead = 12;
  Vec<float> left_sum[ROWS], right_sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    left_sum[r] = load(sum + r * SUM);
    right_sum[r] = load(sum + r * SUM + kLanes);
  }
  for (int64_t k = 0; k < steps; ++k) {
    const bf16 *weights = panel + k * kStep;
    __builtin_prefetch(weights + kAhead * kStep);
    __builtin_prefetch(weights + kAhead * kStep + 2 * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      left_sum[r] = plus_pairs(left_sum[r], weights, x[k * ROWS + r]);
      right_sum[r] = plus_pairs(right_sum[r], weights + 2 * kLanes, x[k * ROWS + r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    store(left_sum[r], sum + r * SUM);
    store(right_sum[r], sum + r * SUM + kLanes);
  }
}

template <int ROWS, int K, int R, int SUM>
void multiply(int64_t rows, const Pair *x, int64_t steps, const bf16 *panel, float *sum) {
  static_assert(K == 0 && R == 1, "rows of pairs lie side by side");
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply<ROWS - 1, K, R, SUM>(rows, x, steps, panel, sum);
  multiply_tile<ROWS, SUM>(x, steps, panel, sum);
}

template <int PANELS>
[[gnu::noinline]] void multiply_row(const Pair *x, int64_t steps, const bf16 *panels, float *sum) {
  constexpr int kLanes = ::kLanes<float>, kStep = 4 * kLanes, kAhead = 12;
  Vec<float> left_sum[PANELS] = {}, right_sum[PANELS] = {};
  for (int64_t k = 0; k < steps; ++k)
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
      const bf16 *weights = panels + (p * steps + k) * kStep;
      __builtin_prefetch(weights + kAhead * kStep);
      __builtin_prefetch(weights + kAhead * kStep + 2 * kLanes);
      left_sum[p] = plus_pairs(left_sum[p], weights, x[k]);
      right_sum[p] = plus_pairs(right_sum[p], weights + 2 * kLanes, x[k]);
    }
  for (int p = 0; p < PANELS; ++p) {
    store(left_sum[p], sum + p * 2 * kLanes);
    store(right_sum[p], sum + p * 2 * kLanes + kLanes);
  }
}

// x [inputs] → pairs [steps].
inline void fill_row(const bf16 *x, int64_t inputs, Pair *row) {
  if (inputs % 2) row[inputs / 2].bits = 0;
  std::memcpy(row, x, inputs * sizeof(bf16));
}

// x [rows, inputs] → tile [steps, rows], of at most kRows rows. Writes up to a vector more.
inline void fill_tile(const bf16 *x, int64_t inputs, int64_t rows, Pair *tile) {
  constexpr int64_t kLanes = ::kLanes<float>;
  int64_t k = 0;
  for (; rows > 2 && 2 * (k + kLanes) <= inputs; k += kLanes) {
    Vec<float> square[kLanes] = {};
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(&square[r], x + r * inputs + 2 * k, sizeof(square[r]));
    transpose<float>(square);
    for (int64_t i = 0; i < kLanes; ++i)
      std::memcpy(tile + (k + i) * rows, &square[i], sizeof(square[i]));
  }
  for (; 2 * k < inputs; ++k)
    for (int64_t r = 0; r < rows; ++r)
      fill_row(x + r * inputs + 2 * k, std::min<int64_t>(2, inputs - 2 * k), tile + k * rows + r);
}

#else

template <class T>
constexpr bool kPairs = false;

#endif

}  // namespace
