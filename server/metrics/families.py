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
        self.build = Gauge(
            "ropewalk_build_info",
            "Versions of what runs, in labels; the value is always 1.",
            ("version", "python", "torch"),
            registry=registry,
        )
        self.http = Counter(
            "ropewalk_http_requests",
            "HTTP requests, by the path of the API (or unmatched), method and status (none: the "
            "client left before there was one).",
            ("route", "method", "status"),
            registry=registry,
        )
        self.info = self._gauge(
            "cache_info", "Layout of the KV cache, in labels; the value is always 1.", *INFO_LABELS
        )
        self.running = self._gauge("requests_running", "Requests that hold cache blocks.")
        self.waiting = self._gauge(
            "requests_waiting", "Requests waiting for a place in a step or for cache blocks."
        )
        self.queue_wait = self._gauge(
            "queue_wait_seconds",
            "Estimate of how long it takes until all requests that wait now run.",
        )
        self.usage = self._gauge(
            "kv_cache_usage_ratio", "Share of the cache blocks held by requests, 0 to 1."
        )
        self.requests = self._counter(
            "requests", "Requests that ended after they had reached the engine.", "finish_reason"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens by source: computed, or cached in the prefix cache.",
            "source",
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated.")
        self.forced_tokens = self._counter(
            "forced_tokens",
            "Generated tokens that a grammar left no choice about, computed several in a step.",
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from arrival to the first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of one request.", TOKEN_BUCKETS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first; one observation per request.",
            TOKEN_BUCKETS,
        )
        self.phases = {
            "e2e": self._phase("e2e", "Time from arrival to the end."),
            "queue": self._phase("queue", "Time from arrival to admission."),
            "prefill": self._phase("prefill", "Time from admission to the first token."),
            "decode": self._phase("decode", "Time from the first token to the end."),
        }
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS
        )
        self.output_length = self._histogram(
            "request_output_tokens", "Generated tokens of a request.", LENGTH_BUCKETS
        )
        self.batch = self._histogram(
            "step_batch_size", "Requests in an engine step.", BATCH_BUCKETS
        )
        self.preemptions = self._counter(
            "preemptions",
            "Preemptions: requests whose blocks were taken away and whose tokens are recomputed "
            "later.",
        )
        self.disconnects = self._counter(
            "client_disconnects",
            "Clients that disconnected, or stopped reading, before their answer was complete.",
        )
        self.rejections = self._counter(
            "request_rejections",
            "HTTP requests answered only with an error, by the error's code and the reason that it "
            "belongs to; a request that fails in the engine counts in requests instead.",
            "reason",
            "code",
        )
        self.stream_errors = self._counter(
            "stream_errors", "Streams that ended with an error after their headers had been sent."
        )
        self.blocks = self._gauge(
            "kv_blocks", "Cache blocks by state; they add up to the size of the pool.", "state"
        )
        self.parity_error = self._gauge(
            "cache_parity_max_abs_error",
            "Largest difference between a logit decoded through the paged cache and the same logit "
            "from one pass without a cache, measured at start.",
        )
        self.parity_tolerance = self._gauge(
            "cache_parity_tolerance",
            "Largest cache_parity_max_abs_error that rounding can explain; above it the server is "
            "not ready.",
        )
        self.cache_bytes = self._gauge(
            "kv_cache_bytes", "Memory reserved for keys (k) and values (v).", "kind"
        )
        self.written_bytes = self._counter(
            "kv_written_bytes", "Bytes of keys and values written to the cache."
        )
        self.written_entries = self._counter(
            "kv_written_entries",
            "Keys and values written to the cache, counted once per layer, head and token.",
        )
        self.sealed = self._counter(
            "kv_blocks_sealed", "Block checksums taken, when a block became full or was rewritten."
        )
        self.verified = self._counter(
            "kv_blocks_verified",
            "Comparisons of a block's bytes with its checksum: when it was shared, released or "
            "operated on, and in turn by sampling.",
        )
        self.mutated = self._counter(
            "kv_mutated_entries",
            "Keys and values in the layers and blocks whose checksum no longer matched, counted "
            "together because a checksum does not show which of them changed; always 0 unless the "
            "memory or this program is faulty.",
        )
        self.weights_verified = self._counter(
            "weights_verified_bytes", "Bytes of weights compared with their checksum."
        )
        self.weights_changed = self._counter(
            "weights_changed",
            "Pieces of weights whose checksum no longer matched; after the first the model answers "
            "nothing. Always 0 unless the memory or this program is faulty.",
        )
        self.stale = self._counter(
            "kv_stale_entries",
            "Keys and values that an operation should have changed but did not; always 0 unless "
            "this program is faulty.",
        )
        self.rewritten = self._counter(
            "kv_rewritten_entries",
            "Keys rewritten because their position changed; generating tokens never rewrites any.",
            "cause",
        )
        self.moved_bytes = self._counter(
            "kv_moved_bytes", "Bytes read plus bytes written by operations on the cache."
        )
        self.shifts = self._counter(
            "context_shifts",
            "Full contexts that were shortened, by outcome: reindexed when no stored key changed, "
            "rerotated when keys were rotated to their new positions, recomputed when no key was "
            "cached.",
            "outcome",
        )
        self.shift_seconds = self._histogram(
            "context_shift_seconds",
            "Time to shorten one cached context, during which the whole step waits.",
            SHIFT_BUCKETS,
        )
        self.shift_tokens = self._counter(
            "context_shift_tokens",
            "Tokens in contexts that were shortened, by fate: kept or dropped.",
            "fate",
        )
        self.rotations = self._counter(
            "position_rotations",
            "Rotations of one head's query or key in one layer, calculated from context lengths.",
            "phase",
        )
        self.bias_values = self._counter(
            "position_bias_values",
            "Attention scores to which a positional bias was added, calculated from context "
            "lengths.",
            "phase",
        )
        self.bias_built = self._counter(
            "position_bias_built",
            "Bias values computed and stored for a single step, calculated from context lengths; 0 "
            "where a table made at load is read.",
            "phase",
        )
        self.bias_bytes = self._counter(
            "position_bias_bytes",
            "Bytes of bias tables and stored biases read and written, calculated from context "
            "lengths; included in position_bytes.",
            "phase",
        )
        self.position_flops = self._counter(
            "position_flops",
            "Arithmetic operations for positional encoding, calculated from context lengths.",
            "phase",
        )
        self.position_bytes = self._counter(
            "position_bytes",
            "Bytes of positional tables read and of biases built for a step, calculated as if each "
            "token were computed alone; a batch reads less.",
            "phase",
        )
        self.decode_step = self._histogram(
            "decode_step_seconds",
            "Time of a step that decodes one token for each of its requests (none computes a "
            "prompt), by context_le, the smallest of the bounds that the longest of their contexts "
            "does not exceed.",
            TOKEN_BUCKETS,
            "context_le",
        )
        self.timed_steps = self._counter(
            "timed_steps",
            "Forward passes that were timed, one in 16 at random; mixed ones compute prompts and "
            "answers.",
            "phase",
        )
        self.forward_seconds = self._counter(
            "forward_seconds",
            "Time of the timed forward passes, from tokens to logits, without sampling.",
            "phase",
        )
        self.attention_seconds = self._counter(
            "attention_seconds",
            "Part of forward_seconds spent on attention over stored keys and values, including "
            "biases and rotations applied there, without projections.",
            "phase",
        )
        self.position_seconds = self._counter(
            "position_seconds",
            "Part of forward_seconds spent on rotating queries and keys before they are stored and "
            "on adding positions to embeddings. Absent where attention, or on CUDA the kernel that "
            "stores keys, does any of this work, because it cannot be timed separately.",
            "phase",
        )
        self.extrapolated = self._counter(
            "extrapolated_tokens", "Tokens generated at positions beyond the trained context."
        )
        self.queried = self._counter(
            "prefix_cache_queried_tokens", "Prompt tokens of admitted requests, each counted once."
        )
        self.hits = self._counter(
            "prefix_cache_hit_tokens",
            "Prompt tokens of admitted requests that were already cached, by an earlier request or "
            "for another of n answers.",
        )
        self.evicted = self._counter(
            "kv_evicted_blocks",
            "Cached blocks evicted, by reason: lru to make room, flush on demand.",
            "reason",
        )

        self.spill = self._gauge(
            "kv_spill_blocks",
            "Blocks of the second place (--kv-spill) by state: free, waiting for a preempted "
            "request to come back, or cached, a prefix that may be found again.",
            "state",
        )
        self.spilled = self._counter(
            "kv_spilled_blocks",
            "Blocks copied to the second place (out) or brought back from it (back), and those "
            "that were given up because they had changed there (changed).",
            "way",
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
