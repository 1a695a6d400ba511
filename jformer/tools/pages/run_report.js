"use strict";
// Draws the curves that the page holds: a chart for each figure, a colour for each run, dashes for each split.

const charts = JSON.parse(document.getElementById("data").textContent);
const place = document.getElementById("charts");
const DASHES = { train: "5 3", valid: "none", valid_ema: "1.5 2.5" };
const state = { smoothing: 0, logX: false, logY: false };
const lines = charts.flatMap((chart) => chart.lines);
const runs = [...new Set(lines.map((line) => line.run))];
const splits = [...new Set(lines.map((line) => line.split))];
const colour = (run) => COLOURS[runs.indexOf(run)] ?? OTHERS;
const dashes = (split) => DASHES[split] ?? "8 2 2 2";

const named = (line) => (runs.length > 1 ? `${line.run}, ${line.split}` : line.split);

/** Return [step, value] of what can be drawn, each value an average of those before it that weighs old ones less. */
function points(line) {
  let [sum, weight] = [0, 0];
  const found = [];
  line.steps.forEach((step, i) => {
    const value = line.values[i];
    if (value === null || (state.logX && step <= 0) || (state.logY && value <= 0)) return;
    sum = state.smoothing * sum + value;
    weight = state.smoothing * weight + 1;
    found.push([step, sum / weight]);
  });
  return found;
}

function draw({ title, lines }) {
  const drawn = lines.map((line) => ({
    name: named(line),
    colour: colour(line.run),
    dashes: dashes(line.split),
    points: points(line),
  }));
  return drawChart({ title, along: "updates", lines: drawn }, state);
}

function drawAll() {
  grid.replaceChildren(...charts.map(draw));
}

function control(label, attributes, change) {
  const id = label.replaceAll(" ", "-");
  const [input, shown] = [element("input", { id, ...attributes }), element("span", {})];
  input.addEventListener("input", () => {
    change(input);
    if (input.type === "range") shown.textContent = ` ${input.value}`;
    drawAll();
  });
  return element("span", {}, input, element("label", { for: id }, label), shown);
}

function legend() {
  const others = runs.length - COLOURS.length;
  const shown = runs.slice(0, COLOURS.length).map((run) => ({ name: run, colour: colour(run) }));
  const made = legendOf(others > 0 ? [...shown, { name: `${others} others`, colour: OTHERS }] : shown);
  for (const split of splits) {
    const svg = element("svg", { class: "sample", viewBox: "0 0 36 8", "aria-hidden": "true" });
    const style = { stroke: "currentColor", "stroke-width": 1.8, "stroke-dasharray": dashes(split) };
    svg.append(element("line", { x1: 0, x2: 36, y1: 4, y2: 4, ...style }));
    made.append(element("span", { class: "split" }, svg, split));
  }
  return made;
}

const grid = element("div", { class: "grid" });
if (charts.length) {
  place.append(
    element(
      "div",
      { class: "controls" },
      control("smoothing", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 }, (input) => {
        state.smoothing = Number(input.value);
      }),
      control("updates on a logarithmic axis", { type: "checkbox" }, (input) => {
        state.logX = input.checked;
      }),
      control("values on a logarithmic axis", { type: "checkbox" }, (input) => {
        state.logY = input.checked;
      }),
    ),
    legend(),
    element("p", {}, "Point at a chart, or go there with Tab and use the arrow keys, to read its values."),
    grid,
  );
  drawAll();
} else {
  place.append("No row of metrics.jsonl is written yet.");
}
