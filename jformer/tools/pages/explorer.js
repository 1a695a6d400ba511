"use strict";
// Draws the attention weights that the page holds. Texts are set as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const { examples } = data;
const main = document.getElementById("explorer");
const THUMBNAIL = Math.min(168, Math.ceil(84 * devicePixelRatio)); // pixels of a small map at most: those of the screen
const MOST_LINES = 80; // tokens a side up to which lines are drawn
const state = { example: 0, part: null, layer: 0, head: "mean", row: 0, column: 0 };
const waiting = []; // small maps that are not drawn before the large one
let drawings = 0; // of the large map, so that an older one that comes late is not shown

const part = () => examples[state.example].attention[state.part];

/** Return how many pixels a weight has in the large map: the fewer, the more there are. */
const cellOf = ({ rows, columns }) =>
  Math.min(18, Math.max(4, Math.floor(1400 / Math.max(rows.length, columns.length))));

/** Return the weights of a head, of "mean" or of "rollout", as a table of bytes. */
async function weights(layer, head) {
  const { rows, columns, side, firstPatch, mask, rollout, means, heads } = part();
  const found = head === "rollout" ? rollout : head === "mean" ? means[layer] : heads[layer][head];
  const [values, open] = await Promise.all([unpack(found), mask === null ? null : unpack(mask)]);
  return { rows, columns, side, firstPatch, values, mask: open, shares: SHARES, cell: cellOf(part()) };
}

const lazily = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    lazily.unobserve(target);
    const head = target.dataset.head;
    const found = weights(Number(target.dataset.layer), /^\d+$/.test(head) ? Number(head) : head);
    found.then((table) => paint(target, shrunk(table, THUMBNAIL)));
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
  waiting.push(canvas);
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

function lines({ rows, columns, values, shares }) {
  if (Math.max(rows.length, columns.length) > MOST_LINES) {
    return element("p", {}, `Lines are drawn up to ${MOST_LINES} tokens a side.`);
  }
  const step = 18;
  const [left, right] = [labelWidth(rows), labelWidth(columns)];
  const [width, height] = [left + right + 160, step * Math.max(rows.length, columns.length) + 10];
  const drawing = element("svg", { ...sized(width, height), role: "img" });
  drawing.setAttribute("aria-label", "Lines from each token to those it attends to; the heat map has the same weights");
  rows.forEach((token, i) => {
    drawing.append(element("text", { x: left - 5, y: step * i + 17, "text-anchor": "end" }, shortened(token)));
    columns.forEach((_, j) => {
      const share = shares[values[i * columns.length + j]];
      if (share < 0.02) return;
      const ends = { x1: left, y1: step * i + 13, x2: left + 160, y2: step * j + 13 };
      drawing.append(
        element("line", { class: "link", ...ends, "stroke-opacity": share, "stroke-width": 1 + 2 * share }),
      );
    });
  });
  columns.forEach((token, j) => drawing.append(element("text", { x: left + 165, y: step * j + 17 }, shortened(token))));
  return drawing;
}

