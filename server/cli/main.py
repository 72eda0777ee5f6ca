"""The `ropewalk` command, and how errors of its commands are printed: each has a file of its own.

Imports no torch before a command needs it, so that --help and version answer at once.
"""

import atexit
import errno
import gc
import platform
import sys
from collections.abc import Sequence

import click
from click.shell_completion import get_completion_class

from ropewalk.server import download
from ropewalk.server.cli.options import Command, Group
from ropewalk.server.cli.serve import serve
from ropewalk.server.config import DEFAULT_MODEL
from ropewalk.server.errors import CommandError
from ropewalk.server.terminal import discard_output
from ropewalk.server.versions import installed

EXAMPLES = """\
Examples:
  ropewalk serve                          the default model on 127.0.0.1:8000
  ropewalk serve ./llama-dir --port 9000  a Hugging Face directory
  ropewalk serve small=a.gguf big=./dir   two models, named
  ropewalk chat "Why is the sky blue?"    ask the running server
  ropewalk bench --help                   measure servers, compare encodings

Every flag of serve, chat and health also has an environment variable, named in its help; a flag
overrides its variable.
"""

COMPLETION_HELP = """\
To complete commands and flags in every new shell:
  bash  ropewalk completion bash > ~/.local/share/bash-completion/completions/ropewalk
  zsh   ropewalk completion zsh > ~/.zfunc/_ropewalk
        with fpath+=~/.zfunc before compinit in ~/.zshrc
  fish  ropewalk completion fish > ~/.config/fish/completions/ropewalk.fish
"""


@click.command(cls=Command)
@click.argument(
    "model",
    default=DEFAULT_MODEL,
    metavar="[MODEL]",
    help="smollm2 (default) or a hub id owner/name",
)
def pull(model: str) -> None:
    """Download a model and print its path."""
    print(download.pull(model))


@click.command(cls=Command, epilog=COMPLETION_HELP)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")), metavar="SHELL")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands and flags."""
    complete = get_completion_class(shell)
    assert complete is not None
    script = complete(ctx.find_root().command, {}, "ropewalk", "_ROPEWALK_COMPLETE")
    print(script.source())


@click.command(cls=Command)
def version() -> None:
    """Print the versions that a bug report should name."""
    print(f"ropewalk {installed('ropewalk')}")
    print(f"Python {platform.python_version()}, torch {installed('torch')}")


@click.group(
    cls=Group,
    commands=[serve, pull, completion, version],
    names=[
        *("serve", "chat", "pull", "encodings", "explain", "audit", "family", "health", "bench"),
        *("completion", "version"),
    ],
    invoke_without_command=True,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", "versions", is_flag=True, help="print the version")
@click.pass_context
def ropewalk(ctx: click.Context, versions: bool) -> None:
    """Serve language models with any positional encoding from a paged KV cache."""
    if versions:
        ctx.invoke(version)
        ctx.exit()
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def run() -> int:
    """`main` in a process of its own."""
    # As it ends, Python looks for garbage in all that is loaded: with torch, for 0.4 s.
    atexit.register(gc.freeze)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 when something failed, 2 when the command was not understood."""
    try:
        code: int | None = ropewalk.main(argv, prog_name="ropewalk", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except click.UsageError as error:
        print(f"ropewalk: {sentence(error)}", file=sys.stderr)
        return 2
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
    except click.Abort:  # Ctrl-C
        return 130


def sentence(error: click.UsageError) -> str:
    """What click says, in one line, and where to read on."""
    if isinstance(error, click.BadParameter) and error.param and error.message:
        return f"{error.param.get_error_hint(error.ctx).strip(chr(39))}: {error.message}"
    said = " ".join(error.format_message().split())
    if error.ctx is None:
        return said
    join = " See" if said.endswith("?") else "; see"
    return f"{said.rstrip('.')}{join} {error.ctx.command_path} --help"
