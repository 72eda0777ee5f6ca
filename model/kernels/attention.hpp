// Attention over the paged cache: any bias, any key frame, several queries for each request.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "linear.hpp"

namespace {

extern "C" struct AttendArguments {
  const void *q, *keys, *values;
  const float *key_scales, *value_scales;  // [blocks, block_size, kv_heads] of int8, or null
  void *out;
  const int64_t *positions;                                     // [T]
  const int64_t *query_starts, *context_lens, *tables, *bases;  // [R + 1] [R] [R, width] twice
  const float *slopes;                                          // [heads] or null
  const float *bias_table;                                      // [heads, bias_span] or null
  const float *dense_bias;  // [heads, T, bias_span] or null: by row and key index
  int64_t bias_span, bias_zero;
  int64_t bias_by_key;  // the table's columns are key positions instead of distances + bias_zero
  int64_t requests, table_width, heads, kv_heads, head_dim, block_size;
  int64_t window;  // keys a query sees; 0: all before it
  int64_t causal;
  const void *cosines, *sines;  // [positions, pairs], in the type of the arithmetic
  int64_t pairs, frame, interleaved;
  double scale, magnitude;
};
// What stored keys still lack, when queries come unturned.
constexpr int64_t kNothing = 0, kPosition = 1, kBase = 2;

// Floats that start on a cache line: vectors that straddle two lines cost twice.
template <class Real>
class Buffer {
 public:
  Real *grow(int64_t size) {
    if (size > size_) {
      size_ = size;
      reals_.reset(static_cast<Real *>(::operator new(size * sizeof(Real), kLine)));
    }
    return reals_.get();
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(Real *reals) const { ::operator delete(reals, kLine); }
  };
  int64_t size_ = 0;
  std::unique_ptr<Real, Free> reals_;
};

constexpr int64_t kKeys = 64;         // keys that are widened at a time, for all queries
constexpr int64_t kQueries = 8 * kRows;  // queries of one task, row by row, each with its group
constexpr int64_t kFew = 4;  // so few queries take their products without turning the keys first

// Some rows of one request and the query heads that share one key/value head: "queries", in
// tiles of kRows. Keys come kKeys at a time; a running maximum and total per query make the
// softmax exact without a second pass (arXiv 2205.14135, algorithm 1). T: of queries and outputs;
// S: of stored keys and values. In 8 bits these are times a scale each, which the score of the key
// takes and the weight of the value.
template <class T, class S>
class AttendTask {
  typedef typename RealOf<T>::type Real;
  static constexpr int kLanes = ::kLanes<Real>, kPanel = ::kPanel<Real>;
  static constexpr bool kScaled = std::is_same_v<S, int8_t>;
  static_assert(kKeys % kPanel == 0);

  struct Chunk {
    int64_t count, places[kKeys], positions[kKeys], bases[kKeys];
    int64_t latest;         // of the positions
    int32_t behind[kKeys];  // that one
    int64_t entries[kScaled ? kKeys : 1];  // whose scales they are
  };

 public:
  explicit AttendTask(const AttendArguments &a)
      : a_(a), group_(a.heads / a.kv_heads), panels_((a.head_dim + kPanel - 1) / kPanel) {
    q_ = q_buffer_.grow(kQueries * a.head_dim);
    sums_ = sums_buffer_.grow(kQueries * panels_ * kPanel);
    keys_ = keys_buffer_.grow(kKeys * a.head_dim);
    values_ = values_buffer_.grow(kKeys * panels_ * kPanel);
    std::fill(values_, values_ + kKeys * panels_ * kPanel, Real(0));
    row_ = row_buffer_.grow(a.head_dim);
    turned_ = a.frame == kNothing ? nullptr : turned_buffer_.grow(kKeys * kFew * a.head_dim);
  }

