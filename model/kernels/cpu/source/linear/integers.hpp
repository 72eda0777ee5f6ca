// Products of 8- or 4-bit weights and inputs that are rounded to 8 bits, four at a time, where the
// processor supports that. They are integers, so their sums are exact.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "outputs.hpp"

namespace {

// Whether an instruction sums four products, of unsigned weights; otherwise it sums two.
#if defined(__AVX512VNNI__)
constexpr bool kQuadProducts = true;
#else
constexpr bool kQuadProducts = false;
#endif
#if defined(__AVX2__) && defined(__F16C__)
constexpr bool kIntegers = true;
#else
constexpr bool kIntegers = false;
#endif

// An 8-bit weight plus kRaise.
struct Raised {
  uint8_t number;
};
constexpr int32_t kRaise = kQuadProducts ? 128 : 0;
template <class W>
constexpr bool kIsRaised = std::is_same_v<W, Raised> || std::is_same_v<W, Once<Raised>>;

// Two 4-bit weights of one input: the lower half is for the first vector of a strip's columns, the
// upper half for the second.
struct Nibbles {
  uint8_t byte;
};
template <class W>
constexpr bool kIsNibbles = std::is_same_v<W, Nibbles> || std::is_same_v<W, Once<Nibbles>>;
template <class W>
constexpr bool kRoundsInputs = kIsRaised<W> || kIsNibbles<W>;

// Inputs of a row that are rounded together, with one scale.
constexpr int64_t kGroup = 32;
inline int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

// A group of one row.
struct Rounded {
  static constexpr int kQuads = kGroup / 4;
  int32_t quads[kQuads];  // values, four to a word
  int32_t gain;           // minus what kRaise adds to the sum of products
  float scale;
  float total;  // the sum of the rounded inputs
};

// Bytes of a strip's weights per group of inputs. 4-bit weights follow a scale and a least weight
// for each column.
template <class W>
constexpr int64_t kGroupBytes =
    kIsNibbles<W> ? kStrip * (2 * int64_t(sizeof(uint16_t)) + kGroup / 2) : kStrip * kGroup;

// packed: [strips, inputs / 4, kStrip, 4], in whole groups of inputs, or null. Returns its size in
// bytes.
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
        quad ^= 0x01010101u * kRaise;  // added to each of the four
        std::memcpy(to, &quad, 4);
      }
  });
  return strips * padded * kStrip;
}

// numbers [outputs, inputs] from 0 to 15; scales and leasts, float16 [outputs, groups] → packed
// [strips, groups, kGroupBytes], or null. Returns its size in bytes.
inline int64_t pack(Team &team, const uint8_t *numbers, const uint16_t *scales,
                    const uint16_t *leasts, Nibbles *packed, int64_t outputs, int64_t inputs) {
  const int64_t strips = strips_of(outputs), groups = groups_of(inputs);
  team.share(packed ? strips : 0, [&](int64_t p) {
    const auto number = [&](int64_t column, int64_t k) {
      const int64_t n = p * kStrip + column;
      return n < outputs && k < inputs ? numbers[n * inputs + k] : uint8_t(0);
    };
    uint8_t *to = reinterpret_cast<uint8_t *>(packed) + p * groups * kGroupBytes<Nibbles>;
    for (int64_t g = 0; g < groups; ++g) {
      for (const uint16_t *each : {scales, leasts})
        for (int64_t n = p * kStrip; n < (p + 1) * kStrip; ++n, to += sizeof(uint16_t)) {
          const uint16_t own = n < outputs ? each[n * groups + g] : 0;
          std::memcpy(to, &own, sizeof(own));
        }
      for (int64_t k = g * kGroup; k < (g + 1) * kGroup; k += 4)
        for (int64_t column = 0; column < kStrip / 2; ++column)
          for (int64_t i = k; i < k + 4; ++i)
            *to++ = uint8_t(number(column, i) | number(column + kStrip / 2, i) << 4);
    }
  });
  return strips * groups * kGroupBytes<Nibbles>;
}

#if defined(__AVX512VNNI__)

// Equal steps, with the largest magnitude at ±127, bit for bit like cache/kv.py. What is not
// finite gets a scale that is not finite. x: kGroup elements.
template <class T>
void round_group(const T *x, Rounded &group) {
  const Vec<float> left = load_wide(x), right = load_wide(x + kLanes<float>);
  // Magnitudes are ordered like their bits, and NaN comes last.
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
  // Unsigned: where inputs are not finite it may overflow, which does not matter.
  const uint32_t sum = uint32_t(_mm512_reduce_add_epi32(_mm512_add_epi32(wide, more)));
  group.gain = int32_t(0u - uint32_t(kRaise) * sum);
  group.scale = largest * (1.0f / 127.0f);
  group.total = float(int32_t(sum)) * group.scale;
}

