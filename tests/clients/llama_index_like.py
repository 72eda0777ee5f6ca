# packages: llama-index-llms-openai-like
import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

options = {
    "model": os.environ["MODEL"],
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "max_tokens": 8,
}
chat = OpenAILike(is_chat_model=True, **options)
assert chat.chat([ChatMessage(role="user", content="Name a river.")]).message.content
assert "".join(piece.delta or "" for piece in chat.stream_complete("Name a river."))
assert OpenAILike(is_chat_model=False, **options).complete("A river is").text
print("chat, stream, completion")
