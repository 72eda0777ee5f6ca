// Panel 3: the cache as it is now, and what an operation does to stored keys.
const PROMPT = "The mill stood where the river leaves the forest, and whoever came by the road heard " +
  "it before he saw it. Nobody remembered who had built it. The miller said that his father had found it " +
  "there, and that his father's father had said the same of his own, so that in the end one might think " +
  "that it had grown out of the bank like the willows. In spring the water rose to the second step, and " +
  "in a dry summer the children walked across the river bed and looked for coins. Once, an old woman " +
  "told them, a king had thrown his crown into the pond, and the wheel had turned backwards for a day.";
const MOST_TABLES = 24;

panels.push({
  id: "cache",
  title: "Cache",
  lead: "A cache keeps one key and one value for every token, layer and head, in blocks. A sequence is a list " +
    "of blocks, each with the position of its first token. Watch what an operation changes: the list, " +
    "which costs nothing, or the stored keys.",
  mount(root, page) {
    let view = null, chosen = null, operation = "evict_renumber", lit = [], plan = null, marked = new Map();
    let happened = new Map(), told = "", watching = null, onto = null; // onto: a sequence's id, or "" for a fork; null: not chosen yet
    const kept = new Map(); // id: the prompt of a sequence that was kept or forked here
    const size = () => view?.entry.block_size ?? 16;
    const names = new Map(); // id: a short name, in the order in which they were first seen
    function nameOf(id) {
      const isKept = (each) => each.startsWith("seq-");
      if (!names.has(id)) names.set(id, isKept(id) ? `Sequence ${letters([...names.keys()].filter(isKept).length)}` : `Request ${id.slice(-6)}`);
      return names.get(id);
    }

    // The page's names of sequences in place of their ids.
    const renamed = (message) => message.replace(/\bseq-[0-9a-f]+/gi, (id) => nameOf(id.toLowerCase()));

    const alone = (work) => page.alone(root, () => work().catch((error) => {
      if (error instanceof ApiError) error.message = renamed(error.message);
      throw error;
    }));

    const facts = element("dl", { class: "ledger" });
    const pool = element("div", { class: "pool-holder" });
    const readout = element("p", { class: "note readout", role: "status" });
    const tables = element("div", { class: "tables" }), running = element("div", { class: "tables" });
    const text = element("textarea", { rows: 3, maxlength: 20000, "data-act": "cache-prompt", "aria-label": "Prompt to keep" });
    text.value = PROMPT;
    const actions = element("div", { class: "actions" });
    const lifetime = element("p", { class: "note" }, "Everybody who sees this server's cache sees what is kept, until it is freed or has not been used for some minutes.");
    const marksLegend = poolLegend();
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
        const [name, meaning] = STATES[view.pool[block]] ?? OUT_OF_USE[view.pool[block]];
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
        about("found changed", audit.mutated, "audit.mutated", "blocks that were not what their checksum says: 0, or something is broken"),
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
          if (was !== sequence) growSequence(drawn, sequence, size());
          continue;
        }
        const table = drawSequence({ sequence, name: nameOf(sequence.id), size: size(), shared: view.shared, chosen, marked: marked.get(sequence.id), press, free: (id) => alone(() => free(id)) });
        if (drawn) replaceSequence(drawn, table);
        else holder.prepend(table);
      }
      for (const note of holder.querySelectorAll(":scope > .note")) note.remove();
      if (wanted.length === 0) holder.append(element("p", { class: "note" }, none));
    }

    function press(id, i, extends_) {
      const full = Math.floor((view.sequences.get(id).computed_tokens ?? 0) / size());
      if (i >= full) return page.say("This block is not full yet, and operations work on full blocks.");
      const more = chosen?.id === id && i !== chosen.first && (extends_ || chosen.first === chosen.last);
      const wanted = more ? { id, first: Math.min(i, chosen.first), last: Math.max(i, chosen.last) } : { id, first: i, last: i };
      alone(() => predict({ chosen: wanted }));
    }

    function reset() {
      happened = new Map();
      told = "";
    }

    const span = ({ first, last } = chosen) => ({ first: first * size(), count: (last - first + 1) * size() });
    const hasHole = ({ bases = [] }) => bases.some((base, i) => base !== i * size());

    // Sequences that the selected blocks could go on from: they end with a full block and hold none of them.
    function targets({ id, first, last } = chosen) {
      const { blocks } = view.sequences.get(id);
      const selected = new Set(blocks.slice(first, last + 1));
      return [...view.sequences.values()].filter((each) => each.kind === "kept" && each.computed_tokens % size() === 0 && !hasHole(each) && !each.blocks.some((block) => selected.has(block)));
    }

    // wanted: what of `operation`, `chosen` and `onto` is to be another. It is so once its plan has come:
    // buttons do what they say.
    async function predict(wanted) {
      const next = { operation, chosen, onto, ...wanted }, isThere = () => next.chosen && view?.sequences.has(next.chosen.id);
      let found = null;
      if (isThere()) {
        const tokens = view.sequences.get(next.chosen.id).computed_tokens, others = targets(next.chosen);
        const { span: fields, moves } = OPERATIONS[next.operation];
        if (next.onto !== "" && !others.some(({ id }) => id === next.onto)) next.onto = others[0]?.id ?? "";
        const offset = view.sequences.get(next.onto)?.computed_tokens ?? size();
        const body = { model: page.model.id, operation: next.operation, tokens, ...fields(span(next.chosen)), ...(moves === "onto" ? { offset } : {}) };
        found = await page.api.post("v1/cache/plan", body).catch((error) => {
          drawActions(); // a control may show what was wanted
          throw error;
        });
      }
      ({ operation, chosen, onto } = next);
      plan = isThere() ? found : null;
      reset();
      if (view) drawTables();
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
        operationChooser({ operation, pick: (name) => alone(() => predict({ operation: name })) }),
        element("p", { class: "why" }, does, " ", why, element("span", { class: "note" }, ` ${what}`)),
        planTable(plan, happened),
        element("div", { class: "row" },
          moves === "onto" ? ontoChooser() : null,
          button(act ? `${title} ${act().count} tokens` : moves === "onto" || operation.startsWith("evict") ? `${title} these ${count} tokens` : title, "cache-do", () => alone(operate), { class: "main", disabled: stuck }),
          page.models.length > 1 && kept.get(chosen.id) ? button(`The same, with the prompt kept anew, in all ${page.models.length} models`, "cache-all", () => alone(operateAll), { "data-tip": "Keeps the same prompt in every served model, does the same there, and frees it again" }) : null),
        result);
    }

    // Where moved blocks are to go on: after the last token of which sequence.
    function ontoChooser() {
      const options = targets().map(({ id, computed_tokens: tokens }) => [id, `${nameOf(id)}, from position ${tokens} on`]);
      const picker = select("cache-onto", [...options, ["", `a fork of its first block, from position ${size()} on`]], { change: () => alone(() => predict({ onto: picker.value })) });
      picker.value = onto;
      return field("Onto the end of", picker);
    }

    async function keep() {
      await until(() => view);
      if (!view) return page.say("The view of the cache has not come yet, and what is kept could not be shown. Wait a moment, and try again.", true);
      const prompt = text.value;
      const sequence = await page.api.post("v1/cache/sequences", { model: page.model.id, prompt });
      kept.set(sequence.id, prompt);
      fill(lifetime, "Everybody who sees this server's cache sees what is kept, until it is freed or has not been used for ",
        figure(`${format.number(sequence.expires_in / 60)} minutes`, "/v1/cache/sequences: expires_in, right after keeping"), ".");
      const full = Math.floor(sequence.computed_tokens / size());
      await appeared(sequence.id);
      await predict({ chosen: full ? { id: sequence.id, first: Math.min(2, full - 1), last: Math.min(3, full - 1) } : null });
      if (!full) page.say(`This prompt fills no block of ${size()} tokens, and operations work on full blocks: keep a longer one.`);
    }

    // Until the stream has told of a change that an answer has told of already.
    const appeared = (id, blocks = null) => until(() => {
      const seen = view?.sequences.get(id);
      return seen && (blocks === null || String(seen.blocks) === String(blocks));
    });

    // The stream should not take longer than these two seconds.
    async function until(isSo) {
      for (let tries = 0; tries < 40 && !isSo(); tries++) await new Promise((resolve) => setTimeout(resolve, 50));
    }

    async function free(id) {
      await page.api.remove(`v1/cache/sequences/${id}`);
      if (chosen?.id === id) {
        chosen = plan = null;
        reset();
      }
      drawActions();
    }

    // What is asked now: it stays so while it is done, whatever the stream tells meanwhile.
    const asked = () => ({ operation, span: span(), onto: onto ?? "" });

    // Does it to a kept sequence: {answer}, or {refused: why}, for the encoding's sake. Where blocks go
    // onto no sequence that there is, they go onto a fork of the first block, `target`.
    async function apply(id, { operation, span, onto }) {
      const { span: fields, act, moves } = OPERATIONS[operation];
      let target = onto;
      if (moves === "onto" && !onto) {
        const forked = await page.api.post(`v1/cache/sequences/${id}/operations`, { operation: "fork", count: size() });
        target = forked.after.id;
      }
      try {
        const body = { operation, ...fields(span), ...act?.(), ...(moves === "onto" ? { onto: target } : {}) };
        return { target, answer: await page.api.post(`v1/cache/sequences/${id}/operations`, body) };
      } catch (error) {
        if (target !== onto) await page.api.remove(`v1/cache/sequences/${target}`);
        if (error.code !== "impossible_operation") throw error;
        return { refused: renamed(whyImpossible(error)) };
      }
    }

    async function operate() {
      const { id, first, last } = chosen, wanted = asked();
      if (told) await predict();
      const own = encodingOf(plan.data.find((row) => row.own));
      const { answer, refused } = await apply(id, wanted);
      if (refused) {
        told = refused;
        happened = new Map([[own, "refused: nothing was changed"]]);
        return drawActions();
      }
      const { after } = answer;
      if (operation === "fork") kept.set(after.id, kept.get(id));
      const origin = originOf(operation, wanted.span, size());
      told = outcome(answer, origin);
      happened = new Map([[own, `happened: ${brief(answer)}`]]);
      marked = new Map([[after.id, marks(answer, origin)]]);
      await appeared(after.id, after.blocks);
      drawTables();
      const full = Math.floor((view.sequences.get(id)?.computed_tokens ?? 0) / size());
      if (operation.startsWith("evict")) chosen = full ? { id, first: Math.min(first, full - 1), last: Math.min(last, full - 1) } : null;
      drawActions();
    }

    async function operateAll() {
      const entries = Object.fromEntries((await page.api.get("v1/cache")).data.map((entry) => [entry.model, entry]));
      const prompt = kept.get(chosen.id), wanted = { ...asked(), onto: "" };
      reset();
      for (const { id: model } of page.models) {
        const said = await tryIn(model, prompt, wanted), encoding = encodingOf(entries[model]);
        happened = new Map(happened).set(encoding, [happened.get(encoding), said].filter(Boolean).join("; "));
        drawActions();
      }
    }

    // Does it to a prompt that is kept for that alone; in words.
    async function tryIn(model, prompt, wanted) {
      const made = [];
      try {
        made.push((await page.api.post("v1/cache/sequences", { model, prompt })).id);
        const { target, answer, refused } = await apply(made[0], wanted);
        made.push(target, answer?.after?.id);
        return refused ? `${model} refused` : `${model}: ${brief(answer)}`;
      } catch (error) {
        if (!(error instanceof ApiError) || error.status === 0) throw error;
        return `${model}: ${error.message}`;
      } finally {
        for (const id of new Set(made)) if (id) await page.api.remove(`v1/cache/sequences/${id}`).catch(() => {});
      }
    }

    const brief = ({ operation, happened, before, after }) => operation === "append"
      ? `${many(after.tokens - before.tokens, "token")} more`
      : `${many(happened.rewritten_entries, "key")} rotated, ${format.bytes(happened.bytes_moved)}` +
        (happened.copied_entries && happened.rewritten_entries && operation !== "move_span" ? ", with copies of shared blocks" : "");

    async function watch(signal) {
      let lost = false;
      while (!signal.aborted) {
        try {
          for await (const { data } of page.api.stream(`v1/cache/stream?model=${encodeURIComponent(page.model.id)}`, undefined, { signal })) {
            if (lost) page.say("");
            lost = false;
            const before = view;
            view = followed(view, data);
            drawFacts();
            drawTables(data.type === "snapshot" ? null : before);
            if (data.pool) drawAgain();
            view = { ...view, left: [] }; // that is drawn once
            if (chosen && !view.sequences.has(chosen.id)) {
              [chosen, plan] = [null, null];
              reset();
              drawActions();
            }
          }
        } catch (error) {
          if (signal.aborted) return;
          page.say(`The view of the cache is not followed: ${error.message}`, true);
          lost = true;
          if (!(error instanceof ApiError)) throw error;
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
