"""Trains one model of the family: steps, checkpoints, a log. Resuming equals not having stopped.

RUN/checkpoint.safetensors   the latest state
RUN/stable.safetensors       the state before the rate fell, from which longer runs continue
RUN/log.jsonl                one line per step, with the held-out loss now and then
RUN/tokenizer.model          the tokenizer of the tokens
RUN/model/                   the finished checkpoint, for `ropewalk serve`, and its log
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.model.config import ModelConfig
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.files import put, replacing
from ropewalk.model.family.texts.corpus import Corpus
from ropewalk.model.family.texts.windows import Windows
from ropewalk.model.family.training import checkpoints
from ropewalk.model.family.training.checkpoints import State
from ropewalk.model.family.training.dense import refreeze
from ropewalk.model.family.training.losses import later_half, pieces, token_losses, windows_of
from ropewalk.model.family.training.muon import Muon
from ropewalk.model.family.training.recipe import Recipe, code_digest, new_decoder
from ropewalk.model.loading.save import save_checkpoint

MATRIX_PARTS = {"attention.qkv.weight": 3, "mlp.gate_up.weight": 2}  # matrices stored as one
LOG = "log.jsonl"
HELD_OUT_WINDOWS = 64  # evaluated during training; `evaluate` uses all
Report = Callable[[int, float], None]  # tokens since the last report, loss


@dataclass(frozen=True, slots=True)
class Pace:
    """How to train on this machine; does not affect the result except for rounding."""

    device: torch.device
    autocast: bool = False  # bfloat16, where the hardware supports it
    compile: bool = False
    at_once: int | None = None  # windows per pass, to fit a processor's cache; None: all
    save_every_s: float = 120.0
    look_every: int = 250  # steps between evaluations on held-out text


class Training:
    """One model in training."""

    def __init__(
        self, config: ModelConfig, recipe: Recipe, corpus: Corpus, run: Path, pace: Pace
    ) -> None:
        """Resumes from `run` if it was begun. Raises EncodingError, FamilyError."""
        self.decoder = new_decoder(config, recipe.seed, pace.device)
        self.step, self.seconds = 0, 0.0
        self._recipe, self._pace, self._run = recipe, pace, run
        self._tokenizer = corpus.tokenizer
        self._windows = Windows(corpus.train, config.trained_context, recipe.seed)
        self._bos = corpus.train.bos
        held_out = windows_of(corpus.held_out, config.trained_context, HELD_OUT_WINDOWS)
        self._held_out = held_out.to(pace.device)
        self._parameters = dict(self.decoder.program.named_parameters())
        matrices = {
            name: parameter
            for name, parameter in self._parameters.items()
            if name.startswith("layers.") and parameter.dim() == 2
        }
        self._muon = Muon(
            {name: _parts(name, p.detach()) for name, p in matrices.items()},
            weight_decay=recipe.weight_decay,
            dtype=torch.bfloat16 if pace.autocast else torch.float32,
        )
        self._others = {n: p for n, p in self._parameters.items() if n not in matrices}
        self._adam = torch.optim.AdamW(
            list(self._others.values()), betas=(0.9, 0.95), weight_decay=0.0
        )
        self._loss = (
            torch.compile(self._mean_loss, dynamic=False) if pace.compile else self._mean_loss
        )
        # Everything that determines the result, except how many tokens there will be.
        self._facts = {
            "recipe": {**asdict(recipe), "tokens": None, "decay": None},
            "config": json.loads(json.dumps(asdict(config))),
            "corpus": corpus.fingerprint,
        }
        if code := code_digest(config.encoding.name):
            self._facts["code"] = code
        run.mkdir(parents=True, exist_ok=True)
        self._go_on()

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return self.step * self._recipe.windows * self._windows.length

    def train(self, report: Report, until: int | None = None) -> None:
        """Up to the last step, or step `until`. Raises FamilyError when the loss is not finite."""
        last = self._recipe.steps if until is None else min(until, self._recipe.steps)
        saved = time.monotonic()
        with (self._run / LOG).open("a", encoding="utf-8") as log:
            while self.step < last:
                if self.step == self._recipe.stable_steps:
                    log.flush()  # a state's log lines must be on disk before it
                    self._save("stable.safetensors")
                line = self._one_step()
                report(self._recipe.windows * self._windows.length, line["loss"])
                if self.step % self._pace.look_every == 0 or self.step == self._recipe.steps:
                    line["held_out_loss"] = later_half(
                        self.decoder, self._held_out, self._pace.autocast
                    )
                log.write(json.dumps(line) + "\n")
                if time.monotonic() - saved > self._pace.save_every_s:
                    log.flush()
                    self._save("checkpoint.safetensors")
                    saved = time.monotonic()
        self._save("checkpoint.safetensors")

    def finish(self) -> Path:
        """Write the folder for `ropewalk serve`, replacing an earlier one.

        Raises CheckpointError, OSError.
        """
        folder, made = self._run / "model", self._run / "model.partial"
        tokenizer = self._run / "tokenizer.model"
        tokenizer.write_bytes(self._tokenizer)
        shutil.rmtree(made, ignore_errors=True)  # left by a process that was killed
        refreeze(self.decoder)
        save_checkpoint(
            {name: p.detach() for name, p in self._parameters.items()},
            self.decoder.program.config,
            made,
            tokenizer=[tokenizer],
        )
        # A longer training drops lines from the run's own log.
        shutil.copyfile(self._run / LOG, made / LOG)
        put(made, folder)
        return folder

    def _one_step(self) -> dict[str, Any]:
        begun = time.perf_counter()
        share = self._recipe.rate(self.step)
        tokens = torch.from_numpy(self._windows.step(self.step, self._recipe.windows))
        tokens = pieces(tokens, self._recipe.length(self.step), self._bos)
        value = self._gather_gradients(tokens.to(self._pace.device))
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._recipe.clip)
        gradients = {
            name: _parts(name, _gradient(self._parameters[name])) for name in self._muon.momenta
        }
        self._muon.step(gradients, share * self._recipe.matrix_rate)
        self._adam.param_groups[0]["lr"] = share * self._recipe.other_rate
        self._adam.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        if not np.isfinite(value):
            raise FamilyError(
                f"the loss is {value} at step {self.step}; lower the learning rates and start over"
            )
        self.step += 1
        self.seconds += time.perf_counter() - begun
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "loss": round(value, 5),
            "rate": round(share, 6),
        }

    def _gather_gradients(self, tokens: Tensor) -> float:
        """Compute gradients of the mean loss over tokens [count, length + 1], which it returns."""
        total = 0.0
        whole = self._pace.at_once or self._recipe.windows
        at_once = whole * self._windows.length // (tokens.shape[1] - 1)
        for first in range(0, len(tokens), at_once):
            part = tokens[first : first + at_once]
            refreeze(self.decoder)
            loss = self._loss(part) * (len(part) / len(tokens))
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    def _mean_loss(self, tokens: Tensor) -> Tensor:
        return token_losses(self.decoder, tokens, self._pace.autocast).mean()

    def _save(self, name: str) -> None:
        tensors: dict[str, Tensor] = {f"weight/{n}": p for n, p in self._parameters.items()}
        for name_, momenta in self._muon.momenta.items():
            tensors |= {f"muon/{name_}/{i}": m for i, m in enumerate(momenta)}
        for name_, parameter in self._others.items():
            state = self._adam.state.get(parameter, {})
            tensors |= {f"adam/{name_}/{key}": value for key, value in state.items()}
        state = State(
            step=self.step,
            steps=self._recipe.steps,
            level=self.step <= self._recipe.stable_steps,
            seconds=self.seconds,
            tensors=tensors,
            facts=self._facts,
        )
        checkpoints.save(state, self._run / name)

    def _go_on(self) -> None:
        """Load the newest state from which the wanted number of tokens can be reached."""
        for name in ("checkpoint.safetensors", "stable.safetensors"):
            state = checkpoints.load(self._run / name)
            if state is None:
                continue
            if state.facts != self._facts:
                raise FamilyError(
                    f"{self._run} was begun with another recipe, encoding or other texts; "
                    "move it away to start over"
                )
            same_end = state.steps == self._recipe.steps
            if same_end or (state.level and state.step <= self._recipe.stable_steps):
                self._take(state)
                break
            if state.steps > self._recipe.steps:
                raise FamilyError(
                    f"{self._run} was begun for more tokens, and this shorter run would replace "
                    "it; move it away to start over"
                )
        lines = _lines(self._run / LOG)
        if self.step == self._recipe.steps:
            # A longer training that was begun since may have dropped lines; the model has them.
            finished = _lines(self._run / "model" / LOG)
            lines = finished if len(finished) == self.step else lines
        text = "".join(f"{line}\n" for line in lines[: self.step])  # none later than the state
        with replacing(self._run / LOG) as partial:
            partial.write_text(text, encoding="utf-8")

    @torch.no_grad()
    def _take(self, state: State) -> None:
        self.step, self.seconds = state.step, state.seconds
        for name, parameter in self._parameters.items():
            parameter.copy_(state.tensors[f"weight/{name}"])
        for name, momenta in self._muon.momenta.items():
            for index, momentum in enumerate(momenta):
                momentum.copy_(state.tensors[f"muon/{name}/{index}"])
        for name, parameter in self._others.items():
            prefix = f"adam/{name}/"
            self._adam.state[parameter] = {
                key.removeprefix(prefix): value.to(
                    "cpu" if key.endswith("/step") else parameter.device
                )
                for key, value in state.tensors.items()
                if key.startswith(prefix)
            }


def _parts(name: str, matrix: Tensor) -> Sequence[Tensor]:
    """Views of the separate matrices of a parameter."""
    ends = (count for end, count in MATRIX_PARTS.items() if name.endswith(end))
    return matrix.chunk(next(ends, 1))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []
