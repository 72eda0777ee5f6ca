// Products of unconverted bfloat16, two at a time, where the processor supports that.

#pragma once

#include <cstdint>

#include "weights.hpp"

namespace {

// Two inputs of a row side by side, the first in the lower half.
struct [[gnu::may_alias]] Pair {
  uint32_t bits;
};

#if defined(__AVX512BF16__)

template <class T>
constexpr bool kPairs = std::is_same_v<T, bf16>;

// `first` followed by `second`, rounded as by `narrow`, except that subnormals become 0.
inline __m512i narrowed(Vec<float> first, Vec<float> second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
template <class To>
void store_narrowed(Vec<float> first, Vec<float> second, To *to) {
  _mm512_storeu_si512(to, narrowed(first, second));
}

// sum + a · b over the pairs in each lane, in float32. Subnormals count as zero.
inline Vec<float> plus_pairs(Vec<float> sum, __m512i weights, Pair x) {
  const __m512i both = _mm512_set1_epi32(int(x.bits));
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)both);
}

// 2^x to a relative error of 3e-6, for results rounded to bfloat16: a polynomial on [-1/2, 1/2]
// times a power of two. 0 where it would be subnormal; NaN stays NaN.
inline Vec<float> coarse_power_of_2(Vec<float> x) {
  const Vec<float> n = (Vec<float>)_mm512_roundscale_ps((__m512)x, 0);
  const Vec<float> r = x - n;
  Vec<float> p = r * 0.00956051f + 0.05591704f;
  p = p * r + 0.24024981f;
  p = p * r + 0.69312197f;
  p = p * r + 0.99999917f;
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return (Vec<float>)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
}

// At most kLanes rows, row(0) and following, of `inputs` each, become columns of a panel [steps,
// kPanel, 2]; past the last row and the last input it is zero.
template <class Row>
void pair_columns(Row row, int64_t count, int64_t inputs, bf16 *to) {
  constexpr int64_t kLanes = ::kLanes<float>, kPanel = ::kPanel<float>;
  int64_t k = 0;
  for (; k + 2 * kLanes <= inputs; k += 2 * kLanes) {
    Vec<float> rows[kLanes] = {};  // of pairs
    const auto load_row = [&](int n) { std::memcpy(&rows[n], row(n) + k, sizeof(rows[n])); };
    if (count == kLanes)
      for (int n = 0; n < kLanes; ++n) load_row(n);
    else
      for (int n = 0; n < count; ++n) load_row(n);
    transpose<float>(rows);
    for (int i = 0; i < kLanes; ++i)
      std::memcpy(to + (k + 2 * i) * kPanel, &rows[i], sizeof(rows[i]));
  }
  for (; k < inputs; k += 2)
    for (int n = 0; n < kLanes; ++n)
      for (int i = 0; i < 2; ++i)
        to[k * kPanel + 2 * n + i] = n < count && k + i < inputs ? row(n)[k + i] : bf16{};
}

// The weights of one step: pairs for the first half of a panel's columns, and for the second.
inline void load_pairs(const bf16 *weights, __m512i &left, __m512i &right) {
  left = _mm512_loadu_si512(weights);
  right = _mm512_loadu_si512(weights + 2 * kLanes<float>);
}

// Like the functions of the same names in linear.hpp, with pairs as inputs.
template <int ROWS, int K, int R, int SUM, int STEP, bool NEW, class W>
[[gnu::noinline]] void multiply_tile(const Pair *x, int64_t steps, const W *panel, float *sum) {
  constexpr int kLanes = ::kLanes<float>, pair_step = K ? K : ROWS;
  Vec<float> left_sum[ROWS], right_sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    left_sum[r] = NEW ? Vec<float>{} : load(sum + r * SUM);
    right_sum[r] = NEW ? Vec<float>{} : load(sum + r * SUM + kLanes);
  }
  for (int64_t k = 0; k < steps; ++k) {
    __m512i left, right;
    load_pairs(panel + k * 2 * STEP, left, right);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      left_sum[r] = plus_pairs(left_sum[r], left, x[k * pair_step + r * R]);
      right_sum[r] = plus_pairs(right_sum[r], right, x[k * pair_step + r * R]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    store(left_sum[r], sum + r * SUM);
    store(right_sum[r], sum + r * SUM + kLanes);
  }
}

template <int ROWS, int K, int R, int SUM, int STEP, bool NEW = false, class W>
void multiply(int64_t rows, const Pair *x, int64_t steps, const W *panel, float *sum) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply<ROWS - 1, K, R, SUM, STEP, NEW>(rows, x, steps, panel, sum);
  multiply_tile<ROWS, K, R, SUM, STEP, NEW>(x, steps, panel, sum);
}

// x [inputs] → pairs [steps].
inline void fill_row(const bf16 *x, int64_t inputs, Pair *row) {
  if (inputs % 2) row[inputs / 2].bits = 0;
  std::memcpy(row, x, inputs * sizeof(bf16));
}

// x [rows, stride], `inputs` of each → tile [steps, rows], for at most kRows rows. Writes up to one
// vector past the end.
inline void fill_tile(const bf16 *x, int64_t stride, int64_t inputs, int64_t rows, Pair *tile) {
  constexpr int64_t kLanes = ::kLanes<float>;
  int64_t k = 0;
  for (; rows > 2 && 2 * (k + kLanes) <= inputs; k += kLanes) {
    Vec<float> square[kLanes] = {};
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(&square[r], x + r * stride + 2 * k, sizeof(square[r]));
    transpose<float>(square);
    for (int64_t i = 0; i < kLanes; ++i)
      std::memcpy(tile + (k + i) * rows, &square[i], sizeof(square[i]));
  }
  for (; 2 * k < inputs; ++k)
    for (int64_t r = 0; r < rows; ++r)
      fill_row(x + r * stride + 2 * k, std::min<int64_t>(2, inputs - 2 * k), tile + k * rows + r);
}

#else

template <class T>
constexpr bool kPairs = false;

#endif

}  // namespace
