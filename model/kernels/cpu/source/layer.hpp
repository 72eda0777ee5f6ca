// What a layer computes between its matrices, and a whole layer of a decoder.

#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.hpp"

namespace {

// RMSNorm, or LayerNorm where rows are centred.
extern "C" struct NormArguments {
  const void *weight, *bias;  // [width]; a bias may be null
  int64_t centred;
};

// The sum of of(x) over all elements of a row.
template <class T, class Of>
inline float sum_over(const T *x, int64_t width, const Of &of) {
  constexpr int64_t kLanes = ::kLanes<float>, kSums = 4;  // a single sum would wait for itself
  Vec<float> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes)
    for (int64_t n = 0; n < kSums; ++n) sums[n] += of(load_wide(x + i + n * kLanes));
  for (; i + kLanes <= width; i += kLanes) sums[0] += of(load_wide(x + i));
  const Vec<float> lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0.0f;
  for (int64_t n = 0; n < kLanes; ++n) sum += lanes[n];
  for (; i < width; ++i) sum += of(widen(x[i]));
  return sum;
}

// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, where the mean is taken as 0 if
// rows are not centred; x and y may be the same.
template <class T>
inline void norm_row(const NormArguments &norm, const T *x, T *y, int64_t width, float eps) {
  const T *weight = static_cast<const T *>(norm.weight), *bias = static_cast<const T *>(norm.bias);
  const float mean =
      norm.centred ? sum_over(x, width, [](auto some) { return some; }) / float(width) : 0.0f;
  const auto square = [mean](auto some) { return (some - mean) * (some - mean); };
  const float scale = 1.0f / std::sqrt(sum_over(x, width, square) / float(width) + eps);
  int64_t i = 0;
  for (; i + kLanes<float> <= width; i += kLanes<float>) {
    Vec<float> scaled = (load_wide(x + i) - mean) * scale * load_wide(weight + i);
    if (bias) scaled += load_wide(bias + i);
    store_as(scaled, y + i);
  }
  for (; i < width; ++i) {
    const float scaled = (widen(x[i]) - mean) * scale * widen(weight[i]);
    narrow(bias ? scaled + widen(bias[i]) : scaled, y + i);
  }
}
template <class T>
void norm_rows(Team &team, const NormArguments &norm, const T *x, T *y, int64_t rows,
               int64_t width, float eps) {
  team.share(rows, [=](int64_t r) { norm_row(norm, x + r * width, y + r * width, width, eps); });
}

// Rotates the first 2 * half coordinates of each head; x has `stride` elements per row.
template <bool INTERLEAVED, class T>
void rotate(Team &team, const T *x, T *y, const float *cosines, const float *sines,
            const int64_t *positions, int64_t rows, int64_t stride, int64_t heads, int64_t dim,
            int64_t half) {
  team.share(rows, [=](int64_t r) {
    const float *cosine = cosines + positions[r] * half, *sine = sines + positions[r] * half;
    for (int64_t h = 0; h < heads; ++h) {
      const T *from = x + r * stride + h * dim;
      T *to = y + (r * heads + h) * dim;
      turn<INTERLEAVED>(from, to, cosine, sine, 1.0f, half);
      std::copy(from + 2 * half, from + dim, to + 2 * half);
    }
  });
}

// What stays the same in every step.
extern "C" struct LayerArguments {
  NormArguments attention_norm, mlp_norm, q_norm, k_norm;  // weights of the last two may be null
  LinearArguments qkv, out, up, down;                      // up: with its gate, if it has one
  // Of attention to an encoded prompt, between self-attention and the MLP; null without one.
  NormArguments cross_norm;
  LinearArguments cross_q, cross_out;
  const float *cosines, *sines;                            // [positions, pairs]
  int64_t pairs, interleaved, turned;
  int64_t parallel;  // whether the MLP's input is the layer's input
  int64_t index;     // of the layer's keys and values in the cache
  int64_t kind;      // index of its attention among the step's kinds
  double eps, clip;  // clip: the largest magnitude of queries, keys and values; 0: any
};
// How queries and keys are rotated before keys are stored.
constexpr int64_t kByNothing = 0, kByPosition = 1, kKeysByOffset = 2;
constexpr int64_t kByOthers = 3;  // outside these kernels, between the two halves of the layer

