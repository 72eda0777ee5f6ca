"""Other servers' names for what Ropewalk measures, for gateways and dashboards.

Knows no Prometheus: server/metrics/exporter.py exports what is listed here. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Alias:
    """A family's second name, without `_total`, and the labels that are named differently there."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)  # ours: theirs


# By our families' names. Meanings are vLLM's, labels not quite: `engine` is missing here,
# `encoding` is added, and prompt tokens are split by `source`.
_VLLM = {
    "ropewalk_requests_running": Alias("vllm:num_requests_running"),
    "ropewalk_requests_waiting": Alias("vllm:num_requests_waiting"),
    "ropewalk_kv_cache_usage_ratio": Alias("vllm:kv_cache_usage_perc"),
    "ropewalk_cache_info": Alias("vllm:cache_config_info", {"num_blocks": "num_gpu_blocks"}),
    "ropewalk_prefix_cache_queried_tokens": Alias("vllm:prefix_cache_queries"),
    "ropewalk_prefix_cache_hit_tokens": Alias("vllm:prefix_cache_hits"),
    "ropewalk_preemptions": Alias("vllm:num_preemptions"),
    "ropewalk_prompt_tokens": Alias("vllm:prompt_tokens"),
    "ropewalk_generated_tokens": Alias("vllm:generation_tokens"),
    "ropewalk_requests": Alias("vllm:request_success", {"finish_reason": "finished_reason"}),
    "ropewalk_request_prompt_tokens": Alias("vllm:request_prompt_tokens"),
    "ropewalk_request_output_tokens": Alias("vllm:request_generation_tokens"),
    "ropewalk_time_to_first_token_seconds": Alias("vllm:time_to_first_token_seconds"),
    "ropewalk_inter_token_latency_seconds": Alias("vllm:inter_token_latency_seconds"),
    "ropewalk_request_time_per_output_token_seconds": Alias(
        "vllm:request_time_per_output_token_seconds"
    ),
    "ropewalk_request_e2e_seconds": Alias("vllm:e2e_request_latency_seconds"),
    "ropewalk_request_queue_seconds": Alias("vllm:request_queue_time_seconds"),
    "ropewalk_request_prefill_seconds": Alias("vllm:request_prefill_time_seconds"),
    "ropewalk_request_decode_seconds": Alias("vllm:request_decode_time_seconds"),
}
ALIASES: Mapping[str, Mapping[str, Alias]] = {"off": {}, "vllm": _VLLM}
