"""What /v1/positions answers: a query's scores, split into content and position. Imported late."""

from collections.abc import Sequence

from torch import Tensor

from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.inspect.appended import Appended, TooMuch, append, arms_for
from ropewalk.model.inspect.audit import AuditStep, entries
from ropewalk.model.inspect.scores import Explanation, Pair, explain, layers_of
from ropewalk.model.loading.checkpoints import InUse, files_of
from ropewalk.server.errors import InvalidField, PromptTooLong, UnsupportedField
from ropewalk.server.hardware import dtype_name
from ropewalk.server.long_work import json_bytes
from ropewalk.server.openai.positions_body import MOST_APPENDED, AuditBody, ExplainBody
from ropewalk.server.openai.requests import check_ids, check_prompt, encode_now
from ropewalk.server.openai.scores import spelled
from ropewalk.server.openai.served_models import Served

MOST_TOKENS, MOST_PROMPT = 256, 128
ABOUT = (
    "content is the score if query and key were at the same position; position is what their "
    "positions add to it"
)
ABOUT_EMBEDDINGS = (
    "content is what the tokens' embeddings make of the score, position what the vectors of their "
    "positions do, divided as the norm divides both together; terms says whose vector it is"
)
ROUNDED = (
    "computed from the weights in the bits that they are served in; the kernels that serve may "
    "also round what these are multiplied with to 8 bits, which is not done here"
)


def explained(body: ExplainBody, served: Served) -> bytes:
    """Takes seconds for a large model. Raises InvalidField, CheckpointError."""
    used = _in_use(served)
    tokens = tokens_of(body.input, served, "input", MOST_TOKENS, bos=body.add_special_tokens)
    config = used.checkpoint.config
    layers, count = layers_of(config), len(tokens)
    if body.layer >= layers:
        raise InvalidField(
            f"layer is {body.layer}, but {served.name} has the layers 0 to {layers - 1}", "layer"
        )
    query = count - 1 if body.query is None else body.query
    for name, index in (("query", query), ("key", body.key)):
        if index is not None and index >= count:
            raise InvalidField(
                f"{name} is {index}, but the input has the tokens 0 to {count - 1}", name
            )
    found = explain(used, tokens, body.layer, query, body.key)
    return json_bytes(answer(found, body, served, tokens, query))


def _in_use(served: Served) -> InUse:
    if served.in_use is None:
        raise UnsupportedField(f"{served.name} cannot be explained; name another model", "model")
    if files_of(served.in_use.checkpoint.path) != served.in_use.files:
        raise UnsupportedField(
            f"the files of {served.name} have changed since it was loaded, so that what they hold "
            "may not be what is served; an operator has to load it again",
            "model",
        )
    return served.in_use


def tokens_of(
    given: str | list[int], served: Served, param: str, most: int, *, bos: bool
) -> list[int]:
    """Raises InvalidField or a subclass."""
    if isinstance(given, str):
        if len(given) > most * 64:  # before all of it is tokenized
            raise _too_long(param, most)
        given = encode_now(given, served, bos=bos, param=param)
    else:
        check_ids(given, served, param)
    if len(given) > most:
        raise _too_long(param, most)
    check_prompt(given, served, param, answered=False)
    return given


def _too_long(param: str, most: int) -> PromptTooLong:
    return PromptTooLong(f"{param} has more than {most} tokens; send at most that many", param)


def answer(
    found: Explanation, body: ExplainBody, served: Served, tokens: Sequence[int], query: int
) -> dict[str, object]:
    used = served.in_use
    assert used is not None
    heads, about = len(found.scores), ABOUT if found.terms is None else ABOUT_EMBEDDINGS
    group = heads // found.num_kv_heads
    each = {
        "scores": found.scores,
        "content": found.content,
        "position": found.position,
        "weights": found.weights,
    }
    return {
        "object": "positions.explanation",
        "model": served.name,
        "encoding": found.encoding,
        "side": "encoder" if served.encoder_decoder else "decoder",
        "layer": body.layer,
        "query": query,
        "key": body.key,
        "tokens": [
            {"id": token, "text": spelled(served.tokenizer, token, first=index == 0)}
            for index, token in enumerate(tokens)
        ],
        "kind": found.kind,
        "key_storage": found.key_storage,
        "causal": found.causal,
        "window": found.window,
        "scale": found.scale,
        "split": {"possible": found.why_not is None, "reason": found.why_not, "about": about},
        "computed": {
            "dtype": dtype_name(used.dtype),
            "kv_dtype": dtype_name(used.kv_dtype),
            "quantize": None if used.bits is None else f"int{used.bits}",
            "note": None if used.bits is None else ROUNDED,
        },
        "heads": [
            {
                "head": head,
                "kv_head": head // group,
                **{
                    name: None if rows is None else listed(rows[head])
                    for name, rows in each.items()
                },
                "terms": _terms(found, head),
            }
            for head in range(heads)
        ],
        "pairs": [_pair(index, pair, query, body.key) for index, pair in enumerate(found.pairs)]
        or None,
        "still": None if found.still is None else listed(found.still),
        "bias": (
            None
            if found.curve is None or found.distances is None
            else {
                "distances": found.distances.tolist(),
                "heads": [listed(row) for row in found.curve],
            }
        ),
    }


