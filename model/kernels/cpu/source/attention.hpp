// Attention over the paged cache: any bias, any key storage, several queries per request.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "attention/few.hpp"
#include "attention/many.hpp"
#include "team.hpp"

namespace {

constexpr int64_t kUsualHead = 64;  // a head_dim with specialised code
constexpr int64_t kShort = 32;  // contexts of so few keys are not worth splitting

// Whether each row's output is needed.
inline std::vector<char> needed_rows(const AttendArguments &a) {
  std::vector<char> needed(a.query_starts[a.requests], !a.kept);
  for (int64_t i = 0; i < a.kept_rows; ++i) needed[a.kept[i]] = 1;
  return needed;
}

// Queries that share a key/value head are computed together, or cut into pieces if they are many.
// Where there are too few requests for the threads, two tasks take half of the keys each.
inline std::vector<Piece> pieces_of(const AttendArguments &a, int64_t threads,
                                    bool whole_vectors) {
  std::vector<Piece> pieces;
  const int64_t group = a.heads / a.kv_heads;
  const bool requests_suffice = threads == 1 || a.requests >= 2 * threads;
  const std::vector<char> needed = needed_rows(a);
  // Keys are rearranged once per piece, so pieces should be large, but enough for all threads.
  const bool enough = a.query_starts[a.requests] * a.heads >= 8 * threads * kQueries;
  const int64_t size = enough ? kQueries : kQueries / 2;
  int64_t pairs = 0;
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t queries = (a.query_starts[r + 1] - a.query_starts[r]) * group;
    // A prompt's rows are summed in one order, however few of them a step computes.
    const bool few = queries <= kFew && whole_vectors && !(a.prompts && a.prompts[r]);
    const bool halves = few && !requests_suffice && a.context_lens[r] > kShort;
    const bool all_heads = few && (requests_suffice || 2 * a.requests >= threads);
    const int64_t heads = all_heads ? a.kv_heads : 1;
    for (int64_t first = 0; first < queries; first += size) {
      const int64_t count = std::min(size, queries - first);
      const auto row = needed.begin() + a.query_starts[r];
      if (std::count(row + first / group, row + (first + count - 1) / group + 1, 1) == 0) continue;
      for (int64_t head = 0; head < a.kv_heads; head += heads) {
        Piece piece{r, head, heads, first, count, few};
        if (!halves) {
          pieces.push_back(piece);
          continue;
        }
        piece.pair = pairs++;
        for (const Half half : {kLater, kEarlier}) {
          piece.half = half;
          pieces.push_back(piece);
        }
      }
    }
  }
  return pieces;
}

template <class T, class S, class Keys, class Values, int64_t DIM>
void attend_with_heads(Team &team, const AttendArguments &a) {
  typedef typename RealOf<T>::type Real;
  const bool whole_vectors = a.head_dim % kLanes<Real> == 0;
  const std::vector<Piece> pieces = pieces_of(a, team.size(), whole_vectors);
  typedef FewQueries<Real, S, DIM> Few;
  typename Few::Pairs pairs(a, pieces);
  // Pieces are taken from the end: a prompt's last queries see most keys and must not come last.
  std::atomic<int64_t> left(pieces.size());
  team.each([&](int64_t) {
    Few few(a);
    ManyQueries<Real, S, Keys, Values> many(a);
    const int64_t enough = 4 * team.size();  // with fewer left, taking two could idle a thread
    const auto take = [&] { return left.fetch_sub(1) - 1; };
    for (int64_t i = take(), next; i >= 0; i = next) {
      const bool ahead = i >= enough;
      next = ahead ? take() : -1;
      if (pieces[i].few)
        few.template run<T>(pieces[i], next >= 0 && pieces[next].few ? &pieces[next] : nullptr,
                            pairs);
      else
        many.template run<T>(pieces[i]);
      if (!ahead) next = take();
    }
  });
}

template <class T, class S, class Keys, class Values>
void attend_with(Team &team, const AttendArguments &a) {
  // With 32-byte registers specialised code gains little, and doubles are only for tests.
  if constexpr (kVectorBytes == 64 && !std::is_same_v<T, double>)
    if (a.head_dim == kUsualHead) return attend_with_heads<T, S, Keys, Values, kUsualHead>(team, a);
  attend_with_heads<T, S, Keys, Values, 0>(team, a);
}

template <class T, class S>
void attend_stored(Team &team, const AttendArguments &a) {
  typedef typename RealOf<T>::type Real;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<S, bf16>) {
    if (a.storage == kNothing) return attend_with<T, S, PairedKeys, PairedValues>(team, a);
    return attend_with<T, S, WidenedKeys<Real, S>, PairedValues>(team, a);
  }
#endif
  attend_with<T, S, WidenedKeys<Real, S>, WidenedValues<Real, S>>(team, a);
}

template <class T>
void attend(Team &team, const AttendArguments &a) {
  if constexpr (!std::is_same_v<T, double>)  // doubles are only for tests
    if (a.key_scales) return attend_stored<T, int8_t>(team, a);
  attend_stored<T, T>(team, a);
}

}  // namespace
