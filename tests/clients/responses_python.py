# packages: openai
"""Responses: text, streamed, items sent back, a parsed answer, and tools."""

import json
import os

from openai import BadRequestError, OpenAI
from pydantic import BaseModel


class River(BaseModel):
    name: str
    long: bool


client = OpenAI()
model = os.environ["MODEL"]
asked = {"model": model, "instructions": "Answer briefly.", "max_output_tokens": 16}
first = client.responses.create(**asked, input="Name a river.", temperature=0)
assert first.output_text and first.usage.output_tokens, first
counted = client.responses.input_tokens.count(
    model=model, instructions=asked["instructions"], input="Name a river."
)
assert counted.input_tokens == first.usage.input_tokens, (counted, first.usage)
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
parsed = client.responses.parse(
    model=model, input="Name a river, as JSON.", text_format=River, max_output_tokens=400
)
assert isinstance(parsed.output_parsed, River), parsed
tool = {
    "type": "function",
    "name": "length_of",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"river": {"enum": ["Nile", "Rhine"]}},
        "required": ["river"],
        "additionalProperties": False,
    },
}
called = {"model": model, "tools": [tool, {"type": "web_search"}], "tool_choice": "required"}
called["parallel_tool_calls"] = False
question = {"role": "user", "content": "How long is the Nile?"}
call = client.responses.create(**called, input=[question]).output[-1]
assert json.loads(call.arguments)["river"] in ("Nile", "Rhine"), call
events = list(client.responses.create(**called, input=[question], stream=True))
pieces = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
assert "".join(pieces) == events[-1].response.output[-1].arguments, events[-1]
result = {"type": "function_call_output", "call_id": call.call_id, "output": "6650 km"}
told = client.responses.create(**asked, tools=[tool], input=[question, call, result])
assert told.output, told
try:
    client.responses.create(model=model, input="And?", previous_response_id=first.id)
except BadRequestError as refused:
    assert refused.param == "previous_response_id", refused
else:
    raise AssertionError("a stored response was found")
print("text, stream, items, parsed, tools")
