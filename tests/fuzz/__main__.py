"""The command line of scripts/fuzz."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz import campaign, proxy, target
from tests.fuzz.campaign import Kind, Progress
from tests.fuzz.kinds import bodies_kind, raw_kind
from tests.fuzz.streams import Stream

CASES = {"bodies": 100_000, "raw": 20_000, "proxy": 10_000, "proxy-unbuffered": 10_000}
DESCRIPTION = """\
Sends drawn requests to a server and looks for status 5xx, hangs, leaks, failures in its log,
refusals that do not name their cause, and streams that nginx in front of it reads differently.

  bodies             JSON bodies for every POST route
  raw                bytes that are almost HTTP, cut, slow and half-closed
  proxy              such bytes to nginx in front of a server, and to the server (needs nginx)
  proxy-unbuffered   the same, while nginx sends bodies on as they come
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "scripts/fuzz",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("kinds", nargs="*", metavar="KIND", help="what to send (default: all)")
    made.add_argument("--cases", type=int, metavar="N", help=f"of each kind (default: {CASES})")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    made.add_argument("--resume", action="store_true", help="go on where this seed stopped")
    made.add_argument(
        "--folder",
        type=Path,
        default=Path("build/fuzz"),
        help="for progress, logs and findings (default: build/fuzz)",
    )
    made.add_argument("--replay", type=Path, metavar="FILE", help="try one finding again")
    return made


def main(arguments: list[str]) -> int:
    """The exit status: 1 when something was found."""
    options = parser().parse_args(arguments)
    folder = options.folder.resolve()
    if options.replay is not None:
        return replay(options.replay, folder)
    unknown = set(options.kinds) - set(CASES)
    if unknown:
        parser().error(f"there is no kind {min(unknown)}; there are {', '.join(CASES)}")
    found = 0
    for name in options.kinds or CASES:
        reason = proxy.missing() if name.startswith("proxy") else None
        if reason is not None:
            print(f"{name} was left out: {reason}", file=sys.stderr)
            found += bool(options.kinds)
            continue
        start = Progress(name, options.seed)
        if options.resume:
            start = campaign.read_progress(folder, name, options.seed)
        with kind_of(name, folder) as kind:
            cases = CASES[name] if options.cases is None else options.cases
            found += bool(campaign.run(kind, start, cases, folder).found)
    return int(found > 0)


@contextmanager
def kind_of(name: str, folder: Path) -> Iterator[Kind]:
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith("proxy"):
        with proxy.pair(folder / "nginx", buffering=name == "proxy") as pair:
            yield pair
        return
    with target.started(folder / f"{name}.log") as running:
        yield (bodies_kind if name == "bodies" else raw_kind)(running)
        print(f"{name}: the server's memory is {running.resident_mib():.0f} MiB", file=sys.stderr)


def replay(path: Path, folder: Path) -> int:
    finding = json.loads(path.read_text())
    if finding["stream"] is None:
        raise SystemExit(f"{path} names no single case: {finding['what']}")
    with kind_of(finding["kind"], folder) as kind:
        what, answer = campaign.attempt_one(kind, Stream.of(finding["stream"]))
    print(answer.decode("latin-1"))
    print(what or "nothing is wrong now")
    return int(what is not None)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers end, too
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped; --resume goes on with the last batch", file=sys.stderr)
        sys.exit(130)
