// Shared code of all sections: elements, numbers as text, and the runs as spans, counters and arrows. Data is inserted
// into the page as text only, never as HTML: names of parameters and files come from users.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const mostMarks = { timeline: 2600, memory: 700, ring: 600, gradients: 600, links: 300 };

// Elements

/** An element with attributes and children; strings become text. Those that have to be SVG are. */
function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "rect", "path", "line", "circle", "text", "defs", "pattern", "marker", "title"];
  const element = drawn.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag)
                                      : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : typeof value === "number" && tag !== "input"
      ? Math.round(value * 100) / 100 : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}
const body = (section) => document.querySelector(`#${section} .body`);
const titled = (mark, text) => { mark.append(make("title", {}, text)); return mark; };

function table(caption, head, rows) {
  const cell = (tag) => (value, column) => {
    const isNumber = value && value.number !== undefined;
    return make(tag, { class: isNumber ? "number" : null, scope: tag === "th" ? "col" : null },
      isNumber ? value.number : typeof value === "object" && value instanceof Node ? value : String(value ?? ""));
  };
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    make("table", {}, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, head.map(cell("th")))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell("td")))))));
}
const right = (text) => ({ number: text });

/** The numbers behind a picture. */
const behind = (what, content) => make("details", {}, make("summary", {}, what), content);

function choice(label, options, chosen, changed) {
  const select = make("select", { onchange: () => changed(Number(select.value)) },
    options.map((text, index) => make("option", { value: String(index), selected: index === chosen }, text)));
  return make("label", { class: "control" }, label + " ", select);
}

const empty = (text) => make("p", { class: "empty" }, text);

// Numbers

const figures = (value, digits = 3) => {
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
};
const time = (us) => us >= 1e6 ? `${figures(us / 1e6)} s` : us >= 1000 ? `${figures(us / 1000)} ms` : `${figures(us)} µs`;
const bytes = (count) => {
  if (count === null || count === undefined) return "-";
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (Math.abs(count) >= size) return `${figures(count / size)} ${unit}`;
  return `${figures(count)} B`;
};
const percent = (part) => part === null || part === undefined ? "-" : `${Math.round(part * 100)} %`;
const sum = (list) => list.reduce((all, value) => all + value, 0);
const most = (list) => list.reduce((all, value) => Math.max(all, value), 0);
const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];

// Kinds: colours are always combined with a pattern or a label

const memoryKinds = ["parameters", "gradients", "optimizer", "buckets", "activations"];
const bucketColour = (bucket) => bucket === undefined || bucket === null || bucket < 0 ? "var(--plain)"
                                                                                        : `var(--bucket${bucket % 8})`;

/** Patterns that pictures refer to, once for the page. */
function patterns() {
  const pattern = (id, colour, size, ...lines) => make("pattern",
    { id, width: size, height: size, patternUnits: "userSpaceOnUse" },
    make("rect", { width: size, height: size, style: `fill:${colour}` }),
    lines.map((d) => make("path", { d, class: "hatch" })));
  const kinds = {
    parameters: [8], gradients: [6, "M-1,1l2,-2M0,6l6,-6M5,7l2,-2"], optimizer: [7, "M3.5,0v7M0,3.5h7"],
    buckets: [5, "M0,2.5h5"], activations: [6, "M-1,5l2,2M0,0l6,6M5,-1l2,2"],
  };
  const arrow = (id) => make("marker", { id, viewBox: "0 0 8 8", refX: "7", refY: "4", markerWidth: "6",
    markerHeight: "6", orient: "auto-start-reverse" }, make("path", { d: "M0,0L8,4L0,8z", class: "arrowhead" }));
  return make("svg", { width: "0", height: "0", "aria-hidden": "true", class: "patterns" }, make("defs", {},
    pattern("waiting", "var(--waiting)", 5, "M-1,1l2,-2M0,5l5,-5M4,6l2,-2"),
    pattern("bubble", "var(--waiting)", 5, "M0,0l5,5M0,5l5,-5"),
    Object.entries(kinds).map(([kind, [size, ...lines]]) => pattern(`kind-${kind}`, `var(--${kind})`, size, ...lines)),
    arrow("arrow")));
}
const legend = (items) => make("ul", { class: "legend" }, items.map(([fill, text, more]) => make("li", {},
  make("svg", { width: "18", height: "12", "aria-hidden": "true" },
    more ? make("path", { d: "M1,6H17", class: more, "marker-end": "url(#arrow)" })
         : make("rect", { width: 18, height: 12, rx: 2, style: `fill:${fill}` })), text)));

