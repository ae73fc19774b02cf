// Section 3: bytes of each link, next to the formula's.

const linksState = { run: null, from: null, to: null };

function drawLinks() {
  const place = body("links"), withLinks = runs.filter((run) => run.facts.links?.length);
  if (withLinks.length === 0) {
    place.replaceChildren(empty("Nothing was sent: these runs have one device, or left out what went over their links."));
    return;
  }
  linksState.run ??= withLinks.at(-1);
  const run = linksState.run, links = run.facts.links;
  const known = 1 + most(links.flatMap((link) => [link.from, link.to]));
  const size = Math.max(known, Math.min(run.drawn, 64));
  const block = Math.ceil(size / 16), count = Math.ceil(size / block);
  const nameOf = (index) => block === 1 ? String(index)
    : `${index * block}-${Math.min(size, (index + 1) * block) - 1}`;
  const cells = Array.from({ length: count }, () => Array.from({ length: count }, () => ({ data: 0, control: 0 })));
  for (const link of links)
    cells[Math.floor(link.from / block)][Math.floor(link.to / block)][link.kind === "control" ? "control" : "data"] += link.bytes;
  const largest = most(cells.flat().map((cell) => cell.data)) || 1;
  const narrow = widthOf("links") < 600;
  const left = block > 1 ? 62 : 54;
  const side = Math.max(20, Math.min(84, ((narrow ? widthOf("links") : Math.min(640, widthOf("links") * 0.55)) - left - 2) / count));
  const tall = Math.min(side, 46);
  const width = left + side * count + 2, height = 36 + tall * count + 2;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", class: "chart",
    "aria-label": `Bytes a step over each link of ${run.name}` });
  svg.append(make("text", { x: left, y: 12, class: "lane" }, `to ${run.ofRanks ? "rank" : "device"}`),
    make("text", { x: 1, y: 29, class: "lane" }, "from"));
  const says = make("output", { class: "says", "aria-live": "polite" }, "Choose a link for its messages.");
  const messages = make("div", { class: "messages" });
  const rows = cells.map((row, from) => {
    svg.append(make("text", { x: left - 6, y: 36 + tall * (from + 0.5) + 4, "text-anchor": "end", class: "lane" }, nameOf(from)));
    return row.map((cell, to) => {
      if (from === 0)
        svg.append(make("text", { x: left + side * (to + 0.5), y: 29, "text-anchor": "middle", class: "lane" }, nameOf(to)));
      const shade = cell.data / largest;
      const text = cell.data || cell.control
        ? `${run.device(nameOf(from))} to ${nameOf(to)}: ${bytes(cell.data)} a step, and ${bytes(cell.control)} of control`
        : `${run.device(nameOf(from))} to ${nameOf(to)}: nothing`;
      const mark = titled(make("rect", { x: left + side * to, y: 36 + tall * from, width: side - 2, height: tall - 2, rx: 2,
        class: "cell" + (cell.data || cell.control ? "" : " none"), role: "img", "aria-label": text,
        "data-from": from, "data-to": to, "data-bytes": cell.data, "data-control": cell.control,
        style: cell.data ? `fill:color-mix(in oklab, var(--ink-blue) ${Math.round(18 + 72 * shade)}%, var(--paper))` : null }), text);
      svg.append(mark);
      const label = cell.data ? bytes(cell.data) : cell.control ? bytes(cell.control) : "";
      if (label && side > label.length * 6.2 + 4)
        svg.append(make("text", { x: left + side * (to + 0.5) - 1, y: 36 + tall * (from + 0.5) + 3, "text-anchor": "middle",
          class: shade > 0.45 ? "in strong" : "in", "aria-hidden": "true" }, label));
      return mark;
    });
  });
  walkable(svg, rows, says);
  const choose = (mark) => {
    linksState.from = Number(mark.dataset.from); linksState.to = Number(mark.dataset.to);
    svg.querySelector(".chosen")?.classList.remove("chosen");
    mark.classList.add("chosen");
    messages.replaceChildren(...messagesOf(run, linksState.from, linksState.to, block));
  };
  svg.addEventListener("click", (event) => { if (event.target.matches(".cell")) choose(event.target); });
  svg.addEventListener("keydown", (event) => {
    if (event.target.matches(".cell") && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); choose(event.target); }
  });
  const inTable = links.slice(0, 300).sort((a, b) => (a.kind === "control") - (b.kind === "control") || a.from - b.from || a.to - b.to);
  const difference = (link) => link.formula === null || link.formula === undefined ? "-"
    : link.bytes === link.formula ? "none" : `${link.bytes > link.formula ? "+" : "−"}${bytes(Math.abs(link.bytes - link.formula))}` +
      (link.formula ? ` (${figures((link.bytes / link.formula - 1) * 100, 2)} %)` : "");
  place.replaceChildren(
    make("div", { class: "controls" }, choice("Run", withLinks.map((each) => each.name), withLinks.indexOf(run), (index) => {
      Object.assign(linksState, { run: withLinks[index], from: null, to: null });
      drawLinks();
    })),
    make("div", { class: "beside" }, make("div", { class: "scroll" }, svg),
      table(`Bytes a step of ${run.name}`, ["link", "kind", right("measured"), right("formula"), right("difference"), "rule"],
        inTable.map((link) => [`${link.from} → ${link.to}`, link.kind, right(link.bytes.toLocaleString("en")),
          right(link.formula === null || link.formula === undefined ? "-" : Math.round(link.formula).toLocaleString("en")),
          right(difference(link)), link.rule || (link.kind === "control" ? "not in the formula" : "")]))),
    says, messages,
    make("p", { class: "note" }, "Control is what keeps ranks in order (shapes, shares, deadlines). No formula counts it." +
      (block > 1 ? ` Ranks are drawn in blocks of ${block}.` : "") + (links.length > 300 ? ` The table has the first 300 of ${links.length} rows.` : "")));
}

