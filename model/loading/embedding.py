"""How a checkpoint wants its embeddings computed: sentence-transformers' files, or GGUF metadata.

The files are read as data. What they ask for and is not computed here refuses embeddings alone:
the model still answers.
"""

from collections.abc import Mapping
from pathlib import Path

from ropewalk.model.config import USUAL, Embedding, Pooling
from ropewalk.model.weights.base import (
    MAX_CONFIG,
    CheckpointError,
    parse_json,
    read_all,
    read_json,
    shown,
)

MODULES = "modules.json"
_KNOWN = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "mean_tokens": Pooling.MEAN}
_IN_GGUF = {1: Pooling.MEAN, 3: Pooling.LAST}  # llama.cpp's numbers; 0: nothing is said


def embedding_from_directory(folder: Path) -> Embedding:
    """From modules.json and what it names. Raises CheckpointError for files that are broken."""
    path = folder / MODULES
    if not path.is_file():
        return USUAL
    kinds = _modules(path)
    others = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if others:
        return Embedding(why_not=f"ends with a layer {shown(min(others))}, which is not computed")
    normalize = "Normalize" in kinds
    if "Pooling" not in kinds:
        return Embedding(normalize=normalize)
    pooling = _pooling(folder / kinds["Pooling"] / "config.json")
    if isinstance(pooling, Pooling):
        return Embedding(pooling, normalize)
    return Embedding(why_not=pooling)


def embedding_from_gguf(metadata: Mapping[str, object]) -> Embedding:
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if kind == 0:
        return USUAL
    if kind in (1, 3):
        return Embedding(_IN_GGUF[kind])
    return Embedding(why_not="pools in a way (pooling_type) that is not computed")


def _modules(path: Path) -> dict[str, str]:
    """Kind of each module → its folder."""
    data = read_all(path, MAX_CONFIG)
    modules = parse_json(b'{"modules":' + data + b"}", str(path))["modules"]
    found = {}
    for module in modules if isinstance(modules, list) else [None]:
        module = module if isinstance(module, dict) else {}
        kind, where = module.get("type"), module.get("path")
        if not isinstance(kind, str) or not isinstance(where, str) or Path(where).name != where:
            raise CheckpointError(
                f"{path} should list modules, each with a type and the folder that it lies in; "
                "save the model again with sentence-transformers."
            )
        found[kind.rsplit(".", 1)[-1]] = where
    return found


def _pooling(path: Path) -> Pooling | str:
    """The one that is declared, or why it is not computed. Newer files name it, older ones have a
    flag for each."""
    config = read_json(path, MAX_CONFIG)
    flags = (name.removeprefix("pooling_mode_") for name, on in config.items() if on is True)
    chosen = {name for name in flags if name != "include_prompt"}
    if (named := config.get("pooling_mode")) is not None:
        chosen = set(map(str, named)) if isinstance(named, list) else {str(named)}
    if len(chosen) == 1 and (name := chosen.pop()) in _KNOWN:
        return _KNOWN[name]
    return f"pools by {shown(' and '.join(sorted(chosen)) or 'nothing')}, which is not computed"
