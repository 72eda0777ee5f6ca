// packages: opencode-ai
// One turn, which comes with all of its tools: these take nearly the whole context of the default
// model, so its own long instructions make way. The model may say or call what it likes.
import { spawnSync } from 'node:child_process'
import { writeFileSync } from 'node:fs'

const { MODEL, OPENAI_BASE_URL, OPENAI_API_KEY } = process.env
writeFileSync('opencode.json', JSON.stringify({
  enabled_providers: ['ropewalk'],
  provider: {
    ropewalk: {
      npm: '@ai-sdk/openai-compatible',
      options: { baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY },
      models: { [MODEL]: { limit: { context: 8192, output: 128 } } },
    },
  },
  model: `ropewalk/${MODEL}`,
  agent: { build: { prompt: 'Answer briefly.', temperature: 0 }, title: { disable: true } },
  autoupdate: false,
  share: 'disabled',
}))
const home = `${process.cwd()}/home`
const run = spawnSync('node_modules/.bin/opencode', ['run', '--format', 'json', 'Say hi.'], {
  env: {
    ...process.env,
    HOME: home,
    XDG_CONFIG_HOME: home,
    XDG_DATA_HOME: home,
    XDG_CACHE_HOME: home,
    XDG_STATE_HOME: home,
    OPENCODE_DISABLE_MODELS_FETCH: '1',
  },
  input: '',
  encoding: 'utf8',
  timeout: 240_000,
})
console.log(run.stdout, run.stderr)
const events = run.stdout.trim().split('\n').map((line) => JSON.parse(line))
const done = events.find((event) => event.type === 'step_finish')
if (run.status !== 0 || !done || !done.part.tokens.output) throw new Error('the turn did not end')
console.log('a turn with tools')
