# packages: openai
"""Chat, stream, completion with echo and log-probabilities, list of models."""

import os

from openai import OpenAI

client = OpenAI()
model = os.environ["MODEL"]
asked = {"model": model, "messages": [{"role": "user", "content": "Name a river."}]}
assert model in [entry.id for entry in client.models.list()]
assert client.chat.completions.create(**asked, max_tokens=8).choices[0].message.content
chunks = client.chat.completions.create(**asked, max_completion_tokens=8, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
scored = client.completions.create(
    model=model, prompt="A river", echo=True, logprobs=1, max_tokens=1
).choices[0]
assert "".join(scored.logprobs.tokens) == scored.text
print("models, chat, stream, completion")
