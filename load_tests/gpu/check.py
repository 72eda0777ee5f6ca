"""Decoding on this device, compared with its memory's limit and with `transformers`: `--help`."""

import argparse
import gc
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from logging import getLogger
from pathlib import Path

import torch

from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.gpu import parts as gpu_parts
from ropewalk.load_tests.gpu import peer
from ropewalk.load_tests.gpu.parts import OWN, Budget, Cell, Found, LeftOut, Purse, Setting
from ropewalk.load_tests.gpu.peer import PEER
from ropewalk.load_tests.gpu.table import as_json, tables
from ropewalk.load_tests.micro.in_process import decoders
from ropewalk.load_tests.micro.measured import add_place, heading, place_of, run, save
from ropewalk.load_tests.micro.roofline import Ceiling, ceiling, kv_bytes, weight_bytes
from ropewalk.load_tests.micro.step_cost import VARIANTS
from ropewalk.load_tests.report.formatting import digits
from ropewalk.load_tests.run.options import add, count, counts, program
from ropewalk.model.formatting import in_one_line
from ropewalk.model.kernels.triton.launches import FEW_ROWS
from ropewalk.model.loading.random_weights import SHAPES
from ropewalk.server import hardware
from ropewalk.server.launch.load_model import find_kernels

log = getLogger(__name__)

RESULTS = Path(__file__).parents[1] / "results"
VERSIONS = ("torch", "triton", "transformers")
WEIGHTS = {  # by which the parts of a shape share the time
    (OWN, "passes"): 15,
    (OWN, "prompts"): 2,
    (OWN, "encodings"): 15,
    (OWN, "steps"): 13,
    (PEER, "passes"): 35,  # a compilation each
    (PEER, "prompts"): 2,
    (PEER, "steps"): 18,
}
Part = Callable[[Budget], Iterator[Found]]

_DESCRIPTION = f"""\
How fast this device decodes, compared with the limit of its memory and with {PEER}.

The device itself is measured first: bytes per second of a large copy, reads and writes counted
together, and operations per second of a large matrix product. Then, for each shape, with random
weights, in this order:

  passes      a decoder pass under rope that gives each request one token, at each batch and
              context, compared with the roofline: the time to read all weights and the keys and
              values needed, at the speed of the copy. Replayed as CUDA graphs where the server
              does that. A batch that Ropewalk's own linear layers take, of up to {FEW_ROWS}, is
              measured with torch's, too
  prompts     one pass over --prefill tokens, compared with the time of its linear layers' products
              at the measured speed
  encodings   a pass under each encoding compared with one under nope, in rounds, as in
              ropewalk.load_tests.micro.step_cost
  steps       steps of the engine, with scheduling, sampling and audit, in wall-clock time
  {PEER}
              the same work: for one stream, a pass with its static cache, compiled on a GPU but
              not on a CPU; for several, the steps of its continuous batching

Passes are timed by events on a GPU and in processor time on a CPU. A batch whose keys and values
do not fit is left out and listed, as is everything that there was no time for: each part gets a
share of the remaining --seconds, starts no measurement after that, and finishes the one it is in.
NAME.json is rewritten after each figure, so a run that is cut short keeps the figures it has.
"""

_EPILOG = """\
examples:
  python -m ropewalk.load_tests.gpu.check
  python -m ropewalk.load_tests.gpu.check --shapes llama-1b --batches 1,64 --contexts 4k
  python -m ropewalk.load_tests.gpu.check --device cpu --shapes tiny --batches 1,2 --contexts 64

Tables go to standard output, progress to standard error.
Exit status: 0; 1 when something failed or the run was cut short; 2 when nothing was measured.
"""


@dataclass(frozen=True, slots=True)
class Report:
    ceiling: Ceiling
    found: Sequence[Found]
    cut_short: bool


