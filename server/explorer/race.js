// Race: one prompt, a lane for each model.
//
// A lane's text, its pace and its surprise come from its stream. What positions cost is
// /v1/cache/plan's, and how many keys were rewritten is by how much the server's counters grew.

panels.push({
  id: "race",
  title: "Race",
  lead: "The same prompt runs in every lane. Watch the keys rewritten: while a model writes, that stays 0 in every lane, because what is stored does not depend on what comes later. Then go past the limit and see which lanes have to rotate stored keys, and which refuse.",
  mount(root, page) {
    new Race(root, page);
  },
});

const RACE_LANES = 6; // a browser opens no more connections to a server
const RACE_BEFORE = 24; // tokens that "Go past" writes before the limit
const RACE_AFTER = 96; // and after it
const RACE_READ = 200; // tokens past the limit that are read to see whether a model breaks
const RACE_HOLDS = 0.15; // nats per token: a smaller rise in surprise is not called breaking
const RACE_LONGEST = 2048; // tokens of context that a try from a page fills
const RACE_METRICS = ["kv_rewritten_entries_total", "extrapolated_tokens_total", "context_shift_tokens_total"];
// Moby-Dick, the beginning of chapter 1, in the public domain.
const RACE_TEXT = `Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, and nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and methodically knocking people's hats off - then, I account it high time to get to sea as soon as I can. This is my substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or other, cherish very nearly the same feelings towards the ocean with me.

There now is your insular city of the Manhattoes, belted round by wharves as Indian isles by coral reefs - commerce surrounds it with her surf. Right and left, the streets take you waterward. Its extreme downtown is the battery, where that noble mole is washed by waves, and cooled by breezes, which a few hours previous were out of sight of land. Look at the crowds of water-gazers there.

Circumambulate the city of a dreamy Sabbath afternoon. Go from Corlears Hook to Coenties Slip, and from thence, by Whitehall, northward. What do you see? Posted like silent sentinels all around the town, stand thousands upon thousands of mortal men fixed in ocean reveries. Some leaning against the spiles; some seated upon the pier-heads; some looking over the bulwarks of ships from China; some high aloft in the rigging, as if striving to get a still better seaward peep. But these are all landsmen; of week days pent up in lath and plaster - tied to counters, nailed to benches, clinched to desks. How then is this? Are the green fields gone? What do they here?

But look! here come more crowds, pacing straight for the water, and seemingly bound for a dive. Strange! Nothing will content them but the extremest limit of the land; loitering under the shady lee of yonder warehouses will not suffice. No. They must get just as nigh the water as they possibly can without falling in. And there they stand - miles of them - leagues. Inlanders all, they come from lanes and alleys, streets and avenues - north, east, south, and west. Yet here they all unite.`;

