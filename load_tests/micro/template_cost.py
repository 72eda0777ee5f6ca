"""How long a chat template takes in its process.

python -m ropewalk.load_tests.micro.template_cost
"""

import time
from statistics import median

from ropewalk.model.chat.template import ChatTemplate

CHATML = """{% for message in messages %}
    {% if loop.first %}{{ bos_token }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TIMES = 1000


def main() -> None:
    began = time.perf_counter()
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    print(f"a process: {time.perf_counter() - began:.3f} s until the template is compiled")
    for count in (2, 20, 200):
        messages = [{"role": "user", "content": "How deep is the Nile? " * 5}] * count
        seconds = []
        for _ in range(TIMES):
            began = time.perf_counter()
            template.render(messages, add_generation_prompt=True)
            seconds.append(time.perf_counter() - began)
        middle, late = median(seconds) * 1e3, sorted(seconds)[-TIMES // 100] * 1e3
        print(f"{count} messages: {middle:.3f} ms at the median, {late:.3f} at p99")


if __name__ == "__main__":
    main()
