// packages: @continuedev/cli
// One turn, which comes with all of its tools; the default model may say or call what it likes.
import { spawnSync } from 'node:child_process'
import { writeFileSync } from 'node:fs'

writeFileSync('config.yaml', `
name: ropewalk
version: 1.0.0
schema: v1
models:
  - name: served
    provider: openai
    model: ${process.env.MODEL}
    apiBase: ${process.env.OPENAI_BASE_URL}
    apiKey: ${process.env.OPENAI_API_KEY}
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions: {contextLength: 8192, maxTokens: 128, temperature: 0}
`)
const home = `${process.cwd()}/home`
const run = spawnSync('node_modules/.bin/cn', ['--config', 'config.yaml', '-p', 'Say hi.'], {
  env: { ...process.env, HOME: home, CONTINUE_GLOBAL_DIR: home, CONTINUE_TELEMETRY_ENABLED: '0' },
  input: '',
  encoding: 'utf8',
  timeout: 120_000,
})
console.log(run.stdout, run.stderr)
if (run.status !== 0 || !run.stdout.trim()) throw new Error('the turn did not end')
console.log('a turn with tools')
