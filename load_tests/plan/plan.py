"""What many replicas will do, predicted from what one does.

    python -m ropewalk.load_tests.plan.plan --serve ropewalk-rope --out plan
    python -m ropewalk.load_tests.plan.plan --url http://127.0.0.1:8001 --url http://127.0.0.1:8002
    python -m ropewalk.load_tests.plan.plan --service plan.service.json --replicas 2,64

The times of a replica's steps come from a server that runs, or from a file. With two servers or
more, predictions for as many are compared with the real thing, the same requests sent to both.
"""

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import Server, Unreachable, split_base_url
from ropewalk.load_tests.client.environment import environment
from ropewalk.load_tests.client.facts import facts_of, variants_of
from ropewalk.load_tests.client.process import StartFailed
from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.plan.dispatch import dispatch
from ropewalk.load_tests.plan.figures import (
    Figures,
    Row,
    comparison,
    figures,
    picture,
    summary,
    table,
)
from ropewalk.load_tests.plan.routing import Policy, policies
from ropewalk.load_tests.plan.service import Service, mean, measure, read
from ropewalk.load_tests.plan.simulate import simulate
from ropewalk.load_tests.plan.traffic import Traffic
from ropewalk.load_tests.run.options import add, count, counts, program
from ropewalk.load_tests.run.serving import PROGRAM, terminated_as_interrupted
from ropewalk.report.svg import svg

_SHARE = 0.6  # of what the slowest policy answers at most: the rate unless one is asked for
_EPILOG = """\
The first table has, for each number of replicas and each way to choose among them, the most
requests that a replica answers, which is when it always has --concurrency of them; and hits and
waits when requests come at random moments, --rate a second for each replica. By default that is
60 % of what the slowest answers at most. The second table compares: predicted, measured, and by
how much the prediction is off.

Exit status: 0, or 2 when nothing could be measured.
"""

ByPolicy = Mapping[str, Figures]


