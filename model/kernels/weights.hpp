// How the weights of linear layers lie in memory, and how they come from there.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.hpp"

namespace {

// Columns of a strip, which lie side by side: those of a panel, or of two where its vectors are so
// short that one row's sums would wait for each other. A row then reads one stream; from several
// at once memory gives up to a third less.
constexpr int kStrip = std::max(kPanel<float>, 32);
constexpr int kLine = 64;  // bytes that come from memory at once
// Bytes that all tiles of rows meet before those that follow. They stay in the first cache.
constexpr int kPiece = 16384;
// Rows that take weights as fast as memory gives them. It gives most to those that only read,
// all of a strip at once.
constexpr int kReading = kStrip == kPanel<float> ? 2 * kRows / 3 : 1;

inline int64_t strips_of(int64_t outputs) { return (outputs + kStrip - 1) / kStrip; }

// Where more rows take longer, the next piece is fetched meanwhile: STEP weights of it for each
// STEP that a tile is at. Attention's panels lie in a cache already; there it changes nothing.
template <int ROWS, int STEP, class W>
inline void fetch_ahead(const W *weights) {
  constexpr int kSize = int(sizeof(W)), kNext = kPiece / kSize;
  if constexpr (ROWS > kReading)
    for (int i = 0; i < STEP; i += kLine / kSize) __builtin_prefetch(weights + kNext + i, 0, 2);
}

// A weight that few rows read, once in a step. Such pass the caches by, where the processor knows
// how: what else is there stays. What a cache holds already was seen to come no slower.
template <class W>
struct Once {
  W weight;
};
template <class W>
struct RealOf<Once<W>> : RealOf<W> {};

// Rows that meet weights together, at most.
template <class W>
constexpr int kTile = kRows;
template <class W>
constexpr int kTile<Once<W>> = kReading;

// The bytes of one vector of them, which start at a multiple of its size.
inline VecBits load_past(const void *weights) {
#if defined(__AVX512F__)
  return (VecBits)_mm512_stream_load_si512(const_cast<void *>(weights));
#elif defined(__AVX2__)
  return (VecBits)_mm256_stream_load_si256(static_cast<const __m256i *>(weights));
#else
  return *static_cast<const VecBits *>(weights);
#endif
}
#if defined(__AVX512F__)
// One vector of weights, as they lie in memory.
template <class W>
inline __m512i bytes_at(const W *weights) {
  return _mm512_loadu_si512(weights);
}
template <class W>
inline __m512i bytes_at(const Once<W> *weights) {
  return (__m512i)load_past(weights);
}
#endif
inline void load_two(const Once<float> *weights, Vec<float> &a, Vec<float> &b) {
  a = (Vec<float>)load_past(weights);
  b = (Vec<float>)load_past(weights + kLanes<float>);
}
inline void load_two(const Once<bf16> *weights, Vec<float> &a, Vec<float> &b) {
  const VecBits words = load_past(weights);
  a = (Vec<float>)(words << 16);
  b = (Vec<float>)(words & 0xffff0000u);
}

}  // namespace
