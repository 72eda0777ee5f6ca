"""Options: text to values, flags before variables before defaults, refusals in one sentence."""

import dataclasses
from pathlib import Path

import click
import pytest

from ropewalk.server.cli.chat import chat
from ropewalk.server.cli.health import health
from ropewalk.server.cli.main import sentence
from ropewalk.server.cli.options import (
    SIZE,
    Setting,
    Switch,
    auto,
    choice,
    count,
    number,
    refuse_unknown,
    seconds,
    settings_of,
    variables,
)
from ropewalk.server.cli.serve import serve
from ropewalk.server.config import (
    LOOPBACK_NAMES,
    EventOptions,
    HttpOptions,
    ModelSource,
    ServerConfig,
    encoding_option,
    model_source,
)
from ropewalk.server.errors import UsageError
from tests.command_line import configured


def config(*flags: str, **environ: str) -> ServerConfig:
    """Raises UsageError, also for what click says."""
    try:
        return configured(*flags, **environ)
    except click.UsageError as error:
        raise UsageError(sentence(error)) from error


def test_defaults() -> None:
    plain = config()
    assert plain.models == (ModelSource("smollm2", "smollm2"),)
    assert (plain.host, plain.port) == ("127.0.0.1", 8000)
    assert plain.http.api_keys == frozenset()
    assert (plain.http.request_timeout_s, plain.drain_timeout_s) == (300, 30)
    assert plain.http.first_ping_s == plain.limits.max_queue_time + 5
    assert (plain.limits.max_seqs, plain.limits.max_step_tokens) == (64, None)
    assert plain.limits.draft_tokens is None
    assert plain.cache.block_size == 16
    assert plain.cache.prefix_sharing
    assert plain.cache.kv_memory is plain.cache.kv_dtype is None
    assert (plain.cache.audit, plain.cache.max_mutated_blocks) == ("sample", 3)
    assert plain.loading.trust_encoding == ()
    assert set(dataclasses.astuple(plain.loading)) == {None, ()}
    assert (plain.log_level, plain.log_format, plain.http.access_log) == ("info", "text", True)