  // Queries [first_query, first_query + count) of the request and key/value head.
  void run(int64_t request, int64_t kv_head, int64_t first_query, int64_t count) {
    request_ = request, kv_head_ = kv_head, first_query_ = first_query, count_ = count;
    few_ = count <= kFew && a_.head_dim % kLanes == 0;
    // Turning few queries once for each block is less than turning all of its keys.
    by_block_ = few_ && a_.frame == kBase;
    turn_keys_ = !by_block_ && a_.frame != kNothing;
    const int64_t rows = a_.query_starts[request + 1] - a_.query_starts[request];
    context_ = a_.context_lens[request];
    first_index_ = context_ - rows;
    load_queries();
    std::fill(sums_, sums_ + count * panels_ * kPanel, Real(0));
    std::fill(largest_, largest_ + count, -INFINITY);
    std::fill(total_, total_ + count, Real(0));
    const int64_t begin = first_key(0), end = last_key(count - 1) + 1;
    // Chunks start at multiples of kKeys whatever the rows: a row's sums have one order.
    const int64_t start = begin / kKeys * kKeys;
    find_chunk(start, std::min(kKeys, end - start), chunk_);
    for (int64_t n = 0; n < chunk_.count; ++n) prefetch(chunk_, n);
    for (int64_t first = start; first < end; first += kKeys) {
      find_chunk(first + kKeys, std::clamp<int64_t>(end - first - kKeys, 0, kKeys), next_);
      widen_chunk(chunk_, next_);
      for (int64_t at = 0; at < count; at += kRows) {
        const int64_t queries = std::min<int64_t>(kRows, count - at);
        const int64_t keys = std::min(chunk_.count, last_key(at + queries - 1) + 1 - first);
        if (keys > 0 && first_key(at) < first + keys) attend_tile(at, queries, first, keys);
      }
      std::swap(chunk_, next_);
    }
    store_queries();
  }

 private:
  int64_t row_of(int64_t query) const { return (first_query_ + query) / group_; }
  int64_t head_of(int64_t query) const {
    return kv_head_ * group_ + (first_query_ + query) % group_;
  }
  int64_t last_key(int64_t query) const {
    return a_.causal ? first_index_ + row_of(query) : context_ - 1;
  }
  int64_t first_key(int64_t query) const {
    return a_.window ? std::max<int64_t>(0, first_index_ + row_of(query) - a_.window + 1) : 0;
  }
  int64_t place(int64_t query) const {  // in q and out
    return ((a_.query_starts[request_] + row_of(query)) * a_.heads + head_of(query)) * a_.head_dim;
  }

  int64_t position(int64_t query) const {
    return a_.positions[a_.query_starts[request_] + row_of(query)];
  }

  // q_ [tile, head_dim, queries of the tile], scaled; when few [query, head_dim]. Turned where
  // keys are: by block, queries follow at each block.
  void load_queries() {
    for (int64_t at = 0; at < count_; at += kRows) {
      const int64_t queries = std::min<int64_t>(kRows, count_ - at);
      for (int64_t r = 0; r < queries; ++r) {
        const T *from = static_cast<const T *>(a_.q) + place(at + r);
        for (int64_t d = 0; d < a_.head_dim; ++d) row_[d] = widen(from[d]) * Real(a_.scale);
        if (a_.frame != kNothing)
          for (int64_t d = 0; d < 2 * a_.pairs; ++d) row_[d] *= Real(a_.magnitude);
        if (turn_keys_) turn_head(row_, row_, position(at + r));
        for (int64_t d = 0; d < a_.head_dim; ++d)
          q_[few_ ? r * a_.head_dim + d : at * a_.head_dim + d * queries + r] = row_[d];
      }
    }
  }

  // By the angle of so many positions, which may be negative.
  template <class From>
  void turn_head(const From *from, Real *to, int64_t positions) const {
    const int64_t row = std::abs(positions) * a_.pairs;
    const Real *cosine = static_cast<const Real *>(a_.cosines) + row;
    const Real *sine = static_cast<const Real *>(a_.sines) + row;
    const Real way = positions < 0 ? -1 : 1;
    (a_.interleaved ? turn<true, From, Real, Real>
                    : turn<false, From, Real, Real>)(from, to, cosine, sine, way, a_.pairs);
    for (int64_t d = 2 * a_.pairs; d < a_.head_dim; ++d) to[d] = widen(from[d]);
  }

  // turned_ [key of the chunk, head_dim].
  void turn_key(const Chunk &chunk, int64_t n) {
    turn_head(stored(chunk, n), turned_ + n * a_.head_dim,
              a_.frame == kPosition ? chunk.positions[n] : chunk.bases[n]);
  }

  // turned_ [block of the chunk, kFew, head_dim], and which of the blocks each key is in.
  void turn_queries(const Chunk &chunk) {
    Real *to = turned_;
    for (int64_t n = 0; n < chunk.count; ++n) {
      if (n == 0 || chunk.bases[n] != chunk.bases[n - 1]) {
        if (n) to += kFew * a_.head_dim;
        for (int64_t r = 0; r < count_; ++r)
          turn_head(q_ + r * a_.head_dim, to + r * a_.head_dim, position(r) - chunk.bases[n]);
      }
      facing_[n] = to;
    }
  }

