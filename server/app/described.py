"""What /openapi.json and /docs say of the routes, made of what answers them.

Bodies are described by the models that validate them (server/openai/schemas.py) and by the tables
of what else is accepted (server/openai/body.py), errors by their tree (server/errors.py). Nothing
is made before somebody asks.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ropewalk.server.app.openai import SCHEMAS
from ropewalk.server.errors import error_codes
from ropewalk.server.http.middleware import ANSWERED, OPEN_PATHS
from ropewalk.server.long_work import json_bytes
from ropewalk.server.openai import kept_bodies, positions_body
from ropewalk.server.openai.body import HARMLESS, UNSUPPORTED
from ropewalk.server.openai.schemas import BODIES
from ropewalk.server.translators.messages_body import CountBody, MessagesBody
from ropewalk.server.translators.responses_body import ResponsesBody

_NULL = {"type": "null"}
# Statuses of the errors that a request can meet anywhere, with a body, and on its way to an answer.
_ANYWHERE = (400, 404, 408, 421, 431, 500, 503)
_WITH_BODY = (413, 415)
_OF_ENGINE = (429, 504)
_SHARED = (  # by few at a time
    *("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    *("/v1/cache/stream", "/v1/positions/audit", "/v1/positions/explain"),
)
_OF_KEPT = (403, 409)  # of what keeps sequences or continues them
_KEPT, _KEEPING = "/v1/cache/sequences", ("/v1/completions", "/v1/chat/completions")
_TEXT = {"type": "string"}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{border-top:1px solid #ccc;padding:.2rem .6rem
.2rem 0;text-align:left;vertical-align:top}}code{{font-size:.9em}}summary{{cursor:pointer}}
</style><h1>{title}</h1><p>{about} The same as data: <a href="openapi.json">openapi.json</a>.</p>
{routes}</html>"""


def description(app: FastAPI, names: Sequence[str], *, with_key: bool) -> tuple[bytes, str]:
    """What describes the application: OpenAPI's JSON, and the same as a page.

    names: all that models are served under. with_key: whether requests need one.
    """
    about = describe(app, names, with_key=with_key)
    return json_bytes(about), "".join(_page(about))


