// Attention for few queries, as in decoding: keys and values are read in place, once each.

#pragma once

#include <atomic>
#include <vector>

#include "base.hpp"

namespace {

constexpr int64_t kFew = 4;  // at most, per key/value head

// All heads of a piece process a chunk before the next chunk: their keys and values are adjacent in
// memory. With each key processed, one that comes kKeys later is prefetched, in storage order, so
// that memory is read in long runs. Head dimensions are whole vectors.
//
// The later and the earlier half of the keys are summed separately even where one task processes
// both, so that a request's sums do not depend on how many other requests there are.
//
// DIM: head_dim where it is known at compile time, or 0.
template <class Real, class S, int64_t DIM>
class FewQueries : Attending<Real, S, 32> {
  typedef Attending<Real, S, 32> Base;
  typedef typename Base::Chunk Chunk;
  typedef typename Base::State State;
  using Base::a_, Base::piece_, Base::kKeys, Base::kLanes, Base::kPanel, Base::kScaled;

  auto dim() const {
    if constexpr (DIM)
      return std::integral_constant<int64_t, DIM>();
    else
      return a_.head_dim;
  }

  // Running sums over one half of the keys: [head, query] and [head, query, head_dim].
  struct Sums {
    State *states;
    Real *values;
  };

 public:
  // Where tasks store the sums of their halves. The second to finish combines both.
  class Pairs {
   public:
    Pairs(const AttendArguments &a, const std::vector<Piece> &pieces)
        : dim_(a.head_dim), queries_(0), arrived_(pieces.size()) {
      for (const Piece &piece : pieces)
        if (piece.half != kWhole) queries_ = std::max(queries_, piece.heads * piece.count);
      states_ = state_buffer_.grow(queries_ * pieces.size());
      values_ = value_buffer_.grow(queries_ * pieces.size() * dim_);
    }
    Sums of(int64_t pair, Half half) {
      const int64_t first = (2 * pair + half) * queries_;
      return {states_ + first, values_ + first * dim_};
    }
    bool complete(int64_t pair) { return arrived_[pair].fetch_add(1) == 1; }

   private:
    int64_t dim_, queries_;
    Buffer<State> state_buffer_;
    Buffer<Real> value_buffer_;
    State *states_;
    Real *values_;
    std::vector<std::atomic<int>> arrived_;
  };

  explicit FewQueries(const AttendArguments &a) : Base(a) {}

  // next_piece: the argument of the following call, or null if unknown.
  template <class T>
  void run(const Piece &piece, const Piece *next_piece, Pairs &pairs) {
    this->begin(piece);
    const int64_t dim = a_.head_dim, queries = piece.heads * piece.count;
    q_ = q_buffer_.grow((a_.far ? 2 : 1) * queries * dim);
    row_ = row_buffer_.grow(dim);
    rotated_ = a_.storage == kNothing ? nullptr : rotated_buffer_.grow(kKeys * kFew * dim);
    for (const Side side : {kNear, kFar})
      if (side == kNear || a_.far) load_queries<T>(side);
    State *states = state_buffer_.grow(2 * queries);
    Real *values = sums_buffer_.grow(2 * queries * dim);
    for (const Half half : {kLater, kEarlier}) {
      halves_[half] = piece.half == kWhole
                          ? Sums{states + half * queries, values + half * queries * dim}
                          : pairs.of(piece.pair, half);
      if (piece.half == kWhole || piece.half == half) clear(halves_[half]);
    }
    sweep(next_piece);
    if (piece.half != kWhole && !pairs.complete(piece.pair)) return;
    for (int64_t h = 0; h < piece.heads; ++h)
      for (int64_t r = 0; r < piece.count; ++r) store_query<T>(h, r);
  }

 private:
  template <class T>
  void load_queries(Side side) {
    side_ = side;
    for (int64_t h = 0; h < piece_.heads; ++h)
      for (int64_t r = 0; r < piece_.count; ++r) {
        this->template load_query<T>(h, r, Real(a_.scale), a_.storage == kPosition, side, row_);
        if (a_.storage == kNothing)
          lay_out(row_, query(h, r));
        else
          std::copy(row_, row_ + a_.head_dim, query(h, r));
      }
  }

  void clear(const Sums &half) const {
    const int64_t queries = piece_.heads * piece_.count;
    for (int64_t h = 0; h < piece_.heads; ++h)
      for (int64_t r = 0; r < piece_.count; ++r)
        new (half.states + h * piece_.count + r) State(this->state_of(h, r));
    std::fill(half.values, half.values + queries * a_.head_dim, Real(0));
  }

