// From rows of logits to tokens. model/sampler.py defines what is drawn; this never sorts a whole
// row where its most likely tokens suffice.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "team.hpp"
#include "vectors.hpp"

namespace {

// The maximum of x[from, to), NaN if it has one.
template <class T>
float largest_of(const T *x, int64_t from, int64_t to) {
  float most = -std::numeric_limits<float>::infinity();
  int nan = 0;
#pragma omp simd reduction(max : most) reduction(| : nan)
  for (int64_t i = from; i < to; ++i) {
    const float value = widen(x[i]);
    most = std::max(most, value);
    nan |= value != value;
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : most;
}

// The maximum of each row and its first index; NaN for a row with a NaN. If there are few rows,
// every thread scans a part: for one row, the part that it has just computed.
template <class T>
void largest(Team &team, const T *logits, float *values, int64_t *tokens, int64_t rows,
             int64_t vocab) {
  constexpr int64_t kPart = 512;  // elements, scanned a second time for the index
  const int64_t parts = (vocab + kPart - 1) / kPart;
  const std::unique_ptr<float[]> most(new float[rows * parts]);
  team.share(rows * parts, [&](int64_t i) {
    const int64_t first = i % parts * kPart;
    most[i] = largest_of(logits + i / parts * vocab, first, std::min(first + kPart, vocab));
  });
  for (int64_t r = 0; r < rows; ++r) {
    const float *own = most.get() + r * parts;
    values[r] = largest_of(own, 0, parts);
    tokens[r] = 0;
    if (values[r] != values[r]) continue;
    int64_t at = std::find(own, own + parts, values[r]) - own;
    for (at *= kPart; widen(logits[r * vocab + at]) != values[r];) ++at;
    tokens[r] = at;
  }
}

struct Candidate {
  float logit;
  int64_t token;
};

constexpr int64_t kScored = 512;  // elements that are skipped together if none is large enough

// model/sampler.py's token_scores for one row: the largest logit, the token's log-probability, the
// `count` most likely tokens, best first, and theirs. Of equal logits the first counts as larger.
template <class T>
void score_row(const T *row, int64_t vocab, int64_t token, int64_t count, double *found) {
  std::vector<float> most((vocab + kScored - 1) / kScored);
  for (int64_t i = 0; i < int64_t(most.size()); ++i)
    most[i] = largest_of(row, i * kScored, std::min((i + 1) * kScored, vocab));
  const float largest = largest_of(most.data(), 0, most.size());
  double total = 0;
  std::vector<Candidate> best;
  const auto enters = [&](float logit) {
    return int64_t(best.size()) < count || (count > 0 && logit > best.back().logit);
  };
  for (int64_t first = 0; first < vocab; first += kScored) {
    const int64_t end = std::min(first + kScored, vocab);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t i = first; i < end; ++i) part += exponential(widen(row[i]) - largest);
    total += part;
    if (!enters(most[first / kScored])) continue;
    for (int64_t i = first; i < end; ++i) {
      const Candidate own{widen(row[i]), i};
      if (!enters(own.logit)) continue;
      if (int64_t(best.size()) == count) best.pop_back();
      const auto above = [](const Candidate &a, const Candidate &b) { return a.logit > b.logit; };
      best.insert(std::upper_bound(best.begin(), best.end(), own, above), own);
    }
  }
  const double less = largest + std::log(total);
  found[0] = largest;
  found[1] = widen(row[token]) - less;
  for (int64_t i = 0; i < count; ++i) {
    found[2 + i] = double(best[i].token);
    found[2 + count + i] = best[i].logit - less;
  }
}

// Truncation that keeps the most likely tokens.
struct Truncation {
  double temperature;
  int64_t top_k;  // 0: all
  double top_p, min_p;
};

// The most likely tokens, best first: at least all that truncation keeps; exactly top_k of them if
// that is set. They are searched for in ever wider bands below the maximum, so that few are sorted.
inline std::vector<Candidate> best_candidates(const float *row, int64_t vocab, float most,
                                              const Truncation &t, double total) {
  const float steepness = float(1.0 / t.temperature);
  std::vector<Candidate> best;
  double mass = 0;
  float from = -1;  // nats below the best
  for (const float reach : {2.0f, 8.0f, 32.0f, std::numeric_limits<float>::infinity()}) {
    const size_t known = best.size();
    for (int64_t i = 0; i < vocab; ++i) {
      const float below = (most - row[i]) * steepness;
      if (below > from && below <= reach) best.push_back({row[i], i});
    }
    std::sort(best.begin() + known, best.end(), [](const Candidate &a, const Candidate &b) {
      return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
    });
    for (size_t i = known; i < best.size(); ++i)
      mass += std::exp((double(best[i].logit) - most) / t.temperature);
    // top_p and min_p apply to the top_k tokens, so all of these are needed.
    if (t.top_k) {
      if (int64_t(best.size()) >= t.top_k) {
        best.resize(t.top_k);
        break;
      }
    } else if (mass >= t.top_p * total || std::exp(-double(reach)) < t.min_p) {
      break;
    }
    from = reach;
  }
  return best;
}

// The token at `uniform` of the kept candidates, which are sorted best first.
inline int64_t pick(const std::vector<Candidate> &best, const Truncation &t, double total,
                    double uniform) {
  if (best.empty()) return 0;  // the row has no finite maximum
  std::vector<double> edges;
  double before = 0;
  for (const Candidate &each : best) {
    const double weight = std::exp((double(each.logit) - best[0].logit) / t.temperature);
    const bool kept = before < t.top_p * total && weight >= t.min_p && weight > 0;
    if (!edges.empty() && !kept) break;
    edges.push_back(before += weight);
  }
  const auto at = std::upper_bound(edges.begin(), edges.end(), before * uniform);
  return best[std::min<int64_t>(at - edges.begin(), int64_t(edges.size()) - 1)].token;
}

inline int64_t draw(const float *row, int64_t vocab, Truncation t, double uniform) {
  constexpr int64_t kPiece = 256;
  float most = row[0];
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < vocab; ++i) most = std::max(most, row[i]);

