"""The model card: data, recipe, figures and findings, all generated, none written by hand.

What was not measured is reported as such.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ropewalk.model.family.evaluation.curves import HELD_UP, STEPS
from ropewalk.model.family.evaluation.losses import difference
from ropewalk.model.family.evaluation.report import tables
from ropewalk.model.family.evaluation.report.findings import HOLDS, about_length, differing, shipped
from ropewalk.model.family.evaluation.report.pictures import pictures
from ropewalk.model.family.evaluation.report.words import MISSING, interval, share, signed, table
from ropewalk.model.family.evaluation.results import Evaluation, Measured
from ropewalk.model.family.evaluation.samples import TEMPERATURE
from ropewalk.model.family.texts.recall import WORDS
from ropewalk.model.family.training.pack import COST_WINDOWS
from ropewalk.model.family.training.recipe import Recipe
from ropewalk.model.formatting import listed
from ropewalk.report.svg import svg

CARD = "MODEL_CARD.md"
GOOD = 3.6  # nats per token of held-out text
PLOT_NAMES = "evaluation-{}.svg"

OWN = """\
Write a class like those in model/encodings, then train it as the others were and evaluate it with
them; the report covers every folder among the trained models:

    PYTHONPATH=. ropewalk family train --encoding package.module:Class
    PYTHONPATH=. ropewalk family evaluate --trust-encoding package.module:Class
    ropewalk family report"""


def write(evaluation: Evaluation, data: str | None, notes: str | None, folder: Path) -> list[Path]:
    """The card and its pictures. data: the data card. notes: people's additions to the findings."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in pictures(evaluation.members):
        path = folder / PLOT_NAMES.format(picture.key)
        path.write_text(svg(picture, picture.key) + "\n", encoding="utf-8")
        written.append(path)
    card = folder / CARD
    card.write_text(text(evaluation, data, notes), encoding="utf-8")
    return [card, *written]


def text(evaluation: Evaluation, data: str | None, notes: str | None = None) -> str:
    members = evaluation.members
    drawn = {picture.key: picture.title for picture in pictures(members)}
    images = {key: f"![{title}]({PLOT_NAMES.format(key)})" for key, title in drawn.items()}
    sections = {
        "Models": _models(members),
        "Texts": data or MISSING,
        "Training": _training(members, images.get("training", "")),
        "Loss by position": _losses(members, images.get("loss", "")),
        "Recall": _recall(evaluation, images.get("recall", "")),
        "Cache operations": _operations(members, images.get("operations", "")),
        "Through the server": _served(members),
        "Packed weights": _packed(members),
        "How they write": _samples(members),
        "Limits": _limits(members),
        "An encoding of your own": OWN,
    }
    if notes:
        sections["Notes"] = notes
    body = "\n\n".join(f"## {title}\n\n{content.strip()}" for title, content in sections.items())
    return f"# The Ropewalk family\n\n{_opening(members)}\n\n{body}\n"


def _opening(members: Sequence[Measured]) -> str:
    labels = [one.label for one in shipped(members)]
    return (
        "Small decoders that differ in their positional encoding alone: "
        f"{listed(labels)}. They have the same shape and initial weights, and were trained on the "
        "same texts in the same order. They are for comparing encodings and trying a server, not "
        "for their answers.\n\n"
        "Written by `ropewalk family report` from the figures of `ropewalk family evaluate`; "
        "intervals are 95 %, over documents unless stated otherwise."
    )


def _models(members: Sequence[Measured]) -> str:
    rows = []
    for one in shipped(members):
        shape = one.config
        options = shape["encoding"]["options"]
        rows.append(
            [
                one.name,
                one.encoding,
                ", ".join(f"{name} {value}" for name, value in options.items()),
                f"{one.parameters:,}",
                f"{shape['num_layers']} × {shape['hidden_size']}",
                f"{shape['num_heads']}",
                f"{shape['trained_context']:,}",
                f"`{one.digest[:12]}`",
            ]
        )
    what = ["model", "encoding", "options", "parameters"]
    heads = [*what, "layers × width", "heads", "trained context", "digest"]
    return f"{table(heads, rows)}\n\n{_held_out(members)}"


def _held_out(members: Sequence[Measured]) -> str:
    known = [(one, one.held_out) for one in shipped(members) if one.held_out is not None]
    if not known:
        return f"Held-out loss: {MISSING}."
    first, base = known[0]
    rows = []
    for one, own in known:
        change = difference(own, base) if one is not first else None
        rows.append(
            [
                one.label,
                share(own.loss),
                f"{signed(change.value)} ({interval(change)})" if change else "",
                tables.seeds(one, members),
            ]
        )
    heads = ["encoding", "held-out loss", f"more than {first.label}", "other seeds"]
    total, effective = sum(base.windows), sum(base.windows) ** 2 / sum(n * n for n in base.windows)
    return (
        "Held-out loss is in nats per token at the later half of trained positions, on "
        f"{total} windows of that length in {len(base.documents)} documents; differences between "
        f"models are paired by document. One document has {max(base.windows)} of the windows, so "
        f"they count as much as {effective:.1f} documents of one size would, and the intervals, "
        "meant as 95 %, are too narrow where that is few: for 7.2, simulated ones held the true "
        f"mean in nine of ten cases.\n\n{table(heads, rows)}"
    )


