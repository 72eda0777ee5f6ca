// packages: autocannon
import autocannon from "autocannon";

const result = await autocannon({
  url: `${process.env.OPENAI_BASE_URL}/completions`,
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify({ model: process.env.MODEL, prompt: "A river", max_tokens: 4 }),
  connections: 2,
  amount: 10,
});
if (result["2xx"] !== 10) throw new Error(`${result["2xx"]} of 10 answered with 200`);
console.log("10 requests");
