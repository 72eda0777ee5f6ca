// What attention tasks have in common, whatever their number of queries: locating keys, biases,
// and the running softmax.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "../vectors.hpp"

namespace {

extern "C" struct AttendArguments {
  const void *q, *keys, *values;
  const float *key_scales, *value_scales;  // [blocks, block_size, kv_heads] of int8, or null
  void *out;
  const int64_t *positions;                                     // [T]
  const int64_t *query_starts, *context_lens, *tables, *bases;  // [R + 1] [R] [R, width] twice
  const int64_t *prompts;  // [R] whether a request's rows are of its prompt; or null: unknown
  const float *slopes;                                          // [heads] or null
  const float *bias_table;  // [heads, bias_span], or for each row [heads, T, bias_span]; or null
  const float *dense_bias;  // [heads, T, bias_span] or null: by row and key index
  const float *gates;       // [blocks, heads, block_size] or null: logarithms
  int64_t bias_span, bias_zero;
  int64_t bias_by_row;
  int64_t bias_by_key;  // the table's columns are key positions instead of distances + bias_zero
  int64_t requests, table_width, heads, kv_heads, head_dim, block_size;
  int64_t window;  // keys a query sees; 0: all before it
  int64_t causal;
  const int64_t *kept;  // [kept_rows] rows of q whose output is needed, or null: all
  int64_t kept_rows;
  const void *cosines, *sines;  // [positions, pairs], in the type of the arithmetic
  int64_t pairs, storage, interleaved;
  int64_t far;  // positions between a query and keys of the far side, or more; 0: all are near
  const int64_t *far_queries, *far_keys;  // [positions] whose angles these have on the far side
  double scale, magnitude, cap;  // cap: scores without bias go smoothly to ± this; 0: none
};
// What is left to rotate stored keys by, when queries are not rotated yet.
constexpr int64_t kNothing = 0, kPosition = 1, kBase = 2;
// Where a key is seen from a query: it may be rotated otherwise where it is far.
enum Side { kNear, kFar };

// Floats that start on a cache line: vectors that straddle two lines cost twice as much.
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


constexpr int64_t kQueries = 16 * kRows;  // at most, per task

// Which of the keys that a few queries see: the later half, the earlier half, or all.
enum Half { kLater, kEarlier, kWhole };

// What one task computes: queries [first_query, first_query + count) of a request, under each of
// `heads` key/value heads. Queries are numbered row by row, and within a row by head of the group.
struct Piece {
  int64_t request, first_head, heads, first_query, count;
  bool few;  // whether FewQueries computes it; the same for all pieces of a request
  Half half = kWhole;
  int64_t pair = 0;  // number of the pair, where two pieces are halves of each other
};

// Keys are processed KEYS at a time; a running base and total per query make the softmax exact
// without a second pass (arXiv 2205.14135, algorithm 1). Real: type of the arithmetic; S: type of
// stored keys and values. 8-bit entries have a scale each, which is applied to a key's score and a
// value's weight. T: type of queries and outputs, which only loads and stores are templated on.
template <class Real, class S, int64_t KEYS>
class Attending {
 protected:
  static constexpr int64_t kKeys = KEYS;
  static constexpr int kLanes = ::kLanes<Real>, kPanel = ::kPanel<Real>;
  static constexpr bool kScaled = std::is_same_v<S, int8_t>;
  static_assert(kKeys % kPanel == 0);

  struct Chunk {
    int64_t count, bases[kKeys], positions[kKeys];
    int64_t entries[kKeys];  // index in [.., kv_heads] of each key's entry for the first head
    int64_t earliest, latest;  // positions
    int32_t behind[kKeys];   // latest - position
  };
  // How far scores may exceed the base before it changes: a new base costs time, and a weight of
  // e^16 is far from overflowing a sum. Under ALiBi nearly every chunk has larger scores than the
  // one before.
  static constexpr Real kAbove = 16;
  // This far below the base a weight is 0.
  static constexpr Real kGone = sizeof(Real) == 4 ? 87 : 746;
  // One query's bias parameters, if any, and its running softmax: a base that no score so far
  // exceeds by more than kAbove, and the sum of weights relative to that, per lane.
  struct State {
    int64_t position;
    int64_t unbiased;  // keys up to this position have a bias of 0
    float slope;
    const float *table, *dense;  // this query's rows
    const Real *gates;           // of the query's head, as `gates_` has them
    int64_t summed_from;         // a chunk's first key, from which on `forgotten` is their sum
    Real forgotten;
    Real far;                    // the table's last column
    Real base, totals[kLanes];
  };

