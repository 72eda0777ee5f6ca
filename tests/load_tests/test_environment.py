import asyncio
import platform

from ropewalk.load_tests.client.client import Server
from ropewalk.load_tests.client.environment import environment
from tests.load_tests.sse_server import good, serving, whole


def test_the_machine_and_each_server():
    def answer(path, body):
        return whole("200 OK", {"version": "9.1"}) if path == "/version" else good(path, body)

    with serving(answer) as known, serving() as silent:
        servers = [Server("127.0.0.1", each.port) for each in (known, silent)]
        found = asyncio.run(environment(servers))
    assert found["python"] == platform.python_version()
    assert found["processor"]
    assert found["versions"] == {servers[0].url: "9.1", servers[1].url: None}
    assert set(found) == {"python", "system", "processor", "cores", "commit", "versions"}
