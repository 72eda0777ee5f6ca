// Talk: a completion or a chat, each token a cell.
//
// Every run is a row: what was sent, then what came. A run that continues from a token of another
// sends that token's ids and all before it, so it begins in blocks that the cache has already. Not so
// of an encoder-decoder: what is sent is read by the encoder, and the answer is another text.

panels.push({
  id: "talk",
  title: "Talk",
  lead: "Write something and watch the answer come token by token: the bar under a token is how likely it was. Pick any token to see what else could have come, and to go on from there another way.",
  mount(root, page) {
    new Talk(root, page);
  },
});

const TALK_ALTERNATIVES = 5;

class Talk {
  constructor(root, page) {
    Object.assign(this, { root, page });
    this.runs = [];
    this.chosen = null; // {run, index}
    this.prompt = element("textarea", { rows: 3, "data-act": "talk-prompt", id: "talk-prompt", spellcheck: "false" });
    this.prompt.value = "In the morning the old captain came down to the harbour, and";
    this.form = select("talk-form", [["text", "Completion"], ["chat", "Chat"]]);
    this.tokens = element("input", { type: "number", min: 1, max: 512, value: 48, "data-act": "talk-tokens" });
    this.temperature = element("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0.8, "data-act": "talk-temperature" });
    this.seed = element("input", { type: "number", min: 0, max: 999999, value: 1, "data-act": "talk-seed" });
    this.go = button("Write", "talk-go", () => this.begin(), { class: "main" });
    this.halt = button("Stop", "talk-stop", () => {}, { disabled: true });
    this.rows = element("div", { class: "talk-runs" });
    this.detail = element("aside", { class: "talk-detail", "aria-live": "polite", "aria-label": "The token under the cursor" });
    fill(root,
      field("Your text: continued, or in a chat answered", this.prompt, { class: "field wide" }),
      element("div", { class: "row" }, field("Asked as", this.form), field("At most, tokens", this.tokens), field("Temperature", this.temperature), field("Seed", this.seed), this.go, this.halt),
      element("div", { class: "talk-body" }, this.rows, this.detail),
      element("p", { class: "note" }, "In tokens, · is a space and ⏎ the end of a line. What stands in <…>, such as <s>, is a mark that the model's form of a text has; it is sent with yours."),
    );
    this.describe();
    const offer = () => {
      const { chat = true } = page.model ?? {}; // not known of a model that is not loaded
      const option = this.form.querySelector('[value="chat"]');
      option.disabled = !chat;
      fill(option, chat ? "Chat" : "Chat: this model has no chat template");
      if (!chat) this.form.value = "text";
    };
    page.on("model", offer);
    offer();
  }

  begin() {
    if (!valid(this.tokens, this.temperature, this.seed)) return null;
    return this.attempt(async (signal) => {
      const model = this.page.model.id;
      const text = this.prompt.value;
      const asked = this.form.value === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
      const found = await this.page.api.post("tokenize", { model, ...asked, return_token_strs: true }, { signal });
      await this.write(model, found.tokens, found.token_strs, null, signal);
    });
  }

  attempt(work) {
    return this.page.attempt(() => busily(this.root, this.halt, work));
  }

  // parent: the run that this one continues, from its token ids.length - 1 on.
  async write(model, ids, texts, parent, signal) {
    const run = { model, ids: [...ids], texts: [...texts], sent: ids.length, tokens: [], parent, usage: null, finish: null, broke: "the stream ended before its time" };
    run.number = this.runs.push(run);
    run.node = this.row(run);
    this.rows.prepend(run.node.whole);
    const body = {
      model, prompt: ids, max_tokens: Number(this.tokens.value), temperature: Number(this.temperature.value),
      seed: Number(this.seed.value), logprobs: TALK_ALTERNATIVES,
    };
    let before = this.page.api.now();
    try {
      for await (const each of completion(this.page.api, body, signal)) {
        if (each.usage) run.usage = each.usage;
        else if (each.finish) run.finish = each.finish;
        else {
          this.add(run, { ...each, ms: each.at - before });
          before = each.at;
        }
      }
    } catch (error) {
      run.broke = error.name === "AbortError" ? "you stopped it" : "the stream broke";
      throw error;
    } finally {
      if (run.tokens.length || run.finish) this.sum(run);
      else {
        this.runs.pop(); // refused, or stopped before anything came
        run.node.whole.remove();
      }
      if (run.tokens.length && (this.chosen === null || this.chosen.run !== run)) this.choose(run, run.ids.length - 1, false);
    }
  }

  row(run) {
    const origin = run.parent === null ? `${run.model}` : `${run.model}, on from token ${format.count(run.sent - 1)} of run ${run.parent.number}`;
    const cells = element("div", { class: "talk-cells", role: "group", "aria-label": `Tokens of run ${run.number}: arrow keys move` });
    const facts = element("p", { class: "note" }, "…");
    const whole = element("article", { class: "talk-run" }, element("h2", {}, element("span", { class: "number" }, `${run.number}`), origin), cells, facts);
    cells.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const at = [...cells.children].indexOf(document.activeElement);
      const next = cells.children[Math.min(Math.max(at + step, 0), cells.children.length - 1)];
      next.focus();
      next.click();
    });
    const node = { whole, cells, facts };
    run.texts.forEach((text, index) => cells.append(this.cell(run, index, text, null)));
    return node;
  }

  cell(run, index, text, token) {
    const shares = token === null ? "you sent it" : [
      `${format.percent(Math.exp(token.logprob))} likely, ${format.seconds(token.ms / 1000)} after the one before`,
      ...token.alternatives.map(([other, logprob]) => `${visible(other)}  ${format.percent(Math.exp(logprob))}`),
    ].join("\n");
    const cell = button(visible(text), `talk-cell-${run.number}-${index}`, () => this.choose(run, index, true), {
      class: token === null ? "cell sent" : "cell", tabindex: index === 0 ? 0 : -1, "data-tip": `token ${index}: ${shares}`,
      "data-index": index,
    });
    if (token !== null) cell.style.setProperty("--share", Math.exp(token.logprob));
    if (text.includes("\n")) cell.classList.add("ends-line");
    return cell;
  }

  add(run, token) {
    if (!token.text && token.logprob === null) return; // what ended the answer has no text
    run.tokens.push(token);
    run.ids.push(token.id);
    run.texts.push(token.text);
    run.node.cells.append(this.cell(run, run.ids.length - 1, token.text, token));
  }

  sum(run) {
    const times = run.tokens.slice(1).map(({ ms }) => ms).sort((one, other) => one - other);
    const middle = times[times.length >> 1];
    const cached = run.usage?.prompt_tokens_details?.cached_tokens ?? null;
    for (const cell of run.node.cells.children) cell.classList.toggle("shared", Number(cell.dataset.index) < (cached ?? 0));
    fill(run.node.facts,
      figure(many(run.tokens.length, "token"), "counted from the token_ids of the stream of /v1/completions"), " came, the first after ",
      figure(run.tokens.length ? format.seconds(run.tokens[0].ms / 1000) : "–", "measured by this page, from sending the request"),
      ", the others ", figure(middle === undefined ? "–" : format.seconds(middle / 1000), "median time between two tokens, measured by this page"), " apart",
      ...(cached ? [". ", figure(`${cached} of ${run.usage.prompt_tokens} tokens sent`, "/v1/completions: usage.prompt_tokens_details.cached_tokens"), " were in the cache already (shaded): nothing of them was computed again"] : []),
      run.finish === "length" ? "." : run.finish === "stop" ? ", and then the model ended its answer." : run.finish ? `, and it ended by ${run.finish}.` : `, and then ${run.broke}.`,
    );
  }

  choose(run, index, byHand) {
    this.chosen = { run, index };
    for (const cell of this.rows.querySelectorAll(".cell[aria-pressed]")) cell.removeAttribute("aria-pressed");
    for (const cell of run.node.cells.children) cell.tabIndex = -1;
    const cell = run.node.cells.children[index];
    cell.tabIndex = 0;
    cell.setAttribute("aria-pressed", "true");
    const ids = this.isTwo(run) ? run.ids.slice(0, run.sent) : run.ids; // Position looks at what the encoder reads
    this.page.point(index < ids.length ? { model: run.model, ids, index } : null);
    this.describe();
  }

  isTwo({ model }) {
    return this.page.models.find(({ id }) => id === model)?.encoder_decoder ?? false;
  }

  describe() {
    if (this.chosen === null) {
      fill(this.detail, element("p", { class: "note" }, "No token yet. Pick one, and Position will take it apart, too."));
      return;
    }
    const { run, index } = this.chosen;
    const token = run.tokens[index - run.sent] ?? null, isTwo = this.isTwo(run);
    const rows = token === null ? [] : token.alternatives.map(([text, logprob], rank) => {
      const share = Math.exp(logprob);
      const bar = element("span", { class: "bar" });
      bar.style.setProperty("--share", share);
      const take = button(visible(text), `talk-take-${rank}`, () => this.take(rank), { class: "token", title: `Go on with this one instead` });
      return element("tr", { class: text === token.text ? "came" : null }, element("td", {}, isTwo ? element("span", { class: "token" }, visible(text)) : take), element("td", {}, bar), element("td", { class: "number" }, figure(format.percent(share), "/v1/completions: logprobs.top_logprobs, as e to that power")));
    });
    const shown = [
      element("h2", {}, "Token ", `${index}`, " ", element("span", { class: "token" }, visible(run.texts[index]))),
      element("dl", {},
        fact("id", figure(String(run.ids[index]), "/v1/completions: token_ids, or /tokenize for what you sent")),
        ...(token === null ? [] : [
          fact("likely", figure(format.percent(Math.exp(token.logprob)), "/v1/completions: logprobs.token_logprobs, as e to that power")),
          fact(index === run.sent ? "after sending" : "after the one before", figure(format.seconds(token.ms / 1000), "measured by this page when the event came")),
        ])),
      token === null ? element("p", { class: "note" }, "You sent this one.") : element("table", { class: "talk-others" }, element("caption", {}, "What could have come here"), rows),
      isTwo ? null : element("p", {}, button("Continue from here", "talk-continue", () => this.onward(), { class: "main" })),
      element("p", { class: "note" }, isTwo ? "This model is an encoder-decoder: its encoder reads whatever is sent as a whole, and an answer is a text of its own. So nothing can be continued from a token."
        : "A run that continues shares the blocks before this token and computes only what is new: earlier keys do not depend on later tokens."),
    ];
    refill(this.detail, shown);
  }

  onward() {
    const { run, index } = this.chosen;
    return this.attempt((signal) => this.write(run.model, run.ids.slice(0, index + 1), run.texts.slice(0, index + 1), run, signal));
  }

  // The alternatives come as text; the same question again, with ids for names, says which has that
  // probability.
  take(rank) {
    const { run, index } = this.chosen, came = run.tokens[index - run.sent], [text, logprob] = came.alternatives[rank];
    return this.attempt(async (signal) => {
      const before = run.ids.slice(0, index);
      const go = (id) => this.write(run.model, [...before, id], [...run.texts.slice(0, index), text], run, signal);
      if (text === came.text) return go(came.id);
      const found = await this.page.api.post("v1/completions", { model: run.model, prompt: before, max_tokens: 1, temperature: 0, logprobs: TALK_ALTERNATIVES, return_tokens_as_token_ids: true }, { signal });
      const apart = ([, other]) => Math.abs(other - logprob);
      const [[name]] = Object.entries(found.choices[0].logprobs.top_logprobs[0]).sort((one, other) => apart(one) - apart(other));
      return go(Number(name.split(":")[1]));
    });
  }
}
