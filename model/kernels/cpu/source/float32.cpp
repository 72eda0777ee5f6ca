// Everything but bfloat16. Two sources compile in half the time of one.

#include "entries.hpp"
#include "sums.hpp"

extern "C" {

// stored [layers, blocks, block_bytes]; sums [count, layers].
void fold_sums(const char *stored, const int64_t *blocks, const uint64_t *multipliers,
               int64_t *sums, int64_t count, int64_t layers, int64_t all_blocks,
               int64_t block_bytes) {
  together([&](Team &team) {
    team.share(count * layers, [=](int64_t i) {
      const int64_t place = i % layers * all_blocks + blocks[i / layers];
      sums[i] = fold_sum(stored + place * block_bytes, multipliers, block_bytes);
    });
  });
}

DEFINE_ENTRIES(f32, float)
int64_t pack_i8(const int8_t *w, Packed<int8_t> *packed, int64_t outputs, int64_t inputs) {
  return together([=](Team &team) { return pack(team, w, packed, outputs, inputs); });
}
// Returns 0 where the processor lacks the integer products.
int64_t pack_i4(const uint8_t *numbers, const uint16_t *scales, const uint16_t *leasts,
                Nibbles *packed, int64_t outputs, int64_t inputs) {
  if (!kIntegers) return 0;
  return together([=](Team &team) {
    return pack(team, numbers, scales, leasts, packed, outputs, inputs);
  });
}
int64_t draw_token(const float *row, int64_t vocab, double temperature, int64_t top_k,
                   double top_p, double min_p, double uniform) {
  return draw(row, vocab, {temperature, top_k, top_p, min_p}, uniform);
}
void pick_allowed(const float *logits, const int64_t *rows, const uint8_t *masks,
                  const Rule *rules, int64_t *tokens, int64_t count, int64_t vocab) {
  together([=](Team &team) {
    pick_allowed(team, logits, rows, masks, rules, tokens, count, vocab);
  });
}
// Attention only, for tests that compare with an exact pass.
void attend_f64(const AttendArguments *a) {
  together([=](Team &team) { attend<double>(team, *a); });
}
}