  explicit Attending(const AttendArguments &a) : a_(a), group_(a.heads / a.kv_heads) {}

  void begin(const Piece &piece) {
    piece_ = piece;
    const int64_t rows = a_.query_starts[piece.request + 1] - a_.query_starts[piece.request];
    context_ = a_.context_lens[piece.request];
    first_index_ = context_ - rows;
    for (int64_t q = 0; q < piece.count; ++q) {
      rows_[q] = (piece.first_query + q) / group_;
      heads_[q] = (piece.first_query + q) % group_;
    }
    if (a_.gates) add_gates();
  }

  // For each head the gates of whole chunks, as far as the piece's queries see them, and for each
  // key the sum of those after it in its chunk. Sums for a query begin at the query and take in one
  // chunk after another, whatever the piece: later tokens must not round what an earlier one sees.
  void add_gates() {
    const auto [begin, end] = seen_by(piece_);
    const int64_t heads = piece_.heads * group_, size = a_.block_size;
    const int64_t *table = a_.tables + piece_.request * a_.table_width;
    gates_first_ = begin / kKeys * kKeys;
    gates_span_ = (end - gates_first_ + kKeys - 1) / kKeys * kKeys;
    gates_ = gates_buffer_.grow(2 * heads * gates_span_);
    for (int64_t key = begin; key < end;) {
      const int64_t offset = key % size, count = std::min(size - offset, end - key);
      const int64_t row = table[key / size] * a_.heads + piece_.first_head * group_;
      const float *gates = a_.gates + row * size + offset;
      for (int64_t h = 0; h < heads; ++h)
        copy_some(gates + h * size, count, gates_ + 2 * h * gates_span_ + key - gates_first_);
      key += count;
    }
    for (int64_t h = 0; h < heads; ++h) {
      Real *gates = gates_ + 2 * h * gates_span_, *sums = gates + gates_span_;
      std::fill(gates, gates + begin - gates_first_, Real(0));
      std::fill(gates + end - gates_first_, sums, Real(0));
      for (int64_t first = 0; first < gates_span_; first += kKeys) {
        Real later = 0;
        for (int64_t n = first + kKeys - kLanes; n >= first; n -= kLanes) {
          const Vec<Real> own_and_later = sum_later<Real>(load(gates + n));
          store(next_lane<Real>(own_and_later) + later, sums + n);
          later += own_and_later[0];
        }
      }
    }
  }

  // Few numbers, for which calling the library's function takes longer than it does.
  static void copy_some(const float *from, int64_t count, Real *to) {
    int64_t i = 0;
    if constexpr (std::is_same_v<Real, float>)
      for (; i + kLanes <= count; i += kLanes) store(load(from + i), to + i);
    for (; i < count; ++i) to[i] = from[i];
  }

  // Range [first, end) of keys that some query of a piece sees.
  struct Seen {
    int64_t first, end;
  };
  Seen seen_by(const Piece &piece) const {
    const int64_t context = a_.context_lens[piece.request];
    const int64_t rows = a_.query_starts[piece.request + 1] - a_.query_starts[piece.request];
    const int64_t first_row = context - rows + piece.first_query / group_;
    const int64_t last_row = context - rows + (piece.first_query + piece.count - 1) / group_;
    return {a_.window ? std::max<int64_t>(0, first_row - a_.window + 1) : 0,
            a_.causal ? last_row + 1 : context};
  }

  int64_t batch_row(int64_t query) const { return a_.query_starts[piece_.request] + rows_[query]; }
  // `head`: index within the piece.
  int64_t head_of(int64_t head, int64_t query) const {
    return (piece_.first_head + head) * group_ + heads_[query];
  }
  int64_t last_key(int64_t query) const {
    return a_.causal ? first_index_ + rows_[query] : context_ - 1;
  }
  int64_t first_key(int64_t query) const {
    return a_.window ? std::max<int64_t>(0, first_index_ + rows_[query] - a_.window + 1) : 0;
  }
  int64_t place(int64_t head, int64_t query) const {  // in q and out
    return (batch_row(query) * a_.heads + head_of(head, query)) * a_.head_dim;
  }
  int64_t position(int64_t query) const { return a_.positions[batch_row(query)]; }

