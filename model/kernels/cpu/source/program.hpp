// Walks a program: ops in order, over rows of values in one piece of scratch memory.
//
// Between two attentions, or mixtures of experts, every row is computed by itself. A run of such
// ops is done by the whole team op by op; or, where there are enough rows, by each thread alone for
// some rows at a time, so that what one op leaves for the next stays in the thread's own cache.
// Runs are as short as the values allow, so that a run's weights stay there as well.

#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "attention.hpp"

namespace {

// ---------------------------------------------------------------- what ops do with a single row

// RMSNorm, or LayerNorm where rows are centred.
extern "C" struct NormArguments {
  const float *weight, *bias;  // [width]; a bias may be null
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
  const float *weight = norm.weight, *bias = norm.bias;
  const float mean =
      norm.centred ? sum_over(x, width, [](auto some) { return some; }) / float(width) : 0.0f;
  const auto square = [mean](auto some) { return (some - mean) * (some - mean); };
  const float scale = 1.0f / std::sqrt(sum_over(x, width, square) / float(width) + eps);
  int64_t i = 0;
  for (; i + kLanes<float> <= width; i += kLanes<float>) {
    Vec<float> scaled = (load_wide(x + i) - mean) * scale * load(weight + i);
    if (bias) scaled += load(bias + i);
    store_as(scaled, y + i);
  }
  for (; i < width; ++i) {
    const float scaled = (widen(x[i]) - mean) * scale * weight[i];
    narrow(bias ? scaled + bias[i] : scaled, y + i);
  }
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

// The logarithm of the gate sigmoid(x · weight + bias).
template <class T>
inline float log_gate(const T *x, const float *weight, float bias, int64_t width) {
  constexpr int64_t kLanes = ::kLanes<float>;
  Vec<float> lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) lanes += load_wide(x + i) * load(weight + i);
  float open = bias;
  for (int64_t n = 0; n < kLanes; ++n) open += lanes[n];
  for (; i < width; ++i) open += widen(x[i]) * weight[i];
  return std::min(open, 0.0f) - std::log1p(std::exp(-std::abs(open)));
}

// y = x + d; x and y may be the same.
template <class T>
inline void add_row(const T *x, const T *d, T *y, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes<float> <= width; i += kLanes<float>)
    store_as(load_wide(x + i) + load_wide(d + i), y + i);
  for (; i < width; ++i) narrow(widen(x[i]) + widen(d[i]), y + i);
}

// y = activation(x), times `up` unless that is null.
template <class T>
inline void activate_row(const T *x, const T *up, T *y, int64_t width, int64_t activation) {
  for (int64_t i = 0; i < width; i += kLanes<float>) {
    const int64_t count = std::min<int64_t>(kLanes<float>, width - i);
    alignas(64) float some[kLanes<float>] = {};
    for (int64_t j = 0; j < count; ++j) some[j] = widen(x[i + j]);
    store(activated<T>(load(some), activation), some);
    for (int64_t j = 0; j < count; ++j)
      narrow(up ? some[j] * widen(up[i + j]) : some[j], y + i + j);
  }
}

// One of the experts that a row uses, and its weight.
struct Picked {
  int64_t expert;
  float share;
};

// The `used` experts with the largest scores, the first of equals, and their part of the softmax.
template <class T>
inline void pick_experts(const T *scores, int64_t experts, int64_t used, bool normalized,
                         Picked *picked) {
  std::vector<float> left(experts);
  for (int64_t e = 0; e < experts; ++e) left[e] = widen(scores[e]);
  const float most = *std::max_element(left.begin(), left.end());
  float total = 0, of_picked = 0;
  for (float &score : left) total += score = std::exp(score - most);
  for (int64_t n = 0; n < used; ++n) {
    const auto largest = std::max_element(left.begin(), left.end());
    picked[n] = {largest - left.begin(), *largest};
    of_picked += *largest;
    *largest = -1;
  }
  if (!(total <= std::numeric_limits<float>::max())) of_picked = total = NAN;  // it hides nothing
  for (int64_t n = 0; n < used; ++n) picked[n].share /= normalized ? of_picked : total;
}

