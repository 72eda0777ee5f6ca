// What charts are made of: a scale, axes, a path. Knows nothing of what is drawn.

// Draws into `holder` at its own width, and again whenever that changes, so that text keeps its size
// on narrow screens. draw: width in pixels → node. Returns a function that draws once more.
function fitted(holder, draw) {
  let width = 0;
  const again = () => {
    if (width === 0) return;
    const focused = holder.contains(document.activeElement);
    fill(holder, draw(width));
    if (focused) holder.firstChild.focus({ preventScroll: true });
  };
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.abs(contentRect.width - width) < 1) return;
    width = Math.floor(contentRect.width);
    again();
  }).observe(holder);
  return again;
}

const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;

// Puts children in place of what a node has; the focus stays on the control of the same name.
function refill(node, ...children) {
  const act = node.contains(document.activeElement) ? document.activeElement.dataset.act : undefined;
  fill(node, ...children);
  if (act) node.querySelector(`[data-act="${CSS.escape(act)}"]:enabled`)?.focus({ preventScroll: true });
  return node;
}

// A linear scale as a function of values, with round `ticks`, the `digits` they need, and its inverse.
function scale([from, to], [start, end], wanted = 5) {
  const span = to - from || 1;
  const at = (value) => start + ((value - from) / span) * (end - start);
  at.inverse = (place) => from + ((place - start) / (end - start)) * span;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = power * [1, 2, 5, 10].find((times) => times * power * wanted >= span * 0.999);
  at.digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  at.ticks = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) at.ticks.push(i * step);
  return at;
}

// Values on the left with a hairline each, counts below, and what both are.
function axes({ x, y, left, right, top, bottom, xTitle, yTitle }) {
  const line = (value) => svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: value === 0 ? "zero" : "hair" });
  return svg("g", { class: "axes" },
    y.ticks.map((value) => [line(value), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, minus(value, y.digits))]),
    x.ticks.filter(Number.isInteger).map((value) => svg("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, format.count(Math.abs(value)))),
    svg("text", { x: right, y: bottom + 32, "text-anchor": "end" }, xTitle),
    svg("text", { x: left, y: top - 10 }, yTitle),
  );
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// With a real minus sign: −0.52.
function minus(value, digits = 2) {
  const text = Math.abs(value).toFixed(digits);
  return (value < 0 && Number(text) !== 0 ? "−" : "") + text;
}

// "1 key", "1,280 keys".
function many(count, one, several = `${one}s`) {
  return `${format.count(count)} ${count === 1 ? one : several}`;
}

// The reason in an error of code impossible_operation, as a sentence.
function whyImpossible({ message }) {
  return `Impossible: ${message.replace(/^.*is impossible here: /, "")}.`;
}