extern "C" struct StepArguments {
  const void *x;           // [rows, width]
  void *y;                 // [kept rows, width]
  void *scratch;           // its size is known to kernels/layers.py
  const int64_t *offsets;  // [rows] slots within their blocks
  const int64_t *slots;    // [rows]
  const int64_t *kept;     // rows of x that y consists of, or null: all
  int64_t rows, kept_rows;
  // Only where others rotate, else null. qkv: output of the layer's qkv for all rows, before
  // rotation; q and k: the rotated queries and keys of all rows.
  void *qkv;
  const void *q, *k;
  // For each kind of attention: keys, values and scales of the cache's first layer. Queries and
  // output are in the scratch.
  const AttendArguments *attends;
  const AttendArguments *cross;  // the same for attention to encoded prompts, or null
  int64_t layer_bytes, layer_scales;  // strides from one layer's keys or scales to the next one's
  double *seconds;                    // [parts] to add to, or null
};
enum Part { kNorm, kLinear, kTurn, kStore, kAttention, kResidual, kEmbedding, kHead };

// What a decoder computes before and after its layers. Stays the same in every step.
extern "C" struct EndsArguments {
  const void *embedding;  // [vocab, width]
  int64_t vocab;
  const float *vectors;  // position vectors [positions, width] added to the embedding; or null
  double embed_scale, vector_scale, eps;
  NormArguments norm;
  LinearArguments head;
};

// Applies `act` in place to heads [first, first + count) of queries or keys.
template <class T, class Act>
void each_head(Team &team, int64_t rows, int64_t stride, int64_t dim, T *qkv, int64_t first,
               int64_t count, Act act) {
  team.share(rows, [=](int64_t r) {
    for (int64_t h = first; h < first + count; ++h) act(r, qkv + r * stride + h * dim);
  });
}

template <class T>
void norm_heads(Team &team, const LayerArguments &a, const AttendArguments &attend, int64_t rows,
                T *qkv) {
  const int64_t heads = attend.heads, dim = attend.head_dim;
  const auto norm_each = [&](const NormArguments &norm, int64_t first, int64_t count) {
    const auto by = [&](int64_t, T *head) { norm_row(norm, head, head, dim, float(a.eps)); };
    if (norm.weight) each_head(team, rows, a.qkv.outputs, dim, qkv, first, count, by);
  };
  norm_each(a.q_norm, 0, heads);
  norm_each(a.k_norm, heads, attend.kv_heads);
}

// NaN stays NaN.
template <class T>
void clip_rows(Team &team, float most, int64_t rows, int64_t width, T *x) {
  team.share(rows, [=](int64_t r) {
    for (int64_t i = r * width; i < (r + 1) * width; ++i) {
      const float own = widen(x[i]);
      narrow(own > most ? most : own < -most ? -most : own, x + i);
    }
  });
}

// positions and offsets: one for each row.
template <class T>
void turn_heads(Team &team, const LayerArguments &a, const AttendArguments &attend, int64_t rows,
                const int64_t *positions, const int64_t *offsets, T *qkv) {
  const auto turn_from = [&](const int64_t *places, int64_t first, int64_t count) {
    const auto by_place = [&a, places](int64_t r, T *head) {
      const int64_t at = places[r] * a.pairs;
      (a.interleaved ? turn<true, T, T, float> : turn<false, T, T, float>)(
          head, head, a.cosines + at, a.sines + at, 1.0f, a.pairs);
    };
    each_head(team, rows, a.qkv.outputs, attend.head_dim, qkv, first, count, by_place);
  };
  if (a.turned == kByPosition)  // keys follow queries
    turn_from(positions, 0, attend.heads + attend.kv_heads);
  else if (a.turned == kKeysByOffset)
    turn_from(offsets, attend.heads, attend.kv_heads);
}