@dataclass(frozen=True, slots=True)
class Case:
    """So many replicas, and what is asked of them."""

    replicas: int
    traffic: Traffic
    count: int  # requests in all
    seed: str
    slack: int  # of the policy that knows prefixes and loads

    def at(self, rate: float) -> "Case":
        """At a rate per replica, or fully busy if it is 0."""
        return replace(self, traffic=replace(self.traffic, rate=rate))


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    try:
        asyncio.run(_run(args, words))
    except (Unreachable, StartFailed, ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def predict(service: Service, case: Case) -> ByPolicy:
    traffic, profile = case.traffic, case.traffic.profile(case.replicas)
    trace = traffic.trace(case.replicas, case.count, case.seed)
    return {
        name: figures(simulate(service, case.replicas, policy, trace, profile, case.seed))
        for name, policy in _policies(service, case).items()
    }


def rate_of(busy: ByPolicy, replicas: int) -> float:
    """The requests per second of a replica under which every policy has some rest."""
    return _SHARE * min(each.requests_per_s for each in busy.values()) / replicas


def _policies(service: Service, case: Case) -> Mapping[str, Policy]:
    request = case.traffic.prompt_tokens + case.traffic.output_tokens
    kept = max(1, service.blocks * service.block_size // request)
    return policies(case.replicas, case.slack, kept)


async def _run(args: argparse.Namespace, words: Sequence[str]) -> None:
    progress = Progress(sys.stderr)
    traffic = Traffic(**{field.name: getattr(args, field.name) for field in fields(Traffic)})
    content: dict[str, object] = {
        "command": f"python -m ropewalk.load_tests.plan.plan {shlex.join(words)}",
        "traffic": asdict(traffic),
    }
    rate, measured = traffic.rate, None
    if args.service is not None:
        service = read(args.service)
    else:
        with terminated_as_interrupted(), ExitStack() as stopping:
            servers = await _servers(args, stopping, progress)
            like = Case(len(servers), traffic, args.sent, args.seed, args.slack)
            content["environment"] = await environment(servers)
            service, rate, measured = await _measure(servers, like, progress)
    cases = [Case(n, traffic, n * args.requests, args.seed, args.slack) for n in args.replicas]
    progress.start(f"simulating {', '.join(f'{n:,}' for n in args.replicas)} replicas")
    busy = {case: predict(service, case.at(0)) for case in cases}
    rate = rate or min(rate_of(found, case.replicas) for case, found in busy.items())
    rows = [
        Row(case.replicas, name, busy[case][name], rated)
        for case in cases
        for name, rated in predict(service, case.at(rate)).items()
    ]
    progress.clear()
    print(f"{summary(service)}\n\n{table(rows, rate)}")
    content |= {"service": asdict(service), "rate": rate, "rows": [asdict(row) for row in rows]}
    if measured is not None:
        said = _joined(like, predict(service, like.at(0)), predict(service, like.at(rate)))
        print(f"\n{comparison(said, measured)}")
        content |= {"predicted": [asdict(row) for row in said]}
        content |= {"measured": [asdict(row) for row in measured]}
    if args.out is not None:
        _write(Path(args.out).expanduser(), content, service, svg(picture(rows, rate), "plan"))


async def _measure(
    servers: Sequence[Server], like: Case, progress: Progress
) -> tuple[Service, float, list[Row] | None]:
    """Service times, all servers at once; with several, the rate and the figures of `like` too.

    Other work on the machine changes times, so they are taken again after every load.
    """
    facts = await facts_of((await variants_of(servers[0], ()))[0])
    vocab_size = facts.vocab_size or 32_000
    taken: list[Service] = []

    async def take_times() -> None:
        progress.start(f"measuring the times of {len(servers)} servers")
        seed = f"{like.seed} {len(taken)}"
        each = (measure(one, like.traffic, vocab_size, seed) for one in servers)
        taken.extend(await asyncio.gather(*each))

    async def observe(case: Case) -> ByPolicy:
        profile = case.traffic.profile(case.replicas)
        trace = case.traffic.trace(case.replicas, case.count, case.seed)
        found = {}
        for name, policy in _policies(taken[0], case).items():
            progress.start(f"sending {case.count} requests, {profile.label}, by {name}")
            answered = await dispatch(servers, policy, trace, profile, case.seed, vocab_size)
            found[name] = figures(answered)
            await take_times()
        return found

    await take_times()
    if len(servers) < 2:
        return mean(taken), like.traffic.rate, None
    busy = await observe(like.at(0))
    rate = like.traffic.rate or rate_of(busy, like.replicas)
    rated = await observe(like.at(rate))
    return mean(taken), rate, _joined(like, busy, rated)


def _joined(case: Case, busy: ByPolicy, rated: ByPolicy) -> list[Row]:
    return [Row(case.replicas, name, busy[name], rated[name]) for name in busy]


async def _servers(
    args: argparse.Namespace, stopping: ExitStack, progress: Progress
) -> list[Server]:
    """Those at the URLs, or two that are started and stopped again."""
    if args.url:
        found = [Server(*split_base_url(url)) for url in args.url]
        return [(await variants_of(server, ()))[0].server for server in found]  # their first models
    logs = Path(stopping.enter_context(tempfile.TemporaryDirectory()))
    servers = [Server(process.HOST, process.free_port()) for _ in range(2)]
    for server in servers:
        words = [*PROGRAM, args.serve, "--host", server.host, "--port", str(server.port)]
        words += ["--threads", "1", "--kv-memory", args.kv_memory, "--kv-spill", "0"]
        words += ["--draft-tokens", "0"]  # a step's time is predicted from how many it is for
        log = logs / f"{server.port}.log"
        started = stopping.enter_context(process.start(args.serve, words, log))
        await started.answers(server, progress.note)
    return servers


def _write(name: Path, content: Mapping[str, object], service: Service, drawn: str) -> None:
    """Raises OSError."""
    text = json.dumps(content, indent=1) + "\n"
    name.with_name(f"{name.name}.json").write_text(text, encoding="utf-8")
    name.with_name(f"{name.name}.svg").write_text(drawn + "\n", encoding="utf-8")
    service.write(name.with_name(f"{name.name}.service.json"))


def _parser() -> argparse.ArgumentParser:
    options = program("python -m ropewalk.load_tests.plan.plan", __doc__, _EPILOG)
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument("--serve", metavar="MODEL", help="start two servers of it, and compare")
    source.add_argument("--url", action="append", help="a server that runs; repeatable: replicas")
    source.add_argument("--service", metavar="FILE", type=Path, help="times that --out wrote")
    add(options, "--kv-memory BYTES", str, "64M", "of a server that --serve starts (default: 64M)")
    add(options, "--replicas N,N", counts, (2, 16, 1000), "to predict (default: 2,16,1000)")
    add(options, "--requests N", count, 40, "simulated for each replica (default: 40)")
    add(options, "--sent N", count, 400, "sent to compare with (default: 400)")
    slack = "requests more than elsewhere that a known prefix is worth (default: %(default)s)"
    add(options, "--slack N", count, 4, slack)
    sizes = options.add_argument_group("traffic", "of each replica's clients; lengths in tokens")
    for flag, parse, meaning in (
        ("--prefixes", count, "beginnings that prompts share"),
        ("--skew", float, "of their popularity: 0 is even, 1 is Zipf's law"),
        ("--prefix-tokens", count, "of a beginning"),
        ("--tail-tokens", count, "of the rest of a prompt"),
        ("--output-tokens", count, "of an answer"),
        ("--concurrency", count, "requests always under way, for the most that a replica answers"),
        ("--rate", float, "requests a second at random moments; 0: by what is answered at most"),
    ):
        default = getattr(Traffic(), flag.removeprefix("--").replace("-", "_"))
        shown = f"{meaning} (default: %(default)s)"
        sizes.add_argument(flag, type=parse, default=default, metavar="N", help=shown)
    add(options, "--seed TEXT", str, "plan", "of the traffic (default: plan)")
    add(options, "--out NAME", str, None, "write NAME.json, NAME.service.json and NAME.svg")
    return options


if __name__ == "__main__":
    sys.exit(main())
