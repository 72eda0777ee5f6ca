// Layouts for many queries: a chunk's keys become columns of panels, its values rows of panels.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../linear.hpp"

namespace {

// Keys one coordinate at a time, widened. S: the type they are stored in.
template <class Real, class S>
struct WidenedKeys {
  typedef Real Factor, Number;  // element types of queries and of panels
  static constexpr int64_t kInputs = 1;
  static constexpr int kLanes = ::kLanes<Real>, kPanel = ::kPanel<Real>;

  // The part of the scale that queries are multiplied by; scores take the rest.
  static Real scale_of_query(double scale) { return Real(scale); }

  // rows [queries, dim] → tile [dim, queries].
  static void fill_queries(const Real *rows, int64_t dim, int64_t queries, Real *tile) {
    for (int64_t r = 0; r < queries; ++r)
      for (int64_t d = 0; d < dim; ++d) tile[d * queries + r] = rows[r * dim + d];
  }

  // At most kLanes keys, key(0) and following, become columns of a panel [dim, kPanel]; columns
  // past the last key are zero, as they must not be NaN.
  template <class Key>
  static void fill_columns(Key key, int64_t count, int64_t dim, Real *to) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Vec<Real> rows[kLanes] = {};
      if (count == kLanes)
        for (int n = 0; n < kLanes; ++n) rows[n] = load_wide(key(n) + d);
      else
        for (int n = 0; n < count; ++n) rows[n] = load_wide(key(n) + d);
      transpose<Real>(rows);
      for (int i = 0; i < kLanes; ++i) store(rows[i], to + (d + i) * kPanel);
    }
    for (; d < dim; ++d)
      for (int n = 0; n < kLanes; ++n)
        to[d * kPanel + n] = n < count ? Real(widen(key(n)[d])) : Real(0);
  }
};

// Values one key at a time, widened.
template <class Real, class S>
struct WidenedValues {
  typedef Real Factor, Number;  // element types of weights and of panels
  static constexpr int64_t kInputs = 1;
  static constexpr int kLanes = ::kLanes<Real>, kPanel = ::kPanel<Real>;

  // value(n) becomes row n of panels [.., kPanel], which are `panel` elements apart.
  template <class Value>
  static void fill_rows(Value value, int64_t n, int64_t, int64_t dim, int64_t panel, Real *to) {
    const S *from = value(n);
    to += n * kPanel;
    for (int64_t d = 0; d < dim; d += kPanel, to += panel) {
      const int64_t columns = std::min<int64_t>(kPanel, dim - d);
      if (columns == kPanel) {
        store(load_wide(from + d), to);
        store(load_wide(from + d + kLanes), to + kLanes);
      } else {
        for (int64_t j = 0; j < columns; ++j) to[j] = widen(from[d + j]);
      }
    }
  }

  static Vec<Real> exponentials(Real *x, int64_t count, Real base) {
    return ::exponentials(x, count, base);
  }
};

#if defined(__AVX512BF16__)

// Two coordinates at a time, in bfloat16 as stored. Products are exact, as above, and so are
// queries, since these are scaled only by a power of two.
struct PairedKeys {
  typedef Pair Factor;
  typedef bf16 Number;
  static constexpr int64_t kInputs = 2;
  static constexpr int kLanes = ::kLanes<float>, kPanel = ::kPanel<float>;

  static float scale_of_query(double scale) {
    int exponent;
    std::frexp(scale, &exponent);
    return std::ldexp(1.0f, exponent - 1);
  }

  // As above, to [steps, queries]. Writes up to one vector past the end.
  static void fill_queries(const float *rows, int64_t dim, int64_t queries, Pair *tile) {
    bf16 part[kRows * kPanel];
    for (int64_t d = 0; d < dim; d += kPanel, tile += kLanes * queries) {
      const int64_t columns = std::min<int64_t>(kPanel, dim - d);
      for (int64_t r = 0; r < queries; ++r) {
        const float *from = rows + r * dim + d;
        bf16 *to = part + r * kPanel;
        if (columns == kPanel)
          store_narrowed(load(from), load(from + kLanes), to);
        else
          for (int64_t j = 0; j < columns; ++j) narrow(from[j], to + j);
      }
      fill_tile(part, kPanel, columns, queries, tile);
    }
  }

  // As above, to [steps, kPanel, 2].
  template <class Key>
  static void fill_columns(Key key, int64_t count, int64_t dim, bf16 *to) {
    pair_columns(key, count, dim, to);
  }
};

// Two keys at a time. The total is that of the rounded weights: where one key has all the weight,
// its rounding cancels out.
struct PairedValues {
  typedef Pair Factor;
  typedef bf16 Number;
  static constexpr int64_t kInputs = 2;
  static constexpr int kLanes = ::kLanes<float>, kPanel = ::kPanel<float>;

  // value(n) and value(n + 1) become pairs. An odd last one is duplicated: its second weight is 0.
  template <class Value>
  static void fill_rows(Value value, int64_t n, int64_t count, int64_t dim, int64_t panel,
                        bf16 *to) {
    const bf16 *first = value(n), *second = n + 1 < count ? value(n + 1) : first;
    to += n * kPanel;
    int64_t d = 0;
    for (; d + kPanel <= dim; d += kPanel, to += panel) {
      const Words a = (Words)_mm512_loadu_si512(first + d);
      const Words b = (Words)_mm512_loadu_si512(second + d);
      const auto each = std::make_integer_sequence<int, kPanel>();
      _mm512_storeu_si512(to, (__m512i)side_by_side<0>(a, b, each));
      _mm512_storeu_si512(to + kPanel, (__m512i)side_by_side<kLanes>(a, b, each));
    }
    for (int64_t j = 0; d + j < dim; ++j) {
      to[2 * j] = first[d + j];
      to[2 * j + 1] = second[d + j];
    }
  }

  // Computes e^(x - base), to a relative error of 1e-5, and stores it as bfloat16 from the start of
  // x on; returns the sum of these, lane by lane.
  static Vec<float> exponentials(float *x, int64_t count, float base) {
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    Vec<float> sum{};
    const auto power = [&](const float *at) {
      return coarse_power_of_2(load(at) * kLog2E - base * kLog2E);
    };
    for (int64_t n = 0; n < count; n += 2 * kLanes) {
      const Vec<float> first = power(x + n);
      const Vec<float> second = n + kLanes < count ? power(x + n + kLanes) : Vec<float>{};
      const __m512i both = narrowed(first, second);
      _mm512_storeu_si512(x + n / 2, both);
      sum = (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)both, (__m512bh)ones);
    }
    return sum;
  }

 private:
  typedef uint16_t Words __attribute__((vector_size(64)));

  // Interleaves half of a's elements, from number FIRST on, with b's.
  template <int FIRST, int... I>
  static Words side_by_side(Words a, Words b, std::integer_sequence<int, I...>) {
    const Words order = {uint16_t(FIRST + I / 2 + I % 2 * kPanel)...};
    return __builtin_shuffle(a, b, order);
  }
};

#endif

}  // namespace
