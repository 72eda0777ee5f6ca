// A lossless code for bfloat16 weights, of 12 bits each, for processors that multiply bfloat16:
// with few rows, these wait for memory.
//
// The upper byte of a weight is its sign and most of its exponent. Weights of a strip are so
// similar in size that 16 upper bytes cover nearly all of them: a weight's code, of four bits, says
// which of these it has. Any other upper byte is in a list of the strip's exceptions.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "outputs.hpp"

namespace {

// Packed: [strips] offsets in bytes, int64; then strips, which start on cache lines: a head, the
// exceptions and, from the next line on, units.
struct Coded {
  uint8_t byte;
};

template <class W>
constexpr bool kIsCoded = std::is_same_v<W, Coded> || std::is_same_v<W, Once<Coded>>;

// Weights that are coded together, in their uncoded order: two vectors of lower bytes, one of
// codes.
constexpr int64_t kUnit = 2 * kVectorBytes, kUnitBytes = 3 * kVectorBytes;
constexpr int64_t kUnitInputs = kUnit / kStrip;

inline int64_t units_of(int64_t inputs) { return (inputs + kUnitInputs - 1) / kUnitInputs; }

#if defined(__AVX512BF16__)

struct Head {
  uint8_t upper[16];
  int64_t units;  // bytes from the strip's start to its units
};
// A weight whose upper byte has no code. A strip's list ends with one whose unit is -1.
struct Exception {
  int32_t unit;
  uint8_t place, upper;  // place: index of the weight's byte within the unit
};

// The most frequent upper bytes of a strip's weights; their indices here are the codes.
struct Uppers {
  static constexpr int kCodes = 16;

  Uppers() = default;
  // From `count` weights, plus so many zeros.
  Uppers(const bf16 *weights, int64_t count, int64_t zeros) : exceptions(count + zeros) {
    // Weights are similar: with a single table, each count would wait for the one before.
    constexpr int kTables = 4;
    int32_t counts[kTables][256] = {};
    int64_t order[256];
    int64_t i = 0;
    for (; i + kTables <= count; i += kTables)
      for (int t = 0; t < kTables; ++t) ++counts[t][weights[i + t].bits >> 8];
    for (; i < count; ++i) ++counts[0][weights[i].bits >> 8];
    counts[0][0] += int32_t(zeros);
    for (int64_t i = 0; i < 256; ++i) {
      order[i] = i;
      for (int t = 1; t < kTables; ++t) counts[0][i] += counts[t][i];
    }
    std::partial_sort(order, order + kCodes, order + 256, [&](int64_t a, int64_t b) {
      return counts[0][a] != counts[0][b] ? counts[0][a] > counts[0][b] : a < b;
    });
    for (int i = 0; i < kCodes; ++i) {
      upper[i] = uint8_t(order[i]);
      exceptions -= counts[0][order[i]];
    }
  }

  uint8_t upper[kCodes];
  int64_t exceptions;
};

inline int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Bytes of a strip before its units.
inline int64_t before_units(int64_t exceptions) {
  return whole_lines(int64_t(sizeof(Head)) + (exceptions + 1) * int64_t(sizeof(Exception)));
}

// weights: of one strip, uncoded.
inline void code_strip(const bf16 *weights, const Uppers &uppers, int64_t units, Coded *strip) {
  auto *head = reinterpret_cast<Head *>(strip);
  auto *exception = reinterpret_cast<Exception *>(head + 1);
  std::copy(uppers.upper, uppers.upper + Uppers::kCodes, head->upper);
  head->units = before_units(uppers.exceptions);
  uint8_t *unit = reinterpret_cast<uint8_t *>(strip) + head->units;
  for (int64_t u = 0; u < units; ++u, unit += kUnitBytes) {
    __m512i codes[2];
    for (int half = 0; half < 2; ++half, weights += kUnit / 2) {
      // In the order that `Units` interleaves.
      const __m512i first = _mm512_loadu_si512(weights);
      const __m512i second = _mm512_loadu_si512(weights + kUnit / 4);
      const __m512i low = _mm512_set1_epi16(255);
      const __m512i upper =
          _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
      _mm512_storeu_si512(unit + half * kVectorBytes,
                          _mm512_packus_epi16(first & low, second & low));
      codes[half] = _mm512_setzero_si512();
      uint64_t left = ~uint64_t(0);
      for (int c = 0; c < Uppers::kCodes; ++c) {
        const __mmask64 has = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(char(head->upper[c])));
        codes[half] = _mm512_mask_mov_epi8(codes[half], has, _mm512_set1_epi8(char(c)));
        left &= ~has;
      }
      alignas(kLine) uint8_t bytes[kVectorBytes];
      if (left) _mm512_store_si512(bytes, upper);
      for (; left; left &= left - 1) {
        const int place = __builtin_ctzll(left);
        *exception++ = {int32_t(u), uint8_t(half * kVectorBytes + place), bytes[place]};
      }
    }
    _mm512_storeu_si512(unit + kUnit, codes[0] | _mm512_slli_epi16(codes[1], 4));
  }
  *exception = {-1, 0, 0};
}

// Strip p of weight [outputs, inputs], uncoded: pairs of inputs, [steps, kStrip, 2].
inline void pair_strip(const bf16 *weight, int64_t p, int64_t outputs, int64_t inputs,
                       bf16 *strip) {
  constexpr int64_t kHalf = kStrip / 2;
  static_assert(kStrip == kPanel<float>);
  for (int64_t first = p * kStrip; first < (p + 1) * kStrip; first += kHalf, strip += kStrip) {
    const int64_t count = std::clamp<int64_t>(outputs - first, 0, kHalf);
    pair_columns([&](int64_t n) { return weight + (first + n) * inputs; }, count, inputs, strip);
  }
}

