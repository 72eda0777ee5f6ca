"""How long a chat template takes in its process: `python -m tests.model.tokenizers.time_chat`."""

import statistics
import time

from ropewalk.model.chat.template import ChatTemplate
from tests.model.tokenizers.test_chat import CHATML


def main() -> None:
    begun = time.perf_counter()
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    print(f"a process: {time.perf_counter() - begun:.3f} s until the template is compiled")
    for count in (2, 20, 200):
        messages = [{"role": "user", "content": "How deep is the Nile? " * 5}] * count
        seconds = []
        for _ in range(1000):
            begun = time.perf_counter()
            template.render(messages, add_generation_prompt=True)
            seconds.append(time.perf_counter() - begun)
        median, late = statistics.median(seconds), sorted(seconds)[-10]
        print(f"{count} messages: {median * 1e3:.3f} ms at the median, {late * 1e3:.3f} at p99")


if __name__ == "__main__":
    main()
