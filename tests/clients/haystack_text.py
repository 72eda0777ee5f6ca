# packages: haystack-ai
import os

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage

pieces = []
options = {
    "model": os.environ["MODEL"],
    "api_base_url": os.environ["OPENAI_BASE_URL"],
    "generation_kwargs": {"max_tokens": 8},
}
asked = [ChatMessage.from_system("Answer briefly."), ChatMessage.from_user("Name a river.")]
assert OpenAIChatGenerator(**options).run(asked)["replies"][0].text
OpenAIChatGenerator(streaming_callback=pieces.append, **options).run(asked)
assert "".join(piece.content for piece in pieces)
print("text, stream")
