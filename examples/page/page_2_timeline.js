// Section 2: all runs, one below the other, on one time scale.

const timelineState = { zoom: 1 };
const computing = [lanes.loader, lanes.forward, lanes.backward, lanes.optimizer];
const rowsOfDevice = [
  { name: "computing", of: (span) => computing.includes(span.lane) },
  { name: "communication", of: (span) => span.lane === lanes.communication },
  { name: "gathers", of: (span) => span.lane === lanes.gathers },
  { name: "waiting", of: (span) => span.lane === lanes.wait },
];
/** Gathers have a row where a run has any. */
const rowsOf = (run) => run.spans.some((span) => span.lane === lanes.gathers) ? rowsOfDevice
  : rowsOfDevice.filter((row) => row.name !== "gathers");
const rowOfLane = (rows, lane) => Math.max(0, rows.findIndex((row) => row.of({ lane })));

/** Data parallelism's copies above the all-reduce that hides them, for comparing; else the order of the files. */
const orderOfRuns = () => {
  const rank = (run) => ["single", "dp"].indexOf(run.metadata.policy);
  return [...runs].sort((a, b) => (rank(a) < 0 ? 2 : rank(a)) - (rank(b) < 0 ? 2 : rank(b)));
};

function describe(run, span, more = "") {
  const facts = [`${span.name}, ${run.device(span.device)} of ${run.name}`, time(span.end - span.begin)];
  if (span.whole && span.end - span.begin < span.whole.end - span.whole.begin)
    facts[1] += ` of ${time(span.whole.end - span.whole.begin)}, the rest of which it waits`;
  if (span.args.bytes) facts.push(bytes(span.args.bytes));
  if (span.args.traffic) facts.push(span.args.traffic);
  if (span.args.algorithm) facts.push(`algorithm ${span.args.algorithm}`);
  if (span.category === "bubble") facts.push("another stage makes what this one needs");
  else if (span.lane === lanes.wait) facts.push("exposed: this thread had nothing else to do");
  return facts.join(", ") + more;
}

/** The parts of [begin, end] that are not in `taken`, which are in order of their begin. */
function gapsOf(begin, end, taken) {
  const gaps = [];
  for (const each of taken) {
    if (each.end <= begin || each.begin >= end) continue;
    if (each.begin > begin) gaps.push([begin, each.begin]);
    begin = Math.max(begin, each.end);
  }
  return begin < end ? [...gaps, [begin, end]] : gaps;
}

const passLanes = [lanes.forward, lanes.backward, lanes.optimizer];
const ofMicroBatch = (span) => /^(forward|backward|weight) of micro-batch (\d+)/.exec(span.name);

/**
 * A device's spans of a step as they are drawn. Passes are cut where they wait, and those that hold others are frames
 * around them; a micro-batch is drawn whole. Under DataParallel a device waits whenever it neither computes nor loads.
 */
function spansOfStep(run, device, own) {
  const mine = run.spans.filter((span) => span.device === device && span.end > own.begin && span.begin < own.end);
  const waits = mine.filter((span) => span.lane === lanes.wait), out = [], computed = [];
  const frame = new Map();
  mine.forEach((span, index) => {
    if (!passLanes.includes(span.lane)) return;
    const next = mine.slice(index + 1).find((other) => other.lane === span.lane);
    frame.set(span, next !== undefined && next.begin < span.end && next.end > next.begin && !ofMicroBatch(span));
  });
  const wholes = mine.filter(ofMicroBatch);
  for (const span of mine) {
    if (!frame.has(span)) { out.push(span); continue; }
    if (frame.get(span)) { out.push({ ...span, frame: true }); continue; }
    if (!ofMicroBatch(span) && wholes.some((whole) => whole.begin <= span.begin && span.end <= whole.end)) continue;
    computed.push(span);
    for (const [begin, end] of gapsOf(span.begin, span.end, waits)) out.push({ ...span, begin, end, whole: span });
  }
  if (run.metadata.policy === "dp") {
    const busy = [...computed, ...mine.filter((span) => span.lane === lanes.loader)].sort((a, b) => a.begin - b.begin);
    for (const [begin, end] of gapsOf(own.begin, own.end, busy))
      out.push({ device, lane: lanes.wait, begin, end, category: "wait", name: "neither computes nor loads", args: {} });
  }
  return out.sort((a, b) => a.begin - b.begin || b.end - a.end);
}

