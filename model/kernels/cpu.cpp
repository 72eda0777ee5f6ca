// CPU kernels of the decoder: attention over the paged cache, and linear layers over packed
// weights. Plain C entry points, so the file needs no headers but the compiler's own.
//
// Every output row is summed in an order of its own, independent of the other rows of the batch:
// a request's numbers do not change with its neighbours. Arithmetic is float32; bfloat16 is a
// storage format here, widened on load and rounded to nearest even on store.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
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
typedef uint16_t VecHalf __attribute__((vector_size(kLanes * 2), aligned(2)));

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
inline Vec load(const bf16 *x) {
  const VecHalf half = *reinterpret_cast<const VecHalf *>(x);
  return (Vec)(__builtin_convertvector(half, VecBits) << 16);
}

// ------------------------------------------------------------------------------------ linear

template <class T>
void pack_panels(const T *weight, T *packed, int64_t outputs, int64_t inputs) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t n = p * kPanel + j;
        packed[(p * inputs + k) * kPanel + j] = n < outputs ? weight[n * inputs + k] : T{};
      }
}

// ROWS rows of x times one panel; out [ROWS, kPanel].
template <int ROWS, class W>
void multiply_panel(const float *x, int64_t inputs, const W *panel, float *out) {
  Vec sum[ROWS][2] = {};
  for (int64_t k = 0; k < inputs; ++k) {
    const Vec left = load(panel + k * kPanel), right = load(panel + k * kPanel + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const float a = x[r * inputs + k];
      sum[r][0] += a * left;
      sum[r][1] += a * right;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    std::memcpy(out + r * kPanel, &sum[r][0], sizeof(Vec));
    std::memcpy(out + r * kPanel + kLanes, &sum[r][1], sizeof(Vec));
  }
}

template <int ROWS, class W>
void multiply_rows(int64_t rows, const float *x, int64_t inputs, const W *panel, float *out) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_rows<ROWS - 1>(rows, x, inputs, panel, out);
  multiply_panel<ROWS>(x, inputs, panel, out);
}

