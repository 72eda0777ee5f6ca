from ropewalk.load_tests.gpu.parts import Cell, Figure, LeftOut
from ropewalk.load_tests.gpu.table import as_json, tables
from ropewalk.load_tests.micro.roofline import Ceiling
from ropewalk.report.statistics import Estimate

CEILING = Ceiling(4.3e12, 790e12)


def figure(work, system, batch, context, seconds, least=None, how=""):
    found = Estimate(seconds, -float("inf"), float("inf"))
    return Figure(work, system, "smollm2", Cell(batch, context), found, (seconds,), least, how)


FOUND = [
    figure("pass", "ropewalk", 1, 512, 1e-3, 0.25e-3),
    figure("pass", "ropewalk, linear layers by torch", 1, 512, 1.5e-3, 0.25e-3),
    figure("pass", "ropewalk", 8, 512, 2e-3, 1e-3),
    figure("pass", "transformers", 1, 512, 3e-3),
    figure("step", "ropewalk", 8, 512, 4e-3),
    figure("step", "ropewalk, each step waited for", 8, 512, 5e-3),
    figure("step", "transformers", 8, 512, 10e-3, how="continuous batching, sdpa"),
    figure("prefill", "ropewalk", 1, 1024, 4e-3, 1e-3),
    LeftOut("decoding", "all", "smollm2", Cell(256, 16384), "100 GB, room for 90"),
    LeftOut("everything", "transformers", "smollm2", None, "it is not installed"),
]


def test_tables():
    lines = tables(CEILING, FOUND).splitlines()
    assert lines[0] == "Copy: 4,300 GB/s, read and written; product: 790 TFLOP/s."
    assert "|smollm2|1|512|1.00|0.250|25.0 %|1.50|1,000|3.00|3.00|" in lines
    assert "|smollm2|8|512|2.00|1.00|50.0 %||4,000|||" in lines
    assert "|smollm2|8|512|4.00|5.00|2,000|10.0|2.50|" in lines
    assert "transformers: continuous batching, sdpa." in lines
    assert "|smollm2|1|1,024|4.00|1.00|25.0 %|256,000|||" in lines
    assert lines[-2:] == [
        "- all, decoding: smollm2, batch 256, context 16,384: 100 GB, room for 90",
        "- transformers, everything: smollm2: it is not installed",
    ]


def test_a_table_without_rows_is_not_there():
    assert "One prompt" not in tables(CEILING, FOUND[:7])


def test_json_has_every_sample_and_no_infinity():
    found = as_json(CEILING, FOUND)
    assert found["ceiling"] == {"bytes_per_s": 4.3e12, "operations_per_s": 790e12}
    first = found["figures"][0]
    assert first["seconds"] == {"median": 1e-3, "low": None, "high": None}
    assert first["cell"] == {"batch": 1, "context": 512} and first["samples"] == (1e-3,)
    assert len(found["left_out"]) == 2 and found["encodings"] == []