class Race {
  constructor(root, page) {
    Object.assign(this, { root, page });
    this.prompt = element("textarea", { rows: 2, "data-act": "race-prompt", id: "race-prompt", spellcheck: "false" });
    this.prompt.value = "The ship had been at sea for forty days when";
    this.tokens = element("input", { type: "number", min: 1, max: 1024, value: 64, "data-act": "race-tokens" });
    this.temperature = element("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0.8, "data-act": "race-temperature" });
    this.seed = element("input", { type: "number", min: 0, max: 999999, value: 1, "data-act": "race-seed" });
    this.models = element("fieldset", { class: "race-models" }, element("legend", {}, `Lanes, up to ${RACE_LANES}`), page.models.map(({ id }, index) => {
      const box = element("input", { type: "checkbox", value: id, checked: index < RACE_LANES, "data-act": `race-lane-${id}` });
      return element("label", {}, box, id);
    }));
    this.models.addEventListener("change", () => this.ticked());
    this.go = button("Race", "race-go", () => this.race(false), { class: "main" });
    this.past = button("", "race-past", () => this.race(true));
    this.ticked();
    this.halt = button("Stop", "race-stop", () => {}, { disabled: true });
    this.verdict = element("p", { class: "race-verdict", "aria-live": "polite" });
    this.lanes = element("div", { class: "race-lanes" });
    fill(root,
      field("Prompt", this.prompt, { class: "field wide" }), this.models,
      element("div", { class: "row" }, field("At most, tokens", this.tokens), field("Temperature", this.temperature), field("Seed", this.seed), this.go, this.past, this.halt),
      page.models.length === 1 ? element("p", { class: "note" }, "This server has one model. ropewalk serve family has six that differ in nothing but their encoding.") : null,
      this.verdict, this.lanes,
      element("p", { class: "note" }, "Positional work is what a new token's own position takes when it is computed, over a context of that length. It is done in every step, is small beside the rest of a step, and changes nothing that is stored. " +
        "Lanes ask one after the other and share one machine: that a later lane's first token comes later, and how fast all of them are, says nothing of their encodings. Load tries one model after another."),
    );
  }

  // The ticked models. What cannot be ticked beside them looks it, and a limit that all share is named.
  ticked() {
    const boxes = [...this.models.querySelectorAll("input")], chosen = boxes.filter((box) => box.checked).map((box) => box.value);
    for (const box of boxes) box.disabled = !box.checked && chosen.length >= RACE_LANES;
    const models = chosen.map((id) => this.page.models.find((model) => model.id === id));
    const limits = new Set(models.map(limitOf));
    fill(this.past, limits.size === 1 ? `Go past ${format.count([...limits][0])}` : "Go past the limit");
    return models;
  }

  race(past) {
    if (!valid(this.tokens, this.temperature, this.seed)) return null;
    fill(this.lanes);
    fill(this.verdict);
    return this.page.attempt(() => busily(this.root, this.halt, async (signal) => {
      const chosen = this.ticked();
      if (!chosen.length) return this.page.say("No lane is ticked; tick at least one.", true);
      const lanes = chosen.map((model) => new Lane(model, past));
      fill(this.lanes, lanes.map((lane) => lane.node));
      if (past) fill(this.verdict, "Reading the beginning of Moby-Dick first, in place of the prompt, up to the limit…");
      try {
        await this.run(lanes, past, signal);
      } catch (error) {
        fill(this.verdict);
        throw error;
      }
    }));
  }

  async run(lanes, past, signal) {
    const { api } = this.page;
    const settings = { temperature: Number(this.temperature.value), seed: Number(this.seed.value) };
    const before = await api.metrics(RACE_METRICS, { signal });
    await Promise.all(lanes.map((lane) => lane.attempt(() => lane.prepare(api, this.prompt.value, Number(this.tokens.value), signal))));
    scaleLanes(lanes);
    await Promise.all(lanes.map((lane) => lane.attempt(() => lane.run(api, settings, signal))));
    const grown = growth(before, await api.metrics(RACE_METRICS, { signal }));
    for (const lane of lanes) lane.settle(grown);
    scaleLanes(lanes);
    fill(this.verdict, past ? pastVerdict(lanes) : usualVerdict(lanes));
  }
}

// Where the context ends, or the trained length if that comes first.
const limitOf = ({ trained_context: trained, max_model_len: served }) => Math.min(trained ?? served, served);

class Lane {
  // past: whether it is to go past its limit.
  constructor(model, past) {
    Object.assign(this, { model, past, count: 0, skipped: false, refused: null, failed: null, dropped: 0, known: null });
    this.trained = model.trained_context ?? model.max_model_len;
    this.limit = limitOf(model);
    this.text = element("p", { class: "race-text", tabindex: 0, "aria-label": `What ${model.id} writes` });
    this.state = element("span", { class: "race-state" });
    this.rows = {
      pace: new LaneRow("tokens per second", "counted and timed by this page, first token excluded"),
      first: new LaneRow("first token after", "timed by this page, from sending the request; lanes wait for one another", false),
      flops: new LaneRow("positional work per token", "/v1/cache/plan, append: data[own].work.flops, at the last token's context length"),
      bytes: new LaneRow("positional bytes per token", "/v1/cache/plan, append: data[own].work.bytes, at the last token's context length"),
      rewritten: new LaneRow("keys rewritten", "/metrics: by how much ropewalk_kv_rewritten_entries_total, cause context_shift, grew, each layer's and head's key counted, other clients' requests included"),
      beyond: new LaneRow(`tokens past ${format.count(this.trained)}`, "generated at positions beyond the trained length; /metrics: by how much ropewalk_extrapolated_tokens_total grew, other clients' requests included"),
    };
    this.node = element("article", { class: "race-lane", "data-model": model.id },
      element("h2", {}, model.id, " ", element("span", {}, model.encoding ?? ""), this.state), this.text,
      element("table", {}, Object.values(this.rows).map((row) => row.node)));
  }

