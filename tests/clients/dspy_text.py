# packages: dspy
import os

import dspy

asked = dspy.LM(
    f"openai/{os.environ['MODEL']}",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=8,
    cache=False,
)
assert asked("Name a river.")[0]
print("text")