// Runs

const lanes = { step: 1, loader: 2, forward: 3, backward: 4, communication: 5, wait: 6, optimizer: 7, gathers: 8 };

/** µs in whole ns: a begin and a length may sum to a little more or less than the begin of what touches it. */
const wholeNs = (us) => Math.round(us * 1000) / 1000;

function readRun(source) {
  const run = { ...source, spans: [], instants: [], memory: new Map(), sent: [], arrows: [] };
  const devices = Math.max(source.metadata.devices || 1, ...source.events.map((event) => event.pid || 1));
  run.devices = devices;
  run.drawn = Math.max(1, ...source.events.filter((event) => event.ph === "X").map((event) => event.pid));  // others are left out
  run.ofRanks = source.events.some((event) => event.name === "process_name" && /^rank/.test(event.args?.name || ""));
  run.device = (index) => `${run.ofRanks ? "rank" : "device"} ${index}`;
  const begun = new Map();
  for (const event of source.events) {
    const device = event.pid - 1, lane = event.tid - 10 * event.pid, at = wholeNs(event.ts), args = event.args || {};
    if (event.ph === "X")
      run.spans.push({ device, lane, begin: at, end: wholeNs(at + event.dur), category: event.cat, name: event.name, args });
    else if (event.ph === "i") run.instants.push({ device, at, category: event.cat, name: event.name, args });
    else if (event.ph === "C" && event.name === "memory, bytes") {
      if (!run.memory.has(device)) run.memory.set(device, []);
      run.memory.get(device).push({ at, args });
    } else if (event.ph === "C" && event.name.startsWith("sent to "))
      run.sent.push({ from: device, to: parseInt(event.name.slice(8), 10), at, args });
    else if (event.ph === "s" || event.ph === "f") {
      const key = `${event.cat}\n${event.name}\n${event.id}`, end = { device, lane, at };
      if (event.ph === "s") begun.set(key, end);
      else if (begun.has(key)) run.arrows.push({ category: event.cat, name: event.name, from: begun.get(key), to: end });
    }
  }
  const end = (span) => (span.category === "ring" ? span.begin : span.end);  // steps stay in their order
  run.spans.sort((a, b) => a.begin - b.begin || end(b) - end(a));
  run.steps = new Map();
  for (const span of run.spans.filter((each) => each.category === "step")) {
    const known = run.steps.get(span.args.step), own = known?.own ?? new Map();
    own.set(span.device, { begin: span.begin, end: span.end });
    run.steps.set(span.args.step, { begin: Math.min(known?.begin ?? span.begin, span.begin),
                                    end: Math.max(known?.end ?? span.end, span.end), own });
  }
  if (run.steps.size === 0)
    run.steps.set(source.median_step, { begin: 0, end: Math.max(1, ...run.spans.map((span) => span.end)), own: new Map() });
  return run;
}
const runs = data.runs.map(readRun);

/** Which step pictures show: null is each run's median one. */
let shownStep = null;
const stepOf = (run) => {
  const number = shownStep !== null && run.steps.has(shownStep) ? shownStep
    : run.steps.has(run.median_step) ? run.median_step : [...run.steps.keys()][0];
  const step = run.steps.get(number), all = [...step.own.values()];
  // Ranks begin and end a step at different times; the devices of one process share it.
  const of = (device) => step.own.get(device) ?? all[0] ?? step;
  return { number, ...step, of, length: all.length ? most(all.map((own) => wholeNs(own.end - own.begin))) : step.end - step.begin };
};
const longestStep = () => most(runs.map((run) => { const step = stepOf(run); return step.end - step.begin; })) || 1;

// Pictures

const widthOf = (section) => Math.max(260, Math.floor(body(section).clientWidth));
const gutterOf = (width) => width < 600 ? 0 : 118;

/** About `count` round numbers from 0 to `end`. */
function ticks(end, count) {
  const rough = end / count, power = 10 ** Math.floor(Math.log10(rough));
  const unit = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({ length: Math.floor(end / unit + 1e-9) + 1 }, (_, index) => index * unit);
}
/** The same for bytes: round in their unit. */
function byteTicks(end, count) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(end / count) / Math.log(1024)));
  return ticks(end / unit, count).map((value) => value * unit);
}
function timeAxis(end, x, top, bottom, count) {
  const step = ticks(end, count);
  return make("g", { class: "axis", "aria-hidden": "true" }, step.map((at, index) => [
    make("line", { x1: x(at), x2: x(at), y1: top, y2: bottom }),
    make("text", { x: x(at) + (index ? 0 : 1), y: top - 4, "text-anchor": index ? "middle" : "start" }, time(at))]));
}

