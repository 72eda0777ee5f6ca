// Panel 5: the claim that appending changes nothing, as an experiment with every served model; what
// moving does instead; and where the claim fails. Checksums are those of the bytes in the cache.
{
  const TEXT = "In the beginning the village lay between the river and the old forest, and whoever came by " +
    "the road saw first the mill, then the church, and behind both of them the mountain. Nobody remembered who had " +
    "built the mill. The miller said that his father had found it there, and that his father's father had told " +
    "the same of his own, so that in the end one might think that it had grown out of the bank like the willows.";
  const APPENDED = 100;
  const AUDITED = 112; // tokens of the text at most: an audit takes 128
  const COUNTER = "rope:dynamic-rewrite"; // of the arms that /v1/positions/audit lists
  const SIGNS = { kept: "", equal: "=", changed: "≠", dropped: "×" };
  const WORDS = { kept: "stored", equal: "equal", changed: "changed", dropped: "dropped" };

  // What became of one block: before and after are checksums; after is undefined until it is asked for,
  // and null for a block that was dropped.
  function stateOf({ before, after }) {
    return after === undefined ? "kept" : after === null ? "dropped" : before === after ? "equal" : "changed";
  }

  // A checksum's last 16 hexadecimal digits as 4 × 4 squares, larger for larger digits: two checksums
  // that differ look different.
  function print(checksum) {
    return svg("svg", { viewBox: "0 0 24 24", width: 24, height: 24, class: "print", "aria-hidden": true },
      [...checksum].slice(-16).map((digit, i) => {
        const side = 0.8 + (4.8 * parseInt(digit, 16)) / 15;
        return svg("rect", { x: 6 * (i % 4) + 3 - side / 2, y: 6 * Math.floor(i / 4) + 3 - side / 2, width: side, height: side });
      }));
  }

  // Blocks side by side: the print before, the sign, the print after, and the verdict as a word.
  function strip(blocks) {
    return element("ol", { class: "prints" }, blocks.map((block) => {
      const state = stateOf(block);
      const told = `positions ${block.first} to ${block.last}: ${WORDS[state]}\nbefore ${block.before}` +
        (block.after ? `\nafter ${block.after}` : "");
      return element("li", { class: state, tabindex: 0, "data-tip": told, "data-before": block.before, "data-after": block.after ?? null, "data-state": state },
        print(block.before),
        element("b", { "aria-hidden": true }, SIGNS[state]),
        block.after ? print(block.after) : null,
        element("small", {}, WORDS[state]));
    }));
  }

  // The full blocks of a kept sequence, not compared with anything yet.
  function blocksOf(sequence, size) {
    return sequence.checksums.flatMap((before, i) => before === null ? [] :
      [{ index: i, before, first: sequence.bases[i], last: sequence.bases[i] + size - 1 }]);
  }

  // The same blocks with what a later look found. dropped: how many were dropped from `from` on.
  function compared(blocks, later, from = Infinity, dropped = 0) {
    return blocks.map((block) => {
      if (block.index >= from && block.index < from + dropped) return { ...block, after: null };
      return { ...block, after: later.checksums[block.index - (block.index < from ? 0 : dropped)] };
    });
  }

  function tally(blocks) {
    const count = (state) => blocks.filter((block) => stateOf(block) === state).length;
    return { equal: count("equal"), changed: count("changed"), all: blocks.filter((block) => block.after).length };
  }

  function checksumTable(blocks) {
    return element("details", {}, element("summary", {}, "The checksums"),
      element("div", { class: "scroll" }, element("table", { class: "checksums" },
        element("tr", {}, ["positions", "before", "after", ""].map((name) => element("th", { scope: "col" }, name))),
        blocks.map((block) => element("tr", { class: stateOf(block) },
          element("th", { scope: "row" }, `${block.first}–${block.last}`),
          element("td", {}, element("code", {}, block.before)),
          element("td", {}, block.after ? element("code", {}, block.after) : "–"),
          element("td", {}, WORDS[stateOf(block)]))))));
  }

  // One model's part in an experiment.
  function lane({ model, encoding, blocks, said, error, arm = null, wrong = false }) {
    const { all, changed } = tally(blocks ?? []);
    return element("article", { class: "lane", "data-model": model, "data-arm": arm, "data-equal": all ? String(changed === 0) : null },
      element("header", {}, element("b", {}, encoding), element("span", { class: "note" }, arm === null || arm === "own" ? ` ${model}` : ` in the model ${model}`)),
      error ? element("p", { class: "refused" }, error) : blocks ? strip(blocks) : null,
      said ? element("p", { class: !all && !wrong ? "note" : changed || wrong ? "fails" : "holds" }, said) : null,
      blocks && all ? checksumTable(blocks) : null);
  }

  // What an audit of appending found, in words.
  function auditSaid({ totals: { changed }, blocks, steps, note, layers, of_layers: all }) {
    const differ = blocks.filter(({ equal }) => !equal).length, wrong = steps.at(-1).stale;
    const what = differ ? `${differ} of ${blocks.length} earlier blocks have changed: in ${many(steps.length, "step")} of up to ${steps[0].tokens} tokens, entries were rewritten ${format.count(changed)} times`
      : `All ${blocks.length} earlier blocks are equal, byte for byte`;
    const before = steps.at(-1).length - steps.at(-1).tokens; // the last step's own are computed as they should be
    const right = wrong ? `${differ ? ", and still" : ", but they should not be:"} of the ${format.count(before)} tokens before the last step, ${many(wrong, "entry", "entries")} ${wrong === 1 ? "is" : "are"} wrong at the end`
      : differ ? "" : ", and none should have changed";
    const where = layers === all ? "" : ` Looked at: the first ${layers} of ${all} layers.`;
    return `${what}${right}.${where}${note ? ` This arm: ${note}.` : ""}`;
  }

  function experiment(number, title, why, ...content) {
    return element("section", { class: "experiment" },
      element("h2", {}, `${number}. ${title}`), why.map((text) => element("p", { class: "why" }, text)), content);
  }

  // --------------------------------------------------------------------------------------- the panel

  panels.push({
    id: "proof",
    title: "Proof",
    lead: "Does a new token change what is stored for earlier ones? Compare checksums of the stored bytes, before and " +
      "after, in the running server. Then see what moving stored tokens does, and the one case where appending fails.",
    mount(root, page) {
      let lanes = [], step = 0;
      const appended = element("div", { class: "lanes" }), moved = element("div", { class: "lanes" });
      const steps = element("div", { class: "row steps" }), moves = element("div", { class: "row steps" });
      const result = element("p", { class: "told", role: "status" }), movedResult = element("p", { class: "told", role: "status" });
      const counter = element("div", { class: "row steps" }), counted = element("div", { class: "lanes" });
      const arms = element("select", { "data-act": "proof-arm" });
      const armNote = element("p", { class: "note" });
      let armsOf = null; // the model whose arms are listed

      // Runs `work` for each model in turn, so that one can follow; what one refuses is its own affair.
      async function each(work, shown = showAppended) {
        lanes = lanes.filter(({ model }) => page.models.some(({ id }) => id === model));
        for (const [i, lane] of lanes.entries()) {
          if (lane.error) continue;
          const next = await work(lane).catch((error) => {
            if (!(error instanceof ApiError) || [0, 403].includes(error.status)) throw error;
            return { error: told(error) };
          });
          lanes = lanes.with(i, { ...lane, ...next });
          shown();
        }
      }

      async function keep() {
        await clear();
        const sizes = Object.fromEntries((await page.api.get("v1/cache")).data.map((entry) => [entry.model, entry.block_size]));
        lanes = page.models.map(({ id, encoding }) => ({ model: id, encoding, size: sizes[id] }));
        step = 0;
        await each(async ({ model, size }) => {
          const kept = await page.api.post("v1/cache/sequences", { model, prompt: TEXT });
          return { kept, blocks: blocksOf(kept, size) };
        });
        step = 1;
        showAppended();
      }

      async function append() {
        await each(async ({ kept }) => {
          await page.api.post(`v1/cache/sequences/${kept.id}/operations`, { operation: "append", count: APPENDED });
          return { said: `${APPENDED} tokens appended` };
        });
        step = 2;
        showAppended();
      }

      async function compare() {
        await each(async ({ kept, blocks }) => {
          const later = await page.api.get(`v1/cache/sequences/${kept.id}`);
          const found = compared(blocks, later), { equal, all } = tally(found);
          const said = all === 0 ? "The prompt fills no block, so there is nothing to compare." : equal === all ? `All ${all} earlier blocks are equal, byte for byte.` : `${all - equal} of ${all} earlier blocks have changed.`;
          return { later, blocks: found, said };
        });
        step = 3;
        showAppended();
      }

      function showAppended() {
        const press = [["Keep a prompt", keep], [`Append ${APPENDED} tokens`, append], ["Compare the checksums", compare]];
        refill(steps, press.map(([text, work], i) => button(`${i + 1}  ${text}`, `proof-${i + 1}`, () => page.alone(root, work), {
          class: i === step % 3 ? "main" : null, disabled: i > 0 && i !== step, "aria-current": i === step ? "step" : null,
        })));
        fill(appended, lanes.map(lane));
        const counts = lanes.filter(({ later }) => later).map(({ blocks }) => tally(blocks));
        const [equal, all] = [counts.reduce((sum, each) => sum + each.equal, 0), counts.reduce((sum, each) => sum + each.all, 0)];
        fill(result, step < 3 ? "" : all === 0 ? "In no model could it be tried." : equal === all
          ? `${all} of ${all} earlier blocks equal${counts.length > 1 ? `, under ${counts.length} encodings` : ""}: appending ${APPENDED} tokens changed none of them.`
          : `${all - equal} of ${all} earlier blocks have changed. That must not happen: see the server's log.`);
        fill(moves, button("Drop two blocks from the middle and close the gap", "proof-move", () => page.alone(root, move), { class: step === 3 ? "main" : null, disabled: step < 3 ? true : null }),
          step < 3 ? element("span", { class: "note" }, "after the third click above") : null,
          page.models.length === 1 ? element("span", { class: "note" }, "“ropewalk serve family” shows six encodings side by side.") : null);
      }

      // The same prompt again, kept and then shifted: a sequence that had tokens appended holds more.
      async function move() {
        const found = [];
        for (const { model, encoding, size } of lanes) {
          let kept = null;
          try {
            kept = await page.api.post("v1/cache/sequences", { model, prompt: TEXT });
            const blocks = blocksOf(kept, size), first = Math.min(2, blocks.length - 3) * size, count = 2 * size;
            if (first < 0) throw new ApiError(400, { message: `in blocks of ${size} tokens the prompt has too few to drop two` });
            const done = await page.api.post(`v1/cache/sequences/${kept.id}/operations`, { operation: "evict_renumber", first, count });
            const after = compared(blocks, done.after, first / size, count / size), { changed, all } = tally(after);
            const keys = done.happened.rewritten_entries;
            found.push({ model, encoding, keys, blocks: after, said: changed
              ? `${changed} of ${all} blocks that stayed have changed: ${many(keys, "key")} rotated and written again${kept.tokens % size ? ", those of the last block, which is not full and has no checksum, among them" : ""}.`
              : `All ${all} blocks that stayed are equal: only the list of blocks has changed.` });
          } catch (error) {
            if (!(error instanceof ApiError) || error.status === 0) throw error;
            const refused = error.code === "impossible_operation";
            found.push({ model, encoding, refused, error: refused ? whyImpossible(error) : told(error) });
          } finally {
            if (kept) await page.api.remove(`v1/cache/sequences/${kept.id}`);
          }
          fill(moved, found.map(lane));
        }
        const named = (wanted) => found.filter(wanted).map(({ encoding }) => encoding).join(", ") || "none";
        if (found.length > 1) fill(movedResult, `Free: ${named(({ keys }) => keys === 0)}. Keys rewritten: ${named(({ keys }) => keys > 0)}. Impossible: ${named(({ refused }) => refused)}.`);
      }

      // The model that the counter-example is tried with: one that has RoPE, if one is served.
      const audited = () => page.models.find(({ encoding }) => encoding === "rope") ?? page.model;

      async function listArms() {
        const model = audited();
        if (!model || armsOf === model.id) return;
        const chosen = arms.value;
        const { data } = await page.api.get(`v1/positions/audit?model=${encodeURIComponent(model.id)}`);
        armsOf = model.id;
        fill(arms, data.map(({ arm, note }) => element("option", { value: arm, "data-note": note }, arm === "own" ? note : arm)));
        arms.value = [chosen, COUNTER].find((wanted) => data.some(({ arm }) => arm === wanted)) ?? "own";
        noteArm();
      }

      function noteArm() {
        const { value, selectedOptions: [option] } = arms;
        fill(armNote, value === "own" || option.dataset.note === "another encoding" ? "Here for comparison: its parameters are constants."
          : `${value}: ${option.dataset.note}.`, " Only “dynamic” frequencies follow the length; all others should change nothing.");
      }
      arms.addEventListener("change", noteArm);

      // The chosen arm, below it the model's own encoding, for comparison.
      async function counterExample() {
        await listArms();
        const found = [], { tokens } = await page.api.post("tokenize", { model: armsOf, prompt: TEXT });
        try {
          for (const arm of new Set([arms.value, "own"])) {
            fill(counted, found.map(lane), element("p", { class: "note" }, `Appending under ${arm}, in float64 …`));
            const audit = await page.api.post("v1/positions/audit", { model: armsOf, arm, prompt: tokens.slice(0, AUDITED), append: APPENDED });
            const blocks = audit.blocks.map(({ first, tokens, before, after }) => ({ first, last: first + tokens - 1, before, after }));
            found.push({ model: armsOf, encoding: arm === "own" ? "as it is served" : arm, blocks, arm, wrong: audit.steps.at(-1).stale > 0, said: auditSaid(audit) });
          }
        } finally {
          fill(counted, found.map(lane));
        }
      }

      async function clear() {
        for (const { kept } of lanes) if (kept) await page.api.remove(`v1/cache/sequences/${kept.id}`).catch(() => {});
        lanes = [];
        fill(moved);
        fill(movedResult);
      }

      fill(root,
        experiment(1, "Appending", [
          "A token's key and value are computed from the token and from those before it. What comes later is no input. " +
          "So whichever encoding a model has, there is no reason to touch what is stored, and appending costs earlier entries nothing.",
        ], steps, result, appended),
        experiment(2, "Moving", [
          "When text in the middle is dropped, what follows moves to earlier positions. RoPE, as it is usually stored, keeps each key rotated " +
          "by its position, so every moved key is now wrong, and must be read, rotated and written again. ALiBi's and T5's bias is added to scores, never stored: " +
          "the list of blocks changes, and no key. Learned and sinusoidal positions are mixed into keys and values and cannot be taken out: " +
          "those entries must be computed again. The prompt is kept once more for this, without the appended tokens.",
        ], moves, movedResult, moved,
        element("p", { class: "note" }, "Free means that no stored byte has to change. What stays was still computed while it could see what is now gone, under every encoding: only computing it again would undo that.")),
        experiment(3, "Where appending fails", [
          "The claim has a condition: that the encoding's parameters are constants. Published “dynamic” RoPE scaling lets its " +
          "frequencies follow the length of the text. Then every step past the trained length makes earlier keys wrong. A server must " +
          "rotate all of them again, or answer with wrong ones; no model is served that way here, so this runs beside the server, in float64.",
        ], counter, armNote, counted));
      fill(counter, field("Append under", arms), button(`Append ${APPENDED} tokens`, "proof-counter", () => page.alone(root, counterExample), { class: "main" }));
      showAppended();
      this.shown = () => page.attempt(listArms);
    },
  });
}
