# packages: pydantic-ai-slim[openai]
import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings

agent = Agent(
    OpenAIChatModel(os.environ["MODEL"]),
    instructions="Answer briefly.",
    model_settings=ModelSettings(max_tokens=8),
)
first = agent.run_sync("Name a river.")
assert first.output
assert agent.run_sync("Another.", message_history=first.all_messages()).output
print("two turns")