  const bool truncated = t.top_k || t.top_p < 1 || t.min_p > 0;
  if (t.top_k >= vocab) t.top_k = 0;
  const float steepness = float(1.0 / t.temperature);
  double total = 0;
  if (t.top_k) {
    const std::vector<Candidate> best = best_candidates(row, vocab, most, t, total);
    for (const Candidate &each : best)
      total += std::exp((double(each.logit) - most) / t.temperature);
    return pick(best, t, total, uniform);
  }

  std::vector<double> ends;  // cumulative sums, piece by piece
  for (int64_t start = 0; start < vocab; start += kPiece) {
    float sum = 0;
    const int64_t stop = std::min(start + kPiece, vocab);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < stop; ++i) sum += exponential((row[i] - most) * steepness);
    ends.push_back(total += sum);
  }

  if (truncated) return pick(best_candidates(row, vocab, most, t, total), t, total, uniform);
  const double wanted = total * uniform;
  const int64_t piece = std::upper_bound(ends.begin(), ends.end(), wanted) - ends.begin();
  int64_t last = 0;  // tokens with a weight above 0, in case rounding leads past the end
  double edge = piece ? ends[piece - 1] : 0;
  for (int64_t i = std::min(piece, int64_t(ends.size()) - 1) * kPiece; i < vocab; ++i) {
    const float weight = exponential((row[i] - most) * steepness);
    if (weight > 0) last = i;
    if ((edge += weight) > wanted) return last;
  }
  return last;
}

// A rule to pick by: `temperature` 0 takes the largest logit.
struct Rule {
  double temperature, top_k, top_p, min_p, uniform;
};

// The tokens of a mask, a bit each, lowest first, and their logits in a row.
struct Allowed {
  std::vector<float> logits;
  std::vector<int64_t> tokens;

  Allowed(const float *row, const uint8_t *mask, int64_t vocab) : logits(vocab), tokens(vocab) {
    int64_t count = 0;
    for (int64_t byte = 0; byte < (vocab + 7) / 8; ++byte) {
      for (unsigned bits = mask[byte]; bits; bits &= bits - 1) {
        const int64_t token = 8 * byte + __builtin_ctz(bits);
        if (token >= vocab) break;
        logits[count] = row[token];
        tokens[count++] = token;
      }
    }
    logits.resize(count);
    tokens.resize(count);
  }
};

// One token for each of `count` rows of logits, among those that its mask allows.
inline void pick_allowed(Team &team, const float *logits, const int64_t *rows,
                         const uint8_t *masks, const Rule *rules, int64_t *tokens, int64_t count,
                         int64_t vocab) {
  team.share(count, [=](int64_t i) {
    const Allowed own(logits + rows[i] * vocab, masks + i * ((vocab + 7) / 8), vocab);
    const std::vector<float> &found = own.logits;
    const Rule &rule = rules[i];
    tokens[i] = 0;
    if (found.empty()) return;
    const int64_t at = rule.temperature
                           ? draw(found.data(), found.size(),
                                  {rule.temperature, int64_t(rule.top_k), rule.top_p, rule.min_p},
                                  rule.uniform)
                           : std::max_element(found.begin(), found.end()) - found.begin();
    tokens[i] = own.tokens[at];
  });
}

}  // namespace
