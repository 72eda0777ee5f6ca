// What the panels stand in: the model, one cursor, messages, theme and key.
//
// A panel is {id, title, lead, mount(root, page)}; mount is called when it is first shown. It may
// have shown() and hidden(), called each time after that. `page` has
//   api                  the server (api.js)
//   models, model        entries of /v1/models, and the chosen one
//   encodings            entries of /v1/encodings by name
//   cursor               {model, ids, index}: the token that all panels look at, or null; Position adds
//                        the `text` that it was shown for
//   point(cursor)        moves it
//   on(name, listener)   "model", "cursor": after a change; returns a function that stops listening
//   attempt(work)        runs an async function; what it throws becomes the sentence under the tabs
//   alone(root, work)    the same, and until it has ended nothing else can be done in `root`
//   say(sentence)        says something there
//   show(id)             goes to a panel
// Controls have a name of their own in data-act (button() and select() set it): recordings use it.

const panels = [];

class Page {
  constructor(api) {
    this.api = api;
    this.models = [];
    this.model = null;
    this.encodings = {};
    this.cursor = null;
    this.alones = 0; // how many works go on alone
    this.events = new EventTarget();
  }

  on(name, listener) {
    const heard = () => listener(this);
    this.events.addEventListener(name, heard);
    return () => this.events.removeEventListener(name, heard);
  }

  point(cursor) {
    this.cursor = cursor;
    this.events.dispatchEvent(new Event("cursor"));
  }

  choose(name) {
    this.model = this.models.find((model) => model.id === name) ?? this.models[0] ?? null;
    this.events.dispatchEvent(new Event("model"));
  }

  say(sentence, isError = false) {
    const line = document.getElementById("status");
    line.classList.toggle("error", isError);
    fill(line, sentence);
  }

  async attempt(work) {
    try {
      this.say("");
      return await work();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.say(told(error), true);
      if (!(error instanceof ApiError)) throw error;
    }
  }

  // Meanwhile the model stays the same, too. The focus comes back to the control of the same name.
  async alone(root, work) {
    if (root.inert) return;
    const act = document.activeElement?.dataset.act, picker = document.getElementById("model");
    this.alones += 1; // one of each panel
    root.inert = picker.disabled = true;
    try {
      await this.attempt(work);
    } finally {
      this.alones -= 1;
      root.inert = false;
      picker.disabled = this.alones > 0;
      if (act) root.querySelector(`[data-act="${CSS.escape(act)}"]:enabled`)?.focus({ preventScroll: true });
    }
  }

  show(id) {
    location.hash = id;
  }
}

