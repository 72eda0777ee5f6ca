# packages: litellm
"""Through its openai/ and its hosted_vllm/ provider."""

import os

import litellm

for provider in ("openai", "hosted_vllm"):
    asked = {
        "model": f"{provider}/{os.environ['MODEL']}",
        "api_base": os.environ["OPENAI_BASE_URL"],
        "messages": [{"role": "user", "content": "Name a river."}],
        "max_tokens": 8,
    }
    assert litellm.completion(**asked).choices[0].message.content
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print("openai/ and hosted_vllm/: completion, stream")
