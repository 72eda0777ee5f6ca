import json


def test_the_copy_never_ends_a_text_by_itself(tmp_path):
    from ropewalk.load_tests.peers.export_hf import (
        without_eos,  # which imports much of transformers
    )

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"eos_token_id": 2, "vocab_size": 9}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "top_k": 1}))
    (model / "model.safetensors").write_bytes(b"weights")
    copy = tmp_path / "copy"
    without_eos(model, copy)
    assert json.loads((copy / "config.json").read_text()) == {"vocab_size": 9}
    assert json.loads((copy / "generation_config.json").read_text()) == {"top_k": 1}
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 2