// A group of a strip's weights: VECTORS vectors of columns, from vector FIRST on.
template <int FIRST, int VECTORS, class W>
class RaisedGroup {
 public:
  explicit RaisedGroup(const W *weights) : weights_(weights + FIRST * kVectorBytes) {}

  // Initial value of the integer sums.
  __m512i start(const Rounded &x) const { return _mm512_set1_epi32(x.gain); }
  // Weights for the i-th quad of inputs, in each column vector v.
  [[gnu::always_inline]] void load_quad(int i, __m512i (&to)[VECTORS]) const {
    const W *quad = weights_ + i * 4 * kStrip;
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) to[v] = bytes_at(quad + v * kVectorBytes);
    if constexpr (VECTORS == 1) __builtin_prefetch(quad + kPiece, 0, 2);
  }
  Vec<float> plus(Vec<float> sum, Vec<float> whole, int, const Rounded &x) const {
    return plus_product(sum, whole, Vec<float>{} + x.scale);
  }

 private:
  const W *weights_;
};

template <int FIRST, int VECTORS, class W>
class NibbleGroup {
 public:
  explicit NibbleGroup(const W *weights) : weights_(weights + 2 * kVectorBytes) {
    const __m512i scales = bytes_at(weights), leasts = bytes_at(weights + kVectorBytes);
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      scale_[v] = widened_half(scales, FIRST + v);
      least_[v] = widened_half(leasts, FIRST + v);
    }
    if constexpr (VECTORS == 1 && FIRST == 0) {
      __builtin_prefetch(weights + kPiece, 0, 2);
      __builtin_prefetch(weights + kPiece + kVectorBytes, 0, 2);
    }
  }

  __m512i start(const Rounded &) const { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] void load_quad(int i, __m512i (&to)[VECTORS]) const {
    const __m512i both = bytes_at(weights_ + i * kVectorBytes), half = _mm512_set1_epi8(15);
    if constexpr (FIRST == 0) to[0] = both & half;
    if constexpr (FIRST + VECTORS == 2) to[VECTORS - 1] = _mm512_srli_epi16(both, 4) & half;
    if constexpr (VECTORS == 1 && FIRST == 0)
      __builtin_prefetch(weights_ + kPiece + i * kVectorBytes, 0, 2);
  }
  Vec<float> plus(Vec<float> sum, Vec<float> whole, int v, const Rounded &x) const {
    sum = plus_product(sum, least_[v], Vec<float>{} + x.total);
    return plus_product(sum, whole, scale_[v] * x.scale);
  }

 private:
  // One half of the float16 values, widened.
  static Vec<float> widened_half(__m512i both, int half) {
    return (Vec<float>)_mm512_cvtph_ps(half ? _mm512_extracti64x4_epi64(both, 1)
                                            : _mm512_castsi512_si256(both));
  }

  const W *weights_;
  Vec<float> scale_[VECTORS], least_[VECTORS];
};

// Adds ROWS rows times a piece of a strip to their sums: VECTORS vectors of columns, from vector
// FIRST on.
template <int ROWS, int FIRST, int VECTORS, class W, class T>
[[gnu::noinline]] void multiply_groups(const Rounded *x, int64_t groups, const W *strip,
                                       const Sums<T> &sums) {
  typedef std::conditional_t<kIsNibbles<W>, NibbleGroup<FIRST, VECTORS, W>,
                             RaisedGroup<FIRST, VECTORS, W>>
      Group;
  constexpr int kLanes = ::kLanes<float>;
  Vec<float> sum[VECTORS][ROWS];
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; ++v) sums.begin((FIRST + v) * kLanes, sum[v]);
  for (; groups > 0; --groups, x += ROWS, strip += kGroupBytes<W>) {
    const Group group(strip);
    __m512i whole[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) whole[r][v] = group.start(x[r]);
#pragma GCC unroll 8
    for (int i = 0; i < Rounded::kQuads; ++i) {
      __m512i weights[VECTORS];
      group.load_quad(i, weights);
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
        sum[v][r] = group.plus(sum[v][r], (Vec<float>)_mm512_cvtepi32_ps(whole[r][v]), v, x[r]);
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

// At most so many rows have sums of both column vectors that fit into registers.
constexpr int kBoth = 6;

// Like that of linear.hpp.
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

#elif defined(__AVX2__) && defined(__F16C__)

// As above.
template <class T>
void round_group(const T *x, Rounded &group) {
  int8_t *numbers = reinterpret_cast<int8_t *>(group.quads);
  round_numbers(x, numbers, &group.scale, kGroup);
  int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < kGroup; ++k) sum += numbers[k];
  group.total = float(sum) * group.scale;
}

// 32 bytes of weights.
template <class W>
__m256i half_at(const W *weights) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights));
}
template <class W>
__m256i half_at(const Once<W> *weights) {
  return _mm256_stream_load_si256(reinterpret_cast<const __m256i *>(weights));
}