  // The query times scale and magnitude, rotated for keys of one side if `rotated`.
  template <class T>
  void load_query(int64_t head, int64_t query, Real scale, bool rotated, Side side,
                  Real *to) const {
    const T *from = static_cast<const T *>(a_.q) + place(head, query);
    for (int64_t d = 0; d < a_.head_dim; ++d) to[d] = widen(from[d]) * scale;
    if (a_.storage != kNothing)
      for (int64_t d = 0; d < 2 * a_.pairs; ++d) to[d] *= Real(a_.magnitude);
    const int64_t at = position(query);
    if (rotated) rotate_head(to, to, side == kFar ? a_.far_queries[at] : at);
  }

  // Rotates by the angle of `positions` positions, which may be negative.
  template <class From>
  void rotate_head(const From *from, Real *to, int64_t positions) const {
    const int64_t row = std::abs(positions) * a_.pairs;
    const Real *cosine = static_cast<const Real *>(a_.cosines) + row;
    const Real *sine = static_cast<const Real *>(a_.sines) + row;
    const Real way = positions < 0 ? -1 : 1;
    (a_.interleaved ? rotate_pairs<true, From, Real, Real>
                    : rotate_pairs<false, From, Real, Real>)(from, to, cosine, sine, way, a_.pairs);
    for (int64_t d = 2 * a_.pairs; d < a_.head_dim; ++d) to[d] = widen(from[d]);
  }

  void rotate_key(const Chunk &chunk, int64_t head, int64_t n, Side side, Real *to) const {
    const int64_t at = a_.storage == kPosition ? chunk.positions[n] : chunk.bases[n];
    rotate_head(key(chunk, head, n), to, side == kFar ? a_.far_keys[at] : at);
  }

  // Whether one of these queries sees one of the chunk's keys on this side.
  bool faces(const Chunk &chunk, int64_t query, int64_t count, Side side) const {
    if (!a_.far) return side == kNear;
    for (int64_t q = query; q < query + count; ++q)
      if (side == kFar ? position(q) - chunk.earliest >= a_.far
                       : position(q) - chunk.latest < a_.far)
        return true;
    return false;
  }

  // Replaces scores [count, kKeys] of queries from `query` on, where a key is far.
  void choose_far(const Chunk &chunk, int64_t query, int64_t count, const Real *far,
                  Real *scores) const {
    for (int64_t r = 0; r < count; ++r) {
      const int32_t first = int32_t(a_.far - (position(query + r) - chunk.latest));
#pragma omp simd
      for (int64_t n = 0; n < kKeys; ++n)
        scores[r * kKeys + n] = (chunk.behind[n] >= first ? far : scores)[r * kKeys + n];
    }
  }

  // Locates `count` keys from index `first` on: their entries and positions.
  void find_chunk(const Piece &piece, int64_t first, int64_t count, Chunk &chunk) const {
    const int64_t *table = a_.tables + piece.request * a_.table_width;
    const int64_t *bases = a_.bases + piece.request * a_.table_width;
    chunk.count = count;
    chunk.earliest = INT64_MAX;
    chunk.latest = INT64_MIN;
    int64_t block = first / a_.block_size, offset = first % a_.block_size;
    for (int64_t n = 0; n < count; ++block, offset = 0) {
      const int64_t here = std::min(a_.block_size - offset, count - n);
      const int64_t slot = table[block] * a_.block_size + offset;
#pragma omp simd
      for (int64_t i = 0; i < here; ++i) {
        chunk.entries[n + i] = (slot + i) * a_.kv_heads + piece.first_head;
        chunk.positions[n + i] = bases[block] + offset + i;
        chunk.bases[n + i] = bases[block];
      }
      chunk.earliest = std::min(chunk.earliest, chunk.positions[n]);
      n += here;
      chunk.latest = std::max(chunk.latest, chunk.positions[n - 1]);
    }
    for (int64_t n = 0; n < count; ++n)
      chunk.behind[n] = int32_t(chunk.latest - chunk.positions[n]);
    std::fill(chunk.behind + count, chunk.behind + kKeys, 0);
    // Unused slots are fetched like the others, so they need a valid entry.
    std::fill(chunk.entries + count, chunk.entries + kKeys, count ? chunk.entries[0] : 0);
  }

  const S *key(const Chunk &chunk, int64_t head, int64_t n) const {
    return static_cast<const S *>(a_.keys) + (chunk.entries[n] + head) * a_.head_dim;
  }
  const S *value(const Chunk &chunk, int64_t head, int64_t n) const {
    return static_cast<const S *>(a_.values) + (chunk.entries[n] + head) * a_.head_dim;
  }

