"""Two replicas behind Ray Serve, beside one server with as much cache: answers, hits, losses.

    python -m ropewalk.load_tests.run.behind_ray

Starts Ray with deploy/ray/ropewalk.yaml and a small bundled model, and sends the load of
replicas.py through its proxy: under each router, and while a replica is killed, drained,
restarted and frozen. What was measured is kept in the folder of --out, so a run that was stopped
goes on with the same arguments.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import Server, Unreachable, fetch, get_json
from ropewalk.load_tests.client.process import StartFailed
from ropewalk.load_tests.run.behind_routers import Made, load
from ropewalk.load_tests.run.replicas import (
    Sent,
    Sizes,
    conclude,
    kept,
    send_all,
    send_disturbed,
    table,
)
from ropewalk.load_tests.run.serving import terminated_as_interrupted

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "ropewalk.yaml"
ROUTERS = {
    "consistent hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    "round robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
    "power of two": "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter",
}
KEYED = "consistent hash"
_KV = 72 << 20  # bytes of a replica's cache: two hold the load's beginnings, one does not
_APPLICATIONS = "/api/serve/applications/"
_UP_S = 240.0  # that replicas have to come up
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Replica:
    pid: int
    name: str
    state: str  # STARTING, RUNNING, STOPPING


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray of one node: its dashboard, which takes configurations, and its proxy."""

    dashboard: Server
    proxy: Server

    async def deploy(self, config: Mapping[str, Any]) -> None:
        """Ask for that state, and return at once. Raises Unreachable."""
        await fetch(self.dashboard, "PUT", _APPLICATIONS, config)

    async def replicas(self) -> list[Replica]:
        found = (await get_json(self.dashboard, _APPLICATIONS))["applications"]
        return [
            Replica(each.get("pid") or 0, each["replica_id"], each["state"])
            for application in found.values()
            for deployment in application["deployments"].values()
            for each in deployment["replicas"]
        ]

    async def running(self, count: int, without: Sequence[Replica] = ()) -> float:
        """Seconds until so many replicas run and no others are left. Raises StartFailed."""
        began = time.perf_counter()
        gone = {each.name for each in without}
        while (waited := time.perf_counter() - began) < _UP_S:
            found = await self.replicas()
            if len(found) == count and all(
                each.state == "RUNNING" and each.name not in gone for each in found
            ):
                return waited
            await asyncio.sleep(_POLL_S)
        raise StartFailed(f"there are not {count} replicas after {_UP_S:g} s; see Ray's logs")


def configuration(
    name: str, router: str, model: str, port: int, replicas: int = 2, **args: object
) -> dict[str, Any]:
    """deploy/ray/ropewalk.yaml for so many replicas with a small cache, on a small machine."""
    # Late, as all of Ray's: it comes with the extra.
    import yaml

    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    # Of its own: the proxy keeps the router that a name had, and a name that is being deleted is
    # not soon deployed again.
    application["name"] = name.replace(" ", "-")
    application["args"] |= {
        "models": [model],
        "kv_memory": str(_KV),
        "kv_spill": "0",
        "dtype": "float32",
    }
    application["args"] |= args
    (deployment,) = application["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 1}
    deployment["request_router_config"] = {"request_router_class": ROUTERS[router]}
    deployment["autoscaling_config"] |= dict.fromkeys(("min_replicas", "max_replicas"), replicas)
    return config


@asynccontextmanager
async def ray_cluster(logs: Path) -> AsyncIterator[Cluster]:
    """Ray on this machine. Its processes end with the block. Raises StartFailed."""
    gcs, client, agent, dashboard, proxy = (process.free_port() for _ in range(5))
    flags = {
        "port": gcs,
        "ray-client-server-port": client,
        "dashboard-agent-listen-port": agent,
        "dashboard-port": dashboard,
        "num-cpus": 4,  # that replicas may reserve: two, and two more while they are replaced
        "object-store-memory": 100 << 20,
        "temp-dir": logs,
    }
    program = str(Path(sys.executable).with_name("ray"))
    words = [program, "start", "--head", "--block", "--disable-usage-stats"]
    words += [f"--{name}={value}" for name, value in flags.items()]
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "ropewalk.server.ray.proxy:middlewares",
    }
    server = Server(process.HOST, dashboard, timeout_s=120, idle_s=120)
    with process.start("Ray", words, logs / "ray.log") as started:
        began = time.monotonic()
        while True:
            try:
                await get_json(server, _APPLICATIONS)
                break
            except Unreachable:
                if started.popen.poll() is not None or time.monotonic() - began > _UP_S:
                    raise started.failed("did not start") from None
                await asyncio.sleep(_POLL_S)
        yield Cluster(server, replace(server, port=proxy, timeout_s=60, idle_s=60))


