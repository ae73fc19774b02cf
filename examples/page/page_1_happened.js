// Section 1: sentences, a table of the runs, advice.

const sectionNames = { happened: "table", timeline: "timeline", links: "links", memory: "memory", ring: "ring",
                       gradients: "gradients", formulas: "formulas" };

function drawHappened() {
  const sentence = ({ text, section }) => make("li", {}, text,
    section in sectionNames && section !== "happened"
      ? [" ", make("a", { href: `#${section}` }, sectionNames[section])] : null);
  const list = (sentences) => make("ul", { class: "sentences" }, sentences.map(sentence));
  const peakOfFirst = (run) => run.facts.peak?.[0] ? sum(Object.values(run.facts.peak[0])) : null;
  const rows = runs.map((run) => [run.name, right(time(run.facts.step_us)), right(percent(run.facts.hidden)),
    right(run.facts.exposed_us?.length ? time(most(run.facts.exposed_us)) : "-"),
    right(bytes(run.facts.sent_bytes ?? 0)), right(bytes(peakOfFirst(run)))]);
  const compared = data.comparison?.length > 0;
  const perRun = make("div", { class: "runs" }, runs.filter((run) => run.sentences?.length).map((run) =>
    make("div", {}, make("h3", {}, run.name), list(run.sentences))));
  const advised = runs.filter((run) => run.advice?.length);
  const advice = make("div", { class: "advice" }, make("h3", {}, "Advice"),
    advised.length ? make("div", { class: "runs" }, advised.map((run) => make("div", {}, make("h4", {}, run.name),
      make("ul", {}, run.advice.map((each) => make("li", {}, each.text, make("small", {}, each.figures)))))))
      : empty("None: nothing in these runs asks for a change."));
  body("happened").append(table("The runs, a step", ["run", "step", "hidden", "waits", "sent", "peak of device 0"].map(
    (text, index) => index ? right(text) : text), rows),
    make("p", { class: "note" }, "Hidden: the part of communicating during which the same device computed, too. " +
      "Waits: exposed, the longest of the devices. Sent: over all links in a step."),
    compared ? make("h3", {}, "Side by side") : "",
    compared ? list(data.comparison) : "", perRun, advice);
}
