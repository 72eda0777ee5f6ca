"""Stands in for `ropewalk serve`: no model, the routes that starting and flushing need.

Prints its arguments and requests as lines of JSON on standard output. A model whose source contains
"bad" ends it at once, "short" gets half of the context, and "stubborn" ignores an interrupt. The
default context is 50.
"""

import argparse
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-model-len", type=int, default=50)
    for flag in ("--kv-memory", "--request-timeout", "--threads"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--encoding-option")
    flags, _ = parser.parse_known_args()
    say(pid=os.getpid(), environ=sorted(os.environ), argv=sys.argv[1:], **vars(flags))
    sources = dict(model.split("=") for model in flags.models)
    if any("bad" in source for source in sources.values()):
        sys.exit("ropewalk: no such model")
    if any("stubborn" in source for source in sources.values()):
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            say(asked=f"{self.command} {self.path}")
            data = [
                {
                    "id": name,
                    "vocab_size": 100,
                    "max_model_len": flags.max_model_len // (2 if "short" in source else 1),
                }
                for name, source in sources.items()
            ]
            content = json.dumps({"object": "list", "data": data}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *_) -> None:
            pass

    HTTPServer((flags.host, flags.port), Handler).serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
