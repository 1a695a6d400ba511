"use strict";
// Draws the curves that the page holds: a chart for each figure, a colour for each run, dashes for training.

const charts = JSON.parse(document.getElementById("data").textContent);
const place = document.getElementById("charts");
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1"]; // Okabe and Ito 2008
const [WIDTH, HEIGHT, LEFT, BOTTOM] = [420, 220, 58, 24];
const state = { smoothing: 0, logX: false, logY: false };
const runs = [...new Set(charts.flatMap((chart) => chart.lines.map((line) => line.run)))];

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const short = (value) => {
  const text = String(Number(value.toPrecision(3)));
  return text.length > 8 ? value.toExponential(1) : text;
};
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

/** Return a function from values to pixels, and where its axis has marks. */
function scale(values, logarithmic, from, to) {
  const change = logarithmic ? Math.log10 : (value) => value;
  let [low, high] = [Math.min(...values), Math.max(...values)].map(change);
  if (!(high > low)) [low, high] = [low - Math.abs(low) / 2, high + Math.abs(high) / 2 || 1];
  const pixel = (value) => from + ((change(value) - low) / (high - low)) * (to - from);
  const back = (place) => (logarithmic ? 10 ** place : place);
  return { pixel, marks: [0, 1, 2, 3].map((i) => back(low + ((high - low) * i) / 3)) };
}

function draw(chart) {
  const lines = chart.lines.map((line) => ({ ...line, points: points(line) })).filter((line) => line.points.length);
  const told = lines.map((line) => `${named(line)} ends at ${short(line.points.at(-1)[1])}`).join("; ");
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${chart.title}: ${told}` });
  const readout = element("output", {}, told || "nothing to draw on these axes");
  if (lines.length) {
    const all = lines.flatMap((line) => line.points);
    const x = scale(all.map((point) => point[0]), state.logX, LEFT, WIDTH - 8);
    const y = scale(all.map((point) => point[1]), state.logY, HEIGHT - BOTTOM, 8);
    for (const mark of y.marks) {
      const at = y.pixel(mark);
      svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: at, y2: at }));
      svg.append(element("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, short(mark)));
    }
    x.marks.forEach((mark, i) => {
      const anchor = i === 0 ? "start" : i === 3 ? "end" : "middle";
      svg.append(element("text", { x: x.pixel(mark), y: HEIGHT - 6, "text-anchor": anchor }, short(Math.round(mark))));
    });
    for (const line of lines) {
      const path = line.points.map(([step, value], i) => `${i ? "L" : "M"}${x.pixel(step).toFixed(1)} ${y.pixel(value).toFixed(1)}`);
      const stroke = COLOURS[runs.indexOf(line.run) % COLOURS.length];
      const dashes = line.split === "train" ? { "stroke-dasharray": "5 3" } : {};
      svg.append(element("path", { d: path.join(""), fill: "none", stroke, "stroke-width": 1.8, ...dashes }));
      if (line.points.length === 1) {
        svg.append(element("circle", { cx: x.pixel(line.points[0][0]), cy: y.pixel(line.points[0][1]), r: 3, fill: stroke }));
      }
    }
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * WIDTH;
      const near = (line) => line.points.reduce((a, b) => (Math.abs(x.pixel(b[0]) - at) < Math.abs(x.pixel(a[0]) - at) ? b : a));
      readout.textContent = lines.map((line) => `${named(line)} at ${near(line)[0]}: ${short(near(line)[1])}`).join("; ");
    });
    svg.addEventListener("pointerleave", () => (readout.textContent = told));
  }
  return element("figure", {}, element("figcaption", {}, chart.title), svg, readout);
}

function drawAll() {
  grid.replaceChildren(...charts.map(draw));
}

function control(label, attributes, change) {
  const input = element("input", { id: label, ...attributes });
  input.addEventListener("input", () => {
    change(input);
    drawAll();
  });
  return element("span", {}, input, element("label", { for: label }, label));
}

const grid = element("div", { class: "grid" });
if (charts.length) {
  const legend = element("p", { class: "legend" });
  runs.forEach((run, i) => {
    legend.append(element("span", { style: `border-color: ${COLOURS[i % COLOURS.length]}` }, run));
  });
  place.append(
    element(
      "div",
      { class: "controls" },
      control("smoothing", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 }, (input) => (state.smoothing = Number(input.value))),
      control("updates on a logarithmic axis", { type: "checkbox" }, (input) => (state.logX = input.checked)),
      control("values on a logarithmic axis", { type: "checkbox" }, (input) => (state.logY = input.checked)),
    ),
    legend,
    element("p", {}, "Training is dashed. Point at a chart to read its values."),
    grid,
  );
  drawAll();
} else {
  place.append("No row of metrics.jsonl is written yet.");
}
