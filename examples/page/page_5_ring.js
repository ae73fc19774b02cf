// Section 5: the recorded steps of a collective call, replayed.

const ringState = { call: 0, at: 0, timer: null };

/** Calls whose single steps were recorded, in the median steps first. */
function ringCalls() {
  const calls = new Map();
  for (const run of runs)
    for (const span of run.spans) {
      if (span.category !== "ring") continue;
      const key = `${runs.indexOf(run)} ${span.args.sequence}`;
      if (!calls.has(key)) calls.set(key, { run, sequence: span.args.sequence, steps: [], span: null });
      calls.get(key).steps.push(span);
    }
  for (const run of runs)
    for (const span of run.spans) {
      const call = span.category === "comm" && calls.get(`${runs.indexOf(run)} ${span.args.sequence}`);
      if (call) call.span ??= span;
    }
  const isMedian = (call) => { const step = stepOf(call.run); return call.span.begin >= step.begin && call.span.begin <= step.end; };
  const worth = (call) => (call.span.args.op === "all_reduce" ? 2 : 0) + (isMedian(call) ? 1 : 0);
  // Control traffic, which keeps ranks in order, is not data.
  return [...calls.values()].filter((call) => call.span && call.span.args.traffic !== "control").sort((a, b) => worth(b) - worth(a));
}

/**
 * The states of a call: which ranks' numbers are in each rank's pieces after each step. A step that takes what another
 * one sends comes after it, whatever the clocks say.
 */
function replay(call) {
  const ranks = [...new Set(call.steps.map((step) => step.device))].sort((a, b) => a - b);
  const all = [...new Set(call.steps.map((step) => step.args.offset))].sort((a, b) => a - b);
  const queues = ranks.map((rank) => call.steps.filter((step) => step.device === rank).sort((a, b) => a.begin - b.begin));
  const gathers = call.span.args.op !== "all_reduce" && call.span.args.op !== "reduce_scatter";
  const cells = new Map();
  const key = (rank, offset) => `${rank} ${offset}`;
  ranks.forEach((rank, row) => all.forEach((offset) => {
    const first = queues[row].find((step) => step.args.offset === offset);
    const own = !gathers || (first && first.args.from === undefined);
    cells.set(key(rank, offset), { holds: new Set(own ? [rank] : []), first: own && first && first.args.from === undefined ? first.args.first : undefined });
  }));
  const sent = new Map(), frames = [], copy = () => new Map([...cells].map(([place, cell]) => [place, { ...cell, holds: new Set(cell.holds) }]));
  frames.push({ cells: copy(), text: "Before: each rank has its own numbers.", step: null });
  const channel = (from, to, offset) => `${from} ${to} ${offset}`;
  for (;;) {
    const ready = queues.map((queue) => queue[0]).filter((step) => step && (step.args.from === undefined ||
      (sent.get(channel(step.args.from, step.device, step.args.offset)) || []).length > 0));
    if (ready.length === 0) break;
    const step = ready.reduce((best, each) => each.end < best.end ? each : best), { from, to, offset, first } = step.args;
    queues[ranks.indexOf(step.device)].shift();
    const cell = cells.get(key(step.device, offset));
    if (from !== undefined) {
      const received = sent.get(channel(from, step.device, offset)).shift();
      cell.holds = step.name.includes("add") ? new Set([...cell.holds, ...received]) : new Set(received);
    }
    cell.first = first ?? cell.first;
    if (to !== undefined) {
      const line = channel(step.device, to, offset);
      sent.set(line, [...(sent.get(line) || []), new Set(cell.holds)]);
    }
    const words = [from !== undefined ? `takes piece ${all.indexOf(offset)} from rank ${from}` : null,
      step.name.includes("add") ? "adds its own" : null, step.name.includes("store") ? "keeps the result" : null,
      to !== undefined ? `sends ${from === undefined ? `piece ${all.indexOf(offset)} ` : "it on "}to rank ${to}` : null].filter(Boolean);
    frames.push({ cells: copy(), step, text: `Rank ${step.device} ${words.join(", ")} (${bytes(step.args.bytes)}).` });
  }
  return { ranks, pieces: all, frames, stuck: sum(queues.map((queue) => queue.length)) };
}