def describe(app: FastAPI, names: Sequence[str], *, with_key: bool) -> dict[str, Any]:
    """The application in OpenAPI 3.1."""
    bodies: list[type[BaseModel]] = [*BODIES, *kept_bodies.BODIES, *positions_body.BODIES]
    bodies += [ResponsesBody, MessagesBody, CountBody]
    about = get_openapi(
        title=app.title,
        version=app.version,
        description="Serves language models with any positional encoding from a paged KV cache.",
        routes=app.routes,
    )
    _, defined = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=f"{SCHEMAS}{{model}}"
    )
    schemas: dict[str, Any] = {name: _nullable(each) for name, each in defined["$defs"].items()}
    for body in bodies:
        schemas[body.__name__]["additionalProperties"] = _NULL
        fields = schemas[body.__name__]["properties"]
        known = {"model": {"enum": [*names, None]}} if "model" in body.model_fields else {}
        fields |= {**known, **_also_accepted(body)}
    codes = error_codes()
    schemas["Error"] = _error(sorted({code for each in codes.values() for code in each}))
    schemas["MessagesError"] = _MESSAGES_ERROR
    about["components"] = {"schemas": schemas}
    if with_key:
        about["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in about["paths"].items():
        for method, operation in operations.items():
            needs_key = with_key and path not in OPEN_PATHS
            if needs_key:
                operation["security"] = [{"key": []}]
            statuses = [*_ANYWHERE, *(_WITH_BODY if method == "post" else ())]
            kept = path.startswith(_KEPT)
            statuses += [*(_OF_ENGINE if kept or path in ANSWERED else ())]
            statuses += [429] if path in _SHARED else []
            statuses += [*(_OF_KEPT if kept or path in _KEEPING else ())]
            statuses += [401] if needs_key else []
            operation["responses"] = {"200": operation["responses"]["200"]} | {
                str(status): _refused(codes[status], path) for status in sorted(statuses)
            }
    return about


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """`null` means "not given" wherever a field may be left out."""
    needed = schema.get("required", ())
    fields = {
        name: each if name in needed else _or_null(each)
        for name, each in schema.get("properties", {}).items()
    }
    return {**schema, "properties": fields}


def _or_null(field: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: field[name] for name in ("title", "description", "default") if name in field}
    kind = {name: each for name, each in field.items() if name not in kept}
    forms = kind["anyOf"] if kind.keys() == {"anyOf"} else [kind]
    return kept | {"anyOf": forms if _NULL in forms else [*forms, _NULL]}


def _also_accepted(body: type[BaseModel]) -> dict[str, Any]:
    """Fields that change nothing, and unsupported ones with the values that change nothing."""
    own = body.model_fields
    found: dict[str, Any] = {
        name: _or_null({**kind.json_schema(), "description": "Without effect."})
        for name, (kind, _) in HARMLESS.items()
        if name not in own
    }
    for name, neutral in UNSUPPORTED.items():
        if name not in own:
            found[name] = {"enum": [*neutral, None], "description": "Not supported otherwise."}
    if "n" in own:
        found["best_of"] = {"type": ["integer", "null"], "description": "Equal to n, if given."}
    return found


def _error(codes: list[str]) -> dict[str, Any]:
    texts = {name: {"type": ["string", "null"]} for name in ("type", "param")}
    inside = {"message": {"type": "string"}, **texts, "code": {"enum": codes}}
    whole = {"type": "object", "required": [*inside], "properties": inside}
    return {"type": "object", "required": ["error"], "properties": {"error": whole}}


def _refused(codes: list[str], path: str) -> dict[str, Any]:
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": f"{SCHEMAS}{name}"}}}
    return {"description": ", ".join(codes), "content": content}


# --------------------------------------------------------------------------------------- the page


def _page(about: Mapping[str, Any]) -> Iterator[str]:
    routes = "".join(
        _route(method, path, operation, about["components"]["schemas"])
        for path, operations in about["paths"].items()
        for method, operation in operations.items()
    )
    title = f"{about['info']['title']} {about['info']['version']}"
    yield _PAGE.format(
        title=escape(title), about=escape(about["info"]["description"]), routes=routes
    )


def _route(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    parts = [f"<h2>{method.upper()} <code>{escape(path)}</code></h2>"]
    parts += [f"<p>{escape(operation.get('description', ''))}</p>"]
    for parameter in operation.get("parameters", ()):
        needed = {"required": [parameter["name"]] if parameter["required"] else []}
        fields = {parameter["name"]: parameter["schema"]}
        parts.append(_table(f"in the {parameter['in']}", {**needed, "properties": fields}, schemas))
    if "requestBody" in operation:
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        parts.append(_table("body", schemas[name.removeprefix(SCHEMAS)], schemas))
    errors = "".join(
        f"<tr><td>{status}<td>{escape(each['description'])}"
        for status, each in operation["responses"].items()
    )
    parts.append(f"<details><summary>Answers</summary><table>{errors}</table></details>")
    return "".join(parts)


def _table(title: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in needed else ''}"
        f"<td>{escape(_kind(field, schemas))}"
        f"<td>{'' if field.get('default') is None else escape(repr(field['default']))}"
        f"<td>{escape(field.get('description', ''))}"
        for name, field in schema["properties"].items()
    )
    return f"<table><tr><th>{title}<th>form<th>default<th>{rows}</table>"


def _kind(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A field's form in a few words."""
    for key in ("anyOf", "oneOf"):
        if key in field:
            forms = [_kind(each, schemas) for each in field[key] if each != _NULL]
            return " or ".join(dict.fromkeys(forms))
    if "$ref" in field:
        name: str = field["$ref"].removeprefix(SCHEMAS)
        inside = ", ".join(schemas[name].get("properties", ()))
        return f"{name} {{{inside}}}"
    if "enum" in field or "const" in field:
        values = field.get("enum", [field.get("const")])
        return " or ".join(repr(each) for each in values if each is not None) or "null"
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}), schemas)}{_range(field)}"
    kind = field.get("type", "any")
    return f"{kind if isinstance(kind, str) else kind[0]}{_range(field)}"


_BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "exclusiveMaximum": "below {}",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
    "maxLength": "at most {} characters",
    "pattern": "matching {}",
}


def _range(field: Mapping[str, Any]) -> str:
    said = [form.format(field[name]) for name, form in _BOUNDS.items() if name in field]
    return f", {', '.join(said)}" if said else ""
