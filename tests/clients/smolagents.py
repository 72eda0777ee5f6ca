# packages: smolagents[openai]
"""Text, tools streamed or not, structured output, and an agent whose every step is a call."""

import json
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def length_of(river: str) -> str:
    """The length of a river.

    Args:
        river: its name
    """
    return f"{river} is 6650 km long."


served = {"model_id": os.environ["MODEL"], "api_base": os.environ["OPENAI_BASE_URL"]}
model = OpenAIModel(**served, max_tokens=200, temperature=0)
short = OpenAIModel(**served, max_tokens=8)
asked = [{"role": "user", "content": [{"type": "text", "text": "How long is the Nile?"}]}]
assert short(asked).content
assert "".join(piece.content or "" for piece in short.generate_stream(asked))
(call,) = model(asked, tools_to_call_from=[length_of]).tool_calls
assert set(json.loads(call.function.arguments)) == {"river"}
pieces = [
    each
    for piece in model.generate_stream(asked, tools_to_call_from=[length_of])
    for each in piece.tool_calls or ()
]
assert "".join(each.function.arguments or "" for each in pieces) == call.function.arguments
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "long": {"type": "boolean"}},
    "required": ["name", "long"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "river", "schema": schema}}
assert set(json.loads(model(asked, response_format=form).content)) == {"name", "long"}
# The default model calls the same tool again instead of ending with final_answer.
agent = ToolCallingAgent(tools=[length_of], model=model, max_steps=1, verbosity_level=0)
agent.run("How long is the Nile?")
step = agent.memory.steps[1]
assert step.tool_calls and not step.error, step
print("text, stream, tools, response_format, a step of ToolCallingAgent")
