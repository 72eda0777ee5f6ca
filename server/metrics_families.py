"""Names, help texts, labels and buckets of all metrics.

Label values come only from closed sets: model names, encodings, and constants.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

MODEL_LABELS = ("model_name", "encoding")
INFO_LABELS = (
    "block_size",
    "num_blocks",
    "kv_dtype",
    "layers",
    "kv_heads",
    "head_dim",
    "bytes_per_token",
    "trained_context",
)

# Up to the longest time that a request may take by default; no more than 16 series each.
FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 150, 300,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1,
)  # fmt: skip
PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000,
)  # fmt: skip
SHIFT_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Families:
    """One attribute for each family, registered when it is made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.info = self._gauge("cache_info", "Shape of the KV cache; always 1.", *INFO_LABELS)
        self.running = self._gauge("requests_running", "Requests holding cache blocks.")
        self.waiting = self._gauge(
            "requests_waiting", "Requests waiting for a place in a step or for cache blocks."
        )
        self.usage = self._gauge(
            "kv_cache_usage_ratio", "Share of the cache blocks that requests hold, 0 to 1."
        )
        self.requests = self._counter(
            "requests", "Requests that reached the engine and ended.", "finish_reason"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", "source"
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one request.", TOKEN_BUCKETS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, once per request.",
            TOKEN_BUCKETS,
        )
        self.phases = {
            "e2e": self._phase("e2e", "Arrival to end."),
            "queue": self._phase("queue", "Arrival to admission."),
            "prefill": self._phase("prefill", "Admission to first token."),
            "decode": self._phase("decode", "First token to end."),
        }
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS
        )
        self.output_length = self._histogram(
            "request_output_tokens", "Generated tokens of a request.", LENGTH_BUCKETS
        )
        self.batch = self._histogram(
            "step_batch_size", "Requests sharing an engine step.", BATCH_BUCKETS
        )
        self.preemptions = self._counter(
            "preemptions", "Requests that gave up their blocks to be recomputed."
        )
        self.disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer was complete."
        )
        self.rejections = self._counter(
            "request_rejections",
            "HTTP requests answered with an error alone; what the engine fails on ends there.",
            "reason",
        )
        self.stream_errors = self._counter(
            "stream_errors", "Streams ended by an error after their headers."
        )
        self.blocks = self._gauge(
            "kv_blocks", "Cache blocks by state; the sum is the size of the pool.", "state"
        )
        self.parity_error = self._gauge(
            "cache_parity_max_abs_error",
            "At start, the largest difference of a logit between decoding through the paged cache "
            "and one pass with nothing cached.",
        )
        self.parity_tolerance = self._gauge(
            "cache_parity_tolerance",
            "What rounding explains of cache_parity_max_abs_error; above it the server is not "
            "ready.",
        )
        self.cache_bytes = self._gauge(
            "kv_cache_bytes", "Memory reserved for keys (k) and values (v).", "kind"
        )
        self.written_bytes = self._counter(
            "kv_written_bytes", "Bytes of keys and values written to the cache."
        )
        self.written_entries = self._counter(
            "kv_written_entries", "Keys and values written, one per layer, head and token."
        )
        self.sealed = self._counter(
            "kv_blocks_sealed", "Blocks whose checksum was taken, when full or after a rewrite."
        )
        self.verified = self._counter(
            "kv_blocks_verified",
            "Times a block's bytes were compared with its checksum: when it was shared, given up "
            "or operated on, and by sample.",
        )
        self.mutated = self._counter(
            "kv_mutated_entries",
            "Keys and values in the layers and blocks whose checksum no longer matched; 0 unless "
            "memory or this program is at fault. A checksum tells no entry from its neighbours.",
        )
        self.stale = self._counter(
            "kv_stale_entries",
            "Keys and values that an operation left as they were and should not have; always 0 "
            "unless this program is at fault.",
        )
        self.rewritten = self._counter(
            "kv_rewritten_entries",
            "Keys rewritten because their position changed; never by generating tokens.",
            "cause",
        )
        self.moved_bytes = self._counter(
            "kv_moved_bytes", "Bytes that operations on the cache read and wrote, both counted."
        )
        self.shifts = self._counter(
            "context_shifts",
            "Full contexts that were shortened: reindexed when no stored key changed, rerotated "
            "when keys were turned to their new positions, recomputed when none was cached.",
            "outcome",
        )
        self.shift_seconds = self._histogram(
            "context_shift_seconds",
            "Time to shorten one cached context; the whole step waits for it.",
            SHIFT_BUCKETS,
        )
        self.shift_tokens = self._counter(
            "context_shift_tokens", "Tokens of contexts that were shortened.", "fate"
        )
        self.rotations = self._counter(
            "position_rotations",
            "Queries and keys of one head and layer that were turned, by calculation.",
            "phase",
        )
        self.bias_values = self._counter(
            "position_bias_values",
            "Attention scores that a positional bias was added to, by calculation.",
            "phase",
        )
        self.bias_built = self._counter(
            "position_bias_built",
            "Bias values computed anew and stored for one step, by calculation: 0 where a table "
            "made at load is read.",
            "phase",
        )
        self.bias_bytes = self._counter(
            "position_bias_bytes",
            "Bytes of bias tables and stored biases read and written, by calculation; a part of "
            "position_bytes.",
            "phase",
        )
        self.position_flops = self._counter(
            "position_flops",
            "Arithmetic operations because of positions, by calculation from context lengths.",
            "phase",
        )
        self.position_bytes = self._counter(
            "position_bytes",
            "Bytes of positional tables read, and of biases built for a step, by calculation as "
            "if each token were computed alone; batching reads less.",
            "phase",
        )
        self.decode_step = self._histogram(
            "decode_step_seconds",
            "Time of a step that computes one token for each of its requests, all past their "
            "first, by the smallest of these bounds on the longest context among them.",
            TOKEN_BUCKETS,
            "context_le",
        )
        self.timed_steps = self._counter(
            "timed_steps",
            "Passes through the model that were timed, one in 16 at random; mixed ones compute "
            "prompts and answers.",
            "phase",
        )
        self.forward_seconds = self._counter(
            "forward_seconds",
            "Time in the model during timed steps, from tokens to logits; sampling is not in it.",
            "phase",
        )
        self.attention_seconds = self._counter(
            "attention_seconds",
            "Of forward_seconds, attention over stored keys and values: with the biases that are "
            "added and the turning that is done there, without projections.",
            "phase",
        )
        self.position_seconds = self._counter(
            "position_seconds",
            "Of forward_seconds, turning queries and keys before they are stored and adding "
            "positions to embeddings. Absent where attention does any positional work: that "
            "cannot be told from attention_seconds.",
            "phase",
        )
        self.extrapolated = self._counter(
            "extrapolated_tokens", "Tokens generated at positions past the trained context."
        )
        self.queried = self._counter(
            "prefix_cache_queried_tokens", "Prompt tokens of admitted requests, once each."
        )
        self.hits = self._counter(
            "prefix_cache_hit_tokens",
            "Of these, the ones already cached: by earlier requests, or for another of n answers.",
        )
        self.evicted = self._counter(
            "kv_evicted_blocks",
            "Cached blocks given up: lru to make room, flush on demand.",
            "reason",
        )

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"ropewalk_{name}", help_, (*MODEL_LABELS, *labels), registry=self._registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"ropewalk_{name}", help_, (*MODEL_LABELS, *labels), registry=self._registry)

    def _histogram(
        self, name: str, help_: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"ropewalk_{name}",
            help_,
            (*MODEL_LABELS, *labels),
            registry=self._registry,
            buckets=buckets,
        )

    def _phase(self, name: str, help_: str) -> Histogram:
        return self._histogram(f"request_{name}_seconds", help_, PHASE_BUCKETS)
