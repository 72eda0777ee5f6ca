"""Serves a model briefly, to compare its answers over HTTP with those computed directly."""

import http.client
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from ropewalk.server.cli.serve import from_program
from ropewalk.server.config import server_config
from ropewalk.server.errors import CommandError
from ropewalk.server.http.in_thread import HOST, in_thread
from ropewalk.server.http.protocol import Server, uvicorn_config
from ropewalk.server.launch.build import application
from ropewalk.server.metrics.exporter import Metrics

NAME = "model"
DRAIN_S = 5.0


def served_logprobs(
    folder: Path,
    dtype: str,
    context: int,
    prompts: Sequence[Sequence[int]],
    *,
    trusted: Collection[str] = (),
) -> list[list[float]]:
    """The log-probability of every token of each prompt but its first. Raises CommandError.

    trusted: encodings outside this project whose code may run.
    """
    # As for `ropewalk serve` with these values; what variables and files say does not count.
    options = {"dtype": dtype, "max_model_len": context, "kv_memory": "256M"}
    told = {"models": [f"{NAME}={folder}"], "trust_encoding": tuple(trusted)}
    config = server_config(from_program(options | told))
    app = application(config, Metrics(), lambda: None).app
    made = uvicorn_config(app, host=HOST, port=0, log_config=None, access_log=False)
    with in_thread(Server(made, app.state.drain, DRAIN_S)) as port:
        return [_asked(port, prompt) for prompt in prompts]


def _asked(port: int, prompt: Sequence[int]) -> list[float]:
    """The prompt's log-probabilities, from `echo` and `logprobs`."""
    body = {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": 0,
    }
    connection = http.client.HTTPConnection(HOST, port)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"the server for the evaluation gave no answer ({error!r})") from error
    finally:
        connection.close()
    if response.status != 200:
        raise CommandError(
            f"the server for the evaluation answered {response.status}: {text.decode()[:300]}"
        )
    found: list[float] = json.loads(text)["choices"][0]["logprobs"]["token_logprobs"]
    return found[1 : len(prompt)]
