// packages: ai @ai-sdk/openai-compatible
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const served = createOpenAICompatible({
  name: "ropewalk",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});
const asked = {
  model: served(process.env.MODEL),
  system: "Answer briefly.",
  prompt: "Name a river.",
  maxOutputTokens: 8,
};
if (!(await generateText(asked)).text) throw new Error("no text");
let text = "";
for await (const piece of streamText(asked).textStream) text += piece;
if (!text) throw new Error("no streamed text");
console.log("generateText, streamText");
