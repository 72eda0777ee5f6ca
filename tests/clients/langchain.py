# packages: langchain-openai
import os

from langchain_openai import ChatOpenAI, OpenAI

chat = ChatOpenAI(model=os.environ["MODEL"], max_tokens=8)
assert chat.invoke([("system", "Answer briefly."), ("user", "Name a river.")]).content
assert "".join(piece.content for piece in chat.stream("Name a river."))
assert OpenAI(model=os.environ["MODEL"], max_tokens=8).invoke("A river is")
print("invoke, stream, completion")
