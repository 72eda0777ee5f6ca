"""An independent decoder, written from the papers: slow, in float64, a whole sequence at once.

Shares nothing with model/ except the names of its weights and the fields of its config: no cache,
no batch, no hooks. So the two agree only if both are right, or wrong in the same way.
"""

import math
from dataclasses import replace

import torch

from tests.model.tiny import parameters_of, program_of

WIDE = torch.float64


def logits(decoder, tokens, *, base=0, tables=torch.float32):
    """[T, vocab] for tokens at the positions base, base + 1, ...

    tables: how angles, their sines and cosines, linear biases, and factors of queries are rounded.
    Published models use float32; float64 gives what the formulas say.
    """
    own = {**program_of(decoder).weights, **parameters_of(decoder)}
    weights = {name: values.to(WIDE) for name, values in own.items()}
    model = _Model(decoder.config, weights)
    rule = RULES[decoder.config.encoding.name](decoder.config, weights, tables)
    positions = torch.arange(base, base + len(tokens))
    return model.run(torch.tensor(tokens), positions, rule)


class _Model:
    def __init__(self, config, weights):
        self.config = config
        self.weights = weights

    def run(self, tokens, positions, rule):
        config, weights = self.config, self.weights
        x = weights["embed.weight"][tokens] * config.embed_scale
        if config.embed_width is not None:
            x = self.linear("project_in", x)
        x = x + rule.added(positions)
        if config.embed_norm:
            x = self.norm("embed_norm", x)
        for layer in range(config.num_layers):
            x = self.block(layer, x, positions, rule)
        if config.block != "post_norm":
            x = self.norm("norm", x)
        if config.embed_width is not None:
            x = self.linear("project_out", x)
        return self.capped(self.linear("head", x) * config.logit_scale, config.logit_cap)

    def block(self, layer, x, positions, rule):
        at = f"layers.{layer}."

        def attended(y):
            return self.attention(layer, y, positions, rule)

        def fed(y):
            return self.feed_forward(f"{at}mlp.", y)

        def first(y):
            return self.norm(f"{at}attention_norm", y)

        def second(y):
            return self.norm(f"{at}mlp_norm", y)

        kind = self.config.block
        if kind == "pre_norm":
            x = x + attended(first(x))
            return x + fed(second(x))
        if kind == "post_norm":
            x = first(x + attended(x))
            return second(x + fed(x))
        if kind == "parallel":
            return x + attended(first(x)) + fed(second(x))
        assert kind == "parallel_one_norm"
        return x + attended(first(x)) + fed(first(x))

    def attention(self, layer, x, positions, rule):
        """softmax(q · k · scale + bias) · v, one query head at a time."""
        config, at = self.config, f"layers.{layer}.attention."
        heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
        scale = 1 / math.sqrt(size) if config.attention_scale is None else config.attention_scale
        projected = self.linear(f"{at}qkv", x)
        if config.qkv_clip is not None:
            projected = projected.clip(-config.qkv_clip, config.qkv_clip)
        if config.qk_norm_whole:
            q, k, v = projected.split([heads * size, groups * size, groups * size], dim=1)
            q, k = self.norm(f"{at}q_norm", q, "rms"), self.norm(f"{at}k_norm", k, "rms")
            projected = torch.cat([q, k, v], dim=1)
        vectors = [projected[:, i * size : (i + 1) * size] for i in range(heads + 2 * groups)]
        queries = vectors[:heads]
        bias = rule.bias(layer, positions, x, queries)
        gathered = []
        for head in range(heads):
            group = head * groups // heads
            q, k, v = vectors[head], vectors[heads + group], vectors[heads + groups + group]
            if config.qk_norm and not config.qk_norm_whole:
                q, k = self.norm(f"{at}q_norm", q, "rms"), self.norm(f"{at}k_norm", k, "rms")
            scores = rule.products(layer, q, k, positions) * scale
            scores = self.capped(scores, config.score_cap)
            if bias is not None:
                scores = scores + bias[head]
            seen = self.seen(layer, len(x))
            scores = scores + rule.of_scores(layer, q, scores, seen)
            powers = (scores - scores.max()).exp() * seen
            gathered.append(powers @ v / powers.sum(dim=1, keepdim=True))
        return self.linear(f"{at}out", torch.cat(gathered, dim=1))

    def capped(self, x, cap):
        """Arxiv 2408.00118, section 2."""
        return x if cap is None else cap * torch.tanh(x / cap)

    def seen(self, layer, count):
        """[queries, keys]: 1 where the key is neither after the query nor outside its window."""
        window = self.config.windows[layer] or count
        return torch.ones(count, count, dtype=WIDE).tril().triu(1 - window)

    def feed_forward(self, at, x):
        activate = ACTIVATIONS[self.config.activation]
        if not self.config.gated:
            return self.linear(f"{at}down", activate(self.linear(f"{at}up", x)))
        both, width = self.linear(f"{at}gate_up", x), self.config.intermediate_size
        return self.linear(f"{at}down", activate(both[:, :width]) * both[:, width:])

    def linear(self, name, x):
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name, x, kind=None):
        """Arxiv 1910.07467 ("rms") and 1607.06450 ("layer")."""
        if (kind or self.config.norm) == "layer":
            x = x - x.mean(dim=-1, keepdim=True)
        power = (x * x).mean(dim=-1, keepdim=True)
        y = x / (power + self.config.norm_eps).sqrt() * self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias


ACTIVATIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / math.sqrt(2)).erf()) / 2,
    "gelu_tanh": lambda x: (
        x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh()) / 2
    ),
    "relu": lambda x: x * (x > 0),
}


class NoPosition:
    """The control. Each rule below overrides what its encoding does."""

    def __init__(self, config, weights, tables):
        self.config = config
        self.options = config.encoding.options
        self.weights = weights
        self.tables = tables

    def added(self, positions):
        return 0.0

    def turned(self, layer, x, positions):
        return x

    def products(self, layer, q, k, positions):
        """[queries, keys] of one head."""
        return self.turned(layer, q, positions) @ self.turned(layer, k, positions).T

    def bias(self, layer, positions, x, queries):
        """[heads, queries, keys], or None. x: what attention reads; queries: of it, by head."""
        return None

    def of_scores(self, layer, q, scores, seen):
        """[queries, keys] of one head, added to these scores."""
        return 0.0


class Rotary(NoPosition):
    """Rotates pair i of the first `width` coordinates by base^(-2i / width) per position.

    Arxiv 2104.09864, section 3.2.2.
    """

    def turned(self, layer, x, positions):
        options = self.options
        if layer not in (options.get("layers") or range(self.config.num_layers)):
            others = options.get("elsewhere")
            if others is None:
                return x
            spec = replace(self.config.encoding, options=others)
            rule = type(self)(replace(self.config, encoding=spec), self.weights, self.tables)
            return rule.turned(layer, x, positions)
        width, growth = options["width"], self.growth()
        y = x.clone()
        for i in range(width // 2):
            a, b = (2 * i, 2 * i + 1) if options["layout"] == "interleaved" else (i, i + width // 2)
            angle = self.angle(positions, self.speed(i))
            cos, sin = (angle.cos() * growth).to(WIDE), (angle.sin() * growth).to(WIDE)
            y[:, a] = x[:, a] * cos - x[:, b] * sin
            y[:, b] = x[:, a] * sin + x[:, b] * cos
        return y

    def products(self, layer, q, k, positions):
        """From the distance `near` on with other positions (2401.01325)."""
        sharper, rotated = self.options.get("query_scale"), self.options.get("layers") or [layer]
        if sharper is not None and layer in rotated:
            passed = (positions // sharper["original_context"]).to(WIDE)
            factors = 1 + sharper["beta"] * (1 + passed).log()
            q = q * factors.to(self.tables).to(WIDE)[:, None]
        found, near = super().products(layer, q, k, positions), self.options.get("near")
        if near is None or layer not in (self.options.get("layers") or [layer]):
            return found
        group = self.options.get("group") or len(positions) + int(positions[0]) + near
        shift = near - near // group
        of_q, of_k = positions // group + shift, positions // group
        far = self.turned(layer, q, of_q) @ self.turned(layer, k, of_k).T
        return torch.where(positions[:, None] - positions >= near, far, found)

    def angle(self, positions, speed):
        return positions.to(self.tables) * speed.to(self.tables)

    def speed(self, i):
        """Radians per position of pair i."""
        base, width = self.options["base"], self.options["width"]
        speed = 1 / base ** torch.tensor(2 * i / width, dtype=self.tables)
        scaling = self.options.get("scaling")
        if scaling is None:
            return speed
        if scaling["type"] == "linear":  # 2306.15595
            return speed / scaling["factor"]
        assert scaling["type"] == "yarn"
        slow = self.slowed(i, base, width, scaling["original_context"])
        return speed / scaling["factor"] * slow + speed * (1 - slow)

    def slowed(self, i, base, width, context):
        """Arxiv 2309.00071, section 3.2, as its authors' code has it: linear in the pair's index.

        0 for pairs that rotate 32 times or more in the original context, 1 for those that rotate
        once or less, and both bounds moved out to whole indices.
        """
        often, once = (
            width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (32, 1)
        )
        low, high = max(math.floor(often), 0), min(math.ceil(once), width - 1)
        return torch.tensor(min(max((i - low) / (high - low), 0), 1), dtype=self.tables)

    def growth(self):
        """By how much YaRN lengthens queries and keys (section 3.4)."""
        scaling = self.options.get("scaling") or {}
        return 0.1 * math.log(scaling["factor"]) + 1 if scaling.get("type") == "yarn" else 1.0


class WideRotary(Rotary):
    """With the published frequencies, but everything derived from them exact."""

    def angle(self, positions, speed):
        return positions.to(WIDE) * speed.to(WIDE)


class BucketBias(NoPosition):
    """A learned scalar by head and bucket of the distance (1910.10683, section 2.1)."""

    def bias(self, layer, positions, x, queries):
        name = f"encoding.layers.{layer}.weight"
        if not self.options.get("per_layer", False):
            name = "encoding.weight"
        learned = self.weights[name]  # [buckets, heads]
        distance = (positions[:, None] - positions).clip(min=0)  # no key after its query is seen
        buckets = torch.tensor([self.bucket(far) for far in range(int(distance.max()) + 1)])
        return learned[buckets[distance]].permute(2, 0, 1)

    def bucket(self, distance):
        """Half of the buckets are one distance each, the others grow with its logarithm."""
        buckets, limit = self.options["buckets"], self.options["max_distance"]
        exact = buckets // 2
        if distance < exact:
            return distance
        share = math.log(distance / exact) / math.log(limit / exact)
        return min(buckets - 1, exact + math.floor(share * (buckets - exact)))


class Slopes(NoPosition):
    """Each head lowers a score by its own slope per token of distance (2108.12409, section 3)."""

    def bias(self, layer, positions, x, queries):
        slopes = torch.tensor(
            [self.slope(head) for head in range(self.config.num_heads)], dtype=WIDE
        )
        scale = self.config.head_dim**-0.5 if self.options.get("scaled") else 1.0
        if self.options.get("hf_exact"):  # a constant by query apart, so rounded by key
            rounded = slopes.bfloat16()[:, None] * positions.bfloat16()
            by_key = (rounded.to(self.tables) * scale).to(WIDE)
            return by_key[:, None, :].expand(-1, len(positions), -1)
        distance = (positions[:, None] - positions).to(self.tables)
        return -((slopes * scale).to(self.tables)[:, None, None] * distance).to(WIDE)

    def slope(self, head):
        """2^(-most · i / n), i from 1; past a power of two the odd i of twice as many."""
        most, power = self.options.get("bias_max", 8), 1
        while 2 * power <= self.config.num_heads:
            power *= 2
        if head < power:
            return 2 ** (-most * (head + 1) / power)
        return 2 ** (-most * (2 * (head - power) + 1) / (2 * power))


class Table(NoPosition):
    """One learned vector for each position (1705.03122, section 3.1)."""

    def added(self, positions):
        return self.weights["encoding.table"][positions + self.options["offset"]]


class Waves(NoPosition):
    """Sines and cosines whose frequencies fall from 1 towards 1/10000 (1706.03762, section 3.5)."""

    def added(self, positions):
        width = self.config.hidden_size
        half = width // 2
        last = half - 1 if self.options.get("slowest", "next") == "last" else half
        found = torch.zeros(len(positions), width, dtype=WIDE)
        for i in range(half):
            angle = (positions + self.options.get("offset", 0)).to(WIDE) / 10000 ** (i / last)
            split = self.options["layout"] == "split"
            found[:, i if split else 2 * i] = angle.sin().to(self.tables).to(WIDE)
            found[:, i + half if split else 2 * i + 1] = angle.cos().to(self.tables).to(WIDE)
        return found


class DistanceOverPosition(NoPosition):
    """An MLP of log(1 + distance) / log(1 + position), the position no smaller than a threshold.

    Arxiv 2310.04418, equations 4 and 6.
    """

    def bias(self, layer, positions, x, queries):
        inner, outer = (torch.tensor(self.options[of], dtype=WIDE) for of in ("inner", "outer"))
        count = len(positions)
        found = torch.zeros(self.config.num_heads, count, count, dtype=WIDE)
        for i, query in enumerate(positions.tolist()):
            for j, key in enumerate(positions.tolist()[: i + 1]):
                near = math.log1p(query - key) / math.log1p(max(query, self.options["threshold"]))
                found[:, i, j] = ((near * inner + 0.1).clamp(min=0) * outer).sum(dim=1)
        return found.float().to(WIDE)


class Gates(NoPosition):
    """The logarithms of the gates of all tokens after the key are added, as 2503.02130 has it.

    A gate is the sigmoid of a linear layer of the token's x, one for each head.
    """

    def opened(self, layer, x):
        at = f"encoding.layers.{layer}."
        return x @ self.weights[f"{at}weight"].T + self.weights[f"{at}bias"]

    def bias(self, layer, positions, x, queries):
        logs = -torch.log(1 + torch.exp(-self.opened(layer, x))).to(self.tables).to(WIDE)
        found = torch.zeros(self.config.num_heads, len(x), len(x), dtype=WIDE)
        for i in range(len(x)):
            for j in range(i):
                found[:, i, j] = logs[j + 1 : i + 1].sum(dim=0)
        return found


class Everything(WideRotary, Gates):
    """Angles, slopes, and gates that are numbers of x itself."""

    def opened(self, layer, x):
        return -x[:, : self.config.num_heads]

    def bias(self, layer, positions, x, queries):
        slopes = 0.1 * 2.0 ** -torch.arange(self.config.num_heads)
        distance = (positions[:, None] - positions).to(self.tables)
        return Gates.bias(self, layer, positions, x, queries) - (
            slopes[:, None, None] * distance
        ).to(WIDE)


class RelativeKeys(NoPosition):
    """Keys of the distance, clipped, are added to keys (1803.02155, equation 4)."""

    def bias(self, layer, positions, x, queries):
        clip, dim = self.options["clip"], self.config.head_dim
        size = (self.config.num_layers, clip + 1, dim)
        keys = torch.randn(size, generator=torch.Generator().manual_seed(9)).to(WIDE)[layer]
        distance = (positions[:, None] - positions).clip(0, clip)  # no key after its query is seen
        found = torch.stack([(q @ keys.T / math.sqrt(dim)).gather(1, distance) for q in queries])
        return found.to(self.tables).to(WIDE)


class Counted(NoPosition):
    """A key's position is a sum of sigmoids of scores (2405.18719, equations 3 to 5)."""

    def of_scores(self, layer, q, scores, seen):
        vectors = self.weights[f"encoding.layers.{layer}.vector"]
        found, most = torch.zeros_like(scores), len(vectors) - 1
        for i in range(len(q)):
            products, gates = (
                (vectors @ q[i]).tolist(),
                (seen[i] / (1 + (-scores[i]).exp())).tolist(),
            )
            counted, added = 0.0, []
            for gate in reversed(gates):  # of later tokens 0
                counted += gate
                position = min(counted, most)
                low, high = math.floor(position), math.ceil(position)
                share = position - low
                added.append((1 - share) * products[low] + share * products[high])
            found[i] = torch.tensor(added[::-1], dtype=WIDE)
        return found


class Decayed(NoPosition):
    """Pair i of a query is rotated and grows by its own power of the position, a key's shrinks.

    Arxiv 2212.10554, section 3.
    """

    def products(self, layer, q, k, positions):
        base, reach, half = self.options["base"], self.options["reach"], q.shape[1] // 2
        total = torch.zeros(len(q), len(k), dtype=WIDE)
        for i in range(half):
            turn = torch.exp(1j * positions.to(WIDE) * base ** (-i / half))
            growth = ((i / half + 0.4) / 1.4) ** (positions.to(WIDE) / reach)
            of_q = torch.complex(q[:, i], q[:, i + half]) * turn * growth
            of_k = torch.complex(k[:, i], k[:, i + half]) * turn / growth
            total += (of_q[:, None] * of_k.conj()).real
        return total


class ByCount(NoPosition):
    """Arxiv 2501.19399: softmax of s · log(n) · scores, n keys being seen; s by head."""

    def bias(self, layer, positions, x, queries):
        self.heads = iter(self.options["by_head"])

    def products(self, layer, q, k, positions):
        factors = (positions + 1).to(self.tables).log() * next(self.heads)
        return super().products(layer, q, k, positions) * factors.to(WIDE)[:, None]


RULES = {
    "nope": NoPosition,
    "alibi": Slopes,
    "cope": Counted,
    "forgetting": Gates,
    "learned": Table,
    "sinusoidal": Waves,
    "rope": Rotary,
    "tests.model.tiny:WideRoPE": WideRotary,
    "t5": BucketBias,
    "tests.model.tiny:Shaw": RelativeKeys,
    "tests.model.tiny:XPos": Decayed,
    "tests.model.tiny:Several": Everything,
    "tests.model.tiny:Fire": DistanceOverPosition,
    "tests.model.tiny:Sharper": ByCount,
}
