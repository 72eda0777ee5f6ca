// packages: zod openai
// Text, tools, parsed answers, and the loop that runs tools, by chat completions and by Responses.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const check = (holds, what) => {
  if (!holds) throw new Error(`no ${what}`);
};
const client = new OpenAI();
const { chat, responses } = client;
const River = z.object({ name: z.string().max(20), long: z.boolean() });
const messages = [{ role: "user", content: "How long is the Nile?" }];
const asked = { model: process.env.MODEL, messages, max_tokens: 200, temperature: 0 };
const short = { ...asked, max_tokens: 8 };
check((await chat.completions.create(short)).choices[0].message.content, "text");
let text = "";
for await (const chunk of await chat.completions.create({ ...short, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
check(text, "streamed text");

const tools = [zodFunction({ name: "length_of", parameters: z.object({ river: z.string().max(20) }) })];
const named = { type: "function", function: { name: "length_of" } };
for (const tool_choice of ["required", named]) {
  const { message } = (await chat.completions.parse({ ...asked, tools, tool_choice })).choices[0];
  const call = message.tool_calls[0];
  check(call.function.parsed_arguments.river, "call");
  const stream = chat.completions.stream({ ...asked, tools, tool_choice });
  const streamed = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
  check(streamed.function.arguments === call.function.arguments, "streamed call");
  const told = { role: "tool", tool_call_id: call.id, content: "6650 km" };
  const again = { ...short, tools, messages: [...messages, message, told] };
  check((await chat.completions.create(again)).choices[0].message.content, "text after a call");
}
const told = [];
const run = zodFunction({
  name: "length_of",
  parameters: z.object({ river: z.string().max(20) }),
  function: ({ river }) => told.push(river) && "6650 km",
});
await chat.completions.runTools({ ...asked, tools: [run], tool_choice: named }).done();
check(told.length, "tool run");

const response_format = zodResponseFormat(River, "river");
const parsed = await chat.completions.parse({ ...asked, response_format });
check(parsed.choices[0].message.parsed.name, "parsed answer");
const stream = chat.completions.stream({ ...asked, response_format });
check((await stream.finalChatCompletion()).choices[0].message.parsed.name, "parsed stream");
const format = zodTextFormat(River, "river");
const input = { model: asked.model, input: "Describe the Nile.", text: { format } };
check((await responses.parse({ ...input, max_output_tokens: 200 })).output_parsed.name, "response");
console.log("chat, stream, tools, runTools, parse, Responses");