// ------------------------------------------------------------------------------------- programs

enum Kind : int64_t {
  kEmbed, kPlace, kNorm, kLinear, kClip, kRotate, kStore, kAttend, kGate, kActivate, kScale, kAdd,
  kKeep, kCopy, kForget, kSoftCap, kMixExperts, kScaleQueries,
};

// Columns of a value; without any, nothing.
extern "C" struct Columns {
  int64_t start;          // of the value: elements per row of what lies before it
  int64_t width;          // of a row of the value
  int64_t first, count;
  int64_t where;
};
// Where values lie: for each of all rows; for each row of a run of ops, anew for each thread; or
// outside the scratch, which is where results go.
enum Where : int64_t { kEachRow, kRun, kResult };

extern "C" struct OpArguments {
  int64_t kind, part;  // part: what its time counts for
  int64_t kept;        // whether its rows are those to keep, instead of all
  int64_t begins;      // whether a run of ops begins here, as no other value of a run is needed
  Columns x, y, z, to;
  NormArguments norm;
  LinearArguments linear;
  const void *table;              // [vocab, width] of embeddings; or gates' weights, float
  const float *vectors;  // [positions, width] to be added to them, or of queries' scales [positions,
                         // rows]; or gates' biases
  const float *cosines, *sines;   // [positions, pairs]
  int64_t rows;                   // of the table
  int64_t pairs, interleaved, by_offset, head_dim, activation;
  int64_t layer, attends, heedless;  // heedless: of the rows that nothing keeps
  const LinearArguments *experts;  // of each of `rows` two: gate and up, and down
  int64_t used, normalized;        // of these a row's, and whether their weights sum to 1
  double number;                  // epsilon, factor, limit
};

extern "C" struct StepArguments {
  void *scratch, *result;
  const int64_t *tokens, *positions, *offsets, *slots;  // [rows]; offsets: within blocks
  const int64_t *kept;                                  // [kept_rows] or null
  int64_t rows, kept_rows;
  int64_t each_row;  // elements of scratch per row before those that runs of ops use
  int64_t run;       // and of those, per row
  const AttendArguments *attends;     // by kind of attention, of the cache's first layer
  float *gates;                       // of the cache's first layer, or null
  // Strides from one layer's keys, scales or gates to the next one's.
  int64_t layer_bytes, layer_scales, layer_gates;
  double *seconds;                    // [parts] to add to, or null
};

class PartTimes {
 public:
  explicit PartTimes(double *seconds) : seconds_(seconds), before_(Clock::now()) {}

