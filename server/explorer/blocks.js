// What the panel Cache shows: the view that follows /v1/cache/stream, the pool of all blocks, and
// sequences as rows of blocks.

const STATES = {
  f: ["free", "nothing is stored in it that anybody could use"],
  c: ["cached", "nobody holds it, but its content is known and may be found again"],
  h: ["held", "by one sequence"],
  s: ["shared", "held by several sequences at once"],
};
const OUT_OF_USE = {
  "-": ["reserved", "no sequence ever gets it"],
  q: ["quarantined", "what it held was found changed, and no sequence gets it any more"],
};
const MOST_CHIPS = 160; // of one table

const holders = (shared) => new Map(shared.map(({ block, holders }) => [block, holders]));

// What an event of the stream makes of the view before it: a new one.
function followed(view, event) {
  if (event.type === "snapshot") {
    const { requests, kept = [], shared, ...entry } = event.entry;
    const named = [...requests.map((each) => ["request", each]), ...kept.map((each) => ["kept", each])];
    return {
      pool: event.pool, entry, shared: holders(shared),
      sequences: new Map(named.map(([kind, each]) => [each.id, { kind, ...each }])),
      left: [],
    };
  }
  const pool = [...view.pool];
  const left = [];
  for (const [first, states] of event.pool ?? []) {
    [...states].forEach((state, i) => {
      if (state === "f" && pool[first + i] !== "f") left.push(first + i);
      pool[first + i] = state;
    });
  }
  const sequences = new Map(view.sequences);
  for (const [id, change] of Object.entries(event.sequences ?? {})) {
    if (change === null) sequences.delete(id);
    else sequences.set(id, { id, ...sequences.get(id), ...change });
  }
  const { blocks, audit, spill, waiting } = { ...view.entry, ...event };
  return {
    pool: pool.join(""), entry: { ...view.entry, blocks, audit, spill, waiting }, sequences, left,
    shared: event.shared ? holders(event.shared) : view.shared,
  };
}

// Every block as a cell, by state: a dot is free, a frame cached, a square held, a square with a hole
// shared. Shapes are enough to tell them apart.
function drawPool(width, { pool, left }, lit) {
  const pitch = Math.max(4, Math.min(14, Math.floor(Math.sqrt((width * 150) / pool.length))));
  const columns = Math.max(1, Math.floor(width / pitch)), side = pitch - Math.max(1, pitch / 5), hole = side / 3;
  const corner = (block) => [(block % columns) * pitch, Math.floor(block / columns) * pitch];
  const square = (x, y, size) => `M${x} ${y}h${size}v${size}h${-size}z`;
  const cells = { f: [], c: [], h: [], s: [] };
  for (let block = 0; block < pool.length; block++) {
    const [x, y] = corner(block), middle = (side - 1.5) / 2;
    const state = pool[block];
    if (state === "f") cells.f.push(square(x + middle, y + middle, 1.5));
    else if (state === "c") cells.c.push(square(x + 0.5, y + 0.5, side - 1));
    else cells[state]?.push(square(x, y, side) + (state === "s" ? square(x + hole, y + hole, hole) : ""));
  }
  const around = (blocks, kind) => svg("path", { class: kind, d: blocks.map((block) => {
    const [x, y] = corner(block);
    return square(x - 1, y - 1, side + 2);
  }).join("") });
  const drawing = svg("svg", {
    class: "pool", width, height: Math.ceil(pool.length / columns) * pitch, tabindex: 0, role: "img",
    "aria-label": "The blocks of the cache; arrow keys go from one to the next",
  },
    Object.entries(cells).map(([state, drawn]) => svg("path", { class: `state-${state}`, "fill-rule": "evenodd", d: drawn.join("") })),
    left.length ? around(left, "evicted") : null,
    around(lit, "lit"));
  drawing.blockAt = (x, y) => Math.floor(y / pitch) * columns + Math.floor(x / pitch);
  drawing.columns = columns;
  return drawing;
}

function poolLegend() {
  return element("ul", { class: "legend" }, Object.entries(STATES).map(([state, [name, meaning]]) =>
    element("li", { "data-tip": `${name}: ${meaning}`, tabindex: 0 },
      svg("svg", { class: "pool", width: 12, height: 12, "aria-hidden": true }, svg("path", {
        class: `state-${state}`, "fill-rule": "evenodd",
        d: { f: "M5 5h2v2h-2z", c: "M1 1h10v10h-10z", h: "M0 0h12v12h-12z", s: "M0 0h12v12h-12zM4 4h4v4h-4z" }[state],
      })), " ", name, " ", element("b", { "data-count": state }))),
    element("li", {}, svg("svg", { class: "pool", width: 12, height: 12, "aria-hidden": true }, svg("path", { class: "evicted-sample", d: "M1 1h10v10h-10z" })), " just given up"));
}

