// Load: so many requests at a time for so many seconds, model after model.
//
// A closed loop: whoever has an answer asks again. A browser opens six connections to a server, so
// a few of them ask for several answers each, as a list of prompts.

panels.push({
  id: "load",
  title: "Load",
  lead: "A small load from this page: so many answers at a time, one model after another. Compare what the page measures with what the server's own metrics say of the same seconds.",
  mount(root, page) {
    new Load(root, page);
  },
});

const LOAD_CONNECTIONS = 4;
const LOAD_CONCURRENT = 16;
const LOAD_SECONDS = 60;
const LOAD_METRICS = ["requests_total", "generated_tokens_total", ...["time_to_first_token", "inter_token_latency"].flatMap((name) => [`${name}_seconds_sum`, `${name}_seconds_count`])];
const LOAD_PROMPTS = ["The storm came up at night, and", "My dear sister, I write to you from", "It is a truth that every gardener knows:", "When the gates were opened the people"];

class Load {
  constructor(root, page) {
    Object.assign(this, { root, page });
    const number = (act, value, most) => element("input", { type: "number", min: 1, max: most, value, "data-act": act });
    this.concurrent = number("load-concurrent", 8, LOAD_CONCURRENT);
    this.seconds = number("load-seconds", 12, LOAD_SECONDS);
    this.tokens = number("load-tokens", 32, 256);
    this.models = element("fieldset", {}, element("legend", {}, "Models, one after another"), page.models.map(({ id }) =>
      element("label", {}, element("input", { type: "checkbox", value: id, checked: true, "data-act": `load-model-${id}` }), id)));
    this.go = button("Start", "load-go", () => this.start(), { class: "main" });
    this.halt = button("Stop", "load-stop", () => {}, { disabled: true });
    this.table = element("tbody");
    const head = (caption, tip, metric) => element("th", { scope: "col", class: "number" }, element("span", { tabindex: 0, "data-tip": tip }, caption),
      metric ? [element("br"), ownPage(page, "metrics", `ropewalk_${metric}`, { class: "load-metric" })] : []);
    fill(root, this.models,
      element("p", { class: "note" }, "A few seconds on a busy machine say little: where two encodings differ by less than two runs of one do, they do not differ."),
      element("div", { class: "row" },
        field(`Answers at a time, up to ${LOAD_CONCURRENT}`, this.concurrent), field(`Seconds in all, up to ${LOAD_SECONDS}`, this.seconds), field("Tokens of each answer", this.tokens), this.go, this.halt),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Figures of the load" }, element("table", { class: "load-table" },
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Model"),
          head("Answers", "that were complete, counted by this page", "requests_total"),
          head("Tokens per second", "all that came, over the time from the first request to the last token", "generated_tokens_total"),
          head("First token: mean, median, 95 %", "from sending to the first token of each answer, measured by this page", "time_to_first_token_seconds"),
          head("Between tokens: mean, median, 95 %", "of one answer, measured by this page", "inter_token_latency_seconds"))),
        this.table)),
      element("p", { class: "note" }, "Each cell has what this page measured and, below, what the server counted in the same seconds, other clients included. The page measures more: its own work and the way between them. ",
        `Answers share ${LOAD_CONNECTIONS} connections. Prompts are of about 10 tokens.`));
  }

  start() {
    if (!valid(this.concurrent, this.seconds, this.tokens)) return null;
    return this.page.attempt(() => busily(this.root, this.halt, async (signal) => {
      const chosen = [...this.models.querySelectorAll("input:checked")].map((box) => box.value);
      if (!chosen.length) return this.page.say("No model is ticked; tick at least one.", true);
      const [concurrent, seconds, tokens] = [this.concurrent, this.seconds, this.tokens].map((input) => Number(input.value));
      const rows = chosen.map((id) => new LoadRow(this.page.models.find((model) => model.id === id)));
      fill(this.table, rows.map((row) => row.node));
      for (const row of rows) await row.run(this.page.api, { concurrent, tokens, ms: (1000 * seconds) / rows.length }, signal, () => compare(rows));
      this.page.say("Done.");
    }));
  }
}

class LoadRow {
  constructor(model) {
    Object.assign(this, { model, answers: 0, tokens: 0, firsts: [], gaps: [], rate: null });
    this.cells = ["Answers", "Tokens per second", "First token", "Between tokens"].map((label) => element("td", { class: "number", "data-label": label }, "–"));
    this.bar = element("span", { class: "bar" });
    this.node = element("tr", { "data-model": model.id }, element("th", { scope: "row" }, model.id, element("br"), element("span", { class: "note" }, model.encoding ?? "")), this.cells);
  }

  // compare: called when there are new figures.
  async run(api, { concurrent, tokens, ms }, signal, compare) {
    const before = await api.metrics(LOAD_METRICS, { signal });
    const began = api.now();
    const connections = Math.min(concurrent, LOAD_CONNECTIONS);
    const share = (nth) => Math.floor((concurrent + nth) / connections); // they add up to `concurrent`
    let last = began;
    const ask = async (nth) => {
      for (let round = 0; api.now() - began < ms && !signal.aborted; round++) {
        const sent = api.now();
        const prompt = Array.from({ length: share(nth) }, (_, i) => LOAD_PROMPTS[(nth + i + round) % LOAD_PROMPTS.length]);
        const seen = new Map();
        for await (const each of completion(api, { model: this.model.id, prompt, max_tokens: tokens, temperature: 0, ignore_eos: true }, signal)) {
          if (each.finish) this.answers += 1;
          if (each.id === undefined) continue;
          if (seen.has(each.index)) this.gaps.push(each.at - seen.get(each.index));
          else this.firsts.push(each.at - sent);
          seen.set(each.index, each.at);
          this.tokens += 1;
          last = Math.max(last, each.at);
        }
        this.rate = (1000 * this.tokens) / (last - began);
        this.show(null, 0);
        compare();
      }
    };
    await Promise.all(Array.from({ length: connections }, (_, nth) => ask(nth)));
    let grown;
    for (let tries = 0; tries < 10; tries++) {
      const all = growth(before, await api.metrics(LOAD_METRICS, { signal }));
      grown = (name, labels = {}) => all(name, { model_name: this.model.id, ...labels });
      if (grown("requests_total") >= this.answers) break;
      await new Promise((go) => setTimeout(go, 100)); // the server counts an answer just after it has sent it
    }
    this.show(grown, (last - began) / 1000);
    compare();
  }

  show(grown, seconds) {
    const server = (text) => (grown === null ? "" : element("div", { class: "load-server" }, text()));
    const ms = (values) => `${[mean(values), quantile(values, 0.5), quantile(values, 0.95)].map(format.number).join(", ")} ms`;
    const average = (name) => `mean ${format.number((1000 * grown(`${name}_sum`)) / grown(`${name}_count`))} ms`;
    fill(this.cells[0], format.count(this.answers), server(() => format.count(grown("requests_total"))));
    fill(this.cells[1], `${format.number(this.rate)} /s`, element("div", {}, this.bar), server(() => `${format.number(grown("generated_tokens_total") / seconds)} /s`));
    fill(this.cells[2], ms(this.firsts), server(() => average("time_to_first_token_seconds")));
    fill(this.cells[3], ms(this.gaps), server(() => average("inter_token_latency_seconds")));
  }
}

function compare(rows) {
  const most = Math.max(...rows.map(({ rate }) => rate ?? 0));
  for (const { bar, rate } of rows) bar.style.setProperty("--share", most ? (rate ?? 0) / most : 0);
}

// The value below which that share of the values lies.
function quantile(values, share) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? NaN;
}
