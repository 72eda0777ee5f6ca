// CPU kernels of the decoder: attention over the paged cache, linear layers over packed weights,
// and the small steps between them. Plain C entry points: no headers but the compiler's own.
//
// Every output row is summed in an order of its own, independent of the other rows of the batch:
// a request's numbers do not change with its neighbours. Arithmetic is float32; bfloat16 is a
// storage format here, widened on load and rounded to nearest even on store.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;
#else
constexpr int kLanes = 8, kRows = 6;
#endif
constexpr int kPanel = 2 * kLanes;  // output columns that one pass over the rows produces

typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t VecBits __attribute__((vector_size(kLanes * 4), aligned(4)));

struct bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void narrow(float x, float *y) { *y = x; }
inline void narrow(float x, bf16 *y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1);
  y->bits = nan ? 0x7fc0 : uint16_t(bits >> 16);
}

inline Vec load(const float *x) { return *reinterpret_cast<const Vec *>(x); }

// e^x to about two units in the last place, in a form that compilers vectorise: 2^n times a
// polynomial (Cephes' coefficients) on [-ln 2 / 2, ln 2 / 2].
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
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
  return p * power;
}

// The two column vectors of one input in a panel. bfloat16 panels interleave them, column j in
// the low and column j + kLanes in the high half of a word: widening is then one operation each.
inline void load_columns(const float *panel, Vec &left, Vec &right) {
  left = load(panel);
  right = load(panel + kLanes);
}
inline void load_columns(const bf16 *panel, Vec &left, Vec &right) {
  const VecBits words = *reinterpret_cast<const VecBits *>(panel);
  left = (Vec)(words << 16);
  right = (Vec)(words & 0xffff0000u);
}
inline int64_t place_in_panel(const float *, int64_t column) { return column; }
inline int64_t place_in_panel(const bf16 *, int64_t column) {
  return column < kLanes ? 2 * column : 2 * (column - kLanes) + 1;
}

// ------------------------------------------------------------------------------------ linear

// packed [panel, input, kPanel]; columns past the last output are zero.
template <class T>
void pack_panels(const T *weight, T *packed, int64_t outputs, int64_t inputs) {
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

// Adds ROWS rows times one panel to sum [ROWS, kPanel]; x is [inputs, ROWS].
template <int ROWS, class W>
void multiply_tile(const float *x, int64_t inputs, const W *panel, float *sum) {
  Vec left_sum[ROWS], right_sum[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    left_sum[r] = load(sum + r * kPanel);
    right_sum[r] = load(sum + r * kPanel + kLanes);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec left, right;
    load_columns(panel + k * kPanel, left, right);
    // Some steps ahead, past the end too: the next piece of the panel usually follows there.
    for (int64_t i = 0; i < kPanel; i += 64 / int64_t(sizeof(W)))
      __builtin_prefetch(panel + (k + 24) * kPanel + i);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      left_sum[r] += x[k * ROWS + r] * left;
      right_sum[r] += x[k * ROWS + r] * right;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    std::memcpy(sum + r * kPanel, &left_sum[r], sizeof(Vec));
    std::memcpy(sum + r * kPanel + kLanes, &right_sum[r], sizeof(Vec));
  }
}

template <int ROWS, class W>
void multiply(int64_t rows, const float *x, int64_t inputs, const W *panel, float *sum) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply<ROWS - 1>(rows, x, inputs, panel, sum);
  multiply_tile<ROWS>(x, inputs, panel, sum);
}