  // Attributes the time since the last call to this part.
  void spent(int64_t part) {
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
inline AttendArguments in_layer(const OpArguments &op, const StepArguments &step) {
  AttendArguments attend = step.attends[op.attends];
  const int64_t bytes = op.layer * step.layer_bytes, scales = op.layer * step.layer_scales;
  attend.keys = static_cast<const char *>(attend.keys) + bytes;
  attend.values = static_cast<const char *>(attend.values) + bytes;
  if (attend.gates) attend.gates += op.layer * step.layer_gates;
  if (attend.key_scales) attend.key_scales += scales, attend.value_scales += scales;
  return attend;
}

// Rows [first, first + count) of a step. place: how many rows other threads have in the memory for
// runs of ops.
template <class T>
class Rows {
 public:
  Rows(const StepArguments &step, int64_t first, int64_t count, int64_t place)
      : step_(step), first_(first), count_(count), place_(place) {}

  void compute(Team &team, const OpArguments &op) const {
    switch (op.kind) {
      case kEmbed: return embed(team, op);
      case kPlace: return place(team, op);
      case kNorm: return norm(team, op);
      case kLinear: return linear(team, op.linear, at(op.x), at(op.to), count_);
      case kClip: return clip(team, op);
      case kRotate: return rotate_heads(team, op);
      case kStore: return store(team, op);
      case kGate: return gate(team, op);
      case kActivate: return activate(team, op);
      case kScale: return scale(team, op);
      case kAdd: return add(team, op);
      case kKeep: return keep(team, op);
      case kCopy: return copy(team, op);
      case kForget: return forget(team, op);
      case kSoftCap: return soft_cap(team, op);
      case kMixExperts: return mix_experts(team, op);
      case kScaleQueries: return scale_queries(team, op);
    }
  }

 private:
  static T *memory(const void *start) { return static_cast<T *>(const_cast<void *>(start)); }

  // The first row.
  T *at(const Columns &of) const {
    T *start = memory(step_.scratch);
    switch (of.where) {
      case kRun:
        start += step_.each_row * step_.rows + step_.run * place_ + of.start * count_;
        break;
      case kEachRow:
        start += of.start * step_.rows + first_ * of.width;
        break;
      default:
        start = memory(step_.result) + first_ * of.width;
    }
    return start + of.first;
  }

  // Calls act(r) for each row, numbered from the first.
  template <class Act>
  void each(Team &team, const Act &act) const {
    team.share(count_, act);
  }

  void embed(Team &team, const OpArguments &op) const {
    const T *table = memory(op.table);
    T *to = at(op.to);
    const int64_t width = op.to.count, step = op.to.width, *tokens = step_.tokens + first_;
    each(team, [=](int64_t r) {
      const T *from = table + tokens[r] * width;
      std::copy(from, from + width, to + r * step);
    });
  }

  void place(Team &team, const OpArguments &op) const {
    T *x = at(op.x);
    const int64_t width = op.x.count, step = op.x.width, *positions = step_.positions + first_;
    const float factor = float(op.number), *vectors = op.vectors;
    each(team, [=](int64_t r) {
      const float *vector = vectors + positions[r] * width;
      T *row = x + r * step;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) narrow(widen(row[i]) + vector[i] * factor, row + i);
    });
  }

  void norm(Team &team, const OpArguments &op) const {
    const T *x = at(op.x);
    T *to = at(op.to);
    const int64_t width = op.head_dim, from_step = op.x.width, to_step = op.to.width;
    const int64_t count = op.x.count;
    const NormArguments &norm = op.norm;
    const float eps = float(op.number);
    each(team, [=, &norm](int64_t r) {
      for (int64_t i = 0; i < count; i += width)
        norm_row(norm, x + r * from_step + i, to + r * to_step + i, width, eps);
    });
  }

  // Every number of x becomes change(number).
  template <class Change>
  void change_all(Team &team, const OpArguments &op, const Change &change) const {
    T *x = at(op.x);
    const int64_t step = op.x.width, count = op.x.count;
    each(team, [=](int64_t r) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i)
        narrow(change(widen(x[r * step + i])), x + r * step + i);
    });
  }

  // NaN stays NaN.
  void clip(Team &team, const OpArguments &op) const {
    const float most = float(op.number);
    change_all(team, op, [=](float own) { return own > most ? most : own < -most ? -most : own; });
  }

  // Heads of x, each by its own number for the position or all by one.
  void scale_queries(Team &team, const OpArguments &op) const {
    T *x = at(op.x);
    const int64_t dim = op.head_dim, step = op.x.width, count = op.x.count;
    const int64_t *positions = step_.positions + first_;
    each(team, [=, &op](int64_t r) {
      const float *scales = op.vectors + positions[r] * op.rows;
      for (int64_t start = 0; start < count; start += dim) {
        const float scale = scales[op.rows > 1 ? start / dim : 0];
        T *head = x + r * step + start;
#pragma omp simd
        for (int64_t i = 0; i < dim; ++i) narrow(widen(head[i]) * scale, head + i);
      }
    });
  }

  // Heads of x and of y, by the same angle.
  void rotate_heads(Team &team, const OpArguments &op) const {
    const int64_t *places = (op.by_offset ? step_.offsets : step_.positions) + first_;
    for (const Columns *of : {&op.x, &op.y}) {
      if (!of->count) continue;
      T *x = at(*of);
      const int64_t step = of->width, count = of->count;
      each(team, [=, &op](int64_t r) {
        const int64_t angle = places[r] * op.pairs;
        for (T *head = x + r * step; head < x + r * step + count; head += op.head_dim)
          (op.interleaved ? rotate_pairs<true, T, T, float> : rotate_pairs<false, T, T, float>)(
              head, head, op.cosines + angle, op.sines + angle, 1.0f, op.pairs);
      });
    }
  }

  // Keys x and values y to the cache; and queries z to where attention finds them.
  void store(Team &team, const OpArguments &op) const {
    const AttendArguments cache = in_layer(op, step_);
    const T *key = at(op.x), *value = at(op.y), *query = at(op.z);
    T *to = at(op.to);
    const int64_t *slots = step_.slots + first_;
    each(team, [=, &op](int64_t r) {
      std::copy(query + r * op.z.width, query + r * op.z.width + op.z.count, to + r * op.to.width);
      store_row(cache, key + r * op.x.width, value + r * op.y.width, slots[r]);
    });
  }

  // Gates of x to the cache.
  void forget(Team &team, const OpArguments &op) const {
    const T *x = at(op.x);
    const float *weights = static_cast<const float *>(op.table), *biases = op.vectors;
    float *gates = step_.gates + op.layer * step_.layer_gates;
    const int64_t heads = op.rows, width = op.x.count, size = step_.attends[0].block_size;
    const int64_t *slots = step_.slots + first_;
    each(team, [=, &op](int64_t r) {
      const int64_t block = slots[r] / size, offset = slots[r] % size;
      for (int64_t h = 0; h < heads; ++h)
        gates[(block * heads + h) * size + offset] =
            log_gate(x + r * op.x.width, weights + h * width, biases[h], width);
    });
  }

  void gate(Team &team, const OpArguments &op) const {
    const T *x = at(op.x), *y = at(op.y);
    T *to = at(op.to);
    each(team, [=, &op](int64_t r) {
      activate_row(x + r * op.x.width, y + r * op.y.width, to + r * op.to.width, op.to.count,
                   op.activation);
    });
  }

  void activate(Team &team, const OpArguments &op) const {
    const T *x = at(op.x);
    T *to = at(op.to);
    each(team, [=, &op](int64_t r) {
      activate_row<T>(x + r * op.x.width, nullptr, to + r * op.to.width, op.to.count,
                      op.activation);
    });
  }

  void soft_cap(Team &team, const OpArguments &op) const {
    const float cap = float(op.number);
    change_all(team, op, [=](float own) { return soft_capped(own, cap); });
  }

  void scale(Team &team, const OpArguments &op) const {
    const float factor = float(op.number);
    change_all(team, op, [=](float own) { return own * factor; });
  }

  void add(Team &team, const OpArguments &op) const {
    const T *x = at(op.x), *y = at(op.y);
    T *to = at(op.to);
    each(team, [=, &op](int64_t r) {
      add_row(x + r * op.x.width, y + r * op.y.width, to + r * op.to.width, op.to.count);
    });
  }

  // Some of all rows of x, side by side.
  void keep(Team &team, const OpArguments &op) const {
    const T *x = memory(step_.scratch) + op.x.start * step_.rows + op.x.first;
    T *to = at(op.to);
    const int64_t *kept = step_.kept + first_;
    each(team, [=, &op](int64_t r) {
      const T *from = x + kept[r] * op.x.width;
      std::copy(from, from + op.x.count, to + r * op.to.width);
    });
  }

  // For each row the weighted sum of what the experts make of x that its scores y pick. All rows of
  // an expert are computed together.
  void mix_experts(Team &team, const OpArguments &op) const {
    const int64_t used = op.used, width = op.x.count, pairs = count_ * used;
    const int64_t inside = op.experts[0].outputs;
    const T *x = at(op.x), *scores = at(op.y);
    T *to = at(op.to);
    std::vector<Picked> picked(pairs);
    each(team, [&](int64_t r) {
      pick_experts(scores + r * op.y.width, op.rows, used, op.normalized, &picked[r * used]);
    });
    std::vector<int64_t> ends(op.rows + 1), places(pairs);  // of an expert's rows among all
    for (const Picked &one : picked) ++ends[one.expert + 1];
    for (int64_t e = 0; e < op.rows; ++e) ends[e + 1] += ends[e];
    std::vector<int64_t> next(ends.begin(), ends.end() - 1);
    for (int64_t i = 0; i < pairs; ++i) places[i] = next[picked[i].expert]++;
    const std::unique_ptr<T[]> rows(new T[pairs * width]), found(new T[pairs * width]);
    const std::unique_ptr<T[]> hidden(new T[pairs * inside]);
    team.share(pairs, [&](int64_t i) {
      const T *from = x + i / used * op.x.width;
      std::copy(from, from + width, &rows[places[i] * width]);
    });
    for (int64_t e = 0; e < op.rows; ++e) {
      const int64_t first = ends[e], count = ends[e + 1] - first;
      ::linear(team, op.experts[2 * e], &rows[first * width], &hidden[first * inside], count);
      ::linear(team, op.experts[2 * e + 1], &hidden[first * inside], &found[first * width], count);
    }
    each(team, [&](int64_t r) {
      std::vector<float> sums(width);
      for (int64_t n = r * used; n < (r + 1) * used; ++n)
        for (int64_t i = 0; i < width; ++i)
          sums[i] += picked[n].share * widen(found[places[n] * width + i]);
      for (int64_t i = 0; i < width; ++i) narrow(sums[i], to + r * op.to.width + i);
    });
  }

  void copy(Team &team, const OpArguments &op) const {
    const T *x = at(op.x);
    T *to = at(op.to);
    each(team, [=, &op](int64_t r) {
      const T *from = x + r * op.x.width;
      std::copy(from, from + op.x.count, to + r * op.to.width);
    });
  }

  const StepArguments &step_;
  const int64_t first_, count_, place_;
};

