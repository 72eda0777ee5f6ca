// CPU kernels of the decoder: attention over the paged cache, linear layers over packed weights,
// and the small steps between them. Plain C entry points: no headers but the compiler's own.
//
// Every output row is summed in an order of its own, independent of the other rows of the batch:
// a request's numbers do not change with its neighbours. Arithmetic is float32, or float64 for
// float64; bfloat16 is a storage format here, widened on load and rounded to nearest even on store.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRows = 12;
#else
constexpr int kVectorBytes = 32, kRows = 6;
#endif

template <class Real>
constexpr int kLanes = kVectorBytes / int(sizeof(Real));
// Output columns that one pass over the rows produces.
template <class Real>
constexpr int kPanel = 2 * kLanes<Real>;

template <class Real>
struct VecOf {
  typedef Real type __attribute__((vector_size(kVectorBytes), aligned(sizeof(Real))));
};
template <class Real>
using Vec = typename VecOf<Real>::type;
typedef uint32_t VecBits __attribute__((vector_size(kVectorBytes), aligned(4)));

struct bf16 {
  uint16_t bits;
};

// What a stored number is computed with.
template <class T>
struct RealOf {
  typedef T type;
};
template <>
struct RealOf<bf16> {
  typedef float type;
};

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void narrow(double x, double *y) { *y = x; }
inline void narrow(float x, float *y) { *y = x; }
inline void narrow(float x, bf16 *y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1);
  y->bits = nan ? 0x7fc0 : uint16_t(bits >> 16);
}

template <class Real>
inline Vec<Real> load(const Real *x) {
  return *reinterpret_cast<const Vec<Real> *>(x);
}
template <class Real>
inline void store(Vec<Real> x, Real *y) {
  *reinterpret_cast<Vec<Real> *>(y) = x;
}

// One vector of stored numbers, widened.
inline Vec<double> load_wide(const double *x) { return load(x); }
inline Vec<float> load_wide(const float *x) { return load(x); }
inline Vec<float> load_wide(const bf16 *x) {
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2), aligned(2)));
  const Halves halves = *reinterpret_cast<const Halves *>(x);
  return (Vec<float>)(__builtin_convertvector(halves, VecBits) << 16);
}

// Lane i of row j becomes lane j of row i, by swapping ever smaller blocks off the diagonal.
// The lanes are a parameter pack so that the orders are constants, one instruction each.
template <int STEP, class Real, int... LANE>
inline void swap_blocks(Vec<Real> *rows, std::integer_sequence<int, LANE...> lanes) {
  constexpr int kLanes = sizeof...(LANE);
  typedef decltype(rows[0] < rows[0]) Order;
  const Order upper = {(LANE & STEP ? kLanes + LANE - STEP : LANE)...};
  const Order lower = {(LANE & STEP ? kLanes + LANE : LANE + STEP)...};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & STEP)) {
      const Vec<Real> a = rows[i], b = rows[i + STEP];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + STEP] = __builtin_shuffle(a, b, lower);
    }
  if constexpr (STEP > 1) swap_blocks<STEP / 2, Real>(rows, lanes);
}
template <class Real>
inline void transpose(Vec<Real> *rows) {
  swap_blocks<kLanes<Real> / 2, Real>(rows, std::make_integer_sequence<int, kLanes<Real>>());
}

// Lane i becomes the sum of row i's lanes: transposing, but adding the blocks that meet.
template <int STEP, class Real, int... LANE>
inline Vec<Real> sum_blocks(Vec<Real> *rows, std::integer_sequence<int, LANE...> lanes) {
  constexpr int kLanes = sizeof...(LANE);
  typedef decltype(rows[0] < rows[0]) Order;
  const Order upper = {(LANE & STEP ? kLanes + LANE - STEP : LANE)...};
  const Order lower = {(LANE & STEP ? kLanes + LANE : LANE + STEP)...};
#pragma GCC unroll 16
  for (int i = 0; i < STEP; ++i) {
    const Vec<Real> a = rows[i], b = rows[i + STEP];
    rows[i] = __builtin_shuffle(a, b, upper) + __builtin_shuffle(a, b, lower);
  }
  if constexpr (STEP > 1) return sum_blocks<STEP / 2, Real>(rows, lanes);
  return rows[0];
}
template <class Real>
inline Vec<Real> sum_rows(Vec<Real> *rows) {
  return sum_blocks<kLanes<Real> / 2, Real>(rows,
                                            std::make_integer_sequence<int, kLanes<Real>>());
}

