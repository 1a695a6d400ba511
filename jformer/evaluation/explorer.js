"use strict";
// Draws the attention weights that the page holds. Texts are set as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const { examples } = data;
const main = document.getElementById("explorer");
const CELL = 18; // pixels of a weight in the large map
const MOST_LINES = 80; // tokens a side up to which lines are drawn
const state = { example: 0, part: 0, layer: 0, head: "mean", row: 0, column: 0 };

const part = () => examples[state.example].attention[state.part];

/** Return the weights of a head, of "mean" or of "rollout", as a table of bytes. */
function weights(layer, head) {
  const { rows, columns, rollout, means, heads } = part();
  const found = head === "rollout" ? rollout : head === "mean" ? means[layer] : heads[layer][head];
  return { rows, columns, values: bytes(found), cell: CELL };
}

const lazily = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    lazily.unobserve(target);
    const head = target.dataset.head;
    paint(target, weights(Number(target.dataset.layer), /^\d+$/.test(head) ? Number(head) : head));
  }
});

function headButton(layer, head) {
  const name = typeof head === "number" ? `head ${head + 1}` : head;
  const entropy = typeof head === "number" ? ` · ${part().entropy[layer][head].toFixed(2)}` : "";
  const canvas = element("canvas", { "data-layer": layer, "data-head": head });
  const pressed = state.layer === layer && state.head === head;
  const unit = entropy && " nats of entropy"; // what is read aloud begins with what is seen
  const where = head === "rollout" ? "rollout of all layers" : `${name}${entropy}${unit}, layer ${layer + 1}`;
  const button = element("button", { class: "head", type: "button", "aria-pressed": pressed, "aria-label": where });
  button.append(canvas, element("span", { "aria-hidden": "true" }, name + entropy));
  button.addEventListener("click", () => {
    Object.assign(state, { layer, head });
    for (const other of main.querySelectorAll(".head")) other.setAttribute("aria-pressed", other === button);
    showDetail();
  });
  lazily.observe(canvas);
  return button;
}

function showGrid() {
  const grid = main.querySelector("#grid");
  grid.replaceChildren();
  part().heads.forEach((heads, layer) => {
    const row = element("div", { class: "layer" }, element("span", {}, `Layer ${layer + 1}`));
    if (heads.length > 1) row.append(headButton(layer, "mean"));
    heads.forEach((_, head) => row.append(headButton(layer, head)));
    grid.append(row);
  });
  if (part().rollout && part().heads.length > 1) {
    const row = element("div", { class: "layer" }, element("span", {}, "All layers"));
    row.append(headButton(part().heads.length - 1, "rollout"));
    grid.append(row);
  }
}

function lines({ rows, columns, values }) {
  if (Math.max(rows.length, columns.length) > MOST_LINES) {
    return element("p", {}, `Lines are drawn up to ${MOST_LINES} tokens a side.`);
  }
  const [left, right] = [labelWidth(rows), labelWidth(columns)];
  const [width, height] = [left + right + 160, CELL * Math.max(rows.length, columns.length) + 10];
  const drawing = element("svg", { width, height, role: "img" });
  drawing.setAttribute("aria-label", "Lines from each token to those it attends to; the heat map has the same weights");
  rows.forEach((token, i) => {
    drawing.append(element("text", { x: left - 5, y: CELL * i + 17, "text-anchor": "end" }, token));
    columns.forEach((_, j) => {
      const share = values[i * columns.length + j] / 255;
      if (share < 0.02) return;
      const ends = { x1: left, y1: CELL * i + 13, x2: left + 160, y2: CELL * j + 13 };
      drawing.append(element("line", { class: "link", ...ends, "stroke-opacity": share, "stroke-width": 1 + 2 * share }));
    });
  });
  columns.forEach((token, j) => drawing.append(element("text", { x: left + 165, y: CELL * j + 17 }, token)));
  return drawing;
}

function showDetail() {
  const table = weights(state.layer, state.head);
  const said = main.querySelector("output");
  const tell = (row, column) => {
    const share = table.values[row * table.columns.length + column] / 255;
    said.textContent = `${table.rows[row]} takes ${share.toFixed(3)} from ${table.columns[column]}`;
  };
  const head = typeof state.head === "number" ? `head ${state.head + 1}` : state.head;
  const where = state.head === "rollout" ? "rollout of all layers" : `layer ${state.layer + 1}, ${head}`;
  main.querySelector("#where").textContent = `${part().name}: ${where}`;
  main.querySelector("#map").replaceChildren(heatMap(table, state, tell));
  main.querySelector("#lines").replaceChildren(lines(table));
}

function showChoices() {
  const rows = examples[state.example].choices.map(([token, probability, likeliest]) => {
    const number = element("span", {}, element("span", { class: "bar", style: `width: ${5 * probability}em` }), probability.toFixed(3));
    const others = likeliest.filter(([other]) => other !== token).map(([other, p]) => `${other} ${p.toFixed(3)}`);
    return [token, number, others.join(" · ")];
  });
  main.querySelector("#choices").replaceChildren(tableOf(["token", "probability", "likeliest others"], rows));
}

function choose(name, label, options, then) {
  const select = element("select", { id: name });
  options.forEach((text, i) => select.append(element("option", { value: i }, text)));
  select.addEventListener("change", () => then(Number(select.value)));
  return element("div", {}, element("label", { for: name }, label), document.createElement("br"), select);
}

function showPart(index) {
  Object.assign(state, { part: index, layer: 0, row: 0, column: 0 });
  state.head = part().heads[0].length > 1 ? "mean" : 0;
  showGrid();
  showDetail();
}

function showExample(index) {
  state.example = index;
  const { source, target, attention } = examples[index];
  main.querySelector("#texts").replaceChildren(
    ...[source, target].filter(Boolean).map((text) => element("p", { class: "text" }, text)),
  );
  const names = attention.map(({ name }) => name);
  main.querySelector("#parts").replaceChildren(choose("part", "Attention", names, showPart));
  showChoices();
  if (attention.length) showPart(0);
  for (const [details, shown] of sections) {
    details.hidden = !shown();
    details.refresh();
  }
}

const sections = [ // each with whether there is something in it
  [section("search", "The beam search, step by step", () => searches(examples[state.example].trees)), () => examples[state.example].trees.length],
  [section("embeddings", "Tokens as their embeddings lie", () => planes(examples[state.example].planes)), () => examples[state.example].planes.length],
  [section("positions", "Positions", positions), () => data.positions.length],
];

const titles = examples.map(({ source, target }, i) => `${i + 1}: ${(source || target).slice(0, 60)}`);
main.append(
  element("div", { class: "controls" }, choose("example", "Example", titles, showExample), element("div", { id: "parts" })),
  element("div", { id: "texts" }),
  element("h2", {}, "Layers and heads"),
  element("div", { id: "grid" }),
  element("h2", { id: "where" }),
  element("output", { "aria-live": "polite" }),
  element("div", { class: "views" }, element("div", { id: "map", class: "scroll" }), scrolled("lines")),
  element("h2", {}, "What it wrote, and what else it might have"),
  scrolled("choices"),
  ...sections.map(([details]) => details),
);
showExample(0);
const asked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
if (asked && asked.refresh) asked.open = true;