def main(argv: Sequence[str] | None = None) -> int:
    # A shell that starts it in the background may ignore SIGINT, and the results would be lost.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = sys.argv[1:] if argv is None else list(argv)
    return run("gpu_check", parser(), words, partial(_measure, words), _report)


def _report(report: Report, words: Sequence[str], args: argparse.Namespace) -> int:
    print(tables(report.ceiling, report.found))
    failed = any(isinstance(each, LeftOut) and each.failed for each in report.found)
    if failed or report.cut_short:
        return 1
    return 2 if all(isinstance(each, LeftOut) for each in report.found) else 0


def parser() -> argparse.ArgumentParser:
    options = program("python -m ropewalk.load_tests.gpu.check", _DESCRIPTION, _EPILOG)
    shapes = f"some of {', '.join(SHAPES)} (default: smollm2,llama-1b)"
    add(options, "--shapes A,B", _some_of("shape", SHAPES), ("smollm2", "llama-1b"), shapes)
    systems = f"some of {OWN},{PEER} (default: both)"
    add(options, "--systems A,B", _some_of("system", (OWN, PEER)), (OWN, PEER), systems)
    batches = "requests in a batch (default: 1,8,64,256)"
    add(options, "--batches N,...", counts, (1, 8, 64, 256), batches)
    contexts = "tokens of each request (default: 512,4k,16k)"
    add(options, "--contexts N,...", counts, (512, 4096, 16384), contexts)
    add(options, "--prefill N", count, 1024, "tokens of the prompt (default: %(default)s)")
    add(options, "--rounds N", count, 40, "samples of each pass (default: %(default)s)")
    add(options, "--seconds N", count, 400, "for the whole run (default: %(default)s)")
    add_place(options)
    commit = "the commit that is measured, for a folder without git history"
    add(options, "--commit HASH", str, None, commit)
    options.add_argument(
        "--out",
        metavar="NAME",
        help="write NAME.json (default: load_tests/results/gpu-DEVICE on a GPU, with the "
        "system if it is one alone; none on a CPU)",
    )
    return options