def _terms(found: Explanation, head: int) -> dict[str, list[float]] | None:
    if found.terms is None:
        return None
    return {name: listed(rows[head]) for name, rows in found.terms.items()}


def _pair(index: int, pair: Pair, query: int, key: int | None) -> dict[str, object]:
    """Angles in radians, of the positions `query` and `key`."""
    found: dict[str, object] = {
        "pair": index,
        "coordinates": list(pair.coordinates),
        "frequency": pair.frequency,
        "query_angle": query * pair.frequency,
    }
    if key is not None and pair.magnitudes is not None and pair.phases is not None:
        found["key_angle"] = key * pair.frequency
        found["heads"] = [
            {"magnitude": magnitude, "phase": phase}
            for magnitude, phase in zip(listed(pair.magnitudes), listed(pair.phases), strict=True)
        ]
    return found


def listed(row: Tensor) -> list[float]:
    """float32 numbers in as many digits as tell them apart."""
    return [float(f"{value:.9g}") + 0.0 for value in row.tolist()]  # 0 for -0


def arms(served: Served) -> bytes:
    """Which arms an audit of the model can have. Raises UnsupportedField."""
    config = _auditable(served).checkpoint.config
    data = [{"arm": name, "note": note} for name, note in arms_for(config).items()]
    return json_bytes({"object": "list", "model": served.name, "data": data})


def audited(body: AuditBody, served: Served) -> bytes:
    """Takes seconds. Raises InvalidField or a subclass, CheckpointError."""
    used = _auditable(served)
    known = arms_for(used.checkpoint.config)
    if body.arm not in known:
        raise InvalidField(f"arm should be one of {', '.join(known)}", "arm")
    prompt = tokens_of(body.prompt, served, "prompt", MOST_PROMPT, bos=body.add_special_tokens)
    if isinstance(body.append, int):
        more = [prompt[index % len(prompt)] for index in range(body.append)]
    else:
        more = tokens_of(body.append, served, "append", MOST_APPENDED, bos=False)
    check_prompt([*prompt, *more], served, "append", answered=False)
    try:
        found = append(
            used,
            body.arm,
            prompt,
            more,
            trained_length=body.trained_length,
            layers=body.layers,
            steps=body.steps,
        )
    except TooMuch as error:
        message = f"{served.name} is too large to be audited here: {error}; name a smaller model"
        raise UnsupportedField(message, "model") from None
    except EncodingError as error:
        raise InvalidField(f"this arm cannot be audited: {error}", "arm") from None
    return json_bytes(_audit(found, served, len(prompt), len(more)))


def _auditable(served: Served) -> InUse:
    if served.encoder_decoder is not None:
        raise UnsupportedField(
            f"{served.name} is an encoder-decoder, but only decoders are audited; name one", "model"
        )
    return _in_use(served)


def _audit(found: Appended, served: Served, prompt: int, more: int) -> dict[str, object]:
    used = served.in_use
    assert used is not None
    steps = [_step(step) for step in found.steps]
    names = ("written", "changed", "should_change", "stale", "unexpected")
    return {
        "object": "positions.audit",
        "model": served.name,
        "arm": found.arm,
        "note": found.note,
        "trained_length": found.trained_length,
        "layers": found.layers,
        "of_layers": used.checkpoint.config.num_layers,
        "dtype": "float64",
        "prompt_tokens": prompt,
        "appended_tokens": more,
        "entries_per_token": found.entries_per_token,
        "totals": {name: sum(step[name] for step in steps) for name in names},
        "steps": steps,
        "blocks": [
            {
                "first": block.first,
                "tokens": block.tokens,
                "before": block.before,
                "after": block.after,
                "equal": block.before == block.after,
                "changed_entries": block.changed,
            }
            for block in found.blocks
        ],
    }


def _step(step: AuditStep) -> dict[str, int]:
    """In entries. All but `written` are of tokens that were stored before the step."""
    touched = ("written", "changed", "should_change", "stale")
    return {
        "length": step.length,
        "tokens": step.tokens,
        **{name: entries(getattr(step, name)) for name in touched},
        "unexpected": len(step.unexpected),
    }
