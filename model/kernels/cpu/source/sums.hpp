// Checksums of stored bytes.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

// The sum that cache/ledger.py defines, for one block of one layer, eight bytes at a time.
int64_t fold_sum(const char *bytes, const uint64_t *multipliers, int64_t count) {
  const auto fold = [](uint64_t word) {
    return word ^ uint32_t(int32_t(uint32_t(word >> 32)) >> 15);
  };
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    sum += fold(word) * multipliers[i];
  }
  if (count % 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + count / 8 * 8, count % 8);
    sum += fold(word) * multipliers[count / 8];
  }
  return int64_t(sum);
}

}  // namespace
