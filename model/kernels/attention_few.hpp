// Attention of few queries, as in decoding: keys and values are used where they lie, once each.

#pragma once

#include "attention_base.hpp"

namespace {

constexpr int64_t kFew = 4;  // queries under one key/value head

// All heads of the piece meet a chunk before the next chunk comes: their keys and values lie side
// by side, and memory is read from one end to the other. Head dimensions are whole vectors.
template <class Real, class S>
class FewQueries : Attending<Real, S> {
  typedef Attending<Real, S> Base;
  typedef typename Base::Chunk Chunk;
  using Base::a_, Base::piece_, Base::kLanes, Base::kScaled;

 public:
  explicit FewQueries(const AttendArguments &a) : Base(a) {}

  template <class T>
  void run(const Piece &piece) {
    this->begin(piece);
    const int64_t dim = a_.head_dim, queries = piece.heads * piece.count;
    q_ = q_buffer_.grow(queries * dim);
    sums_ = sums_buffer_.grow(queries * dim);
    softmaxes_ = softmax_buffer_.grow(queries);
    turned_ = a_.frame == kNothing ? nullptr : turned_buffer_.grow(kKeys * kFew * dim);
    for (int64_t h = 0; h < piece.heads; ++h)
      for (int64_t r = 0; r < piece.count; ++r) {
        this->template load_query<T>(h, r, a_.frame == kPosition, query(h, r));
        this->clear(softmax(h, r));
      }
    std::fill(sums_, sums_ + queries * dim, Real(0));
    sweep();
    for (int64_t h = 0; h < piece.heads; ++h)
      for (int64_t r = 0; r < piece.count; ++r) store_query<T>(h, r);
  }

 private:
  // Over all keys that the queries see.
  __attribute__((noinline)) void sweep() {
    const int64_t heads = piece_.heads;
    const int64_t begin = this->first_key(0), end = this->last_key(piece_.count - 1) + 1;
    // Chunks start at multiples of kKeys whatever the rows: a row's sums have one order.
    const int64_t start = begin / kKeys * kKeys;
    this->find_chunk(start, std::min(kKeys, end - start), *chunk_);
    this->prefetch(*chunk_, 0, kKeys);
    for (int64_t first = start; first < end; first += kKeys) {
      this->find_chunk(first + kKeys, std::clamp<int64_t>(end - first - kKeys, 0, kKeys), *next_);
      for (int64_t h = 0; h < heads; ++h) {
        this->prefetch(*next_, kKeys * h / heads, kKeys * (h + 1) / heads);
        attend_head(h, first);
      }
      std::swap(chunk_, next_);
    }
  }

  Real *query(int64_t head, int64_t r) const {
    return q_ + (head * piece_.count + r) * a_.head_dim;
  }
  Real *sum(int64_t head, int64_t r) const {
    return sums_ + (head * piece_.count + r) * a_.head_dim;
  }
  typename Base::Softmax &softmax(int64_t head, int64_t r) const {
    return softmaxes_[head * piece_.count + r];
  }

  void attend_head(int64_t head, int64_t first) {
    alignas(64) Real scores[kFew * kKeys];
    Real factors[kFew];  // of the sums so far
    turn(head);
    if constexpr (kScaled) this->load_scales(*chunk_, head);
    const int64_t keys = chunk_->count;
    for (int64_t n = 0; n < keys; n += kLanes)
      score(head, n, std::min<int64_t>(kLanes, keys - n), scores + n);
    for (int64_t r = 0; r < piece_.count; ++r) {
      Real *own = scores + r * kKeys;
      if constexpr (kScaled) this->scale(this->key_scales_, keys, own);
      this->add_bias(*chunk_, head, r, first, keys, own);
      factors[r] = this->weigh(r, first, keys, own, softmax(head, r));
      if constexpr (kScaled) this->scale(this->value_scales_, keys, own);
    }
    int64_t d = 0;
    for (; d + 4 * kLanes <= a_.head_dim; d += 4 * kLanes)
      add_values<kFew, 4>(head, d, scores, factors);
    for (; d < a_.head_dim; d += kLanes) add_values<kFew, 1>(head, d, scores, factors);
  }

