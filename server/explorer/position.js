// Panel 4: what the encoding makes of the token under the cursor and any other.
// Numbers come from POST /v1/positions/explain; the hands of clocks at other positions follow from
// its frequencies, and a bias at other distances from its table.
{
  const TURN = 2 * Math.PI;
  const MOST_TOKENS = 256;
  const TEXT = "The king went down to the river, and the old king said unto the people of the river";

  const percent = (share) => (share > 0 && share < 1e-4 ? "below 0.01 %" : format.percent(share));

  // kind of an encoding: what is seen here, and what appending and moving do to the stored key.
  const KINDS = {
    rotation: {
      seen: "Each clock is one pair of numbers of the query and of the key. Each hand was rotated once, by its own token's " +
        "position: fast pairs first, slow pairs last. The score only sees the angle between the hands.",
      append: "The query is a later token now, and its hands are elsewhere. The key's hands have not moved, because " +
        "their angle is the key's own position, whatever comes later. So appending changes nothing that is stored.",
      move: "The key has been given an earlier position, as when text before it is dropped. The hands that are stored (dashed) are now wrong, and those at the new position (solid) have to replace them: " +
        "every pair of every such key must be rotated and written again. This is what makes moving expensive.",
    },
    raw: { // a rotation whose keys are stored without it
      seen: "Each clock is one pair of numbers of the query and of the key. This model stores keys unrotated, and each step rotates every " +
        "hand by its own token's position: fast pairs first, slow pairs last. The score only sees the angle between the hands.",
      append: "The query is a later token now, and its hands are elsewhere. The key's hands are where they were, because " +
        "a step rotates them by the key's own position, whatever comes later. So appending changes nothing that is stored.",
      move: "The key has been given an earlier position, as when text before it is dropped. Its hands were at the dashed ones, and are now at the solid ones. " +
        "It is stored unrotated, and the next step rotates it by the new position: so moving changes nothing that is stored. That each step rotates all keys is its price.",
    },
    block: { // a rotation whose keys are stored with that of their place in the block
      seen: "Each clock is one pair of numbers of the query and of the key. This model stores keys rotated by their place within their block, and each " +
        "step adds the rotation by the block's first position: fast pairs first, slow pairs last. The score only sees the angle between the hands.",
      append: "The query is a later token now, and its hands are elsewhere. The key's hands are where they were, because " +
        "the key's block and its place there are the same, whatever comes later. So appending changes nothing that is stored.",
      move: "The key has been given an earlier position, as when text before it is dropped. Its hands were at the dashed ones, and are now at the solid ones. " +
        "Blocks move as a whole, so its place within its block stays, and with it the rotation that is stored; only the block's first position is another. So moving changes nothing that is stored.",
    },
    undrawn: { // a rotation whose pairs have no one angle for each position
      seen: "The encoding rotates queries and keys, but no pair of numbers by one angle for each position, so that there are no clocks to draw. The scores are those that attention finds.",
      append: "The query is a later token now, and the score of this key may be another. Appending changes nothing that is stored.",
      move: "The key has been given an earlier position. One that is stored unrotated stays as it is; any other must be rotated and written again.",
    },
    bias: {
      seen: "The encoding leaves queries and keys alone. It adds a number to each score, read off this curve at the distance between the two tokens.",
      append: "The distance has grown with the text: another place on the curve. The stored key has no position in it, so appending changes nothing that is stored.",
      move: "The key has been given an earlier position: another distance, another number to add. The stored key has no position in it, so moving changes nothing that is stored.",
    },
    query_scale: {
      seen: "The encoding multiplies each query by a number for its own position, and with it all of the query's scores: attention is sharper or flatter there.",
      append: "The query is a later token now, with a number of its own. The stored key has no position in it, so appending changes nothing that is stored.",
      move: "The key has been given an earlier position, which nothing asks for: what counts is the query's. The stored key has no position in it, so moving changes nothing that is stored.",
    },
    query_bias: {
      seen: "The encoding leaves queries and keys alone. It adds a number to each score, which the query makes of itself for every distance: this curve is this query's own.",
      append: "The query is a later token now, with a curve of its own. The stored key has no position in it, so appending changes nothing that is stored.",
      move: "The key has been given an earlier position: another distance, another number to add. The stored key has no position in it, so moving changes nothing that is stored.",
    },
    content_bias: {
      seen: "The encoding leaves queries and keys alone. It adds a number to each score, which depends on the query and on the keys themselves: this curve is that of this query's own keys.",
      append: "The query is a later token now, and what it makes of each key may be another number. The stored key has no position in it, so appending changes nothing that is stored.",
      move: "The key has been given an earlier position, which changes only what queries make of it. The stored key has no position in it, so moving changes nothing that is stored.",
    },
    gates: {
      seen: "Each token has a gate for each head: which share of what came before it later tokens see. The score loses by every gate between the two tokens, " +
        "so that how far a key seems depends on what was said since. This curve is that of this query's own keys.",
      append: "Each new token has a gate of its own, which lowers the scores of all earlier keys alike; how much is known once it is computed. A gate is stored beside its token's key, so appending changes nothing that is stored.",
      move: "The key has been given an earlier position, which nothing asks for: what counts are the gates of the tokens that then stand between. Each is stored beside its own key, so moving changes nothing that is stored.",
    },
    embedding: {
      seen: "The encoding adds a vector for each position to the token's embedding, before the first layer. In layer 0 one can still " +
        "tell what these vectors make of a score; from there on they are mixed into every query, key and value.",
      append: "Earlier tokens keep their positions, so appending changes nothing that is stored.",
      move: "The key has been given an earlier position, but the old one is mixed into the stored key and value and cannot be taken out. Moving is impossible: they must be computed again.",
    },
    none: {
      seen: "There is no encoding: the score is content alone. Order shows only in that no token sees a later one.",
      append: "No stored key has a position in it, so appending changes nothing that is stored.",
      move: "The key has been given an earlier position. There is none in the stored key, so moving changes nothing.",
    },
  };

  const CHANGING = new Set(["gates", "query_scale", "query_bias", "content_bias", "several"]); // whose numbers are those of one query

  const ENCODER = " This is an encoder: it reads a text as a whole, and each token sees later ones, too. Nothing is appended to what it has read, " +
    "or moved in it: another text is computed anew.";
  const AXIS = { true: "tokens back from the query", false: "tokens back from the query (left of 0) and ahead (right)" }; // by whether it is causal

  // One pair of a rotation as a clock. Angles in radians, counter-clockwise from three o'clock; `stored`
  // is where the key's hand was before it moved, or null; `adds` what the pair adds to the score, of at
  // most `most`, or null where that is not known yet.
  function clock({ pair, frequency, query, key, stored, adds, most, size = 74 }) {
    const middle = size / 2, long = middle - 9, short = long - 6;
    const tip = (angle, reach) => [middle + reach * Math.cos(angle), middle - reach * Math.sin(angle)];
    const hand = (angle, reach, kind) => {
      const [x, y] = tip(angle, reach);
      return svg("line", { x1: middle, y1: middle, x2: x, y2: y, class: `hand ${kind}` });
    };
    const between = (((query - key) % TURN) + TURN) % TURN;
    const [[x0, y0], [x1, y1], [qx, qy], [kx, ky]] = [tip(key, 14), tip(query, 14), tip(query, long), tip(key, short)];
    const period = TURN / frequency;
    const turn = period < 100 ? period.toFixed(1) : format.count(period);
    const told = `pair ${pair}: a full turn every ${turn} tokens\nthe hands are ${Math.round((between * 360) / TURN)}° apart${adds === null ? "" : `\nit adds ${minus(adds, 3)} to the score`}`;
    return svg("svg", { viewBox: `0 0 ${size} ${size + 22}`, class: "clock", role: "img", "aria-label": told, "data-tip": told, "data-pair": pair, "data-adds": adds },
      svg("circle", { cx: middle, cy: middle, r: middle - 4, class: "face" }),
      svg("path", { d: `M${middle} ${middle}L${x0} ${y0}A14 14 0 ${between > Math.PI ? 1 : 0} 0 ${x1} ${y1}Z`, class: "wedge" }),
      stored === null ? null : hand(stored, short, "stored"),
      hand(key, short, "key"), svg("rect", { x: kx - 3, y: ky - 3, width: 6, height: 6, class: "tip key" }),
      hand(query, long, "query"), svg("circle", { cx: qx, cy: qy, r: 3.5, class: "tip query" }),
      svg("text", { x: middle, y: size + 10, "text-anchor": "middle" }, turn),
      adds === null ? null : svg("g", { class: "adds" },
        svg("line", { x1: middle, x2: middle, y1: size + 13, y2: size + 21 }),
        svg("rect", { class: adds < 0 ? "takes" : "gives", x: middle + Math.min(0, (adds / most) * middle), y: size + 14.5, width: Math.abs(adds / most) * middle, height: 5 })));
  }

  // Each key's score as content plus position: a ring is the content, a dot the score, the stem between
  // them what position added or took.
  function splitChart(width, { head, query, first, last, causal, key, choose }) {
    const height = 240, left = 44, right = width - 8, top = 26, bottom = height - 38;
    const seen = [...Array(last + 1).keys()].slice(first);
    const values = seen.flatMap((each) => [head.scores[each], head.content?.[each] ?? 0]);
    const y = scale([Math.min(0, ...values), Math.max(0, ...values)], [bottom, top]);
    const x = scale([query - last, Math.max(1, query)], [right - 8, left + 10], Math.max(2, Math.min(8, width / 80)));
    const drawing = svg("svg", { width, height, class: "chart", role: "img", "aria-label": "Each key's score in this head, split into content and position" },
      axes({ x, y, left, right, top, bottom, xTitle: AXIS[causal], yTitle: "score before softmax" }),
      svg("line", { x1: x(query - key), x2: x(query - key), y1: top, y2: bottom, class: "guide" }),
      seen.map((each) => {
        const [at, score] = [x(query - each), y(head.scores[each])];
        const content = head.content ? y(head.content[each]) : null;
        return svg("g", { class: each === key ? "point chosen" : "point" },
          content === null ? null : svg("line", { x1: at, x2: at, y1: content, y2: score, class: "stem" }),
          content === null ? null : svg("circle", { cx: at, cy: content, r: 3.4, class: "content" }),
          svg("circle", { cx: at, cy: score, r: 2.8, class: "score" }));
      }));
    drawing.addEventListener("pointermove", (event) => {
      const at = query - Math.round(x.inverse(event.clientX - drawing.getBoundingClientRect().left));
      if (at >= 0 && at <= last && at !== key) choose(at);
    });
    return drawing;
  }

  // What a rotation adds to the score of one query and key by their distance, in every head.
  function rotatedApart(pairs, far) {
    const distances = [...Array(far + 1).keys()];
    const added = (head, distance) => pairs.reduce((sum, { frequency, heads }) => {
      const { magnitude, phase } = heads[head];
      return sum + magnitude * (Math.cos(distance * frequency + phase) - Math.cos(phase));
    }, 0);
    return { distances, heads: pairs[0].heads.map((_, head) => distances.map((distance) => added(head, distance))) };
  }

  // A bias at distances that can be seen.
  function nearby({ distances, heads }, far) {
    const kept = distances.flatMap((distance, i) => (Math.abs(distance) <= far ? [i] : [])).sort((one, other) => distances[one] - distances[other]);
    return { distances: kept.map((i) => distances[i]), heads: heads.map((values) => kept.map((i) => values[i])) };
  }

  // What each head adds to the score by distance; the chosen head's curve stands out.
  function biasChart(width, { bias: { distances, heads }, head, causal, distance }) {
    const height = 240, left = 44, right = width - 54, top = 26, bottom = height - 38;
    const y = scale([Math.min(0, ...heads.flat()), Math.max(0, ...heads.flat())], [bottom, top]);
    const x = scale([distances[0], distances.at(-1)], [right, left], Math.max(2, Math.min(8, width / 80)));
    const at = heads[head][nearest(distances, distance)];
    const curve = (each) => svg("path", { class: each === head ? "curve chosen" : "curve", d: path(heads[each].map((value, i) => [x(distances[i]), y(value)])) });
    const others = [...heads.keys()].filter((each) => each !== head);
    return svg("svg", { width, height, class: "chart", role: "img", "data-at": at, "aria-label": `What head ${head} adds at distance ${distance}: ${minus(at)}` },
      axes({ x, y, left, right, top, bottom, xTitle: AXIS[causal], yTitle: "added to the score" }),
      others.map(curve), curve(head),
      svg("line", { x1: x(distance), x2: x(distance), y1: top, y2: bottom, class: "guide" }),
      svg("circle", { cx: x(distance), cy: y(at), r: 4.5, class: "score" }),
      svg("text", { x: right + 6, y: y(heads[head][0]) + 4, class: "label" }, `head ${head}`));
  }

  function nearest(distances, wanted) {
    return distances.reduce((best, each, i) => (Math.abs(each - wanted) < Math.abs(distances[best] - wanted) ? i : best), 0);
  }

  // first, last: the tokens that the query sees. The text as buttons: pointing at one or going there with the arrow keys makes it the key,
  // pressing it the query. A bar under each is its share of the query's attention.
  function strip({ tokens, weights, query, first, last, key, choose, ask }) {
    const most = Math.max(...weights.slice(first, last + 1));
    const buttons = tokens.map(({ text }, i) => {
      const role = i === query ? "query" : i === key ? "key" : "", unseen = i > last ? "comes after the query, which does not see it" : i < first ? "is further back than the query sees in this layer" : null;
      return element("button", {
        type: "button", class: `word ${role}${unseen ? " unseen" : ""}`, "data-act": `position-token-${i}`, "data-index": i, tabindex: i === key ? 0 : -1,
        "data-tip": `token ${i}${unseen ? `: ${unseen}` : `: gets ${percent(weights[i])} of the query's attention`}`,
        style: { "--share": unseen ? 0 : weights[i] / most },
        pointerenter: () => i <= last && i !== query && i !== key && choose(i), click: () => ask(i),
      }, visible(text), role === "query" || role === "key" ? element("small", {}, role) : null);
    });
    return element("div", {
      class: "strip", role: "group", "aria-label": "Tokens of the text",
      keydown(event) {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const next = Math.max(0, Math.min(tokens.length - 1, buttons.indexOf(document.activeElement) + step));
        if (next <= last) choose(next, true);
        else buttons[next].focus();
      },
    }, buttons);
  }

  // The two tokens in every head.
  function headTable({ pairs, key, head, pick }) {
    const number = (value, name) => (value === null ? "–" : name === "weight" ? percent(value) : minus(value));
    const columns = { content: "content", position: "position", score: "scores", weight: "weights" }; // as the answer calls them
    return element("table", { class: "numbers" },
      element("caption", {}, "These two tokens, in every head"),
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "head"),
        ["content", "position", "score", "attention"].map((name) => element("th", { scope: "col", class: "number" }, name)))),
      element("tbody", {}, pairs.map((each, i) => element("tr", { class: i === head ? "chosen" : null, "data-head": each.head },
        element("th", { scope: "row" }, button(String(each.head), `position-head-${each.head}`, () => pick(i), { "aria-pressed": String(i === head), "aria-label": `head ${each.head}` })),
        Object.entries(columns).map(([name, field]) => element("td", { class: "number" }, figure(number(each[name], name), `/v1/positions/explain: heads[${i}].${field}[${key}]`, { "data-number": field })))))));
  }

  // --------------------------------------------------------------------------------------- the panel

  panels.push({
    id: "position",
    title: "Position",
    lead: "How does a token know how far back another one is? Choose two tokens. The picture shows where their distance " +
      "enters the score, and whether a position is part of what is stored.",
    mount(root, page) {
      let shown = null; // {found, text, query, key, head, grown, moved}: an explanation, and where one looks
      let showing = false;
      const text = element("input", { type: "text", maxlength: 4000, "data-act": "position-text", "aria-label": "Text" });
      const layer = element("input", { type: "number", min: 0, value: 0, "data-act": "position-layer" });
      text.value = TEXT;
      const body = element("div", {});
      layer.addEventListener("change", () => (shown?.text === text.value ? page.attempt(() => explain(shown.query, idsOf(shown.found), shown.text)) : showText()));
      fill(root,
        element("form", { class: "row", submit: (event) => {
          event.preventDefault();
          showText();
        } },
          field("Text, at most 256 tokens", text, { class: "field wide" }), field("Layer", layer),
          element("button", { class: "main", "data-act": "position-show" }, "Show")),
        body);

      const idsOf = (found) => found.tokens.map(({ id }) => id);

      function showText() {
        page.point(null);
        page.attempt(() => explain());
      }

      let asked = 0; // how often: only the newest answer counts
      // ids: the tokens of the text `of`, where these are known. Without `of`, what they say is put into
      // the box: as the server joins them, since parts of a character are no text of their own.
      async function explain(query, ids = null, of = ids ? null : text.value) {
        const model = page.model.id, mine = ++asked;
        const wanted = { model, input: ids ?? of, layer: Number(layer.value), ...(query === undefined ? {} : { query }) };
        clearTimeout(staying);
        const answers = await Promise.all([page.api.post("v1/positions/explain", wanted), of === null ? page.api.post("detokenize", { model, tokens: ids }) : null]).catch((error) => {
          if (mine !== asked) return null;
          [shown, body.textContent] = [null, ""]; // what is shown is not of this text
          throw error;
        });
        if (mine !== asked) return;
        const [found, said] = answers;
        if (said) text.value = said.prompt;
        const key = shown?.key < found.query && shown.found.tokens.length === found.tokens.length ? shown.key : Math.floor(found.query / 2);
        shown = { found, text: said ? text.value : of, query: found.query, key, head: Math.min(shown?.head ?? 0, found.heads.length - 1), grown: 0, moved: 0 };
        build();
        stay();
      }

      // What each pair adds to the score of this key: asked for once somebody has stayed at it.
      async function lookCloser() {
        const { found, query, key } = shown, isShown = () => shown?.found === found && shown.key === key;
        const closer = await page.api.post("v1/positions/explain", { model: found.model, input: idsOf(found), layer: found.layer, query, key }).catch((error) => {
          if (isShown()) throw error;
        });
        if (!isShown()) return;
        shown = { ...shown, found: { ...found, key, pairs: closer.pairs } };
        build();
      }
      let staying = null;
      function stay() {
        clearTimeout(staying);
        if (shown.found.pairs && shown.found.key !== shown.key) staying = setTimeout(() => page.attempt(lookCloser), 350);
      }

      function change(changes, focus = false) {
        shown = { ...shown, ...changes };
        build();
        stay();
        if (focus) body.querySelector(`.word[data-index="${shown.key}"]`)?.focus();
      }

      // Whether a key so far back is outside of what this layer sees.
      const isBeyond = ({ window }, distance) => window !== null && distance >= window;

      // The two tokens in every head, at the places that somebody has tried for them: what the encoding
      // adds at that distance, and the score with it. null: where it cannot be told from the distance.
      function pairAt({ found, key, grown, moved }, curve, distance) {
        return found.heads.map(({ head, content, position, scores, weights }, i) => {
          if (isBeyond(found, distance)) return { head, content: null, position: null, score: null, weight: null };
          const now = { head, content: content?.[key] ?? null, position: position?.[key] ?? null, score: scores[key], weight: weights[key] };
          if (!grown && !moved) return now;
          if (found.kind === "none") return { ...now, weight: null };
          const at = CHANGING.has(found.kind) ? -1 : curve?.distances.indexOf(distance) ?? -1;
          if (at < 0 || now.content === null) return { ...now, position: null, score: null, weight: null };
          const added = curve.heads[i][at];
          return { ...now, position: added, score: now.content + added, weight: null };
        });
      }

      const sentence = ({ found, query, key, head, grown, moved }, pairs) => {
        const { terms } = found.heads[head], { content, position, score, weight } = pairs[head], distance = query + grown - key + moved;
        const word = (i) => `“${visible(found.tokens[i].text).replace(/^·/, "")}”`;
        const places = `Query ${word(query)} at position ${query + grown}, key ${word(key)} at ${key - moved}, ${many(Math.abs(distance), "token")} ${distance < 0 ? "ahead" : "back"}`;
        if (isBeyond(found, distance)) return `${places}: not seen, since in this layer a query sees itself and ${many(found.window - 1, "token")} before it.`;
        if (score === null) return `${places}.`;
        const split = position === null ? "" : ` = content ${minus(content)} + position ${minus(position)}`;
        const share = weight === null ? "" : `, ${percent(weight)} of the attention`;
        const whose = terms && !grown && !moved ? ` Of the position's part, ${minus(terms.query[key])} comes of the query's vector, ${minus(terms.key[key])} of the key's, ${minus(terms.both[key])} of both together.` : "";
        return `${places}: in head ${found.heads[head].head}, score ${minus(score)}${split}${share}.${whose}`;
      };

      // Where the two tokens are now, and whether somebody has tried what would happen.
      function build() {
        const { found, query, key, head, grown, moved } = shown;
        const kind = KINDS[found.kind] ? found.kind : found.pairs ? "rotation" : found.bias ? "bias" : "none";
        const chart = element("div", { class: "holder" }), curve = element("div", { class: "holder" });
        const far = Math.max(128, 2 * query), distance = query + grown - key + moved;
        const rotated = found.pairs?.[0]?.heads && found.key === key ? rotatedApart(found.pairs, far) : null;
        const bias = found.bias ? nearby(found.bias, far) : rotated;
        const by = moved ? `Moved by ${many(moved, "token")}. ` : grown ? `${many(grown, "token")} appended. ` : "";
        const texts = KINDS[kind !== "rotation" ? kind : found.pairs ? found.key_storage : "undrawn"] || KINDS[kind];
        const tried = by + texts[moved ? "move" : grown ? "append" : "seen"] + (found.causal ? "" : ENCODER);
        const pairs = pairAt(shown, bias, distance);
        const first = found.window === null ? 0 : Math.max(0, query - found.window + 1), last = found.causal ? query : found.tokens.length - 1; // that the query sees
        refill(body,
          strip({ tokens: found.tokens, weights: found.heads[head].weights, query, first, last, key, choose: (i, focus) => change({ key: i, grown: 0, moved: 0 }, focus), ask: (i) => page.point({ model: found.model, ids: idsOf(found), index: i, text: shown.text }) }),
          element("p", { class: "note" }, "Point at a token to make it the key, press it to make it the query. The bar under a token is its share of the query's attention."),
          element("p", { class: "told" }, sentence(shown, pairs)),
          element("div", { class: "tries" },
            !found.causal ? null : element("div", { class: "choices", role: "group", "aria-label": "What if" },
              button("As it is", "position-as-is", () => change({ grown: 0, moved: 0 }), { "aria-pressed": String(!grown && !moved) }),
              button("Append tokens", "position-append", () => change({ grown: grown + 1, moved: 0 }), { "aria-pressed": String(grown > 0) }),
              button("Move the key", "position-move", () => change({ grown: 0, moved: Math.min(key, moved + 1) }), { "aria-pressed": String(moved > 0), disabled: key === 0 ? true : null })),
            element("p", { class: "why", role: "status", "data-tried": moved ? "move" : grown ? "append" : "seen" }, tried)),
          found.pairs ? clocks(shown) : null,
          element("div", { class: "beside" },
            element("div", {},
              bias || found.pairs ? [element("h2", {}, `Head ${found.heads[head].head}: what position adds, by distance`), curve,
                element("p", { class: "note" }, CHANGING.has(found.kind) ? "For this query and its keys; the thin ones are other heads'." : found.bias ? "The same curve for all tokens; the thin ones are other heads'."
                  : "For this query and this key, at any distance; other tokens have other curves. The thin ones are other heads'.")] : null,
              element("h2", {}, `Head ${found.heads[head].head}: every key of the text`), chart,
              element("p", { class: "note" }, grown || moved ? "The text as it is, before anything was appended or moved. " : "", found.heads[head].content ? `Ring: content. Dot: score. The stem between them is what position adds or takes.` : `Dot: score. It cannot be split: ${found.split.reason}.`)),
            headTable({ pairs, key, head, pick: (i) => change({ head: i }) })));
        fitted(chart, (width) => splitChart(width, { head: found.heads[head], query, first, last, causal: found.causal, key, choose: (i) => change({ key: i, grown: 0, moved: 0 }) }));
        if (bias) fitted(curve, (width) => biasChart(width, { bias, head, causal: found.causal, distance }));
      }

      function clocks({ found, query, key, head, grown, moved }) {
        const distance = query + grown - key + moved, absolute = !KINDS[found.key_storage];
        const added = ({ frequency, heads }) => (heads && found.key === key && !isBeyond(found, distance) ? heads[head].magnitude * Math.cos(distance * frequency + heads[head].phase) : null);
        const most = Math.max(...found.pairs.map((pair) => Math.abs(added(pair) ?? 0)));
        return element("div", {},
          element("ul", { class: "legend" }, [["query", "the query's hand, rotated for this step and not stored"], ["key", moved ? "the key's hand at its new position" : absolute ? "the key's hand, as it is stored" : "the key's hand, as a step rotates it"],
            ["stored", absolute ? "the key's hand as it is still stored" : "the key's hand at its old position"]]
            .filter(([kind]) => kind !== "stored" || moved).map(([kind, meaning]) => element("li", {},
              svg("svg", { width: 26, height: 12, class: "clock", "aria-hidden": true }, svg("line", { x1: 0, x2: 22, y1: 6, y2: 6, class: `hand ${kind}` }),
                kind === "query" ? svg("circle", { cx: 22, cy: 6, r: 3.5, class: "tip query" }) : kind === "key" ? svg("rect", { x: 19, y: 3, width: 6, height: 6, class: "tip key" }) : null),
              " ", meaning)),
            element("li", {}, "under each clock: the tokens that a full turn takes, and what the pair adds to the score (right) or takes from it (left)")),
          element("div", { class: "clocks" }, found.pairs.map((pair) => clock({
            ...pair, query: (query + grown) * pair.frequency, key: (key - moved) * pair.frequency, stored: moved ? key * pair.frequency : null, adds: added(pair), most,
          }))));
      }

      // Follows the cursor of all panels; where it is of another model, the same text in this one.
      const looked = () => {
        if (!showing) return;
        const { cursor, model } = page;
        if (cursor?.model === model.id) {
          if (cursor.index >= MOST_TOKENS) return page.say(`Token ${format.count(cursor.index)} is past the first ${MOST_TOKENS}, which is as far as this panel looks.`);
          const ids = cursor.ids.slice(0, MOST_TOKENS), index = cursor.index;
          if (shown && String(ids) === String(idsOf(shown.found)) && index === shown.query && shown.found.model === model.id) return;
          page.attempt(() => explain(index, ids, cursor.text));
        } else if (shown?.found.model !== model.id) {
          const like = page.models.find(({ id }) => id === shown?.found.model)?.vocab_size === model.vocab_size;
          const query = cursor?.text === text.value ? cursor.index : shown?.query; // what was pressed before this model's answer
          page.attempt(() => explain(like && shown.text === text.value ? query : undefined));
        }
      };
      page.on("model", looked);
      page.on("cursor", looked);
      Object.assign(this, { shown: () => { showing = true; looked(); }, hidden: () => { showing = false; } });
    },
  });
}
