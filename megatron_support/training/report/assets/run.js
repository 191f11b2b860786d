// The page of a run.

const SOURCE_SERIES = ["previous", "generation", "current"].map((color) => ({ name: SOURCE_NAMES[color], color }));

function runCharts() {
  section("training", "Training", "Every value is over all ranks, microbatches and minibatches of a step. Hover for numbers; the line follows in all charts.");
  const box = grid();
  for (const chart of DATA.charts.training) card(box, { id: chart.id, title: chart.title, hint: chart.hint, series: chart.series }, (node) => lineChart(node, { steps: DATA.steps, ...chart }));
}

function ratioCharts() {
  section("ratio", "Importance ratio", "How far the policy of the loss has moved from the policy before the step, per token. The dashed lines are the clip window.");
  const box = grid(true);
  const ratio = DATA.ratio;
  card(box, { id: "ratio-steps", title: "Distribution over the run", hint: "median, and bands of 50, 90 and 98% of the tokens", none: "no ratios were recorded: logging.tokens is false, or the loss reads none" },
    ratio.fan && ((node) => fanChart(node, { ...ratio.fan, window: ratio.window, title: "Ratio over steps" })));
  const bounds = (ratio.window || []).map((value) => ({ value, label: number(value) }));
  card(box, { id: "ratio-last", title: "Last step", hint: ratio.note, none: "the last step's rollouts are not in the run folder, or have no ratios" },
    ratio.histogram && ((node) => histogram(node, { ...ratio.histogram, title: "Ratios of the last step", xLabel: "ratio", bounds, height: 230 })));
  for (const chart of DATA.charts.ratio) card(box, { id: chart.id, title: chart.title, hint: chart.hint, series: chart.series }, (node) => lineChart(node, { steps: DATA.steps, ...chart }));
}

function excludedCharts() {
  const excluded = DATA.excluded;
  section("excluded", "Excluded tokens", excluded.text);
  const box = grid(true);
  card(box, { id: "excluded-steps", title: "Over the run", series: SOURCE_SERIES, none: "no single tokens were recorded" },
    excluded.steps && ((node) => barChart(node, {
      title: "Excluded tokens of each step", xLabel: "step", yLabel: "tokens", series: SOURCE_SERIES,
      bars: excluded.steps.map((row) => ({ label: String(row.step), values: row.counts, tip: `step ${row.step}\n${SOURCE_SERIES.map((s, j) => `${s.name}: ${row.counts[j]}`).join("\n")}` })),
    })));
  const signs = [{ name: "advantage > 0", color: "positive" }, { name: "0", color: "c6" }, { name: "advantage < 0", color: "negative" }];
  card(box, { id: "excluded-source", title: "By source and sign of the advantage", hint: "a token counts for the first source that puts it outside", series: signs, none: "no single tokens were recorded" },
    excluded.sources && ((node) => rowChart(node, {
      title: "Excluded tokens by source", xLabel: "tokens over the run", series: signs,
      rows: excluded.sources.map((row) => ({ label: SOURCE_NAMES[row.source].replace("trainer, ", ""), values: row.counts, tip: `${SOURCE_NAMES[row.source]}\n${signs.map((s, j) => `${s.name}: ${row.counts[j]}`).join("\n")}` })),
    })));
  card(box, { id: "excluded-position", title: "By position in the response", hint: "share of the tokens at that position", none: "no token was excluded" },
    excluded.positions && ((node) => barChart(node, {
      title: "Share of excluded tokens by position", xLabel: "response token", yLabel: "share", percent: true, series: [{ color: "c1" }],
      bars: excluded.positions.map((bin) => ({ label: bin.label, values: [bin.share], tip: `response token ${bin.label}\n${bin.excluded} of ${bin.total} excluded (${number(bin.share, true)})` })),
    })));
  card(box, { id: "excluded-token", title: "By token", hint: "the most frequent", none: "no token was excluded" },
    excluded.tokens && ((node) => rowChart(node, {
      title: "Excluded tokens by token", xLabel: "times excluded", color: "c1",
      rows: excluded.tokens.map(({ id, count }) => ({ label: quoted(id), values: [count], tip: `token ${id}\nexcluded ${count} times` })),
    })));
  if (excluded.worst.length === 0) return;
  const rows = excluded.worst.map((t) => [t.step, t.sample_id, t.position, quoted(t.token), SOURCE_NAMES[t.source], number(t.engine), number(t.trainer)]);
  const columns = [{ name: "step", num: true }, { name: "sample" }, { name: "position", num: true }, { name: "token" }, { name: "outside for" }, { name: "p engine", num: true }, { name: "p trainer", num: true }];
  card(main, { id: "excluded-worst", title: "Least likely for the trainer", hint: "p engine: under its filter; p trainer: over the whole vocabulary, before the step" }, (node) => node.append(table(columns, rows))).style.marginTop = "14px";
}

function agreement() {
  section("agreement", "Trainer against engine", "The same sampled token as two programs see it, both under the sampling filter. On the dashed line they agree. Click a point to open its sample.");
  const box = grid(true);
  const points = DATA.scatter.points.map(([x, y, sample, position, id, source]) => ({
    x, y, sample, position, color: source || "c1",
    tip: `${quoted(id)}  sample ${sample}, position ${position}\nengine  ${number(x)}\ntrainer ${y === null ? "−∞, outside the support" : number(y)}`,
  }));
  card(box, { id: "scatter", title: "Log-probability of each token, last step", hint: DATA.scatter.note, none: "the last step's rollouts are not in the run folder" },
    points.length > 0 && ((node) => scatterChart(node, { points, title: "Trainer against engine", xLabel: "engine", yLabel: "trainer before the step", strip: "outside the trainer's support", onPick: (p) => openSample(p.sample, p.position) })));
  const side = html("div", { class: "grid", style: "grid-template-columns: 1fr" });
  box.append(side);
  for (const chart of DATA.charts.agreement) card(side, { id: chart.id, title: chart.title, hint: chart.hint, series: chart.series }, (node) => lineChart(node, { steps: DATA.steps, ...chart }));
}

function samplePart() {
  section("samples", "Samples of the last step", DATA.samples.length ? "The worst by several measures. Colour is the token's importance ratio; a struck-out token is outside a support and has no gradient in the actor term." : "The last step's rollouts are not in the run folder: they are written when a run ends.");
  if (!DATA.samples.length) return;
  const box = html("div", { class: "samples" });
  main.append(box);
  samples(box);
}

function timeCharts() {
  section("time", "Time and memory", "Seconds of the first rank.");
  const box = grid();
  for (const chart of DATA.charts.time) card(box, { id: chart.id, title: chart.title, hint: chart.hint, series: chart.series }, (node) => lineChart(node, { steps: DATA.steps, ...chart }));
}

function configuration() {
  section("configuration", "Configuration and environment", "The resolved recipe can be run as it is: megatron-support train recipe.yaml");
  const box = grid(true);
  card(box, { id: "recipe", title: "recipe.yaml" }, (node) => node.append(yamlBlock(DATA.recipe)));
  card(box, { id: "environment", title: "Environment", none: "environment.json is not in the run folder" }, Object.keys(DATA.environment).length && ((node) => node.append(pairs(DATA.environment))));
}

startTheme();
head(DATA.title, DATA.subtitle, DATA.tiles);
runCharts();
ratioCharts();
excludedCharts();
agreement();
samplePart();
timeCharts();
configuration();
document.body.dataset.ready = "true";