class Check:
    """Measures what the folder `out` has no file for, of that model and those sizes."""

    def __init__(self, cluster: Cluster, model: str, sizes: Sizes, out: Path) -> None:
        self._cluster = cluster
        self._model = model
        self._sizes = sizes
        self._out = out

    async def routed(self, router: str) -> Sent:
        """The load on fresh replicas."""

        async def measure() -> Sent:
            await self._fresh(router, router)
            title = f"two replicas, {router}"
            return await send_all(title, self._cluster.proxy, self._sizes)

        return await self._kept(router, measure)

    async def disturbed(self, title: str, act: Callable[[str], Awaitable[float]]) -> Sent:
        """The load while `act` is done to the replicas of the application of that name."""

        async def measure() -> Sent:
            await self._fresh(title, KEYED)
            done = partial(act, title)
            return await send_disturbed(title, self._cluster.proxy, self._sizes, done)

        return await self._kept(title, measure)

    async def kill(self, title: str) -> float:
        """One replica's process, without warning. Ray starts another."""
        victim, _ = await self._cluster.replicas()
        os.kill(victim.pid, signal.SIGKILL)
        return await self._cluster.running(2, without=[victim])

    async def freeze(self, title: str) -> float:
        """One replica's process stands still. Ray asks three times how it is."""
        victim, _ = await self._cluster.replicas()
        os.kill(victim.pid, signal.SIGSTOP)
        return await self._cluster.running(2, without=[victim])

    async def drain(self, title: str) -> float:
        """One replica: it finishes its streams and ends."""
        await self._cluster.deploy(self._configuration(title, replicas=1))
        return await self._cluster.running(1)

    async def restart(self, title: str) -> float:
        """Both, as an update does: each is replaced first."""
        old = await self._cluster.replicas()
        await self._cluster.deploy(self._configuration(title, max_queue="1000"))
        return await self._cluster.running(2, without=old)

    async def _kept(self, title: str, measure: Callable[[], Awaitable[Sent]]) -> Sent:
        return await kept(self._out / f"{title}.json", self._model, self._sizes, measure)

    async def _fresh(self, name: str, router: str) -> None:
        old = await self._cluster.replicas()
        await self._cluster.deploy(self._configuration(name, router))
        await self._cluster.running(2, without=old)

    def _configuration(
        self, name: str, router: str = KEYED, replicas: int = 2, **args: object
    ) -> dict[str, Any]:
        port = self._cluster.proxy.port
        return configuration(name, router, self._model, port, replicas, **args)


async def measure(model: str, sizes: Sizes, out: Path) -> int:
    # It has the cache of both replicas.
    one = await load(Made(sys.executable, model, out).one_server("Ray"), model, sizes, out)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as logs:
        async with ray_cluster(Path(logs)) as cluster:
            check = Check(cluster, model, sizes, out)
            routed = {router: await check.routed(router) for router in ROUTERS}
            print(table([one, *routed.values()], one), flush=True)
            acts = {"killed": check.kill, "drained": check.drain, "restarted": check.restart}
            acts["frozen"] = check.freeze
            disturbed = {title: await check.disturbed(title, act) for title, act in acts.items()}
    found = conclude(one, routed, "round robin", KEYED, disturbed)
    print("\n".join(found or ["All that must hold holds."]))
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="ropewalk-rope", help="a bundled one")
    parser.add_argument("--requests", type=int, default=Sizes().requests)
    parser.add_argument("--out", type=Path, default=Path("build/ray"), help="what is measured")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with terminated_as_interrupted():
            return asyncio.run(measure(args.model, Sizes(requests=args.requests), args.out))
    except (StartFailed, Unreachable) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