def test_every_flag_reaches_the_config(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k3")
    given = config(
        "a=x.gguf",
        "b=y",
        *("--dtype", "float32", "--device", "cpu", "--encoding", "nope", "--attention", "sdpa"),
        *("--trust-encoding", "my.own:Rope", "--trust-encoding", "other:Rope"),
        *("--encoding-option", "storage=block", "--encoding-option", "base=5e5", "--audit", "full"),
        *("--quantize", "int8", "--kv-dtype", "int8", "--kv-spill", "2GiB"),
        *("--max-mutated-blocks", "9"),
        *("--max-model-len", "8k", "--threads", "2", "--kv-memory", "1GiB", "--block-size", "32"),
        *("--no-prefix-sharing", "--max-seqs", "3", "--max-step-tokens", "7", "--max-queue", "1"),
        *("--max-queue-time", "2.5"),
        *("--host", "::1", "--port", "9", "--api-key", "k1", "--api-key", "k2"),
        *("--allowed-host", "a.example", "--allowed-origin", "https://A.example:8443"),
        *("--share-prefixes", "--max-body", "2M", "--operator-routes", "on"),
        *("--request-timeout", "5s", "--drain-timeout", "0.5", "--log-level", "debug"),
        *("--metrics-compat", "vllm", "--log-format", "json", "--no-access-log"),
        *("--api-key-file", str(file), "--uds", "/run/s"),
        *("--ssl-certfile", str(file), "--ssl-keyfile", str(file), "--root-path", "llm/"),
        *("--chat-template", str(file)),
    )
    assert given.models == (ModelSource("a", "x.gguf"), ModelSource("b", "y"))
    assert dataclasses.astuple(given.loading) == (
        *("float32", "int8", "cpu", "nope", ("my.own:Rope", "other:Rope")),
        *((("storage", "block"), ("base", 5e5)), "sdpa", 8192, 2, file),
    )
    assert dataclasses.astuple(given.cache) == (1 << 30, "int8", 2 << 30, 32, False, "full", 9)
    assert dataclasses.astuple(given.limits) == (3, 7, None, 1, 2.5)
    assert (given.host, given.port, given.drain_timeout_s) == ("::1", 9, 0.5)
    assert given.http == HttpOptions(
        api_keys=frozenset({"k1", "k2", "k3"}),
        allowed_hosts=frozenset({"a.example"}),  # no web page reaches a Unix socket
        allowed_origins=frozenset({"https://a.example:8443"}),
        share_prefixes=True,
        operator_routes=True,
        access_log=False,
        max_body_bytes=2 << 20,
        request_timeout_s=5.0,
        first_ping_s=15.0,
        root_path="/llm",
    )
    assert (given.uds, given.ssl_certfile, given.ssl_keyfile) == (Path("/run/s"), file, file)
    assert (given.log_level, given.log_format) == ("debug", "json")
    assert given.metrics_compat == "vllm"
    addresses = ("--kv-events", "tcp://*:1", "--kv-events-replay", "ipc://r")
    assert config(*addresses, "--kv-events-topic", "t").events == EventOptions(
        "tcp://*:1", "ipc://r", "t"
    )


@pytest.mark.parametrize("option", settings_of(serve), ids=lambda option: option.name)
def test_variable_equals_flag(option, tmp_path: Path) -> None:
    samples = {
        "models": "one=a.gguf",
        "dtype": "bfloat16",
        "device": "cuda",
        "encoding_option": "form=table",
        "quantize": "int8",
        "audit": "full",
        "attention": "cpu",
        "kv_memory": "512M",
        "kv_dtype": "int8",
        "host": "0.0.0.0",
        "api_key": "secret",
        "allowed_origin": "http://localhost:3000",
        "otlp_endpoint": "http://localhost:4318",
        "kv_events": "tcp://*:77",
        "kv_events_replay": "ipc://77",
        "log_level": "error",
        "log_format": "json",
        "metrics_compat": "vllm",
        "operator_routes": "off",
        "max_step_tokens": "99",
        "draft_tokens": "5",
    }
    text = samples.get(option.name, "77")
    base = {}
    if option.type.name == "file":
        file = tmp_path / "file"
        file.write_text("port=77")  # a file of settings, and an API key
        text = str(file)
    if option.type.name == "folder":
        (tmp_path / "a.gguf").touch()
        text = str(tmp_path)
    if option.name == "ssl_keyfile":
        base = {"ROPEWALK_SSL_CERTFILE": text}
    if option.name in ("kv_events_replay", "kv_events_topic"):
        base = {"ROPEWALK_KV_EVENTS": "tcp://*:5557"}
    if option.secondary_opts:
        text = "off" if option.default else "on"
        flags = [*(option.secondary_opts if option.default else option.opts)]
    else:
        flags = [*option.opts, text] if isinstance(option, Setting) else [text]
    assert config(**base, **{option.envvar: text}) == config(*flags, **base)
    assert config(*flags, **base) != config(**base)


def test_flag_beats_variable_beats_default() -> None:
    assert config(ROPEWALK_PORT="9").port == 9
    assert config("--port", "10", ROPEWALK_PORT="9").port == 10
    assert config("--port", "10", ROPEWALK_PORT="broken").port == 10
    assert config(ROPEWALK_PORT=" ").port == 8000
    assert config("--prefix-sharing", ROPEWALK_PREFIX_SHARING="0").cache.prefix_sharing


def test_a_loopback_server_serves_its_own_names_and_those_given() -> None:
    assert config().http.allowed_hosts == {"localhost", "127.0.0.1", "[::1]"}
    assert config("--host", "0.0.0.0").http.allowed_hosts == frozenset()
    named = config("--host", "0.0.0.0", "--allowed-host", "a.example").http.allowed_hosts
    assert named == {"a.example"}
    given = ("a.example:8443", "::2", "[::3]:80", "[::4]")
    flags = [word for host in given for word in ("--allowed-host", host)]
    named = config("--host", "0.0.0.0", *flags).http.allowed_hosts
    assert named == {"a.example", "[::2]", "[::3]", "[::4]"}  # as headers have them


@pytest.mark.parametrize(
    ("host", "name"),
    [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("Localhost", "Localhost")],
)
def test_every_loopback_address_is_closed_to_other_names(host, name) -> None:
    assert config("--host", host).http.allowed_hosts == LOOPBACK_NAMES | {name}


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        ([], True),
        (["--host", "localhost"], True),
        (["--host", "0.0.0.0"], False),
        (["--uds", "/run/s"], False),
        (["--api-key", "k"], False),
        (["--allowed-host", "a.example"], False),
        (["--api-key", "k", "--operator-routes", "on"], True),
        (["--operator-routes", "off"], False),
    ],
)
def test_operator_routes_are_on_where_only_their_owner_reaches_the_server(flags, on) -> None:
    assert config(*flags).http.operator_routes is on


