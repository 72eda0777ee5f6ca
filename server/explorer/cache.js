// Panel 3: the cache as it is now, and what an operation does to stored keys.
// The view follows /v1/cache/stream; plans are /v1/cache/plan's, and what happened is what
// /v1/cache/sequences/{id}/operations answers.
{
  const STATES = {
    f: ["free", "nothing is stored in it that anybody could use"],
    c: ["cached", "nobody holds it, but its content is known and may be found again"],
    h: ["held", "by one sequence"],
    s: ["shared", "held by several sequences at once"],
  };
  const PROMPT = "The mill stood where the river leaves the forest, and whoever came by the road heard " +
    "it before he saw it. Nobody remembered who had built it. The miller said that his father had found it " +
    "there, and that his father's father had said the same of his own, so that in the end one might think " +
    "that it had grown out of the bank like the willows. In spring the water rose to the second step, and " +
    "in a dry summer the children walked across the river bed and looked for coins. Once, an old woman " +
    "told them, a king had thrown his crown into the pond, and the wheel had rotated backwards for a day.";
  const MOVING = "Where the position was put into the stored key, as RoPE usually does, each moved key must be rotated again. Where it is " +
    "only added to scores, as under ALiBi and T5's bias, nothing stored has to change.";
  const MOST_CHIPS = 160; // of one table
  const MOST_TABLES = 24;

  // name: its title, what it does to the selected blocks, and its fields for a plan and for the operation.
  const OPERATIONS = {
    evict_renumber: {
      title: "Shift",
      does: "Drops the selected blocks and closes the gap: every later token moves to an earlier position.",
      why: MOVING,
      span: ({ first, count }) => ({ first, count }),
    },
    evict_keep: {
      title: "Evict",
      does: "Drops the selected blocks. Later tokens keep their positions, and a hole remains: the sequence can still be read, but not continued.",
      why: "Who keeps its position keeps its key.",
      span: ({ first, count }) => ({ first, count }),
    },
    move_span: {
      title: "Move",
      does: "Uses the selected blocks once more, at the end of another sequence and so at other positions.",
      why: MOVING,
      span: ({ first, count }) => ({ first, count }),
      moves: "onto",
    },
    fork: {
      title: "Fork",
      does: "A second sequence begins with the same tokens, up to the end of the selection.",
      why: "Both lists name the same blocks. Positions stay as they are, so under no encoding does a key change.",
      span: ({ first, count }) => ({ count: first + count }),
    },
    append: {
      title: "Append",
      does: "Computes 16 more tokens behind the last one.",
      why: "A key is computed from its token and those before it, and a later token is no input of it. So under no encoding does a stored key change.",
      span: () => ({}),
      act: () => ({ count: 16 }),
    },
  };

  // ------------------------------------------------------------------------------------- the view

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

  function legend() {
    return element("ul", { class: "legend" }, Object.entries(STATES).map(([state, [name, meaning]]) =>
      element("li", { "data-tip": `${name}: ${meaning}`, tabindex: 0 },
        svg("svg", { class: "pool", width: 12, height: 12, "aria-hidden": true }, svg("path", {
          class: `state-${state}`, "fill-rule": "evenodd",
          d: { f: "M5 5h2v2h-2z", c: "M1 1h10v10h-10z", h: "M0 0h12v12h-12z", s: "M0 0h12v12h-12zM4 4h4v4h-4z" }[state],
        })), " ", name, " ", element("b", { "data-count": state }))),
      element("li", {}, svg("svg", { class: "pool", width: 12, height: 12, "aria-hidden": true }, svg("path", { class: "evicted-sample", d: "M1 1h10v10h-10z" })), " just given up"));
  }

  // ------------------------------------------------------------------------------ what it would cost

  // What a new token's position takes, in words.
  function worked({ rotations, bias_values: added, flops }) {
    const parts = [rotations && many(rotations, "rotation"), added && many(added, "addition to scores", "additions to scores")].filter(Boolean);
    if (!parts.length) return flops ? "; each new token's embedding gets a vector" : "; a new token's position takes no work";
    return `; each new token's position takes ${parts.join(" and ")}`;
  }

  // One encoding's row of a plan, in words and with what it counts.
  function verdict(plan, row) {
    if (plan.operation === "append") return ["free", `earlier entries stay as they are${worked(row.work)}`];
    if (row.capability === "impossible")
      return ["impossible", `impossible: ${row.reason}; ${many(row.recompute.tokens, "token")} must be computed again`];
    if (row.rewritten_entries)
      return ["rewrite", `${many(row.rewritten_entries, "key")} must be rotated and written again${row.capability === "approximate" ? ", rounded each time" : ""}; values stay`];
    if (row.copied_entries) return ["copy", `${many(row.copied_entries, "entry", "entries")} copied, none changed`];
    return ["free", "stored keys stay as they are; only the list of blocks changes"];
  }

  // 0 → A, 25 → Z, 26 → AA.
  const letters = (n) => (n < 26 ? "" : letters(Math.floor(n / 26) - 1)) + String.fromCharCode(65 + (n % 26));

  const FRAMES = { absolute: "keys stored rotated", raw: "keys stored unrotated", block: "keys rotated within the block" };
  const encodingOf = ({ encoding, key_frame: frame }) => (encoding === "rope" ? `rope, ${FRAMES[frame]}` : encoding);

  function chooser({ operation, pick }) {
    return element("div", { class: "choices", role: "group", "aria-label": "Operation" },
      Object.entries(OPERATIONS).map(([name, { title }]) =>
        button(title, `cache-${name}`, () => pick(name), { "aria-pressed": String(name === operation) })));
  }

  // What the plan says for every encoding, and beside it what happened where it was done.
  function planTable(plan, happened) {
    const own = plan.data.find((row) => row.own);
    const rows = plan.data.filter((row) => row === own || encodingOf(row) !== encodingOf(own));
    const most = Math.max(1, ...rows.map((row) => row.rewritten_entries ?? 0));
    return element("div", { class: "scroll" }, element("table", { class: "plan" },
      element("caption", {}, "Predicted for every encoding, for a model of this shape. Each token has a key for every layer and head"),
      element("thead", {}, element("tr", {},
        ["encoding", "stored keys to rewrite", "read and written", ""].map((name, i) =>
          element("th", { scope: "col", class: i === 2 ? "number" : null }, name)))),
      element("tbody", {}, rows.map((row) => {
        const [kind, words] = verdict(plan, row);
        const keys = row.rewritten_entries ?? 0;
        const source = `/v1/cache/plan: rewritten_entries of ${row.encoding}, ${row.key_frame}`;
        return element("tr", { class: row.own ? `own ${kind}` : kind, "data-encoding": row.encoding, "data-frame": row.key_frame },
          element("th", { scope: "row" }, encodingOf(row), row.own ? element("span", { class: "badge" }, "this model") : null),
          element("td", {},
            element("span", { class: "keys", style: { "--share": keys / most } }),
            kind === "impossible" ? "–" : figure(format.count(keys), source, { "data-rewritten": keys })),
          element("td", { class: "number" }, kind === "impossible" ? "–" : figure(format.bytes(row.bytes_moved ?? 0), "/v1/cache/plan: bytes_moved")),
          element("td", { class: `verdict ${kind}` }, words,
            happened.has(encodingOf(row)) ? element("span", { class: "happened" }, happened.get(encodingOf(row))) : null));
      }))));
  }

  // ---------------------------------------------------------------------------- what has happened

  // The answer of an operation in words, with the checksums as witness.
  function outcome({ operation, happened, before, after }, origin) {
    const pairs = after.checksums.map((sum, i) => [before.checksums[origin(i)], sum]).filter(([was, sum]) => was && sum);
    const other = pairs.filter(([was, sum]) => was !== sum).length;
    const witness = pairs.length === 0 || operation === "move_span" ? "" : other === 0
      ? ` Checksums: ${pairs.length} of ${pairs.length} full blocks that stayed are the same as before.`
      : ` Checksums: ${other} of ${pairs.length} full blocks that stayed have changed.`;
    if (operation === "append") {
      const added = after.tokens - before.tokens;
      return `${many(added, "token")} more, no stored key touched.${witness}`;
    }
    const { rewritten_entries: keys, copied_entries: copied, bytes_moved: bytes, seconds } = happened;
    const work = keys
      ? `${many(keys, "key")} rotated and written again, ${format.bytes(bytes)} read and written, in ${format.seconds(seconds)}.` +
        (copied && operation !== "move_span" ? ` That is more than predicted: ${many(copied, "entry", "entries")} had to be copied first, as another sequence shares their blocks.` : "")
      : copied ? `${many(copied, "entry", "entries")} copied, no stored key changed, in ${format.seconds(seconds)}.`
        : `No stored key changed: only the list of blocks did, in ${format.seconds(seconds)}.`;
    return work + witness;
  }

  // Which block, by its place in the sequence, a block came from.
  function originOf(operation, { first, count }, size) {
    const gone = operation.startsWith("evict") ? count / size : 0;
    return (i) => (i < first / size ? i : i + gone);
  }

  // What became of each block of a sequence that an operation changed: {was: its base before, rotated}.
  function marks({ before, after, changed_blocks: changed }, origin) {
    const rotated = new Set(changed);
    return new Map(after.blocks.map((block, i) => {
      const was = before.bases[origin(i)];
      return [block, { was: was === after.bases[i] ? null : was, rotated: rotated.has(block) }];
    }));
  }

  // One sequence as a row of blocks, each with its base; what follows a hole is told apart.
  function drawTable({ sequence, name, size, shared, chosen, marked, press, free }) {
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
          type: "button", class: `chip${sharers > 1 ? " shared" : ""}${mark?.rotated ? " rotated" : ""}${mark?.was != null ? " rebased" : ""}`,
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
  function grow(table, { computed_tokens: stored, blocks }, size) {
    fill(table.querySelector("header .figure"), many(stored, "token"));
    table.querySelector("li:last-child > .chip")?.style.setProperty("--fill", Math.max(0, stored - (blocks.length - 1) * size) / size);
  }

  // Draws a table in place of an old one: blocks that stay slide to their new place, those that left fade.
  function replace(old, table) {
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

  // ------------------------------------------------------------------------------------- the panel

  panels.push({
    id: "cache",
    title: "Cache",
    lead: "A cache keeps one key and one value for every token, layer and head, in blocks. A sequence is a list " +
      "of blocks, each with the position of its first token. Watch what an operation changes: the list, " +
      "which costs nothing, or the stored keys.",
    mount(root, page) {
      let view = null, chosen = null, operation = "evict_renumber", lit = [], plan = null, marked = new Map();
      let happened = new Map(), told = "", watching = null, onto = null; // onto: a sequence's id, or "" for a fork; null: not chosen yet
      const kept = new Map(); // id: the sequence as last answered, and the prompt that it was made of
      const size = () => view?.entry.block_size ?? 16;
      const names = new Map(); // id: a short name, in the order in which they were first seen
      function nameOf(id) {
        const isKept = (each) => each.startsWith("seq-");
        if (!names.has(id)) names.set(id, isKept(id) ? `Sequence ${letters([...names.keys()].filter(isKept).length)}` : `Request ${id.slice(-6)}`);
        return names.get(id);
      }

      // The page's names of sequences in place of their ids.
      const renamed = (message) => message.replace(/\bseq-[0-9a-f]+/gi, (id) => nameOf(id.toLowerCase()));

      // One thing at a time: meanwhile no other can be started, and the selection stays as it is.
      async function alone(work) {
        if (root.inert) return;
        const act = document.activeElement?.dataset.act;
        root.inert = true;
        try {
          await page.attempt(() => work().catch((error) => {
            if (error instanceof ApiError) error.message = renamed(error.message);
            throw error;
          }));
        } finally {
          root.inert = false;
          if (act) root.querySelector(`[data-act="${CSS.escape(act)}"]:enabled`)?.focus({ preventScroll: true });
        }
      }

      const facts = element("dl", { class: "ledger" });
      const pool = element("div", { class: "pool-holder" });
      const readout = element("p", { class: "note readout" });
      const tables = element("div", { class: "tables" }), running = element("div", { class: "tables" });
      const text = element("textarea", { rows: 3, maxlength: 20000, "data-act": "cache-prompt", "aria-label": "Prompt to keep" });
      text.value = PROMPT;
      const actions = element("div", { class: "actions" });
      const lifetime = element("p", { class: "note" }, "Everybody who sees this server's cache sees what is kept, until it is freed or has not been used for some minutes.");
      const marksLegend = legend();
      fill(root,
        element("div", { class: "row" },
          field("A prompt whose entries are to stay in the cache", text, { class: "field wide" }),
          button("Keep it", "cache-keep", () => alone(keep), { class: "main" })),
        lifetime,
        tables,
        element("p", { class: "note" }, "A box is a block of tokens: above, the position of its first token; below, its number in the cache. ×2: two sequences share it. ↻: its keys were rotated and written again. Point at one to see it everywhere."),
        actions,
        element("h2", {}, "The whole cache"), facts, pool, marksLegend, readout,
        element("h2", {}, "Running requests"), running);

      const drawAgain = fitted(pool, (width) => {
        if (!view) return element("p", { class: "note" }, "Waiting for the server.");
        const drawing = drawPool(width, view, lit);
        const at = (block) => block >= 0 && block < view.pool.length && light([block]);
        drawing.addEventListener("pointermove", (event) => {
          const { left, top } = drawing.getBoundingClientRect();
          at(drawing.blockAt(event.clientX - left, event.clientY - top));
        });
        drawing.addEventListener("keydown", (event) => {
          const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -drawing.columns, ArrowDown: drawing.columns }[event.key];
          if (!step) return;
          event.preventDefault();
          at((lit[0] ?? 0) + step);
        });
        return drawing;
      });

      // Lights blocks up wherever they are drawn.
      function light(blocks) {
        if (String(blocks) === String(lit)) return;
        lit = blocks;
        const [block] = blocks;
        for (const chip of root.querySelectorAll(".chip")) chip.classList.toggle("lit", lit.includes(Number(chip.dataset.block)));
        if (block !== undefined && view) {
          const [name, meaning] = STATES[view.pool[block]] ?? ["out of use", ""];
          const by = [...view.sequences.values()].filter((each) => each.blocks?.includes(block)).map((each) => nameOf(each.id));
          fill(readout, `Block ${block}: ${name}, ${by.length ? `by ${by.join(" and ")}` : meaning}.`);
        }
        drawAgain();
      }
      const chipOf = (event) => event.target.closest?.(".chip");
      for (const holder of [tables, running]) {
        for (const kind of ["pointerover", "focusin"]) holder.addEventListener(kind, (event) => {
          const chip = chipOf(event);
          light(chip ? [Number(chip.dataset.block)] : []);
        });
        holder.addEventListener("pointerleave", () => light([]));
      }

      function drawFacts() {
        const { blocks, audit, waiting } = view.entry;
        const states = Object.fromEntries(Object.keys(STATES).map((state) => [state, 0]));
        for (const state of view.pool) states[state] = (states[state] ?? 0) + 1;
        for (const node of marksLegend.querySelectorAll("[data-count]")) fill(node, format.count(states[node.dataset.count]));
        const about = (caption, value, field, tip) => fact(caption, figure(format.count(value), `/v1/cache/stream: ${field}\n${tip}`, { "data-fact": field }));
        fill(facts,
          about("blocks", blocks.free + blocks.active + blocks.cached + blocks.quarantined, "blocks", `of ${size()} tokens each`),
          about("sealed", audit.sealed, "audit.sealed", "full blocks of which a checksum was taken, since the start"),
          about("verified", audit.verified, "audit.verified", "times a block was compared with its checksum, since the start"),
          about("found changed", audit.mutated, "audit.mutated", "entries that were not what their checksum says: 0, or something is broken"),
          about("requests waiting", waiting, "waiting", "that hold no block yet"));
      }

      function drawTables(before) {
        const all = [...view.sequences.values()];
        for (const { id } of all) nameOf(id);
        const isKept = ({ kind }) => kind === "kept";
        drawIn(tables, all.filter(isKept), before, "No sequence is kept now. Keep a prompt, to see what operations do to it.");
        drawIn(running, all.filter((each) => !isKept(each)).slice(0, MOST_TABLES), before, "None now. Let Talk, Race or Load run in another window, and watch.");
      }

      // Tables of these sequences, the newest on top.
      function drawIn(holder, wanted, before, none) {
        const old = new Map([...holder.querySelectorAll(".sequence")].map((node) => [node.dataset.sequence, node]));
        for (const [id, node] of old) if (!wanted.some((each) => each.id === id)) node.remove();
        for (const sequence of wanted) {
          const was = before?.sequences.get(sequence.id);
          const shares = (shown) => (sequence.blocks ?? []).map((block) => shown?.shared.get(block)?.length ?? 1).join();
          const drawn = old.get(sequence.id);
          if (drawn && was?.blocks === sequence.blocks && was.bases === sequence.bases && shares(before) === shares(view)) {
            if (was !== sequence) grow(drawn, sequence, size());
            continue;
          }
          const table = drawTable({ sequence, name: nameOf(sequence.id), size: size(), shared: view.shared, chosen, marked: marked.get(sequence.id), press, free: (id) => alone(() => free(id)) });
          if (drawn) replace(drawn, table);
          else holder.prepend(table);
        }
        for (const note of holder.querySelectorAll(":scope > .note")) note.remove();
        if (wanted.length === 0) holder.append(element("p", { class: "note" }, none));
      }

      function press(id, i, extends_) {
        const full = Math.floor((view.sequences.get(id).computed_tokens ?? 0) / size());
        if (i >= full) return page.say("This block is not full yet, and operations work on full blocks.");
        const more = chosen?.id === id && i !== chosen.first && (extends_ || chosen.first === chosen.last);
        chosen = more ? { id, first: Math.min(i, chosen.first), last: Math.max(i, chosen.last) } : { id, first: i, last: i };
        reset();
        drawTables();
        alone(predict);
      }

      function reset() {
        happened = new Map();
        told = "";
      }

      const span = () => ({ first: chosen.first * size(), count: (chosen.last - chosen.first + 1) * size() });
      const hasHole = ({ bases = [] }) => bases.some((base, i) => base !== i * size());

      // Sequences that the selected blocks could go on from: they end with a full block and hold none of them.
      function targets() {
        const { blocks } = view.sequences.get(chosen.id);
        const selected = new Set(blocks.slice(chosen.first, chosen.last + 1));
        return [...view.sequences.values()].filter((each) => each.kind === "kept" && each.computed_tokens % size() === 0 && !hasHole(each) && !each.blocks.some((block) => selected.has(block)));
      }

      async function predict() {
        if (!chosen || !view?.sequences.has(chosen.id)) {
          plan = null;
          return drawActions();
        }
        const tokens = view.sequences.get(chosen.id).computed_tokens;
        const { span: fields, moves } = OPERATIONS[operation];
        if (onto !== "" && !targets().some(({ id }) => id === onto)) onto = targets()[0]?.id ?? "";
        const offset = view.sequences.get(onto)?.computed_tokens ?? size();
        plan = await page.api.post("v1/cache/plan", { model: page.model.id, operation, tokens, ...fields(span()), ...(moves === "onto" ? { offset } : {}) });
        drawActions();
      }

      function drawActions() {
        const result = element("p", { class: "told", role: "status", "data-told": operation }, told);
        if (!chosen || !plan) return refill(actions, told ? [result, element("p", { class: "note" }, "No full block is left in it to do more with.")] : null);
        const { title, does, why, act, moves } = OPERATIONS[operation];
        const { first, count } = span();
        const name = nameOf(chosen.id);
        const sequence = view.sequences.get(chosen.id) ?? {}, { bases = [] } = sequence;
        const stuck = operation === "append" && hasHole(sequence);
        const what = { append: stuck ? `${name} has a hole, so it cannot be continued: keep a prompt anew.` : `To ${name}.`, fork: `The first ${first + count} tokens of ${name}; press another block to fork there.` }[operation] ??
          `Selected: ${many(count / size(), "block")} of ${name}, at positions ${bases[chosen.first]} to ${bases[chosen.last] + size() - 1}. Press two blocks to select another span.`;
        refill(actions,
          element("h2", {}, "What would it cost to …"),
          chooser({ operation, pick: (name) => { operation = name; reset(); alone(predict); } }),
          element("p", { class: "why" }, does, " ", why, element("span", { class: "note" }, ` ${what}`)),
          planTable(plan, happened),
          element("div", { class: "row" },
            moves === "onto" ? ontoChooser() : null,
            button(act ? `${title} ${act().count} tokens` : moves === "onto" || operation.startsWith("evict") ? `${title} these ${count} tokens` : title, "cache-do", () => alone(operate), { class: "main", disabled: stuck }),
            page.models.length > 1 ? button(`The same, with the prompt kept anew, in all ${page.models.length} models`, "cache-all", () => alone(operateAll), { "data-tip": "Keeps the same prompt in every served model, does the same there, and frees it again" }) : null),
          result);
      }

      // Where moved blocks are to go on: after the last token of which sequence.
      function ontoChooser() {
        const options = targets().map(({ id, computed_tokens: tokens }) => [id, `${nameOf(id)}, from position ${tokens} on`]);
        const picker = select("cache-onto", [...options, ["", `a fork of its first block, from position ${size()} on`]], { change: () => {
          onto = picker.value;
          reset();
          alone(predict);
        } });
        picker.value = onto;
        return field("Onto the end of", picker);
      }

      async function keep() {
        const prompt = text.value;
        const sequence = await page.api.post("v1/cache/sequences", { model: page.model.id, prompt });
        kept.set(sequence.id, { ...sequence, prompt });
        fill(lifetime, "Everybody who sees this server's cache sees what is kept, until it is freed or has not been used for ",
          figure(`${format.number(sequence.expires_in / 60)} minutes`, "/v1/cache/sequences: expires_in, right after keeping"), ".");
        const full = Math.floor(sequence.computed_tokens / size());
        chosen = full ? { id: sequence.id, first: Math.min(2, full - 1), last: Math.min(3, full - 1) } : null;
        reset();
        await appeared(sequence.id);
        drawTables();
        await predict();
        if (!full) page.say(`This prompt fills no block of ${size()} tokens, and operations work on full blocks: keep a longer one.`);
      }

      // Until the stream has told of a change that an answer has told of already.
      async function appeared(id, blocks = null) {
        for (let tries = 0; tries < 40; tries++) {
          const seen = view?.sequences.get(id);
          if (seen && (blocks === null || String(seen.blocks) === String(blocks))) return;
          await new Promise((resolve) => setTimeout(resolve, 50));
        }
      }

      async function free(id) {
        await page.api.remove(`v1/cache/sequences/${id}`);
        if (chosen?.id === id) {
          chosen = plan = null;
          reset();
        }
        drawActions();
      }

      // Does the chosen operation to a kept sequence of a model; a refusal for the encoding's sake is
      // an answer, too.
      async function apply(id, model) {
        const { span: fields, act, moves } = OPERATIONS[operation];
        let target = model === page.model.id && id === chosen.id ? onto : "";
        if (moves === "onto" && !target) {
          const forked = await page.api.post(`v1/cache/sequences/${id}/operations`, { operation: "fork", count: size() });
          target = forked.after.id;
        }
        try {
          const body = { operation, ...fields(span()), ...act?.(), ...(moves === "onto" ? { onto: target } : {}) };
          return { target, answer: await page.api.post(`v1/cache/sequences/${id}/operations`, body) };
        } catch (error) {
          if (error.code !== "impossible_operation") throw error;
          return { target, refused: renamed(whyImpossible(error)) };
        }
      }

      async function operate() {
        const { id } = chosen;
        if (told) {
          reset();
          await predict();
        }
        const { answer, refused } = await apply(id, page.model.id);
        const own = encodingOf(plan.data.find((row) => row.own));
        if (refused) {
          told = refused;
          happened = new Map([[own, "refused: nothing was changed"]]);
          return drawActions();
        }
        const { after } = answer;
        const origin = originOf(operation, span(), size());
        told = outcome(answer, origin);
        happened = new Map([[own, `happened: ${brief(answer)}`]]);
        marked = new Map([[after.id, marks(answer, origin)]]);
        await appeared(after.id, after.blocks);
        drawTables();
        const full = Math.floor((view.sequences.get(id)?.computed_tokens ?? 0) / size());
        if (operation.startsWith("evict")) chosen = full ? { id, first: Math.min(chosen.first, full - 1), last: Math.min(chosen.last, full - 1) } : null;
        drawActions();
      }

      async function operateAll() {
        const entries = Object.fromEntries((await page.api.get("v1/cache")).data.map((entry) => [entry.model, entry]));
        const prompt = kept.get(chosen.id)?.prompt ?? text.value;
        const found = new Map();
        reset();
        for (const { id: model } of page.models) {
          const sequence = await page.api.post("v1/cache/sequences", { model, prompt });
          const { target, answer, refused } = await apply(sequence.id, model);
          for (const id of new Set([sequence.id, target, answer?.after?.id])) if (id) await page.api.remove(`v1/cache/sequences/${id}`);
          found.set(encodingOf(entries[model]), refused ? `${model} refused` : `${model}: ${brief(answer)}`);
          happened = found;
          drawActions();
        }
      }

      const brief = ({ operation, happened, before, after }) => operation === "append"
        ? `${many(after.tokens - before.tokens, "token")} more`
        : `${many(happened.rewritten_entries, "key")} rotated, ${format.bytes(happened.bytes_moved)}` +
          (happened.copied_entries && happened.rewritten_entries && operation !== "move_span" ? ", with copies of shared blocks" : "");

      async function watch(signal) {
        while (!signal.aborted) {
          try {
            for await (const { data } of page.api.stream(`v1/cache/stream?model=${encodeURIComponent(page.model.id)}`, undefined, { signal })) {
              const before = view;
              view = followed(view, data);
              drawFacts();
              drawTables(data.type === "snapshot" ? null : before);
              if (data.pool) drawAgain();
              if (chosen && !view.sequences.has(chosen.id)) {
                [chosen, plan] = [null, null];
                reset();
                drawActions();
              }
            }
          } catch (error) {
            if (signal.aborted) return;
            page.say(error.message, true);
          }
          await new Promise((resolve) => setTimeout(resolve, 2000));
        }
      }

      function begin() {
        watching?.abort();
        watching = new AbortController();
        watch(watching.signal);
      }

      page.on("model", () => {
        [view, chosen, plan] = [null, null, null];
        fill(tables);
        fill(running);
        reset();
        drawActions();
        if (watching) begin();
      });
      Object.assign(this, { shown: begin, hidden: () => { watching?.abort(); watching = null; } });
    },
  });
}