  // Where `count` keys from index `first` on are stored, and at which positions they stand.
  void find_chunk(int64_t first, int64_t count, Chunk &chunk) const {
    const int64_t *table = a_.tables + request_ * a_.table_width;
    const int64_t *bases = a_.bases + request_ * a_.table_width;
    const int64_t stride = a_.kv_heads * a_.head_dim;
    int64_t block = first / a_.block_size, offset = first % a_.block_size;
    chunk.count = count;
    chunk.latest = INT64_MIN;
    for (int64_t n = 0; n < count; ++n) {
      chunk.places[n] = (table[block] * a_.block_size + offset) * stride + kv_head_ * a_.head_dim;
      if constexpr (kScaled)
        chunk.entries[n] = (table[block] * a_.block_size + offset) * a_.kv_heads + kv_head_;
      chunk.positions[n] = bases[block] + offset;
      chunk.bases[n] = bases[block];
      chunk.latest = std::max(chunk.latest, chunk.positions[n]);
      if (++offset == a_.block_size) ++block, offset = 0;
    }
    for (int64_t n = 0; n < count; ++n) chunk.behind[n] = int32_t(chunk.latest - chunk.positions[n]);
  }

  // keys_ [panel of keys, head_dim, kPanel], values_ [panel of coordinates, kKeys, kPanel].
  // Entries of one head lie apart, so the processor does not foresee the next chunk by itself.
  void widen_chunk(const Chunk &chunk, const Chunk &next) {
    if (by_block_) turn_queries(chunk);
    for (int64_t n = 0; n < chunk.count; n += kLanes) {
      for (int64_t i = n; i < std::min<int64_t>(next.count, n + kLanes); ++i)
        prefetch(next, i);
      const int64_t count = std::min<int64_t>(kLanes, chunk.count - n);
      if (turn_keys_)
        for (int64_t i = 0; i < count; ++i) turn_key(chunk, n + i);
      if (few_) continue;
      Real *to = keys_ + n / kPanel * a_.head_dim * kPanel + n % kPanel;
      if (turn_keys_)
        widen_keys([&](int64_t i) { return turned_ + (n + i) * a_.head_dim; }, count, to);
      else
        widen_keys([&](int64_t i) { return stored(chunk, n + i); }, count, to);
    }
    for (int64_t n = 0; n < chunk.count; ++n) widen_value(chunk.places[n], values_ + n * kPanel);
    if constexpr (kScaled)
      for (int64_t n = 0; n < chunk.count; ++n) {
        key_scales_[n] = a_.key_scales[chunk.entries[n]];
        value_scales_[n] = a_.value_scales[chunk.entries[n]];
      }
  }

  const S *stored(const Chunk &chunk, int64_t n) const {
    return static_cast<const S *>(a_.keys) + chunk.places[n];
  }

  void prefetch(const Chunk &chunk, int64_t n) const {
    const S *key = stored(chunk, n), *value = static_cast<const S *>(a_.values) + chunk.places[n];
    for (int64_t d = 0; d < a_.head_dim; d += 64 / int64_t(sizeof(S))) {
      __builtin_prefetch(key + d);
      __builtin_prefetch(value + d);
    }
    if constexpr (kScaled) {
      __builtin_prefetch(a_.key_scales + chunk.entries[n]);
      __builtin_prefetch(a_.value_scales + chunk.entries[n]);
    }
  }

  // kLanes keys, key(0) and on, become columns; past the last one is zero, as it must not be NaN.
  template <class Key>
  void widen_keys(Key key, int64_t count, Real *to) const {
    int64_t d = 0;
    for (; d + kLanes <= a_.head_dim; d += kLanes) {
      Vec<Real> rows[kLanes] = {};
      if (count == kLanes)
        for (int n = 0; n < kLanes; ++n) rows[n] = load_as<Real>(key(n) + d);
      else
        for (int n = 0; n < count; ++n) rows[n] = load_as<Real>(key(n) + d);
      transpose<Real>(rows);
      for (int i = 0; i < kLanes; ++i) store(rows[i], to + (d + i) * kPanel);
    }
    for (; d < a_.head_dim; ++d)
      for (int n = 0; n < kLanes; ++n)
        to[d * kPanel + n] = n < count ? Real(widen(key(n)[d])) : Real(0);
  }

  void widen_value(int64_t place, Real *to) const {
    const S *value = static_cast<const S *>(a_.values) + place;
    for (int64_t d = 0; d < a_.head_dim; d += kPanel, to += kKeys * kPanel) {
      const int64_t columns = std::min<int64_t>(kPanel, a_.head_dim - d);
      if (columns == kPanel) {
        store(load_as<Real>(value + d), to);
        store(load_as<Real>(value + d + kLanes), to + kLanes);
      } else {
        for (int64_t j = 0; j < columns; ++j) to[j] = widen(value[d + j]);
      }
    }
  }

