// Attention for many queries, as in prefill: a chunk's keys and values are rearranged once for all.

#pragma once

#include "base.hpp"
#include "panels.hpp"

namespace {

constexpr int64_t kManyKeys = 192;  // per chunk: fewer cost more for largest scores

// For one key/value head, in tiles of kRows queries. Keys: WidenedKeys, or PairedKeys where keys
// are not rotated here. Values: WidenedValues or PairedValues.
template <class Real, class S, class Keys, class Values>
class ManyQueries : Attending<Real, S, kManyKeys> {
  typedef Attending<Real, S, kManyKeys> Base;
  typedef typename Base::Chunk Chunk;
  typedef typename Keys::Number KeyNumber;
  using Base::a_, Base::piece_, Base::kKeys, Base::kLanes, Base::kPanel, Base::kScaled;

 public:
  explicit ManyQueries(const AttendArguments &a)
      : Base(a),
        query_scale_(Keys::scale_of_query(a.scale)),
        score_scale_(Real(a.scale / query_scale_)),
        steps_((a.head_dim + Keys::kInputs - 1) / Keys::kInputs),
        panels_((a.head_dim + kPanel - 1) / kPanel),
        sides_(a.far ? 2 : 1) {}

  template <class T>
  void run(const Piece &piece) {
    this->begin(piece);
    make_room();
    load_queries<T>();
    std::fill(sums_, sums_ + piece.count * panels_ * kPanel, Real(0));
    for (int64_t r = 0; r < piece.count; ++r)
      new (states_ + r) typename Base::State(this->state_of(0, r));
    sweep();
    store_queries<T>();
  }

 private:
  // Processes all keys that the queries see.
  __attribute__((noinline)) void sweep() {
    const int64_t count = piece_.count;
    const auto [begin, end] = this->seen_by(piece_);
    // Latest keys first: few scores that follow are then larger. Chunks start at multiples of kKeys
    // whatever the rows, so that a row is always summed in one order.
    const int64_t start = begin / kKeys * kKeys, last = (end - 1) / kKeys * kKeys;
    for (int64_t first = last; first >= start; first -= kKeys) {
      this->find_chunk(piece_, first, std::min(kKeys, end - first), chunk_);
      for (const Side side : {kNear, kFar})
        if (this->faces(chunk_, 0, count, side)) lay_out_keys(side);
      lay_out_values();
      if constexpr (kScaled) this->load_scales(chunk_, 0);
      for (int64_t at = 0; at < count; at += kRows) {
        const int64_t queries = std::min<int64_t>(kRows, count - at);
        const int64_t keys = std::min(chunk_.count, this->last_key(at + queries - 1) + 1 - first);
        if (keys > 0 && this->first_key(at) < first + keys) attend_tile(at, queries, first, keys);
      }
    }
  }

  void make_room() {
    if (q_) return;
    q_ = q_buffer_.grow(sides_ * (kQueries * steps_ + kLanes));  // filling writes past the end
    sums_ = sums_buffer_.grow(kQueries * panels_ * kPanel);
    keys_ = keys_buffer_.grow(sides_ * kKeys * steps_ * Keys::kInputs);
    values_ = values_buffer_.grow(kKeys * panels_ * kPanel);
    std::fill(values_, values_ + kKeys * panels_ * kPanel, typename Values::Number{});
    tile_ = tile_buffer_.grow(kRows * a_.head_dim);
    rotated_ = a_.storage == kNothing ? nullptr : rotated_buffer_.grow(kLanes * a_.head_dim);
  }

  // q_ [side, tile, steps_, queries of the tile].
  template <class T>
  void load_queries() {
    for (int64_t side = 0; side < sides_; ++side)
      for (int64_t at = 0; at < piece_.count; at += kRows) {
        const int64_t queries = std::min<int64_t>(kRows, piece_.count - at);
        for (int64_t r = 0; r < queries; ++r)
          this->template load_query<T>(0, at + r, query_scale_, a_.storage != kNothing,
                                       Side(side), tile_ + r * a_.head_dim);
        Keys::fill_queries(tile_, a_.head_dim, queries, queries_of(at, Side(side)));
      }
  }

  typename Keys::Factor *queries_of(int64_t at, Side side) const {
    return q_ + side * (kQueries * steps_ + kLanes) + at * steps_;
  }

