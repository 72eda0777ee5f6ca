// How the weights of linear layers are packed, once.

#pragma once

#include <cstdint>

#include "pairs.hpp"
#include "../team.hpp"

namespace {

// Strip p of weight [outputs, inputs], as [inputs, kStrip]; columns past the last output are zero.
// A panel's columns are in the order that load_two expects.
template <class T>
void pack_strip(const T *weight, int64_t p, int64_t outputs, int64_t inputs, T *strip) {
  constexpr int64_t kPanel = ::kPanel<float>;
  for (int64_t k = 0; k < inputs; ++k)
    for (int64_t j = 0; j < kStrip; ++j) {
      const int64_t n = p * kStrip + j;
      const int64_t place = j / kPanel * kPanel + place_of_lane<T>(j % kPanel);
      strip[k * kStrip + place] = n < outputs ? weight[n * inputs + k] : T{};
    }
}

// packed: [strips, inputs, kStrip], or null. Returns its size in bytes.
template <class T>
int64_t pack(Team &team, const T *weight, T *packed, int64_t outputs, int64_t inputs) {
  const int64_t strips = strips_of(outputs), size = inputs * kStrip;
  team.share(packed ? strips : 0, [&](int64_t p) {
    pack_strip(weight, p, outputs, inputs, packed + p * size);
  });
  return strips * size * int64_t(sizeof(T));
}

}  // namespace
