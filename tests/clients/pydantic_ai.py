# packages: pydantic-ai-slim[openai]
"""Text, a tool, and typed output in its three ways, by chat completions and by Responses."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.settings import ModelSettings


class River(BaseModel):
    name: str = Field(max_length=20)
    long: bool


def length_of(river: str) -> River:
    """The length of a river."""
    return River(name=river[:20], long=True)


short = ModelSettings(max_tokens=8)
settings = ModelSettings(max_tokens=200, temperature=0)
for kind in OpenAIChatModel, OpenAIResponsesModel:
    model = kind(os.environ["MODEL"])
    agent = Agent(model, instructions="Answer briefly.", model_settings=short)
    first = agent.run_sync("Name a river.")
    assert agent.run_sync("Another.", message_history=first.all_messages()).output
    # A type as the tool, whose arguments are the output; a function as the tool, whose result is.
    for wanted in River, length_of, NativeOutput(River):
        agent = Agent(model, output_type=wanted, model_settings=settings, retries=0)
        assert isinstance(agent.run_sync("Describe the Nile.").output, River)
print("text, tools, output by tool and native; prompted sends no schema, which this model misses")
