"""Which body fields of other servers and newer clients are accepted, and which are refused.

Ropewalk never ignores a field that would change the answer. A field it knows and does not
support is accepted with its neutral value and refused otherwise; a field it does not know is
refused by name. `null` always means "not given". README.md points users here.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ropewalk.server.errors import InvalidField, UnknownField, UnsupportedField, quoted


def _one_of(*values: object) -> Callable[[Any], bool]:
    def neutral(value: Any) -> bool:
        return any(type(value) is type(known) and value == known for known in values)

    return neutral


def _number(neutral: float) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return type(value) in (int, float) and value == neutral

    return check


def _empty(value: Any) -> bool:
    return isinstance(value, str | list | dict) and len(value) == 0


def _never(value: Any) -> bool:
    return False


# Known but not supported: the predicate accepts values that change nothing.
UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "allowed_token_ids": _never,
    "audio": _never,
    "bad_words": _empty,
    "chat_template": _never,
    "continue_final_message": _one_of(False),
    "documents": _empty,
    "early_stopping": _one_of(False),
    "ebnf": _never,
    "function_call": _one_of("none", "auto"),
    "functions": _empty,
    "grammar": _never,
    "guided_choice": _never,
    "guided_decoding_backend": _never,
    "guided_grammar": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_whitespace_pattern": _never,
    "json_schema": _never,
    "kv_transfer_params": _never,
    "length_penalty": _number(1.0),
    "logits_processors": _empty,
    "lora": _never,
    "lora_path": _never,
    "lora_request": _never,
    "modalities": _one_of(["text"]),
    "prediction": _never,
    "prompt_embeds": _never,
    "prompt_logprobs": _never,
    "regex": _never,
    "response_format": _one_of({"type": "text"}),
    "skip_special_tokens": _one_of(True),
    "structured_outputs": _never,
    "suffix": _empty,
    "tool_choice": _one_of("none", "auto"),
    "tools": _empty,
    "truncate_prompt_tokens": _never,
    "use_beam_search": _one_of(False),
    "web_search_options": _never,
}


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


# Accepted and without effect on the answer; only their form is checked. Variables of a chat
# template are here for where there is none: ChatBody has them as fields of its own.
HARMLESS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "chat_template_kwargs": (_object, "a JSON object"),
    "enable_thinking": (_flag, "true or false"),
    "include_reasoning": (_flag, "true or false"),
    "metadata": (_texts, "a JSON object of strings"),
    "parallel_tool_calls": (_flag, "true or false"),
    "prompt_cache_key": (_text, "a string"),
    "reasoning_effort": (_text, "a string"),
    "request_id": (_text, "a string"),
    "safety_identifier": (_text, "a string"),
    "service_tier": (_text, "a string"),
    "spaces_between_special_tokens": (_flag, "true or false"),
    "store": (_flag, "true or false"),
    "user": (_text, "a string"),
    "verbosity": (_text, "a string"),
}


def supported_fields(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of `body` named in `known`, without nulls.

    Raises UnknownField, UnsupportedField or InvalidField for the first other field that is
    not known, not neutral or not well-formed.
    """
    kept = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name in UNSUPPORTED:
            if value is not None and not UNSUPPORTED[name](value):
                raise UnsupportedField(
                    f"{name} is not supported with the value given; leave it out", name
                )
        elif name in HARMLESS:
            well_formed, form = HARMLESS[name]
            if value is not None and not well_formed(value):
                raise InvalidField(f"{name} should be {form}", name)
        elif name == "best_of":
            _check_best_of(value, body.get("n"))
        else:
            raise UnknownField(
                f"{quoted(name)} is not a parameter of this endpoint; leave it out",
                quoted(name)[1:-1],
            )
    return kept


def _check_best_of(best_of: Any, n: Any) -> None:
    n = 1 if n is None else n
    if best_of is not None and not (type(best_of) in (int, float) and best_of == n):
        raise UnsupportedField(
            "best_of is not supported with a value other than n; leave it out", "best_of"
        )
