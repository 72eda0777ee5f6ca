# packages: anthropic
"""Messages: whole, streamed, blocks sent back, and tokens counted."""

import os

from anthropic import Anthropic, BadRequestError

client = Anthropic(
    base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"),
    api_key=os.environ["OPENAI_API_KEY"],
)
model = os.environ["MODEL"]
user = {"role": "user", "content": "Name a river."}
asked = {"model": model, "system": "Answer briefly.", "max_tokens": 16}
first = client.messages.create(**asked, messages=[user], stop_sequences=["xyz"])
assert first.content[0].text and first.usage.output_tokens, first
messages = [user, {"role": "assistant", "content": first.content}, user]
with client.messages.stream(**asked, messages=messages) as stream:
    said = "".join(stream.text_stream)
    final = stream.get_final_message()
assert said and final.content[0].text == said and final.stop_reason, final
counted = client.messages.count_tokens(model=model, system="Answer briefly.", messages=[user])
used = first.usage
assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens, (counted, used)
# A limit beyond the context is the context.
longest = {**asked, "max_tokens": 10**6, "stop_sequences": ["."]}
with client.messages.stream(**longest, messages=[user]) as stream:
    assert stream.get_final_message().stop_reason == "stop_sequence"
try:
    client.messages.create(**asked, messages=[user], extra_body={"temperature": 3})
except BadRequestError as refused:
    assert refused.body["error"]["type"] == "invalid_request_error", refused.body
else:
    raise AssertionError("a temperature of 3 was accepted")
print("whole, stream, tokens counted")
