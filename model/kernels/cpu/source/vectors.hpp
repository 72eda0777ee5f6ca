// Vectors of numbers, their storage types, and what every kernel does with them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRows = 12;
#else
constexpr int kVectorBytes = 32, kRows = 6;
#endif

template <class Real>
constexpr int kLanes = kVectorBytes / int(sizeof(Real));
// Output columns that one pass over the rows produces.
template <class Real>
constexpr int kPanel = 2 * kLanes<Real>;

template <class Real>
struct VecOf {
  typedef Real type __attribute__((vector_size(kVectorBytes), aligned(sizeof(Real))));
};
template <class Real>
using Vec = typename VecOf<Real>::type;
typedef uint32_t VecBits __attribute__((vector_size(kVectorBytes), aligned(4)));

struct bf16 {
  uint16_t bits;
};

// The type that stored elements are computed in.
template <class T>
struct RealOf {
  typedef T type;
};
template <>
struct RealOf<bf16> {
  typedef float type;
};
template <>
struct RealOf<int8_t> {
  typedef float type;
};

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void narrow(double x, double *y) { *y = x; }
inline void narrow(float x, float *y) { *y = x; }
inline void narrow(float x, bf16 *y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1);
  y->bits = nan ? 0x7fc0 : uint16_t(bits >> 16);
}

template <class Real>
inline Vec<Real> load(const Real *x) {
  return *reinterpret_cast<const Vec<Real> *>(x);
}
template <class Real>
inline void store(Vec<Real> x, Real *y) {
  *reinterpret_cast<Vec<Real> *>(y) = x;
}

// sum + a * b as one operation, where compilers would otherwise add several products first, or
// round the product in one place and not in another.
inline float plus_product(float sum, float a, float b) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, sum);
#else
  return sum + a * b;
#endif
}
inline Vec<double> plus_product(Vec<double> sum, Vec<double> a, Vec<double> b) {
  return sum + a * b;
}
inline Vec<float> plus_product(Vec<float> sum, Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

// One vector of stored elements, widened.
inline Vec<double> load_wide(const double *x) { return load(x); }
inline Vec<float> load_wide(const float *x) { return load(x); }
// Intrinsics, here and below: compilers need more instructions for generic conversions.
inline Vec<float> load_wide(const bf16 *x) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)),
                                       16);
#else
  Vec<float> y;
  for (int i = 0; i < kLanes<float>; ++i) y[i] = widen(x[i]);
  return y;
#endif
}
inline Vec<float> load_wide(const int8_t *x) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#else
  Vec<float> y;
  for (int i = 0; i < kLanes<float>; ++i) y[i] = x[i];
  return y;
#endif
}

// Two adjacent vectors of stored elements, widened. For bfloat16 the first gets the elements at
// even indices and the second those at odd ones: widening is then one operation each.
template <class S>
inline void load_two(const S *x, Vec<typename RealOf<S>::type> &a,
                     Vec<typename RealOf<S>::type> &b) {
  a = load_wide(x);
  b = load_wide(x + kLanes<typename RealOf<S>::type>);
}
inline void load_two(const bf16 *x, Vec<float> &a, Vec<float> &b) {
  const VecBits words = *reinterpret_cast<const VecBits *>(x);
  a = (Vec<float>)(words << 16);
  b = (Vec<float>)(words & 0xffff0000u);
}
// The index, across both vectors, of the element that load_two puts into lane i.
template <class S>
inline int64_t place_of_lane(int64_t i) {
  constexpr int64_t lanes = kLanes<float>;
  if constexpr (!std::is_same_v<S, bf16>) return i;
  return i < lanes ? 2 * i : 2 * (i - lanes) + 1;
}

// Lane i of row j becomes lane j of row i, by swapping ever smaller blocks off the diagonal.
// The lanes are a parameter pack so that the orders are constants, one instruction each.
template <int STEP, class Real, int... LANE>
inline void swap_blocks(Vec<Real> *rows, std::integer_sequence<int, LANE...> lanes) {
  constexpr int kLanes = sizeof...(LANE);
  typedef decltype(rows[0] < rows[0]) Order;
  const Order upper = {(LANE & STEP ? kLanes + LANE - STEP : LANE)...};
  const Order lower = {(LANE & STEP ? kLanes + LANE : LANE + STEP)...};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & STEP)) {
      const Vec<Real> a = rows[i], b = rows[i + STEP];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + STEP] = __builtin_shuffle(a, b, lower);
    }
  if constexpr (STEP > 1) swap_blocks<STEP / 2, Real>(rows, lanes);
}
template <class Real>
inline void transpose(Vec<Real> *rows) {
  swap_blocks<kLanes<Real> / 2, Real>(rows, std::make_integer_sequence<int, kLanes<Real>>());
}

