import pytest

from ropewalk.load_tests.common.types import Profile
from ropewalk.load_tests.run.options import parser, sizes_from
from ropewalk.load_tests.workload.profiles import PROFILES
from ropewalk.load_tests.workload.workloads import WORKLOADS, Sizes


def parsed(*words: str):
    return parser().parse_args(words)


def test_without_options():
    args = parsed()
    assert [workload.name for workload in args.workload] == ["stream"]
    assert args.profile is None
    assert sizes_from(args) == Sizes()


def test_lists_are_separated_by_commas():
    args = parsed("--workload", "chat,longctx", "--profile", "closed:4, sweep")
    assert [workload.name for workload in args.workload] == ["chat", "longctx"]
    assert args.profile == (Profile("closed", concurrency=4), "sweep")
    assert parsed("--variants", "t5:table,rope:block").variants == ("t5:table", "rope:block")
    assert parsed("--encodings", "rope,rope,t5").encodings == ("rope", "t5")


def test_sizes_take_thousands():
    args = parsed("--contexts", "256,2k", "--prompt-tokens", "1k", "--prefixes", "3")
    sizes = sizes_from(args)
    assert (sizes.contexts, sizes.prompt_tokens, sizes.prefixes) == ((256, 2048), 1024, 3)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--runs", "0"], "'0' is not a number from 1 up"),
        (["--contexts", "1k,x"], "'x' is not a number"),
        (["--workload", "nap"], "there is no workload 'nap'"),
        (["--workload", "file:/none"], "/none"),
        (["--profile", "closed:0"], "'closed:0' is no profile"),
        (["--serve", "nothing"], "'nothing' cannot be served"),
        (["--variants", "t5:fast"], "'t5:fast' is no bias form"),
        (
            ["--encodings", "rope,morse"],
            "there is no encoding 'morse'; use some of alibi, cope, forg",
        ),
        (["--models", "a,,b"], "empty name"),
        (["--slo", "ttft=200"], "'ttft=200' is no objective"),
        (["--timeout", "-1"], "'-1' is not a number of seconds"),
        (["--run", "3"], "unrecognized"),
    ],
)
def test_wrong_values_are_refused_with_their_reason(capsys, words, reason):
    with pytest.raises(SystemExit) as stopped:
        parsed(*words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1
    assert said.endswith("; see ropewalk bench --help\n")


def test_encodings_are_those_that_there_are():
    assert parsed("--encodings", "rope,forgetting").encodings == ("rope", "forgetting")


def test_two_files_of_one_name_would_share_their_runs(capsys, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "prompts.jsonl").write_text('{"prompt": "once"}\n')
    paths = [f"file:{tmp_path / folder / 'prompts.jsonl'}" for folder in ("a", "b")]
    assert [each.name for each in parsed("--workload", paths[0]).workload] == ["file:prompts.jsonl"]
    with pytest.raises(SystemExit):
        parsed("--workload", ",".join(paths))
    assert "two files of one name" in capsys.readouterr().err


def test_help_explains_itself(capsys):
    with pytest.raises(SystemExit) as stopped:
        parsed("--help")
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for word in (*WORKLOADS, *PROFILES, "file:PATH", "examples:", "Exit status", "compare"):
        assert word in text