  // Its tokens, and what positions cost at the end.
  async prepare(api, prompt, tokens, signal) {
    const model = this.model.id;
    if (this.past) {
      if (this.model.encoder_decoder) return this.skip("not tried", "Not tried: an encoder-decoder's prompt and answer are two texts with positions of their own, so together they go past no limit.");
      if (this.limit > RACE_LONGEST) return this.skip("not tried", `Not tried: filling its ${format.count(this.limit)} tokens would take too long for a look. A smaller --max-model-len shows it.`);
      this.known = await tokensOf(api, model, this.limit + RACE_READ, signal);
      this.ids = this.known.slice(0, this.limit - RACE_BEFORE);
      this.tokens = RACE_BEFORE + RACE_AFTER;
    } else {
      this.ids = (await api.post("tokenize", { model, prompt }, { signal })).tokens;
      this.tokens = tokens;
    }
    const before = this.model.encoder_decoder ? 1 : this.ids.length; // its decoder begins with a token of its own
    this.longest = Math.min(before + this.tokens, this.model.max_model_len);
    const plan = await api.post("v1/cache/plan", { model, operation: "append", tokens: this.longest - 1 }, { signal });
    const { flops, bytes } = plan.data.find(({ own }) => own).work;
    this.rows.flops.set(flops, format.short(flops, "FLOP"));
    this.rows.bytes.set(bytes, format.bytes(bytes));
  }

  // What the server refuses is this lane's answer, since the same request would be refused again. Other
  // errors say nothing of the model. That there is no answer at all is everybody's affair.
  async attempt(work) {
    if (this.skipped) return;
    try {
      await work();
    } catch (error) {
      if (!(error instanceof ApiError) || error.status === 0) {
        if (!this.count) this.skip("stopped", "Nothing came.");
        throw error;
      }
      if (this.count || ![400, 409].includes(error.status)) return this.fail(error.message);
      this.refused = error.message;
      this.skip("refuses", `Refused: ${error.message}`);
    }
  }

  async run(api, settings, signal) {
    const body = { model: this.model.id, prompt: this.ids, max_tokens: this.tokens, ...settings };
    // Where the context itself ends, only dropping its oldest tokens leads on.
    if (this.past && this.model.max_model_len <= this.ids.length + this.tokens) body.overflow = "shift";
    const began = api.now();
    let first = null, finish = null;
    for await (const token of completion(api, body, signal)) {
      finish ??= token.finish;
      if (token.id === undefined) continue;
      first ??= token.at;
      this.add(token);
      if (this.count === 1) this.rows.first.set(first - began, format.seconds((first - began) / 1000));
      else if (token.at > first) this.rows.pace.set((1000 * (this.count - 1)) / (token.at - first), `${format.number((1000 * (this.count - 1)) / (token.at - first))} /s`);
    }
    if (!finish) return this.fail("the stream ended before its time");
    if (this.past && this.model.max_model_len > this.known.length) await this.read(api, signal);
  }

  add(token) {
    const past = this.past && this.ids.length + this.count >= this.limit;
    if (past && this.mark === undefined) {
      this.mark = element("span", { class: "race-mark", "data-tip": "Here the text was that long. What is shaded came after it." }, `${format.count(this.limit)} tokens`);
      this.text.append(this.mark);
    }
    this.count += 1;
    this.text.append(past ? element("span", { class: "past" }, token.text) : token.text);
    this.text.scrollTop = this.text.scrollHeight;
  }

  // How surprising the same words are: at the end of as many tokens as were trained, and where the
  // text before them is longer, so that they lie past the trained length.
  async read(api, signal) {
    const within = [this.known[0], ...this.known.slice(this.known.length - this.limit + 1)];
    this.surprise = [];
    for (const prompt of [within, this.known]) {
      const found = await api.post("v1/completions", { model: this.model.id, prompt, max_tokens: 0, echo: true, logprobs: 0 }, { signal });
      this.surprise.push(-mean(found.choices[0].logprobs.token_logprobs.slice(-RACE_READ)));
    }
  }

  fail(why) {
    [this.skipped, this.failed] = [true, why];
    fill(this.state, "failed");
    this.node.classList.add("failed");
    this.text.after(element("p", { class: "note" }, `Failed: ${why}${/[.?!]$/.test(why) ? "" : "."}`));
  }

  skip(state, why) {
    this.skipped = true;
    fill(this.state, state);
    this.node.classList.add("refused");
    fill(this.text, why);
  }

  // What the server counted.
  settle(grown) {
    const labels = { model_name: this.model.id };
    this.rewritten = grown("kv_rewritten_entries_total", { ...labels, cause: "context_shift" });
    this.beyond = grown("extrapolated_tokens_total", labels);
    this.dropped = grown("context_shift_tokens_total", { ...labels, fate: "dropped" });
    this.rows.rewritten.set(this.rewritten, format.count(this.rewritten));
    this.rows.beyond.set(this.beyond, format.count(this.beyond));
    if (this.skipped) return;
    if (this.mark) { // into sight again, one line below the top
      const line = parseFloat(getComputedStyle(this.text).lineHeight), below = this.mark.getBoundingClientRect().top - this.text.getBoundingClientRect().top;
      this.text.scrollTop = line * Math.floor((this.text.scrollTop + below) / line - 1);
    }
    fill(this.state, this.verdict());
    if (this.past) this.node.append(element("p", { class: "note" }, this.findings()));
  }