inline double exponential(double x) { return std::exp(x); }

// e^x to about two units in the last place, in a form that compilers vectorise: 2^n times a
// polynomial (Cephes' coefficients) on [-ln 2 / 2, ln 2 / 2]. 0 where it would be subnormal.
inline float exponential(float given) {
  const float x = std::min(std::max(given, -87.0f), 88.0f);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return given < -87.0f ? 0.0f : p * power;  // written so that NaN stays NaN
}

// The two column vectors of one input in a panel. bfloat16 panels interleave them, column j in
// the low and column j + lanes in the high half of a word: widening is then one operation each.
template <class Real>
inline void load_columns(const Real *panel, Vec<Real> &left, Vec<Real> &right) {
  left = load(panel);
  right = load(panel + kLanes<Real>);
}
inline void load_columns(const bf16 *panel, Vec<float> &left, Vec<float> &right) {
  const VecBits words = *reinterpret_cast<const VecBits *>(panel);
  left = (Vec<float>)(words << 16);
  right = (Vec<float>)(words & 0xffff0000u);
}
// Written out, because compilers turn the generic conversion into one instruction per number.
inline Vec<float> widen_bytes(const int8_t *x) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#else
  Vec<float> y;
  for (int i = 0; i < kLanes<float>; ++i) y[i] = x[i];
  return y;
#endif
}
inline void load_columns(const int8_t *panel, Vec<float> &left, Vec<float> &right) {
  left = widen_bytes(panel);
  right = widen_bytes(panel + kLanes<float>);
}
template <class W>
inline int64_t place_in_panel(const W *, int64_t column) {
  return column;
}
inline int64_t place_in_panel(const bf16 *, int64_t column) {
  constexpr int64_t lanes = kLanes<float>;
  return column < lanes ? 2 * column : 2 * (column - lanes) + 1;
}

// Turns the pairs of the first 2 * half coordinates of one head, in place or not. way: 1, or -1
// for the opposite angle.
template <bool INTERLEAVED, class From, class To, class Real>
inline void turn(const From *from, To *to, const Real *cosine, const Real *sine, Real way,
                 int64_t half) {
  constexpr int64_t step = INTERLEAVED ? 2 : 1;
  const int64_t partner = INTERLEAVED ? 1 : half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const Real a = widen(from[i * step]), b = widen(from[i * step + partner]);
    narrow(a * cosine[i] - b * (way * sine[i]), to + i * step);
    narrow(b * cosine[i] + a * (way * sine[i]), to + i * step + partner);
  }
}

// ------------------------------------------------------------------------------------ linear

// packed [panel, input, column]; columns past the last output are zero.
template <class T>
void pack_panels(const T *weight, T *packed, int64_t outputs, int64_t inputs) {
  constexpr int64_t kPanel = ::kPanel<float>;
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t n = p * kPanel + j;
        packed[(p * inputs + k) * kPanel + place_in_panel(weight, j)] =
            n < outputs ? weight[n * inputs + k] : T{};
      }
}

// Adds ROWS rows times one panel to sum [ROWS, panel]. Number k of row r is x[k * K + r * R]:
// with K = 0, the rows lie side by side, as [inputs, ROWS].
template <int ROWS, int K, int R, class Real, class W>
void multiply_tile(const Real *x, int64_t inputs, const W *panel, Real *sum) {
  constexpr int kLanes = ::kLanes<Real>, kPanel = ::kPanel<Real>;
  constexpr int input_step = K ? K : ROWS;
  constexpr int kAhead = sizeof(W) == 1 ? 64 : 24;  // inputs
  Vec<Real> left_sum[ROWS], right_sum[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    left_sum[r] = load(sum + r * kPanel);
    right_sum[r] = load(sum + r * kPanel + kLanes);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec<Real> left, right;
    load_columns(panel + k * kPanel, left, right);
    // Some steps ahead, past the end too: the next piece of the panel usually follows there.
    for (int64_t i = 0; i < kPanel; i += 64 / int64_t(sizeof(W)))
      __builtin_prefetch(panel + (k + kAhead) * kPanel + i);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      left_sum[r] += x[k * input_step + r * R] * left;
      right_sum[r] += x[k * input_step + r * R] * right;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    store(left_sum[r], sum + r * kPanel);
    store(right_sum[r], sum + r * kPanel + kLanes);
  }
}

