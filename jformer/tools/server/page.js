"use strict";
// Asks the server for the answers to what is typed, a moment after the last key, and shows what it attends to.

const PAUSE = 250; // milliseconds without a key
const STREAMED = 8; // inputs whose answers are shown while they grow: they share the smallest batch
const place = (id) => document.getElementById(id);
const SPACES = { " ": "␣", "\n": "↵", "\t": "⇥" };
const visible = (token) => SPACES[token] ?? token; // a token of white space alone would be an empty button
let [facts, timer, asking] = [{}, 0, new AbortController()];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

async function send(path, body) {
  const headers = { "Content-Type": "application/json" };
  if (place("token").value) headers.Authorization = `Bearer ${place("token").value}`;
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: asking.signal });
  place("locked").hidden = answer.status !== 401 && !place("token").value;
  if (!answer.ok) throw new Error((await answer.json()).detail ?? `status ${answer.status}`);
  return answer;
}

const post = async (path, body) => (await send(path, body)).json();

/** Call `heard` with the name and the content of each event of an answer as it comes. */
async function listen(path, body, heard) {
  const reader = (await send(path, body)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [, name, data] = /^(?:event: (\w+)\n)?data: (.*)$/s.exec(event); // s: U+2028 is a character, too
      heard(name ?? "", JSON.parse(data));
    }
  }
}

const SHOWN = 8; // numbers of a vector

function say(text, error = false) {
  place("status").textContent = text;
  place("status").className = error ? "error" : "";
}

const number = (output) => output.utility ?? output.score ?? output.log_prob ?? null;
const shown = (value) => (value === null ? "" : ` ${value.toFixed(3)}`);

/** Show the outputs for one input, a text or one with what its answer begins with: the best, the others, all labels. */
function show(input, answer) {
  if (answer.vector) {
    const [begin, size] = [answer.vector.slice(0, SHOWN).join(" "), answer.vector.length];
    return element("div", { class: "answer" }, `${begin} … ${size} numbers`);
  }
  const [best, ...others] = answer.outputs;
  const made = element("div", { class: "answer" }, element("span", { dir: "auto" }, best.text));
  made.append(element("span", { class: "number" }, shown(number(best))));
  const rest = [...others.map((output) => [output.text, number(output)]), ...Object.entries(best.labels ?? {})];
  if (rest.length) {
    const line = ([text, value]) =>
      element("li", {}, element("span", { dir: "auto" }, text), element("span", { class: "number" }, shown(value)));
    made.append(element("ol", { start: others.length ? 2 : 1 }, ...rest.map(line)));
  }
  if (facts.task === "qa") return made; // it writes no tokens to look into
  const button = element("button", { type: "button" }, "look inside");
  button.addEventListener("click", () => lookInside(input, best.text, made));
  made.append(" ", button);
  return made;
}

/** Return what is asked: all of a text that is to go on, a question and below it its context, or a text a line. */
function inputsOf(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  if (facts.task === "lm") return lines.length ? [text] : [];
  if (facts.task !== "qa") return lines;
  return lines.length > 1 ? [{ question: lines[0], context: lines.slice(1).join(" ") }] : [];
}

/** Show answers while they grow. */
async function grow(inputs) {
  const texts = inputs.map(() => "");
  const growing = (text) =>
    element("div", { class: "answer", "aria-busy": "true" }, element("span", { dir: "auto" }, text));
  place("answers").replaceChildren(...texts.map(growing));
  await listen(facts.route, { inputs, stream: true }, (name, { input, text, detail, ...answer }) => {
    if (name === "error") throw new Error(detail);
    if (!name) texts[input] += text;
    const shown = name === "answer" ? show(inputs[input], answer) : growing(texts[input]);
    place("answers").children[input].replaceWith(shown);
  });
}