template <class T>
void attend_to(Team &team, const OpArguments &op, const StepArguments &step) {
  AttendArguments attend = in_layer(op, step);
  attend.q = static_cast<const T *>(step.scratch) + op.x.start * step.rows;
  attend.out = static_cast<T *>(step.scratch) + op.to.start * step.rows;
  if (op.heedless) attend.kept = step.kept, attend.kept_rows = step.kept_rows;
  ::attend<T>(team, attend);
}

// Whether an op is computed for all rows at once.
inline bool concerns_all(const OpArguments &op) {
  return op.kind == kAttend || op.kind == kMixExperts;
}

// Times are those of the first thread.
template <class T>
void run(Team &team, const OpArguments *ops, int64_t count, const StepArguments &step) {
  PartTimes times(step.seconds);
  const OpArguments *op = ops, *const end = ops + count;
  while (op < end) {
    if (concerns_all(*op)) {
      if (op->kind == kAttend)
        attend_to<T>(team, *op, step);
      else
        Rows<T>(step, 0, op->kept ? step.kept_rows : step.rows, 0).compute(team, *op);
      times.spent(op++->part);
      continue;
    }
    const OpArguments *stop = op + 1;
    while (stop < end && !concerns_all(*stop) && !stop->begins) ++stop;
    const int64_t rows = op->kept ? step.kept_rows : step.rows;
    by_rows(team, rows, [=, &times, &step](Team &own, int64_t first, int64_t some,
                                                    int64_t thread) {
      const Rows<T> part(step, first, some, thread * kChunk);
      for (const OpArguments *each = op; each < stop; ++each) {
        part.compute(own, *each);
        if (thread == 0) times.spent(each->part);
      }
    });
    times.spent((stop - 1)->part);  // waiting for other threads
    op = stop;
  }
}

// False if one of the step's tokens is in no row of a table that the ops read.
inline bool are_known(const OpArguments *ops, int64_t count, const StepArguments &step) {
  for (const OpArguments *op = ops; op < ops + count; ++op)
    if (op->kind == kEmbed)
      for (int64_t r = 0; r < step.rows; ++r)
        if (step.tokens[r] < 0 || step.tokens[r] >= op->rows) return false;
  return true;
}

}  // namespace
