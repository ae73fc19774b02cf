// Section 6: each gradient from ready to used.

const gradientsState = { run: null, device: 0 };

function drawGradients() {
  const place = body("gradients"), recorded = runs.filter((run) => run.instants.some((event) => event.category === "gradient"));
  if (recorded.length === 0) {
    place.replaceChildren(empty("No run here says when each gradient was ready. DistributedDataParallel does: --policy ddp."));
    return;
  }
  if (!recorded.includes(gradientsState.run)) {
    const buckets = (each) => new Set(each.instants.map((event) => event.args.bucket)).size;
    gradientsState.run = recorded.reduce((best, each) => buckets(each) > buckets(best) ? each : best);
  }
  const run = gradientsState.run, step = stepOf(run), device = Math.min(gradientsState.device, run.drawn - 1);
  const mine = (event) => event.device === device && (event.at ?? event.begin) >= step.begin && (event.at ?? event.begin) <= step.end;
  const ready = run.instants.filter((event) => event.category === "gradient" && mine(event)).sort((a, b) => a.at - b.at);
  const fullAt = new Map(run.instants.filter((event) => event.category === "bucket" && mine(event)).map((event) => [event.args.bucket, event]));
  const calls = new Map(run.spans.filter((span) => span.category === "comm" && span.args.bucket >= 0 && mine(span)).map((span) => [span.args.bucket, span]));
  const optimizer = run.spans.filter((span) => span.lane === lanes.optimizer && mine(span)).at(-1);
  const controls = make("div", { class: "controls" },
    choice("Run", recorded.map((each) => each.name), recorded.indexOf(run), (index) => { Object.assign(gradientsState, { run: recorded[index], device: 0 }); drawGradients(); }),
    choice(run.ofRanks ? "Rank" : "Device", Array.from({ length: run.drawn }, (_, index) => String(index)), device,
      (index) => { gradientsState.device = index; drawGradients(); }));
  if (ready.length === 0) {
    place.replaceChildren(controls, empty("No gradients are recorded for this step and device; the median step of the first ranks has them."));
    return;
  }
  const byBucket = ready.length > 40;
  const groups = byBucket ? [...new Set(ready.map((event) => event.args.bucket))].map((bucket) => {
    const of = ready.filter((event) => event.args.bucket === bucket);
    return { bucket, events: of, name: `bucket ${bucket}, ${of.length} gradient${of.length > 1 ? "s" : ""}` };
  }) : ready.map((event) => ({ bucket: event.args.bucket, events: [event], name: event.args.parameter || event.name }));
  const whole = Math.min(groups.length, Math.floor(mostMarks.gradients / 6));
  const width = widthOf("gradients"), gutter = width < 600 ? 0 : 230, tall = gutter ? 20 : 34;
  const begin = ready[0].at, until = Math.max(optimizer?.end ?? 0, ...[...calls.values()].map((span) => span.end), ready.at(-1).at);
  const end = until - begin || 1, lead = end * 0.02;
  const x = (at) => gutter + 6 + (at + lead) / (end + lead) * (width - gutter - 18);
  const height = 24 + whole * tall + 8;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "chart", role: "group", "aria-label": `Gradients of ${run.device(device)} of ${run.name}` });
  svg.append(timeAxis(end, x, 20, height - 4, Math.max(2, Math.floor((width - gutter) / 120))));
  const says = make("output", { class: "says", "aria-live": "polite" }, "Point at a gradient, or use the arrow keys.");
  const table_rows = [];
  const rows = groups.slice(0, whole).map(({ bucket, events, name }, index) => {
    const top = 24 + index * tall, middle = top + (gutter ? 10 : 24), full = fullAt.get(bucket), call = calls.get(bucket);
    const first = events[0].at - begin, last = events.at(-1).at - begin, colour = bucketColour(bucket);
    const at = (moment) => moment === undefined || moment === null ? "-" : time(Math.max(0, moment - begin));
    const text = `${name} (${byBucket ? "" : `bucket ${bucket}, `}${bytes(sum(events.map((event) => event.args.bytes || 0)))}): ready ${byBucket ? `${time(first)} to ` : ""}${time(last)}, ` +
      `bucket full ${at(full?.at)}, launched ${at(call?.begin)}, averaged ${at(call?.end)}, used ${at(optimizer?.begin)}`;
    table_rows.push([name, right(String(bucket)), right(time(last)), right(at(full?.at)), right(at(call?.begin)), right(at(call?.end)), right(at(optimizer?.begin))]);
    const short = name.length > 36 ? `…${name.slice(-35)}` : name;
    svg.append(make("text", { x: gutter ? gutter - 6 : 1, y: gutter ? middle + 4 : top + 13, "text-anchor": gutter ? "end" : "start", class: "lane" }, short));
    const hit = titled(make("rect", { x: x(first) - 5, y: middle - 8, width: Math.max(12, x(until - begin) - x(first) + 8), height: 16, class: "hit", role: "img", "aria-label": text }), text);
    svg.append(make("line", { x1: x(last), x2: x(full ? full.at - begin : last), y1: middle, y2: middle, class: "held" }));
    if (call) {
      svg.append(make("rect", { x: x(call.begin - begin), y: middle - 5, width: Math.max(1.5, x(call.end - begin) - x(call.begin - begin)), height: 10, rx: 2, class: "call", style: `fill:${colour}` }));
      if (x(call.end - begin) - x(call.begin - begin) > 26) svg.append(make("text", { x: x(call.begin - begin) + 4, y: middle + 3.6, class: "in", "aria-hidden": "true" }, `b${bucket}`));
    }
    if (byBucket) svg.append(make("line", { x1: x(first), x2: x(last), y1: middle, y2: middle, class: "readying", style: `stroke:${colour}` }));
    svg.append(make("circle", { cx: x(last), cy: middle, r: 3.5, class: "ready", style: `fill:${colour}` }));
    if (full) svg.append(make("path", { d: `M${r(x(full.at - begin) - 4)},${middle - 5}h8l-4,7z`, class: "full", style: `fill:${colour}` }));
    if (optimizer) svg.append(make("path", { d: `M${r(x(optimizer.begin - begin))},${middle - 5}v10`, class: "stepped" }));
    svg.append(hit);
    return [hit];
  });
  walkable(svg, rows, says);
  place.replaceChildren(controls,
    make("p", { class: "note" }, `Step ${step.number}, times from the first gradient on. ● ready, ▼ bucket full, bar: from launched to averaged, │ optimizer.` +
      (byBucket ? " A row is a bucket, for there are many gradients: its line goes from the first one to the last." : "") +
      (whole < groups.length ? ` ${whole} of ${groups.length} rows are drawn.` : "")),
    make("div", { class: "scroll" }, svg), says,
    behind("Gradients as a table", table("Times from the first gradient on", ["gradient", ...["bucket", "ready", "full", "launched", "averaged", "used"].map(right)], table_rows)));
}
