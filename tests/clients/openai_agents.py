# packages: openai-agents
"""With the Responses API, its default, through a tool of its own; and with chat completions."""

import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
asked = []


@function_tool
def length_of(river: str) -> str:
    """The length of a river."""
    asked.append(river)
    return "6650 km"


model = os.environ["MODEL"]
agent = Agent(
    name="rivers",
    instructions="Answer briefly.",
    model=model,
    tools=[length_of],
    tool_use_behavior="stop_on_first_tool",
    model_settings=ModelSettings(max_tokens=400, tool_choice="required", parallel_tool_calls=False),
)
assert Runner.run_sync(agent, "How long is the Nile?").final_output == "6650 km" and asked
plain = Agent(
    name="rivers",
    instructions="Answer briefly.",
    model=OpenAIChatCompletionsModel(model, AsyncOpenAI()),
    model_settings=ModelSettings(max_tokens=8),
)
assert Runner.run_sync(plain, "Name a river.").final_output
print("Responses with a tool, chat")
