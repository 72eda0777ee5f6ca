"""Asks servers about the models that they serve, before anything is measured."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.load_tests.client.client import Server, Unreachable, Variant, get_json


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about one model; None if the server does not report one."""

    context: int | None = None  # tokens of prompt and answer together
    trained_context: int | None = None
    vocab_size: int | None = None
    block_size: int | None = None


async def variants_of(server: Server, models: Sequence[str]) -> list[Variant]:
    """A variant for each of `models`, or else for the server's first model. Raises Unreachable.

    A variant is labelled with its model; the caller adds the server if there are several.
    """
    if server.dialect == "transformers":  # its /v1/models lists downloads, not what it serves
        names = models or (server.model,)
        return [Variant(name or server.dialect, replace(server, model=name), "") for name in names]
    cards = await _cards(server)
    wanted = list(models) or list(cards)[:1]
    for name in wanted:
        if name not in cards:
            there = ", ".join(cards) or "none"
            raise Unreachable(f"{server.url} has no model {name!r}; its models are: {there}")
    if not wanted:
        raise Unreachable(f"{server.url} serves no model")
    return [
        Variant(name, replace(server, model=name), str(cards[name].get("encoding") or ""))
        for name in wanted
    ]


async def facts_of(variant: Variant) -> Facts:
    """What a variant's server says about its model. Raises Unreachable."""
    if variant.server.dialect == "transformers":
        return Facts()
    card = (await _cards(variant.server)).get(variant.server.model or "", {})
    return Facts(
        context=_number(card, "max_model_len"),
        trained_context=_number(card, "trained_context"),
        vocab_size=_number(card, "vocab_size"),
        block_size=_number(await _cache_card(variant), "block_size"),
    )


def least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


async def _cards(server: Server) -> dict[str, Mapping[str, Any]]:
    return {card["id"]: card for card in await _data(server, "/v1/models") if "id" in card}


async def _cache_card(variant: Variant) -> Mapping[str, Any]:
    """What `/v1/cache` says about the model; nothing on a server without that route."""
    with suppress(Unreachable):
        for card in await _data(variant.server, "/v1/cache"):
            if card.get("model") == variant.server.model:
                return card
    return {}


async def _data(server: Server, path: str) -> list[Mapping[str, Any]]:
    """The objects of a listing."""
    answer = await get_json(server, path)
    data = answer.get("data") if isinstance(answer, dict) else None
    return [card for card in data or () if isinstance(card, dict)]


def _number(card: Mapping[str, Any], name: str) -> int | None:
    value = card.get(name)
    return value if isinstance(value, int) else None