template <class T, class W>
void linear(const T *x, const W *packed, const float *bias, T *y, int64_t rows, int64_t inputs,
            int64_t outputs) {
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
            narrow(sums[m * kPanel + j] + (bias ? bias[first + j] : 0.0f),
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
  const float *slopes;                                         // [heads] or null
  const float *bias_table;                                     // [heads, bias_span] or null
  int64_t bias_span, bias_zero;
  int64_t requests, table_width, heads, kv_heads, head_dim, block_size;
  int64_t window;  // keys a query sees; 0: all before it
  float scale;
};

// Sums neighbouring halves until one lane holds everything.
inline float sum_lanes(Vec x) {
  typedef int32_t Order __attribute__((vector_size(kLanes * 4)));
  Order lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    x += __builtin_shuffle(x, lane ^ distance);
  return x[0];
}

// Of at least one number.
inline float maximum(const float *x, int64_t count) {
  float largest = x[0];
  int64_t n = 0;
  if (count >= kLanes) {
    Vec most = load(x);
    for (n = kLanes; n + kLanes <= count; n += kLanes) {
      const Vec next = load(x + n);
      most = next > most ? next : most;
    }
    for (int i = 0; i < kLanes; ++i) largest = std::max(largest, most[i]);
  }
  for (; n < count; ++n) largest = std::max(largest, x[n]);
  return largest;
}

// Floats that start on a cache line: vectors that straddle two lines cost twice.
class Buffer {
 public:
  float *grow(int64_t size) {
    if (size > size_) {
      size_ = size;
      floats_.reset(static_cast<float *>(::operator new(size * sizeof(float), kLine)));
    }
    return floats_.get();
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(float *floats) const { ::operator delete(floats, kLine); }
  };
  int64_t size_ = 0;
  std::unique_ptr<float, Free> floats_;
};

// Scratch of one thread. Heads are padded with zeros to `padded` floats, whole vectors.
struct Scratch {
  Buffer q, sum;   // [group, padded]
  Buffer entries;  // [block_size, padded]: keys or values of one block, widened
  Buffer scores;   // [group, keys seen]
};

// Calls visit(n, count, block, offset) for each block's run of `count` keys, the first of which
// is key first + n, after widening them from `cache` into `entries`.
template <class T, class Visit>
void visit_blocks(const AttendArguments &a, const void *cache, int64_t request, int64_t kv_head,
                  int64_t first, int64_t last, int64_t padded, float *entries, Visit visit) {
  const int64_t *table = a.tables + request * a.table_width, stride = a.kv_heads * a.head_dim;
  int64_t block = first / a.block_size, offset = first % a.block_size;
  for (int64_t n = 0; n <= last - first; ++block, offset = 0) {
    const int64_t count = std::min(a.block_size - offset, last - first + 1 - n);
    const T *from = static_cast<const T *>(cache) +
                    (table[block] * a.block_size + offset) * stride + kv_head * a.head_dim;
    // Entries of one head lie apart, so the processor does not foresee the next block by itself.
    if (n + count <= last - first) {
      const T *next = static_cast<const T *>(cache) + table[block + 1] * a.block_size * stride +
                      kv_head * a.head_dim;
      for (int64_t i = 0; i < a.block_size; ++i)
        for (int64_t d = 0; d < a.head_dim; d += 64 / int64_t(sizeof(T)))
          __builtin_prefetch(next + i * stride + d);
    }
    for (int64_t i = 0; i < count; ++i) {
      float *to = entries + i * padded;
#pragma omp simd
      for (int64_t d = 0; d < a.head_dim; ++d) to[d] = widen(from[i * stride + d]);
    }
    visit(n, count, block, offset);
    n += count;
  }
}

// One row and one key/value head: the `group` query heads that share it.
// VECTORS vectors make a head; 0: as many as head_dim needs.
template <class T, int VECTORS>
void attend_row(const AttendArguments &a, int64_t row, int64_t request, int64_t kv_head,
                Scratch &scratch) {
  const int64_t vectors = VECTORS ? VECTORS : (a.head_dim + kLanes - 1) / kLanes;
  const int64_t padded = vectors * kLanes, group = a.heads / a.kv_heads;
  const int64_t last = a.context_lens[request] - (a.query_starts[request + 1] - row);
  const int64_t first = a.window ? std::max<int64_t>(0, last - a.window + 1) : 0;
  const int64_t seen = last - first + 1;
  float *q = scratch.q.grow(group * padded), *sum = scratch.sum.grow(group * padded);
  float *scores = scratch.scores.grow(group * seen);
  float *entries = scratch.entries.grow(a.block_size * padded);
  std::fill(q, q + group * padded, 0.0f);
  std::fill(sum, sum + group * padded, 0.0f);
  if (padded != a.head_dim) std::fill(entries, entries + a.block_size * padded, 0.0f);

  const int64_t at = (row * a.heads + kv_head * group) * a.head_dim;
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < a.head_dim; ++d)
      q[g * padded + d] = widen(static_cast<const T *>(a.q)[at + g * a.head_dim + d]) * a.scale;

  visit_blocks<T>(a, a.keys, request, kv_head, first, last, padded, entries,
                  [&](int64_t n, int64_t count, int64_t block, int64_t offset) {
    const int64_t position = a.bases[request * a.table_width + block] + offset;
    for (int64_t g = 0; g < group; ++g) {
      float *s = scores + g * seen + n;
      for (int64_t i = 0; i < count; ++i) {
        Vec product = {};
        for (int64_t v = 0; v < vectors; ++v)
          product += load(q + g * padded + v * kLanes) * load(entries + i * padded + v * kLanes);
        s[i] = sum_lanes(product);
      }
      const int64_t head = kv_head * group + g, distance = a.positions[row] - position;
      if (a.slopes)
        for (int64_t i = 0; i < count; ++i) s[i] -= a.slopes[head] * float(distance - i);
      if (a.bias_table)
        for (int64_t i = 0; i < count; ++i)
          s[i] += a.bias_table[head * a.bias_span +
                               std::clamp<int64_t>(distance - i + a.bias_zero, 0, a.bias_span - 1)];
    }
  });
  for (int64_t g = 0; g < group; ++g) {
    float *s = scores + g * seen;
    const float largest = maximum(s, seen);
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t n = 0; n < seen; ++n) total += (s[n] = exponential(s[n] - largest));
    const float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t n = 0; n < seen; ++n) s[n] *= inverse;
  }
  visit_blocks<T>(a, a.values, request, kv_head, first, last, padded, entries,
                  [&](int64_t n, int64_t count, int64_t, int64_t) {
    constexpr int64_t kTogether = VECTORS ? VECTORS : 1;
    for (int64_t g = 0; g < group; ++g)
      for (int64_t at = 0; at < padded; at += kTogether * kLanes) {
        Vec part[kTogether];
        for (int64_t v = 0; v < kTogether; ++v) part[v] = load(sum + g * padded + at + v * kLanes);
        for (int64_t i = 0; i < count; ++i)
          for (int64_t v = 0; v < kTogether; ++v)
            part[v] += scores[g * seen + n + i] * load(entries + i * padded + at + v * kLanes);
        std::memcpy(sum + g * padded + at, part, sizeof(part));
      }
  });
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < a.head_dim; ++d)
      narrow(sum[g * padded + d], static_cast<T *>(a.out) + at + g * a.head_dim + d);
}

