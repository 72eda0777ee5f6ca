// What is computed of a single row between matrices and attention.

#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.hpp"

namespace {

// RMSNorm, or LayerNorm where rows are centred.
extern "C" struct NormArguments {
  const void *weight, *bias;  // [width]; a bias may be null
  int64_t centred;
};

// The sum of of(x) over all elements of a row.
template <class T, class Of>
inline float sum_over(const T *x, int64_t width, const Of &of) {
  constexpr int64_t kLanes = ::kLanes<float>, kSums = 4;  // a single sum would wait for itself
  Vec<float> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes)
    for (int64_t n = 0; n < kSums; ++n) sums[n] += of(load_wide(x + i + n * kLanes));
  for (; i + kLanes <= width; i += kLanes) sums[0] += of(load_wide(x + i));
  const Vec<float> lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0.0f;
  for (int64_t n = 0; n < kLanes; ++n) sum += lanes[n];
  for (; i < width; ++i) sum += of(widen(x[i]));
  return sum;
}

// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, where the mean is taken as 0 if
// rows are not centred; x and y may be the same.
template <class T>
inline void norm_row(const NormArguments &norm, const T *x, T *y, int64_t width, float eps) {
  const T *weight = static_cast<const T *>(norm.weight), *bias = static_cast<const T *>(norm.bias);
  const float mean =
      norm.centred ? sum_over(x, width, [](auto some) { return some; }) / float(width) : 0.0f;
  const auto square = [mean](auto some) { return (some - mean) * (some - mean); };
  const float scale = 1.0f / std::sqrt(sum_over(x, width, square) / float(width) + eps);
  int64_t i = 0;
  for (; i + kLanes<float> <= width; i += kLanes<float>) {
    Vec<float> scaled = (load_wide(x + i) - mean) * scale * load_wide(weight + i);
    if (bias) scaled += load_wide(bias + i);
    store_as(scaled, y + i);
  }
  for (; i < width; ++i) {
    const float scaled = (widen(x[i]) - mean) * scale * widen(weight[i]);
    narrow(bias ? scaled + widen(bias[i]) : scaled, y + i);
  }
}
// Writes one token's keys, or values, to the cache. scales: those of all tokens, or null.
template <class T>
inline void store_token(const T *from, const void *cache, const float *scales, int64_t slot,
                        int64_t heads, int64_t dim) {
  void *stored = const_cast<void *>(cache);
  if (!scales) {
    std::copy(from, from + heads * dim, static_cast<T *>(stored) + slot * heads * dim);
    return;
  }
  for (int64_t h = 0; h < heads; ++h)
    round_numbers(from + h * dim, static_cast<int8_t *>(stored) + (slot * heads + h) * dim,
                const_cast<float *>(scales) + slot * heads + h, dim);
}

// Writes one row's keys and values to their slot of the cache.
template <class T>
void store_row(const AttendArguments &to, const T *key, const T *value, int64_t slot) {
  store_token(key, to.keys, to.key_scales, slot, to.kv_heads, to.head_dim);
  store_token(value, to.values, to.value_scales, slot, to.kv_heads, to.head_dim);
}

// y = x + d; x and y may be the same.
template <class T>
inline void add_row(const T *x, const T *d, T *y, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes<float> <= width; i += kLanes<float>)
    store_as(load_wide(x + i) + load_wide(d + i), y + i);
  for (; i < width; ++i) narrow(widen(x[i]) + widen(d[i]), y + i);
}

// y = activation(x), times `up` unless that is null.
template <class T>
inline void activate_row(const T *x, const T *up, T *y, int64_t width, int64_t activation) {
  for (int64_t i = 0; i < width; i += kLanes<float>) {
    const int64_t count = std::min<int64_t>(kLanes<float>, width - i);
    alignas(64) float some[kLanes<float>] = {};
    for (int64_t j = 0; j < count; ++j) some[j] = widen(x[i + j]);
    store(activated<T>(load(some), activation), some);
    for (int64_t j = 0; j < count; ++j)
      narrow(up ? some[j] * widen(up[i + j]) : some[j], y + i + j);
  }
}

}  // namespace