  // The order in which a piece's keys are processed: chunks from `first` down to `stop`, of which
  // those from `split` on are the later half. Latest keys first: few scores that follow are then
  // larger. Chunks start at multiples of kKeys.
  struct Way {
    int64_t first, stop, split, end;
    int64_t keys_from(int64_t chunk) const {
      return chunk < stop ? 0 : std::min(kKeys, end - chunk);
    }
  };
  Way way_of(const Piece &piece) const {
    const auto [begin, end] = this->seen_by(piece);
    const int64_t start = begin / kKeys * kKeys;
    const int64_t split = (start + end + kKeys) / 2 / kKeys * kKeys;
    return {piece.half == kEarlier ? split - kKeys : (end - 1) / kKeys * kKeys,
            piece.half == kLater ? split : start, split, end};
  }

  // Processes the keys that the piece's queries see. Along with the last ones, the first keys of
  // the next piece, if there is one, are prefetched.
  __attribute__((noinline)) void sweep(const Piece *next_piece) {
    const Way way = way_of(piece_);
    const bool fetched = fetched_;
    fetched_ = next_piece && way.first >= way.stop;
    if (way.first < way.stop) return;
    if (!fetched) {
      this->find_chunk(piece_, way.first, way.keys_from(way.first), *chunk_);
      fetch_entries(*chunk_, 0, chunk_->count);
    }
    for (int64_t first = way.first; first >= way.stop; first -= kKeys) {
      if (first > way.stop || !next_piece)
        this->find_chunk(piece_, first - kKeys, way.keys_from(first - kKeys), *next_);
      else {
        const Way next_way = way_of(*next_piece);
        this->find_chunk(*next_piece, next_way.first, next_way.keys_from(next_way.first), *next_);
      }
      // Prefetches that this chunk has too few keys to spread over.
      const int64_t at_once = std::min(kKeys - chunk_->count, next_->count);
      fetch_entries(*next_, 0, at_once);
      keys_ahead_ = {static_cast<const S *>(a_.keys), next_->entries + at_once};
      values_ahead_ = {static_cast<const S *>(a_.values), next_->entries + at_once};
      sums_ = halves_[first < way.split ? kEarlier : kLater];
      for (int64_t h = 0; h < piece_.heads; ++h) attend_head(h, first);
      std::swap(chunk_, next_);
    }
  }

  void fetch_entries(const Chunk &chunk, int64_t from, int64_t to) const {
    for (int64_t n = from; n < to; ++n)
      for (int64_t h = 0; h < piece_.heads; ++h) {
        fetch(this->key(chunk, h, n), dim());
        fetch(this->value(chunk, h, n), dim());
      }
  }

