#include "entries.hpp"

extern "C" {
DEFINE_ENTRIES(bf16, bf16)
}