  // Gathers the chunk's scales, for all queries under the head.
  void load_scales(const Chunk &chunk, int64_t head) {
    for (int64_t n = 0; n < chunk.count; ++n) {
      key_scales_[n] = a_.key_scales[chunk.entries[n] + head];
      value_scales_[n] = a_.value_scales[chunk.entries[n] + head];
    }
  }

  static void scale(const Real *scales, int64_t keys, Real *scores) {
#pragma omp simd
    for (int64_t n = 0; n < keys; ++n) scores[n] *= scales[n];
  }

  State state_of(int64_t head, int64_t query) const {
    const int64_t row = batch_row(query), query_head = head_of(head, query);
    const int64_t rows = a_.query_starts[a_.requests];
    State state{};
    state.position = a_.positions[row];
    state.base = -INFINITY;
    state.unbiased =
        a_.slopes || a_.bias_table || a_.dense_bias || a_.gates ? INT64_MIN : INT64_MAX;
    if (a_.slopes) state.slope = a_.slopes[query_head];
    if (a_.bias_table) {
      state.table =
          a_.bias_table + (a_.bias_by_row ? query_head * rows + row : query_head) * a_.bias_span;
      state.far = Real(state.table[a_.bias_span - 1]);
      if (state.far == 0 && !a_.bias_by_key)  // T5's window form
        state.unbiased = state.position + a_.bias_zero - (a_.bias_span - 1);
    }
    if (a_.gates) {
      state.gates = gates_ + 2 * (head * group_ + heads_[query]) * gates_span_;
      const int64_t last = last_key(query);
      state.summed_from = last / kKeys * kKeys;
      for (int64_t n = last; n >= state.summed_from; --n)
        state.forgotten += state.gates[n - gates_first_];
    }
    if (a_.dense_bias) state.dense = a_.dense_bias + (query_head * rows + row) * a_.bias_span;
    return state;
  }

  // first: index of the chunk's first key. Scores past the last key may change, too.
  void add_bias(const Chunk &chunk, State &state, int64_t query, int64_t first, int64_t keys,
                Real *scores) const {
    if (chunk.latest <= state.unbiased) return;
    const int32_t nearest = int32_t(state.position - chunk.latest);  // distance
    const int64_t padded = whole_vectors(keys);
    if (a_.slopes) {
      for (int64_t n = 0; n < padded; n += kLanes)
#pragma omp simd
        for (int64_t i = n; i < n + kLanes; ++i)
          scores[i] -= Real(state.slope * float(nearest + chunk.behind[i]));
    }
    if (state.table) {
      const int32_t last = int32_t(a_.bias_span - 1);
      if (!a_.bias_by_key && nearest + a_.bias_zero >= last)  // far keys share the last column
        for (int64_t i = 0; i < padded; ++i) scores[i] += state.far;
      else
        add_columns(chunk, state, nearest, padded, scores);
    }
    if (state.dense) add_row(state.dense, first, keys, scores);
    if (state.gates) add_forgotten(state, last_key(query), first, keys, scores);
  }

  // Rows are far apart in memory, so the next chunk's part, left of this one, is prefetched here.
  static void add_row(const float *row, int64_t first, int64_t keys, Real *scores) {
    const float *from = row + first;
    if (first >= kKeys)
      for (int64_t n = 0; n < kKeys; n += 16) __builtin_prefetch(from - kKeys + n);
#pragma omp simd
    for (int64_t n = 0; n < keys; ++n) scores[n] += Real(from[n]);
  }

  // last: the query's own key. Chunks come from the latest one on, but some may be left out.
  void add_forgotten(State &state, int64_t last, int64_t first, int64_t keys, Real *scores) const {
    const Real *gates = state.gates - gates_first_, *sums = gates + gates_span_;
    if (last < first + kKeys) {
      Real later = 0;
      for (int64_t n = std::min(last - first, keys - 1); n >= 0; --n) {
        scores[n] += later;
        later += gates[first + n];
      }
      return;
    }
    while (state.summed_from > first + kKeys) {
      state.summed_from -= kKeys;
      state.forgotten += sums[state.summed_from] + gates[state.summed_from];
    }
    const Real forgotten = state.forgotten;
    sums += first;
#pragma omp simd
    for (int64_t n = 0; n < keys; ++n) scores[n] += sums[n] + forgotten;
  }

