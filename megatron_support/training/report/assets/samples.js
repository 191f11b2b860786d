// Samples: a list on the left, the opened one on the right with tokens coloured by ratio. #sample=ID opens one.

const ORDERS = {
  "most excluded tokens": (s) => -s.excluded,
  ...(DATA.ratioScale ? { "ratio farthest from 1": (s) => -(s.spread ?? 0), "engine and trainer farthest apart": (s) => -(s.mismatch ?? 0) } : {}),
  "longest": (s) => -s.length,
  "least likely for the engine": (s) => s.likelihood ?? 0,
  "lowest reward": (s) => s.reward,
  "highest reward": (s) => -s.reward,
};

const UNLIKELY = 6; // a log-probability of -6 has the full colour where tokens are coloured by probability

function probability(logprob) {
  if (logprob === null || logprob === undefined) return "–";
  if (logprob === "out") return "0, outside the support";
  return `${number(Math.exp(logprob))}  (log ${number(logprob)})`;
}

function ratioOf(sample, i) {
  const previous = sample.prev?.[i], current = sample.curr?.[i];
  return typeof previous === "number" && typeof current === "number" ? Math.exp(current - previous) : null;
}

function tokenTip(sample, i) {
  const id = sample.tokens[i], lines = [`${quoted(id)}  token ${id}, position ${sample.first + i}`];
  if (!sample.response[i]) return `${lines[0]}\nprompt`;
  const source = sample.source[i];
  if (source) lines.push(`excluded: outside the support of the ${SOURCE_NAMES[source]}`);
  lines.push(`engine, filtered: ${probability(sample.gen?.[i])}`);
  if (sample.prev) lines.push(`trainer before, filtered: ${probability(sample.prev[i])}`);
  if (sample.prevAll) lines.push(`trainer before, whole vocabulary: ${probability(sample.prevAll[i])}`);
  if (sample.curr) lines.push(`trainer in the loss, filtered: ${probability(sample.curr[i])}`);
  const ratio = ratioOf(sample, i);
  if (ratio !== null) lines.push(`ratio ${number(ratio)}`);
  if (sample.advantages) lines.push(`advantage ${number(sample.advantages[i])}`);
  return lines.join("\n");
}

// How strongly a token is coloured, and in which colour: by ratio, or by the engine's probability where there is none.
function shade(sample, i) {
  if (!DATA.ratioScale) return [Math.min(1, -(sample.gen?.[i] ?? 0) / UNLIKELY), "high"];
  const ratio = ratioOf(sample, i);
  return ratio === null ? [0, "low"] : [Math.min(1, Math.abs(Math.log(ratio)) / Math.log(DATA.ratioScale)), ratio < 1 ? "low" : "high"];
}

function tokenNode(sample, i) {
  const { text, isId } = visible(sample.tokens[i]);
  const node = html("span", { class: "token" }, text);
  if (isId) node.classList.add("id");
  if (!sample.response[i]) node.classList.add("prompt");
  else if (sample.source[i]) {
    node.classList.add("out");
    node.style.setProperty("--source", `var(--${sample.source[i]})`);
  } else {
    const [share, color] = shade(sample, i);
    if (share > 0.02) node.style.background = `color-mix(in oklab, var(--${color}) ${Math.round(75 * share)}%, transparent)`;
  }
  hover(node, tokenTip(sample, i));
  return node;
}

function sampleKey() {
  const scale = DATA.ratioScale
    ? html("span", {}, `ratio ${number(1 / DATA.ratioScale)}`, html("i", { class: "scale" }), number(DATA.ratioScale))
    : html("span", {}, "colour: unlikely for the engine");
  const sources = Object.keys(SOURCE_NAMES).filter((source) => DATA.ratioScale || source === "generation");
  const out = sources.map((source) => html("span", {}, html("span", { class: "token out", style: `--source: var(--${source})` }, "token"), ` outside: ${SOURCE_NAMES[source]}`));
  return html("div", { class: "legend" }, scale, ...out);
}

function sampleView(sample, marked) {
  const fact = (name, value) => html("span", {}, `${name} `, html("b", {}, value));
  const text = html("div", { class: "text" });
  if (sample.first > 0) text.append(html("span", { class: "token prompt" }, `… ${sample.first} tokens before …`));
  sample.tokens.forEach((_, i) => text.append(tokenNode(sample, i)));
  if (sample.left_out > 0) text.append(html("span", { class: "token prompt" }, ` … ${sample.left_out} tokens after …`));
  const box = html("article", { class: "card", id: "opened-sample", "data-sample": sample.id },
    html("header", {}, html("h3", {}, `sample ${sample.id}`), html("span", { class: "hint" }, sample.sampling)),
    html("div", { class: "facts" }, fact("reward", number(sample.reward)), fact("response tokens", sample.length), fact("excluded", sample.excluded), ...(sample.ratios ? [fact("ratio", sample.ratios), fact("mean |trainer - engine|", number(sample.mismatch))] : [fact("mean log-probability", number(sample.likelihood))])),
    sampleKey(), text);
  if (marked !== undefined) text.querySelectorAll(".token:not(.prompt), .token.prompt")[marked + (sample.first > 0 ? 1 : 0)]?.classList.add("marked");
  return box;
}

let openSample = () => {};

function samples(parent) {
  const view = html("div", {}), list = html("div", { class: "list card" }), items = html("div", {});
  const choice = html("select", { "aria-label": "Order of the samples", onchange: () => fill() }, ...Object.keys(ORDERS).map((name) => html("option", {}, name)));
  const byId = new Map(DATA.samples.map((sample) => [sample.id, sample]));
  const sorted = () => [...DATA.samples].sort((a, b) => ORDERS[choice.value](a) - ORDERS[choice.value](b));
  const show = (sample, marked) => {
    view.replaceChildren(sampleView(sample, marked));
    items.querySelectorAll(".item").forEach((item) => item.setAttribute("aria-current", String(item.dataset.sample === sample.id)));
  };
  const fill = () => {
    items.replaceChildren(...sorted().map((sample) => html("button", { class: "item", type: "button", "data-sample": sample.id, onclick: () => { history.replaceState(null, "", `#sample=${encodeURIComponent(sample.id)}`); show(sample); } },
      html("span", {}, sample.id), html("span", {}, `reward ${number(sample.reward)}`),
      html("span", { class: "sub" }, `${sample.length} tokens, ${sample.excluded} excluded${sample.ratios ? `, ratio ${sample.ratios}` : ""}`))));
    show(sorted()[0]);
  };
  openSample = (id, marked) => {
    const sample = byId.get(id);
    if (!sample) return;
    history.replaceState(null, "", `#sample=${encodeURIComponent(id)}`);
    show(sample, marked);
    parent.scrollIntoView({ block: "start" });
  };
  const fromHash = () => {
    const match = location.hash.match(/^#sample=(.+)$/);
    if (match) openSample(decodeURIComponent(match[1]));
  };
  list.append(choice, items);
  parent.append(list, view);
  fill();
  fromHash();
  addEventListener("hashchange", fromHash);
}
