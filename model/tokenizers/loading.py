"""Finds a checkpoint's tokenizer and builds a Tokenizer from it.

Knows the files of a Hugging Face directory; the formats themselves are read elsewhere, each by a
library that is imported only for it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ropewalk.model.tokenizers.base import AddedToken, Tokenizer, TokenizerError
from ropewalk.model.tokenizers.tokenizer_config import TokenizerConfig, read_tokenizer_config


def vocabulary_file(folder: Path, *, shared: bool = False) -> Path | None:
    """tokenizer.json if there is one, else tokenizer.model.

    shared: else the tokenizer.model of the folder above, which several models may share.
    """
    above = [folder.resolve().parent / "tokenizer.model"] if shared else []
    found = (folder / "tokenizer.json", folder / "tokenizer.model", *above)
    return next((path for path in found if path.is_file()), None)


def tokenizer_from_directory(path: Path, *, shared: bool = False) -> Tokenizer:
    """From the vocabulary file and what lies beside it. Raises TokenizerError."""
    config = read_tokenizer_config(path)
    vocabulary = vocabulary_file(path, shared=shared)
    if vocabulary is None:
        above = ", and the folder above holds no tokenizer.model" if shared else ""
        raise TokenizerError(
            f"{path.name} holds neither tokenizer.json nor tokenizer.model{above}: add the one "
            "that the model was trained with, or write it from other files with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    read = _from_json if vocabulary.suffix == ".json" else _from_sentencepiece
    return read(vocabulary, config)


def _from_json(path: Path, config: TokenizerConfig) -> Tokenizer:
    from ropewalk.model.tokenizers.hf import HfTokenizer, add_tokens, read_tokenizer_json

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TokenizerError("tokenizer.json is not UTF-8 text: fetch it again.") from None
    tokenizer = read_tokenizer_json(text)
    # Only added_tokens_decoder says more about a token than tokenizer.json does.
    listed = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added = [t for t in config.all_added if t in config.added or t.text not in listed]

    def find_unlisted(text: str) -> int | None:
        return None if text in listed else tokenizer.token_to_id(text)

    add_tokens(tokenizer, _with_special(added, config, find_unlisted))
    bos, eos = _declared(config, tokenizer.token_to_id)
    ends = eos if config.add_eos else ()
    return HfTokenizer(tokenizer, bos=bos, eos=eos, add_bos=config.add_bos, ends=ends)


def _from_sentencepiece(path: Path, config: TokenizerConfig) -> Tokenizer:
    from ropewalk.model.tokenizers.spm import SpmTokenizer, read_model

    model = read_model(path.read_bytes())
    ids = {token.text: token.id for token in config.all_added}

    def find(text: str) -> int | None:
        return ids.get(text, model.find(text))

    bos, eos = _declared(config, find)
    # These models were trained with a BOS unless their directory says otherwise.
    add_bos = True if config.add_bos is None else config.add_bos
    return SpmTokenizer(
        model,
        bos=bos,
        eos=eos,
        add_bos=add_bos,
        ends=eos if config.add_eos else (),
        added=_with_special(config.all_added, config, find),
        prefix_each_part=_prefixes_each_part(config),
    )


def _prefixes_each_part(config: TokenizerConfig) -> bool:
    """As transformers 5 does: T5's class always, others only where `legacy` is true.

    A model alone, with nothing declared about it, is used as the sentencepiece library does.
    """
    if config.tokenizer_class == "T5Tokenizer":
        return True
    if config.legacy is not None:
        return config.legacy
    declared = config.tokenizer_class, config.special_tokens, config.older, config.added
    return not any(declared)


def _with_special(
    added: Iterable[AddedToken], config: TokenizerConfig, find: Callable[[str], int | None]
) -> list[AddedToken]:
    """The added tokens and the declared special ones, which are found in texts too."""
    named, listed = config.named(), config.listed()

    def is_special(token: AddedToken) -> bool:
        # added_tokens_decoder says of each token whether it is; being listed does not change that.
        by_list = token.text in listed and token not in config.added
        return token.special or token.text in named or by_list

    tokens = {token.text: replace(token, special=is_special(token)) for token in added}
    for text in sorted((named | listed) - tokens.keys()):
        if text and (token := find(text)) is not None:
            tokens[text] = AddedToken(token, text, special=True, **config.found_as.get(text, {}))
    return list(tokens.values())


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