  // Prefetches an entry into the second-level cache: a chunk of all heads is too large for the
  // first. Inlined, because compilers drop calls of a function that does nothing else.
  __attribute__((always_inline)) static void fetch(const S *entry, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(S))) __builtin_prefetch(entry + d, 0, 2);
  }

  // What to prefetch next: the part of one head in an entry of all heads.
  struct Ahead {
    const S *stored;
    const int64_t *entry;
    int64_t head;
  };
  __attribute__((always_inline)) void fetch_one(Ahead &ahead) {
    fetch(ahead.stored + (*ahead.entry + ahead.head) * dim(), dim());
    if (++ahead.head < piece_.heads) return;
    ahead.head = 0;
    ++ahead.entry;
  }

  // Calls `act` for every d with the coordinate that load_vectors puts there.
  template <class Act>
  void each_coordinate(Act act) const {
    int64_t first = 0;
    for (; first + kPanel <= a_.head_dim; first += kPanel)
#pragma GCC unroll 64
      for (int i = 0; i < kPanel; ++i) act(first + i, first + place_of_lane<S>(i));
    for (; first < a_.head_dim; ++first) act(first, first);
  }
  void lay_out(const Real *from, Real *to) const {
    each_coordinate([&](int64_t d, int64_t coordinate) { to[d] = from[coordinate]; });
  }

  template <int COUNT, class X>
  static void load_vectors(const X *from, Vec<Real> *to) {
    if constexpr (COUNT == 1)
      to[0] = load_wide(from);
    else
      for (int v = 0; v < COUNT; v += 2) load_two(from + v * kLanes, to[v], to[v + 1]);
  }

  Real *query(int64_t head, int64_t r) const {
    return q_ + ((side_ * piece_.heads + head) * piece_.count + r) * dim();
  }
  Real *sum(const Sums &of, int64_t head, int64_t r) const {
    return of.values + (head * piece_.count + r) * dim();
  }
  State *state(const Sums &of, int64_t head, int64_t r) const {
    return of.states + head * piece_.count + r;
  }

  __attribute__((noinline)) void attend_head(int64_t head, int64_t first) {
    alignas(64) Real scores[kFew * kKeys];
    Real factors[kFew];  // on the sums so far
    if constexpr (kScaled) this->load_scales(*chunk_, head);
    const int64_t keys = chunk_->count;
    score_chunk(head, scores);
    if (!this->weigh(*chunk_, 0, piece_.count, first, keys, scores, state(sums_, head, 0), factors,
                     exponentials<Real>)) {
      // No value is needed, but the other heads rely on every head to prefetch its share.
      for (int64_t n = 0; n < keys; ++n) fetch_one(values_ahead_);
      return;
    }
    const auto dim = this->dim();
    int64_t d = 0;
    if constexpr (kVectorBytes == 64)  // else registers cannot hold that many sums
      for (; d + 2 * kPanel <= dim; d += 2 * kPanel) add_values<kFew, 4>(head, d, scores, factors);
    for (; d + kPanel <= dim; d += kPanel) add_values<kFew, 2>(head, d, scores, factors);
    for (; d < dim; d += kLanes) add_values<kFew, 1>(head, d, scores, factors);
  }

  // scores [queries, kKeys] of the chunk's keys. Few chunks have keys on both sides.
  void score_chunk(int64_t head, Real *scores) {
    const bool near = this->faces(*chunk_, 0, piece_.count, kNear);
    const bool both = near && this->faces(*chunk_, 0, piece_.count, kFar);
    side_ = near ? kNear : kFar;
    score_side(head, true, scores);
    if (!both) return;
    alignas(64) Real far[kFew * kKeys];
    side_ = kFar;
    score_side(head, false, far);
    this->choose_far(*chunk_, 0, piece_.count, far, scores);
  }
  void score_side(int64_t head, bool fetching, Real *scores) {
    rotate(head, fetching);
    for (int64_t n = 0; n < chunk_->count; n += kLanes)
      score(head, n, std::min<int64_t>(kLanes, chunk_->count - n), scores + n);
  }

  // Rotates keys of the chunk, or queries once for each of its blocks, where these are fewer.
  void rotate(int64_t head, bool fetching) {
    if (a_.storage == kPosition)
      for (int64_t n = 0; n < chunk_->count; ++n) {
        if (fetching) fetch_one(keys_ahead_);
        this->rotate_key(*chunk_, head, n, side_, rotated_ + n * a_.head_dim);
      }
    if (a_.storage != kBase) return;
    Real *to = rotated_;  // [block of the chunk, kFew, head_dim]
    for (int64_t n = 0; n < chunk_->count; ++n) {
      if (n == 0 || chunk_->bases[n] != chunk_->bases[n - 1]) {
        if (n) to += kFew * a_.head_dim;
        for (int64_t r = 0; r < piece_.count; ++r) {
          this->rotate_head(query(head, r), row_, this->position(r) - chunk_->bases[n]);
          lay_out(row_, to + r * a_.head_dim);
        }
      }
      facing_[n] = to;
    }
  }

  // scores [queries, kKeys] of `count` keys, at most kLanes, from the n-th on.
  void score(int64_t head, int64_t n, int64_t count, Real *scores) {
    const auto as_stored = [keys = static_cast<const S *>(a_.keys) + head * a_.head_dim,
                            here = chunk_->entries + n, dim = dim(), this](int64_t i) {
      fetch_one(keys_ahead_);
      return keys + here[i] * dim;
    };
    const auto all_alike = [q = query(head, 0)](int64_t) { return q; };
    if (a_.storage == kPosition)
      multiply<kFew>([&](int64_t i) { return rotated_ + (n + i) * dim(); }, all_alike, count,
                     scores);
    else if (a_.storage == kBase)
      multiply<kFew>(as_stored, [&](int64_t i) { return facing_[n + i]; }, count, scores);
    else
      multiply<kFew>(as_stored, all_alike, count, scores);
  }

  // Multiplies key_at(i) by the queries facing(i), [query, head_dim].
  template <int QUERIES, class Key, class Facing>
  void multiply(Key key_at, Facing facing, int64_t count, Real *scores) const {
    if constexpr (QUERIES > 1)
      if (piece_.count < QUERIES) return multiply<QUERIES - 1>(key_at, facing, count, scores);
    Vec<Real> products[QUERIES][kLanes];
    for (int64_t i = count; i < kLanes; ++i)
      for (int r = 0; r < QUERIES; ++r) products[r][i] = Vec<Real>{};
    const auto dim = this->dim();
    for (int64_t i = 0; i < count; ++i) {
      const auto *key = key_at(i);
      const Real *q = facing(i);
      Vec<Real> product[QUERIES] = {};
      int64_t d = 0;
      for (; d + 2 * kPanel <= dim; d += 2 * kPanel)
        multiply_part<QUERIES, 4>(key, q, dim, d, product);
      for (; d + kPanel <= dim; d += kPanel) multiply_part<QUERIES, 2>(key, q, dim, d, product);
      for (; d < dim; d += kLanes) multiply_part<QUERIES, 1>(key, q, dim, d, product);
      for (int r = 0; r < QUERIES; ++r) products[r][i] = product[r];
    }
    for (int r = 0; r < QUERIES; ++r) store(sum_rows<Real>(products[r]), scores + r * kKeys);
  }

  // Coordinates from d on, VECTORS vectors of them.
  template <int QUERIES, int VECTORS, class K>
  static void multiply_part(const K *key, const Real *q, int64_t dim, int64_t d,
                            Vec<Real> *product) {
    Vec<Real> parts[VECTORS];
    load_vectors<VECTORS>(key + d, parts);
    for (int v = 0; v < VECTORS; ++v)
      for (int r = 0; r < QUERIES; ++r)
        product[r] = plus_product(product[r], load(q + r * dim + d + v * kLanes), parts[v]);
  }

  // Multiplies the sums by their factors and adds the chunk's weighted values: VECTORS vectors of
  // coordinates from d on.
  template <int QUERIES, int VECTORS>
  void add_values(int64_t head, int64_t d, const Real *weights, const Real *factors) {
    if constexpr (QUERIES > 1)
      if (piece_.count < QUERIES)
        return add_values<QUERIES - 1, VECTORS>(head, d, weights, factors);
    Vec<Real> sums[QUERIES][VECTORS];
    for (int r = 0; r < QUERIES; ++r)
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = load(sum(sums_, head, r) + d + v * kLanes) * factors[r];
    const auto dim = this->dim();
    const int64_t keys = chunk_->count;
    const S *values = static_cast<const S *>(a_.values) + head * dim;
    const int64_t *here = chunk_->entries;
    for (int64_t n = 0; n < keys; ++n) {
      if (d == 0) fetch_one(values_ahead_);
      Vec<Real> parts[VECTORS];
      load_vectors<VECTORS>(values + here[n] * dim + d, parts);
      for (int r = 0; r < QUERIES; ++r)
        for (int v = 0; v < VECTORS; ++v) sums[r][v] += weights[r * kKeys + n] * parts[v];
    }
    for (int r = 0; r < QUERIES; ++r)
      for (int v = 0; v < VECTORS; ++v) store(sums[r][v], sum(sums_, head, r) + d + v * kLanes);
  }

  // Combines both halves, relative to the larger base.
  template <class T>
  void store_query(int64_t head, int64_t r) const {
    const State &later = *state(halves_[kLater], head, r);
    const State &earlier = *state(halves_[kEarlier], head, r);
    const Real base = std::max(later.base, earlier.base);
    Real weights[] = {relative(later.base, base), relative(earlier.base, base)};
    const Real total =
        weights[kLater] * this->total_of(later) + weights[kEarlier] * this->total_of(earlier);
    for (Real &weight : weights) weight /= total;
    const Real *late = sum(halves_[kLater], head, r), *early = sum(halves_[kEarlier], head, r);
    T *to = static_cast<T *>(a_.out) + this->place(head, r);
    each_coordinate([&](int64_t d, int64_t coordinate) {
      narrow(late[d] * weights[kLater] + early[d] * weights[kEarlier], to + coordinate);
    });
  }

  static Real relative(Real base, Real largest) {
    return base == largest ? Real(1) : exponential(base - largest);
  }

  Buffer<Real> q_buffer_, row_buffer_, sums_buffer_, rotated_buffer_;
  Buffer<State> state_buffer_;
  Real *q_, *row_, *rotated_;  // q_ [side, head, query, head_dim]
  Side side_;                  // of the chunk's keys that are looked at
  Sums halves_[2], sums_;     // sums_: those of the chunk's half
  const Real *facing_[kKeys];
  Chunk chunks_[2], *chunk_ = chunks_, *next_ = chunks_ + 1;
  Ahead keys_ahead_, values_ahead_;
  bool fetched_ = false;  // whether *chunk_ holds the next piece's first keys, prefetched
};

}  // namespace