// Lane i becomes the sum of row i's lanes: like transposing, but adding the blocks that meet.
template <int STEP, class Real, int... LANE>
inline Vec<Real> sum_blocks(Vec<Real> *rows, std::integer_sequence<int, LANE...> lanes) {
  constexpr int kLanes = sizeof...(LANE);
  typedef decltype(rows[0] < rows[0]) Order;
  const Order upper = {(LANE & STEP ? kLanes + LANE - STEP : LANE)...};
  const Order lower = {(LANE & STEP ? kLanes + LANE : LANE + STEP)...};
#pragma GCC unroll 16
  for (int i = 0; i < STEP; ++i) {
    const Vec<Real> a = rows[i], b = rows[i + STEP];
    rows[i] = __builtin_shuffle(a, b, upper) + __builtin_shuffle(a, b, lower);
  }
  if constexpr (STEP > 1) return sum_blocks<STEP / 2, Real>(rows, lanes);
  return rows[0];
}
template <class Real>
inline Vec<Real> sum_rows(Vec<Real> *rows) {
  return sum_blocks<kLanes<Real> / 2, Real>(rows,
                                            std::make_integer_sequence<int, kLanes<Real>>());
}

// Lane i becomes what is STEP lanes after it, or 0.
template <int STEP, class Real, int... LANE>
inline Vec<Real> later_lanes(Vec<Real> x, std::integer_sequence<int, LANE...>) {
  typedef decltype(x < x) Order;
  const Order later = {(LANE + STEP)...};
  return __builtin_shuffle(x, Vec<Real>{}, later);
}
template <class Real>
inline Vec<Real> next_lane(Vec<Real> x) {
  return later_lanes<1, Real>(x, std::make_integer_sequence<int, kLanes<Real>>());
}
// Lane i becomes the sum of itself and all lanes after it.
template <class Real, int STEP = 1>
inline Vec<Real> sum_later(Vec<Real> x) {
  x += later_lanes<STEP, Real>(x, std::make_integer_sequence<int, kLanes<Real>>());
  if constexpr (2 * STEP < kLanes<Real>) return sum_later<Real, 2 * STEP>(x);
  return x;
}

// Every lane becomes the maximum of all lanes.
template <int STEP, class Real, int... LANE>
inline Vec<Real> largest_lanes(Vec<Real> x, std::integer_sequence<int, LANE...> lanes) {
  typedef decltype(x < x) Order;
  const Order others = {(LANE ^ STEP)...};
  const Vec<Real> other = __builtin_shuffle(x, others);
  const Vec<Real> larger = other > x ? other : x;
  if constexpr (STEP > 1) return largest_lanes<STEP / 2, Real>(larger, lanes);
  return larger;
}
template <class Real>
inline Real largest_lane(Vec<Real> x) {
  return largest_lanes<kLanes<Real> / 2, Real>(
      x, std::make_integer_sequence<int, kLanes<Real>>())[0];
}

constexpr float kLog2E = 1.44269504f;

inline double exponential(double x) { return std::exp(x); }

// e^x to about two units in the last place, in a form that compilers vectorise: 2^n times a
// polynomial (Cephes' coefficients) on [-ln 2 / 2, ln 2 / 2]. 0 where it would be subnormal.
inline float exponential(float given) {
  const float x = std::min(std::max(given, -87.0f), 88.0f);
  const float n = std::nearbyint(x * kLog2E);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return given < -87.0f ? 0.0f : p * power;  // written so that NaN stays NaN
}

// x becomes e^(x - base), in whole vectors; returns the sum, lane by lane.
template <class Real>
inline Vec<Real> exponentials(Real *x, int64_t count, Real base) {
  Vec<Real> sum{};
  for (int64_t n = 0; n < count; n += kLanes<Real>) {
#pragma omp simd
    for (int i = 0; i < kLanes<Real>; ++i) x[n + i] = exponential(x[n + i] - base);
    sum += load(x + n);
  }
  return sum;
}

// cap · tanh(x / cap).
template <class Real>
inline Real soft_capped(Real x, Real cap) {
  return cap - 2 * cap / (1 + exponential(x * (2 / cap)));
}

// x in 8 bits: equal steps, the largest magnitude at ±127. cache/kv.py defines it, and both
// give the same bits.
template <class T>
inline void round_numbers(const T *x, int8_t *numbers, float *scale, int64_t count) {
  int32_t most = 0;  // of the magnitudes' bits: ordered like the magnitudes, NaN last
#pragma omp simd reduction(max : most)
  for (int64_t d = 0; d < count; ++d) {
    const float value = widen(x[d]);
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest;
  std::memcpy(&largest, &most, 4);
  if (largest < 1e-30f) largest = 1e-30f;
  const float steps = 127.0f / largest;
#pragma omp simd
  for (int64_t d = 0; d < count; ++d)
    numbers[d] = int8_t(int32_t(std::nearbyint(widen(x[d]) * steps)));
  *scale = largest * (1.0f / 127.0f);
}

// Rotates the pairs of the first 2 * half coordinates of one head; may be in place. way: 1, or -1
// for the opposite angle.
template <bool INTERLEAVED, class From, class To, class Real>
inline void rotate_pairs(const From *from, To *to, const Real *cosine, const Real *sine, Real way,
                 int64_t half) {
  constexpr int64_t step = INTERLEAVED ? 2 : 1;
  const int64_t partner = INTERLEAVED ? 1 : half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const Real a = widen(from[i * step]), b = widen(from[i * step + partner]);
    narrow(a * cosine[i] - b * (way * sine[i]), to + i * step);
    narrow(b * cosine[i] + a * (way * sine[i]), to + i * step + partner);
  }
}

}  // namespace