const cursors = [];
/** Shows the same moment in all pictures over time. */
function moveCursor(at) {
  for (const each of cursors) {
    if (!each.line.isConnected) continue;
    each.line.setAttribute("visibility", at === null || at < 0 || at > each.end ? "hidden" : "visible");
    if (at !== null) { each.line.setAttribute("x1", each.x(at)); each.line.setAttribute("x2", each.x(at)); }
  }
}
function cursorIn(svg, x, end, top, bottom, width) {
  const line = make("line", { class: "cursor", y1: top, y2: bottom, x1: 0, x2: 0, visibility: "hidden" });
  svg.append(line);
  cursors.push({ line, x, end });
  const back = (event) => {
    const box = svg.getBoundingClientRect(), place = (event.clientX - box.left) * (width / box.width);
    return (place - x(0)) / (x(end) - x(0)) * end;
  };
  svg.addEventListener("pointermove", (event) => moveCursor(back(event)));
  svg.addEventListener("pointerleave", () => moveCursor(null));
}

/**
 * Arrow keys go from mark to mark; right at the end of a row goes on in the next one. What has the focus, or is under
 * the pointer, is described in `says`.
 */
function walkable(svg, rows, says) {
  rows = rows.filter((row) => row.length > 0);
  const all = rows.flat();
  if (all.length === 0) return;
  const place = new Map();
  rows.forEach((row, y) => row.forEach((mark, x) => place.set(mark, [y, x])));
  all.forEach((mark, index) => mark.setAttribute("tabindex", index ? "-1" : "0"));
  const middle = (mark) => Number(mark.getAttribute("x")) + Number(mark.getAttribute("width")) / 2;
  const show = (mark) => {
    says.textContent = mark.getAttribute("aria-label");
    svg.querySelector(".hovered")?.classList.remove("hovered");
    mark.classList.add("hovered");
  };
  const go = (mark) => {
    svg.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    mark.setAttribute("tabindex", "0");
    mark.focus({ preventScroll: false });
  };
  svg.addEventListener("focusin", (event) => { if (place.has(event.target)) show(event.target); });
  svg.addEventListener("pointerover", (event) => { if (place.has(event.target)) show(event.target); });
  svg.addEventListener("click", (event) => { if (place.has(event.target)) go(event.target); });
  svg.addEventListener("keydown", (event) => {
    if (!place.has(event.target)) return;
    const [y, x] = place.get(event.target), index = all.indexOf(event.target);
    const nearest = (row) => row.reduce((best, mark) =>
      Math.abs(middle(mark) - middle(event.target)) < Math.abs(middle(best) - middle(event.target)) ? mark : best);
    const next = { ArrowRight: () => all[index + 1], ArrowLeft: () => all[index - 1], Home: () => rows[y][0],
      End: () => rows[y].at(-1), ArrowDown: () => rows[y + 1] && nearest(rows[y + 1]),
      ArrowUp: () => rows[y - 1] && nearest(rows[y - 1]) }[event.key];
    if (!next) return;
    event.preventDefault();
    const mark = next();
    if (mark) go(mark);
  });
}

function draw() {
  cursors.length = 0;
  for (const section of [drawTimeline, drawLinks, drawMemory, drawRing, drawGradients, drawFormulas]) section();
}

addEventListener("DOMContentLoaded", () => {
  document.body.prepend(patterns());
  if (data.title) document.getElementById("title").textContent = data.title;
  document.getElementById("runs").textContent = runs.map((run) =>
    `${run.name}: ${run.devices} ${run.metadata.device_kind || ""} device${run.devices > 1 ? "s" : ""}, ` +
    `${run.metadata.steps ?? run.steps.size} steps of ${run.file}`).join(" · ");
  document.getElementById("left_out").textContent = data.left_out || "";
  drawHappened();
  buildTimeline();
  draw();
  let width = document.body.clientWidth, waiting = 0;
  addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  });
  // Closed sections are printed, too.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((each) => { each.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((each) => { each.open = false; }));
});
