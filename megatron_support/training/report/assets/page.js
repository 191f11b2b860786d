// What both pages share: theme, sections, cards, tables.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SOURCE_NAMES = { previous: "trainer, before the step", generation: "engine", current: "trainer, later in the step" };

function store(value) {
  // a page opened from a file may be denied storage; the choice then lasts as long as the page
  try { if (value === undefined) return localStorage.getItem("theme"); localStorage.setItem("theme", value); } catch (error) { return null; }
  return value;
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `theme: ${theme}`;
}

function startTheme() {
  const wanted = new URLSearchParams(location.search).get("theme");
  let theme = ["auto", "light", "dark"].includes(wanted) ? wanted : store() || "auto";
  setTheme(theme);
  document.getElementById("theme").addEventListener("click", () => {
    theme = { auto: "dark", dark: "light", light: "auto" }[theme];
    store(theme);
    setTheme(theme);
  });
}

const main = document.getElementById("main");

function section(id, title, text) {
  main.append(html("h2", { id }, title), html("p", {}, text || ""));
  document.getElementById("nav").append(html("a", { href: `#${id}` }, title.split(",")[0].replace(/ (of|and) .*$/, "")));
}

function head(title, subtitle, tiles) {
  main.append(html("h1", {}, title), html("p", { class: "subtitle" }, subtitle));
  const box = html("div", { class: "tiles" });
  for (const { label, value, note } of tiles) {
    box.append(html("div", { class: "tile" }, html("div", { class: "label" }, label), html("div", { class: "value" }, value), html("div", { class: "note" }, note || "")));
  }
  main.append(box);
}

function grid(wide = false) {
  const box = html("div", { class: wide ? "grid wide" : "grid" });
  main.append(box);
  return box;
}

function legend(series) {
  if (!series || series.length < 2) return null;
  return html("span", { class: "legend" }, ...series.map((s) => html("span", {}, html("i", { style: `background: var(--${s.color})` }), s.name)));
}

// A card with a chart; draw gets the node to draw in, or is null where there is nothing to show.
function card(parent, { id, title, hint, series, none }, draw) {
  const plot = html("div", { class: "plot" });
  const box = html("section", { class: "card", "data-chart": id || title }, html("header", {}, html("h3", {}, title), legend(series)));
  if (hint) box.append(html("p", { class: "hint" }, hint));
  box.append(plot);
  parent.append(box);
  if (draw) draw(plot);
  else plot.append(html("p", { class: "none" }, none));
  return box;
}

function table(columns, rows) {
  const cell = (kind, column, text) => html(kind, column.num ? { class: "num" } : {}, text);
  return html("div", { class: "scroll" }, html("table", {},
    html("thead", {}, html("tr", {}, ...columns.map((column) => cell("th", column, column.name)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...columns.map((column, i) => cell("td", column, row[i])))))));
}

function pairs(object) {
  const rows = [];
  for (const [name, value] of Object.entries(object)) {
    if (value !== null && typeof value === "object") for (const [inner, text] of Object.entries(value)) rows.push([`${name} / ${inner}`, String(text)]);
    else rows.push([name, String(value)]);
  }
  return table([{ name: "" }, { name: "" }], rows);
}

function yamlBlock(text) {
  const block = html("pre", {});
  for (const line of text.split("\n")) {
    const match = line.match(/^(\s*(?:- )?)([\w.]+:)(.*)$/);
    if (match) block.append(match[1], html("span", { class: "key" }, match[2]), match[3], "\n");
    else block.append(line, "\n");
  }
  return block;
}

// The text of a token as it is shown: line ends visible, ids where there is no text.
function visible(id) {
  const text = DATA.text[id];
  if (text === undefined || text === "" || /^[\u0000-\u0008\u000b-\u001f\u007f]+$/.test(text)) return { text: `⟨${id}⟩`, isId: true };
  return { text: text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥"), isId: false };
}

function quoted(id) {
  const { text, isId } = visible(id);
  return isId ? text : `“${text.replace("⏎\n", "⏎")}”`;
}