function fillOf(span) {
  if (span.frame) return "none";
  if (ofMicroBatch(span)?.[1] === "weight") return "var(--weight)";
  if (span.category === "bubble") return "url(#bubble)";
  if (span.lane === lanes.wait) return "url(#waiting)";
  if (span.category === "comm" || span.category === "ring") {
    if (span.args.traffic === "control") return "var(--control)";
    return bucketColour(span.args.bucket ?? span.args.unit);
  }
  if (span.category === "copy") return "var(--plain)";
  return `var(--${span.category})`;
}

function buildTimeline() {
  const numbers = [...new Set(runs.flatMap((run) => [...run.steps.keys()]))].sort((a, b) => a - b);
  const label = make("output", {}, "the median one of each run");
  const slider = make("input", { type: "range", min: "0", max: String(numbers.length), value: "0", step: "1",
    "aria-label": "step", oninput: () => {
      shownStep = Number(slider.value) ? numbers[Number(slider.value) - 1] : null;
      label.textContent = shownStep === null ? "the median one of each run" : `number ${shownStep}`;
      slider.setAttribute("aria-valuetext", label.textContent);
      cursors.length = 0;
      drawTimeline(); drawMemory(); drawGradients();
    } });
  slider.setAttribute("aria-valuetext", label.textContent);
  const zoom = choice("Zoom", ["1 ×", "2 ×", "4 ×", "8 ×", "16 ×"], 0, (index) => {
    timelineState.zoom = 2 ** index;
    cursors.length = 0;
    drawTimeline(); drawMemory();
  });
  body("timeline").append(make("div", { class: "controls" },
    make("label", { class: "control" }, "Step ", slider, " ", label), zoom),
    make("div", { class: "picture" }));
}