/** Return what the colours say, and how much of the map is masked. */
function legend({ rows, columns, masked }) {
  const entry = (kind, text) =>
    element("span", {}, element("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
  const shown = element("p", { class: "legend" }, entry("scale", "weight, from 0 to 1"));
  if (masked) {
    const of = `${masked.toLocaleString("en")} of ${(rows.length * columns.length).toLocaleString("en")} pairs`;
    shown.append(entry("hatched", `masked, no weight at all: may not attend (${of})`));
  }
  return shown;
}

async function showDetail() {
  const mine = ++drawings;
  const head = typeof state.head === "number" ? `head ${state.head + 1}` : state.head;
  const where = state.head === "rollout" ? "rollout of all layers" : `layer ${state.layer + 1}, ${head}`;
  const image = examples[state.example].image;
  const seen = part().side ? pixelsOf({ ...image, values: await unpack(image.bytes) }) : null;
  const table = await weights(state.layer, state.head);
  if (mine !== drawings) return;
  const said = main.querySelector("output");
  let pictured = -1; // the row that the picture is of
  const tell = (row, column) => {
    const at = row * table.columns.length + column;
    const pair = [table.rows[row], table.columns[column]];
    said.textContent =
      table.mask && !table.mask[at]
        ? `${pair[0]} may not attend to ${pair[1]}: masked`
        : `${pair[0]} takes ${number(SHARES[table.values[at]])} from ${pair[1]}`;
    if (!seen || row === pictured) return;
    pictured = row;
    const chosen = (other) => {
      state.row = other;
      showDetail().then(() => main.querySelector('.strip [aria-pressed="true"]').focus());
    };
    main.querySelector("#lines").replaceChildren(...pictures(seen, table, row, chosen));
  };
  main.querySelector("#where").textContent = `${part().name}: ${where}`;
  main.querySelector("#legend").replaceChildren(legend(part()));
  if (!seen) main.querySelector("#lines").replaceChildren(lines(table));
  main.querySelector("#map").replaceChildren(heatMap(table, state, tell));
}

function showChoices() {
  const { choices, heading } = examples[state.example];
  const hidden = choices.some(([, , , read]) => read);
  const rows = choices.map(([token, probability, likeliest, read]) => {
    const number = element(
      "span",
      {},
      element("span", { class: "bar", style: `width: ${5 * probability}em` }),
      probability.toFixed(3),
    );
    const others = likeliest.filter(([other]) => other !== token).map(([other, p]) => `${other} ${p.toFixed(3)}`);
    return [...(hidden ? [read] : []), token, number, others.join(" · ")];
  });
  main.querySelector("#chosen").textContent = heading;
  for (const place of main.querySelectorAll("#chosen, #choices")) place.hidden = !choices.length;
  const names = [...(hidden ? ["read"] : []), "token", "probability", "likeliest others"];
  main.querySelector("#choices").replaceChildren(tableOf(names, rows));
}

function choose(name, label, options, then) {
  const select = element("select", { id: name });
  options.forEach((text, i) => select.append(element("option", { value: i }, text)));
  select.addEventListener("change", () => then(Number(select.value)));
  return element("div", {}, element("label", { for: name }, label), document.createElement("br"), select);
}

/** Show a part of the model: the large map first, then the small ones, as they come into view.
 *
 * Another example of the same part keeps the head, so that a word can be followed through its contexts.
 */
async function showPart(index) {
  const same = index === state.part;
  Object.assign(state, { part: index, row: 0, column: 0 });
  if (!same) Object.assign(state, { layer: 0, head: part().heads[0].length > 1 ? "mean" : 0 });
  waiting.length = 0;
  showGrid();
  await showDetail();
  for (const canvas of waiting.splice(0)) lazily.observe(canvas);
}

function showExample(index) {
  state.example = index;
  const { source, target, attention } = examples[index];
  const texts = [source, target].filter(Boolean).map((text) => element("p", { class: "text", dir: "auto" }, text));
  for (const place of main.querySelectorAll("#attention, #parts")) place.hidden = !attention.length;
  if (!attention.length) texts.push(element("p", {}, "There is no attention in this model."));
  main.querySelector("#texts").replaceChildren(...texts);
  const names = attention.map(({ name }) => name);
  main.querySelector("#parts").replaceChildren(choose("part", "Attention", names, showPart));
  main.querySelector("#part").value = state.part ?? 0;
  showChoices();
  if (attention.length) showPart(state.part ?? 0);
  for (const [details, shown] of sections) {
    details.hidden = !shown();
    details.refresh();
  }
}

/** Return a place for a drawing of packed JSON, filled once that is unpacked; none if there is no data. */
function later(number, draw) {
  if (number === null) return [];
  const place = element("div");
  unpack(number).then((text) => place.replaceChildren(...draw(JSON.parse(new TextDecoder().decode(text)))));
  return [place];
}

const sections = [
  // each with whether there is something in it
  [
    section("search", "The beam search, step by step", () => later(examples[state.example].trees, searches)),
    () => examples[state.example].trees !== null,
  ],
  [
    section("embeddings", "Tokens as their embeddings lie", () => planes(examples[state.example].planes)),
    () => examples[state.example].planes.length,
  ],
  [
    section("contexts", "Tokens in their contexts, layer by layer", () => later(data.contexts, contexts)),
    () => data.contexts !== null,
  ],
  [section("positions", "Positions", positions), () => data.positions.length],
];

const titles = examples.map(({ source, target }, i) => `${i + 1}: ${(source || target).slice(0, 60)}`);
main.append(
  element(
    "div",
    { class: "controls" },
    choose("example", "Example", titles, showExample),
    element("div", { id: "parts" }),
  ),
  element("div", { id: "texts" }),
  element(
    "section",
    { id: "attention" },
    element("h2", {}, "Layers and heads, each with its entropy in nats"),
    element("div", { id: "grid" }),
    element("h2", { id: "where" }),
    element("div", { id: "legend" }),
    element("output", { "aria-live": "polite" }),
    element("div", { class: "views" }, element("div", { id: "map", class: "scroll" }), scrolled("lines")),
  ),
  element("h2", { id: "chosen" }),
  scrolled("choices"),
  ...sections.map(([details]) => details),
);
showExample(0);
const asked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
if (asked?.refresh) asked.open = true;
