// How a linear layer's sums become its outputs.

#pragma once

#include <algorithm>
#include <cstdint>

#include "packing.hpp"

namespace {

// What is applied to a linear layer's outputs.
enum Activation : int64_t { kNoActivation, kSilu, kGelu, kGeluTanh, kRelu };

// e^x, with the precision that values stored as T need.
template <class T>
inline Vec<float> exponential_for(Vec<float> x) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) return coarse_power_of_2(x * kLog2E);
#endif
  Vec<float> y;
#pragma omp simd
  for (int i = 0; i < kLanes<float>; ++i) y[i] = exponential(x[i]);
  return y;
}

template <class T>
inline Vec<float> silu(Vec<float> x) {
  return x / (1.0f + exponential_for<T>(-x));
}

// x times the standard normal distribution function. Its tail above |x| is, to 1e-7, a polynomial
// times e^(-x^2 / 2) (Abramowitz and Stegun, 7.1.26).
template <class T>
inline Vec<float> gelu(Vec<float> x) {
  const Vec<float> z = (x < 0 ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  Vec<float> p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vec<float> above = 0.5f * p * t * exponential_for<T>(-z * z);
  return x * (x < 0 ? above : 1.0f - above);
}

// The same with the tanh approximation: 1 + tanh(u) = 2 / (1 + e^(-2u)).
template <class T>
inline Vec<float> gelu_tanh(Vec<float> x) {
  const Vec<float> u = x * (x * x * 0.044715f + 1.0f) * 0.79788456f, v = -2.0f * u;
  return x / (1.0f + exponential_for<T>(v > 80 ? Vec<float>{} + 80.0f : v));
}

template <class T>
inline Vec<float> activated(Vec<float> x, int64_t activation) {
  switch (activation) {
    case kSilu:
      return silu<T>(x);
    case kGelu:
      return gelu<T>(x);
    case kGeluTanh:
      return gelu_tanh<T>(x);
    case kRelu:
      return x < 0 ? Vec<float>{} : x;
  }
  return x;
}

// One vector, converted to the type of `to`.
inline void store_as(Vec<float> x, float *to) { store(x, to); }
inline void store_as(Vec<float> x, bf16 *to) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
#pragma omp simd
  for (int i = 0; i < kLanes<float>; ++i) narrow(x[i], to + i);
#endif
}
inline void store_two_as(Vec<float> left, Vec<float> right, float *to) {
  store(left, to);
  store(right, to + kLanes<float>);
}
inline void store_two_as(Vec<float> left, Vec<float> right, bf16 *to) {
#if defined(__AVX512BF16__)
  store_narrowed(left, right, to);
#else
  store_as(left, to);
  store_as(right, to + kLanes<float>);
#endif
}

// y: sums times each output's scale, plus its bias, where there are any; then activated. Gated: the
// first half of a strip are gates, which are activated and multiplied by the second half.
template <class T>
struct Outputs {
  const float *scale, *bias;  // [strips, kStrip] of a gated layer, [width] of others; or null
  T *y;                       // [rows, width]
  int64_t width;
  bool gated;
  int64_t activation;

  int64_t of_strip() const { return gated ? kStrip / 2 : kStrip; }
  int64_t strips() const { return (width + of_strip() - 1) / of_strip(); }
  bool whole(int64_t strip) const { return (strip + 1) * of_strip() <= width; }
  // Whether outputs are the sums, but for scale and bias.
  bool plain() const { return !gated && activation == kNoActivation; }
  Outputs from(int64_t row) const {
    Outputs later = *this;
    later.y += row * width;
    return later;
  }
  T *place(int64_t strip, int64_t row) const { return y + row * width + strip * of_strip(); }

  // Stores a strip for rows from `first` on: whole and plain, and two vectors wide.
  template <int ROWS>
  void put(int64_t strip, int64_t first, const Vec<float> (&left)[ROWS],
           const Vec<float> (&right)[ROWS]) const {
    const int64_t column = strip * kStrip, middle = column + kLanes<float>, step = width;
    T *to = place(strip, first);
    if (!scale && !bias) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) store_two_as(left[r], right[r], to + r * step);
      return;
    }
    const Vec<float> one = Vec<float>{} + 1.0f;
    const Vec<float> left_scale = scale ? load(scale + column) : one;
    const Vec<float> right_scale = scale ? load(scale + middle) : one;
    const Vec<float> left_bias = bias ? load(bias + column) : Vec<float>{};
    const Vec<float> right_bias = bias ? load(bias + middle) : Vec<float>{};
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      store_two_as(plus_product(left_bias, left[r], left_scale),
                   plus_product(right_bias, right[r], right_scale), to + r * step);
  }

  // Stores any strip for rows from `first` on: sums [rows, kStrip], which are overwritten.
  void finish(int64_t strip, int64_t first, int64_t rows, float *sums) const {
    const int64_t columns = std::min(of_strip(), width - strip * of_strip());
    for (int64_t r = first; r < first + rows; ++r, sums += kStrip) {
      scale_row(strip, sums);
      if (!plain()) activate_row(sums);
      T *to = place(strip, r);
      if (columns == of_strip())
        for (int64_t j = 0; j < columns; j += kLanes<float>) store_as(load(sums + j), to + j);
      else
        for (int64_t j = 0; j < columns; ++j) narrow(sums[j], to + j);
    }
  }

 private:
  void scale_row(int64_t strip, float *sums) const {
    const int64_t column = strip * kStrip;
    const int64_t count = gated ? kStrip : std::min<int64_t>(kStrip, width - column);
    if (scale && bias)  // rounded as in `put`
      for (int64_t j = 0; j < count; ++j)
        sums[j] = plus_product(bias[column + j], sums[j], scale[column + j]);
    else if (scale)
      for (int64_t j = 0; j < count; ++j) sums[j] *= scale[column + j];
    else if (bias)
      for (int64_t j = 0; j < count; ++j) sums[j] += bias[column + j];
  }

  void activate_row(float *sums) const {
    for (int64_t j = 0; j < of_strip(); j += kLanes<float>) {
      const Vec<float> y = activated<T>(load(sums + j), activation);
      store(gated ? y * load(sums + kStrip / 2 + j) : y, sums + j);
    }
  }
};

// Sums of some rows for a strip, whose weights come piece by piece.
template <class T>
struct Sums {
  const Outputs<T> &outputs;
  int64_t strip, row;  // the first of the rows
  bool first, last;    // whether the piece is the first, the last one
  float *kept;         // between pieces: [rows, kStrip]

  // Whether sums go from registers directly to the outputs.
  bool direct() const { return last && outputs.whole(strip) && outputs.plain(); }

  template <int ROWS>
  void begin(int64_t column, Vec<float> (&sum)[ROWS]) const {
    const bool zero = first;
    const float *from = kept + column;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sum[r] = zero ? Vec<float>{} : load(from + r * kStrip);
  }
  template <int ROWS>
  void keep(int64_t column, const Vec<float> (&sum)[ROWS]) const {
    float *to = kept + column;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) store(sum[r], to + r * kStrip);
  }
  template <int ROWS>
  void end(const Vec<float> (&left)[ROWS], const Vec<float> (&right)[ROWS]) const {
    if (direct()) return outputs.put(strip, row, left, right);
    keep(0, left);
    keep(kLanes<float>, right);
  }
};

}  // namespace