// Writes one token's keys, or values, to the cache. scales: those of all tokens, or null.
template <class T>
inline void store_token(const T *from, const void *cache, const float *scales, int64_t slot,
                        int64_t heads, int64_t dim) {
  void *stored = const_cast<void *>(cache);
  if (!scales) {
    std::copy(from, from + heads * dim, static_cast<T *>(stored) + slot * heads * dim);
    return;
  }
  for (int64_t h = 0; h < heads; ++h)
    round_numbers(from + h * dim, static_cast<int8_t *>(stored) + (slot * heads + h) * dim,
                const_cast<float *>(scales) + slot * heads + h, dim);
}

// Writes one row's keys and values to their slot of the cache.
template <class T>
void store_row(const AttendArguments &to, const T *key, const T *value, int64_t slot) {
  store_token(key, to.keys, to.key_scales, slot, to.kv_heads, to.head_dim);
  store_token(value, to.values, to.value_scales, slot, to.kv_heads, to.head_dim);
}

// y = x + d; x and y may be the same.
template <class T>
void add_rows(Team &team, const T *x, const T *d, T *y, int64_t rows, int64_t width) {
  team.share(rows, [=](int64_t r) {
    int64_t i = r * width;
    const int64_t end = i + width;
    for (; i + kLanes<float> <= end; i += kLanes<float>)
      store_as(load_wide(x + i) + load_wide(d + i), y + i);
    for (; i < end; ++i) narrow(widen(x[i]) + widen(d[i]), y + i);
  });
}

class PartTimes {
 public:
  explicit PartTimes(double *seconds) : seconds_(seconds), before_(Clock::now()) {}

  // Attributes the time since the last call to this part.
  void spent(Part part) {
    if (!seconds_) return;
    const auto now = Clock::now();
    seconds_[part] += std::chrono::duration<double>(now - before_).count();
    before_ = now;
  }

 private:
  typedef std::chrono::steady_clock Clock;
  double *seconds_;
  Clock::time_point before_;
};

// Arguments of attention in a layer, from those for the cache's first layer.
inline AttendArguments attends_to(const LayerArguments &a, const StepArguments &step,
                                  AttendArguments attend) {
  const int64_t bytes = a.index * step.layer_bytes, scales = a.index * step.layer_scales;
  attend.keys = static_cast<const char *>(attend.keys) + bytes;
  attend.values = static_cast<const char *>(attend.values) + bytes;
  if (attend.key_scales) attend.key_scales += scales, attend.value_scales += scales;
  return attend;
}

// One layer of a decoder: x + attention(norm(x)), then x + mlp(norm(x)); or both in parallel; or
// with x + attention(norm(x)) to an encoded prompt in between. The first half ends once queries and
// keys are rotated and stored, or just before that where others rotate them. step.x and step.y are
// this layer's input and output, which may be the same.
template <class T>
class Layer {
 public:
  Layer(const LayerArguments &a, const StepArguments &step)
      : a_(a),
        step_(step),
        width_(a.down.outputs),
        attended_(a.out.inputs),
        attend_(attends_to(a, step, step.attends[a.kind])),
        stored_(attend_.kv_heads * attend_.head_dim),
        stream_(static_cast<T *>(step.scratch)),
        q_(stream_ + step.rows * width_),
        heads_(q_ + step.rows * attended_),
        normed_(heads_ + step.rows * attended_),
        sums_(normed_ + step.rows * width_),
        wide_(sums_ + step.rows * width_) {
    attend_.q = by_others() ? step.q : q_;
    attend_.out = heads_;
    attend_.kept = step.kept;
    attend_.kept_rows = step.kept ? step.kept_rows : 0;
  }

  // Times are those of the first thread.
  void first_half(Team &team, PartTimes &times) {
    PartTimes others(nullptr);
    by_rows(team, step_.rows, [&](Team &own, int64_t first, int64_t count, int64_t thread) {
      before_attention(own, first, count, thread * kChunk, thread == 0 ? times : others);
    });
    times.spent(kLinear);
  }

