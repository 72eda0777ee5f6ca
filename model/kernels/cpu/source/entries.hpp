// CPU kernels of the decoder: attention over the paged cache, linear layers over packed weights,
// and what lies between them. Plain C entry points: no headers but the compiler's own.
//
// Every output row is summed in an order that depends neither on the rows of other requests nor on
// the number of threads: a request's results do not change with its neighbours. Arithmetic is
// float32, or float64 for float64; bfloat16 is a storage format here, widened on load and rounded
// to nearest even on store. Only pairs.hpp multiplies bfloat16 directly, where products are exact
// as well, by weights in coded.hpp's lossless format. 8- and 4-bit weights are multiplied by
// integers.hpp, which rounds inputs to 8 bits; where a processor lacks that, 8-bit weights are
// widened to float32.

#pragma once

#include "layer.hpp"
#include "sampling.hpp"

#define DEFINE_ENTRIES(SUFFIX, T) \
  int64_t pack_##SUFFIX(const T *w, Packed<T> *packed, int64_t outputs, int64_t inputs) { \
    return together([=](Team &team) { return pack(team, w, packed, outputs, inputs); }); \
  } \
  void linear_##SUFFIX(const LinearArguments *a, const T *x, T *y, int64_t rows) { \
    together([=](Team &team) { linear(team, *a, x, y, rows); }); \
  } \
  void norm_##SUFFIX(const NormArguments *a, const T *x, T *y, int64_t rows, int64_t width, \
                     float eps) { \
    together([=](Team &team) { norm_rows(team, *a, x, y, rows, width, eps); }); \
  } \
  void rotate_##SUFFIX(const T *x, T *y, const float *cosines, const float *sines, \
                       const int64_t *positions, int64_t rows, int64_t stride, int64_t heads, \
                       int64_t dim, int64_t half, int64_t interleaved) { \
    together([=](Team &team) { \
      (interleaved ? rotate<true, T> : rotate<false, T>)(team, x, y, cosines, sines, positions, \
                                                         rows, stride, heads, dim, half); \
    }); \
  } \
  void layers_##SUFFIX(const LayerArguments *each, int64_t count, int64_t first, int64_t end, \
                       const StepArguments *step) { \
    PartTimes times(step->seconds); \
    together([&](Team &team) { layers<T>(team, each, count, first, end, *step, times); }); \
  } \
  int64_t pass_##SUFFIX(const EndsArguments *ends, const LayerArguments *each, int64_t count, \
                        const StepArguments *step, const int64_t *tokens, T *logits) { \
    return together([=](Team &team) { \
      return pass(team, *ends, each, count, *step, tokens, logits); \
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