template <class T, int VECTORS>
void attend(const AttendArguments &a) {
  const int64_t rows = a.query_starts[a.requests];
  std::vector<int64_t> request_of(rows);
  for (int64_t r = 0; r < a.requests; ++r)
    std::fill(request_of.begin() + a.query_starts[r], request_of.begin() + a.query_starts[r + 1],
              r);
#pragma omp parallel
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 8)
    for (int64_t task = 0; task < rows * a.kv_heads; ++task)
      attend_row<T, VECTORS>(a, task / a.kv_heads, request_of[task / a.kv_heads],
                             task % a.kv_heads, scratch);
  }
}

template <class T>
void attend_any(const AttendArguments &a) {
  switch (a.head_dim) {
    case 64: return attend<T, 64 / kLanes>(a);
    case 128: return attend<T, 128 / kLanes>(a);
    default: return attend<T, 0>(a);
  }
}

// ------------------------------------------------------------------------- between the matrices

// y = x / sqrt(mean(x^2) + eps) * weight, row by row.
template <class T>
void rms_norm(const T *x, const T *weight, T *y, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const T *from = x + r * width;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += widen(from[i]) * widen(from[i]);
    const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      narrow(widen(from[i]) * scale * widen(weight[i]), y + r * width + i);
  }
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
template <class T>
void rotate(const T *x, T *y, const float *cosines, const float *sines, const int64_t *positions,
            int64_t rows, int64_t stride, int64_t heads, int64_t dim, int64_t half,
            bool interleaved) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const float *cosine = cosines + positions[r] * half, *sine = sines + positions[r] * half;
    for (int64_t h = 0; h < heads; ++h) {
      const T *from = x + r * stride + h * dim;
      T *to = y + (r * heads + h) * dim;
      const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : half;
      for (int64_t i = 0; i < half; ++i) {
        const float a = widen(from[i * step]), b = widen(from[i * step + partner]);
        narrow(a * cosine[i] - b * sine[i], to + i * step);
        narrow(b * cosine[i] + a * sine[i], to + i * step + partner);
      }
      std::copy(from + 2 * half, from + dim, to + 2 * half);
    }
  }
}

}  // namespace

extern "C" {

int64_t panel_columns() { return kPanel; }

#define FOR_EACH_TYPE(DEFINE) DEFINE(f32, float) DEFINE(bf16, bf16)
#define DEFINE_ENTRIES(SUFFIX, T)                                                                \
  void pack_##SUFFIX(const T *w, T *packed, int64_t outputs, int64_t inputs) {                   \
    pack_panels(w, packed, outputs, inputs);                                                     \
  }                                                                                              \
  void linear_##SUFFIX(const T *x, const T *packed, const float *bias, T *y, int64_t rows,       \
                       int64_t inputs, int64_t outputs) {                                        \
    linear(x, packed, bias, y, rows, inputs, outputs);                                           \
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
    rotate(x, y, cosines, sines, positions, rows, stride, heads, dim, half, interleaved != 0);   \
  }                                                                                              \
  void attend_##SUFFIX(const AttendArguments *a) { attend_any<T>(*a); }
FOR_EACH_TYPE(DEFINE_ENTRIES)
}