template <int ROWS, int K = 0, int R = 1, class Real, class W>
void multiply(int64_t rows, const Real *x, int64_t inputs, const W *panel, Real *sum) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply<ROWS - 1, K, R>(rows, x, inputs, panel, sum);
  multiply_tile<ROWS, K, R>(x, inputs, panel, sum);
}

// scale [outputs] or null: what each output's weights are to be multiplied by.
template <class T, class W>
void linear(const T *x, const W *packed, const float *scale, const float *bias, T *y,
            int64_t rows, int64_t inputs, int64_t outputs) {
  constexpr int64_t kPanel = ::kPanel<float>;
  constexpr int64_t kChunk = 8 * kRows;                   // rows per pass over the panels
  constexpr int64_t kDepth = 16384 / kPanel / sizeof(W);  // inputs: 16 KiB of a panel stay in L1
  const int64_t panels = (outputs + kPanel - 1) / kPanel, tiles = (rows + kRows - 1) / kRows;
  // Tile by tile of kRows rows, [inputs, rows of the tile], so that a tile reads one stream.
  const std::unique_ptr<float[]> wide(new float[rows * inputs]);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = t * kRows, count = std::min<int64_t>(kRows, rows - first);
      float *tile = wide.get() + first * inputs;
      for (int64_t k = 0; k < inputs; ++k)
        for (int64_t r = 0; r < count; ++r)
          tile[k * count + r] = widen(x[(first + r) * inputs + k]);
    }
    alignas(64) float sums[kChunk * kPanel];
    for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
      const int64_t chunk_rows = std::min(kChunk, rows - chunk);
#pragma omp for schedule(static) nowait
      for (int64_t p = 0; p < panels; ++p) {
        std::fill(sums, sums + chunk_rows * kPanel, 0.0f);
        for (int64_t k = 0; k < inputs; k += kDepth) {
          const int64_t depth = std::min(kDepth, inputs - k);
          for (int64_t m = 0; m < chunk_rows; m += kRows) {
            const int64_t count = std::min<int64_t>(kRows, chunk_rows - m);
            multiply<kRows>(count, wide.get() + (chunk + m) * inputs + k * count, depth,
                            packed + (p * inputs + k) * kPanel, sums + m * kPanel);
          }
        }
        const int64_t first = p * kPanel, columns = std::min<int64_t>(kPanel, outputs - first);
        for (int64_t m = 0; m < chunk_rows; ++m)
          for (int64_t j = 0; j < columns; ++j)
            narrow(sums[m * kPanel + j] * (scale ? scale[first + j] : 1.0f) +
                       (bias ? bias[first + j] : 0.0f),
                   y + (chunk + m) * outputs + first + j);
      }
    }
  }
}

// --------------------------------------------------------------------------------- attention