  void attend_tile(int64_t at, int64_t queries, int64_t chunk, int64_t keys) {
    alignas(64) Real scores[kRows * kKeys];
    if (few_)
      for (int64_t n = 0; n < keys; n += kLanes)
        score_few(queries, n, std::min<int64_t>(kLanes, keys - n), scores + n);
    else
      for (int64_t n = 0; n < keys; n += kPanel) multiply_panel(at, queries, n, scores + n);
    for (int64_t r = 0; r < queries; ++r) {
      if constexpr (kScaled) scale(keys, key_scales_, scores + r * kKeys);
      add_bias(at + r, chunk, keys, scores + r * kKeys);
      weigh(at, queries, r, chunk, keys, scores + r * kKeys);
      if constexpr (kScaled) scale(keys, value_scales_, scores + r * kKeys);
    }
    for (int64_t p = 0; p < panels_; ++p)
      multiply<kRows, 1, kKeys>(queries, scores, keys, values_ + p * kKeys * kPanel,
                                sums_of(at, queries, p));
  }

  // scores [queries, kKeys] of kPanel keys.
  void multiply_panel(int64_t at, int64_t queries, int64_t n, Real *scores) const {
    alignas(64) Real products[kRows * kPanel] = {};
    multiply<kRows>(queries, q_ + at * a_.head_dim, a_.head_dim, keys_ + n * a_.head_dim, products);
    for (int64_t r = 0; r < queries; ++r)
      std::memcpy(scores + r * kKeys, products + r * kPanel, sizeof(Real) * kPanel);
  }

  // scores [queries, kKeys] of at most kLanes keys.
  void score_few(int64_t queries, int64_t n, int64_t count, Real *scores) const {
    const auto as_stored = [&](int64_t i) { return stored(chunk_, n + i); };
    const auto all_alike = [q = q_](int64_t) { return q; };
    if (turn_keys_)
      multiply_few<kFew>([&](int64_t i) { return turned_ + (n + i) * a_.head_dim; }, all_alike,
                         queries, count, scores);
    else if (by_block_)
      multiply_few<kFew>(as_stored, [&](int64_t i) { return facing_[n + i]; }, queries, count,
                         scores);
    else
      multiply_few<kFew>(as_stored, all_alike, queries, count, scores);
  }

  // key(i) is met by the queries facing(i), [query, head_dim].
  template <int QUERIES, class Key, class Facing>
  void multiply_few(Key key_at, Facing facing, int64_t queries, int64_t count,
                    Real *scores) const {
    if constexpr (QUERIES > 1)
      if (queries < QUERIES)
        return multiply_few<QUERIES - 1>(key_at, facing, queries, count, scores);
    Vec<Real> products[QUERIES][kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
      const auto *key = key_at(i);
      const Real *q = facing(i);
      Vec<Real> product[QUERIES] = {};
      for (int64_t d = 0; d < a_.head_dim; d += kLanes) {
        const Vec<Real> part = load_as<Real>(key + d);
        for (int r = 0; r < QUERIES; ++r) product[r] += load(q + r * a_.head_dim + d) * part;
      }
      for (int r = 0; r < QUERIES; ++r) products[r][i] = product[r];
    }
    for (int r = 0; r < QUERIES; ++r) store(sum_rows<Real>(products[r]), scores + r * kKeys);
  }

  static void scale(int64_t keys, const Real *scales, Real *scores) {
#pragma omp simd
    for (int64_t n = 0; n < keys; ++n) scores[n] *= scales[n];
  }

  // sums_ [tile, panel of coordinates, queries of the tile, kPanel].
  Real *sums_of(int64_t at, int64_t queries, int64_t panel) const {
    return sums_ + (at * panels_ + panel * queries) * kPanel;
  }

