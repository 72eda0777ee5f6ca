"""Writes decoders of other model families, with random weights, for peers and Ropewalk to load.

The cost of a token does not depend on the values of weights. Run with a Python that has torch and
transformers: `python -m ropewalk.load_tests.peers.drawn_hf --help`. The benchmark itself never
imports this.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HEAD_DIM, CONTEXT = 64, 2048

# Family → its configuration's fields for given numbers of heads and layers. `n_ctx` and
# `seq_length` are for converters that still read them, though transformers no longer writes them.
FAMILIES = {
    "gpt2": lambda heads, layers: {
        "n_embd": HEAD_DIM * heads,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": CONTEXT,
        "n_ctx": CONTEXT,
    },
    "bloom": lambda heads, layers: {
        "hidden_size": HEAD_DIM * heads,
        "n_head": heads,
        "n_layer": layers,
        "seq_length": CONTEXT,
    },
    "gpt_neox": lambda heads, layers: {
        "hidden_size": HEAD_DIM * heads,
        "intermediate_size": 4 * HEAD_DIM * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": CONTEXT,
    },
}


def write(family: str, tokenizer: Path, target: Path, heads: int, layers: int) -> int:
    """Write `target` (bf16 safetensors, config, tokenizer); returns its number of parameters."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(words),
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        tie_word_embeddings=True,
        **FAMILIES[family](heads, layers),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    words.save_pretrained(target)
    return sum(weights.numel() for weights in model.parameters())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ropewalk.load_tests.peers.drawn_hf", description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("tokenizer", type=Path, help="folder of a model whose tokenizer is copied")
    parser.add_argument("target", type=Path, help="folder for `bf16/`")
    sizes = (("heads", 12, f"attention heads of {HEAD_DIM}"), ("layers", 12, "decoder layers"))
    for name, default, meaning in sizes:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} ({default})"
        )
    args = parser.parse_args(argv)
    model = args.target / "bf16"
    count = write(args.family, args.tokenizer, model, args.heads, args.layers)
    print(f"{model}: {count / 1e6:.0f} M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
