// How many queries meet the keys of a chunk, which lie as columns of panels.

#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.hpp"

namespace {

// Coordinate by coordinate, widened. S: of keys as they are stored.
template <class Real, class S>
struct WidenedKeys {
  typedef Real Factor, Number;  // what queries consist of, and what panels do
  static constexpr int64_t kInputs = 1;
  static constexpr int kLanes = ::kLanes<Real>, kPanel = ::kPanel<Real>;

  static Real scale_of_query(double scale) { return Real(scale); }
  static void scale_scores(double, int64_t, Real *) {}

  static void fill_query(const Real *row, int64_t dim, Real *query) {
    std::copy(row, row + dim, query);
  }

  // key(0) and on, kLanes at most, become columns of a panel [dim, kPanel]; past the last one is
  // zero, as it must not be NaN.
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

#if defined(__AVX512BF16__)

// Two coordinates at once, as they are stored: products are exact, as those above, so queries come
// as they are, too, and scores are scaled instead.
struct PairedKeys {
  typedef Pair Factor;
  typedef bf16 Number;
  static constexpr int64_t kInputs = 2;
  static constexpr int kLanes = ::kLanes<float>, kPanel = ::kPanel<float>;

  static float scale_of_query(double) { return 1; }
  static void scale_scores(double scale, int64_t count, float *scores) {
    for (int64_t n = 0; n < count; ++n) scores[n] *= float(scale);
  }

  static void fill_query(const float *row, int64_t dim, Pair *query) {
    for (int64_t d = 0; d < dim; d += 2) {
      bf16 pair[2] = {};
      narrow(row[d], pair);
      if (d + 1 < dim) narrow(row[d + 1], pair + 1);
      std::memcpy(query + d / 2, pair, sizeof(pair));
    }
  }

  // As above, to [steps, kPanel, 2].
  template <class Key>
  static void fill_columns(Key key, int64_t count, int64_t dim, bf16 *to) {
    int64_t d = 0;
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
      Vec<float> rows[kLanes] = {};  // of pairs
      for (int n = 0; n < count; ++n) std::memcpy(&rows[n], key(n) + d, sizeof(rows[n]));
      transpose<float>(rows);
      for (int i = 0; i < kLanes; ++i)
        std::memcpy(to + (d + 2 * i) * kPanel, &rows[i], sizeof(rows[i]));
    }
    for (; d < dim; d += 2)
      for (int n = 0; n < kLanes; ++n)
        for (int i = 0; i < 2; ++i)
          to[d * kPanel + 2 * n + i] = n < count && d + i < dim ? key(n)[d + i] : bf16{};
  }
};

#endif

}  // namespace