function drawRing() {
  const place = body("ring"), calls = ringCalls();
  clearInterval(ringState.timer);
  ringState.timer = null;
  if (calls.length === 0) {
    place.replaceChildren(empty("These traces have no single steps of collective calls. To record them: "),
      make("pre", {}, "train_classifier --policy ddp --devices 3 --all-reduce ring --trace-ring --trace ring.json"));
    return;
  }
  ringState.call = Math.min(ringState.call, calls.length - 1);
  const call = calls[ringState.call], { ranks, pieces, frames, stuck } = replay(call);
  const columns = pieces.length <= 24 ? pieces : pieces.filter((_, index) => index % Math.ceil(pieces.length / 24) === 0);
  const rows = ranks.slice(0, Math.floor(mostMarks.ring / columns.length));
  ringState.at = Math.min(ringState.at, frames.length - 1);
  const full = widthOf("ring"), left = 54, cellWidth = Math.max(58, Math.min(150, (full - left - 2) / columns.length)), tall = 46;
  const width = left + columns.length * cellWidth + 2, height = 24 + rows.length * tall + 2;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "chart ring", role: "group", tabindex: 0,
    "aria-label": "Ring player: left and right go a step back and forth, the space bar plays" });
  columns.forEach((offset, column) => svg.append(make("text", { x: left + (column + 0.5) * cellWidth, y: 15, "text-anchor": "middle",
    class: "lane" }, `${cellWidth > 80 ? "piece " : ""}${pieces.indexOf(offset)}`)));
  const drawn = rows.map((rank, row) => {
    svg.append(make("text", { x: left - 8, y: 24 + (row + 0.5) * tall + 4, "text-anchor": "end", class: "lane" }, `rank ${rank}`));
    return columns.map((offset, column) => {
      const at = left + column * cellWidth, top = 24 + row * tall;
      const mark = titled(make("rect", { x: at, y: top, width: cellWidth - 3, height: tall - 3, rx: 3, class: "piece", role: "img",
        "data-rank": rank, "data-piece": pieces.indexOf(offset) }), "");
      const holds = make("text", { x: at + (cellWidth - 3) / 2, y: top + 18, "text-anchor": "middle", class: "in" });
      const first = make("text", { x: at + (cellWidth - 3) / 2, y: top + 34, "text-anchor": "middle", class: "in faint" });
      svg.append(mark, holds, first);
      return { mark, holds, first, key: `${rank} ${offset}` };
    });
  });
  const says = make("output", { class: "says", "aria-live": "polite" });
  const slider = make("input", { type: "range", min: "0", max: String(frames.length - 1), value: String(ringState.at), "aria-label": "step of the call",
    oninput: () => { stop(); show(Number(slider.value)); } });
  const play = make("button", { type: "button", onclick: () => ringState.timer ? stop() : start() }, "Play");
  const move = (by) => { stop(); show(ringState.at + by); };
  function show(at) {
    ringState.at = Math.max(0, Math.min(frames.length - 1, at));
    const frame = frames[ringState.at];
    slider.value = String(ringState.at);
    says.textContent = `${ringState.at} of ${frames.length - 1}. ${frame.text}`;
    for (const { mark, holds, first, key } of drawn.flat()) {
      const cell = frame.cells.get(key), list = [...cell.holds].sort((a, b) => a - b);
      const complete = list.length === ranks.length;
      const active = frame.step && `${frame.step.device} ${frame.step.args.offset}` === key;
      mark.setAttribute("class", `piece${complete ? " complete" : ""}${active ? " active" : ""}`);
      mark.style.fill = list.length === 0 ? "var(--paper)"
        : `color-mix(in oklab, var(--sum) ${Math.round(12 + 60 * (list.length - 1) / Math.max(1, ranks.length - 1))}%, var(--paper))`;
      holds.textContent = list.length === 0 ? "-" : complete ? cellWidth > 80 ? `all ${list.length} ✓` : "all ✓"
        : list.length > (cellWidth > 90 ? 5 : 3) ? `${list.length} ranks` : list.join(" + ");
      first.textContent = cell.first === undefined ? "" : figures(cell.first, 4);
      const text = `rank ${key.split(" ")[0]}, piece ${mark.dataset.piece}: ${list.length ? `numbers of ranks ${list.join(", ")}` : "nothing yet"}` +
        (cell.first === undefined ? "" : `; the first is ${cell.first}`);
      mark.dataset.holds = list.join(" ");
      mark.dataset.first = cell.first ?? "";
      mark.setAttribute("aria-label", text);
      mark.firstChild.textContent = text;
    }
  }
  function stop() { clearInterval(ringState.timer); ringState.timer = null; play.textContent = "Play"; }
  function start() {
    if (ringState.at === frames.length - 1) show(0);
    play.textContent = "Pause";
    ringState.timer = setInterval(() => {
      if (ringState.at >= frames.length - 1) stop(); else show(ringState.at + 1);
    }, 700);
  }
  svg.addEventListener("keydown", (event) => {
    const act = { ArrowRight: () => move(1), ArrowLeft: () => move(-1), Home: () => move(-frames.length), End: () => move(frames.length),
                  " ": () => play.click() }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const nameOf = ({ run, span }) => `${run.name}: ${span.name}, ${bytes(span.args.bytes)}, call ${span.args.sequence}`;
  place.replaceChildren(
    make("div", { class: "controls" }, choice("Call", calls.map(nameOf), ringState.call, (index) => {
      Object.assign(ringState, { call: index, at: 0 });
      drawRing();
    }), make("span", { class: "buttons" }, make("button", { type: "button", onclick: () => move(-frames.length) }, "First"),
      make("button", { type: "button", onclick: () => move(-1) }, "Back"), play,
      make("button", { type: "button", onclick: () => move(1) }, "Step"), make("button", { type: "button", onclick: () => move(frames.length) }, "Last")),
      slider),
    make("div", { class: "scroll" }, svg), says,
    make("p", { class: "note" }, [`Algorithm ${call.span.args.algorithm || "unknown"}. Steps are in the order of the run; a number appears when a step has touched it.`,
      stuck ? `${stuck} steps are not shown: what they wait for is not in the trace.` : "",
      columns.length < pieces.length ? `${columns.length} of ${pieces.length} pieces are drawn.` : "",
      rows.length < ranks.length ? `${rows.length} of ${ranks.length} ranks are drawn.` : ""].filter(Boolean).join(" ")),
    behind("Steps as a table", table("Steps", [right("step"), "what"], frames.slice(0, 400).map((frame, index) => [right(String(index)), frame.text]))));
  show(ringState.at);
}
