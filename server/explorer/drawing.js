// Nodes, numbers and figures. Text is always text: nothing here, or anywhere on the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// A node of HTML. attributes: strings and numbers; true sets an attribute, false and null leave it
// out; functions listen to the event of that name; `style` is an object, since the page's policy
// forbids the attribute. Children: nodes, text, or lists of them; null is left out.
function element(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

// The same for a node of SVG.
function svg(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// Puts children in place of what a node has.
function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const format = {
  // 1234567 → "1,234,567".
  count: (value) => Number(value).toLocaleString("en-US", { maximumFractionDigits: 0 }),
  // With three significant digits: 0.0123, 4.56, 78.9, 1,234.
  number(value) {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1000) return format.count(value);
    return size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  },
  // 6144 → "6.14 kFLOP", by powers of 1000.
  short(value, unit) {
    const prefixes = ["", "k", "M", "G", "T"];
    let step = 0;
    while (Math.abs(value) >= 1000 && step < prefixes.length - 1) [value, step] = [value / 1000, step + 1];
    return `${format.number(value)} ${prefixes[step]}${unit}`;
  },
  bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB"];
    let step = 0;
    while (Math.abs(value) >= 1024 && step < units.length - 1) [value, step] = [value / 1024, step + 1];
    return `${format.number(value)} ${units[step]}`;
  },
  // Seconds as "340 ms" or "1.2 s".
  seconds: (value) => (value < 1 ? `${format.number(value * 1000)} ms` : `${format.number(value)} s`),
  percent: (share) => `${format.number(share * 100)} %`,
};

// A number with its unit that says, when pointed at or focused, where it comes from.
function figure(text, source, attributes = {}) {
  return element("span", { class: "figure", tabindex: 0, "data-tip": source, ...attributes }, text);
}

// A caption over a figure; `value` is a node or text.
function fact(caption, value, attributes = {}) {
  return element("div", { class: "fact", ...attributes }, element("dt", {}, caption), element("dd", {}, value));
}

const atWork = new Set(); // names of buttons whose work goes on

// A button. act: its name in recordings of visits, unique on the page. pressed: its work, perhaps a
// promise of it; until that is settled, the button looks it and pressing it again does nothing.
// It is not `disabled` meanwhile: that would take the focus from it.
function button(text, act, pressed, attributes = {}) {
  const show = (works) => {
    for (const each of document.querySelectorAll(`[data-act="${CSS.escape(act)}"]`)) each.ariaDisabled = works ? "true" : null;
  };
  const click = async () => {
    if (atWork.has(act)) return;
    atWork.add(act);
    show(true);
    try {
      await pressed();
    } finally {
      atWork.delete(act);
      show(false);
    }
  };
  const works = atWork.has(act) ? "true" : null; // drawn anew while its work goes on
  return element("button", { type: "button", "data-act": act, click, "aria-disabled": works, ...attributes }, text);
}

// A labelled control.
function field(caption, control, attributes = {}) {
  return element("label", { class: "field", ...attributes }, element("span", {}, caption), control);
}

// Whether the browser takes what these inputs hold; it says so beside the first that it does not.
const valid = (...inputs) => inputs.every((input) => input.reportValidity());

function select(act, options, attributes = {}) {
  const made = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  return element("select", { "data-act": act, ...attributes }, made.map(([value, text]) => element("option", { value }, text)));
}

// What a token's text looks like in a cell: spaces and line ends are shown.
function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ /, "·").replace(/ $/, "·") || "∅";
}

// Runs what takes a while: `node` says so to screen readers, and `halt` can be pressed meanwhile.
// work: gets an AbortSignal, which `halt` aborts, and so does its own end: nothing of it goes on.
async function busily(node, halt, work) {
  if (node.getAttribute("aria-busy") === "true") return; // one at a time: there is one button to stop it
  const running = new AbortController();
  const stop = () => running.abort();
  node.setAttribute("aria-busy", "true");
  halt.addEventListener("click", stop);
  halt.disabled = false;
  try {
    return await work(running.signal);
  } finally {
    stop();
    node.setAttribute("aria-busy", "false");
    halt.removeEventListener("click", stop);
    if (document.activeElement === halt) node.querySelector("button.main")?.focus(); // what is disabled loses it
    halt.disabled = true;
  }
}
