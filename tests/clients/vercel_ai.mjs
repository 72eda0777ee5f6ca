// packages: zod ai @ai-sdk/openai-compatible
// Text, objects, and tools, each streamed or not.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const check = (holds, what) => {
  if (!holds) throw new Error(`no ${what}`);
};
const served = createOpenAICompatible({
  name: "ropewalk",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  supportsStructuredOutputs: true,
});
const asked = {
  model: served(process.env.MODEL),
  prompt: "How long is the Nile?",
  maxOutputTokens: 200,
  temperature: 0,
  maxRetries: 0,
};
const short = { ...asked, system: "Answer briefly.", maxOutputTokens: 8 };
check((await generateText(short)).text, "text");
let text = "";
for await (const piece of streamText(short).textStream) text += piece;
check(text, "streamed text");

const River = z.object({ name: z.string().max(20), long: z.boolean() });
const output = Output.object({ schema: River });
check((await generateText({ ...asked, output })).output.name, "object");
check((await streamText({ ...asked, output }).output).name, "streamed object");
const choice = Output.choice({ options: ["long", "short"] });
check((await generateText({ ...asked, output: choice })).output, "choice");

const length_of = tool({
  description: "The length of a river.",
  inputSchema: z.object({ river: z.string().max(20) }),
  execute: async ({ river }) => `${river} is 6650 km long.`,
});
const called = { ...asked, tools: { length_of } };
for (const toolChoice of ["required", { type: "tool", toolName: "length_of" }]) {
  const { toolResults } = await generateText({ ...called, toolChoice });
  check(toolResults[0].output.endsWith("6650 km long."), "tool result");
  const streamed = await streamText({ ...called, toolChoice }).toolResults;
  check(streamed[0].input.river === toolResults[0].input.river, "streamed tool result");
}
// The second step says what it makes of the result.
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
const both = await generateText({ ...called, stopWhen: ({ steps }) => steps.length === 2, prepareStep });
check(both.steps.length === 2 && both.text, "second step");
console.log("text, objects, choice, tools, two steps, streams");