extern "C" struct AttendArguments {
  const void *q, *keys, *values;
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
// softmax exact without a second pass (arXiv 2205.14135, algorithm 1).
template <class T>
class AttendTask {
  typedef typename RealOf<T>::type Real;
  static constexpr int kLanes = ::kLanes<Real>, kPanel = ::kPanel<Real>;
  static_assert(kKeys % kPanel == 0);

  struct Chunk {
    int64_t count, places[kKeys], positions[kKeys], bases[kKeys];
    int64_t latest;  // of the positions
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
    for (int64_t n = 0; n < chunk_.count; ++n) prefetch(chunk_.places[n]);
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
    turn_head(static_cast<const T *>(a_.keys) + chunk.places[n], turned_ + n * a_.head_dim,
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
      chunk.positions[n] = bases[block] + offset;
      chunk.bases[n] = bases[block];
      chunk.latest = std::max(chunk.latest, chunk.positions[n]);
      if (++offset == a_.block_size) ++block, offset = 0;
    }
  }

  // keys_ [panel of keys, head_dim, kPanel], values_ [panel of coordinates, kKeys, kPanel].
  // Entries of one head lie apart, so the processor does not foresee the next chunk by itself.
  void widen_chunk(const Chunk &chunk, const Chunk &next) {
    if (by_block_) turn_queries(chunk);
    for (int64_t n = 0; n < chunk.count; n += kLanes) {
      for (int64_t i = n; i < std::min<int64_t>(next.count, n + kLanes); ++i)
        prefetch(next.places[i]);
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
  }

  const T *stored(const Chunk &chunk, int64_t n) const {
    return static_cast<const T *>(a_.keys) + chunk.places[n];
  }

  void prefetch(int64_t place) const {
    for (int64_t d = 0; d < a_.head_dim; d += 64 / int64_t(sizeof(T))) {
      __builtin_prefetch(static_cast<const T *>(a_.keys) + place + d);
      __builtin_prefetch(static_cast<const T *>(a_.values) + place + d);
    }
  }

  // kLanes keys, key(0) and on, become columns; past the last one is zero, as it must not be NaN.
  template <class Key>
  void widen_keys(Key key, int64_t count, Real *to) const {
    int64_t d = 0;
    for (; d + kLanes <= a_.head_dim; d += kLanes) {
      Vec<Real> rows[kLanes] = {};
      if (count == kLanes)
        for (int n = 0; n < kLanes; ++n) rows[n] = load_wide(key(n) + d);
      else
        for (int n = 0; n < count; ++n) rows[n] = load_wide(key(n) + d);
      transpose<Real>(rows);
      for (int i = 0; i < kLanes; ++i) store(rows[i], to + (d + i) * kPanel);
    }
    for (; d < a_.head_dim; ++d)
      for (int n = 0; n < kLanes; ++n)
        to[d * kPanel + n] = n < count ? Real(widen(key(n)[d])) : Real(0);
  }

  void widen_value(int64_t place, Real *to) const {
    const T *value = static_cast<const T *>(a_.values) + place;
    for (int64_t d = 0; d < a_.head_dim; d += kPanel, to += kKeys * kPanel) {
      const int64_t columns = std::min<int64_t>(kPanel, a_.head_dim - d);
      if (columns == kPanel) {
        store(load_wide(value + d), to);
        store(load_wide(value + d + kLanes), to + kLanes);
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
      add_bias(at + r, chunk, keys, scores + r * kKeys);
      weigh(at, queries, r, chunk, keys, scores + r * kKeys);
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
        const Vec<Real> part = load_wide(key + d);
        for (int r = 0; r < QUERIES; ++r) product[r] += load(q + r * a_.head_dim + d) * part;
      }
      for (int r = 0; r < QUERIES; ++r) products[r][i] = product[r];
    }
    for (int r = 0; r < QUERIES; ++r) store(sum_rows<Real>(products[r]), scores + r * kKeys);
  }

  // sums_ [tile, panel of coordinates, queries of the tile, kPanel].
  Real *sums_of(int64_t at, int64_t queries, int64_t panel) const {
    return sums_ + (at * panels_ + panel * queries) * kPanel;
  }

  void add_bias(int64_t query, int64_t chunk, int64_t keys, Real *scores) const {
    const int64_t row = a_.query_starts[request_] + row_of(query);
    const int64_t position = a_.positions[row];
    if (a_.slopes) {
      const float slope = a_.slopes[head_of(query)];
      for (int64_t n = 0; n < keys; ++n)
        scores[n] -= Real(slope * float(position - chunk_.positions[n]));
    }
    if (a_.bias_table) {
      const float *values = a_.bias_table + head_of(query) * a_.bias_span;
      // Far keys share the last column, and under T5 it is zero: nothing to add.
      if (!a_.bias_by_key && values[a_.bias_span - 1] == 0.0f &&
          position - chunk_.latest + a_.bias_zero >= a_.bias_span - 1)
        return;
      for (int64_t n = 0; n < keys; ++n) {
        const int64_t column =
            a_.bias_by_key ? chunk_.positions[n] : position - chunk_.positions[n] + a_.bias_zero;
        scores[n] += Real(values[std::clamp<int64_t>(column, 0, a_.bias_span - 1)]);
      }
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
  Chunk chunk_, next_;
};

template <class T>
void attend(const AttendArguments &a) {
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
    AttendTask<T> task(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
      const Piece &piece = pieces[i / a.kv_heads];
      task.run(piece.request, i % a.kv_heads, piece.first_query, piece.count);
    }
  }
}

// ------------------------------------------------------------------------- between the matrices

// y = x / sqrt(mean(x^2) + eps) * weight; x and y may be the same.
template <class T>
inline void rms_norm_row(const T *x, const T *weight, T *y, int64_t width, float eps) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += widen(x[i]) * widen(x[i]);
  const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) narrow(widen(x[i]) * scale * widen(weight[i]), y + i);
}
template <class T>
void rms_norm(const T *x, const T *weight, T *y, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r)
    rms_norm_row(x + r * width, weight, y + r * width, width, eps);
}