template <class T, class W>
void linear(const T *x, const W *packed, const float *bias, T *y, int64_t rows, int64_t inputs,
            int64_t outputs) {
  constexpr int64_t kChunk = 8 * kRows;  // rows that stay in the second-level cache
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  std::vector<float> wide;
  const float *x32;
  if constexpr (sizeof(T) == 4) {
    x32 = x;
  } else {
    wide.resize(rows * inputs);
    for (int64_t i = 0; i < rows * inputs; ++i) wide[i] = widen(x[i]);
    x32 = wide.data();
  }
  for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
    const int64_t chunk_end = std::min(rows, chunk + kChunk);
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
      float out[kRows * kPanel];
      const int64_t columns = std::min<int64_t>(kPanel, outputs - p * kPanel);
      for (int64_t m = chunk; m < chunk_end; m += kRows) {
        const int64_t count = std::min<int64_t>(kRows, chunk_end - m);
        multiply_rows<kRows>(count, x32 + m * inputs, inputs, packed + p * inputs * kPanel, out);
        for (int64_t r = 0; r < count; ++r) {
          T *row = y + (m + r) * outputs + p * kPanel;
          for (int64_t j = 0; j < columns; ++j)
            narrow(out[r * kPanel + j] + (bias ? bias[p * kPanel + j] : 0.0f), row + j);
        }
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

// One row and one key/value head: the `group` query heads that share it.
template <class T, int DIM>
void attend_row(const AttendArguments &a, int64_t row, int64_t request, int64_t kv_head,
                std::vector<float> &scratch) {
  const int64_t dim = DIM ? DIM : a.head_dim, group = a.heads / a.kv_heads;
  const int64_t last = a.context_lens[request] - (a.query_starts[request + 1] - row);
  const int64_t first = a.window ? std::max<int64_t>(0, last - a.window + 1) : 0;
  const int64_t count = last - first + 1;
  scratch.resize(group * (count + 2 * dim) + dim);
  float *scores = scratch.data(), *q = scores + group * count, *sum = q + group * dim,
        *wide = sum + group * dim;
  const int64_t *table = a.tables + request * a.table_width;
  const int64_t *bases = a.bases + request * a.table_width;
  const auto entry = [&](const void *cache, int64_t index) {
    const int64_t slot = table[index / a.block_size] * a.block_size + index % a.block_size;
    return static_cast<const T *>(cache) + (slot * a.kv_heads + kv_head) * dim;
  };

  const T *q_row = static_cast<const T *>(a.q) + (row * a.heads + kv_head * group) * dim;
  for (int64_t i = 0; i < group * dim; ++i) {
    q[i] = widen(q_row[i]) * a.scale;
    sum[i] = 0.0f;
  }
  for (int64_t n = 0; n < count; ++n) {
    const T *key = entry(a.keys, first + n);
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) wide[d] = widen(key[d]);
    for (int64_t g = 0; g < group; ++g) {
      float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < dim; ++d) dot += q[g * dim + d] * wide[d];
      scores[g * count + n] = dot;
    }
  }
  if (a.slopes || a.bias_table) {
    for (int64_t n = 0; n < count; ++n) {
      const int64_t index = first + n;
      const int64_t distance =
          a.positions[row] - (bases[index / a.block_size] + index % a.block_size);
      const int64_t column = std::clamp<int64_t>(distance + a.bias_zero, 0, a.bias_span - 1);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t head = kv_head * group + g;
        scores[g * count + n] += a.slopes ? -a.slopes[head] * float(distance)
                                          : a.bias_table[head * a.bias_span + column];
      }
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float *s = scores + g * count;
    float largest = -std::numeric_limits<float>::infinity(), total = 0.0f;
    for (int64_t n = 0; n < count; ++n) largest = std::max(largest, s[n]);
#pragma omp simd reduction(+ : total)
    for (int64_t n = 0; n < count; ++n) total += (s[n] = expf(s[n] - largest));
    const float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t n = 0; n < count; ++n) s[n] *= inverse;
  }
  for (int64_t n = 0; n < count; ++n) {
    const T *value = entry(a.values, first + n);
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) wide[d] = widen(value[d]);
    for (int64_t g = 0; g < group; ++g) {
      const float weight = scores[g * count + n];
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) sum[g * dim + d] += weight * wide[d];
    }
  }
  T *out = static_cast<T *>(a.out) + (row * a.heads + kv_head * group) * dim;
  for (int64_t i = 0; i < group * dim; ++i) narrow(sum[i], out + i);
}

template <class T, int DIM>
void attend(const AttendArguments &a) {
  const int64_t rows = a.query_starts[a.requests];
  std::vector<int64_t> request_of(rows);
  for (int64_t r = 0; r < a.requests; ++r)
    std::fill(request_of.begin() + a.query_starts[r], request_of.begin() + a.query_starts[r + 1],
              r);
#pragma omp parallel
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 8)
    for (int64_t task = 0; task < rows * a.kv_heads; ++task)
      attend_row<T, DIM>(a, task / a.kv_heads, request_of[task / a.kv_heads], task % a.kv_heads,
                         scratch);
  }
}

template <class T>
void attend_any(const AttendArguments &a) {
  switch (a.head_dim) {
    case 64: return attend<T, 64>(a);
    case 128: return attend<T, 128>(a);
    default: return attend<T, 0>(a);
  }
}

}  // namespace

extern "C" {

int64_t panel_columns() { return kPanel; }

void pack_f32(const float *w, float *packed, int64_t outputs, int64_t inputs) {
  pack_panels(w, packed, outputs, inputs);
}
void pack_bf16(const bf16 *w, bf16 *packed, int64_t outputs, int64_t inputs) {
  pack_panels(w, packed, outputs, inputs);
}
void linear_f32(const float *x, const float *packed, const float *bias, float *y, int64_t rows,
                int64_t inputs, int64_t outputs) {
  linear(x, packed, bias, y, rows, inputs, outputs);
}
void linear_bf16(const bf16 *x, const bf16 *packed, const float *bias, bf16 *y, int64_t rows,
                 int64_t inputs, int64_t outputs) {
  linear(x, packed, bias, y, rows, inputs, outputs);
}
void attend_f32(const AttendArguments *a) { attend_any<float>(*a); }
void attend_bf16(const AttendArguments *a) { attend_any<bf16>(*a); }
}