async function answer() {
  asking.abort();
  asking = new AbortController();
  place("inside").hidden = true;
  const inputs = inputsOf(place("source").value);
  if (!inputs.length) {
    place("answers").replaceChildren();
    say("");
    return;
  }
  const began = performance.now();
  say("…");
  try {
    if (facts.streams && inputs.length <= STREAMED) await grow(inputs);
    else {
      const { answers } = await post(facts.route, { inputs });
      place("answers").replaceChildren(...answers.map((each, i) => show(inputs[i], each)));
    }
    say(`${Math.round(performance.now() - began)} ms`);
  } catch (error) {
    if (error.name === "AbortError") return;
    place("answers").replaceChildren(); // what stands there is cut off, or the answer to an earlier text
    say(error.message, true);
  }
}

/** Show what is inside an answer: the model's own as generated, or by its text if it was given a prefix. */
async function lookInside(input, text, box, at = 0) {
  const [source, target] = input.prefix ? [input.source, text] : [input, null];
  try {
    const found = { ...(await post("/v1/attention", { source, target })), source, box };
    const buttons = found.tokens.map((token, i) => {
      const button = element("button", { type: "button", "aria-pressed": "false" }, visible(token.token));
      button.addEventListener("click", () => choose(found, buttons, i));
      return button;
    });
    place("tokens").replaceChildren(...buttons);
    place("inside").hidden = false;
    if (buttons.length) choose(found, buttons, Math.min(at, buttons.length - 1));
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

function choose(found, buttons, chosen) {
  buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === chosen)));
  const weights = found.attention[chosen] ?? [];
  const sources = found.source_tokens.map((token, i) => {
    const weight = weights[i] ?? 0;
    const made = element("span", { title: `${(100 * weight).toFixed(1)} %` }, visible(token));
    made.style.backgroundColor = `rgb(0 114 178 / ${Math.min(1, weight).toFixed(2)})`;
    return made;
  });
  place("attended").replaceChildren(...sources);
  const rows = found.tokens[chosen].likeliest.map(([token, probability], i) => {
    const named = offer(found, chosen, token, found.prefixes[chosen]?.[i] ?? null);
    return element("tr", {}, element("td", {}, named), element("td", {}, `${(100 * probability).toFixed(1)} %`));
  });
  place("likeliest").replaceChildren(element("table", {}, element("tbody", {}, ...rows)));
}

/** Return a likely token, where an answer can begin with it as a button that asks for the rest. */
function offer(found, at, token, prefix) {
  if (prefix === null) return visible(token);
  const button = element("button", { type: "button", title: `${prefix} …` }, visible(token));
  button.addEventListener("click", () => goOn(found, at, prefix));
  return button;
}

/** Replace the answer that is looked into by one that begins with `prefix`, and select the token at the same place. */
async function goOn({ source, box }, at, prefix) {
  const input = { source, prefix };
  say("…");
  try {
    const { answers } = await post(facts.route, { inputs: [input] });
    const other = show(input, answers[0]);
    box.replaceWith(other);
    say("");
    await lookInside(input, answers[0].outputs[0].text, other, at);
    place("tokens").querySelector('[aria-pressed="true"]')?.focus(); // the button that was pressed is gone
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

/** Return the text of a link; unlike decodeURIComponent this keeps a `%` that somebody typed. */
const linked = (hash) => new URLSearchParams(`text=${hash.replace(/[+&]/g, encodeURIComponent)}`).get("text");

async function begin() {
  facts = await (await fetch("/v1/health")).json();
  const languages = facts.languages.length ? `, ${facts.languages.join(" to ")}` : "";
  place("facts").textContent =
    `${facts.family} for ${facts.task}${languages}, after ${facts.updates.join(", ")} updates`;
  const asks = facts.task === "qa";
  if (asks) document.querySelector("label[for=source]").textContent = "A question, and below it its context";
  const example = JSON.stringify({ inputs: [asks ? { question: "a question", context: "a text" } : "a text"] });
  place("example").textContent =
    `curl ${location.origin}${facts.route} -H "Content-Type: application/json" -d '${example}'`;
  place("source").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(answer, PAUSE);
  });
  place("locked").addEventListener("submit", (event) => {
    event.preventDefault();
    answer();
  });
  if (location.hash) place("source").value = linked(location.hash.slice(1)); // a link may contain the text
  if (place("source").value) await answer(); // so may early typing, or a browser that restored the form
}

begin().catch((error) => say(error.message, true));
