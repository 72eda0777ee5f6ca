// Products of 8-bit weights with inputs that are rounded to 8 bits as well, four at a time, where
// the processor has that. They are whole numbers, so their sums are exact.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "outputs.hpp"

namespace {

// An 8-bit weight, plus 128.
struct Raised {
  uint8_t number;
};
constexpr int32_t kRaise = 128;
template <class W>
constexpr bool kIsRaised = std::is_same_v<W, Raised> || std::is_same_v<W, Once<Raised>>;

// Inputs of a row that are rounded together, with a scale of their own.
constexpr int64_t kGroup = 32;
inline int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

// A group of one row.
struct Rounded {
  static constexpr int kQuads = kGroup / 4;
  int32_t quads[kQuads];  // numbers, four to a word
  int32_t gain;           // what raised weights add to their products, negative
  float scale;
};

#if defined(__AVX512VNNI__)

constexpr bool kIntegers = true;

// packed [strips, inputs / 4, kStrip, 4], whole groups of inputs; or null to ask how many bytes
// it takes.
inline int64_t pack(Team &team, const int8_t *weight, Raised *packed, int64_t outputs,
                    int64_t inputs) {
  const int64_t strips = strips_of(outputs), padded = groups_of(inputs) * kGroup;
  team.share(packed ? strips : 0, [&](int64_t p) {
    Raised *to = packed + p * padded * kStrip;
    for (int64_t k = 0; k < padded; k += 4)
      for (int64_t n = p * kStrip; n < (p + 1) * kStrip; ++n, to += 4) {
        const int8_t *from = weight + n * inputs + k;
        uint32_t quad = 0;
        if (n < outputs && k + 4 <= inputs)
          std::memcpy(&quad, from, 4);
        else if (n < outputs && k < inputs)
          std::memcpy(&quad, from, inputs - k);
        quad ^= 0x80808080;  // each of the four plus kRaise
        std::memcpy(to, &quad, 4);
      }
  });
  return strips * padded * kStrip;
}

// In equal steps, the largest at ±127, to the bit as cache/rounding.py does it. What is not finite
// gets a scale that is not. x: kGroup numbers.
template <class T>
void round_group(const T *x, Rounded &group) {
  const Vec<float> left = load_wide(x), right = load_wide(x + kLanes<float>);
  // Bits of magnitudes are ordered as these are, and NaN comes last.
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const int32_t most = _mm512_reduce_max_epi32(
      _mm512_max_epi32((__m512i)left & magnitude, (__m512i)right & magnitude));
  float largest;
  std::memcpy(&largest, &most, 4);
  if (largest < 1e-30f) largest = 1e-30f;
  const float steps = 127.0f / largest;
  const __m512i wide = _mm512_cvtps_epi32((__m512)(left * steps));
  const __m512i more = _mm512_cvtps_epi32((__m512)(right * steps));
  _mm_storeu_si128((__m128i *)group.quads, _mm512_cvtepi32_epi8(wide));
  _mm_storeu_si128((__m128i *)group.quads + 1, _mm512_cvtepi32_epi8(more));
  // Unsigned: of what is not finite it may be too large, and does not matter.
  const uint32_t sum = uint32_t(_mm512_reduce_add_epi32(_mm512_add_epi32(wide, more)));
  group.gain = int32_t(0u - uint32_t(kRaise) * sum);
  group.scale = largest * (1.0f / 127.0f);
}

// x [rows, stride], `inputs` of each → tile [groups, rows].
template <class T>
void fill_tile(const T *x, int64_t stride, int64_t inputs, int64_t rows, Rounded *tile) {
  for (int64_t k = 0; k < inputs; k += kGroup)
    for (int64_t r = 0; r < rows; ++r, ++tile) {
      const T *group = x + r * stride + k;
      if (inputs - k >= kGroup) {
        round_group(group, *tile);
      } else {
        T last[kGroup] = {};
        std::copy(group, group + inputs - k, last);
        round_group(last, *tile);
      }
    }
}
template <class T>
void fill_row(const T *x, int64_t inputs, Rounded *row) {
  fill_tile(x, inputs, inputs, 1, row);
}

// Adds ROWS rows times a piece of a strip to their sums, of VECTORS vectors of columns from number
// FIRST on.
template <int ROWS, int FIRST, int VECTORS, class W, class T>
[[gnu::noinline]] void multiply_groups(const Rounded *x, int64_t groups, const W *strip,
                                       const Sums<T> &sums) {
  constexpr int kLanes = ::kLanes<float>;
  strip += FIRST * kVectorBytes;
  Vec<float> sum[VECTORS][ROWS];
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; ++v) sums.begin((FIRST + v) * kLanes, sum[v]);
  for (; groups > 0; --groups, x += ROWS) {
    __m512i whole[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) whole[r][v] = _mm512_set1_epi32(x[r].gain);
#pragma GCC unroll 8
    for (int i = 0; i < Rounded::kQuads; ++i, strip += 4 * kStrip) {
      __m512i weights[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) weights[v] = bytes_at(strip + v * kVectorBytes);
      if constexpr (VECTORS == 1) __builtin_prefetch(strip + kPiece, 0, 2);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const __m512i quad = _mm512_set1_epi32(x[r].quads[i]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v)
          whole[r][v] = _mm512_dpbusd_epi32(whole[r][v], weights[v], quad);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        sum[v][r] = plus_product(sum[v][r], (Vec<float>)_mm512_cvtepi32_ps(whole[r][v]),
                                 Vec<float>{} + x[r].scale);
  }
  if constexpr (VECTORS == 2) {
    sums.end(sum[0], sum[1]);
  } else if constexpr (FIRST == 1) {
    if (!sums.direct()) return sums.keep(kLanes, sum[0]);
    Vec<float> left[ROWS];
    for (int r = 0; r < ROWS; ++r) left[r] = load(sums.kept + r * kStrip);
    sums.end(left, sum[0]);
  } else {
    sums.keep(0, sum[0]);
  }
}

// Rows whose sums of both vectors of columns fit into registers.
constexpr int kBoth = 6;

// As that of linear.hpp.
template <int ROWS, class W, class T>
void multiply_strip(int64_t rows, const Rounded *x, int64_t groups, const W *strip,
                    const Sums<T> &sums) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_strip<ROWS - 1>(rows, x, groups, strip, sums);
  if constexpr (ROWS <= kBoth) {
    multiply_groups<ROWS, 0, 2>(x, groups, strip, sums);
  } else {
    multiply_groups<ROWS, 0, 1>(x, groups, strip, sums);
    multiply_groups<ROWS, 1, 1>(x, groups, strip, sums);
  }
}

#else

constexpr bool kIntegers = false;

#endif

}  // namespace
