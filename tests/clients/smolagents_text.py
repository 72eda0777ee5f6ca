# packages: smolagents[openai]
import os

from smolagents import OpenAIModel

model = OpenAIModel(
    model_id=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], max_tokens=8
)
asked = [{"role": "user", "content": [{"type": "text", "text": "Name a river."}]}]
assert model(asked).content
assert "".join(piece.content or "" for piece in model.generate_stream(asked))
print("text, stream")
