// Tables that the router describes by title, unit and values of each column. Everything from the
// router is written as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function write(node, text) {
  if (node.textContent !== text) node.textContent = text; // a screen reader would repeat unchanged text
}

/** Writes text in which some words are links, by word; a link stays the same element while the words around it change. */
export function writeLinked(node, text, links) {
  const words = text.split(/([^\s,;]+)/);
  const urls = JSON.stringify(words.map((word) => (Object.hasOwn(links, word) ? links[word] : "")));
  if (node.dataset.urls !== urls) {
    node.dataset.urls = urls;
    node.replaceChildren(...JSON.parse(urls).map((href) => (href ? element("a", { href }) : document.createTextNode(""))));
  }
  words.forEach((word, at) => write(node.childNodes[at], word));
}

export function classed(node, name) {
  if (node.className !== name) node.className = name;
}

/** Fetches from the router; the token, if any, goes into a header, never into an address, and stays in this tab. */
export function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  return fetch(path, { ...options, headers, cache: "no-store" });
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }).format;
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format;
const largest = ({ values }) => Math.max(...values, 1);

/** Layout of each unit: class of the cell, whether the cell heads its row, the text, and the share that a bar shows. */
const UNITS = {
  name: { className: "left", head: true },
  decision: { className: "left", head: true },
  text: { className: "left" },
  words: { className: "words" },
  health: { className: "left" },
  mark: { className: "left mark" },
  figure: {},
  count: { format: whole },
  load: { format: whole, bar: (value, column) => Math.round(value) / largest(column) },
  share: { format: (value) => `${Math.round(value * 100)}%`, bar: (value) => value },
  tokens: { format: short },
  seconds: { format: (value) => `${value >= 100 ? whole(value) : value.toFixed(value >= 10 ? 1 : 2)} s` },
  age: { format: (value) => `${value.toFixed(1)} s` },
  milliseconds: { format: (value) => `${value.toFixed(1)} ms` },
  ratio: { format: (value) => value.toFixed(2) },
};

function withRole(role, node) {
  node.setAttribute("role", role); // on a phone rows are drawn as cards; the role keeps them a table for screen readers
  return node;
}

/** Table that keeps its rows from one snapshot to the next; `open` receives the key of a clicked decision. */
export class Table {
  constructor({ caption, columns }, { captioned = false, className = "cards", open } = {}) {
    this.titles = String(columns.map(({ title }) => title));
    this.rows = new Map();
    this.open = open;
    this.body = withRole("rowgroup", element("tbody"));
    const heads = columns.map(({ title, unit }) => {
      const head = withRole("columnheader", element("th", { scope: "col", className: UNITS[unit].className ?? "", textContent: title }));
      if (!title) head.append(element("span", { className: "skip", textContent: "chosen" }));
      return head;
    });
    const head = withRole("rowgroup", element("thead", {}, withRole("row", element("tr", {}, ...heads))));
    const name = element("caption", { textContent: captioned ? caption : "", hidden: !captioned });
    const table = withRole("table", element("table", {}, name, head, this.body));
    this.node = withRole("region", element("div", { className: `scroll ${className}`, tabIndex: 0, ariaLabel: caption }, table));
    this.note = element("p", { className: "calm" });
  }

  show({ keys, columns, note }) {
    for (const [key, row] of this.rows) {
      if (keys.includes(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
    keys.forEach((key, place) => {
      if (!this.rows.has(key)) this.rows.set(key, this.newRow(key, columns));
      const row = this.rows.get(key);
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
      columns.forEach((column, at) => fill(row.children[at], column, place));
    });
    this.node.hidden = !keys.length && Boolean(note);
    write(this.note, note);
    return this;
  }

  newRow(key, columns) {
    const cells = columns.map(({ title, unit, notes }) => {
      const { className = "", head, bar } = UNITS[unit];
      const cell = withRole(head ? "rowheader" : "cell", element(head ? "th" : "td", { className }));
      if (head) cell.scope = "row";
      cell.dataset.label = title;
      cell.append(unit === "decision" ? this.button(key) : element("span"));
      if (notes) cell.append(element("small"));
      if (bar) cell.append(element("span", { className: "meter", ariaHidden: "true" }, element("i")));
      return cell;
    });
    return withRole("row", element("tr", {}, ...cells));
  }

  button(key) {
    const button = element("button", { type: "button", className: "link", ariaHasPopup: "dialog" });
    button.addEventListener("click", () => this.open(key));
    return button;
  }
}

function fill(cell, column, at) {
  const { unit, values, notes, estimated } = column;
  const { format = String, bar } = UNITS[unit];
  const value = values[at];
  write(cell.firstChild, value === null ? "–" : `${estimated?.[at] ? "≈ " : ""}${format(value)}`);
  if (unit === "health") classed(cell, `left health ${value}`);
  if (unit === "decision") cell.title = value;
  if (notes) {
    write(cell.children[1], notes[at]);
    cell.children[1].hidden = !notes[at];
  }
  if (bar) {
    const width = `${Math.round(Math.min(Math.max(bar(value ?? 0, column), 0), 1) * 100)}%`;
    const filled = cell.lastChild.firstChild;
    if (filled.style.width !== width) filled.style.width = width;
  }
}