  void second_half(Team &team, PartTimes &times) {
    PartTimes others(nullptr);
    if (by_others()) {
      const T *keys = static_cast<const T *>(step_.k), *qkv = static_cast<const T *>(step_.qkv);
      team.share(step_.rows, [&](int64_t r) {
        const T *value = qkv + r * a_.qkv.outputs + attended_ + stored_;
        store_row(attend_, keys + r * stored_, value, step_.slots[r]);
      });
      times.spent(kStore);
    }
    attend<T>(team, attend_);
    times.spent(kAttention);
    if (step_.cross) cross(team, times);
    by_rows(team, step_.kept_rows, [&](Team &own, int64_t first, int64_t count, int64_t thread) {
      after_attention(own, first, count, thread * kChunk, thread == 0 ? times : others);
    });
    times.spent(kLinear);
  }

 private:
  // For `count` rows starting at row `first`. Intermediate results use the scratch from row `place`
  // on.
  void before_attention(Team &team, int64_t first, int64_t count, int64_t place,
                        PartTimes &times) {
    T *normed = normed_ + place * width_, *qkv = wide_ + place * a_.qkv.outputs;
    if (by_others()) qkv = static_cast<T *>(step_.qkv) + first * a_.qkv.outputs;
    norm(team, a_.attention_norm, x() + first * width_, normed, count);
    times.spent(kNorm);
    linear(team, a_.qkv, normed, qkv, count);
    if (a_.clip) clip_rows(team, float(a_.clip), count, a_.qkv.outputs, qkv);
    times.spent(kLinear);
    norm_heads(team, a_, attend_, count, qkv);
    times.spent(kNorm);
    if (by_others()) return;
    turn_heads(team, a_, attend_, count, attend_.positions + first, step_.offsets + first, qkv);
    times.spent(kTurn);
    team.share(count, [&](int64_t r) {
      const T *query = qkv + r * a_.qkv.outputs, *key = query + attended_;
      std::copy(query, key, q_ + (first + r) * attended_);
      store_row(attend_, key, key + stored_, step_.slots[first + r]);
    });
    times.spent(kStore);
  }

  // From self-attention to attention to the encoded prompt. For all rows: results of rows that are
  // not kept are not read.
  void cross(Team &team, PartTimes &times) {
    PartTimes others(nullptr);
    by_rows(team, step_.rows, [&](Team &own, int64_t first, int64_t count, int64_t thread) {
      before_cross(own, first, count, thread * kChunk, thread == 0 ? times : others);
    });
    times.spent(kLinear);
    AttendArguments prompts = attends_to(a_, step_, *step_.cross);
    prompts.q = q_;
    prompts.out = heads_;
    prompts.kept = attend_.kept;
    prompts.kept_rows = attend_.kept_rows;
    attend<T>(team, prompts);
    times.spent(kAttention);
  }

  void before_cross(Team &team, int64_t first, int64_t count, int64_t place, PartTimes &times) {
    T *normed = normed_ + place * width_, *sums = sums_ + place * width_;
    T *y = stream_ + first * width_;
    linear(team, a_.out, heads_ + first * attended_, sums, count);
    times.spent(kLinear);
    add_rows(team, x() + first * width_, sums, y, count, width_);
    times.spent(kResidual);
    norm(team, a_.cross_norm, y, normed, count);
    times.spent(kNorm);
    linear(team, a_.cross_q, normed, q_ + first * attended_, count);
    times.spent(kLinear);
  }

  // For kept rows.
  void after_attention(Team &team, int64_t first, int64_t count, int64_t place, PartTimes &times) {
    T *normed = normed_ + place * width_, *sums = sums_ + place * width_;
    T *inner = wide_ + place * a_.down.inputs, *y = static_cast<T *>(step_.y) + first * width_;
    const T *all = step_.cross ? stream_ : x();
    const T *from = all + first * width_, *heads = heads_ + first * attended_;
    if (step_.kept) {
      from = gather(all, width_, first, count, y);
      heads = gather(heads_, attended_, first, count, q_ + first * attended_);
    }
    linear(team, step_.cross ? a_.cross_out : a_.out, heads, sums, count);
    times.spent(kLinear);
    if (a_.parallel) norm(team, a_.mlp_norm, from, normed, count);
    times.spent(kNorm);
    add_rows(team, from, sums, y, count, width_);
    times.spent(kResidual);
    if (!a_.parallel) norm(team, a_.mlp_norm, y, normed, count);
    times.spent(kNorm);
    linear(team, a_.up, normed, inner, count);
    linear(team, a_.down, inner, sums, count);
    times.spent(kLinear);
    add_rows(team, y, sums, y, count, width_);
    times.spent(kResidual);
  }

