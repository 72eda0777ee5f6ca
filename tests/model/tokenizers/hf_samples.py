"""Small tokenizer.json tokenizers: byte-level, Llama's and Metaspace."""

import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.model.tokenizers.samples import SENTENCES, train_spm


def byte_level():
    """Byte-level BPE with special tokens, an added ordinary token and a BOS in its template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("  <｜wide｜>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def llama():
    """Llama's SentencePiece model as a tokenizer.json."""
    model = sentencepiece.SentencePieceProcessor(model_proto=train_spm("llama"))
    pieces = [model.id_to_piece(token) for token in range(model.get_piece_size())]
    ids = {piece: token for token, piece in enumerate(pieces)}
    pairs = [
        (-model.get_score(token), left, right)
        for piece, token in ids.items()
        for left, right in ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if left in ids and right in ids and not model.is_byte(token) and not model.is_control(token)
    ]
    merges = [(left, right) for _, left, right in sorted(pairs)]
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=pieces[0])
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def metaspace(scheme="always"):
    """A unigram model whose decoder is Metaspace alone."""
    model = sentencepiece.SentencePieceProcessor(model_proto=train_spm("unigram"))
    pieces = [
        (model.id_to_piece(token), model.get_score(token))
        for token in range(model.get_piece_size())
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


HF_KINDS = {
    "byte-level": byte_level,
    "llama": llama,
    "metaspace": metaspace,
    "metaspace-never": lambda: metaspace("never"),
}
