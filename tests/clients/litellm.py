# packages: litellm
"""Text, tools and structured output through its openai/ and hosted_vllm/ providers; Responses."""

import json
import os

import litellm
from pydantic import BaseModel, Field


class River(BaseModel):
    name: str = Field(max_length=20)
    long: bool


function = {"name": "length_of", "parameters": River.model_json_schema()}
tools = [{"type": "function", "function": function}]
named = {"type": "function", "function": {"name": "length_of"}}
for provider in ("openai", "hosted_vllm"):
    where = {
        "model": f"{provider}/{os.environ['MODEL']}",
        "api_base": os.environ["OPENAI_BASE_URL"],
    }
    question = {"role": "user", "content": "How long is the Nile?"}
    asked = {**where, "messages": [question], "max_tokens": 200, "temperature": 0}
    assert litellm.completion(**asked | {"max_tokens": 8}).choices[0].message.content
    chunks = litellm.completion(**asked | {"max_tokens": 8}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    for choice in ("required", named):
        message = litellm.completion(**asked, tools=tools, tool_choice=choice).choices[0].message
        (call,) = message.tool_calls
        River.model_validate_json(call.function.arguments)
        chunks = litellm.completion(**asked, tools=tools, tool_choice=choice, stream=True)
        built = litellm.stream_chunk_builder(list(chunks)).choices[0].message.tool_calls[0]
        assert built.function.arguments == call.function.arguments, built
    result = {"role": "tool", "tool_call_id": call.id, "content": "6650 km"}
    again = {"messages": [question, message, result], "max_tokens": 8}
    assert litellm.completion(**asked | again, tools=tools).choices[0].message.content
    text = litellm.completion(**asked, response_format=River).choices[0].message.content
    River.model_validate_json(text)
    text = litellm.completion(**asked, response_format={"type": "json_object"})
    assert isinstance(json.loads(text.choices[0].message.content), dict)
    assert litellm.responses(**where, input="Name a river.", max_output_tokens=16).output
    try:
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "a b" * 20_000}]})
    except litellm.ContextWindowExceededError as refused:
        assert "shorten it" in str(refused)
    else:
        raise AssertionError("a prompt that does not fit was answered")
print("openai/ and hosted_vllm/: completion, stream, tools, response_format, responses, overflow")
