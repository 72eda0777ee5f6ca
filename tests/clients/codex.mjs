// packages: @openai/codex
// One turn, which comes with all of its tools; the default model may say or call what it likes.
import { spawnSync } from 'node:child_process'
import { mkdirSync, writeFileSync } from 'node:fs'

mkdirSync('home', { recursive: true })
writeFileSync('home/config.toml', `
model = "${process.env.MODEL}"
model_provider = "ropewalk"
[model_providers.ropewalk]
name = "Ropewalk"
base_url = "${process.env.OPENAI_BASE_URL}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`)
const run = spawnSync('node_modules/.bin/codex', ['exec', '--json', '--skip-git-repo-check', 'Say hi.'], {
  env: { ...process.env, CODEX_HOME: `${process.cwd()}/home` },
  input: '',
  encoding: 'utf8',
})
const events = run.stdout.trim().split('\n').map((line) => JSON.parse(line))
console.log(run.stdout, run.stderr)
const done = events.find((event) => event.type === 'turn.completed')
if (run.status !== 0 || !done || !done.usage.output_tokens) throw new Error('the turn did not end')
console.log('a turn with tools')