def test_lists_in_variables() -> None:
    given = config(ROPEWALK_API_KEYS="a, b,", ROPEWALK_MODELS="x=1,y=2")
    assert given.http.api_keys == {"a", "b"}
    assert [model.name for model in given.models] == ["x", "y"]


def test_keys_are_not_in_the_printed_config() -> None:
    assert "hunter2" not in repr(config("--api-key", "hunter2"))


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--port", "x"], {}, "--port: 'x' is not a whole number; write for example 64 or 8k"),
        (["--port", "65536"], {}, "--port: 65536 is outside 0 to 65535"),
        (["--port", "-1"], {}, "--port: '-1' is not a whole number"),
        ([], {"ROPEWALK_PORT": "x"}, "ROPEWALK_PORT: 'x' is not a whole number"),
        ([], {"ROPEWALK_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks: false"),
        (
            ["--dtype", "int8"],
            {},
            "--dtype: 'int8' is not one of the choices; use bfloat16, float16 or",
        ),
        (["--kv-memory", "0"], {}, "--kv-memory: '0' is not an amount of memory"),
        (["--host", "http://x"], {}, "--host: 'http://x' is not a host"),
        (
            ["--allowed-origin", "chat.example"],
            {},
            "--allowed-origin: 'chat.example' is not an origin",
        ),
        (["--allowed-origin", "https://a.example/b"], {}, "write for example https://chat.example"),
        (["--api-key", ""], {}, "--api-key: an API key must not be empty or contain spaces"),
        (["--request-timeout", "nan"], {}, "--request-timeout: nan is outside 1 to 86400"),
        (["--max-seqs", "0"], {}, "--max-seqs: 0 is outside 1 to 4096"),
        (["--max-step-tokens", "8"], {}, "--max-step-tokens 8 is less than --max-seqs 64"),
        (
            ["a=x", "a=y"],
            {},
            "two models are called 'a'; name one of them with NAME=MODEL, for example other=x",
        ),
        (["--kv-events", "5557"], {}, "'5557' is not a ZeroMQ address"),
        (["--kv-events-topic", "t"], {}, "publish them with --kv-events"),
        (["a=x", "b=y", "--kv-events", "tcp://*:1"], {}, "of one model, but others are served"),
        (["--kv-events", "tcp://*:1", "--no-prefix-sharing"], {}, "leave one of the two out"),
        ([], {"ROPEWALK_PREFIX_SHARING": "maybe"}, "'maybe' is neither on nor off"),
        ([], {"ROPEWALK_API_KEYS": ","}, "ROPEWALK_API_KEYS: it lists no value; leave it out or"),
        ([], {"ROPEWALK_MODELS": " , "}, "ROPEWALK_MODELS: it lists no value"),
        ([], {"ROPEWALK_MODELS": "a=x,a=y"}, "two models are called 'a'"),
        (["--encoding-option", "table"], {}, "--encoding-option: 'table' is not NAME=VALUE; write"),
        (["--served-model-name", "a b"], {}, "--served-model-name: 'a b' is not a name"),
        (["--served-model-name", "a", "x", "y"], {}, "but 2 are served; name each of them with"),
        (["--served-model-name", "a", "family"], {}, "names one model, but 6 are served"),
        (["--ssl-keyfile", __file__], {}, "name the certificate with --ssl-certfile"),
        (["--ssl-certfile", "no/where"], {}, "--ssl-certfile: there is no file no/where"),
        (["--chat-template", "no/where"], {}, "--chat-template: there is no file no/where"),
        (["--config", "no/where"], {}, "--config: there is no file no/where"),
        ([], {"ROPEWALK_CONFIG": "no/where"}, "ROPEWALK_CONFIG: there is no file no/where"),
        (["--root-path", "http://x?"], {}, "--root-path: 'http://x?' is not a path"),
        (["mine=family"], {}, "mine=family gives one name to six models"),
    ],
)
def test_refusals_name_the_place_and_the_reason(flags, environ, words) -> None:
    with pytest.raises(UsageError) as refused:
        config(*flags, **environ)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_equal_bounds_of_step_and_sequences_pass() -> None:
    assert config("--max-step-tokens", "64").limits.max_step_tokens == 64


