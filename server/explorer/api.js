// The server's public routes.

class ApiError extends Error {
  // status: 0 where there was no answer. error: the object `error` of the server's answer.
  constructor(status, error) {
    super(error.message);
    Object.assign(this, { status, code: error.code ?? null, param: error.param ?? null });
  }
}

// What a request throws when there is no answer, or no end of one.
function unanswered(error) {
  if (error instanceof TypeError) return new ApiError(0, { message: "the server does not answer; is it still running?" });
  return error;
}

const KEY = "ropewalk-key"; // in sessionStorage: for this tab only

// Below which the server is: the page's own path, whatever a proxy puts before it.
const ROOT = location.protocol === "file:" ? "" : location.pathname.replace(/\/*$/, "/");

// Asks the server. ask: resolves when a key is in place; called when the server wants one.
class Server {
  constructor(ask) {
    this.ask = ask;
  }

  // Milliseconds, from any beginning.
  now() {
    return performance.now();
  }

  // The text of an answer. Throws ApiError. keep: text → what is wanted of it.
  async answer(method, path, body, { signal, keep = (text) => text } = {}) {
    const answer = await this.#fetched(method, path, body, signal);
    return keep(await answer.text().catch((error) => { throw unanswered(error); }));
  }

  // The data of server-sent events: {at: milliseconds of now(), data: text}.
  async *events(method, path, body, { signal } = {}) {
    const own = new AbortController();
    signal?.addEventListener("abort", () => own.abort(signal.reason), { once: true });
    signal?.throwIfAborted();
    try {
      const answer = await this.#fetched(method, path, body, own.signal);
      for await (const data of dataOf(answer.body)) yield { at: this.now(), data };
    } finally {
      own.abort();
    }
  }

  async #fetched(method, path, body, signal) {
    for (;;) {
      const headers = {};
      const key = sessionStorage.getItem(KEY);
      if (key) headers.authorization = `Bearer ${key}`;
      if (body !== undefined) headers["content-type"] = "application/json";
      const sent = body === undefined ? undefined : JSON.stringify(body);
      const answer = await fetch(ROOT + path, { method, headers, body: sent, signal, cache: "no-store", redirect: "error" })
        .catch((error) => { throw unanswered(error); });
      if (answer.ok) return answer;
      const error = await refusal(answer);
      if (error.status !== 401) throw error;
      if (sessionStorage.getItem(KEY) === key) await this.ask(error.message);
    }
  }
}

// Resolves when nothing is pressed. What is drawn of an answer may stand where that was pressed, and a
// press that ends on another node than it began on is lost.
let released = Promise.resolve();
addEventListener("pointerdown", ({ button, target }) => {
  if (button !== 0 || target.closest("select")) return; // whose list may take the release
  released = new Promise((go) => {
    for (const end of ["pointerup", "pointercancel", "contextmenu"]) addEventListener(end, () => setTimeout(go), { capture: true, once: true });
  });
}, true);

// What panels ask. source: a Server, or a Recorder or a Replay (visit.js).
class Api {
  constructor(source) {
    this.source = source;
  }

  now() {
    return this.source.now();
  }

  // Answers are parsed JSON; what the server refuses is thrown as an ApiError. options: {signal}.
  get(path, options) {
    return this.#answer("GET", path, undefined, options);
  }

  post(path, body, options) {
    return this.#answer("POST", path, body, options);
  }

  remove(path, options) {
    return this.#answer("DELETE", path, undefined, options);
  }

  async #answer(...asked) {
    return JSON.parse(await this.source.answer(...asked).finally(() => released));
  }

  // The lines of /metrics with samples of these names, without `ropewalk_`.
  metrics(names, options) {
    const wanted = new Set(names.map((name) => `ropewalk_${name}`));
    const keep = (text) => text.split("\n").filter((line) => wanted.has(/^\w*/.exec(line)[0])).join("\n");
    return this.source.answer("GET", "metrics", undefined, { ...options, keep });
  }

  // Server-sent events as they come: {at: milliseconds of now(), data: parsed JSON}. Without a body
  // it is a GET. Ends with the stream, or when the signal is aborted; leaving the loop closes it.
  async *stream(path, body, options) {
    const method = body === undefined ? "GET" : "POST";
    for await (const { at, data } of this.source.events(method, path, body, options)) {
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found?.error) throw new ApiError(200, errorIn(found) ?? { message: "the server ended this with an error; see its log" });
      yield { at, data: found };
    }
  }
}

async function refusal(answer) {
  const message = `the server answered ${answer.status}; see its log`;
  return new ApiError(answer.status, errorIn(await answer.json().catch(() => null)) ?? { message });
}

// The error in an answer; null where there is none of the server's form, as of a proxy in front of it.
const errorIn = (found) => (typeof found?.error?.message === "string" && found.error.message ? found.error : null);

// The data of server-sent events. Comments and other fields are left out.
async function* dataOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => { throw unanswered(error); });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// A streamed completion: a token {index, at, id, text, logprob, alternatives} for each that comes,
// alternatives being [text, logprob] with the likeliest first; then {index, finish} for each
// choice, and {usage} of the whole.
async function* completion(api, body, signal) {
  const sent = { ...body, stream: true, return_token_ids: true, stream_options: { include_usage: true } };
  for await (const { at, data } of api.stream("v1/completions", sent, { signal })) {
    for (const { index, text, logprobs, token_ids: ids, finish_reason: finish } of data.choices) {
      for (const [nth, id] of (ids ?? []).entries()) {
        yield {
          index, at, id,
          text: logprobs ? logprobs.tokens[nth] ?? "" : nth === 0 ? text : "",
          logprob: logprobs?.token_logprobs[nth] ?? null,
          alternatives: Object.entries(logprobs?.top_logprobs?.[nth] ?? {}).sort((one, other) => other[1] - one[1]),
        };
      }
      if (finish) yield { index, finish };
    }
    if (data.usage) yield { usage: data.usage };
  }
}

// The samples of Prometheus' text: {name, labels, value}. Histograms' buckets are left out.
function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const [, name, inside, value] = /^(\w+)(?:\{(.*)\})? (\S+)/.exec(line) ?? [];
    if (name === undefined || name.endsWith("_bucket")) continue;
    const labels = Object.fromEntries([...(inside ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, each]) => [key, each]));
    found.push({ name, labels, value: Number(value) });
  }
  return found;
}

// What counters grew by between two texts of /metrics: grown(name, labels) sums the samples of that
// name, with `ropewalk_` before it, that have these labels.
function growth(before, after) {
  const sum = (all, name, labels) =>
    all.filter((each) => each.name === `ropewalk_${name}` && Object.entries(labels).every(([key, value]) => each.labels[key] === value))
      .reduce((total, each) => total + each.value, 0);
  const [first, last] = [samples(before), samples(after)];
  return (name, labels) => sum(last, name, labels) - sum(first, name, labels);
}