  void add_bias(int64_t query, int64_t chunk, int64_t keys, Real *scores) const {
    const int64_t row = a_.query_starts[request_] + row_of(query);
    const int64_t position = a_.positions[row];
    const int32_t nearest = int32_t(position - chunk_.latest);  // distance
    if (a_.slopes) {
      const float slope = a_.slopes[head_of(query)];
#pragma omp simd
      for (int64_t n = 0; n < keys; ++n)
        scores[n] -= Real(slope * float(nearest + chunk_.behind[n]));
    }
    if (a_.bias_table) {
      const float *values = a_.bias_table + head_of(query) * a_.bias_span;
      // Far keys share the last column, and under T5 it is zero: nothing to add.
      const int32_t last = int32_t(a_.bias_span - 1);
      if (!a_.bias_by_key && values[last] == 0.0f && nearest + a_.bias_zero >= last) return;
      // Column of the latest key, and which way earlier ones lie.
      const int32_t first =
          int32_t(a_.bias_by_key ? chunk_.latest : nearest + a_.bias_zero);
      const int32_t way = a_.bias_by_key ? -1 : 1;
#pragma omp simd
      for (int64_t n = 0; n < keys; ++n)
        scores[n] += Real(values[std::clamp(first + way * chunk_.behind[n], 0, last)]);
    }
    if (a_.dense_bias) {
      const int64_t rows = a_.query_starts[a_.requests];
      const float *values = a_.dense_bias + (head_of(query) * rows + row) * a_.bias_span + chunk;
      for (int64_t n = 0; n < keys; ++n) scores[n] += Real(values[n]);
    }
  }

  // Scores to weights relative to the running maximum; what was summed before is rescaled.
  void weigh(int64_t at, int64_t queries, int64_t r, int64_t chunk, int64_t keys, Real *scores) {
    const int64_t query = at + r;
    const int64_t begin = std::clamp<int64_t>(first_key(query) - chunk, 0, keys);
    const int64_t end = std::clamp<int64_t>(last_key(query) + 1 - chunk, begin, keys);
    std::fill(scores, scores + begin, Real(0));
    std::fill(scores + end, scores + keys, Real(0));
    if (begin == end) return;
    Real largest = scores[begin];
#pragma omp simd reduction(max : largest)
    for (int64_t n = begin; n < end; ++n) largest = scores[n] > largest ? scores[n] : largest;
    if (largest > largest_[query]) {
      const Real factor = exponential(largest_[query] - largest);
      largest_[query] = largest;
      total_[query] *= factor;
      for (int64_t p = 0; p < panels_; ++p) {
        Real *sum = sums_of(at, queries, p) + r * kPanel;
        for (int64_t j = 0; j < kPanel; ++j) sum[j] *= factor;
      }
    }
    Real total = 0;
    const Real base = largest_[query];
#pragma omp simd reduction(+ : total)
    for (int64_t n = begin; n < end; ++n) total += (scores[n] = exponential(scores[n] - base));
    total_[query] += total;
  }

  void store_queries() const {
    for (int64_t at = 0; at < count_; at += kRows) {
      const int64_t queries = std::min<int64_t>(kRows, count_ - at);
      for (int64_t r = 0; r < queries; ++r) {
        const Real inverse = 1 / total_[at + r];
        T *to = static_cast<T *>(a_.out) + place(at + r);
        for (int64_t d = 0; d < a_.head_dim; ++d)
          narrow(sums_of(at, queries, d / kPanel)[r * kPanel + d % kPanel] * inverse, to + d);
      }
    }
  }

  const AttendArguments &a_;
  const int64_t group_, panels_;
  int64_t request_, kv_head_, first_query_, count_, context_, first_index_;
  bool few_, by_block_, turn_keys_;
  Buffer<Real> q_buffer_, sums_buffer_, keys_buffer_, values_buffer_, row_buffer_, turned_buffer_;
  Real *q_, *sums_, *keys_, *values_, *row_, *turned_;
  const Real *facing_[kKeys];
  Real largest_[kQueries], total_[kQueries];
  Real key_scales_[kKeys], value_scales_[kKeys];  // of the chunk, where they have some
  Chunk chunk_, next_;
};

template <class T, class S>
void attend_stored(const AttendArguments &a) {
  struct Piece {
    int64_t request, first_query, count;
  };
  std::vector<Piece> pieces;
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t queries = (a.query_starts[r + 1] - a.query_starts[r]) * group;
    for (int64_t first = 0; first < queries; first += kQueries)
      pieces.push_back({r, first, std::min<int64_t>(kQueries, queries - first)});
  }
  const int64_t tasks = int64_t(pieces.size()) * a.kv_heads;
#pragma omp parallel
  {
    AttendTask<T, S> task(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
      const Piece &piece = pieces[i / a.kv_heads];
      task.run(piece.request, i % a.kv_heads, piece.first_query, piece.count);
    }
  }
}

template <class T>
void attend(const AttendArguments &a) {
  if (a.key_scales)
    attend_stored<T, int8_t>(a);
  else
    attend_stored<T, T>(a);
}

}  // namespace