function drawTimeline() {
  const place = document.querySelector("#timeline .picture");
  const width = widthOf("timeline") * timelineState.zoom, gutter = gutterOf(widthOf("timeline"));
  const end = longestStep(), x = (at) => gutter + at / end * (width - gutter - 8);
  const says = make("output", { class: "says", "aria-live": "polite" },
    "Point at a span, or go from one to the next with the arrow keys.");
  const svg = make("svg", { width, role: "group", "aria-label": "Timeline of all runs", class: "chart" });
  const marks = make("g"), labels = make("g", { "aria-hidden": "true" }), rows = [], over = make("g"), listed = [];
  let y = 20, budget = mostMarks.timeline, dropped = 0;
  const widest = most(runs.map((run) => run.drawn));
  const [computes, moves, waits] = widest > 16 ? [9, 6, 5] : widest > 4 ? [15, 11, 8] : [22, 18, 12];
  const heightOf = (row) => row.name === "computing" ? computes : row.name === "waiting" ? waits : moves;
  const buckets = new Set(), units = new Set();
  let bubbles = false;
  for (const run of orderOfRuns()) {
    const step = stepOf(run);
    marks.append(make("text", { x: 1, y: y + 16, class: "run" },
      `${run.name}, step ${step.number}: ${time(step.length)}` +
        (step.end - step.begin > 1.02 * step.length ? ` on the slowest ${run.ofRanks ? "rank" : "device"}, ` +
          `${time(step.end - step.begin)} from the first begin to the last end` : "") +
        (run.drawn < run.devices ? `, the first ${run.drawn} of ${run.devices}` : "")));
    y += 24;
    const top = [], kinds = rowsOf(run);
    for (let device = 0; device < run.drawn; ++device) {
      const small = widest > 16;
      if (!gutter && !small) {
        marks.append(make("text", { x: 1, y: y + 11, class: "lane" }, run.device(device)));
        y += 15;
      }
      top.push([]);
      const own = step.of(device), drawn = spansOfStep(run, device, own);
      kinds.forEach((kind, number) => {
        const height = heightOf(kind);
        top[device].push(y);
        if (gutter && (!small || number === 0))
          marks.append(make("text", { x: gutter - 8, y: y + height / 2 + 4, "text-anchor": "end", class: "lane" },
            number === 0 ? run.device(device) + (small ? "" : " computes") : kind.name));
        marks.append(make("rect", { x: x(own.begin - step.begin), y, width: x(own.end - step.begin) - x(own.begin - step.begin), height, class: "row" }));
        rows.push(drawRow(run, drawn.filter(kind.of), step, own, y, height));
        y += height + (small ? 1 : 2);
      });
      for (const event of run.instants) {
        if (event.device !== device || !["bucket", "fault"].includes(event.category) || event.at < step.begin || event.at > step.end) continue;
        if (budget <= 0 || small) { ++dropped; continue; }
        --budget;
        const at = x(event.at - step.begin);
        if (event.category === "fault") {
          over.append(titled(make("path", { d: `M${at - 5},${top[device][0] - 1}l10,10m0,-10l-10,10`, class: "fault" }),
            `fault: ${event.name}, ${run.device(device)}`));
          continue;
        }
        over.append(titled(make("path", { d: `M${at - 4},${top[device][0] - 2}h8l-4,6z`, class: "full",
          style: `fill:${bucketColour(event.args.bucket)}` }),
          `bucket ${event.args.bucket} is full: ${bytes(event.args.bytes)}, ${run.device(device)}`));
      }
      y += small ? 3 : 9;
    }
    for (const arrow of run.arrows) {
      if (arrow.category === "ring" || arrow.to.at < step.begin || arrow.from.at > step.end) continue;
      const start = top[arrow.from.device]?.[rowOfLane(kinds, arrow.from.lane)];
      const stop = top[arrow.to.device]?.[rowOfLane(kinds, arrow.to.lane)];
      if (start === undefined || stop === undefined || arrow.from.device === arrow.to.device) continue;
      if (budget <= 0 || widest > 16) { ++dropped; continue; }
      --budget;
      const rowHeight = (lane) => heightOf(kinds[rowOfLane(kinds, lane)]);
      const x1 = x(Math.max(0, arrow.from.at - step.begin)), x2 = x(Math.min(end, arrow.to.at - step.begin));
      const y1 = start + rowHeight(arrow.from.lane) / 2, y2 = stop + rowHeight(arrow.to.lane) / 2;
      const bend = Math.min(28, Math.abs(x2 - x1) / 2 + 6);
      const text = arrow.category === "late"
        ? `${run.device(arrow.to.device)} waited for ${run.device(arrow.from.device)}, which came last`
        : `${arrow.name}: ${run.device(arrow.from.device)} to ${run.device(arrow.to.device)}`;
      over.append(titled(make("path", { d: `M${x1},${y1}C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`,
        class: `arrow ${arrow.category}`, "marker-end": "url(#arrow)" }), text));
    }
    y += 10;
  }

  /** Spans of one row; those of less than a pixel go into the one that they lie in, or are drawn as one. */
  function drawRow(run, spans, step, own, rowY, height) {
    const row = [], open = [];
    let small = null;
    const put = (mark) => { row.push(mark); marks.append(mark); --budget; };
    for (const span of spans) {
      while (open.length && open.at(-1).span.end <= span.begin) open.pop();
      const left = x(Math.max(own.begin, span.begin) - step.begin), right = x(Math.min(own.end, span.end) - step.begin);
      if (span.args.bucket >= 0 && span.category === "comm") buckets.add(span.args.bucket);
      if (span.args.unit >= 0 && span.category === "comm") units.add(span.args.unit);
      bubbles ||= span.category === "bubble";
      if (right - left < 1 || budget <= 0) {
        if (open.length) { open.at(-1).inside += 1; relabel(open.at(-1)); continue; }
        if (small && left - small.right < 1) {
          small.right = right; small.inside += 1; small.spans.push(span);
          small.mark.setAttribute("width", Math.max(1, Math.round((right - small.left) * 100) / 100));
          relabel(small);
          continue;
        }
      }
      const depth = Math.min(2, open.length), inset = depth * Math.min(4, height / 5);
      const mark = make("rect", { x: left, y: rowY + inset, width: Math.max(1, right - left),
        height: Math.max(2, height - 2 * inset), rx: right - left > 6 ? 1.5 : 0, class: `span ${span.category}${span.frame ? " frame" : ""}`,
        style: `fill:${span.category === "ring" && open.length ? fillOf(open.at(-1).span) : fillOf(span)}`, role: "img" });
      const entry = { span, mark, inside: 0, left, right, spans: [span], run };
      mark.append(make("title"));
      relabel(entry);
      put(mark);
      if (right - left < 1) small = entry;
      else { open.push(entry); small = null; }
      listed.push(entry);
      const part = ofMicroBatch(span), numbered = part && `${part[1][0].toUpperCase()}${part[2]}`;
      if (span.frame || span.whole && span.begin > span.whole.begin) continue;
      const label = numbered ? (right - left > numbered.length * 6.4 + 1 ? numbered : part[2])
        : span.category !== "comm" ? span.name : span.args.bucket >= 0 ? `b${span.args.bucket}`
        : span.args.unit >= 0 ? `u${span.args.unit}` : span.name;
      const child = spans.find((other) => other !== span && other.category !== "ring" && other.begin >= span.begin &&
        other.end <= span.end && x(other.end - step.begin) - x(other.begin - step.begin) >= 1);
      const room = (child ? Math.max(left, x(child.begin - step.begin)) : right) - left;
      if (height >= 9 && room > label.length * 6.4 + (part ? 1 : 6) && span.lane !== lanes.wait && span.category !== "ring")
        labels.append(make("text", { x: left + 4 + (depth ? 2 : 0), y: rowY + height / 2 + 3.7, class: "in" }, label));
    }
    return row;
  }
  function relabel(entry) {
    const { span, inside, spans, run } = entry;
    const text = spans.length > 1
      ? `${spans.length} short spans from ${span.name} to ${spans.at(-1).name}, ${run.device(span.device)} of ${run.name}, ` +
        `together ${time(sum(spans.map((each) => each.end - each.begin)))}`
      : describe(run, span, inside ? `; ${inside} shorter than a pixel inside` : "");
    entry.mark.setAttribute("aria-label", text);
    entry.mark.firstChild.textContent = text;
  }

  svg.setAttribute("height", y);
  svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
  svg.append(timeAxis(end, x, 18, y - 8, Math.max(2, Math.floor((width - gutter) / 110))), marks, labels, over);
  cursorIn(svg, x, end, 18, y - 8, width);
  walkable(svg, rows, says);
  const key = [["var(--forward)", "forward"], ["var(--backward)", "backward"], ...(runs.some((run) => run.spans.some((span) => span.name.startsWith("weight of"))) ? [["var(--weight)", "backward by weights (W)"]] : []), ["var(--optimizer_step)", "optimizer"],
    ["var(--loader)", "loader"], ["var(--plain)", "copy or message"], ["var(--control)", "control"],
    ...[...buckets].sort((a, b) => a - b).slice(0, 8).map((bucket) => [bucketColour(bucket), `bucket ${bucket} (b${bucket})`]),
    ...[...units].sort((a, b) => a - b).slice(0, 8).map((unit) => [bucketColour(unit), `unit ${unit} (u${unit})`]),
    ["url(#waiting)", "waiting"], ...(bubbles ? [["url(#bubble)", "bubble"]] : []), [null, "waited for the last one", "arrow late"], [null, "copy", "arrow copy"]];
  const timeRows = listed.slice(0, 400).map(({ span, run }) => [run.name, run.device(span.device), span.name,
    right(time(span.begin - stepOf(run).begin)), right(time(span.end - span.begin)), right(span.args.bytes ? bytes(span.args.bytes) : "")]);
  place.replaceChildren(legend(key), make("div", { class: "scroll" }, svg), says,
    ...(dropped ? [make("p", { class: "note" }, `${dropped} arrows and bucket marks are left out: too many for one picture.`)] : []),
    behind(`Spans as a table${listed.length > 400 ? `, the first 400 of ${listed.length}` : ""}`,
      table("Spans", ["run", "device", "span", right("begins"), right("takes"), right("bytes")], timeRows)));
}
