"""Finds a checkpoint's tokenizer and builds a Tokenizer from it.

Knows the files of a Hugging Face directory; the formats themselves are read elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from model.tokenizers.base import AddedToken, Tokenizer, TokenizerError
from model.tokenizers.gguf_vocab import tokenizer_from_gguf
from model.tokenizers.hf import HfTokenizer, read_tokenizer_json
from model.tokenizers.spm import SpmModel, SpmTokenizer
from model.tokenizers.tokenizer_config import TokenizerConfig, read_tokenizer_config

__all__ = ["tokenizer_from_directory", "tokenizer_from_gguf"]


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """tokenizer.json if there is one, else tokenizer.model. Raises TokenizerError."""
    config = read_tokenizer_config(path)
    if (path / "tokenizer.json").is_file():
        return _from_json(path / "tokenizer.json", config)
    if (path / "tokenizer.model").is_file():
        return _from_sentencepiece(path / "tokenizer.model", config)
    raise TokenizerError(
        f"{path.name} holds neither tokenizer.json nor tokenizer.model: add the one that the "
        "model was trained with."
    )


def _from_json(path: Path, config: TokenizerConfig) -> HfTokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TokenizerError("tokenizer.json is not UTF-8 text: fetch it again.") from None
    tokenizer = read_tokenizer_json(text)
    bos, eos = _declared(config, tokenizer.token_to_id)
    return HfTokenizer(tokenizer, bos=bos, eos=eos, add_bos=config.add_bos)


def _from_sentencepiece(path: Path, config: TokenizerConfig) -> SpmTokenizer:
    model = SpmModel(path.read_bytes())
    ids = {token.text: token.id for token in config.added}
    bos, eos = _declared(config, lambda text: ids.get(text, model.find(text)))
    ends = {token for token in (bos, *eos) if token is not None}
    added = [replace(token, special=token.special or token.id in ends) for token in config.added]
    listed = {token.id for token in added}
    for token, text in [(bos, config.bos), *((end, config.eos) for end in eos)]:
        if token is not None and text and token not in listed:
            listed.add(token)
            added.append(AddedToken(token, text, special=True))
    # These models were trained with a BOS unless their directory says otherwise.
    add_bos = True if config.add_bos is None else config.add_bos
    return SpmTokenizer(model, bos=bos, eos=eos, add_bos=add_bos, added=added)


def _declared(
    config: TokenizerConfig, find: Callable[[str], int | None]
) -> tuple[int | None, tuple[int, ...]]:
    """Ids of the declared BOS and EOS tokens."""
    bos = find(config.bos) if config.bos else None
    if config.add_bos and bos is None:
        raise TokenizerError(
            f"tokenizer_config.json asks for a BOS token, but {config.bos!r} is not in the "
            "vocabulary: correct bos_token or add_bos_token."
        )
    eos = find(config.eos) if config.eos else None
    if config.eos and eos is None:
        raise TokenizerError(
            f"tokenizer_config.json names the EOS token {config.eos!r}, which is not in the "
            "vocabulary: correct eos_token."
        )
    return bos, () if eos is None else (eos,)
