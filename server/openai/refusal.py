"""Turns pydantic's refusal of a body into one sentence about one field, without its value."""

import re

from pydantic_core import ErrorDetails

from ropewalk.server.errors import InvalidField, MissingField, UnknownField, UnsupportedField


def refusal(details: ErrorDetails) -> InvalidField:
    path = _path(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return MissingField(f"{path} is missing; it is required", path)
    if kind == "extra_forbidden":
        return UnknownField(f"{path} is not a known parameter; leave it out", path)
    if kind.startswith("union_tag"):
        form = (
            "text or a list of text parts"
            if path.endswith("content")
            else "a text, a list of texts, a list of token ids or a list of such lists"
        )
        return InvalidField(f"{path} should be {form}", path)
    if path == "stream_options.include_obfuscation":
        return UnsupportedField(f"{path} is not supported; leave it out or send false", path)
    message = details["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = re.sub(r"valid dictionary or instance of \w+", "JSON object", message)
    for start in ("Input ", "String ", "List ", "Dictionary "):
        message = message.removeprefix(start)
    return InvalidField(f"{path} {message}", path)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "parts", 1, "text") as messages[0].content[1].text"""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif step == "[key]" or (index and location[index - 1] in ("prompt", "content")):
            continue  # the tag of the union, not something the client wrote
        else:
            safe = step if re.fullmatch(r"[A-Za-z0-9_]{1,64}", step) else "?"
            path += f".{safe}" if path else safe
    return path