// y = silu(gate) * up; x [rows, 2 width] holds gate, then up.
template <class T>
void gated(const T *x, T *y, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const T *gate = x + r * 2 * width, *up = gate + width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float g = widen(gate[i]);
      narrow(g / (1.0f + exponential(-g)) * widen(up[i]), y + r * width + i);
    }
  }
}

// Turns pairs of the first 2 * half coordinates of each head; x has `stride` elements per row.
template <bool INTERLEAVED, class T>
void rotate(const T *x, T *y, const float *cosines, const float *sines, const int64_t *positions,
            int64_t rows, int64_t stride, int64_t heads, int64_t dim, int64_t half) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const float *cosine = cosines + positions[r] * half, *sine = sines + positions[r] * half;
    for (int64_t h = 0; h < heads; ++h) {
      const T *from = x + r * stride + h * dim;
      T *to = y + (r * heads + h) * dim;
      turn<INTERLEAVED>(from, to, cosine, sine, 1.0f, half);
      std::copy(from + 2 * half, from + dim, to + 2 * half);
    }
  }
}

// ------------------------------------------------------------------------------ whole layers

extern "C" struct LinearArguments {
  const void *packed;
  const float *scale;  // [outputs] of 8-bit weights, or null
  const float *bias;   // [outputs] or null
  int64_t inputs, outputs;
};

extern "C" struct BlockArguments {
  const void *x;             // [rows, width]
  void *y;                   // [kept rows, width]
  void *scratch;             // kernels/block.py knows how many numbers
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm;  // [width] twice, [head_dim] or null
  LinearArguments qkv, out, gate_up, down;
  const AttendArguments *attend;           // whose q and out lie in `scratch`
  const float *cosines, *sines;            // [positions, pairs]
  const int64_t *q_positions, *k_positions;  // [rows], or null: not turned
  int64_t pairs, interleaved;
  const int64_t *slots;      // [rows]
  const int64_t *kept;       // rows of x that y is of, or null: all
  int64_t rows, kept_rows;
  double eps;
  double *seconds;           // [parts] to add to, or null
};
enum Part { kNorm, kLinear, kTurn, kStore, kAttention, kGate, kResidual };

template <class T>
void linear(const T *x, const LinearArguments &a, T *y, int64_t rows) {
  if (a.scale)
    linear(x, static_cast<const int8_t *>(a.packed), a.scale, a.bias, y, rows, a.inputs,
           a.outputs);
  else
    linear(x, static_cast<const T *>(a.packed), nullptr, a.bias, y, rows, a.inputs, a.outputs);
}

// `act` on every head of queries or keys, count of them from the first-th on, in place.
template <class T, class Act>
void each_head(const BlockArguments &a, T *qkv, int64_t first, int64_t count, Act act) {
  const int64_t dim = a.attend->head_dim;
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t h = first; h < first + count; ++h)
      act(r, qkv + r * a.qkv.outputs + h * dim);
}

