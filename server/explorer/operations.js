// What can be done to a kept sequence: what /v1/cache/plan predicts, and what the answer of
// /v1/cache/sequences/{id}/operations says has happened, in words and tables.

const MOVING = "Where the position was put into the stored key, as RoPE usually does, each moved key must be rotated again. Where it is " +
  "only added to scores, as under ALiBi and T5's bias, nothing stored has to change.";

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

const STORAGES = { absolute: "keys stored rotated", raw: "keys stored unrotated", block: "keys rotated within the block" };
const encodingOf = ({ encoding, key_storage: storage }) => (encoding === "rope" ? `rope, ${STORAGES[storage]}` : encoding);

function operationChooser({ operation, pick }) {
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
      const source = `/v1/cache/plan: rewritten_entries of ${row.encoding}, ${row.key_storage}`;
      return element("tr", { class: row.own ? `own ${kind}` : kind, "data-encoding": row.encoding, "data-storage": row.key_storage },
        element("th", { scope: "row" }, encodingOf(row), row.own ? element("span", { class: "badge" }, "this model") : null),
        element("td", {},
          element("span", { class: "keys", style: { "--share": keys / most } }),
          kind === "impossible" ? "–" : figure(format.count(keys), source, { "data-rewritten": keys })),
        element("td", { class: "number" }, kind === "impossible" ? "–" : figure(format.bytes(row.bytes_moved ?? 0), "/v1/cache/plan: bytes_moved")),
        element("td", { class: `verdict ${kind}` }, words,
          happened.has(encodingOf(row)) ? element("span", { class: "happened" }, happened.get(encodingOf(row))) : null));
    }))));
}

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