def test_served_model_names_replace_the_one_after_the_file() -> None:
    given = config("./x/Qwen2.gguf", "--served-model-name", "a", "--served-model-name", "b")
    assert given.models == (ModelSource("a", "./x/Qwen2.gguf", ("b",)),)
    again = config("n=x.gguf", ROPEWALK_SERVED_MODEL_NAMES="a,a")
    assert again.models == (ModelSource("a", "x.gguf"),)


@pytest.mark.parametrize(
    ("value", "path"),
    [("/llm", "/llm"), ("llm/a/", "/llm/a"), ("/", ""), ("//a", "/a"), ("/é", "/é")],
)
def test_root_paths(value: str, path: str) -> None:
    assert config("--root-path", value).http.root_path == path


KEY_FILES = {
    b"one\ntwo\n": {"one", "two"},
    b"# who\n\n  one  \r\n\t# two\r\n": {"one"},
    "\ufeffschlüssel".encode(): {"schlüssel"},
}


@pytest.mark.parametrize("content", KEY_FILES)
def test_keys_in_a_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert config("--api-key-file", str(file)).http.api_keys == KEY_FILES[content]
    both = config("--api-key-file", str(file), ROPEWALK_API_KEYS="k").http.api_keys
    assert both == KEY_FILES[content] | {"k"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no key; write one a line"),
        (b"# none yet\n\n", "holds no key"),
        (b"two words\n", "must not be empty or contain spaces"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (None, "cannot be read (No such file or directory); check the path"),
    ],
)
def test_a_file_without_keys_does_not_leave_the_server_open(content, words, tmp_path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        config("--api-key-file", str(file))
    assert words in str(refused.value)
    assert "two words" not in str(refused.value)


def settings(folder: Path, text: str | bytes, *flags: str, **environ: str) -> ServerConfig:
    file = folder / "settings.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return config("--config", str(file), *flags, **environ)


def test_a_file_sets_what_flags_set(tmp_path: Path) -> None:
    text = """
        models = ["a=x.gguf", "b=y"]
        port = 9
        max-model-len = "8k"
        max_seqs = 3
        drain-timeout = 0.5
        prefix-sharing = false
        share-prefixes = true
        api-key = ["k,1", "k2"]
        allowed-host = "a.example"
        metrics-compat = "vllm"
    """
    same = config(
        *("a=x.gguf", "b=y", "--port", "9", "--max-model-len", "8k", "--max-seqs", "3"),
        *("--drain-timeout", "0.5", "--no-prefix-sharing", "--share-prefixes", "--api-key", "k,1"),
        *("--api-key", "k2", "--allowed-host", "a.example", "--metrics-compat", "vllm"),
    )
    assert settings(tmp_path, text) == same
    assert settings(tmp_path, "") == settings(tmp_path, "# nothing") == config()


def test_flag_beats_variable_beats_file(tmp_path: Path) -> None:
    text = "port = 9\napi-key = 'file'"
    assert settings(tmp_path, text).port == 9
    assert settings(tmp_path, text, ROPEWALK_PORT="10").port == 10
    assert settings(tmp_path, text, ROPEWALK_PORT=" ").port == 9
    assert settings(tmp_path, text, "--port", "11", ROPEWALK_PORT="10").port == 11
    assert settings(tmp_path, text, "--api-key", "flag").http.api_keys == {"flag"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-length = 3", ": max-model-length is not a setting of ropewalk serve; did you"),
        ("max_model_length = 3", "did you mean max-model-len?"),
        ("model = 'x'", "did you mean models?"),
        ("[serve]\nport = 1", ": serve is not a setting"),
        ("config = 'x'", ": config is not a setting"),
        ("port = 'x'", ": port: 'x' is not a whole number; write for example 64 or 8k"),
        ("port = 1.5", ": port: '1.5' is not a whole number"),
        ("port = true", ": port: 'on' is not a whole number"),
        ("port = [1]", ": port is a list; write text, a number, true or false"),
        ("port = 1979-05-27", ": port is a date; write"),
        ("api-key = [['a']]", ": api-key is a list; write"),
        ("api-key = []", ": api-key: it lists no value; leave it out or add one"),
        ("models = []", ": models: it lists no value"),
        ("max-seqs = 3\nmax_seqs = 4", ": max_seqs is set twice; leave one out"),
        ("port = 1\nport = 2", " is not TOML: "),
        ("port", " is not TOML: "),
        (b"models = '\xff'", " is not TOML"),
        ("prefix-sharing = 'maybe'", ": prefix-sharing: 'maybe' is neither on nor off"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(text, words, tmp_path) -> None:
    with pytest.raises(UsageError) as refused:
        settings(tmp_path, text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen2-0.5B"
    folder.mkdir()
    (tmp_path / "a=b.gguf").touch()
    assert model_source(str(folder)) == ModelSource("Qwen2-0.5B", str(folder))
    assert model_source("./dir/m.Q4_1.gguf") == ModelSource("m.Q4_1", "./dir/m.Q4_1.gguf")
    assert model_source("owner/name") == ModelSource("owner/name", "owner/name")
    assert model_source("n=owner/name") == ModelSource("n", "owner/name")
    assert model_source("shape:small:t5") == ModelSource("shape:small:t5", "shape:small:t5")
    assert model_source("t5=shape:small:t5") == ModelSource("t5", "shape:small:t5")
    monkeypatch.chdir(tmp_path)
    assert model_source("a=b.gguf") == ModelSource("a=b", "a=b.gguf")
    monkeypatch.chdir(folder)
    assert model_source(".").name == "Qwen2-0.5B"


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (
            count(0, 1 << 30),
            {"7": 7, "8k": 8192, "8K": 8192, "1m": 1 << 20, "14_000": 14_000},
            ["", "1.5", "k", "8q", "_1", "1__0"],
        ),
        (
            SIZE,
            {"1GiB": 1 << 30, "1.5g": 3 << 29, "512 MB": 1 << 29, "4096": 4096, "10b": 10},
            ["", "GiB", "-1G", "1X", "0.1"],
        ),
        (seconds(0, 9), {"3": 3.0, "0.5s": 0.5}, ["", "10", "-1", "inf", "nan", "3m"]),
        (number(0, 2), {"0.7": 0.7}, ["", "0.7s", "2.1"]),
        (Switch(), {"on": True, "TRUE": True, "0": False, "no": False}, ["", "2"]),
        (choice("a", "b"), {"a": "a"}, ["", "A", "c"]),
        (auto(choice("a")), {"auto": None, "a": "a"}, ["b"]),
    ],
)
def test_text_to_values(parse, good, bad) -> None:
    assert {text: parse(text) for text in good} == good
    for text in bad:
        with pytest.raises(click.BadParameter):
            parse(text)


def test_options_of_an_encoding() -> None:
    assert encoding_option("form=table") == ("form", "table")
    assert encoding_option('scaling={"factor": 2}') == ("scaling", {"factor": 2})
    both = config(ROPEWALK_ENCODING_OPTIONS="form=table, buckets=32").loading.encoding_option
    assert both == (("form", "table"), ("buckets", 32))


def test_misspelt_variable_is_refused_with_a_hint() -> None:
    known = variables([serve, chat, health])
    assert "ROPEWALK_API_KEY" in known
    refuse_unknown(dict.fromkeys(known, "1") | {"PATH": "x"}, known)
    with pytest.raises(UsageError, match="did you mean ROPEWALK_MAX_SEQS"):
        refuse_unknown({"ROPEWALK_MAX_SEQ": "3"}, known)
    with pytest.raises(UsageError, match="ROPEWALK_WHAT is not known to ropewalk"):
        refuse_unknown({"ROPEWALK_WHAT": "1"}, known)


def test_variables_of_a_kubernetes_service_are_no_mistake() -> None:
    links = {
        "ROPEWALK_SERVICE_HOST": "10.0.0.1",
        "ROPEWALK_SERVICE_PORT": "80",
        "ROPEWALK_SERVICE_PORT_HTTP": "80",
        "ROPEWALK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ROPEWALK_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ROPEWALK_PORT_8001_SCTP_PORT": "8001",
        "ROPEWALK_GRAFANA_PORT": "tcp://10.0.0.5:3000",
    }
    refuse_unknown(links, [])
    with pytest.raises(UsageError):
        refuse_unknown({"ROPEWALK_PORT": "1"}, [])
    with pytest.raises(UsageError):
        refuse_unknown({"ROPEWALK_GRAFANA": "tcp://10.0.0.5:3000"}, [])


def test_a_variable_means_one_thing() -> None:
    """Only what says where a server listens is shared between it and its clients."""
    names = ("HOST", "PORT", "UDS", "SSL_CERTFILE", "CONFIG")
    shared = variables([serve]) & variables([chat, health])
    assert shared == {f"ROPEWALK_{name}" for name in names}
    for command in (serve, chat, health):
        assert len(settings_of(command)) == len(variables([command])) > 5
