"""Chooses a model's device, threads and dtype, and the memory that its cache gets.

Decides from the configuration and the hardware; loads nothing.
"""

import ctypes
import os
from contextlib import suppress
from logging import getLogger
from pathlib import Path

import torch

from ropewalk.cache.kv import KVCache
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.cpu.bindings import has_bf16_arithmetic
from ropewalk.server.errors import CommandError
from ropewalk.server.terminal import counted

log = getLogger(__name__)

NVIDIA = Path("/dev/nvidiactl")  # made by the driver
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Of the memory that is free once the weights are loaded.
CPU_SHARE = 0.25
CUDA_SHARE = 0.85
SPILL_SHARE, MOST_SPILLED = 0.125, 4 << 30  # of the host's free memory; bytes, as it may be pinned
# Where Linux reports a container's limits and usage, in cgroup v2 and v1.
CGROUP = Path("/sys/fs/cgroup")
QUOTA_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
MACHINE_MEMORY = Path("/proc/meminfo")


def pick_device(wanted: str | None) -> torch.device:
    """`wanted`, else CUDA where there is one. Raises CommandError when CUDA is wanted in vain."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if wanted == "cpu" and NVIDIA.exists() and not hidden:
            log.warning(
                "this machine has a GPU that this build of torch (for CUDA %s) cannot use, so "
                "computing on the CPU; a newer driver or another build of torch may help",
                torch.version.cuda or "none",
            )
    return torch.device(wanted)


def pick_threads(wanted: int | None) -> int:
    """`wanted`, else one per core, or fewer if the container's CPU quota is lower."""
    if wanted is not None:
        return wanted
    return max(1, min([torch.get_num_threads(), *_cores_of_container()]))


def pick_dtype(wanted: str | None, device: torch.device) -> torch.dtype:
    """`wanted`, else bfloat16 where the hardware multiplies it, else float32."""
    if wanted is not None:
        return DTYPES[wanted]
    if device.type == "cuda":
        multiplies = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if multiplies else torch.float32
    return torch.bfloat16 if has_bf16_arithmetic() else torch.float32


def num_step_tokens(wanted: int | None, max_seqs: int, decoder: Decoder) -> int:
    """`wanted`, else more on a GPU: a small model computes 512 there sooner than it launches.

    But not where attention, or a bias, takes memory for each of a step's tokens and its keys.
    """
    lean = decoder.executor.name == "triton" and not decoder.has_dense_bias
    return wanted or max(max_seqs, 2048 if lean else 512)


def num_draft_tokens(wanted: int | None, decoder: Decoder, attention: str) -> int:
    """`wanted`, else some where a row's numbers do not depend on how many are computed with it.

    attention: the backend's name. A GPU's steps are launched before their tokens are known.
    """
    if wanted is not None:
        return wanted
    return 7 if decoder.executor.name == attention == "cpu" else 0


def device_name(device: torch.device) -> str:
    """For people: "cpu, 2 threads", or which GPU."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu, {counted(torch.get_num_threads(), 'thread')}"


def dtype_name(dtype: torch.dtype) -> str:
    """As --dtype takes it."""
    return str(dtype).removeprefix("torch.")


def num_blocks(
    token_bytes: int,
    *,
    budget: int | None,
    free_memory: int,
    block_size: int,
    max_seqs: int,
    context: int,
) -> int:
    """Blocks of the cache, the reserved block 0 included.

    token_bytes: of what the cache holds for each token. `budget` and `free_memory` are bytes for
    this model. Without a budget: a share of what is
    free, but never more than all sequences at full length need. CommandError when not even one
    block fits.
    """
    block_bytes = token_bytes * block_size
    enough = max_seqs * -(-context // block_size) + 1
    blocks = (free_memory if budget is None else budget) // block_bytes
    if budget is None:
        blocks = min(blocks, enough)
    if blocks < 2:
        raise CommandError(
            f"the cache needs at least two blocks of {block_size} tokens ({block_bytes:,} bytes "
            f"each), but there is memory for {blocks}; raise --kv-memory or lower --block-size"
        )
    return int(blocks)


def num_slots(budget: int | None, kv: KVCache, sharers: int) -> int:
    """Blocks of `kv` that fit into the second place: into `budget` bytes for all `sharers`.

    Without a budget: as many as the cache has, as far as a share of what is free holds them.
    """
    size = kv.block_size * kv.bytes_per_token
    if budget is None:
        budget = min(MOST_SPILLED, int(free_host_memory() * SPILL_SHARE))
        return min(kv.blocks - 1, budget // sharers // size)
    return budget // sharers // size


def return_freed_memory() -> None:
    """Give memory that loading has freed back to the system.

    That is GPU memory which torch keeps, and memory which the C library keeps if it is glibc.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_memory(device: torch.device) -> int:
    """Bytes the caches of all models may take when the user sets no limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return int(free_host_memory() * CPU_SHARE)


def free_host_memory() -> int:
    """Bytes that programs can have: pages of files that were read are given up for them."""
    try:
        kilobytes = _number_after("MemAvailable:", MACHINE_MEMORY.read_text())
        machine = kilobytes << 10
    except (OSError, ValueError):
        machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_left_to_container()])


def _number_after(word: str, text: str) -> int:
    """Raises ValueError."""
    words = text.split()
    return int(words[words.index(word) + 1])


def _cores_of_container() -> list[int]:
    """Whole cores this container may keep busy; empty when it has no limit."""
    cores = []
    for files in QUOTA_FILES:
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            said = " ".join((CGROUP / name).read_text() for name in files)
            quota, period = map(int, said.split())  # microseconds of CPU time per period
            if quota > 0:  # -1: no limit
                cores.append(quota // period)
    return cores


def _left_to_container() -> list[int]:
    """Bytes until this container's limit, past which it is killed; empty when it has none."""
    left = []
    for limit, used, stat, unneeded in MEMORY_FILES:
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            most = int((CGROUP / limit).read_text())
            needed = int((CGROUP / used).read_text())
            with suppress(OSError, ValueError):
                # Of files that were read and are not in use: they count, but are given up first.
                needed -= _number_after(unneeded, (CGROUP / stat).read_text())
            left.append(max(0, most - needed))
    return left
