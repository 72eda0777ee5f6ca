// CPU kernels of the decoder: attention over the paged cache, linear layers over packed weights,
// and what lies between them. Plain C entry points: no headers but the compiler's own.
//
// Every output row is summed in an order that depends neither on the rows of other requests nor on
// the number of threads: a request's results do not change with its neighbours. Arithmetic is
// float32, or float64 for float64; bfloat16 is a storage format here, widened on load and rounded
// to nearest even on store. Only linear/pairs.hpp multiplies bfloat16 directly, where products are
// exact as well, by weights in linear/coded.hpp's lossless format. 8- and 4-bit weights are
// multiplied by linear/integers.hpp, which rounds inputs to 8 bits; where a processor lacks that,
// 8-bit weights are widened to float32.

#pragma once

#include "program.hpp"
#include "sampling.hpp"

#define DEFINE_ENTRIES(SUFFIX, T) \
  int64_t pack_##SUFFIX(const T *w, Packed<T> *packed, int64_t outputs, int64_t inputs) { \
    return together([=](Team &team) { return pack(team, w, packed, outputs, inputs); }); \
  } \
  int64_t run_##SUFFIX(const OpArguments *ops, int64_t count, const StepArguments *step) { \
    return together([=](Team &team) { \
      const bool known = are_known(ops, count, *step); \
      if (known) run<T>(team, ops, count, *step); \
      return known; \
    }); \
  } \
  void largest_##SUFFIX(const T *logits, float *values, int64_t *tokens, int64_t rows, \
                        int64_t vocab) { \
    together([=](Team &team) { largest(team, logits, values, tokens, rows, vocab); }); \
  } \
  void scores_##SUFFIX(const T *logits, const int64_t *tokens, double *found, int64_t rows, \
                       int64_t vocab, int64_t count) { \
    together([=](Team &team) { \
      team.share(rows, [=](int64_t r) { \
        score_row(logits + r * vocab, vocab, tokens[r], count, found + r * (2 + 2 * count)); \
      }); \
    }); \
  } \
  void attend_##SUFFIX(const AttendArguments *a) { \
    together([=](Team &team) { attend<T>(team, *a); }); \
  }
