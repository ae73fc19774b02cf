// Section 7: the ring's formulas with a run's numbers.

const formulasState = { run: null, values: null };

/** All-reduces of data that went round a ring: their bytes, and how long they took from the last rank's arrival on. */
function measuredCalls(run) {
  const calls = new Map();
  for (const span of run.spans) {
    if (span.category !== "comm" || span.args.op !== "all_reduce" || !span.args.bytes || span.args.group) continue;
    if (span.args.traffic === "control" || span.args.algorithm !== "ring") continue;
    const known = calls.get(span.args.sequence) || { bytes: span.args.bytes, us: Infinity, ranks: 0, name: span.name };
    calls.set(span.args.sequence, { ...known, us: Math.min(known.us, span.end - span.begin), ranks: known.ranks + 1 });
  }
  return [...calls.values()].filter((call) => call.ranks === run.drawn && call.us > 0);
}

/** What a policy sends by its formulas, in words, and beside it what the busiest rank has sent. */
const formulasOf = {
  ddp: "Averaging gradients by rings: each rank sends 2(N−1)/N · K.",
  local_sgd: "Averaging parameters by rings: each rank sends 2(N−1)/N · K every so many steps.",
  fsdp: "A rank keeps K/N. Gathering parameters, for forward and for backward, sends (N−1)/N · K each time, and taking gradients apart (N−1)/N · K: 3(N−1)/N · K in all, 1.5 times what averaging alone would send. Who keeps parameters from forward to backward, and the unit that is still there, gather once.",
  tp: "Each layer ends two sums in forward and two in backward, of A bytes of activations: with L layers a rank sends 4L · 2(N−1)/N · A.",
  tensor_parallel: "Each layer ends two sums in forward and two in backward, of A bytes of activations: with L layers a rank sends 4L · 2(N−1)/N · A.",
  pp: "Each of m micro-batches sends its activations, a bytes, over each border between stages, and as much comes back: m · a each way. A rank of p idles (p−1)/(m+p−1) of a step.",
  dp: "Device 0 sends K to each other device and gets K from each: 2(N−1) · K through its link.",
  parameter_server: "The server sends K to each worker and gets K from each: 2(N−1) · K through its link.",
};
formulasOf.pipeline = formulasOf.pp;

function policyFormulas(run) {
  const kinds = [...new Set((run.facts.links || []).map((link) => link.kind))].filter((kind) => kind !== "control");
  const rows = kinds.map((kind) => {
    const by = new Map();
    for (const link of run.facts.links) if (link.kind === kind) by.set(link.from, [...(by.get(link.from) || []), link]);
    const total = (links) => sum(links.map((link) => link.bytes));
    const links = [...by.values()].reduce((best, each) => total(each) > total(best) ? each : best);
    const known = links.every((link) => link.formula !== null);
    return [kind, run.device(links[0].from), [...new Set(links.map((link) => link.rule).filter(Boolean))].join(", ") || "-",
      right(known ? bytes(sum(links.map((link) => link.formula))) : "-"), right(bytes(total(links)))];
  });
  const said = (run.sentences || []).filter((each) => each.section === "formulas").map((each) => make("p", {}, each.text));
  const words = formulasOf[run.metadata.policy];
  return [words ? make("p", {}, words) : null, ...said,
    rows.length ? table(`What ${run.name} sends in a step, the busiest ${run.ofRanks ? "rank" : "device"} of each kind`,
      ["kind", "from", "by", right("formula"), right("measured")], rows) : null].filter(Boolean);
}