  // Copies kept rows [first, first + count) side by side.
  const T *gather(const T *rows, int64_t width, int64_t first, int64_t count, T *to) const {
    for (int64_t r = 0; r < count; ++r) {
      const T *from = rows + step_.kept[first + r] * width;
      std::copy(from, from + width, to + r * width);
    }
    return to;
  }

  void norm(Team &team, const NormArguments &of, const T *from, T *to, int64_t count) const {
    norm_rows(team, of, from, to, count, width_, float(a_.eps));
  }

  bool by_others() const { return a_.turned == kByOthers; }

  const T *x() const { return static_cast<const T *>(step_.x); }

  const LayerArguments &a_;
  const StepArguments &step_;
  const int64_t width_, attended_;
  AttendArguments attend_;
  const int64_t stored_;  // elements of a row's keys, and of its values
  T *stream_;  // residual stream between layers, [rows, width_]
  // For all rows, [rows, attended_]; q_ is free once attention is done.
  T *q_, *heads_;
  // For rows that are computed together: [rows, width_] twice; and [rows, outputs of qkv], then
  // [rows, inputs of down].
  T *normed_, *sums_, *wide_;
};

// Half-layers [first, end) of `count` layers, in order; `kept` applies to the last layer.
template <class T>
void layers(Team &team, const LayerArguments *each, int64_t count, int64_t first, int64_t end,
            const StepArguments &step, PartTimes &times) {
  for (int64_t half = first; half < end; ++half) {
    const int64_t i = half / 2;
    StepArguments now = step;
    if (i > 0) now.x = step.scratch;
    if (i < count - 1) now.y = step.scratch, now.kept = nullptr, now.kept_rows = step.rows;
    Layer<T> layer(each[i], now);
    half % 2 ? layer.second_half(team, times) : layer.first_half(team, times);
  }
}

// tokens and positions [rows] → x [rows, width]. False if a token is not in the vocabulary.
template <class T>
bool embed(Team &team, const EndsArguments &ends, const int64_t *tokens, const int64_t *positions,
           T *x, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    if (tokens[r] < 0 || tokens[r] >= ends.vocab) return false;
  team.share(rows, [&](int64_t r) {
    const T *from = static_cast<const T *>(ends.embedding) + tokens[r] * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      narrow(widen(from[i]) * float(ends.embed_scale), x + r * width + i);
    if (!ends.vectors) return;
    const float *vector = ends.vectors + positions[r] * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      narrow(widen(x[r * width + i]) + vector[i] * float(ends.vector_scale), x + r * width + i);
  });
  return true;
}

// A decoder's forward pass: logits [kept rows, vocab]. tokens: null if step.x is the first layer's
// input. Returns false, having computed nothing, if a token is not in the vocabulary.
template <class T>
bool pass(Team &team, const EndsArguments &ends, const LayerArguments *each, int64_t count,
          StepArguments step, const int64_t *tokens, T *logits) {
  PartTimes times(step.seconds);
  const int64_t width = each->down.outputs;
  if (tokens) {
    T *stream = static_cast<T *>(step.scratch);
    const int64_t *positions = step.attends[each->kind].positions;
    if (!embed(team, ends, tokens, positions, stream, step.rows, width)) return false;
    step.x = stream;
    times.spent(kEmbedding);
  }
  layers<T>(team, each, count, 0, 2 * count, step, times);
  T *y = static_cast<T *>(step.y);
  norm_rows(team, ends.norm, y, y, step.kept_rows, width, float(ends.eps));
  times.spent(kNorm);
  linear(team, ends.head, y, logits, step.kept_rows);
  times.spent(kHead);
  return true;
}

}  // namespace
