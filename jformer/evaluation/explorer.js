"use strict";
// Draws the attention weights that the page holds. Texts are set as text, never as HTML.

const examples = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("explorer");
const CELL = 18; // pixels of a weight in the large map
const MOST_LINES = 80; // tokens a side up to which lines are drawn
const state = { example: 0, part: 0, layer: 0, head: "mean", row: 0, column: 0 };

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "text", "line", "rect", "image", "g"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const part = () => examples[state.example].attention[state.part];

/** Return the weights of a head, of "mean" or of "rollout", a byte each, row by row. */
function weights(layer, head) {
  const found = head === "rollout" ? part().rollout : head === "mean" ? part().means[layer] : part().heads[layer][head];
  return Uint8Array.from(atob(found), (character) => character.charCodeAt(0));
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number);
}

/** Draw weights into a canvas, one pixel each. */
function paint(canvas, values) {
  const [height, width] = [part().rows.length, part().columns.length];
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  const [low, high] = [color("--low"), color("--high")];
  for (let i = 0; i < values.length; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = low[c] + ((high[c] - low[c]) * values[i]) / 255;
    pixels.data[4 * i + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
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
  const entropy = typeof head === "number" ? `, entropy ${part().entropy[layer][head].toFixed(2)}` : "";
  const canvas = element("canvas", { "data-layer": layer, "data-head": head });
  const pressed = state.layer === layer && state.head === head;
  const where = head === "rollout" ? "rollout of all layers" : `layer ${layer + 1}, ${name}${entropy}`;
  const button = element("button", { class: "head", type: "button", "aria-pressed": pressed, "aria-label": where });
  button.append(canvas, element("span", { "aria-hidden": "true" }, name + (entropy && entropy.replace(", entropy", " ·"))));
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

/** Return how wide the longest label is, about, in pixels. */
const labelWidth = (tokens) => Math.min(160, 8 + 7 * Math.max(...tokens.map((token) => token.length)));

function heatMap(values) {
  const { rows, columns } = part();
  const [left, top] = [labelWidth(rows), labelWidth(columns)];
  const [width, height] = [left + CELL * columns.length, top + CELL * rows.length];
  const canvas = document.createElement("canvas");
  paint(canvas, values);
  const map = element("svg", { class: "map", width, height, tabindex: 0, role: "application" });
  map.setAttribute("aria-label", "Heat map; the arrow keys move from weight to weight");
  const place = { x: left, y: top, width: width - left, height: height - top, preserveAspectRatio: "none" };
  map.append(element("image", { ...place, href: canvas.toDataURL(), style: "image-rendering: pixelated" }));
  const step = Math.ceil(Math.max(rows.length, columns.length) / 600);
  rows.forEach((token, i) => {
    if (i % step) return;
    map.append(element("text", { x: left - 5, y: top + CELL * i + 13, "text-anchor": "end" }, token));
  });
  columns.forEach((token, i) => {
    if (i % step) return;
    const [x, y] = [left + CELL * i + 13, top - 5];
    map.append(element("text", { x, y, transform: `rotate(-90 ${x} ${y})` }, token));
  });
  const cursor = element("rect", { class: "cursor", width: CELL, height: CELL });
  map.append(cursor);
  const said = main.querySelector("output");
  const move = (row, column) => {
    state.row = Math.max(0, Math.min(rows.length - 1, row));
    state.column = Math.max(0, Math.min(columns.length - 1, column));
    cursor.setAttribute("x", left + CELL * state.column);
    cursor.setAttribute("y", top + CELL * state.row);
    const share = values[state.row * columns.length + state.column] / 255;
    said.textContent = `${rows[state.row]} takes ${share.toFixed(3)} from ${columns[state.column]}`;
  };
  map.addEventListener("pointermove", (event) => {
    const box = map.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - left, event.clientY - box.top - top];
    if (x >= 0 && y >= 0) move(Math.floor(y / CELL), Math.floor(x / CELL));
  });
  map.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!steps) return;
    event.preventDefault();
    move(state.row + steps[0], state.column + steps[1]);
  });
  move(state.row, state.column);
  return map;
}

function lines(values) {
  const { rows, columns } = part();
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
  const values = weights(state.layer, state.head);
  const head = typeof state.head === "number" ? `head ${state.head + 1}` : state.head;
  const where = state.head === "rollout" ? "rollout of all layers" : `layer ${state.layer + 1}, ${head}`;
  main.querySelector("#where").textContent = `${part().name}: ${where}`;
  main.querySelector("#map").replaceChildren(heatMap(values));
  main.querySelector("#lines").replaceChildren(lines(values));
}

function showChoices() {
  const body = examples[state.example].choices.map(([token, probability, likeliest]) => {
    const bar = element("span", { class: "bar", style: `width: ${5 * probability}em` });
    const others = likeliest.filter(([other]) => other !== token).map(([other, p]) => `${other} ${p.toFixed(3)}`);
    const number = element("td", {}, bar, probability.toFixed(3));
    return element("tr", {}, element("td", {}, token), number, element("td", {}, others.join(" · ")));
  });
  const names = ["token", "probability", "likeliest others"].map((name) => element("th", { scope: "col" }, name));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...names)), element("tbody", {}, ...body));
  main.querySelector("#choices").replaceChildren(table);
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
}

const titles = examples.map(({ source, target }, i) => `${i + 1}: ${(source || target).slice(0, 60)}`);
main.append(
  element("div", { class: "controls" }, choose("example", "Example", titles, showExample), element("div", { id: "parts" })),
  element("div", { id: "texts" }),
  element("h2", {}, "Layers and heads"),
  element("div", { id: "grid" }),
  element("h2", { id: "where" }),
  element("output", { "aria-live": "polite" }),
  element("div", { class: "views" }, element("div", { id: "map", class: "scroll" }), element("div", { id: "lines", class: "scroll" })),
  element("h2", {}, "What it wrote, and what else it might have"),
  element("div", { id: "choices", class: "scroll" }),
);
showExample(0);
