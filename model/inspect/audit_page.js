// `panel` of audit_page.py sets: data-arm, -width, -height, -left, -top.
const audit = JSON.parse(document.getElementById("data").textContent);
const told = document.getElementById("told");
const counted = (list, position) => {
  const found = list.find(one => one[0] === position);
  const parts = found ? [[found[1], "key"], [found[2], "value"]] : [];
  return parts.filter(([n]) => n).map(([n, what]) => `${n} ${what}${n === 1 ? "" : "s"}`)
    .join(" and ");
};
const words = (arm, row, position) => {
  const step = arm.steps[row];
  const corrupted = kind =>
    step.unexpected.filter(one => one.kind === kind && one.position === position).length;
  const lines = [["written", step.written], ["rewritten", step.changed],
    ["should have changed", step.should_change], ["and still wrong", step.stale],
    ["corrupted, though right before", [[position, corrupted("key"), corrupted("value")]]]]
    .map(([what, list]) => [what, counted(list, position)])
    .filter(([, count]) => count).map(([what, count]) => `${what}: ${count}`);
  if (position >= step.first_term) lines.push("positional term computed");
  if (!lines.length) lines.push("stored, untouched");
  const what = row ? `step ${row}` : "prompt";
  return `position ${position}, ${what}, length ${step.length}\n` + lines.join("\n");
};
for (const svg of document.querySelectorAll("svg[data-arm]")) {
  const { arm, width, height, left, top } = svg.dataset;
  const of = audit.arms[+arm];
  const at = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width, height, fill: "none", stroke: "var(--ink)" }))
    at.setAttribute(name, value);
  at.style.visibility = "hidden";
  svg.append(at);
  svg.tabIndex = 0;
  let position = 0, row = 0;
  const show = () => {
    if (position < 0 || row < 0 || row >= of.steps.length || position >= of.steps[row].length)
      return hide();
    at.setAttribute("x", +left + position * width);
    at.setAttribute("y", +top + row * height);
    at.style.visibility = "visible";
    told.textContent = words(of, row, position);
    told.style.display = "block";
    const cell = at.getBoundingClientRect(), box = told.getBoundingClientRect();
    const x = Math.min(cell.right + 10, innerWidth - box.width - 8);
    const below = cell.bottom + 10 + box.height < innerHeight;
    told.style.left = `${Math.max(8, x)}px`;
    told.style.top = `${below ? cell.bottom + 10 : cell.top - box.height - 10}px`;
  };
  const hide = () => { told.style.display = "none"; at.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    position = Math.floor(((event.clientX - box.left) * scale - left) / width);
    row = Math.floor(((event.clientY - box.top) * scale - top) / height);
    show();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in move)) return;
    event.preventDefault();
    row = Math.max(0, Math.min(of.steps.length - 1, row + move[event.key][1]));
    position = Math.max(0, Math.min(of.steps[row].length - 1, position + move[event.key][0]));
    show();
  });
}
