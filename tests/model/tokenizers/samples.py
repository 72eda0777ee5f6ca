"""Sentences, small models trained on them, and other raw material of the tokenizer tests."""

import io

import sentencepiece
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from ropewalk.model.tokenizers.base import BYTE_OF
from ropewalk.model.tokenizers.hf import HfTokenizer

SENTENCES = [
    "The rope runs over the walk and back again, strand by strand.",
    "Positions are numbers: 1, 2, 3 and then 1024 or 8192.",
    "naïve café, Ångström, e\u0301 with a combining accent",
    "日本語のテキストと漢字、한국어 문장도 있다",
    "emoji 😀 👩\u200d👩\u200d👧 🇩🇪 and text after them",
    "def encode(text):\n    return [ord(c) for c in text]\n",
    "tabs\tand   runs of    spaces",
] * 8

TRICKY = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "  a  b  ",
    "Hello, world!",
    "\n\n\t x\r\n",
    "naïve e\u0301 \u0301 x",
    "日本語 と 한국어",
    "👩\u200d👩\u200d👧🇩🇪\ufe0f",
    "\x00\x01\x7f\x80\u2028",
    "a\u00a0b\u3000c\u200b",
    "ﬁ ½ Ⅷ ①",
    "\ufffd\ufffe\U0010ffff",
    "literal ▁ mark and <0x41> byte",
    "def f(x):\n\treturn x  # 1,234.5\n",
    "I'm you'll THEY'RE don't",
    "שלום عربى ไทย",
]

texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ab ▁\n<0x41>é😀日", max_size=40),
    st.lists(st.sampled_from(SENTENCES + TRICKY), max_size=3).map("".join),
)

LLAMA_LIKE = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}

SPM_KINDS = {
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "character_coverage": 0.98},
    "bpe": {"model_type": "bpe"},
    "llama": LLAMA_LIKE,
    "no-prefix": {**LLAMA_LIKE, "add_dummy_prefix": False},
    "symbols": {
        **LLAMA_LIKE,
        "user_defined_symbols": ["<sep>", "▁▁▁"],
        "control_symbols": ["<mask>"],
    },
    "suffix": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
}


def train_spm(kind):
    """The bytes of a small SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=420,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **SPM_KINDS[kind],
    )
    return model.getvalue()


MARKERS = ["<|im_start|>", "<|im_end|>"]


def byte_level(*, rstrip: bool = False, normalizer=None) -> HfTokenizer:
    """A token per byte, and two markers."""
    made = tokenizers.Tokenizer(models.BPE({letter: id for id, letter in enumerate(BYTE_OF)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(
        [tokenizers.AddedToken(marker, rstrip=rstrip, normalized=False) for marker in MARKERS]
    )
    return HfTokenizer(made)


class BytesTokenizer:
    """Token i has the i-th byte string; the first token of a text drops one leading space."""

    bos = None
    eos = frozenset()

    def __init__(self, pieces):
        self.pieces = pieces
        self.vocab_size = len(pieces)

    def encode(self, text, *, bos):
        raise NotImplementedError

    def token_bytes(self, token, *, first):
        piece = self.pieces[token]
        return piece[1:] if first and piece.startswith(b" ") else piece
