"""Turns a GGUF checkpoint into a bfloat16 Hugging Face directory, so that peers serve our weights.

Run with a Python that has torch, transformers and gguf:
`python -m ropewalk.load_tests.peers.export_hf --help`. The benchmark itself never imports this.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def export(gguf: Path, target: Path) -> None:
    """Write `target` (bf16 safetensors, tokenizer, config) from one GGUF file."""
    source = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # A fresh model, because one loaded from GGUF counts as quantised and refuses to be saved.
    config = source.config
    # Traces of the GGUF file in the config, which other servers may refuse.
    for trace in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, trace):
            delattr(config, trace)
    model = type(source)(config).bfloat16()
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in source.state_dict().items()})
    model.generation_config = source.generation_config
    model.config.dtype = torch.bfloat16
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)


def without_eos(model: Path, target: Path) -> None:
    """A copy of `model` that never ends a text by itself, for servers without `ignore_eos`."""
    shutil.copytree(model, target, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        path = target / name
        if path.exists():
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields.pop("eos_token_id", None)
            path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ropewalk.load_tests.peers.export_hf", description=__doc__
    )
    parser.add_argument("gguf", type=Path, help="the GGUF file to read")
    parser.add_argument("target", type=Path, help="folder for `bf16/` and `bf16-noeos/`")
    args = parser.parse_args(argv)
    model = args.target / "bf16"
    export(args.gguf, model)
    without_eos(model, args.target / "bf16-noeos")
    print(f"{model}\n{args.target / 'bf16-noeos'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