  get breaks() {
    return this.surprise !== undefined && this.surprise[1] - this.surprise[0] > RACE_HOLDS;
  }

  verdict() {
    if (!this.past) return "";
    if (this.surprise !== undefined) return this.breaks ? "breaks" : "holds";
    return this.rewritten ? "goes on, keys rotated" : "goes on, no stored key touched";
  }

  findings() {
    const parts = [];
    if (this.mark) parts.push("Shaded: what came after the limit. ");
    if (this.dropped) parts.push(figure(`${format.count(this.dropped)} tokens`, "/metrics: ropewalk_context_shift_tokens_total, fate dropped"), " in the middle were dropped, and the rest got lower positions: so none lies past the trained length. ");
    if (this.surprise !== undefined) {
      parts.push(`Surprise at ${RACE_READ} known tokens, within the trained length and past it: `, figure(`${this.surprise.map((each) => each.toFixed(2)).join(" → ")} nats per token`,
        `/v1/completions with echo: minus the mean of logprobs.token_logprobs of the same tokens, after fewer and after more tokens of the same text; a rise above ${RACE_HOLDS} is called breaking`), ".");
    }
    return parts;
  }
}

// A figure of a lane, with a bar that compares it with the other lanes', unless that would mislead.
class LaneRow {
  constructor(caption, source, compares = true) {
    this.value = null;
    this.bar = element("span", { class: "bar" });
    this.shown = figure("–", source);
    this.node = element("tr", {}, element("th", { scope: "row" }, caption), element("td", { class: "race-bar" }, compares ? this.bar : null), element("td", { class: "number" }, this.shown));
  }

  set(value, text) {
    this.value = value;
    fill(this.shown, text);
  }
}

function scaleLanes(lanes) {
  for (const name of Object.keys(lanes[0]?.rows ?? {})) {
    const most = Math.max(...lanes.map(({ rows }) => rows[name].value ?? 0));
    for (const { rows } of lanes) rows[name].bar.style.setProperty("--share", most ? (rows[name].value ?? 0) / most : 0);
  }
}

// So many tokens of the text, which is repeated where it is too short.
async function tokensOf(api, model, count, signal) {
  const { tokens } = await api.post("tokenize", { model, prompt: RACE_TEXT }, { signal });
  const found = [...tokens];
  while (found.length < count) found.push(...tokens.slice(1));
  return found.slice(0, count);
}

const listed = (lanes) => new Intl.ListFormat("en").format(lanes.map(({ model }) => model.encoding ?? model.id));

function usualVerdict(lanes) {
  if (!lanes.some(({ count }) => count)) return "No lane has written anything, so there is nothing to compare.";
  const rotated = lanes.filter(({ rewritten }) => rewritten > 0);
  if (rotated.length) return `Keys were rewritten under ${listed(rotated)}: another client's context was shortened meanwhile, or this one's.`;
  return "No lane rewrote a key. Writing appends, and appending costs none of them anything that was stored: a key depends on the tokens before it, never on those after.";
}

function pastVerdict(lanes) {
  const refused = lanes.filter((lane) => lane.refused !== null), failed = lanes.filter((lane) => lane.failed !== null);
  const rest = lanes.filter((lane) => !lane.skipped);
  const rotated = rest.filter(({ rewritten }) => rewritten > 0);
  const shifted = rest.filter(({ dropped, rewritten }) => dropped > 0 && rewritten === 0);
  const broken = rest.filter(({ breaks }) => breaks);
  const held = rest.filter((lane) => lane.surprise !== undefined && !lane.breaks);
  const parts = [];
  if (rotated.length) parts.push(`${listed(rotated)}: the context was full, and to renumber what came after the gap every key there was rotated.`);
  if (shifted.length) parts.push(`${listed(shifted)}: renumbered too, but no key was touched, since none holds its position.`);
  if (broken.length) parts.push(`${listed(broken)}: went past the trained length and broke.`);
  if (held.length) parts.push(`${listed(held)}: went past the trained length and held.`);
  if (refused.length) parts.push(`${listed(refused)}: refused.`);
  if (failed.length) parts.push(`${listed(failed)}: failed, which says nothing of the encoding.`);
  if (shifted.length + rotated.length) parts.push("(Positions never pass what the server serves: a larger --max-model-len lets them.)");
  if (rest.length) parts.push("Read up to there: the beginning of Moby-Dick, in place of the prompt.");
  return parts.join(" ");
}