/** What went over the links from one block of ranks to another in the shown step. */
function messagesOf(run, fromBlock, toBlock, block) {
  const step = stepOf(run);
  // A rank's own step: other ranks begin and end theirs slightly earlier or later.
  const own = (rank) => run.spans.find((span) => span.category === "step" && span.device === rank &&
    span.args.step === step.number) || step;
  const inside = (rank, at) => Math.floor(rank / block) === at, rows = [];
  const spanAt = (rank, at) => run.spans.filter((span) => span.device === rank &&
    [lanes.communication, lanes.gathers].includes(span.lane) && span.category !== "ring" && span.begin <= at && span.end >= at - 3).at(-1);
  const instants = run.instants.filter((event) => event.category === "sent" && inside(event.device, fromBlock) &&
    inside(event.args.to, toBlock) && event.at >= step.begin && event.at <= step.end);
  for (const event of instants)
    rows.push([event.at, event.device, event.args.to, event.args.kind, event.args.bytes, event.name]);
  if (instants.length === 0) {
    const last = new Map();
    for (const counter of run.sent) {
      if (!inside(counter.from, fromBlock) || !inside(counter.to, toBlock)) continue;
      const key = `${counter.from} ${counter.to}`, before = last.get(key) || {};
      last.set(key, counter.args);
      if (counter.at <= own(counter.from).begin || counter.at > own(counter.from).end) continue;
      for (const [kind, total] of Object.entries(counter.args))
        if (total > (before[kind] || 0))
          rows.push([counter.at, counter.from, counter.to, kind, total - (before[kind] || 0), spanAt(counter.from, counter.at)?.name || ""]);
    }
  }
  const title = make("h3", {}, `Messages of step ${step.number}`);
  if (rows.length === 0) return [title, empty("None in this step, or their counters are left out.")];
  rows.sort((a, b) => a[0] - b[0]);
  return [title, table(`${rows.length} messages`, ["link", "kind", right("bytes"), right("sent until"), "call"],
    rows.slice(0, 100).map(([at, from, to, kind, count, name]) => [`${from} → ${to}`, kind, right(count.toLocaleString("en")),
      right(time(at - step.begin)), name]))];
}