// Like that of packing.hpp, but coded.
inline int64_t pack(Team &team, const bf16 *weight, Coded *packed, int64_t outputs,
                    int64_t inputs) {
  const int64_t strips = strips_of(outputs), units = units_of(inputs);
  const std::unique_ptr<Uppers[]> uppers(new Uppers[strips]);
  team.share(strips, [&](int64_t p) {
    const int64_t count = std::min<int64_t>(kStrip, outputs - p * kStrip) * inputs;
    uppers[p] = Uppers(weight + p * kStrip * inputs, count, units * kUnit - count);
  });
  const std::unique_ptr<int64_t[]> offsets(new int64_t[strips + 1]);
  offsets[0] = whole_lines(strips * int64_t(sizeof(int64_t)));
  for (int64_t p = 0; p < strips; ++p)
    offsets[p + 1] = offsets[p] + before_units(uppers[p].exceptions) + units * kUnitBytes;
  if (packed) {
    std::memcpy(packed, offsets.get(), strips * sizeof(int64_t));
    team.each([&](int64_t thread) {
      const std::unique_ptr<bf16[]> weights(new bf16[units * kUnit]());  // zeros at the end
      team.of_share(strips, thread, [&](int64_t p) {
        pair_strip(weight, p, outputs, inputs, weights.get());
        code_strip(weights.get(), uppers[p], units, packed + offsets[p]);
      });
    });
  }
  return offsets[strips];
}

// Reads a strip unit by unit, from the first on.
template <class W>
class Units {
 public:
  explicit Units(const W *strip)
      : uppers_(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)strip))),
        unit_(strip + reinterpret_cast<const Head *>(strip)->units),
        exception_(reinterpret_cast<const Exception *>(strip + sizeof(Head))) {}

  // The next unit's weights: pairs for the first half of the columns, then for the second, of two
  // steps. FETCH: also prefetches the weights that are kPiece bytes ahead.
  template <bool FETCH>
  [[gnu::always_inline]] void next(__m512i (&weights)[4]) {
    const __m512i half = _mm512_set1_epi8(15), codes = bytes_at(unit_ + kUnit);
    const __m512i others = _mm512_srli_epi16(codes, 4);
    __m512i first = _mm512_shuffle_epi8(uppers_, _mm512_and_si512(codes, half));
    __m512i second = _mm512_shuffle_epi8(uppers_, _mm512_and_si512(others, half));
    if (__builtin_expect(exception_->unit == number_, 0)) {
      uint8_t upper[kUnit];
      std::memcpy(upper, &first, kVectorBytes);
      std::memcpy(upper + kVectorBytes, &second, kVectorBytes);
      for (; exception_->unit == number_; ++exception_)
        upper[exception_->place] = exception_->upper;
      std::memcpy(&first, upper, kVectorBytes);
      std::memcpy(&second, upper + kVectorBytes, kVectorBytes);
    }
    const __m512i lower = bytes_at(unit_), more = bytes_at(unit_ + kVectorBytes);
    weights[0] = _mm512_unpacklo_epi8(lower, first);
    weights[1] = _mm512_unpackhi_epi8(lower, first);
    weights[2] = _mm512_unpacklo_epi8(more, second);
    weights[3] = _mm512_unpackhi_epi8(more, second);
    if constexpr (FETCH)
      for (int i = 0; i < kUnitBytes; i += kLine) __builtin_prefetch(unit_ + kPiece + i, 0, 2);
    unit_ += kUnitBytes;
    ++number_;
  }

  // Skips so many weights, a whole number of units.
  void operator+=(int64_t weights) {
    unit_ += weights / kUnit * kUnitBytes;
    number_ += int32_t(weights / kUnit);
    while (exception_->unit >= 0 && exception_->unit < number_) ++exception_;
  }

 private:
  __m512i uppers_;  // repeated four times
  const W *unit_;
  const Exception *exception_;
  int32_t number_ = 0;
};

template <class W>
std::enable_if_t<kIsCoded<W>, Units<W>> reader_of(const W *strip) {
  return Units<W>(strip);
}

// Up to this many rows, weights are multiplied as fast as memory delivers them.
constexpr int kWaiting = kRows / 3;

// Adds ROWS rows times a piece of a strip to their sums, in the order of multiply_tile. Element k
// of row r is x[k * ROWS + r].
template <int ROWS, class W, class T>
[[gnu::noinline]] void multiply_units(const Pair *x, int64_t steps, Units<W> units,
                                      const Sums<T> &sums) {
  Vec<float> left_sum[ROWS], right_sum[ROWS];
  sums.begin(0, left_sum);
  sums.begin(kLanes<float>, right_sum);
  for (; steps > 0; steps -= 2) {
    __m512i weights[4];
    units.template next<(ROWS > kWaiting)>(weights);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2, x += ROWS)
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        left_sum[r] = plus_pairs(left_sum[r], weights[i], x[r]);
        right_sum[r] = plus_pairs(right_sum[r], weights[i + 1], x[r]);
      }
  }
  sums.end(left_sum, right_sum);
}

// Like that of linear.hpp.
template <int ROWS, class W, class T>
void multiply_strip(int64_t rows, const Pair *x, int64_t steps, const Units<W> &strip,
                    const Sums<T> &sums) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_strip<ROWS - 1>(rows, x, steps, strip, sums);
  multiply_units<ROWS>(x, steps, strip, sums);
}

#endif

}  // namespace
