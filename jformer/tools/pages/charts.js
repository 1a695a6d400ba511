"use strict";
// Draws lines over whole numbers: a chart of its own for each set of them, read by pointer and keyboard.

// Okabe and Ito 2008, the two lightest darkened to 3:1 on white; runs past the last are grey.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#A87000", "#2D86B8", "#8C6BB1"];
const OTHERS = "#8A8A8A";
const [WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM] = [420, 220, 58, 8, 24];

/** Return numbers as short texts that still tell them apart. */
function texts(values) {
  const written = (digits) => values.map((value) => String(Number(value.toPrecision(digits))));
  const distinct = [3, 4, 5, 6, 7].map(written).find((found) => new Set(found).size === new Set(values).size);
  const power = (text) => Number(text).toExponential().replace("e+", "e");
  return (distinct ?? written(7)).map((text) => (text.length > 7 ? power(text) : text));
}

const short = (value) => texts([value])[0];

/** Return the round numbers from one to another, two to six of them. */
function round(low, high) {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-6);
  const count = Math.floor(high / step + 1e-6) - first + 1;
  return Array.from({ length: count }, (_, i) => (first + i) * step);
}

/** Return the round numbers in a range of a logarithmic axis: powers of ten, and 1, 2 and 5 times them if few. */
function roundPowers(low, high) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const decades = round(from, to).filter(Number.isInteger);
  if (to - from > 2) return decades.map((power) => 10 ** power);
  const powers = Array.from({ length: 4 }, (_, i) => 10 ** (Math.floor(from) + i));
  const found = powers.flatMap((power) => [1, 2, 5].map((factor) => factor * power));
  const within = found.filter((value) => value >= low * (1 - 1e-6) && value <= high * (1 + 1e-6));
  return within.length > 2 ? within : round(low, high);
}

/** Return a function from values to pixels, and where its axis has marks. */
function scale(values, logarithmic, from, to) {
  const change = logarithmic ? Math.log10 : (value) => value;
  let low = change(values.reduce((a, b) => Math.min(a, b)));
  let high = change(values.reduce((a, b) => Math.max(a, b)));
  if (!(high > low)) [low, high] = [low - Math.abs(low) / 2, high + Math.abs(high) / 2 || 1];
  const pixel = (value) => from + ((change(value) - low) / (high - low)) * (to - from);
  const back = (place) => (logarithmic ? 10 ** place : place);
  return { pixel, marks: (logarithmic ? roundPowers : round)(back(low), back(high)) };
}

function drawAxes(svg, x, y) {
  const marks = texts(y.marks);
  y.marks.forEach((mark, i) => {
    const at = y.pixel(mark);
    svg.append(element("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    svg.append(element("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, marks[i]));
  });
  for (const step of x.marks.filter(Number.isInteger)) {
    const anchor = x.pixel(step) > WIDTH - RIGHT - 15 ? "end" : "middle";
    svg.append(element("text", { x: x.pixel(step), y: HEIGHT - 6, "text-anchor": anchor }, String(step)));
  }
}

function drawLine(svg, line, x, y) {
  const at = line.points.map(([step, value]) => `${x.pixel(step).toFixed(1)} ${y.pixel(value).toFixed(1)}`);
  const style = { fill: "none", stroke: line.colour, "stroke-width": 1.8, "stroke-dasharray": line.dashes };
  svg.append(element("path", { d: `M${at.join("L")}`, ...style }));
  if (at.length === 1) {
    const [cx, cy] = at[0].split(" ");
    svg.append(element("circle", { cx, cy, r: 3, fill: line.colour }));
  }
}

/** Let the pointer and the arrow keys choose a point of the x axis, and write the lines' values there. */
function readable(svg, drawn, x, readout, told) {
  const all = drawn.flatMap((line) => line.points);
  const steps = [...new Set(all.map(([step]) => step))].sort((a, b) => a - b);
  let chosen = steps.length - 1;
  const away = ([step], pixel) => Math.abs(x.pixel(step) - pixel);
  const nearest = (points, pixel) => points.reduce((a, b) => (away(b, pixel) < away(a, pixel) ? b : a));
  const read = (step) => {
    const of = ({ name, points }) => {
      const [found, value] = nearest(points, x.pixel(step));
      return `${name} at ${found}: ${short(value)}`;
    };
    readout.textContent = drawn.map(of).join("; ");
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    read(nearest(all, ((event.clientX - box.left) / box.width) * WIDTH)[0]);
  });
  svg.addEventListener("pointerleave", () => {
    readout.textContent = told;
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!move) return;
    event.preventDefault();
    chosen = Math.min(Math.max(chosen + move, 0), steps.length - 1);
    read(steps[chosen]);
    svg.setAttribute("aria-label", readout.textContent);
  });
}

/**
 * Return a chart as a figure that pointer and keyboard read.
 *
 * A line has `name`, `colour`, `dashes` and `points`, pairs of a whole number and a value; `along` says what the numbers
 * count. On a logarithmic axis all must be above zero.
 */
function drawChart({ title, along, lines }, { logX, logY }) {
  const drawn = lines.filter((line) => line.points.length);
  const told = drawn.map((line) => `${line.name} ends at ${short(line.points.at(-1)[1])}`).join("; ");
  const label = `${title}: ${told}. Arrow keys read other ${along}.`;
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": label });
  const readout = element("p", { class: "readout" }, told || "no value is above zero, as a logarithmic axis needs");
  if (drawn.length) {
    const all = drawn.flatMap((line) => line.points);
    const [steps, values] = [0, 1].map((i) => all.map((point) => point[i]));
    const x = scale(steps, logX, LEFT, WIDTH - RIGHT);
    const y = scale(values, logY, HEIGHT - BOTTOM, 8);
    drawAxes(svg, x, y);
    for (const line of drawn) drawLine(svg, line, x, y);
    readable(svg, drawn, x, readout, told);
  }
  return element("figure", {}, element("figcaption", {}, title), svg, readout);
}

/** Return a legend: names and colours of lines. */
function legendOf(lines) {
  const names = lines.map(({ name, colour }) => element("span", { style: `border-color: ${colour}` }, name));
  return element("p", { class: "legend" }, ...names);
}
