# packages: openai-agents
"""With its chat completions model: its default is the Responses API."""

import os

from agents import Agent, ModelSettings, Runner, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
agent = Agent(
    name="rivers",
    instructions="Answer briefly.",
    model=os.environ["MODEL"],
    model_settings=ModelSettings(max_tokens=8),
)
assert Runner.run_sync(agent, "Name a river.").final_output
print("text")
