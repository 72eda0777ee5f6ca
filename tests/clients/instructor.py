# packages: instructor
"""Each mode that holds the answer to the schema, and a partial answer streamed."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class River(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    long: bool


asked = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "Describe the Nile."}],
    "response_model": River,
    "max_tokens": 200,
    "max_retries": 0,
    "temperature": 0,
}
modes = "TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"
for mode in modes:
    client = instructor.from_openai(OpenAI(), mode=instructor.Mode[mode])
    assert isinstance(client.create(**asked), River), mode
    if mode != "RESPONSES_TOOLS":
        *_, last = client.create_partial(**asked)
        River.model_validate(last.model_dump())
print(f"{', '.join(modes)}; JSON and MD_JSON send no schema, which this model misses")
