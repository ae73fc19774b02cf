// Section 4: memory over time, and what the peak was made of.

const mostDevices = 16;  // of a run that have a picture

function drawMemory() {
  const place = body("memory"), recorded = orderOfRuns().filter((run) => run.memory.size);
  const peaks = peakTable();
  if (recorded.length === 0) {
    place.replaceChildren(empty("These traces have no memory counters."), ...peaks);
    return;
  }
  const total = (args) => sum(memoryKinds.map((kind) => args[kind] || 0));
  const end = longestStep();
  const shown = recorded.map((run) => ({ run, step: stepOf(run), devices: Math.min(run.drawn, mostDevices) }));
  const samplesOf = (run, step, device) => {
    const all = run.memory.get(device) || [], inside = all.filter((each) => each.at >= step.begin && each.at <= step.end);
    const before = all.filter((each) => each.at < step.begin).at(-1);
    return [...(before ? [{ at: step.begin, args: before.args }] : []), ...inside];
  };
  const largest = most(shown.flatMap(({ run, step, devices }) =>
    Array.from({ length: devices }, (_, device) => most(samplesOf(run, step, device).map((each) => total(each.args)))))) || 1;
  const full = widthOf("memory"), columns = full < 560 ? 1 : full < 1000 ? 2 : Math.min(3, Math.max(2, most(shown.map((each) => each.devices))));
  const width = Math.floor((full - 20 * (columns - 1)) / columns), height = 132, left = 54, bottom = height - 20;
  const x = (at) => left + at / end * (width - left - 6), y = (count) => bottom - count / largest * (bottom - 16);
  const groups = shown.map(({ run, step, devices }) => {
    const figuresOf = Array.from({ length: devices }, (_, device) => {
      const samples = samplesOf(run, step, device);
      const highest = samples.reduce((best, each) => total(each.args) > total(best?.args || {}) ? each : best, null);
      const label = `${run.device(device)}${device === 0 ? " ◆" : ""}`;
      const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img",
        "aria-label": `Memory of ${run.device(device)} of ${run.name} over step ${step.number}: at most ` +
          (highest ? `${bytes(total(highest.args))} after ${time(highest.at - step.begin)}` : "unknown") });
      const scale = byteTicks(largest, 3);
      svg.append(make("g", { class: "axis" }, scale.map((count) => [make("line", { x1: left, x2: width - 6, y1: y(count), y2: y(count) }),
        make("text", { x: left - 5, y: y(count) + 4, "text-anchor": "end" }, bytes(count))]),
        ticks(end, Math.max(2, Math.floor(width / 130))).map((at, index) => make("text", { x: x(at), y: height - 5,
          "text-anchor": index ? "middle" : "start" }, time(at)))));
      const points = thin(samples, step);
      let below = points.map(() => 0);
      for (const kind of memoryKinds) {
        const above = points.map((each, index) => below[index] + (each.args[kind] || 0));
        if (points.length && above.some((value, index) => value > below[index])) {
          const edge = (values) => points.map((each, index) => [x(each.at - step.begin), y(values[index]),
            x((points[index + 1]?.at ?? step.end) - step.begin)]);
          const forth = edge(above).map(([from, at, to]) => `${r(from)},${r(at)}H${r(to)}`).join("L");
          const back = edge(below).reverse().map(([from, at, to]) => `${r(to)},${r(at)}H${r(from)}`).join("L");
          svg.append(titled(make("path", { d: `M${forth}L${back}Z`, style: `fill:url(#kind-${kind})`, class: "area" }),
            `${kind} of ${run.device(device)}: at most ${bytes(most(samples.map((each) => each.args[kind] || 0)))}`));
        }
        below = above;
      }
      if (highest) {
        const at = x(highest.at - step.begin), level = y(total(highest.args));
        svg.append(titled(make("circle", { cx: at, cy: level, r: 3, class: "peak" }), `peak of this step: ${bytes(total(highest.args))}`),
          make("text", { x: Math.min(at, width - 70), y: Math.max(11, level - 6), class: "lane" }, bytes(total(highest.args))));
      } else svg.append(make("text", { x: left + 8, y: 60, class: "lane" }, "no counters in this step"));
      cursorIn(svg, x, end, 12, bottom, width);
      return make("figure", {}, make("figcaption", { class: device === 0 ? "first" : null }, label), svg);
    });
    return [make("h3", {}, `${run.name}, step ${step.number}`), make("div", { class: "multiples", style: `--columns:${columns}` }, figuresOf),
      run.devices > devices ? make("p", { class: "note" }, `The first ${devices} of ${run.devices}; the table has all.`) : null];
  });
  place.replaceChildren(legend([...memoryKinds].map((kind) => [`url(#kind-${kind})`, kind])), ...groups.flat().filter(Boolean), ...peaks);

  /** At most a sample for each two pixels: the largest of those. */
  function thin(samples, step) {
    const kept = new Map();
    for (const each of samples) {
      const pixel = Math.floor(x(each.at - step.begin) / 2), known = kept.get(pixel);
      if (!known || total(each.args) > total(known.args)) kept.set(pixel, each);
    }
    return [...kept.values()].sort((a, b) => a.at - b.at);
  }
}
const r = (value) => Math.round(value * 10) / 10;

function peakTable() {
  const rows = runs.flatMap((run) => (run.facts.peak || []).map((peak, device) => [run.name,
    run.device(device) + (device === 0 ? " ◆" : ""), ...memoryKinds.map((kind) => right(bytes(peak[kind] || 0))),
    right(bytes(sum(Object.values(peak))))]));
  if (rows.length === 0) return [];
  const content = table("What the peak of the recorded steps was made of (◆ device 0)",
    ["run", "device", ...memoryKinds.map(right), right("together")], rows);
  return rows.length > 12 ? [behind("Composition at the peak", content)] : [content];
}