  // Keys of the chunk, or queries once for each of its blocks: these are fewer.
  void turn(int64_t head) {
    if (a_.frame == kPosition)
      for (int64_t n = 0; n < chunk_->count; ++n)
        this->turn_key(*chunk_, head, n, turned_ + n * a_.head_dim);
    if (a_.frame != kBase) return;
    Real *to = turned_;  // [block of the chunk, kFew, head_dim]
    for (int64_t n = 0; n < chunk_->count; ++n) {
      if (n == 0 || chunk_->bases[n] != chunk_->bases[n - 1]) {
        if (n) to += kFew * a_.head_dim;
        for (int64_t r = 0; r < piece_.count; ++r)
          this->turn_head(query(head, r), to + r * a_.head_dim,
                          this->position(r) - chunk_->bases[n]);
      }
      facing_[n] = to;
    }
  }

  // scores [queries, kKeys] of at most kLanes keys, the n-th and on.
  void score(int64_t head, int64_t n, int64_t count, Real *scores) const {
    const auto as_stored = [&](int64_t i) { return this->key(*chunk_, head, n + i); };
    const auto all_alike = [q = query(head, 0)](int64_t) { return q; };
    if (a_.frame == kPosition)
      multiply<kFew>([&](int64_t i) { return turned_ + (n + i) * a_.head_dim; }, all_alike, count,
                     scores);
    else if (a_.frame == kBase)
      multiply<kFew>(as_stored, [&](int64_t i) { return facing_[n + i]; }, count, scores);
    else
      multiply<kFew>(as_stored, all_alike, count, scores);
  }

  // key_at(i) is met by the queries facing(i), [query, head_dim].
  template <int QUERIES, class Key, class Facing>
  void multiply(Key key_at, Facing facing, int64_t count, Real *scores) const {
    if constexpr (QUERIES > 1)
      if (piece_.count < QUERIES) return multiply<QUERIES - 1>(key_at, facing, count, scores);
    Vec<Real> products[QUERIES][kLanes];
    for (int64_t i = count; i < kLanes; ++i)
      for (int r = 0; r < QUERIES; ++r) products[r][i] = Vec<Real>{};
    for (int64_t i = 0; i < count; ++i) {
      const auto *key = key_at(i);
      const Real *q = facing(i);
      Vec<Real> product[QUERIES] = {};
      for (int64_t d = 0; d < a_.head_dim; d += kLanes) {
        const Vec<Real> part = load_wide(key + d);
        for (int r = 0; r < QUERIES; ++r) product[r] += load(q + r * a_.head_dim + d) * part;
      }
      for (int r = 0; r < QUERIES; ++r) products[r][i] = product[r];
    }
    for (int r = 0; r < QUERIES; ++r) store(sum_rows<Real>(products[r]), scores + r * kKeys);
  }

  // Adds the chunk's weighted values to the sums times their factors: coordinates from d on, so
  // many vectors of them.
  template <int QUERIES, int VECTORS>
  void add_values(int64_t head, int64_t d, const Real *weights, const Real *factors) const {
    if constexpr (QUERIES > 1)
      if (piece_.count < QUERIES)
        return add_values<QUERIES - 1, VECTORS>(head, d, weights, factors);
    Vec<Real> sums[QUERIES][VECTORS];
    for (int r = 0; r < QUERIES; ++r)
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = load(sum(head, r) + d + v * kLanes) * factors[r];
    for (int64_t n = 0; n < chunk_->count; ++n) {
      const S *from = this->value(*chunk_, head, n) + d;
      for (int v = 0; v < VECTORS; ++v) {
        const Vec<Real> part = load_wide(from + v * kLanes);
        for (int r = 0; r < QUERIES; ++r) sums[r][v] += weights[r * kKeys + n] * part;
      }
    }
    for (int r = 0; r < QUERIES; ++r)
      for (int v = 0; v < VECTORS; ++v) store(sums[r][v], sum(head, r) + d + v * kLanes);
  }

  template <class T>
  void store_query(int64_t head, int64_t r) const {
    const Real inverse = this->inverse_total(softmax(head, r));
    T *to = static_cast<T *>(a_.out) + this->place(head, r);
    for (int64_t d = 0; d < a_.head_dim; ++d) narrow(sum(head, r)[d] * inverse, to + d);
  }

  Buffer<Real> q_buffer_, sums_buffer_, turned_buffer_;
  Buffer<typename Base::Softmax> softmax_buffer_;
  Real *q_, *sums_, *turned_;  // q_, sums_ [head, query, head_dim]
  typename Base::Softmax *softmaxes_;
  const Real *facing_[kKeys];
  Chunk chunks_[2], *chunk_ = chunks_, *next_ = chunks_ + 1;
};

}  // namespace
