// packages: @anthropic-ai/claude-code
// One turn with one tool: with all of them its prompt is longer than the default model's context.
import { spawnSync } from 'node:child_process'

const ask = ['-p', 'Say hi.', '--system-prompt', 'Answer briefly.', '--tools', 'Read', '--output-format', 'json']
const run = spawnSync('node_modules/.bin/claude', ask, {
  env: {
    ...process.env,
    HOME: process.cwd(),
    ANTHROPIC_BASE_URL: process.env.OPENAI_BASE_URL.replace(/\/v1$/, ''),
    ANTHROPIC_API_KEY: process.env.OPENAI_API_KEY,
    ANTHROPIC_MODEL: process.env.MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1',
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: '128',
  },
  input: '',
  encoding: 'utf8',
})
console.log(run.stdout, run.stderr)
const said = JSON.parse(run.stdout)
// A small model may ramble on to the limit, which this client takes for a failure.
const cut = String(said.result).includes('output token maximum')
if ((said.is_error && !cut) || !said.usage.output_tokens) throw new Error('the turn did not end')
console.log('a turn with a tool')
