import asyncio

from ropewalk.load_tests.run.self_test import Speed, Stub, measure


def test_every_stream_of_the_stub_is_served_and_counted():
    async def run() -> Speed:
        server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await measure(port, seconds=1.0, rate=300.0)

    speed = asyncio.run(run())
    assert (speed.tokens, speed.failed) == (300, 0)
    assert speed.seconds > 1.98  # a stream's
    assert speed.cpu_s > 0


def speed(cpu_s: float = 1.0, lag_p99_s: float = 0.001, failed: int = 0) -> Speed:
    return Speed(20_000, failed, 12.0, 2000.0, cpu_s, lag_p99_s)


def test_what_is_enough():
    assert speed().enough
    assert not speed(cpu_s=11.0).enough
    assert not speed(lag_p99_s=0.006).enough
    assert not speed(failed=1).enough


def test_the_figures_in_words():
    text = str(speed(cpu_s=2.4))
    assert "20,000 tokens in 12.0 s, 2,000 a second" in text
    assert "lag p99: 1.00 ms" in text
    assert "20% of one core; 8,333 tokens/s with the whole core" in text
