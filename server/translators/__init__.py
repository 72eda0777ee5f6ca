"""Other APIs in front of chat: OpenAI's Responses and Anthropic's Messages, there and back."""