function told(error) {
  const text = error instanceof ApiError ? error.message : `this page has a fault: ${error.message}`;
  return text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

// ------------------------------------------------------------------------------------------ panels

function switchPanels(page) {
  const main = document.getElementById("panel");
  const tabs = document.getElementById("tabs");
  const mounted = new Map();
  let current = null;
  fill(tabs, panels.map(({ id, title }) => element("a", { href: `#${id}`, "data-act": `tab-${id}` }, title)));

  function shown() {
    const wanted = location.hash.slice(1);
    const panel = panels.find(({ id }) => id === wanted) ?? panels[0];
    if (panel === current) return;
    if (current) {
      mounted.get(current.id).hidden = true;
      current.hidden?.();
      page.say("");
    }
    current = panel;
    for (const tab of tabs.children) {
      if (tab.getAttribute("href") === `#${panel.id}`) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    document.title = `${panel.title} – Ropewalk explorer`;
    let root = mounted.get(panel.id);
    if (root === undefined) {
      const inside = element("div", { class: "inside" });
      root = element("section", { id: `panel-${panel.id}`, "aria-label": panel.title }, element("p", { class: "lead" }, panel.lead), inside);
      mounted.set(panel.id, root);
      main.append(root);
      panel.mount(inside, page);
    }
    root.hidden = false;
    panel.shown?.();
  }

  addEventListener("hashchange", shown);
  shown();
}

// -------------------------------------------------------------------------------------- the frame

function showModels(page) {
  const picker = document.getElementById("model");
  fill(picker, page.models.map((model) => element("option", { value: model.id }, model.id)));
  picker.addEventListener("change", () => page.choose(picker.value));
  page.on("model", () => {
    const model = page.model;
    picker.value = model?.id ?? "";
    fill(document.getElementById("facts"), model === null ? "" : [
      figure(model.encoding ?? "–", "/v1/models: encoding"), " · trained on ",
      figure(`${format.count(model.trained_context ?? model.max_model_len)} tokens`, "/v1/models: trained_context"), " · serves ",
      figure(format.count(model.max_model_len), "/v1/models: max_model_len, in tokens"),
      element("br"), page.encodings[model.encoding]?.summary ?? "",
    ]);
  });
}

// What the panels' words mean: of one attention layer, as far as one needs it here.
const WORDS = [
  ["token", "a piece of text that the model reads or writes: a word, or a part of one"],
  ["layer, head", "a model works in layers, one after another; in each, several heads look at the text side by side"],
  ["query, key, value", "three lists of numbers that each head makes of a token: what it looks for, what it is found by, and what it hands on. Keys and values are stored in the cache, queries are not"],
  ["score, attention", "a query times a key is a score: how well they match. Softmax turns a query's scores into shares that add up to 1, its attention; values are summed by them"],
  ["content, position", "the parts of a score: what it would be without the encoding, and what the encoding adds"],
  ["block", "the cache stores tokens by blocks, of 16 as a rule. A sequence is a list of blocks, and several may list the same one"],
  ["free, cached, held, shared", "a block is free; or its content is known and may be found again (cached); or one sequence uses it (held), or several (shared)"],
  ["rotated", "RoPE multiplies pairs of a key's numbers by a rotation whose angle is the position: one can draw a pair as the hand of a clock"],
  ["rewritten", "a stored key that was read, rotated again and written back"],
  ["sealed, verified", "the server takes a checksum of each full block (sealed), and compares it again and again (verified)"],
];

function showWords() {
  return element("details", { class: "words" }, element("summary", { "data-act": "words" }, "What the words mean"),
    element("dl", {}, WORDS.map(([word, meaning]) => [element("dt", {}, word), element("dd", {}, meaning)])));
}

function showTheme(tools) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const toggle = button("", "theme", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  const name = () => fill(toggle, isDark() ? "Light" : "Dark");
  dark.addEventListener("change", name);
  name();
  tools.append(toggle);
}

// Asks for an API key, once for all who need one.
let asking = null;
function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const input = element("input", { type: "password", id: "key", autocomplete: "off" });
    const done = () => {
      const key = input.value.trim();
      // Other characters cannot be sent in a header.
      input.setCustomValidity(/^[!-~]+$/.test(key) ? "" : "A key has letters without accents, digits and signs, and no spaces.");
      if (!input.reportValidity()) return;
      sessionStorage.setItem(KEY, key);
      dialog.close();
    };
    const dialog = element("dialog", { "aria-labelledby": "key-title" },
      element("h2", { id: "key-title" }, "This server needs an API key"),
      element("p", {}, told({ message: reason.split(";")[0] })),
      field("API key", input),
      element("p", { class: "note" }, "It is kept in this tab only, until you close it."),
      element("button", { type: "button", click: done }, "Use this key"),
    );
    input.addEventListener("input", () => input.setCustomValidity(""));
    input.addEventListener("keydown", (event) => event.key === "Enter" && done());
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      dialog.remove();
      asking = null;
      resolve();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

// Says where a number comes from, when it is pointed at or focused.
function showTips() {
  const tip = document.getElementById("tip");
  let described = null;
  const hide = () => {
    tip.hidden = true;
    described?.removeAttribute("aria-describedby");
    described = null;
  };
  const show = (event) => {
    const target = event.target.closest?.("[data-tip]");
    hide();
    if (!target) return;
    described = target;
    described.setAttribute("aria-describedby", "tip");
    fill(tip, target.dataset.tip);
    tip.hidden = false;
    const at = target.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left), innerWidth - tip.offsetWidth - 8);
    const above = at.top - tip.offsetHeight - 6;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(above > 0 ? above : at.bottom + 6) + scrollY}px`;
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

// A link to one of the server's own pages. A link sends no key, so where one is in use, the page is
// fetched with it and opened from here.
function ownPage(page, path, text, attributes = {}) {
  const click = (event) => {
    if (!sessionStorage.getItem(KEY)) return;
    event.preventDefault();
    page.attempt(async () => {
      const answer = await new Server(askForKey).answer("GET", path);
      open(URL.createObjectURL(new Blob([answer], { type: `text/${path === "docs" ? "html" : "plain"};charset=utf-8` })));
    });
  };
  return element("a", { href: ROOT + path, click, ...attributes }, text);
}

// What answers: the server, or a visit in place of it.
async function sourceOf(bar) {
  const visit = await visitToReplay(bar);
  if (visit !== null) return new Replay(visit);
  const server = new Server(askForKey);
  return new URLSearchParams(location.search).has("record") ? new Recorder(server) : server;
}

async function start() {
  const bar = document.getElementById("visit");
  showTips();
  showTheme(document.getElementById("tools"));
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("panel").focus();
  });
  const source = await sourceOf(bar);
  const page = new Page(new Api(source));
  fill(document.getElementById("foot"), showWords(), element("p", {}, "Every number here comes from a public route, and says which. ",
    ownPage(page, "docs", "API"), " · ", ownPage(page, "metrics", "metrics"), " · ",
    element("a", { href: "?record" }, "record a visit"), " · ", element("a", { href: "?replay" }, "replay one")));
  await page.attempt(async () => {
    const [models, encodings] = await Promise.all([page.api.get("v1/models"), page.api.get("v1/encodings")]);
    // A model's other names are no further models; of one that is not loaded nothing is known.
    page.models = models.data.filter(({ id, root, status }) => id === root && status.value === "loaded");
    page.encodings = Object.fromEntries(encodings.data.map((each) => [each.name, each]));
    if (!page.models.length) page.say("No model is loaded; load one with POST /v1/models/load, and try again.", true);
  });
  if (!page.models.length) return void document.getElementById("panel").append(button("Try again", "again", () => location.reload(), { class: "main" }));
  showModels(page);
  page.choose(page.models[0].id);
  if (source.hash) history.replaceState(null, "", source.hash);
  switchPanels(page);
  source.begin?.(bar);
}

document.addEventListener("DOMContentLoaded", start);