function drawFormulas() {
  const place = body("formulas"), parallel = runs.filter((run) => run.devices > 1);
  if (parallel.length === 0) {
    place.replaceChildren(empty("One device sends nothing. With a run of --policy ddp this section compares formula and measurement."));
    return;
  }
  if (!parallel.includes(formulasState.run)) {
    formulasState.run = parallel.find((run) => run.facts.link_fit) || parallel[0];
    formulasState.values = null;
  }
  const run = formulasState.run, calls = measuredCalls(run), fit = run.facts.link_fit;
  const chosen = choice("Run", parallel.map((each) => each.name), parallel.indexOf(run), (index) => {
    Object.assign(formulasState, { run: parallel[index], values: null });
    drawFormulas();
  });
  if (!fit) {
    const ran = [...new Set(run.spans.filter((span) => span.category === "comm" && span.args.op === "all_reduce" &&
      span.args.traffic !== "control").map((span) => span.args.algorithm))].filter(Boolean);
    place.replaceChildren(make("div", { class: "controls" }, chosen), ...policyFormulas(run),
      make("p", { class: "note" }, ran.length ? `This run's all-reduces went by ${ran.join(", ")}, not round a ring alone: what a ring would take it does not tell.`
        : "This run makes no all-reduces of data: there is no ring to be priced."));
    return;
  }
  const values = formulasState.values ??= { N: run.devices, K: run.facts.gradient_bytes || most(calls.map((call) => call.bytes)) || 1e6,
    alpha: Math.max(fit.alpha_us, 0.001), bandwidth: fit.bandwidth };
  const ringTime = (N, K) => 2 * (N - 1) * (values.alpha + K / (N * values.bandwidth));
  const sentByRank = (N, K) => 2 * (N - 1) / N * K;
  const text = make("div", { class: "formulas" }), pictures = make("div", { class: "multiples", style: "--columns:2" });
  const figure = (title, svg) => make("figure", {}, make("figcaption", {}, title), svg);

  function update() {
    const { N, K, alpha, bandwidth } = values, t = alpha + K / (N * bandwidth);
    const line = (name, formula, filled, result) => make("div", {}, make("dt", {}, name), make("dd", {},
      make("span", { class: "formula" }, formula), make("span", { class: "filled" }, filled), make("strong", {}, result)));
    text.replaceChildren(make("dl", {},
      line("Bytes that each rank sends", "2(N−1)/N · K", ` = 2 · ${N - 1}/${N} · ${bytes(K)} = `, bytes(sentByRank(N, K))),
      line("Time of one piece", "t = α + K/(N·B)", ` = ${time(alpha)} + ${bytes(K)}/(${N} · ${bytes(bandwidth * 1e6)}/s) = `, time(t)),
      line("Time of the ring", "T = 2(N−1) · t", ` = 2 · ${N - 1} · ${time(t)} = `, time(ringTime(N, K)))));
    const width = Math.min(560, widthOf("formulas") < 700 ? widthOf("formulas") : Math.floor((widthOf("formulas") - 20) / 2));
    const averages = (each) => ["ddp", "local_sgd"].includes(each.metadata.policy) && each.facts.gradient_bytes === run.facts.gradient_bytes;
    const perRank = parallel.filter(averages).map((each) => {
      const sent = Array.from({ length: each.devices }, () => 0);
      for (const link of each.facts.links || []) if (link.kind === "gradients") sent[link.from] += link.bytes;
      return { x: each.devices, y: most(sent), name: `${each.name}: ${bytes(most(sent))} of gradients by the busiest of ${each.devices}` };
    }).filter((point) => point.y > 0);
    const most_N = Math.max(16, N, ...parallel.map((each) => each.devices));
    const counts = Array.from({ length: 48 }, (_, index) => 2 + (most_N - 2) * index / 47);
    const sizes = [...calls.map((call) => call.bytes), K], low = Math.min(...sizes) / 8, high = most(sizes) * 8;
    const steps = Array.from({ length: 60 }, (_, index) => low * (high / low) ** (index / 59));
    pictures.replaceChildren(
      figure(`Time of an all-reduce over its bytes, N = ${N}`, curve({ width, log: true, points: steps.map((size) => [size, ringTime(N, size)]),
        dots: N === run.devices ? calls.map((call) => ({ x: call.bytes, y: call.us, name: `${call.name}: ${bytes(call.bytes)} in ${time(call.us)}` })) : [],
        here: [K, ringTime(N, K)], xText: bytes, yText: time })),
      figure(`Bytes that a rank sends over N, K = ${bytes(K)}`, curve({ width, log: false, points: counts.map((count) => [count, sentByRank(count, K)]),
        dots: perRank, here: [N, sentByRank(N, K)], xText: (count) => String(Math.round(count)), yText: bytes })));
  }
  const slider = (label, min, max, value, show, set, log) => {
    const output = make("output", {}, show(value)), of = (at) => log ? min * (max / min) ** (at / 1000) : at;
    const input = make("input", { type: "range", min: log ? "0" : String(min), max: log ? "1000" : String(max), step: "1",
      value: String(log ? Math.round(1000 * Math.log(Math.min(max, Math.max(min, value)) / min) / Math.log(max / min)) : value), "aria-label": label,
      oninput: () => { set(of(Number(input.value))); output.textContent = show(of(Number(input.value))); update(); } });
    return make("label", { class: "control slide" }, make("span", {}, label), input, output);
  };
  update();
  place.replaceChildren(
    make("div", { class: "controls" }, chosen, make("button", { type: "button", onclick: () => { formulasState.values = null; drawFormulas(); } }, "As measured")),
    make("div", { class: "controls" },
      slider("N, ranks", 2, Math.max(64, run.devices), values.N, (value) => String(value), (value) => { values.N = value; }, false),
      slider("K, bytes", 1e3, 1e10, values.K, bytes, (value) => { values.K = value; }, true),
      slider("α, a message", 0.001, 1e4, values.alpha, time, (value) => { values.alpha = value; }, true),
      slider("B, a link's bandwidth", 1, 1e6, values.bandwidth, (value) => `${bytes(value * 1e6)}/s`, (value) => { values.bandwidth = value; }, true)),
    ...policyFormulas(run), text, make("p", { class: "note" }, `α and B are fitted to ${fit.calls} calls of this run: α to its small all-gathers, B to the rest of what its all-reduces take. Dots: all-reduces of ${run.name}, from the last rank's arrival to the end` +
      (calls.length ? "" : "; this run has none") + `.`),
    pictures,
    behind("Calls as a table", calls.length ? table("All-reduces", ["call", right("bytes"), right("measured"), right("formula")],
      calls.slice(0, 200).map((call) => [call.name, right(bytes(call.bytes)), right(time(call.us)), right(time(ringTime(values.N, call.bytes)))])) : empty("None.")));
}