def _some_of(kind: str, known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is no {kind}; use {', '.join(known)}")
        return names

    return parse


def _measure(words: Sequence[str], args: argparse.Namespace) -> Report:
    device, dtype, clock = place_of(args)
    name = args.out
    if name is None and device.type != "cpu":
        name = str(RESULTS / _named(device, args.systems))
    head = heading("gpu check", words, args) | {"versions": _versions()}
    if args.commit:
        head["environment"]["commit"] = args.commit
    progress = Progress(sys.stderr)
    weights = [weight for (system, _), weight in WEIGHTS.items() if system in args.systems]
    progress.schedule(len(weights) * len(args.shapes))
    purse = Purse(Budget(args.seconds), sum(weights) * len(args.shapes))
    progress.start("copies and products")
    best = ceiling(device, dtype, clock)
    setting = Setting(device, dtype, clock, args.seed, args.rounds, best)
    found: list[Found] = []
    try:
        for each in _Check(args, setting, purse, progress).everything():
            found.append(each)
            if name:
                save(name, {**head, **as_json(best, found)})
    except (KeyboardInterrupt, torch.AcceleratorError):  # interrupted, or the device is lost
        return Report(best, found, cut_short=True)
    finally:
        progress.clear()
    if name:
        print(f"wrote {name}.json", file=sys.stderr)
    return Report(best, found, cut_short=False)


@dataclass(frozen=True, slots=True)
class _Check:
    """Measures every part of each shape, holding the memory of one system at a time."""

    args: argparse.Namespace
    setting: Setting
    purse: Purse
    progress: Progress

    def everything(self) -> Iterator[Found]:
        for shape in self.args.shapes:
            config, setting = SHAPES[shape], self.setting
            hardware.return_freed_memory()  # of the ceiling's tensors, or of another shape
            room = hardware.free_memory(setting.device) - weight_bytes(config, setting.dtype)
            cells = []
            for cell in (Cell(*each) for each in product(self.args.batches, self.args.contexts)):
                size = kv_bytes(config, setting.dtype, cell.batch, cell.context)
                if size <= room:
                    cells.append(cell)
                    continue
                needed, there = digits(size / 1e6), digits(max(room, 0) / 1e6)
                reason = f"{needed} MB of keys and values, and room for {there}"
                yield LeftOut("decoding", "all", shape, cell, reason)
            systems = {OWN: self._own, PEER: self._peer}
            for name in self.args.systems:
                if not cells:
                    self._forgo(name)
                    continue
                system = systems[name]
                yield from self._tried("everything", name, shape, partial(system, shape, cells))

    def _forgo(self, system: str) -> None:
        """Leaves the time of all its parts of a shape to the others."""
        for (one, _), weight in WEIGHTS.items():
            if one == system:
                self.purse.forgo(weight)
                self.progress.finish()

    def _own(self, shape: str, cells: Sequence[Cell]) -> Iterator[Found]:
        setting, kernels = self.setting, find_kernels(self.setting.device)
        self.progress.start(f"{shape}: making the decoders")
        made = decoders(
            shape,
            VARIANTS,
            context=max(*self.args.contexts, self.args.prefill) + 2 * gpu_parts.STEPS + 1,
            dtype=setting.dtype,
            device=setting.device,
            kernels=kernels,
        )
        told = (shape, made["rope"])
        parts = {
            "passes": partial(gpu_parts.passes_of, *told, cells, setting),
            "prompts": partial(gpu_parts.prefill_of, *told, self.args.prefill, setting),
            "encodings": partial(gpu_parts.encodings_of, shape, made, cells, setting),
            "steps": partial(gpu_parts.steps_of, *told, cells, setting, kernels),
        }
        yield from self._each(OWN, shape, parts)

    def _peer(self, shape: str, cells: Sequence[Cell]) -> Iterator[Found]:
        if peer.missing():
            yield LeftOut("everything", PEER, shape, None, peer.MISSING)
            self._forgo(PEER)
            return
        setting = self.setting
        self.progress.start(f"{shape}: making the model of {PEER}")
        model = peer.model_of(SHAPES[shape], setting)
        parts = {
            "passes": partial(peer.passes_of, shape, model, cells, setting),
            "prompts": partial(peer.prefill_of, shape, model, self.args.prefill, setting),
            "steps": partial(peer.steps_of, shape, model, cells, setting),
        }
        yield from self._each(PEER, shape, parts)

    def _each(self, system: str, shape: str, parts: Mapping[str, Part]) -> Iterator[Found]:
        for name, part in parts.items():
            self.progress.start(f"{shape}: {system}, {name}")
            budget = self.purse.budget(WEIGHTS[system, name])
            yield from self._tried(name, system, shape, partial(part, budget))
            self.progress.finish()

    def _tried(
        self, work: str, system: str, shape: str, find: Callable[[], Iterator[Found]]
    ) -> Iterator[Found]:
        """Yields until an error, which becomes a LeftOut, so that the next part can begin."""
        try:
            yield from find()
        except torch.AcceleratorError:  # the device is lost, and all else on it would fail
            raise
        except Exception as error:  # other parts may still work
            log.exception("%s, %s of %s failed", system, work, shape)
            yield LeftOut(work, system, shape, None, in_one_line(error), failed=True)
        gc.collect()
        hardware.return_freed_memory()


def _versions() -> dict[str, str | None]:
    """Versions of packages that affect the figures; None if one is missing."""
    found: dict[str, str | None] = {"cuda": torch.version.cuda}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _named(device: torch.device, systems: Sequence[str]) -> str:
    """gpu-nvidia-h200; of one system alone, with its name."""
    name = torch.cuda.get_device_name(device).lower()
    alone = [] if len(systems) > 1 else systems
    return "-".join(["gpu", re.sub("[^a-z0-9]+", "-", name).strip("-"), *alone])


if __name__ == "__main__":
    sys.exit(main())
