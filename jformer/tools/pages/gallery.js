"use strict";
// Draws the gallery: charts and maps in their places, and a step of attention whose numbers can be edited.

const data = JSON.parse(document.getElementById("data").textContent);

for (const place of document.querySelectorAll("[data-chart]")) {
  const { title, along, at, lines, log_x: logX, log_y: logY } = data.charts[place.dataset.chart];
  const drawn = Object.entries(lines).map(([name, values], i) => ({
    name,
    colour: COLOURS[i] ?? OTHERS,
    dashes: "none",
    points: values.map((value, j) => [at[j], value]).filter(([, value]) => value > 0 || !logY),
  }));
  place.append(drawChart({ title, along, lines: drawn }, { logX, logY }));
  if (drawn.length > 1) place.append(legendOf(drawn));
}
for (const place of document.querySelectorAll("[data-map]")) place.append(...numberMap(data.maps[place.dataset.map]));

const SCALES = { "1 / √d_k": (size) => size ** -0.5, "1: not scaled": () => 1, "0: no scores": () => 0 };
const { words, numbers } = data.step;
const step = { query: structuredClone(numbers), key: structuredClone(numbers), value: structuredClone(numbers) };
const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

function softmax(scores) {
  const most = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

/** Return scores, weights and outputs: softmax(scale · Q Kᵀ) V (Vaswani et al. 2017, equation 1), perhaps causal. */
function attend({ query, key, value }, scale, causal) {
  const scores = query.map((q, t) => key.map((k, s) => (causal && s > t ? -Infinity : dot(q, k) * scale)));
  const weights = scores.map(softmax);
  const columns = value[0].map((_, u) => value.map((v) => v[u]));
  return { scores, weights, output: weights.map((row) => columns.map((column) => dot(row, column))) };
}

/** Return a table of numbers, a row for each word, under a caption that says what they are. */
function wordTable(caption, heads, rows) {
  const body = rows.map((cells, i) => {
    const numbers = cells.map((cell) => element("td", {}, cell));
    return element("tr", {}, element("th", { scope: "row" }, words[i]), ...numbers);
  });
  const head = heads.map((name) => element("th", { scope: "col" }, name));
  const parts = [element("thead", {}, element("tr", {}, element("td"), ...head)), element("tbody", {}, ...body)];
  const table = element("table", {}, element("caption", {}, caption), ...parts);
  return element("div", { class: "wide", tabindex: 0 }, table);
}

/** Return a table of numbers to edit; after each change `changed` is called with the row. */
function editable(name, changed) {
  const field = (value, row, i) => {
    const label = `${name} of ${words[row]}, feature ${i + 1}`;
    const input = element("input", { type: "number", step: "any", value, "aria-label": label });
    input.addEventListener("input", () => {
      step[name][row][i] = Number(input.value);
      changed(row);
    });
    return input;
  };
  const fields = step[name].map((row, r) => row.map((value, i) => field(value, r, i)));
  return wordTable({ query: "Q: queries", key: "K: keys", value: "V: values" }[name], [1, 2, 3, 4], fields);
}

function drawStep(place) {
  const scales = Object.keys(SCALES).map((name) => element("option", {}, name));
  const scale = element("select", { id: "scale" }, ...scales);
  const causal = element("input", { type: "checkbox", id: "causal" });
  const [said, results] = [element("output", { "aria-live": "polite" }), element("div", { class: "views" })];
  let asked = words.length - 1; // the word whose weights are said: the last one whose query was edited
  const update = () => {
    const found = attend(step, SCALES[scale.value](numbers[0].length), causal.checked);
    const texts = (rows) => rows.map((row) => row.map((value) => value.toFixed(4).replace("-", "−")));
    const shares = found.weights[asked].map((weight, i) => `${Math.round(100 * weight)} % of ${words[i]}`);
    said.textContent = `${words[asked]} takes ${shares.join(", ")}.`;
    results.replaceChildren(
      wordTable("Scores: scale · Q Kᵀ", words, texts(found.scores)),
      wordTable("Weights: softmax of each row", words, texts(found.weights)),
      wordTable("Output: weights · V", [1, 2, 3, 4], texts(found.output)),
    );
  };
  for (const control of [scale, causal]) control.addEventListener("change", update);
  const controls = [
    element("span", {}, element("label", { for: "scale" }, "scale "), scale),
    element("span", {}, causal, element("label", { for: "causal" }, " causal: no word sees a later one")),
  ];
  const ask = (row) => {
    asked = row;
    update();
  };
  const fields = ["query", "key", "value"].map((name) => editable(name, name === "query" ? ask : update));
  place.append(
    element("div", { class: "views" }, ...fields),
    element("div", { class: "controls" }, ...controls),
    said,
    results,
  );
  update();
}

drawStep(document.getElementById("step"));
