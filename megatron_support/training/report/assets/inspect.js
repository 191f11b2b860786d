// The page of a rollout file.

startTheme();
head(DATA.title, DATA.subtitle, DATA.tiles);

section("findings", "Missing or odd", DATA.findings.length ? "What a reader would refuse, and what is allowed but rarely meant." : "Nothing is missing and nothing is odd.");
if (DATA.findings.length) {
  const rows = DATA.findings.map((f) => [html("span", { class: f.level }, f.level), f.count, f.text, f.examples.join(", ")]);
  card(main, { id: "findings", title: "Findings" }, (node) => node.append(table([{ name: "" }, { name: "rows", num: true }, { name: "what" }, { name: "where" }], rows)));
}

section("distributions", "Lengths, rewards, log-probabilities", "");
const box = grid();
for (const chart of DATA.histograms) card(box, { id: chart.id, title: chart.title, hint: chart.hint, none: chart.none }, chart.counts && ((node) => histogram(node, chart)));

section("filters", "Filters", "Under which sampling parameters the rows were sampled: only filtered rows can have excluded tokens.");
card(main, { id: "filters", title: "Sampling parameters" }, (node) => node.append(table(
  [{ name: "temperature", num: true }, { name: "top_k", num: true }, { name: "top_p", num: true }, { name: "rows", num: true }],
  DATA.filters.map((f) => [number(f.temperature), f.top_k ?? "none", f.top_p === 1 ? "none" : number(f.top_p), f.rows]))));

section("samples", "Samples", DATA.samples.length ? "Those with odd values first." : "No row could be read.");
if (DATA.samples.length) {
  const list = html("div", { class: "samples" });
  main.append(list);
  samples(list);
}
document.body.dataset.ready = "true";
