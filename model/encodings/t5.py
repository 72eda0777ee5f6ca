"""T5's relative bias: one learned number per head and bucket of distances, added to the scores.

Near distances have a bucket each, far ones share buckets that widen with the logarithm of the
distance. Knows distances only; buckets are computed once, in integer arithmetic.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    MAX_POSITIONS,
    EncodingError,
    MaterialisedBias,
    PositionalEncoding,
    TableBias,
    need_integer,
    need_table,
)
from ropewalk.model.encodings.common.cost import PositionalWork

MAX_BUCKETS = 1024
REQUIRED = frozenset({"buckets", "max_distance"})
FORMS = ("window", "table", "materialised")


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """The smallest distance in each bucket; a bucket that starts where the next does is empty.

    Of N buckets the first e = N // 2 hold one distance each. Distance d >= e is in bucket e + t
    for the largest t < N - e with (D / e)^t <= (d / e)^(N - e), where D is `max_distance`. This
    is the rule of arXiv 1910.10683, section 2.1, without its logarithms, whose rounding moves
    some distances to another bucket in low precision.
    """
    exact = buckets // 2
    wide = buckets - exact
    distances = range(exact, max_distance + 1)
    # Both sides raised to the power N - e and multiplied by e^(N - e).
    logarithmic = [
        bisect_left(distances, max_distance**t * exact ** (wide - t), key=lambda d: d**wide)
        for t in range(wide)
    ]
    return [*range(exact), *(distances[index] for index in logarithmic)]


class T5(PositionalEncoding):
    """Raffel et al. (arXiv 1910.10683), section 2.1, as a table by distance.

    One bias in three forms, between which softmax cannot distinguish:

    - window: the bias minus that of the last bucket, a constant per head that softmax ignores.
      From that bucket's start on, nothing is left to add.
    - table: as trained, so every key costs a read and an add. Bidirectional attention has no
      window form, as keys before and after the query end in different buckets.
    - materialised: the table spread over all rows and keys, anew in each step; every layer reads
      it.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "buckets": "how many buckets there are; each head has one bias per bucket",
        "max_distance": "a distance in the last bucket, which begins a little before",
        "bidirectional": "half of the buckets are for keys after the query; default false",
        "per_layer": "every layer has its own biases, as in UMT5; default false",
        "form": "how the bias is applied: window (to near keys only), table (to every key) or "
        "materialised (as a dense tensor built in each step); default window, or table when "
        "bidirectional",
    }
    BEYOND_TRAINED = (
        "computes as before: all distances past the last bucket's start share one bias, "
        "so far keys are told apart by content alone"
    )

    def __init__(
        self,
        *,
        heads: int,
        layers: int,
        buckets: int,
        max_distance: int,
        bidirectional: bool,
        per_layer: bool,
        form: str,
        context: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.form = form
        self.layers = nn.ModuleList()
        if per_layer:
            self.layers.extend(
                T5(
                    heads=heads,
                    layers=1,
                    buckets=buckets,
                    max_distance=max_distance,
                    bidirectional=bidirectional,
                    per_layer=False,
                    form=form,
                    context=context,
                    device=device,
                )
                for _ in range(layers)
            )
            return
        one_way = buckets // 2 if bidirectional else buckets
        starts = bucket_starts(one_way, max_distance)
        self.last_start = starts[-1]  # of buckets: from this distance on the bias is constant
        self.far = min(self.last_start, context - 1)  # no query has a key further away
        # float32 whatever the model's dtype: the table is small and the scores are float32.
        self.weight = nn.Parameter(
            torch.empty(buckets, heads, dtype=torch.float32, device=device), requires_grad=False
        )
        # On the CPU: on "meta", searchsorted makes torch import modules for seconds.
        distances = torch.arange(-self.far if bidirectional else 0, self.far + 1)
        # side="right": the last bucket that starts at or before the distance.
        bucket = torch.searchsorted(torch.tensor(starts), distances.abs(), side="right") - 1
        if bidirectional:
            bucket[: self.far] += one_way
        self.bucket = bucket.to(device)
        self.table = torch.empty(heads, len(distances), dtype=torch.float32, device=device)

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Options: OPTIONS above; buckets and max_distance are required."""
        if not REQUIRED <= options.keys() <= cls.OPTIONS.keys():
            raise EncodingError(
                "t5 takes the options buckets and max_distance, and optionally bidirectional, "
                f"per_layer and form, but got {sorted(options)}."
            )
        buckets, max_distance = options["buckets"], options["max_distance"]
        bidirectional = options.get("bidirectional", False)
        form = options.get("form", "table" if bidirectional else "window")
        if form not in FORMS:
            raise EncodingError(f"t5's form must be one of {', '.join(FORMS)}, but is {form!r}.")
        if bidirectional and form == "window":
            raise EncodingError(
                "t5 has no window form when bidirectional, because keys before and after the "
                "query end in different buckets; use the form table."
            )
        need_integer("t5", "buckets", buckets, 1, MAX_BUCKETS)
        need_integer("t5", "max_distance", max_distance, 1, MAX_POSITIONS)
        exact = (buckets // 2 if bidirectional else buckets) // 2
        if exact < 1:
            raise EncodingError(
                f"t5 needs 2 buckets or more, and 4 or more when bidirectional, but got {buckets}."
            )
        if max_distance <= exact:
            raise EncodingError(
                f"t5 with {buckets} buckets needs a max_distance above {exact}, "
                f"but got {max_distance}."
            )
        tables = config.num_layers if options.get("per_layer", False) else 1
        need_table("t5", tables * config.num_heads, min(max_distance, context))
        return cls(
            heads=config.num_heads,
            layers=config.num_layers,
            buckets=buckets,
            max_distance=max_distance,
            bidirectional=bidirectional,
            per_layer=options.get("per_layer", False),
            form=form,
            context=context,
            device=device,
        )

    @classmethod
    def usual_options(cls, config: ModelConfig) -> dict[str, Any]:
        return {"buckets": 32, "max_distance": 128}

    def freeze(self) -> None:
        """Look up the bias of every distance once."""
        if self.layers:
            return  # each layer's encoding is frozen separately
        weight = self.weight.double()
        if self.form == "window":
            weight = weight - weight[-1]
        self.table.copy_(weight.float()[self.bucket].t())

    def fixed_tensors(self) -> dict[str, Tensor]:
        return {} if self.layers else {"table": self.table}

    def score_bias(self) -> TableBias | None:
        """None when every layer has its own: see `for_layer`."""
        if self.layers:
            return None
        kind = MaterialisedBias if self.form == "materialised" else TableBias
        return kind(self.table, self.far if self.bidirectional else 0)

    def for_layer(self, layer: int) -> PositionalEncoding:
        if not self.layers:
            return self
        own = self.layers[layer]
        assert isinstance(own, PositionalEncoding)
        return own

    def work(self, config: ModelConfig, context: int, block_size: int) -> PositionalWork:
        """One add per key; in the window form, only for keys before the last bucket."""
        first = self.layers[0] if self.layers else self
        assert isinstance(first, T5)
        window, materialised = self.form == "window", self.form == "materialised"
        tables = config.num_layers if self.layers else 1
        columns = min(context, first.last_start if window else first.table.shape[1])
        seen = config.seen(context)
        values = config.num_heads * sum(min(columns, each) if window else each for each in seen)
        built = tables * config.num_heads * context if materialised else 0
        read = tables * config.num_heads * columns + (values if materialised else 0)
        return PositionalWork(
            bias_values=values,
            bias_built=built,
            flops=values,
            bytes=4 * (read + built),
            bias_bytes=4 * (read + built),
        )
