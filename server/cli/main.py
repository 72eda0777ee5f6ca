"""The `ropewalk` command: one function per subcommand, and how their errors are printed.

Imports no torch before a command needs it, so that --help and version answer at once.
"""

import argparse
import errno
import gc
import io
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NoReturn

from ropewalk.server import download, listen, logs
from ropewalk.server.cli import chat
from ropewalk.server.cli.config_file import read_all
from ropewalk.server.cli.connect import Address, address, connected
from ropewalk.server.cli.options.audit import HELP as AUDIT_HELP
from ropewalk.server.cli.options.audit import add_audit_flags
from ropewalk.server.cli.options.base import add_options, nearest, refuse_unknown
from ropewalk.server.cli.options.client import CHAT_OPTIONS, CLIENT_KEY, HEALTH_OPTIONS
from ropewalk.server.cli.options.encodings import (
    EXPLAIN_HELP,
    LIST_HELP,
    add_explain_flags,
    add_list_flags,
)
from ropewalk.server.cli.options.family import HELP as FAMILY_HELP
from ropewalk.server.cli.options.family import add_family_commands
from ropewalk.server.cli.options.serve import DEFAULT_MODEL, SERVE_OPTIONS
from ropewalk.server.config import server_config
from ropewalk.server.errors import CommandError, UsageError
from ropewalk.server.terminal import discard_output
from ropewalk.server.versions import installed

EXAMPLES = """\
examples:
  ropewalk serve                          the default model on 127.0.0.1:8000
  ropewalk serve ./llama-dir --port 9000  a Hugging Face directory
  ropewalk serve small=a.gguf big=./dir   two models, named
  ropewalk chat "Why is the sky blue?"    ask the running server
  ropewalk bench --help                   measure servers, compare encodings

Every flag of serve, chat and health also has an environment variable, named in its help; a flag
overrides its variable.
"""

SERVE_EXAMPLES = """\
examples:
  ropewalk serve
  ropewalk serve ./Qwen2-0.5B --dtype float32 --max-model-len 4k
  ropewalk serve chat=smollm2 base=./model.gguf --kv-memory 1GiB
  ropewalk serve rope=shape:small t5=shape:small:t5 --max-model-len 16k
                               random weights, only the encoding differs: for costs, not answers
  ROPEWALK_API_KEYS=secret1,secret2 ropewalk serve --host 0.0.0.0
  ropewalk serve --config ropewalk.toml        port = 9000 and the like, one a line
  ropewalk serve --uds /run/ropewalk.sock      then ropewalk chat --url unix:/run/ropewalk.sock
  ropewalk serve --ssl-certfile chain.pem --ssl-keyfile key.pem
"""

COMPLETION_HELP = """\
to complete commands and flags in every new shell:
  bash  ropewalk completion bash > ~/.local/share/bash-completion/completions/ropewalk
  zsh   ropewalk completion zsh > ~/.zfunc/_ropewalk
        with fpath+=~/.zfunc before compinit in ~/.zshrc
  fish  ropewalk completion fish > ~/.config/fish/completions/ropewalk.fish
"""

OTHER_VARIABLES = ("ROPEWALK_HOME",)


