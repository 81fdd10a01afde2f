// Sections of the page, and the dialog that compares the candidates of a decision.

import { draw } from "./scatter.js";
import { $, Table, ask, element, write, writeLinked } from "./table.js";

const tables = new Map();
const figures = new Map();

function showTable(place, given, options) {
  const name = `${place}: ${given.caption}`;
  let table = tables.get(name);
  if (table?.titles !== String(given.columns.map(({ title }) => title))) {
    table?.node.remove();
    table?.note.remove();
    table = new Table(given, options);
    tables.set(name, table);
    $(place).append(table.node, table.note);
  }
  table.show(given);
}

function showWarnings(all) {
  const list = $("warnings");
  const there = new Map([...list.children].map((item) => [item.textContent, item]));
  for (const [warning, item] of there) if (!all.includes(warning)) item.remove();
  [...new Set(all)].forEach((warning, place) => {
    const item = there.get(warning) ?? element("li", { textContent: warning });
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
  });
  $("no-warnings").hidden = all.length > 0;
}

function showFacts(list, facts, links = {}) {
  facts.forEach(([name, value], at) => {
    const pair = list.children[at] ?? list.appendChild(element("div", {}, element("dt"), element("dd")));
    write(pair.firstChild, name);
    writeLinked(pair.lastChild, value, links);
  });
  while (list.children.length > facts.length) list.lastChild.remove();
  return list;
}

export function showAccuracy(pools) {
  for (const { name, accuracy } of pools) {
    if (!figures.has(name)) {
      const canvas = element("canvas", { role: "img" });
      figures.set(name, element("figure", {}, element("h3"), canvas, element("figcaption", { className: "note" })));
      $("accuracy").append(figures.get(name));
    }
    const [heading, canvas, caption] = figures.get(name).children;
    write(heading, `Pool ${name}`);
    heading.hidden = pools.length < 2;
    write(caption, accuracy.words);
    canvas.ariaLabel = accuracy.words;
    canvas.hidden = !accuracy.quantiles.length;
    if (!canvas.hidden) draw(canvas, accuracy.points, accuracy.quantiles);
  }
}

async function openComparison(number) {
  const body = $("comparison-body");
  body.replaceChildren(element("p", { textContent: "…" }));
  $("comparison").showModal();
  try {
    const response = await ask(`dashboard/decision?number=${number}`);
    if (!response.ok) throw new Error((await response.text()).trim());
    body.replaceChildren(...comparisonOf(await response.json()));
  } catch (error) {
    body.replaceChildren(element("p", { textContent: `Not available: ${error.message}` }));
  }
}

function comparisonOf({ facts, candidates, legend, excluded }) {
  const listed = (pairs) => showFacts(element("dl", { className: "facts" }), pairs);
  const heading = (textContent) => element("h3", { textContent });
  const notes = legend.map((textContent) => element("p", { className: "note", textContent }));
  const table = new Table(candidates, { className: "" }).show(candidates);
  const parts = [listed(facts), heading("Candidates"), table.node, ...notes];
  return excluded.length ? [...parts, heading("Excluded"), listed(excluded)] : parts;
}

export function show({ router, warnings, figures, facts, links, pools, history, decisions }) {
  const captioned = pools.length > 1;
  write($("router"), router);
  showWarnings(warnings);
  showFacts($("figures"), figures);
  showFacts($("parts"), facts, links);
  for (const { replicas, waiting } of pools) {
    showTable("replicas", replicas, { captioned });
    showTable("queued", waiting, { captioned });
  }
  showAccuracy(pools);
  showTable("history", history);
  showTable("decisions", decisions, { className: "cards dense", open: openComparison });
}
