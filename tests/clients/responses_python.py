# packages: openai
"""Responses: whole, streamed, items sent back, tools, and a parsed answer."""

import os

from openai import BadRequestError, OpenAI

client = OpenAI()
model = os.environ["MODEL"]
asked = {"model": model, "instructions": "Answer briefly.", "max_output_tokens": 16}
first = client.responses.create(**asked, input="Name a river.", temperature=0)
assert first.output_text and first.usage.output_tokens, first
again = [{"role": "user", "content": "Name a river."}, *first.output]
again.append({"role": "user", "content": [{"type": "input_text", "text": "And another?"}]})
events = list(client.responses.create(**asked, input=again, stream=True))
assert [event.sequence_number for event in events] == list(range(len(events)))
said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
assert said and events[-1].response.output_text == said
# This helper of the package knows no answer that is cut short.
short = {**asked, "max_output_tokens": 256, "temperature": 0, "extra_body": {"stop": ["."]}}
with client.responses.stream(**short, input="Name a river.") as stream:
    assert stream.get_final_response().output_text
try:
    client.responses.create(model=model, input="And?", previous_response_id=first.id)
except BadRequestError as refused:
    assert refused.param == "previous_response_id", refused
else:
    raise AssertionError("a stored response was found")
print("whole, stream, items")
