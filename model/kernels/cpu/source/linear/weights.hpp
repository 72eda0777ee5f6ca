// How the weights of linear layers are stored, and how they are loaded.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../vectors.hpp"

namespace {

// Columns of a strip, stored side by side: those of one panel, or of two where vectors are so short
// that one row's sums would wait for each other. A row then reads a single stream; from several at
// once, memory delivers up to a third less.
constexpr int kStrip = std::max(kPanel<float>, 32);
constexpr int kLine = 64;  // bytes per memory access
// Bytes of weights that all tiles of rows process before the next ones. They stay in the L1 cache.
constexpr int kPiece = 16384;
// Up to this many rows, weights are multiplied as fast as memory delivers them, which is fastest
// when all of a strip is simply read.
constexpr int kReading = kStrip == kPanel<float> ? 2 * kRows / 3 : 1;

inline int64_t strips_of(int64_t outputs) { return (outputs + kStrip - 1) / kStrip; }

// With more rows, multiplying takes longer than reading, and the next piece is prefetched
// meanwhile: STEP of its weights for every STEP of this one. Attention's panels are cached already;
// there it has no effect.
template <int ROWS, int STEP, class W>
inline void fetch_ahead(const W *weights) {
  constexpr int kSize = int(sizeof(W)), kNext = kPiece / kSize;
  if constexpr (ROWS > kReading)
    for (int i = 0; i < STEP; i += kLine / kSize) __builtin_prefetch(weights + kNext + i, 0, 2);
}

// A weight that few rows read, once per step. Where the processor supports it, these bypass the
// caches, which keep their content. Weights already cached were measured to load no slower.
template <class W>
struct Once {
  W weight;
};
template <class W>
struct RealOf<Once<W>> : RealOf<W> {};

// The most rows that are multiplied with weights together.
template <class W>
constexpr int kTile = kRows;
template <class W>
constexpr int kTile<Once<W>> = kReading;

// One vector of weights, which must start at a multiple of its size.
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
// One vector of weights, as stored.
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