  void add_columns(const Chunk &chunk, const State &state, int32_t nearest, int64_t count,
                   Real *scores) const {
    const int32_t last = int32_t(a_.bias_span - 1);
    // The latest key's column, and the direction of earlier keys' columns.
    const int32_t latest = int32_t(a_.bias_by_key ? chunk.latest : nearest + a_.bias_zero);
    const int32_t way = a_.bias_by_key ? -1 : 1;
    for (int64_t n = 0; n < count; n += kLanes)
#pragma omp simd
      for (int64_t i = n; i < n + kLanes; ++i)
        scores[i] += Real(state.table[std::clamp(latest + way * chunk.behind[i], 0, last)]);
  }

  // Turns scores [count, kKeys] of the chunk's first `keys` keys, for queries from `query` on, into
  // weights relative to each query's base, as `exponentials` leaves them. factors: what the
  // queries' sums must be multiplied by. Returns whether any weight is not 0: far keys under ALiBi
  // have none. Each step runs over all queries, so that the processor does not wait for one query's
  // largest score.
  template <class Exponentials>
  bool weigh(const Chunk &chunk, int64_t query, int64_t count, int64_t first, int64_t keys,
             Real *scores, State *states, Real *factors, Exponentials exponentials) const {
    const int64_t padded = whole_vectors(keys);
    const bool all_seen = padded == keys && first_key(query + count - 1) <= first &&
                          last_key(query) >= first + keys - 1;
    Vec<Real> most[kRows];
    for (int64_t r = 0; r < count; ++r) {
      Real *own = scores + r * kKeys;
      if constexpr (kScaled) scale(key_scales_, keys, own);
      if (a_.cap) soft_cap(padded, own);
      add_bias(chunk, states[r], query + r, first, keys, own);
      if (!all_seen) hide(query + r, first, keys, own);
      most[r] = load(own);
      for (int64_t n = kLanes; n < padded; n += kLanes) {
        const Vec<Real> next = load(own + n);
        most[r] = next > most[r] ? next : most[r];
      }
    }
    for (int64_t r = 0; r < count; ++r) factors[r] = largest_lane<Real>(most[r]);
    bool counts = false;
    for (int64_t r = 0; r < count; ++r) {
      Real *own = scores + r * kKeys;
      const Real largest = factors[r];
      factors[r] = 1;
      if (!(largest - states[r].base >= -kGone) && !any_nan(own, padded)) {
        std::fill(own, own + padded, Real(0));
        continue;
      }
      counts = true;
      if (largest > states[r].base + kAbove) factors[r] = rebase(states[r], largest);
      store(load(states[r].totals) + exponentials(own, padded, states[r].base), states[r].totals);
      if constexpr (kScaled) scale(value_scales_, keys, own);
    }
    return counts;
  }

  // Apart, so that the loop around it stays as small as without.
  __attribute__((noinline)) void soft_cap(int64_t count, Real *scores) const {
    const Real cap = Real(a_.cap);
#pragma omp simd
    for (int64_t n = 0; n < count; ++n) scores[n] = soft_capped(scores[n], cap);
  }

  // Excludes keys that the query does not see, and the padding up to whole vectors.
  void hide(int64_t query, int64_t first, int64_t keys, Real *scores) const {
    const int64_t begin = std::clamp<int64_t>(first_key(query) - first, 0, keys);
    const int64_t end = std::clamp<int64_t>(last_key(query) + 1 - first, begin, keys);
    std::fill(scores, scores + begin, Real(-INFINITY));
    std::fill(scores + end, scores + whole_vectors(keys), Real(-INFINITY));
  }

  // Changes the base; returns the factor on earlier weights.
  static Real rebase(State &state, Real base) {
    const Real factor = exponential(state.base - base);
    state.base = base;
    store(load(state.totals) * factor, state.totals);
    return factor;
  }

  static bool any_nan(const Real *x, int64_t count) {
    int nan = 0;
#pragma omp simd reduction(| : nan)
    for (int64_t i = 0; i < count; ++i) nan |= x[i] != x[i];
    return nan;
  }

  // `count` rounded up to whole vectors.
  static int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

  static Real total_of(const State &state) {
    Real total = 0;
    for (int i = 0; i < kLanes; ++i) total += state.totals[i];
    return total;
  }

  const AttendArguments &a_;
  const int64_t group_;
  Piece piece_;
  int64_t context_, first_index_;
  Real key_scales_[kKeys], value_scales_[kKeys];  // of a chunk in 8 bits
  Buffer<Real> gates_buffer_;
  Real *gates_;  // [heads of the piece, gates and sums of later ones of the chunk, gates_span_]
  int64_t gates_first_, gates_span_;  // keys
  int64_t rows_[kQueries], heads_[kQueries];  // row within the request, head within the group
};

}  // namespace
