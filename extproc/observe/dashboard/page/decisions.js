// The last decisions, and all that was compared for one of them.

import { ask } from "./ask.js";
import { $, Table, brief, classed, element, text, write } from "./elements.js";

let decisions = null;

export function showDecisions({ columns, rows }) {
  decisions ??= new Table(
    [
      ...columns.map(({ header, left }, at) => {
        if (header === "request") return { name: header, head: true, className: "left", fill: link(at) };
        const name = header === "actual" ? `${columns[at - 1].header.replace(/ s$/, "")} actual` : header;
        return text(name, (one) => one.figures[at], { className: left ? "left" : "" });
      }),
      brief("model: why", (one) => one.why),
    ],
    "cards dense",
  ).named("Last decisions", false);
  if (!decisions.node.isConnected) $("decisions").replaceChildren(decisions.node);
  decisions.show(rows, (one) => one.number);
}

const link = (at) => (cell, one) => {
  if (!cell.firstChild) {
    const button = element("button", { type: "button", className: "link" });
    button.setAttribute("aria-haspopup", "dialog");
    button.addEventListener("click", () => openComparison(one.number));
    cell.append(button);
  }
  write(cell.firstChild, one.figures[at]);
  cell.title = one.figures[at];
};

async function openComparison(number) {
  const body = $("comparison-body");
  body.replaceChildren(element("p", { textContent: "…" }));
  $("comparison").showModal();
  try {
    const response = await ask(`dashboard/decision?number=${number}`);
    if (!response.ok) throw new Error((await response.text()).trim());
    body.replaceChildren(...comparisonOf(await response.json()));
  } catch (error) {
    body.replaceChildren(element("p", { textContent: `Not to be had: ${error.message}` }));
  }
}

function comparisonOf({ facts, columns, rows, legend, left_out: leftOut }) {
  const list = element("dl", { className: "facts" });
  for (const [name, value] of Object.entries(facts)) list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
  const table = new Table(
    columns.map((one, at) => text(one.header, (row) => row[at], { className: one.left ? "left" : "", head: one.header === "replica" })),
    "",
  ).named("Candidates, the chosen one first", false);
  table.show(rows, (row) => rows.indexOf(row), (row, cells) => classed(row, cells[0] ? "chosen" : ""));
  const parts = [list, element("h3", { textContent: "Candidates" }), table.node];
  parts.push(...legend.map((one) => element("p", { className: "note", textContent: one })));
  if (leftOut.length) {
    const out = element("dl", { className: "facts" });
    for (const [name, why] of leftOut) out.append(element("dt", { textContent: name }), element("dd", { textContent: why }));
    parts.push(element("h3", { textContent: "Left out" }), out);
  }
  return parts;
}
