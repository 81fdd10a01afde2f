// Elements that keep their place from one news to the next, and figures in words. What comes from
// the router is only ever written as text.

export const $ = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const known = (value, text) => (value === null || value === undefined ? "–" : text(value));
export const count = (value) => known(value, (one) => whole.format(one));
export const tokens = (value) => known(value, (one) => short.format(one));
export const percent = (value) => known(value, (one) => `${Math.round(one * 100)}%`);
export const seconds = (value) =>
  known(value, (one) => (one >= 100 ? `${whole.format(one)} s` : one >= 10 ? `${one.toFixed(1)} s` : `${one.toFixed(2)} s`));

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function write(node, text) {
  if (node.textContent !== text) node.textContent = text; // what stays is not read aloud again
}

export function classed(node, name) {
  if (node.className !== name) node.className = name;
}

/** A table that keeps its rows from one news to the next. Roles: on a phone rows are cards. */
export class Table {
  constructor(columns, className = "cards") {
    this.columns = columns;
    this.rows = new Map();
    this.body = element("tbody");
    this.body.setAttribute("role", "rowgroup");
    this.caption = element("caption");
    const heads = columns.map((one) => {
      const head = element("th", { scope: "col", className: one.className ?? "", textContent: one.name });
      if (!one.name) head.append(element("span", { className: "skip", textContent: "chosen" }));
      head.setAttribute("role", "columnheader");
      return head;
    });
    const row = element("tr", {}, ...heads);
    row.setAttribute("role", "row");
    const head = element("thead", {}, row);
    head.setAttribute("role", "rowgroup");
    this.table = element("table", {}, this.caption, head, this.body);
    this.table.setAttribute("role", "table");
    this.node = element("div", { className: `scroll ${className}`, tabIndex: 0 }, this.table);
    this.node.setAttribute("role", "region");
  }

  named(name, shown) {
    this.node.setAttribute("aria-label", name);
    write(this.caption, shown ? name : "");
    this.caption.hidden = !shown;
    return this;
  }

  /** `key` names what a row is about: its row stays, and the rows stand in the given order. */
  show(items, key, decorate = () => {}) {
    const keys = new Set(items.map(key));
    for (const [name, row] of this.rows) {
      if (!keys.has(name)) {
        row.remove();
        this.rows.delete(name);
      }
    }
    items.forEach((item, place) => {
      let row = this.rows.get(key(item));
      if (!row) {
        row = this.newRow();
        this.rows.set(key(item), row);
      }
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
      this.columns.forEach((column, at) => column.fill(row.children[at], item));
      decorate(row, item);
    });
  }

  newRow() {
    const cells = this.columns.map((one) => {
      const cell = element(one.head ? "th" : "td", { className: one.className ?? "" });
      if (one.head) cell.scope = "row";
      cell.setAttribute("role", one.head ? "rowheader" : "cell");
      cell.dataset.label = one.name;
      return cell;
    });
    const row = element("tr", {}, ...cells);
    row.setAttribute("role", "row");
    return row;
  }
}

export const text = (name, value, more = {}) => ({ name, fill: (cell, item) => write(cell, value(item)), ...more });

/** Words that are cut where they are long. */
export const brief = (name, value) => ({
  name,
  className: "words",
  fill: (cell, item) => {
    if (!cell.firstChild) cell.append(element("span", { className: "brief" }));
    write(cell.firstChild, value(item));
  },
});

/** A figure with a bar under it that says the same. */
export const meter = (name, value, share) => ({
  name,
  fill: (cell, item) => {
    if (!cell.firstChild) {
      const bar = element("span", { className: "meter" }, element("i"));
      bar.setAttribute("aria-hidden", "true");
      cell.append(element("span"), bar);
    }
    write(cell.firstChild, value(item));
    const width = `${Math.round(Math.min(Math.max(share(item) ?? 0, 0), 1) * 100)}%`;
    const bar = cell.lastChild.firstChild;
    if (bar.style.width !== width) bar.style.width = width;
  },
});

/** Two lines: the second in small print. */
export const twoLines = (name, first, second, more = {}) => ({
  name,
  fill: (cell, item) => {
    if (!cell.firstChild) cell.append(element("span"), element("small"));
    write(cell.firstChild, first(item));
    write(cell.lastChild, second(item));
    cell.lastChild.hidden = !second(item);
    more.decorate?.(cell, item);
  },
  ...more,
});

/** The table of that name in `place`: made when it is first asked for. */
export function tableOf(tables, place, name, columns) {
  if (!tables.has(name)) {
    tables.set(name, new Table(columns));
    place.append(tables.get(name).node);
  }
  return tables.get(name);
}