function curve({ width, log, points, dots, here, xText, yText }) {
  const height = 230, left = 62, bottom = height - 24, scale = log ? Math.log10 : (value) => value;
  const xs = points.map((each) => scale(each[0])), values = [...points.map((each) => each[1]), ...dots.map((each) => each.y)].filter((each) => each > 0);
  const low = log ? Math.log10(Math.min(...values)) : 0, high = scale(most(values)) + (log ? 0.1 : most(values) * 0.06);
  const x = (value) => left + (scale(value) - xs[0]) / (xs.at(-1) - xs[0]) * (width - left - 14);
  const y = (value) => bottom - (scale(value) - low) / (high - low || 1) * (bottom - 12);
  const powers = (from, to, base) => {
    const first = Math.ceil(from / Math.log10(base)), last = Math.floor(to / Math.log10(base));
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => base ** (first + index));
  };
  const thinned = (list, count) => list.filter((_, index) => index % Math.ceil(list.length / count) === 0);
  const xTicks = log ? thinned(powers(xs[0], xs.at(-1), 4), 5) : ticks(xs.at(-1), 6).filter((value) => value >= xs[0]);
  const yTicks = log ? thinned(powers(low, high, 10), 5) : byteTicks(high, 4);
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img",
    "aria-label": `Curve from ${xText(points[0][0])}: ${yText(points[0][1])} to ${xText(points.at(-1)[0])}: ${yText(points.at(-1)[1])}, and ${dots.length} measured dots` });
  svg.append(make("g", { class: "axis" },
    yTicks.map((value) => [make("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value) }), make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, yText(value))]),
    xTicks.map((value) => make("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, xText(value)))),
    titled(make("path", { d: `M${points.map(([a, b]) => `${r(x(a))},${r(y(b))}`).join("L")}`, class: "curve" }), "formula"),
    ...dots.slice(0, 120).map((dot) => titled(make("circle", { cx: x(dot.x), cy: y(dot.y), r: 4, class: "dot" }), `measured, ${dot.name}`)));
  if (scale(here[0]) >= xs[0] && scale(here[0]) <= xs.at(-1))
    svg.append(titled(make("path", { d: `M${r(x(here[0]))},${r(y(here[1]) - 6)}l6,6l-6,6l-6,-6z`, class: "here" }), `formula: ${xText(here[0])}, ${yText(here[1])}`));
  return svg;
}