class Help(argparse.RawDescriptionHelpFormatter):
    """Wide enough that most options take two lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one sentence instead of a page of usage."""

    def parse_known_args(  # type: ignore[override]  # its overloads are about other namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses unknown words itself, since only a command's own parser knows its flags."""
        found, unknown = super().parse_known_args(args, namespace)
        if not unknown:
            return found, unknown
        said = f"unrecognized arguments: {' '.join(unknown)}"
        close = nearest(unknown[0].partition("=")[0], self._option_string_actions)
        if unknown[0].startswith("--") and close:
            said += f"; did you mean {close}?"
        self.error(said)

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(", message):
            message = f"there is no command {wrong[1]!r}"
            known = next(each.choices for each in self._actions if each.metavar == "COMMAND")
            if close := nearest(wrong[1], known or ()):
                message += f"; did you mean {close}?"
        join = " See" if message.endswith("?") else "; see"
        raise UsageError(f"{message}{join} {self.prog} --help")


def serve(flags: argparse.Namespace) -> int:
    """Returns when the server has stopped."""
    values = _as_told(read_all(SERVE_OPTIONS, flags, os.environ), flags)
    config = server_config(values)
    if os.environ.get(CLIENT_KEY) and not config.http.api_keys:
        raise UsageError(
            f"{CLIENT_KEY} is the key that a client sends and does not protect the server; set "
            f"ROPEWALK_API_KEYS to require a key, or unset {CLIENT_KEY}"
        )
    # Before torch and the weights are loaded: a taken port should be reported at once.
    with listen.bound(config.host, config.port, config.uds) as listener:
        tls = None
        if config.ssl_certfile is not None:
            tls = listen.tls_context(config.ssl_certfile, config.ssl_keyfile)
        logs.configure(config.log_level, config.log_format)
        wait_briefly(os.environ)
        # Until all is loaded: it stays, and looking for garbage in it would take a third of a
        # second.
        gc.disable()
        # Imported late, as only in this file: it loads torch, which takes seconds.
        from ropewalk.server.launch import build

        return build.run(config, listener, tls)


def wait_briefly(environ: MutableMapping[str, str]) -> None:
    """Make threads that wait for the next step give up their cores within 1 ms.

    GNU OpenMP reads the variable when torch loads. By default it spins ten times as long, and next
    to another busy program keeps a core from the thread that prepares the step: docs/speed.md.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = "30000"


def talk(flags: argparse.Namespace) -> int:
    """`ropewalk chat`: one question, or a conversation on standard input."""
    values = read_all(CHAT_OPTIONS, flags, os.environ)
    fields = ("max_tokens", "temperature", "top_p", "seed")
    options = chat.ChatOptions(
        server=_server_at(values, flags),
        model=values["model"],
        api_key=values["api_key"],
        system=values["system"],
        sampling={name: values[name] for name in fields if values[name] is not None},
        timeout_s=values["timeout"],
        stats=values["stats"],
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not be able to show everything
        sys.stdout.reconfigure(errors="replace")
    if flags.question is not None:
        return chat.ask(options, flags.question, sys.stdout)
    if not sys.stdin.isatty():
        return chat.converse(options, iter(sys.stdin), sys.stdout, greet=False)
    lines = chat.typed_lines(download.home() / "chat_history")
    return chat.converse(options, lines, sys.stdout, greet=True)


def _as_told(values: Mapping[str, Any], flags: argparse.Namespace) -> Mapping[str, Any]:
    """Without the addresses in variables and files where flags name one."""
    places = ("url", "uds", "host", "port")
    given = {name for name in places if getattr(flags, name, None) is not None}
    if not given:
        return values
    return {**values, **{name: None for name in ("url", "uds") if name not in given}}


def _server_at(values: Mapping[str, Any], flags: argparse.Namespace) -> Address:
    """The running server that chat's or health's options name."""
    values = _as_told(values, flags)
    certificate = values["ssl_certfile"]
    if values["url"] and flags.ssl_certfile is None:
        certificate = None  # the variable's and the file's is of the server on this machine
    local = listen.local_url(values["host"], values["port"], tls=certificate is not None)
    if values["uds"] is not None:
        local = f"unix:{values['uds']}"
    return address(values["url"] or local, certificate)


def bring(flags: argparse.Namespace) -> int:
    """`ropewalk pull`: prints the path of the model."""
    print(download.pull(flags.model))
    return 0


def encodings(flags: argparse.Namespace) -> int:
    """`ropewalk encodings`: the encodings there are, and what they cost."""
    # Late: it loads torch.
    from ropewalk.server.cli import encodings_command

    show = encodings_command.run_operations if flags.operations else encodings_command.run
    return show(flags.encoding, as_lines_of_json=flags.json)


def explain(flags: argparse.Namespace) -> int:
    """`ropewalk explain`: draws one encoding; prints the path of the file."""
    # matplotlib's messages about its caches and fonts are no use to the user.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    # Late: it loads torch and matplotlib.
    from ropewalk.server.cli import explain_command

    print(explain_command.run(flags))
    return 0


def audit(flags: argparse.Namespace) -> int:
    """`ropewalk audit`: what a generation changes in the cache; prints a table."""
    # Late: it loads torch.
    from ropewalk.server.cli import audit_command

    return audit_command.run(flags)


def family(flags: argparse.Namespace) -> int:
    """`ropewalk family`: prepare and train the bundled models."""
    # Late: it loads torch, sentencepiece and the family's code.
    from ropewalk.server.cli import family_command

    return family_command.run(flags)


def version(_: argparse.Namespace) -> int:
    """The versions that a bug report should name."""
    print(f"ropewalk {installed('ropewalk')}")
    print(f"Python {platform.python_version()}, torch {installed('torch')}")
    return 0


def health(flags: argparse.Namespace) -> int:
    """For container health checks: exit code 0 when the server answers 200, else 1."""
    values = read_all(HEALTH_OPTIONS, flags, os.environ)
    server = _server_at(values, flags)
    path = "/health/ready" if values["ready"] else "/health/live"
    with connected(server, values["timeout"]) as connection:
        connection.request("GET", server.prefix + path)
        status = connection.getresponse().status
    said = f"{server.url}{path} answered {status}"
    if status != 200:
        raise CommandError(said)
    print(said)
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Passes its arguments to the load generator, or to the profiler of a step in this process."""
    # Late: a server needs neither, and the load generator does not need torch.
    if "--profile-step" in arguments:
        from ropewalk.load_tests.micro.profile_step import main as profile_main

        return profile_main(arguments)
    from ropewalk.load_tests.run.bench import main as bench_main

    return bench_main(arguments)


def completion(flags: argparse.Namespace) -> int:
    """`ropewalk completion`: prints a script that makes a shell complete commands and flags."""
    # Late: no other command needs it.
    import shtab

    top = parser()
    for command in _parsers(top):
        for action in command._actions:
            if action.metavar in ("FILE", "FOLDER", "MODEL", "PATH"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it there
    print(shtab.complete(top, shell=flags.shell))
    return 0


def _parsers(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _parsers(command)


def parser() -> Parser:
    """Every command; each sets `run` to its function."""
    top = Parser(
        prog="ropewalk",
        description="Serve language models with any positional encoding from a paged KV cache.",
        epilog=EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    add = partial(_add_command, commands)
    line = "load models and serve them"
    serving = add("serve", serve, line, usage="[MODEL ...] [FLAGS]", epilog=SERVE_EXAMPLES)
    add_options(serving, SERVE_OPTIONS)
    talking = add(
        "chat", talk, "talk to a running server", usage="[QUESTION] [FLAGS]", epilog=chat.HELP
    )
    talking.add_argument(
        "question", nargs="?", metavar="QUESTION", help="ask this one question and exit"
    )
    add_options(talking, CHAT_OPTIONS)
    bringing = add("pull", bring, "download a model", usage="[MODEL]")
    bringing.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=DEFAULT_MODEL,
        help="smollm2 (default) or a hub id owner/name",
    )
    line = "list the positional encodings"
    listing = add("encodings", encodings, line, usage="[FLAGS]", epilog=LIST_HELP)
    add_list_flags(listing)
    line = "draw what a positional encoding does, as one HTML or PNG file"
    explaining = add("explain", explain, line, usage="ENCODING [FLAGS]", epilog=EXPLAIN_HELP)
    add_explain_flags(explaining)
    line = "show what each generation step changes in the cache"
    auditing = add("audit", audit, line, usage="[MODEL] [FLAGS]", epilog=AUDIT_HELP)
    add_audit_flags(auditing)
    line = "rebuild the bundled models from their training texts"
    grouping = add("family", None, line, usage="COMMAND [FLAGS]", epilog=FAMILY_HELP)
    members = grouping.add_subparsers(
        title="commands", metavar="COMMAND", dest="family_command", required=True
    )
    add_family_commands(partial(_add_command, members, within="family "), family)
    probing = add("health", health, "check the health of a running server", usage="[FLAGS]")
    add_options(probing, HEALTH_OPTIONS)
    add("bench", bench, "measure servers and compare encodings; see ropewalk bench --help")
    line = "print a script for the shell's completion"
    completing = add("completion", completion, line, usage="SHELL", epilog=COMPLETION_HELP)
    completing.add_argument(
        "shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish"
    )
    add("version", version, "print the version")
    return top


def _add_command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    run: Callable[..., int] | None,
    line: str,
    *,
    usage: str = "",
    epilog: str = "",
    within: str = "",
) -> Parser:
    """`within` is the command that this one belongs to; without `run`, it only has others."""
    added = commands.add_parser(
        name,
        prog=f"ropewalk {within}{name}",
        usage=f"ropewalk {within}{name} {usage}".rstrip(),
        help=line,
        description=line[0].upper() + line[1:] + ".",
        epilog=epilog,
        formatter_class=Help,
        allow_abbrev=False,
    )
    if run is not None:
        added.set_defaults(run=run)
    return added


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 when something failed, 2 when the command was not understood."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"ropewalk: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as head, has read enough
        discard_output()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        discard_output()
        print("ropewalk: no space is left on a disk; free some and try again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["bench"]:  # it answers --help itself, so this parser must not see it
        return bench(arguments[1:])
    top = parser()
    flags = top.parse_args(arguments)
    if flags.version:
        return version(flags)
    if flags.command is None:
        top.print_help()
        return 0
    options = (*SERVE_OPTIONS, *CHAT_OPTIONS, *HEALTH_OPTIONS)
    refuse_unknown(os.environ, [*OTHER_VARIABLES, *(option.variable for option in options)])
    result: int = flags.run(flags)
    return result