template <class T>
void norm_heads(const BlockArguments &a, T *qkv) {
  const int64_t heads = a.attend->heads, dim = a.attend->head_dim;
  const auto by = [&](const void *weight) {
    return [&a, dim, weight](int64_t, T *head) {
      rms_norm_row(head, static_cast<const T *>(weight), head, dim, float(a.eps));
    };
  };
  if (a.q_norm) each_head(a, qkv, 0, heads, by(a.q_norm));
  if (a.k_norm) each_head(a, qkv, heads, a.attend->kv_heads, by(a.k_norm));
}

template <class T>
void turn_heads(const BlockArguments &a, T *qkv) {
  const auto by = [&](const int64_t *positions) {
    return [&a, positions](int64_t r, T *head) {
      const int64_t at = positions[r] * a.pairs;
      (a.interleaved ? turn<true, T, T, float> : turn<false, T, T, float>)(
          head, head, a.cosines + at, a.sines + at, 1.0f, a.pairs);
    };
  };
  const int64_t heads = a.attend->heads;
  if (a.q_positions) each_head(a, qkv, 0, heads, by(a.q_positions));
  if (a.k_positions) each_head(a, qkv, heads, a.attend->kv_heads, by(a.k_positions));
}

// Keys and values into the cache, queries side by side.
template <class T>
void store_heads(const BlockArguments &a, const T *qkv, T *q) {
  const int64_t queries = a.attend->heads * a.attend->head_dim;
  const int64_t stored = a.attend->kv_heads * a.attend->head_dim;
  T *keys = static_cast<T *>(const_cast<void *>(a.attend->keys));
  T *values = static_cast<T *>(const_cast<void *>(a.attend->values));
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < a.rows; ++r) {
    const T *from = qkv + r * a.qkv.outputs, *key = from + queries, *value = key + stored;
    std::copy(from, key, q + r * queries);
    std::copy(key, value, keys + a.slots[r] * stored);
    std::copy(value, value + stored, values + a.slots[r] * stored);
  }
}

// y = x + d, of those rows of x that are kept.
template <class T>
void add_rows(const T *x, const int64_t *kept, const T *d, T *y, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const T *from = x + (kept ? kept[r] : r) * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      narrow(widen(from[i]) + widen(d[r * width + i]), y + r * width + i);
  }
}

// One layer of a decoder: x + attention(norm(x)), then x + mlp(norm(x)).
template <class T>
void block(const BlockArguments &a) {
  const int64_t width = a.down.outputs, attended = a.out.inputs;
  const T *x = static_cast<const T *>(a.x);
  T *y = static_cast<T *>(a.y);
  T *small = static_cast<T *>(a.scratch);  // [rows, width], as often as it is needed
  T *qkv = small + a.rows * width, *q = qkv + a.rows * a.qkv.outputs;
  T *heads = q + a.rows * attended, *kept = heads + a.rows * attended;
  T *gate_up = kept + a.kept_rows * attended;
  T *gate = gate_up + a.kept_rows * a.gate_up.outputs;
  auto before = std::chrono::steady_clock::now();
  const auto spent = [&](Part part) {
    if (!a.seconds) return;
    const auto now = std::chrono::steady_clock::now();
    a.seconds[part] += std::chrono::duration<double>(now - before).count();
    before = now;
  };

  rms_norm(x, static_cast<const T *>(a.attention_norm), small, a.rows, width, float(a.eps));
  spent(kNorm);
  linear(small, a.qkv, qkv, a.rows);
  spent(kLinear);
  norm_heads(a, qkv);
  spent(kNorm);
  turn_heads(a, qkv);
  spent(kTurn);
  store_heads(a, qkv, q);
  spent(kStore);
  AttendArguments attend_arguments = *a.attend;
  attend_arguments.q = q;
  attend_arguments.out = heads;
  attend<T>(attend_arguments);
  spent(kAttention);
  if (a.kept)
    for (int64_t r = 0; r < a.kept_rows; ++r)
      std::copy(heads + a.kept[r] * attended, heads + (a.kept[r] + 1) * attended,
                kept + r * attended);
  linear(a.kept ? kept : heads, a.out, small, a.kept_rows);
  spent(kLinear);
  add_rows(x, a.kept, small, y, a.kept_rows, width);
  spent(kResidual);
  rms_norm(y, static_cast<const T *>(a.mlp_norm), small, a.kept_rows, width, float(a.eps));
  spent(kNorm);
  linear(small, a.gate_up, gate_up, a.kept_rows);
  spent(kLinear);
  gated(gate_up, gate, a.kept_rows, a.down.inputs);
  spent(kGate);
  linear(gate, a.down, small, a.kept_rows);
  spent(kLinear);
  add_rows<T>(y, nullptr, small, y, a.kept_rows, width);
  spent(kResidual);
}