// One sequence as a row of blocks, each with its base; what follows a hole is told apart.
function drawSequence({ sequence, name, size, shared, chosen, marked, press, free }) {
  const { id, kind, blocks = [], bases = [] } = sequence;
  const stored = sequence.computed_tokens ?? sequence.tokens ?? 0;
  const chips = blocks.slice(0, MOST_CHIPS).map((block, i) => {
    const hole = bases[i] - (i ? bases[i - 1] + size : 0);
    const filled = Math.max(0, Math.min(size, stored - i * size));
    const sharers = shared.get(block)?.length ?? 1;
    const mark = marked?.get(block);
    const isChosen = chosen?.id === id && i >= chosen.first && i <= chosen.last;
    const told = [
      `block ${block}: ${many(filled, "token")} from position ${bases[i]} on`,
      sharers > 1 ? `shared by ${sharers} sequences` : null,
      mark?.was != null ? `its base was ${mark.was} before` : null,
      mark?.rotated ? "its keys were rotated and written again" : null,
    ].filter(Boolean).join("\n");
    return [
      hole > 0 ? element("li", { class: "hole", "data-tip": `no entries for positions ${bases[i] - hole} to ${bases[i] - 1}`, tabindex: 0 }, `${hole} gone`) : null,
      element("li", { "data-chip": block }, element("button", {
        type: "button", class: `chip${sharers > 1 ? " shared" : ""}${mark?.rotated ? " rotated" : ""}`,
        "data-act": `cache-block-${id}-${i}`, "data-block": block, "data-base": bases[i], "data-tip": told, "aria-label": told,
        "aria-pressed": String(isChosen), disabled: kind !== "kept" ? true : null,
        style: { "--fill": filled / size }, click: (event) => press(id, i, event.shiftKey),
      },
        element("small", {}, mark?.was != null ? element("s", {}, mark.was) : null, bases[i]),
        element("b", {}, block),
        element("i", {}, mark?.rotated ? "↻" : sharers > 1 ? `×${sharers}` : ""))),
    ];
  });
  return element("article", { class: "sequence", "data-sequence": id },
    element("header", {},
      element("b", { "data-tip": id, tabindex: 0 }, name), kind === "kept" ? " · kept · " : " · running · ",
      figure(many(stored, "token"), `/v1/cache/stream: computed_tokens of ${id}`),
      sequence.dropped_tokens ? ` · ${format.count(sequence.dropped_tokens)} dropped` : null,
      kind === "kept" ? button("Free", `cache-free-${id}`, () => free(id), { class: "quiet" }) : null),
    element("ol", { class: "chips" }, chips,
      blocks.length > MOST_CHIPS ? element("li", {}, `and ${blocks.length - MOST_CHIPS} more`) : null));
}

// Of a table whose blocks are the same, only the number of tokens is drawn again.
function growSequence(table, { computed_tokens: stored, blocks }, size) {
  fill(table.querySelector("header .figure"), many(stored, "token"));
  table.querySelector("li:last-child > .chip")?.style.setProperty("--fill", Math.max(0, stored - (blocks.length - 1) * size) / size);
}

// Draws a table in place of an old one: blocks that stay slide to their new place, those that left fade.
function replaceSequence(old, table) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const from = new Map(calm ? [] : [...old.querySelectorAll("[data-chip]")].map((chip) => [chip.dataset.chip, [chip, chip.getBoundingClientRect()]]));
  const focused = old.contains(document.activeElement) ? document.activeElement.dataset.act : null;
  old.replaceWith(table);
  if (focused) table.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  const corner = table.getBoundingClientRect();
  for (const chip of table.querySelectorAll("[data-chip]")) {
    const [, was] = from.get(chip.dataset.chip) ?? [];
    from.delete(chip.dataset.chip);
    if (!was) continue;
    const at = chip.getBoundingClientRect();
    if (was.x === at.x && was.y === at.y) continue;
    chip.animate([{ transform: `translate(${was.x - at.x}px, ${was.y - at.y}px)` }, { transform: "none" }], { duration: 500, easing: "ease-in-out" });
  }
  for (const [chip, was] of from.values()) {
    Object.assign(chip.style, { position: "absolute", left: `${was.x - corner.x}px`, top: `${was.y - corner.y}px` });
    chip.inert = true;
    table.append(chip);
    chip.animate([{ opacity: 1 }, { opacity: 0, transform: "translateY(8px)" }], { duration: 700 }).finished.then(() => chip.remove(), () => {});
  }
}
