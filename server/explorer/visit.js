// Visits: recorded to a file, and replayed without a server.
//
// A visit is {version, hash, size, acts, calls}. acts are what was pressed and set, by the data-act
// of the control: {at, act, value}; calls are what the server was asked and answered: {at, method,
// path, body, after, answer | refused | events}. Times are milliseconds, `after` and those of
// events from the call's own beginning; answers and events are packed (below). No key is in it. In
// a replay the controls are worked again, and the same requests get the same answers after the same
// time.

const VISIT = 1; // the version of the format
const PATIENCE = 10000; // ms: how long a replay waits for a control that is not there yet

// ------------------------------------------------------------------------------------- recording

// A source (api.js) that writes down what passes between the page and another source.
class Recorder {
  constructor(source) {
    Object.assign(this, { source, acts: [], calls: [], began: source.now(), first: location.hash });
    document.addEventListener("click", (event) => this.#pressed(event), true);
    document.addEventListener("change", (event) => this.#set(event), true);
  }

  now() {
    return this.source.now();
  }

  async answer(method, path, body, options) {
    const call = this.#call(method, path, body);
    try {
      const text = await this.source.answer(method, path, body, options);
      call.answer = parsed(text);
      return text;
    } catch (error) {
      if (error instanceof ApiError) call.refused = { status: error.status, message: error.message, code: error.code, param: error.param };
      throw error;
    } finally {
      call.after = this.#since(call.at);
    }
  }

  async *events(method, path, body, options) {
    const call = this.#call(method, path, body);
    call.events = [];
    call.open = true; // until the server ends it
    try {
      for await (const event of this.source.events(method, path, body, options)) {
        call.events.push([Math.round((event.at - this.began - call.at) * 10) / 10, parsed(event.data)]);
        if (event.data === "[DONE]") call.open = false;
        yield event;
      }
      call.open = false;
    } catch (error) {
      if (error instanceof ApiError) call.refused = { status: error.status, message: error.message, code: error.code, param: error.param };
      throw error;
    } finally {
      call.after = this.#since(call.at);
    }
  }

  // The bar from which the visit is saved.
  begin(bar) {
    const time = element("span", {});
    setInterval(() => fill(time, `${format.count(this.#since(0) / 1000)} s`), 1000);
    fill(bar, element("p", { class: "visit-bar" }, element("strong", {}, "● Recording"), " ", time, " ",
      element("button", { type: "button", click: () => this.save() }, "Save the visit"),
      element("span", { class: "note" }, " What you type and what models answer will be in the file; your key will not.")));
  }

  text() {
    return JSON.stringify({
      version: VISIT, hash: this.first, size: [innerWidth, innerHeight], lasts: this.#since(0), acts: this.acts, calls: packed(this.calls),
    });
  }

  save() {
    const url = URL.createObjectURL(new Blob([this.text()], { type: "application/json" }));
    element("a", { href: url, download: "ropewalk-visit.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  #since(at) {
    return Math.round((this.now() - this.began - at) * 10) / 10;
  }

  #call(method, path, body) {
    const call = { at: this.#since(0), method, path, body };
    this.calls.push(call);
    return call;
  }

  #pressed(event) {
    const target = event.target.closest?.("[data-act]");
    if (target && !target.matches("input, select, textarea")) this.acts.push({ at: this.#since(0), act: target.dataset.act });
  }

  #set({ target }) {
    if (!target.dataset?.act) return;
    const value = target.type === "checkbox" || target.type === "radio" ? target.checked : target.value;
    this.acts.push({ at: this.#since(0), act: target.dataset.act, value });
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// What leads from one value of JSON to another: [value] in place of it, or for objects and lists
// with the same names, an object of what leads on in those that differ. changed() is its inverse.
function difference(before, after) {
  if (!isNode(before) || !isNode(after) || Array.isArray(before) !== Array.isArray(after)) return [after];
  const names = Object.keys(after);
  if (String(names) !== String(Object.keys(before))) return [after];
  return Object.fromEntries(names.filter((name) => JSON.stringify(before[name]) !== JSON.stringify(after[name])).map((name) => [name, difference(before[name], after[name])]));
}

function changed(before, by) {
  if (Array.isArray(by)) return by[0];
  const after = Array.isArray(before) ? [...before] : { ...before };
  for (const [name, each] of Object.entries(by)) after[name] = changed(before[name], each);
  return after;
}

// Calls in which an answer or an event is what differs from the one before it: that of the same
// path, or of the same stream. unpacked() is its inverse.
function packed(calls) {
  return resolved(calls, (before, value) => [difference(before, value), value]);
}

function unpacked(calls) {
  return resolved(calls, (before, by) => Array(2).fill(changed(before, by)));
}

// step: what came before and what is there → [what is put in its place, what came before the next].
function resolved(calls, step) {
  const answers = new Map();
  return calls.map((call) => {
    const made = { ...call };
    if (call.answer !== undefined) {
      const same = `${call.method} ${call.path}`;
      const [put, kept] = step(answers.get(same) ?? null, call.answer);
      made.answer = put;
      answers.set(same, kept);
    }
    let last = null;
    made.events = call.events?.map(([ms, data]) => {
      const [put, kept] = step(last, data);
      last = kept;
      return [ms, put];
    });
    return made;
  });
}

const isNode = (value) => typeof value === "object" && value !== null;

// ---------------------------------------------------------------------------------------- replay

// The visit that is to be replayed; null: none is. It is in the page, or at ?replay=FILE beside the
// page, or is asked for.
async function visitToReplay(bar) {
  const checked = (text) => {
    const visit = parsed(text);
    return visit?.version === VISIT ? visit : null;
  };
  const inside = document.getElementById("recording");
  if (inside !== null) return checked(inside.textContent);
  const wanted = new URLSearchParams(location.search).get("replay");
  if (wanted === null && location.protocol !== "file:") return null;
  let visit = null;
  try {
    const url = wanted ? new URL(wanted, location.href) : null;
    if (url?.origin === location.origin) visit = checked(await (await fetch(url)).text());
  } catch {} // no address, or no answer from there
  if (visit !== null) return visit;
  const input = element("input", { type: "file", accept: ".json,application/json", "aria-label": "A recorded visit" });
  fill(bar, element("p", { class: "visit-bar" }, wanted ? "There is no visit of this version at that address of this server. " : "", "Choose a recorded visit: ", input, leaveReplay()));
  for (;;) {
    await new Promise((resolve) => input.addEventListener("change", resolve, { once: true }));
    const visit = checked(await input.files[0]?.text());
    if (visit !== null) return visit;
    fill(bar, element("p", { class: "visit-bar" }, "This file is not a visit of this version. Choose another: ", input, leaveReplay()));
  }
}

// The way from a replay to the server's own page; a page in a file has none.
function leaveReplay() {
  return location.protocol === "file:" ? null : element("a", { href: location.pathname }, "Leave the replay");
}

// Time that can be halted and hurried.
class Clock {
  #at = 0;
  #since = performance.now();
  speed = 1;

  now() {
    return this.#at + (performance.now() - this.#since) * this.speed;
  }

  run(speed) {
    this.#at = this.now();
    this.#since = performance.now();
    this.speed = speed;
  }

  async until(time, signal) {
    while (this.now() < time) {
      signal?.throwIfAborted();
      const left = this.speed ? (time - this.now()) / this.speed : Infinity;
      await new Promise((resolve) => setTimeout(resolve, Math.min(left, 50)));
    }
    signal?.throwIfAborted();
  }
}

// A source that answers from a visit, and works its controls.
class Replay {
  constructor(visit) {
    Object.assign(this, { visit: { ...visit, calls: unpacked(visit.calls) }, hash: visit.hash, clock: new Clock(), used: new Map() });
  }

  now() {
    return this.clock.now();
  }

  async answer(method, path, body, { signal } = {}) {
    const call = this.#find(method, path, body);
    await this.clock.until(this.now() + call.after, signal);
    if (call.refused) throw new ApiError(call.refused.status, call.refused);
    return asText(call.answer);
  }

  async *events(method, path, body, { signal } = {}) {
    const call = this.#find(method, path, body);
    const began = this.now();
    for (const [ms, data] of call.events ?? []) {
      await this.clock.until(began + ms, signal);
      yield { at: began + ms, data: asText(data) };
    }
    await this.clock.until(began + (call.open ? Infinity : call.after), signal);
    if (call.refused) throw new ApiError(call.refused.status, call.refused);
  }

  // The next call that asked this, or the last of them once more.
  #find(method, path, body) {
    const asked = JSON.stringify([method, path, body]);
    const calls = this.visit.calls.filter((call) => JSON.stringify([call.method, call.path, call.body]) === asked && call.after !== undefined);
    if (!calls.length) throw new ApiError(0, { message: "this visit has no answer to that: it was not asked when it was recorded" });
    const nth = this.used.get(asked) ?? 0;
    this.used.set(asked, nth + 1);
    return calls[Math.min(nth, calls.length - 1)];
  }

  async begin(bar) {
    const { acts, lasts } = this.visit;
    const time = element("span", { class: "visit-time" });
    const paused = element("button", { type: "button", click: () => {
      this.clock.run(this.clock.speed ? 0 : 1);
      fill(paused, this.clock.speed ? "Pause" : "Go on");
    } }, "Pause");
    const faster = element("button", { type: "button", click: () => {
      this.clock.run({ 1: 2, 2: 4 }[this.clock.speed] ?? 1);
      fill(faster, `${this.clock.speed}×`);
      fill(paused, "Pause");
    } }, "1×");
    fill(bar, element("p", { class: "visit-bar" }, element("strong", {}, "▶ A recorded visit"), " ", time, " ", paused, faster,
      element("button", { type: "button", click: () => location.reload() }, "Again"), leaveReplay()));
    const tick = () => fill(time, `${Math.min(this.now() / 1000, lasts / 1000).toFixed(0)} of ${(lasts / 1000).toFixed(0)} s`);
    const ticking = setInterval(tick, 200);
    for (const act of acts) {
      await this.clock.until(act.at);
      if (!(await this.#work(act))) bar.dataset.missed = act.act; // a page of another version
    }
    await this.clock.until(lasts);
    tick();
    clearInterval(ticking);
    bar.dataset.over = "";
    fill(paused, "Over");
    paused.disabled = true;
  }

  async #work({ act, value }) {
    const wanted = `[data-act="${CSS.escape(act)}"]`;
    const given = performance.now() + PATIENCE;
    let target = null;
    while ((target = document.querySelector(wanted)) === null || target.disabled) {
      if (performance.now() > given) return false;
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    target.scrollIntoView({ block: "nearest" });
    target.classList.add("acted");
    setTimeout(() => target.classList.remove("acted"), 700);
    if (value === undefined) {
      target.click();
      return true;
    }
    if (typeof value === "boolean") target.checked = value;
    else target.value = value;
    target.dispatchEvent(new Event("input", { bubbles: true }));
    target.dispatchEvent(new Event("change", { bubbles: true }));
    return true;
  }
}