  // keys_ [side, panel of keys, steps_, kPanel, Keys::kInputs].
  void lay_out_keys(Side side) {
    for (int64_t n = 0; n < chunk_.count; n += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, chunk_.count - n);
      KeyNumber *to = panel_of_key(n, side) + n % kPanel * Keys::kInputs;
      const auto stored = [&](int64_t i) { return this->key(chunk_, 0, n + i); };
      if constexpr (std::is_same_v<KeyNumber, Real>)
        if (a_.storage != kNothing) {
          for (int64_t i = 0; i < count; ++i)
            this->rotate_key(chunk_, 0, n + i, side, rotated_ + i * a_.head_dim);
          const auto rotated = [&](int64_t i) { return rotated_ + i * a_.head_dim; };
          Keys::fill_columns(rotated, count, a_.head_dim, to);
          continue;
        }
      Keys::fill_columns(stored, count, a_.head_dim, to);
    }
  }

  KeyNumber *panel_of_key(int64_t n, Side side) const {
    return keys_ + (side * kKeys + n / kPanel * kPanel) * steps_ * Keys::kInputs;
  }

  // values_ [panel of coordinates, kKeys / Values::kInputs, kPanel, Values::kInputs].
  void lay_out_values() {
    const auto stored = [&](int64_t n) { return this->value(chunk_, 0, n); };
    for (int64_t n = 0; n < chunk_.count; n += Values::kInputs)
      Values::fill_rows(stored, n, chunk_.count, a_.head_dim, kKeys * kPanel, values_);
  }

  void attend_tile(int64_t at, int64_t queries, int64_t first, int64_t keys) {
    alignas(64) Real scores[kRows * kKeys];
    const bool near = this->faces(chunk_, at, queries, kNear);
    score(at, queries, keys, near ? kNear : kFar, scores);
    if (near && this->faces(chunk_, at, queries, kFar)) {
      alignas(64) Real far[kRows * kKeys];
      score(at, queries, keys, kFar, far);
      this->choose_far(chunk_, at, queries, far, scores);
    }
    if (score_scale_ != 1)
      for (int64_t n = 0; n < queries * kKeys; ++n) scores[n] *= score_scale_;
    Real factors[kRows];
    if (!this->weigh(chunk_, at, queries, first, keys, scores, states_ + at, factors,
                     Values::exponentials))
      return;
    for (int64_t r = 0; r < queries; ++r)
      if (factors[r] != 1)
        for (int64_t p = 0; p < panels_; ++p)
          for (int64_t j = 0; j < kPanel; ++j)
            sums_of(at, queries, p)[r * kPanel + j] *= factors[r];
    const int64_t steps = (keys + Values::kInputs - 1) / Values::kInputs;
    const auto *weights = reinterpret_cast<const typename Values::Factor *>(scores);
    for (int64_t p = 0; p < panels_; ++p)
      multiply<kRows, 1, kKeys, kPanel, kPanel>(queries, weights, steps,
                                                values_ + p * kKeys * kPanel,
                                                sums_of(at, queries, p));
  }

  void score(int64_t at, int64_t queries, int64_t keys, Side side, Real *scores) const {
    for (int64_t n = 0; n < keys; n += kPanel)
      multiply<kRows, 0, 1, kKeys, kPanel, true>(queries, queries_of(at, side), steps_,
                                                 panel_of_key(n, side), scores + n);
  }

  // sums_ [tile, panel of coordinates, queries of the tile, kPanel].
  Real *sums_of(int64_t at, int64_t queries, int64_t panel) const {
    return sums_ + (at * panels_ + panel * queries) * kPanel;
  }

  template <class T>
  void store_queries() const {
    for (int64_t at = 0; at < piece_.count; at += kRows) {
      const int64_t queries = std::min<int64_t>(kRows, piece_.count - at);
      for (int64_t r = 0; r < queries; ++r) {
        const Real inverse = 1 / this->total_of(states_[at + r]);
        T *to = static_cast<T *>(a_.out) + this->place(0, at + r);
        for (int64_t p = 0; p < panels_; ++p, to += kPanel) {
          const Real *from = sums_of(at, queries, p) + r * kPanel;
          const int64_t columns = std::min<int64_t>(kPanel, a_.head_dim - p * kPanel);
          if constexpr (kPairs<T>)
            if (columns == kPanel) {
              store_narrowed(load(from) * inverse, load(from + kLanes) * inverse, to);
              continue;
            }
          for (int64_t j = 0; j < columns; ++j) narrow(from[j] * inverse, to + j);
        }
      }
    }
  }

  const Real query_scale_, score_scale_;
  const int64_t steps_, panels_;  // per head: multiplication steps, and panels of columns
  const int64_t sides_;
  Buffer<typename Keys::Factor> q_buffer_;
  Buffer<KeyNumber> keys_buffer_;
  Buffer<typename Values::Number> values_buffer_;
  Buffer<Real> sums_buffer_, tile_buffer_, rotated_buffer_;
  typename Keys::Factor *q_ = nullptr;
  KeyNumber *keys_;
  typename Values::Number *values_;
  Real *sums_, *tile_, *rotated_;
  typename Base::State states_[kQueries];
  Chunk chunk_;
};

}  // namespace