// ---------------------------------------------------------------------------- stored bytes

// cache/ledger.py defines these sums: of one block of one layer, eight bytes at a time.
int64_t fold_sum(const char *bytes, const uint64_t *multipliers, int64_t count) {
  const auto fold = [](uint64_t word) {
    return word ^ uint32_t(int32_t(uint32_t(word >> 32)) >> 15);
  };
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    sum += fold(word) * multipliers[i];
  }
  if (count % 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + count / 8 * 8, count % 8);
    sum += fold(word) * multipliers[count / 8];
  }
  return int64_t(sum);
}

}  // namespace

extern "C" {

// stored [layers, blocks, block_bytes]; sums [count, layers].
void fold_sums(const char *stored, const int64_t *blocks, const uint64_t *multipliers,
               int64_t *sums, int64_t count, int64_t layers, int64_t all_blocks,
               int64_t block_bytes) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count * layers; ++i) {
    const int64_t place = i % layers * all_blocks + blocks[i / layers];
    sums[i] = fold_sum(stored + place * block_bytes, multipliers, block_bytes);
  }
}

int64_t panel_columns() { return kPanel<float>; }

#define FOR_EACH_TYPE(DEFINE) DEFINE(f32, float) DEFINE(bf16, bf16)
#define DEFINE_ENTRIES(SUFFIX, T)                                                                \
  void pack_##SUFFIX(const T *w, T *packed, int64_t outputs, int64_t inputs) {                   \
    pack_panels(w, packed, outputs, inputs);                                                     \
  }                                                                                              \
  void linear_##SUFFIX(const T *x, const T *packed, const float *bias, T *y, int64_t rows,       \
                       int64_t inputs, int64_t outputs) {                                        \
    linear(x, packed, nullptr, bias, y, rows, inputs, outputs);                                  \
  }                                                                                              \
  void linear_i8_##SUFFIX(const T *x, const int8_t *packed, const float *scale,                  \
                          const float *bias, T *y, int64_t rows, int64_t inputs,                 \
                          int64_t outputs) {                                                     \
    linear(x, packed, scale, bias, y, rows, inputs, outputs);                                    \
  }                                                                                              \
  void rms_norm_##SUFFIX(const T *x, const T *weight, T *y, int64_t rows, int64_t width,         \
                         float eps) {                                                            \
    rms_norm(x, weight, y, rows, width, eps);                                                    \
  }                                                                                              \
  void gated_##SUFFIX(const T *x, T *y, int64_t rows, int64_t width) {                           \
    gated(x, y, rows, width);                                                                    \
  }                                                                                              \
  void rotate_##SUFFIX(const T *x, T *y, const float *cosines, const float *sines,               \
                       const int64_t *positions, int64_t rows, int64_t stride, int64_t heads,    \
                       int64_t dim, int64_t half, int64_t interleaved) {                         \
    (interleaved ? rotate<true, T> : rotate<false, T>)(x, y, cosines, sines, positions, rows,    \
                                                       stride, heads, dim, half);                \
  }                                                                                              \
  void block_##SUFFIX(const BlockArguments *a) { block<T>(*a); }                                 \
  void attend_##SUFFIX(const AttendArguments *a) { attend<T>(*a); }
FOR_EACH_TYPE(DEFINE_ENTRIES)
void pack_i8(const int8_t *w, int8_t *packed, int64_t outputs, int64_t inputs) {
  pack_panels(w, packed, outputs, inputs);
}
// Attention alone, for the tests that compare with an exact pass.
void attend_f64(const AttendArguments *a) { attend<double>(*a); }
}
