"use strict";
// Draws what a run knows before its first layer: embeddings as points with their neighbours, and positions as maps.

const [WIDE, HIGH, EDGE] = [620, 380, 34]; // pixels of a plane, and around its points

/** Return where the labels [x, y, width] of points stand: each beside its own, or further down where others are. */
function placeLabels(points, tokens) {
  const placed = [];
  for (const [i, [cx, cy]] of [...points.entries()].sort(([, a], [, b]) => a[1] - b[1])) {
    const label = { i, x: cx + 7, y: cy + 4, width: 5 + 7 * shortened(tokens[i]).length };
    const over = (other) =>
      Math.abs(other.y - label.y) < 12 && other.x < label.x + label.width && label.x < other.x + other.width;
    const covers = ([x, y]) => x > label.x - 5 && x < label.x + label.width && y > label.y - 13 && y < label.y + 4;
    while (placed.some(over) || points.some(covers)) label.y += 3;
    placed.push(label);
  }
  return placed.sort((a, b) => a.i - b.i);
}

/** Return a plane's points as a drawing; the table beside it has the same tokens. */
function drawPlane({ tokens, points }) {
  const drawing = element("svg", { class: "plane", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img" });
  drawing.setAttribute(
    "aria-label",
    "Tokens on the first two principal components of their vectors; the table lists their neighbours",
  );
  const place = (axis, size) => {
    const along = points.map((point) => point[axis]);
    const [least, most] = [Math.min(...along), Math.max(...along)];
    return (value) => EDGE + ((value - least) / (most - least || 1)) * (size - 2 * EDGE);
  };
  const [x, y] = [place(0, WIDE - 40), place(1, HIGH)];
  const places = points.map(([first, second]) => [x(first), HIGH - y(second)]);
  placeLabels(places, tokens).forEach((label, i) => {
    const [cx, cy] = places[i];
    const title = element("title", {}, `${tokens[i]}: ${points[i].map((value) => value.toFixed(2)).join(", ")}`);
    const away = element("line", { class: "away", x1: cx, y1: cy, x2: label.x - 1, y2: label.y - 4 });
    const text = element("text", { x: label.x, y: label.y }, shortened(tokens[i]));
    drawing.append(element("g", {}, title, away, element("circle", { cx, cy, r: 3.5 }), text));
  });
  return drawing;
}

function planes(found, stack = "") {
  return found.flatMap((plane, i) => {
    const shares = plane.shares.map((share) => `${Math.round(100 * share)} %`).join(" and ");
    const near = plane.neighbours.map((each) =>
      each.map(([token, cosine]) => `${token} ${cosine.toFixed(2)}`).join(" · "),
    );
    const table = tableOf(
      ["token", "nearest by cosine"],
      plane.tokens.map((token, row) => [token, near[row]]),
    );
    const told = `The ${plane.tokens.length} tokens on two principal components, which show ${shares} of their variance.`;
    const drawn = scrolled(`plane${stack}${i}`, drawPlane(plane));
    const views = element("div", { class: "views" }, drawn, scrolled(`neighbours${stack}${i}`, table));
    return [element("h3", {}, plane.name), element("p", {}, told), views];
  });
}

/** Return the tokens of all examples as they lie in a stack, with a slider over its layers. */
function contexts(stacks) {
  return stacks.flatMap(({ name, layers }) => {
    const last = layers.length - 1;
    const slider = element("input", { id: `depth-${name}`, type: "range", min: 0, max: last, value: last });
    const shown = element("div");
    const show = () => {
      slider.setAttribute("aria-valuetext", layers[slider.value].name);
      shown.replaceChildren(...planes([layers[slider.value]], name));
    };
    slider.addEventListener("input", show);
    show();
    return [element("label", { for: slider.id }, `Layers of the ${name}`), slider, shown];
  });
}

function positions() {
  return data.positions.flatMap(numberMap);
}
