# packages: dspy
"""Text, and a signature. Its JSONAdapter sends no schema to models that it does not know."""

import os

import dspy

asked = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "cache": False,
}
assert dspy.LM(**asked, max_tokens=8)("Name a river.")[0]
dspy.configure(lm=dspy.LM(**asked, max_tokens=200, temperature=0), adapter=dspy.JSONAdapter())
said = dspy.Predict("river -> country")(river="Nile")
assert said.country, said
print("text, JSONAdapter (sends no schema to a model that it does not know)")