def _training(members: Sequence[Measured], image: str) -> str:
    values = asdict(Recipe(tokens=0))
    fixed = {
        name: value for name, value in values.items() if name not in ("tokens", "seed", "growing")
    }
    recipe = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in fixed.items())
    seeds = sorted({one.seed for one in members if one.seed is not None})
    trained = "one seed each"
    if seeds:
        trained = f"the served models and, of each, seed {listed([str(seed) for seed in seeds])}"
    return (
        "Muon on the matrices inside the layers, AdamW on the rest "
        "(model/family/training/recipe.py): "
        f"{recipe}. At first texts are read in eighths of a window, then in quarters and halves "
        "(`--growing` says how many); each such piece begins with `<s>`. Trainings: "
        f"{trained}; shorter ones are dotted.\n\n"
        f"{image}\n\n{tables.training(members)}\n\n"
        f"Each point is a mean of {STEPS} steps. Seconds are those of one machine, and compare "
        "implementations of the encodings in training, not the encodings. A "
        f"step that took more than {HELD_UP:g} times the median, for example because the training "
        "was paused, counts as the median."
    )


def _losses(members: Sequence[Measured], image: str) -> str:
    findings = "\n".join(f"- {about_length(one)}" for one in shipped(members))
    differ = differing(members)
    summary = (
        f"Differ from what was published: {listed(differ)}; the notes give reasons where known."
        if differ
        else ""
    )
    windows = next((one.losses for one in members if one.losses is not None), None)
    texts = (
        f"{windows.windows} texts out of {len(windows.documents)} held-out documents"
        if windows is not None
        else MISSING
    )
    return (
        f"Loss in nats of the token after each position, on {texts}; the same tokens for every "
        "model. Positions within and past the trained length are never averaged together. *Cost of "
        "distance*: how much higher the loss is than that of the same tokens when the model reads "
        "only `<s>` and the nearest tokens, at trained positions; 0 means that the length does no "
        "harm, a negative value that it helps. A model *holds* if its cost is at most "
        f"{HOLDS} nats at every length.\n\n"
        f"{image}\n\nWithin the trained length:\n\n{tables.losses(members)}\n\n"
        f"Past it:\n\n{tables.beyond(members)}\n\n{findings}\n\n{summary}"
    ).strip()


def _recall(evaluation: Evaluation, image: str) -> str:
    members = evaluation.members
    trained = listed(sorted({f"{one.config['trained_context']:,}" for one in members}))
    return (
        "Made-up texts at the end of held-out prose (model/family/texts/recall.py). *Pairs* asks "
        "where "
        f"somebody keeps something; *copy* asks for {WORDS} words again, all of them right. "
        "Distance is counted from the statement to the question. Figures are shares of right "
        f"answers by greedy decoding, with Wilson intervals; {evaluation.sizes.trials} texts per "
        "cell. Text and answer end at the given length; models were trained at "
        f"{trained}.\n\n{image}\n\n"
        f"Pairs:\n\n{tables.recalls(members, 'pairs')}\n\n"
        f"Copy:\n\n{tables.recalls(members, 'copy')}"
    )


def _operations(members: Sequence[Measured], image: str) -> str:
    return (
        "Next-token distributions for the 16 tokens after an operation, compared with those after "
        "computing the same remaining tokens again. *Shift* drops the older half of a full context "
        "and renumbers the rest; *slide* drops its oldest block repeatedly; *move* reuses a "
        "quarter of a context after another text. The first block stays. Differences come from "
        "deeper layers, whose entries still depend on the dropped tokens; where positions are part "
        "of every stored entry, the operation is refused. Keys are in float32; `ropewalk serve` "
        "refuses to slide where keys would be rewritten each time.\n\n"
        f"{image}\n\n{tables.operations(members)}"
    )


def _served(members: Sequence[Measured]) -> str:
    return (
        "The loss of the same texts as returned by `POST /v1/completions` with `echo` and "
        "`logprobs`, compared with the one computed offline in float32.\n\n"
        + tables.served(members)
    )


def _packed(members: Sequence[Measured]) -> str:
    rows = [
        [
            one.label,
            f"{one.packed.size / 2**20:.1f}",
            f"{one.packed.trained:.4f}",
            f"{one.packed.packed:.4f}",
            signed(one.packed.packed - one.packed.trained, 4),
        ]
        for one in shipped(members)
        if one.packed is not None
    ]
    heads = ["encoding", "MiB", "loss as trained", "loss packed", "cost"]
    return (
        "Matrices are shipped as 8-bit rows with one scale each. Losses are in nats per token at "
        f"the later half of trained positions, on {COST_WINDOWS} held-out windows. All other "
        "figures are of the weights whose digest is given under Models.\n\n"
        f"{table(heads, rows) if rows else MISSING}"
    )


def _samples(members: Sequence[Measured]) -> str:
    known = [one for one in shipped(members) if one.samples]
    written = "\n".join(
        f"- {one.label}: *{each.prompt}*{each.answer}".replace("\n", " ")
        for one in known
        for each in one.samples or ()
    )
    return f"Sampled at temperature {TEMPERATURE}, not selected.\n\n{written or MISSING}"


def _limits(members: Sequence[Measured]) -> str:
    above = [
        one.label
        for one in shipped(members)
        if one.held_out is not None and one.held_out.loss.value > GOOD
    ]
    said = [
        "English of the 17th to 20th century and political speeches: the models repeat the "
        "views and prejudices of their texts.",
        "A few million parameters: sentences are seldom true, and not always grammatical.",
        "Findings hold at this size and length. Larger models, longer training or other texts may "
        "rank encodings differently.",
        "Intervals are over texts only. Trainings also differ by seed: see the column of other "
        "seeds.",
    ]
    if above:
        said.append(f"Held-out loss above {GOOD} nats: {listed(above)}.")
    return "\n".join(f"- {one}" for one in said)