// A group of a strip's weights, eight columns at a time.
template <class W>
class RaisedEights {
 public:
  explicit RaisedEights(const W *weights) : weights_(weights) {}

  // Weights for the i-th quad of inputs, in the v-th eight columns.
  __m256i quad(int i, int v) const { return half_at(weights_ + i * 4 * kStrip + v * 32); }
  // Two products fit into 16 bits, as both factors are at most 127 in magnitude.
  static __m256i plus(__m256i whole, __m256i weights, __m256i quad) {
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(quad, weights));
    return _mm256_add_epi32(whole, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  __m256 add_to(__m256 sum, __m256i whole, int, const Rounded &x) const {
    return sum + _mm256_cvtepi32_ps(whole) * _mm256_set1_ps(x.scale);
  }

 private:
  const W *weights_;
};

template <class W>
class NibbleEights {
 public:
  explicit NibbleEights(const W *weights) : halves_(weights), weights_(weights + 4 * kStrip) {}

  __m256i quad(int i, int v) const {  // the first two eights of columns are lower halves
    const __m256i both = half_at(weights_ + i * 2 * kStrip + v % 2 * 32);
    return _mm256_and_si256(v < 2 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  }
  // 16 bits hold the sum of a whole group's products.
  static __m256i plus(__m256i whole, __m256i weights, __m256i quad) {
    return _mm256_add_epi16(whole, _mm256_maddubs_epi16(weights, quad));
  }
  __m256 add_to(__m256 sum, __m256i whole, int v, const Rounded &x) const {
    whole = _mm256_madd_epi16(whole, _mm256_set1_epi16(1));
    sum += widened(kStrip + v * 8) * _mm256_set1_ps(x.total);
    return sum + _mm256_cvtepi32_ps(whole) * (widened(v * 8) * _mm256_set1_ps(x.scale));
  }

 private:
  // Eight float16 values, widened: of scales or, after them, leasts.
  __m256 widened(int place) const {
    return _mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i *>(halves_ + 2 * place)));
  }

  const W *halves_, *weights_;
};

// Adds ROWS rows times a piece of a strip to sums [rows, kStrip]: VECTORS times 8 columns, from the
// eight with number FIRST on.
template <int ROWS, int FIRST, int VECTORS, class W>
[[gnu::noinline]] void multiply_groups(const Rounded *x, int64_t groups, const W *strip,
                                       float *sums) {
  typedef std::conditional_t<kIsNibbles<W>, NibbleEights<W>, RaisedEights<W>> Group;
  __m256 sum[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v)
      sum[r][v] = _mm256_loadu_ps(sums + r * kStrip + (FIRST + v) * 8);
  for (; groups > 0; --groups, x += ROWS, strip += kGroupBytes<W>) {
    const Group group(strip);
    if constexpr (ROWS > 1 && FIRST == 0)
      for (int i = 0; i < kGroupBytes<W>; i += kLine) __builtin_prefetch(strip + kPiece + i, 0, 2);
    __m256i whole[ROWS][VECTORS] = {};
#pragma GCC unroll 8
    for (int i = 0; i < Rounded::kQuads; ++i) {
      __m256i weights[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) weights[v] = group.quad(i, FIRST + v);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const __m256i quad = _mm256_set1_epi32(x[r].quads[i]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) whole[r][v] = Group::plus(whole[r][v], weights[v], quad);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        sum[r][v] = group.add_to(sum[r][v], whole[r][v], FIRST + v, x[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v)
      _mm256_storeu_ps(sums + r * kStrip + (FIRST + v) * 8, sum[r][v]);
}

// Like that of linear.hpp.
template <int ROWS, class W>
void multiply_strip(int64_t rows, const Rounded *x, int64_t groups, const W *strip, float *sums) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_strip<ROWS - 1>(rows, x, groups, strip, sums);
  if constexpr (ROWS == 1) {
    multiply_groups<ROWS, 0, 4>(x, groups, strip, sums);
  } else {
    multiply_groups<ROWS, 0, 1>(x, groups, strip, sums);
    multiply_groups<ROWS, 1, 1>(x, groups, strip, sums);
    multiply_groups<ROWS, 2, 1>(x, groups, strip, sums);
    multiply_groups<ROWS, 3, 1>(x, groups, strip, sums);
  }
}

#endif

#if defined(__AVX2__) && defined(__F16C__)

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

#endif

}  // namespace
