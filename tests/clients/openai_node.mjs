// packages: openai
import OpenAI from "openai";

const client = new OpenAI();
const asked = {
  model: process.env.MODEL,
  messages: [{ role: "user", content: "Name a river." }],
  max_tokens: 8,
};
const answer = await client.chat.completions.create(asked);
if (!answer.choices[0].message.content) throw new Error("no text");
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
if (!text) throw new Error("no streamed text");
console.log("chat, stream");
